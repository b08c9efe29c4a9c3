//! The figures of a row as text, for the terminal and for plain lines. This module does no I/O.

use super::rows::{Condition, Row};
use crate::output::numbers::significant;

#[derive(Debug, Clone, Copy)]
pub struct Column {
    pub name: &'static str,
    /// Width in characters, with room for the name and the usual figures.
    pub width: usize,
    /// Order of importance, 0 first. A narrow terminal omits the columns with the greatest numbers.
    pub place: usize,
    text: fn(&Row) -> String,
}

pub const ALL: [Column; 12] = [
    Column {
        name: "out Gb/s",
        width: 8,
        place: 0,
        text: |row| gigabits(row.sent.bytes_per_s),
    },
    Column {
        name: "in Gb/s",
        width: 8,
        place: 1,
        text: |row| gigabits(row.received.bytes_per_s),
    },
    Column {
        name: "share %",
        width: 7,
        place: 3,
        text: |row| row.share_percent.map_or_else(none, tenths),
    },
    Column {
        name: "carry",
        width: 9,
        place: 2,
        text: carry,
    },
    Column {
        name: "mean us",
        width: 8,
        place: 5,
        text: |row| row.mean_latency_us.map_or_else(none, significant),
    },
    Column {
        name: "longest us",
        width: 10,
        place: 8,
        text: longest,
    },
    Column {
        name: "losses",
        width: 6,
        place: 4,
        text: |row| row.losses.to_string(),
    },
    Column {
        name: "returns",
        width: 7,
        place: 7,
        text: |row| row.recoveries.to_string(),
    },
    Column {
        name: "lost s",
        width: 7,
        place: 9,
        text: |row| tenths(row.lost_s),
    },
    Column {
        name: "stalls",
        width: 6,
        place: 6,
        text: |row| row.stalls.map_or_else(String::new, |it| it.to_string()),
    },
    Column {
        name: "stalled s",
        width: 9,
        place: 10,
        text: |row| row.stalled_s.map_or_else(String::new, tenths),
    },
    Column {
        name: "stuck",
        width: 16,
        place: 11,
        text: |row| row.stall_cause.unwrap_or_default().to_owned(),
    },
];

impl Column {
    /// Returns the figure, or `#` signs if it is wider than the column.
    pub fn text(&self, row: &Row) -> String {
        let text = (self.text)(row);
        if text.len() > self.width {
            "#".repeat(self.width)
        } else {
            text
        }
    }
}

/// Returns the mark of a row for terminals without colours, and the word for plain lines.
pub fn mark(condition: Condition) -> (&'static str, &'static str) {
    match condition {
        Condition::Good => (" ", ""),
        Condition::Slow => ("~", "slow"),
        Condition::Lost => ("!", "LOST"),
    }
}

pub fn none() -> String {
    "-".to_owned()
}

fn gigabits(bytes_per_s: Option<f64>) -> String {
    bytes_per_s.map_or_else(none, |bytes| significant(bytes * 8.0 / 1e9))
}

fn carry(row: &Row) -> String {
    let (connections, carrying) = row.connections();
    format!("{carrying}/{connections}")
}

fn longest(row: &Row) -> String {
    if row.longest_latency_us == 0.0 {
        none()
    } else {
        significant(row.longest_latency_us)
    }
}

fn tenths(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rows::of_job;
    use crate::commands::top::rows::tests::{flow, job};
    use host::counters::layout::{Counts, Direction};
    use proto::flow::stall::Cause;

    #[test]
    fn figures_have_their_units() {
        let mut flow = flow("r0", "b", Direction::Send, 1_250_000_000);
        flow.side.total = Counts {
            losses: 3,
            recoveries: 2,
            lost_ns: 1_500_000_000,
            stalls: 4,
            stalled_ns: 9_000_000_000,
            ..flow.side.total
        };
        flow.side.stall = Some(Cause::NotAcknowledged);
        let rows = of_job(&job(1, vec![flow]), false);
        let texts = |row: &Row| ALL.map(|column| column.text(row));
        assert_eq!(
            texts(&rows[0]),
            [
                "10.0",
                "0",
                "100.0",
                "1/1",
                "25.0",
                "50.0",
                "3",
                "2",
                "1.5",
                "4",
                "9.0",
                "not-acknowledged"
            ]
        );
        assert_eq!(texts(&rows[1])[9..], ["", "", ""]);
    }

    #[test]
    fn a_wide_figure_is_not_cut() {
        let mut flow = flow("r0", "b", Direction::Send, u64::MAX);
        flow.side.total.losses = u64::MAX;
        let rows = of_job(&job(1, vec![flow]), false);
        assert_eq!(
            ALL.map(|column| column.text(&rows[0])[..].to_owned())[6],
            "######"
        );
        assert!(
            ALL.iter()
                .all(|column| column.text(&rows[0]).len() <= column.width
                    && column.name.len() <= column.width.max(8) + 2)
        );
    }
}
