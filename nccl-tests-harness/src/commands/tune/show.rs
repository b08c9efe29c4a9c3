//! Prints what happens during tuning, and the results.

use super::judge::{Candidate, Record, Verdict};
use super::options::{FINAL_ROUNDS, Tune};
use crate::commands::collectives::messages::RunParameters;
use crate::output::numbers::{count, median, size, spread};
use crate::output::table::{Column, Table, right};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;

#[derive(Debug, Default, Serialize)]
pub struct TuneReport {
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

pub fn introduction(tune: &Tune, out: &mut impl Write) -> io::Result<()> {
    let RunParameters {
        ranks,
        channels,
        iters,
        ..
    } = tune.plan.terms;
    writeln!(
        out,
        "# nccl-spark {}: tune, with all-gather over host memory",
        env!("CARGO_PKG_VERSION")
    )?;
    writeln!(out, "# nRanks {ranks} nChannels {channels} iters: {iters}")?;
    let settings = count(tune.candidates.len(), "setting");
    let rounds = count(tune.rounds as usize, "round");
    writeln!(
        out,
        "# comparing {settings} with the defaults in {rounds}; at most {} runs",
        tune.runs()
    )?;
    out.flush()
}

/// Prints all settings that were tried: one line each, or more if there are many sizes.
pub fn table(report: &TuneReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "#\n# fabric: {}", report.fabric_text)?;
    writeln!(out, "# busbw in GB/s by size: median of the rounds")?;
    writeln!(
        out,
        "# score: busbw as % of the defaults', over all sizes: median, then min..max"
    )?;
    let sizes: Vec<String> = report
        .sizes_bytes
        .iter()
        .map(|bytes| size(*bytes))
        .collect();
    let mut table = Table::new(out, " ", COLUMNS);
    table.remark("")?;
    write_wrapped(
        ["QPs", "min share", "score", "min..max"].map(str::to_owned),
        &sizes,
        |cells| table.head(cells),
    )?;
    let reference = report.defaults.medians();
    for record in std::iter::once(&report.defaults).chain(&report.tried) {
        row(record, &reference, &mut table)?;
    }
    table.remark("")
}

fn row(record: &Record, reference: &[f64], table: &mut Table<impl Write>) -> io::Result<()> {
    let (qps, share) = match record.candidate {
        Some(Candidate {
            qps,
            min_share_bytes,
        }) => (qps.to_string(), size(min_share_bytes as usize)),
        None => ("default".to_owned(), "default".to_owned()),
    };
    if let Some(reason) = &record.failed {
        return table.row(&[
            qps,
            share,
            format!(" failed: {}", reason.lines().next().unwrap_or_default()),
        ]);
    }
    let scores = record.scores(reference);
    let (lowest, highest) = spread(&scores);
    let score = format!("{:.1}", median(&scores) * 100.0);
    let scores = format!("{:.1}..{:.1}", lowest * 100.0, highest * 100.0);
    let medians: Vec<String> = record
        .medians()
        .iter()
        .map(|gb_s| format!("{gb_s:.3}"))
        .collect();
    write_wrapped([qps, share, score, scores], &medians, |cells| {
        table.row(cells)
    })
}

/// Columns for queue pairs, minimum share, score and range of the scores, then one column for each
/// message size, as many as fit a line of 80 characters.
const COLUMNS: [Column; 4 + SIZES] = {
    let mut columns = [right(9); 4 + SIZES];
    columns[2] = right(6);
    columns[3] = right(12);
    columns
};
const SIZES: usize = 4;

/// Writes a line that has `start` and the first `SIZES` of `cells`. The other cells follow on lines
/// with an empty start.
fn write_wrapped(
    start: [String; 4],
    cells: &[String],
    mut write: impl FnMut(&[String]) -> io::Result<()>,
) -> io::Result<()> {
    cells
        .chunks(SIZES)
        .enumerate()
        .try_for_each(|(line, cells)| {
            let start = if line == 0 {
                start.clone()
            } else {
                Default::default()
            };
            write(&[start.as_slice(), cells].concat())
        })
}

