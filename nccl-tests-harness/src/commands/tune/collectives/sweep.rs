//! The measurements of a `tune collectives` run, by collective, and the results of the run.

use super::measure::Facts;
use super::rows;
use super::verdict::{Finding, Judged, Measured, Record};
use proto::tuner::table::{Choice, Collective, Row, Table};
use serde::{Serialize, Serializer};
use serde_json::json;
use std::path::Path;

#[derive(Serialize)]
pub struct Sweep<'a> {
    #[serde(serialize_with = "super::verdict::text")]
    pub collective: Collective,
    #[serde(skip)]
    pub program: &'a Path,
    #[serde(flatten)]
    pub single: Measured,
    pub groups: Vec<Measured>,
    #[serde(rename = "sizes")]
    pub judged: Vec<Judged>,
    /// The second measurement, which is made with the whole table. `None` if no candidate won at
    /// any size.
    pub confirmation: Option<Confirmation>,
}

#[derive(Serialize)]
pub struct Confirmation {
    pub nccl: Record,
    pub table: Record,
    pub sizes: Vec<Confirmed>,
}

pub struct Confirmed {
    pub bytes: u64,
    /// The choice of the table's row for this size, and how the table compares with NCCL's choice.
    /// `None` if the table has no row for this size.
    pub row: Option<(Choice, Finding)>,
    /// True if the times with the table and with NCCL's choice differ clearly, in either direction.
    pub differs: bool,
}

impl Confirmed {
    pub fn choice(&self) -> Option<Choice> {
        self.row
            .filter(|(_, finding)| *finding == Finding::Better)
            .map(|(choice, _)| choice)
    }
}

impl Serialize for Confirmed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        json!({
            "bytes": self.bytes,
            "choice": self.row.map(|(choice, _)| choice.to_string()),
            "finding": self.row.map(|(_, finding)| finding.words()),
            "differs": self.differs,
            "row_is_written": self.choice().is_some(),
        })
        .serialize(serializer)
    }
}

impl Confirmation {
    /// Returns NCCL's time divided by the table's time, for each size with a confirmed row.
    pub fn gains(&self) -> impl Iterator<Item = f64> {
        let rows = self.sizes.iter().filter(|line| line.choice().is_some());
        rows.map(|line| self.nccl.median(line.bytes) / self.table.median(line.bytes))
    }
}

impl Sweep<'_> {
    pub fn proposed(&self, ranks: usize) -> Vec<Row> {
        let choice = |judged: &Judged| {
            judged
                .best
                .filter(|_| judged.finding == Finding::Better)
                .map(|(choice, _)| choice)
        };
        let sizes: Vec<_> = self
            .judged
            .iter()
            .map(|judged| (judged.bytes, choice(judged)))
            .collect();
        rows::rows(self.collective, ranks, &sizes)
    }

    pub fn confirmed(&self, ranks: usize) -> Vec<Row> {
        let lines = self
            .confirmation
            .iter()
            .flat_map(|confirmation| &confirmation.sizes);
        let sizes: Vec<_> = lines.map(|line| (line.bytes, line.choice())).collect();
        rows::rows(self.collective, ranks, &sizes)
    }
}

pub struct Outcome<'a> {
    pub fabric: &'a str,
    pub facts: &'a Facts,
    pub sweeps: &'a [Sweep<'a>],
    pub learned_rows: usize,
    /// Number of rows that stay from the older table, because they are for other collectives or
    /// other numbers of ranks.
    pub kept_rows: usize,
    pub table: Option<&'a Table>,
}
