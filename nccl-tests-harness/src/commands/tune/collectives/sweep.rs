//! The measurements of a run, by collective, and its results.

use super::measure::Facts;
use super::rows;
use super::verdict::{Finding, Judged, Measured, Record};
use nccl_net_spark::tuner::table::{Choice, Collective, Row};
use std::path::PathBuf;

/// The measurements of one collective.
pub struct Sweep {
    pub collective: Collective,
    pub program: PathBuf,
    pub alone: Measured,
    pub groups: Vec<Measured>,
    pub judged: Vec<Judged>,
    /// Only where a candidate won a size.
    pub again: Option<Confirmation>,
}

/// The whole table against NCCL's choice.
pub struct Confirmation {
    pub nccl: Record,
    pub table: Record,
    pub lines: Vec<Confirmed>,
}

/// The confirmation of one size.
pub struct Confirmed {
    pub bytes: u64,
    /// What the table chooses, and whether that is better.
    pub row: Option<(Choice, Finding)>,
    /// Whether the times differ clearly, in either direction.
    pub differs: bool,
}

impl Confirmed {
    /// The choice that gets a row.
    pub fn choice(&self) -> Option<Choice> {
        self.row.filter(|(_, finding)| *finding == Finding::Better).map(|(choice, _)| choice)
    }
}

impl Confirmation {
    /// NCCL's time over the table's, for each size whose row is confirmed.
    pub fn gains(&self) -> impl Iterator<Item = f64> {
        let rows = self.lines.iter().filter(|line| line.choice().is_some());
        rows.map(|line| self.nccl.median(line.bytes) / self.table.median(line.bytes))
    }
}

impl Sweep {
    /// The rows of the winners, before the confirmation.
    pub fn proposed(&self, ranks: usize) -> Vec<Row> {
        let choice =
            |judged: &Judged| judged.best.filter(|_| judged.finding == Finding::Better).map(|(choice, _)| choice);
        let sizes: Vec<_> = self.judged.iter().map(|judged| (judged.bytes, choice(judged))).collect();
        rows::rows(self.collective, ranks, &sizes)
    }

    /// The rows that are confirmed.
    pub fn confirmed(&self, ranks: usize) -> Vec<Row> {
        let lines = self.again.iter().flat_map(|again| &again.lines);
        let sizes: Vec<_> = lines.map(|line| (line.bytes, line.choice())).collect();
        rows::rows(self.collective, ranks, &sizes)
    }
}

/// The results.
pub struct Outcome<'a> {
    pub facts: &'a Facts,
    pub sweeps: &'a [Sweep],
    /// Rows that this run found.
    pub learned: usize,
    /// Older rows that stay, of other collectives or other numbers of ranks.
    pub kept: usize,
}