pub fn verdict(
    report: &TuneReport,
    proposed: Candidate,
    verdict: &Verdict,
    out: &mut impl Write,
) -> io::Result<()> {
    let Candidate {
        qps,
        min_share_bytes,
    } = proposed;
    let gains = report.sizes_bytes.iter().zip(&verdict.gains);
    let gains: Vec<String> = gains
        .map(|(bytes, gain)| format!("{} {}", size(*bytes), percent(*gain)))
        .collect();
    let qps = count(usize::from(qps), "queue pair");
    writeln!(
        out,
        "# {qps} per rail, min share {}, compared with the defaults:",
        size(min_share_bytes as usize)
    )?;
    writeln!(
        out,
        "#   {} over all sizes; by size: {}",
        percent(verdict.gain),
        gains.join(", ")
    )?;
    writeln!(
        out,
        "#   {FINAL_ROUNDS} rounds each: lowest score {:.1} %, highest of the defaults {:.1} %",
        verdict.lowest * 100.0,
        verdict.highest_default * 100.0
    )?;
    let choice = match (verdict.holds, report.chosen) {
        (true, _) => "clear gain: using these settings",
        (false, Some(_)) => "no clear gain: using these settings because of --write-best",
        (false, None) => "no clear gain: keeping the defaults",
    };
    writeln!(out, "# {choice}")?;
    out.flush()
}

pub fn remark(report: &TuneReport, verdict: &Verdict) -> String {
    let first = report.sizes_bytes.first();
    let last = report.sizes_bytes.last();
    let size = |bytes: Option<&usize>| size(bytes.copied().unwrap_or_default());
    let gain = percent(verdict.gain);
    let ranks = report.ranks;
    format!(
        "{gain} over the defaults, all-gather of {} to {}, {ranks} ranks",
        size(first),
        size(last)
    )
}

fn percent(gain: f64) -> String {
    format!("{:+.1} %", gain * 100.0)
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
        let candidate = Some(Candidate {
            qps: 2,
            min_share_bytes: 32768,
        });
        let record = Record {
            candidate,
            rounds: vec![vec![1.5, 3.0], vec![3.0, 3.0]],
            failed: None,
        };
        let row = |record: &Record| {
            text(|out| row(record, &[1.0, 3.0], &mut Table::new(out, " ", COLUMNS)))
        };
        let words = row(&record)
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
            .join(" ");
        assert_eq!(words, "2 32K 147.8 122.5..173.2 2.250 3.000");
        let failed = Record {
            failed: Some("out of memory\nsecond line".into()),
            ..record
        };
        assert!(row(&failed).ends_with("32K  failed: out of memory\n"));
    }

    #[test]
    fn the_verdict_states_the_gain_by_size_and_the_action() {
        let proposed = Candidate {
            qps: 4,
            min_share_bytes: 8192,
        };
        let report = |chosen| TuneReport {
            sizes_bytes: vec![1 << 18, 1 << 20],
            ranks: 2,
            chosen,
            ..TuneReport::default()
        };
        let gain = Verdict {
            gain: 0.25,
            gains: vec![0.5, -0.01],
            lowest: 1.2,
            highest_default: 1.01,
            holds: true,
        };
        let shown = text(|out| verdict(&report(Some(proposed)), proposed, &gain, out));
        for part in [
            "4 queue pairs per rail, min share 8K",
            "+25.0 % over all sizes; by size: 256K +50.0 %, 1M -1.0 %",
            "using these settings",
        ] {
            assert!(shown.contains(part), "{shown}");
        }
        assert_eq!(
            remark(&report(None), &gain),
            "+25.0 % over the defaults, all-gather of 256K to 1M, 2 ranks"
        );
        let none = Verdict {
            holds: false,
            ..gain
        };
        assert!(
            text(|out| verdict(&report(None), proposed, &none, out))
                .contains("keeping the defaults")
        );
        assert!(
            text(|out| verdict(&report(Some(proposed)), proposed, &none, out))
                .contains("--write-best")
        );
    }

    #[test]
    fn many_sizes_are_folded_into_lines_of_80_columns() {
        let sizes_bytes: Vec<usize> = (0..9).map(|power| 1 << (12 + 2 * power)).collect();
        let round = vec![12.345; sizes_bytes.len()];
        let record = |candidate| Record {
            candidate,
            rounds: vec![round.clone()],
            failed: None,
        };
        let tried = vec![record(Some(Candidate {
            qps: 16,
            min_share_bytes: 131_072,
        }))];
        let report = TuneReport {
            sizes_bytes,
            defaults: record(None),
            tried,
            ..TuneReport::default()
        };
        let shown = text(|out| table(&report, out));
        assert!(shown.lines().all(|line| line.len() <= 80), "{shown}");
        let ends =
            |word: &str| shown.lines().find_map(|line| line.find(word)).unwrap() + word.len();
        assert_eq!(ends(" 4K"), ends("12.345"), "{shown}");
        assert_eq!(shown.matches("12.345").count(), 18, "{shown}");
    }
}
