//! A tuning in words and columns.

use super::judge::{self, Candidate, Record, Verdict};
use super::{FINAL_ROUNDS, Told, Tune};
use std::io::{self, Write};

/// What will be done.
///
/// # Errors
/// When `out` cannot be written.
pub fn introduction(tune: &Tune, out: &mut impl Write) -> io::Result<()> {
    let plan = &tune.plan;
    writeln!(out, "# nccl-spark {}: tune, with all-gather over host memory", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "# nRanks {} nChannels {} iters: {}", plan.ranks, plan.channels, plan.iters)?;
    let (count, rounds) = (tune.candidates.len(), tune.rounds);
    writeln!(out, "# {count} settings and the defaults, {rounds} rounds in turns")?;
    out.flush()
}

/// All that was tried.
///
/// # Errors
/// When `out` cannot be written.
pub fn table(told: &Told, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "#\n# fabric: {}", told.fabric_text)?;
    writeln!(
        out,
        "# busbw in GB/s by size: the median of the rounds; score: against the defaults, lowest and highest round"
    )?;
    let sizes: String = told.sizes_bytes.iter().map(|size| format!(" {:>9}", short(*size as u64))).collect();
    writeln!(out, "#\n# {:>7} {:>9}{sizes} {:>8} {:>17}", "QPs", "min share", "score", "rounds")?;
    let reference = told.defaults.medians();
    for record in std::iter::once(&told.defaults).chain(&told.tried) {
        row(record, &reference, out)?;
    }
    writeln!(out, "#")?;
    out.flush()
}

fn row(record: &Record, reference: &[f64], out: &mut impl Write) -> io::Result<()> {
    let (qps, share) = match record.candidate {
        Some(Candidate { qps, min_share_bytes }) => (qps.to_string(), short(min_share_bytes)),
        None => ("default".to_owned(), "default".to_owned()),
    };
    write!(out, "  {qps:>7} {share:>9}")?;
    if let Some(reason) = &record.failed {
        return writeln!(out, "  failed: {}", reason.lines().next().unwrap_or_default());
    }
    record.medians().iter().try_for_each(|bandwidth| write!(out, " {bandwidth:>9.3}"))?;
    let scores = record.scores(reference);
    let lowest = scores.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let rounds = format!("{:.1} to {:.1}", lowest * 100.0, highest * 100.0);
    writeln!(out, " {:>6.1} % {rounds:>17}", judge::median(scores) * 100.0)
}

/// What came of it.
///
/// # Errors
/// When `out` cannot be written.
pub fn verdict(told: &Told, proposed: Candidate, verdict: &Verdict, out: &mut impl Write) -> io::Result<()> {
    let Candidate { qps, min_share_bytes } = proposed;
    let gains = told.sizes_bytes.iter().zip(&verdict.gains);
    let gains: Vec<String> = gains.map(|(size, gain)| format!("{} {}", short(*size as u64), percent(*gain))).collect();
    writeln!(out, "# {qps} queue pairs, shares of {} or more, against the defaults:", short(min_share_bytes))?;
    writeln!(out, "#   {} in all; by size: {}", percent(verdict.gain), gains.join(", "))?;
    writeln!(
        out,
        "#   {FINAL_ROUNDS} rounds each: their lowest score is {:.1} %, the highest of the defaults {:.1} %",
        verdict.lowest * 100.0,
        verdict.highest_default * 100.0
    )?;
    let choice = match (verdict.holds, told.chosen) {
        (true, _) => "that is a gain: they are chosen",
        (false, Some(_)) => "that is no clear gain; they are chosen all the same (--write-best)",
        (false, None) => "that is no clear gain: the defaults stay",
    };
    writeln!(out, "# {choice}")?;
    out.flush()
}

/// What the settings file says of its settings.
pub fn remark(told: &Told, verdict: &Verdict) -> String {
    let (first, last) = (told.sizes_bytes.first(), told.sizes_bytes.last());
    let size = |size: Option<&usize>| short(size.copied().unwrap_or_default() as u64);
    let (gain, ranks) = (percent(verdict.gain), told.ranks);
    format!("{gain} over the defaults, all-gather of {} to {}, {ranks} ranks", size(first), size(last))
}

fn percent(gain: f64) -> String {
    format!("{:+.1} %", gain * 100.0)
}

/// A size as the options take it.
fn short(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(write: impl Fn(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        write(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_row_shows_the_medians_and_how_far_rounds_lie_apart() {
        let candidate = Some(Candidate { qps: 2, min_share_bytes: 32768 });
        let record = Record { candidate, rounds: vec![vec![1.5, 3.0], vec![3.0, 3.0]], failed: None };
        let row = |record: &Record| text(|out| row(record, &[1.0, 3.0], out));
        let words = row(&record).split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(words, "2 32K 2.250 3.000 147.8 % 122.5 to 173.2");
        let failed = Record { failed: Some("no room\nmore".into()), ..record };
        assert!(row(&failed).ends_with("32K  failed: no room\n"));
    }

    #[test]
    fn the_verdict_tells_the_gain_by_size_and_what_is_done() {
        let proposed = Candidate { qps: 4, min_share_bytes: 8192 };
        let told = |chosen| Told { sizes_bytes: vec![1 << 18, 1 << 20], ranks: 2, chosen, ..Told::default() };
        let gain = Verdict { gain: 0.25, gains: vec![0.5, -0.01], lowest: 1.2, highest_default: 1.01, holds: true };
        let said = text(|out| verdict(&told(Some(proposed)), proposed, &gain, out));
        for part in ["4 queue pairs, shares of 8K", "+25.0 % in all; by size: 256K +50.0 %, 1M -1.0 %", "are chosen"] {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(remark(&told(None), &gain), "+25.0 % over the defaults, all-gather of 256K to 1M, 2 ranks");
        let none = Verdict { holds: false, ..gain };
        assert!(text(|out| verdict(&told(None), proposed, &none, out)).contains("the defaults stay"));
        assert!(text(|out| verdict(&told(Some(proposed)), proposed, &none, out)).contains("--write-best"));
    }

    #[test]
    fn sizes_are_short_where_that_loses_nothing() {
        assert_eq!([100, 8192, 1 << 20, 1_500_000].map(short), ["100", "8K", "1M", "1500000"]);
    }
}
