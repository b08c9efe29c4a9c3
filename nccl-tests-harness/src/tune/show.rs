//! What is printed while and after tuning.

use super::judge::{self, Candidate, Record, Verdict};
use super::options::{FINAL_ROUNDS, Tune};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;

/// The results as JSON.
#[derive(Debug, Default, Serialize)]
pub struct Told {
    pub(super) version: &'static str,
    pub(super) fabric_text: String,
    pub(super) ranks: usize,
    pub(super) channels: usize,
    pub(super) sizes_bytes: Vec<usize>,
    pub(super) defaults: Record,
    pub(super) tried: Vec<Record>,
    pub(super) proposed: Option<Candidate>,
    pub(super) verdict: Option<Verdict>,
    pub(super) chosen: Option<Candidate>,
    pub(super) written: Option<PathBuf>,
}

/// What will be measured.
///
/// # Errors
/// When `out` cannot be written.
pub fn introduction(tune: &Tune, out: &mut impl Write) -> io::Result<()> {
    let plan = &tune.plan;
    writeln!(out, "# nccl-spark {}: tune, with all-gather over host memory", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "# nRanks {} nChannels {} iters: {}", plan.ranks, plan.channels, plan.iters)?;
    let (count, rounds, runs) = (tune.candidates.len(), tune.rounds, tune.runs());
    writeln!(out, "# {count} settings and the defaults, rounds: {rounds}; at most {runs} runs in all")?;
    out.flush()
}

/// All settings that were tried: a line each, or where there are many sizes as many lines as they need.
///
/// # Errors
/// When `out` cannot be written.
pub fn table(told: &Told, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "#\n# fabric: {}", told.fabric_text)?;
    writeln!(out, "# busbw in GB/s by size: median of the rounds")?;
    writeln!(out, "# score: busbw of all sizes in % of the defaults', median and min..max")?;
    let sizes: Vec<String> = told.sizes_bytes.iter().map(|size| short(*size as u64)).collect();
    let head = format!("# {:>7} {:>9} {:>6} {:>12}", "QPs", "min share", "score", "min..max");
    writeln!(out, "#")?;
    folded(&head, &sizes, out)?;
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
    let start = format!("  {qps:>7} {share:>9}");
    if let Some(reason) = &record.failed {
        return writeln!(out, "{start}  failed: {}", reason.lines().next().unwrap_or_default());
    }
    let scores = record.scores(reference);
    let lowest = scores.iter().copied().fold(f64::INFINITY, f64::min);
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let rounds = format!("{:.1}..{:.1}", lowest * 100.0, highest * 100.0);
    let start = format!("{start} {:>6.1} {rounds:>12}", judge::median(scores) * 100.0);
    let medians: Vec<String> = record.medians().iter().map(|gb_s| format!("{gb_s:.3}")).collect();
    folded(&start, &medians, out)
}

/// Columns of a line of 80.
const LINE: usize = 80;
/// A size's column.
const SIZE: usize = 9;

/// A line of cells after `start`, continued below where they do not fit.
fn folded(start: &str, cells: &[String], out: &mut impl Write) -> io::Result<()> {
    let indent = format!("{}{}", &start[..1], " ".repeat(start.len() - 1));
    for (at, cells) in cells.chunks((LINE - start.len()) / (SIZE + 1)).enumerate() {
        let row: String = cells.iter().map(|cell| format!(" {cell:>SIZE$}")).collect();
        writeln!(out, "{}{row}", if at == 0 { start } else { &indent })?;
    }
    Ok(())
}

