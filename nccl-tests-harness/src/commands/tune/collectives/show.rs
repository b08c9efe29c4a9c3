//! Shows the measurements as text and as JSON.

use super::options::Plan;
use super::sweep::{Outcome, Sweep};
use super::verdict::{Dropped, Finding, Judged};
use crate::output::numbers::{significant, spread};
use crate::output::table::{Table as Columns, left, right};
use proto::tuner::table::{Choice, Table};
use serde_json::{Value, json};
use std::io::{self, Write};

/// Makes the cells of a line: the size, NCCL's time, the choice `best` with its time and its gain
/// (or `-` for all three), and the remark `words`.
fn cells(bytes: u64, nccl_us: f64, best: Option<(Choice, f64)>, words: &str) -> [String; 6] {
    let (choice, us, gain) = match best {
        Some((choice, us)) => (
            choice.to_string(),
            significant(us),
            format!("{:.2}", nccl_us / us),
        ),
        None => ("-".to_owned(), "-".to_owned(), "-".to_owned()),
    };
    [
        bytes.to_string(),
        significant(nccl_us),
        choice,
        us,
        gain,
        words.to_owned(),
    ]
}

fn start<W: Write>(out: W, title: &str) -> io::Result<Columns<W>> {
    let mut table = Columns::new(
        out,
        "  ",
        [right(12), right(8), left(13), right(8), right(5), left(0)],
    );
    table.remark("")?;
    table.remark(title)?;
    table.head(&["size (B)", "NCCL us", "choice", "us", "gain"])?;
    Ok(table)
}

pub fn sweep(sweep: &Sweep<'_>, out: &mut impl Write) -> io::Result<()> {
    let rounds = sweep.single.nccl.rounds.len();
    let name = sweep.collective;
    let title =
        format!("{name}: median times, rounds: {rounds}; gain: NCCL's time / the choice's time");
    let mut table = start(out, &title)?;
    for &Judged {
        bytes,
        nccl_us,
        best,
        finding,
    } in &sweep.judged
    {
        table.row(&cells(bytes, nccl_us, best, finding.words()))?;
    }
    for record in &sweep.single.candidates {
        if let (Some(choice), Some(Dropped::Failed(reason))) = (record.choice, &record.dropped) {
            table.remark(&format!(
                "{choice} not measured further: {}",
                reason.lines().next().unwrap_or_default()
            ))?;
        }
    }
    let slow = sweep
        .single
        .candidates
        .iter()
        .filter(|record| record.dropped == Some(Dropped::Slow))
        .count();
    if slow > 0 {
        let count = sweep.single.candidates.len();
        table.remark(&format!(
            "candidates that were slow at every size: {slow} of {count}"
        ))?;
    }
    Ok(())
}

pub fn confirmation(sweep: &Sweep<'_>, out: &mut impl Write) -> io::Result<()> {
    let Some(confirmation) = &sweep.confirmation else {
        return Ok(());
    };
    let rounds = confirmation.nccl.rounds.len();
    let title = format!(
        "{}: the whole table against NCCL's choice, rounds: {rounds}",
        sweep.collective
    );
    let mut table = start(out, &title)?;
    for line in &confirmation.sizes {
        let words = match (line.row.map(|(_, finding)| finding), line.differs) {
            (Some(Finding::Better), _) => "row is written".to_owned(),
            (Some(Finding::NoCandidate), _) => "no row: a run failed".to_owned(),
            (Some(finding), _) => format!("no row: {}", finding.words()),
            (None, true) => "no row; times differ".to_owned(),
            (None, false) => "no row".to_owned(),
        };
        let best = line
            .row
            .map(|(choice, _)| (choice, confirmation.table.median(line.bytes)));
        let best = best.filter(|(_, us)| us.is_finite());
        table.row(&cells(
            line.bytes,
            confirmation.nccl.median(line.bytes),
            best,
            &words,
        ))?;
    }
    if let Some(Dropped::Failed(reason)) = &confirmation.table.dropped {
        table.remark(&format!(
            "no row is confirmed: {}",
            reason.lines().next().unwrap_or_default()
        ))?;
    }
    Ok(())
}

/// Makes the comment above the table in the settings file. `date` is today's date.
pub fn remark(outcome: &Outcome<'_>, date: &str) -> String {
    let &Outcome {
        facts,
        sweeps,
        learned_rows,
        kept_rows,
        ..
    } = outcome;
    let older = if kept_rows > 0 {
        format!("; older rows: {kept_rows}")
    } else {
        String::new()
    };
    if learned_rows == 0 {
        return format!("nothing new on {date}{older}");
    }
    let gains = sweeps
        .iter()
        .filter_map(|sweep| sweep.confirmation.as_ref())
        .flat_map(|confirmation| confirmation.gains());
    let (smallest, largest) = spread(&gains.collect::<Vec<_>>());
    let with_rows = |sweep: &&Sweep<'_>| {
        sweep
            .confirmation
            .as_ref()
            .is_some_and(|confirmation| confirmation.gains().next().is_some())
    };
    let names: Vec<String> = sweeps
        .iter()
        .filter(with_rows)
        .map(|sweep| sweep.collective.to_string())
        .collect();
    format!(
        "{}, {} ranks: {smallest:.2} to {largest:.2} times as fast as NCCL's choice ({}, measured {date}){older}",
        names.join(", "),
        facts.ranks,
        facts.fingerprint
    )
}

/// Makes the JSON of all results. A number that has a unit has the unit in its name.
pub fn json(plan: &Plan, outcome: &Outcome<'_>) -> Value {
    let &Outcome {
        fabric,
        facts,
        sweeps,
        table,
        ..
    } = outcome;
    json!({
        "command": "tune collectives",
        "version": env!("CARGO_PKG_VERSION"),
        "fabric_text": fabric,
        "fingerprint": facts.fingerprint.to_string(),
        "ranks": facts.ranks,
        "used": facts.used,
        "arguments": plan.arguments,
        "minimal_gain": plan.gain,
        "collectives": sweeps,
        "table": table.map(Table::to_string),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_a_terminal() {
        let mut out = Vec::new();
        let mut table = start(&mut out, "title").unwrap();
        let best = Some(("ring/ll128/16".parse().unwrap(), 1234.5));
        table
            .row(&cells(1 << 33, 123_456.7, best, "no row; times differ"))
            .unwrap();
        table.row(&cells(8192, 12.0, None, "no candidate")).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        assert!(
            text.lines().nth(3).unwrap().contains("ring/ll128/16") && text.contains("100.01"),
            "{text}"
        );
    }
}