/// Whether the proposed settings are better than the defaults, and what is done.
///
/// # Errors
/// When `out` cannot be written.
pub fn verdict(told: &Told, proposed: Candidate, verdict: &Verdict, out: &mut impl Write) -> io::Result<()> {
    let Candidate { qps, min_share_bytes } = proposed;
    let gains = told.sizes_bytes.iter().zip(&verdict.gains);
    let gains: Vec<String> = gains.map(|(size, gain)| format!("{} {}", short(*size as u64), percent(*gain))).collect();
    let qps = format!("{qps} queue pair{} per rail", if qps == 1 { "" } else { "s" });
    writeln!(out, "# {qps}, parts of {} or more, compared with the defaults:", short(min_share_bytes))?;
    writeln!(out, "#   {} over all sizes; by size: {}", percent(verdict.gain), gains.join(", "))?;
    writeln!(
        out,
        "#   {FINAL_ROUNDS} rounds each: their lowest score {:.1} %, the defaults' highest {:.1} %",
        verdict.lowest * 100.0,
        verdict.highest_default * 100.0
    )?;
    let choice = match (verdict.holds, told.chosen) {
        (true, _) => "a clear gain: these settings are chosen",
        (false, Some(_)) => "no clear gain; these settings are chosen because of --write-best",
        (false, None) => "no clear gain: the defaults stay",
    };
    writeln!(out, "# {choice}")?;
    out.flush()
}

/// The comment above the settings in the file.
pub fn remark(told: &Told, verdict: &Verdict) -> String {
    let (first, last) = (told.sizes_bytes.first(), told.sizes_bytes.last());
    let size = |size: Option<&usize>| short(size.copied().unwrap_or_default() as u64);
    let (gain, ranks) = (percent(verdict.gain), told.ranks);
    format!("{gain} over the defaults, all-gather of {} to {}, {ranks} ranks", size(first), size(last))
}

fn percent(gain: f64) -> String {
    format!("{:+.1} %", gain * 100.0)
}

/// A size as the options take it, with K or M.
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
    fn a_row_shows_the_score_with_its_range_and_the_medians() {
        let candidate = Some(Candidate { qps: 2, min_share_bytes: 32768 });
        let record = Record { candidate, rounds: vec![vec![1.5, 3.0], vec![3.0, 3.0]], failed: None };
        let row = |record: &Record| text(|out| row(record, &[1.0, 3.0], out));
        let words = row(&record).split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(words, "2 32K 147.8 122.5..173.2 2.250 3.000");
        let failed = Record { failed: Some("no room\nmore".into()), ..record };
        assert!(row(&failed).ends_with("32K  failed: no room\n"));
    }

    #[test]
    fn the_verdict_tells_the_gain_by_size_and_what_is_done() {
        let proposed = Candidate { qps: 4, min_share_bytes: 8192 };
        let told = |chosen| Told { sizes_bytes: vec![1 << 18, 1 << 20], ranks: 2, chosen, ..Told::default() };
        let gain = Verdict { gain: 0.25, gains: vec![0.5, -0.01], lowest: 1.2, highest_default: 1.01, holds: true };
        let said = text(|out| verdict(&told(Some(proposed)), proposed, &gain, out));
        for part in [
            "4 queue pairs per rail, parts of 8K",
            "+25.0 % over all sizes; by size: 256K +50.0 %, 1M -1.0 %",
            "are chosen",
        ] {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(remark(&told(None), &gain), "+25.0 % over the defaults, all-gather of 256K to 1M, 2 ranks");
        let none = Verdict { holds: false, ..gain };
        assert!(text(|out| verdict(&told(None), proposed, &none, out)).contains("the defaults stay"));
        assert!(text(|out| verdict(&told(Some(proposed)), proposed, &none, out)).contains("--write-best"));
    }

    #[test]
    fn many_sizes_are_folded_into_lines_of_80_columns() {
        let sizes_bytes: Vec<usize> = (0..9).map(|power| 1 << (12 + 2 * power)).collect();
        let round = vec![12.345; sizes_bytes.len()];
        let record = |candidate| Record { candidate, rounds: vec![round.clone()], failed: None };
        let tried = vec![record(Some(Candidate { qps: 16, min_share_bytes: 131_072 }))];
        let told = Told { sizes_bytes, defaults: record(None), tried, ..Told::default() };
        let said = text(|out| table(&told, out));
        assert!(said.lines().all(|line| line.len() <= 80), "{said}");
        let ends = |word: &str| said.lines().find_map(|line| line.find(word)).unwrap() + word.len();
        assert_eq!(ends(" 4K"), ends("12.345"), "{said}");
        assert_eq!(said.matches("12.345").count(), 18, "{said}");
    }

    #[test]
    fn sizes_are_short_where_that_loses_nothing() {
        assert_eq!([100, 8192, 1 << 20, 1_500_000].map(short), ["100", "8K", "1M", "1500000"]);
    }
}
