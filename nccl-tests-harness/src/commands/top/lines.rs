//! Prints one reading of the counters as plain lines, for output that is not a terminal. Each row
//! begins with its process id.

use super::columns::{self, mark, none};
use super::look::SkippedProcess;
use super::rates::{Job, Port, Snapshot};
use super::rows::{self, Row};
use crate::output::numbers::{count, significant};
use crate::output::table::{Column, Table, left, right};
use host::counters::nic;
use std::io::{self, Write};

#[derive(Debug, Default)]
pub struct Lines {
    /// Remarks on the previous reading. A remark that still applies is not printed again.
    remarks: Vec<String>,
}

impl Lines {
    pub fn write(
        &mut self,
        out: impl Write,
        snapshot: &Snapshot,
        by_peer: bool,
        moment: &str,
    ) -> io::Result<()> {
        let mut widths: Vec<Column> = vec![right(8), right(5), left(15), left(16), left(16)];
        widths.extend(columns::ALL.map(|column| right(column.width)));
        widths.push(left(4));
        let mut table = Table::new(out, "  ", widths);
        table.remark(&format!("{moment}: {}", count(snapshot.jobs.len(), "job")))?;
        let remarks = remarks(snapshot);
        for remark in remarks
            .iter()
            .filter(|remark| !self.remarks.contains(remark))
        {
            table.remark(remark)?;
        }
        self.remarks = remarks;
        if snapshot.jobs.is_empty() {
            return Ok(());
        }
        let mut names = vec!["pid", "rank", "command", "peer", "rail"];
        names.extend(columns::ALL.map(|column| column.name));
        table.head(&names)?;
        for (job, rows) in rows::of_snapshot(snapshot, by_peer) {
            for row in &rows {
                table.row(&cells(job, row))?;
            }
        }
        Ok(())
    }
}

fn cells(job: &Job, row: &Row) -> Vec<String> {
    let or_all = |name: &Option<String>| name.clone().unwrap_or_else(|| "all".to_owned());
    let rank = job.seen.rank.map_or_else(none, |rank| rank.to_string());
    // Programs that split the lines expect one word in each cell.
    let command = job.seen.command.replace(' ', "_");
    let mut cells = vec![
        job.seen.pid.to_string(),
        rank,
        command,
        or_all(&row.peer),
        or_all(&row.rail),
    ];
    cells.extend(columns::ALL.map(|column| {
        Some(column.text(row))
            .filter(|text| !text.is_empty())
            .unwrap_or_else(none)
    }));
    cells.push(mark(row.condition).1.to_owned());
    cells
}

/// Returns remarks on ports that have counted errors since the previous reading, and on processes
/// and lanes that are not shown.
pub fn remarks(snapshot: &Snapshot) -> Vec<String> {
    let mut remarks: Vec<String> = snapshot.ports.iter().filter_map(errors).collect();
    remarks.extend(hidden(snapshot.hidden, nix::unistd::geteuid().is_root()));
    remarks.extend(
        snapshot
            .passed_over
            .iter()
            .map(|SkippedProcess { pid, reason }| format!("process {pid}: {reason}")),
    );
    if !snapshot.uncounted.is_empty() {
        remarks.push(format!(
            "no counters of {}: {}",
            snapshot.uncounted.join(", "),
            nic::NONE
        ));
    }
    for job in &snapshot.jobs {
        let pid = job.seen.pid;
        let lanes = job.seen.counters.not_counted;
        if let Some(pinned) = job.seen.pinned_bytes.filter(|bytes| *bytes > 0) {
            remarks.push(format!(
                "process {pid}: {} MB of memory pinned for devices",
                pinned / 1_000_000
            ));
        }
        if job.seen.holds_cpu_latency == Some(true) {
            remarks.push(format!(
                "process {pid}: keeps processors out of deep sleep (/dev/cpu_dma_latency)"
            ));
        }
        if lanes > 0 {
            remarks.push(format!(
                "process {pid}: {lanes} lanes have no record: its counters file is full"
            ));
        }
    }
    remarks
}

fn errors(port: &Port) -> Option<String> {
    let errors = port
        .per_s
        .iter()
        .flatten()
        .filter(|(name, _)| nic::is_error(name));
    let texts: Vec<String> = errors
        .map(|(name, rate)| format!("{} {name}/s", significant(*rate)))
        .collect();
    (!texts.is_empty()).then(|| format!("port {}: {}", port.rail, texts.join(", ")))
}

fn hidden(processes: usize, is_root: bool) -> Option<String> {
    let cure = match (processes, is_root) {
        (0, _) => return None,
        (_, false) => "run with sudo",
        (_, true) => "CAP_SYS_PTRACE is missing",
    };
    let (processes, users) = match processes {
        1 => ("1 process".to_owned(), "another user"),
        _ => (format!("{processes} processes"), "other users"),
    };
    Some(format!("{processes} of {users} cannot be read: {cure}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rows::tests::{flow, job, port};
    use host::counters::layout::Direction;

    #[test]
    fn each_line_has_all_fields_and_remarks_are_printed_once() {
        let mut snapshot = Snapshot {
            jobs: vec![job(
                4711,
                vec![flow("r0", "b", Direction::Send, 125_000_000)],
            )],
            ..Snapshot::default()
        };
        snapshot.jobs[0].seen.command = "a b".to_owned();
        snapshot.hidden = 12;
        snapshot.passed_over = vec![SkippedProcess {
            pid: 9,
            reason: "a reason".to_owned(),
        }];
        let mut lines = Lines::default();
        let mut first = Vec::new();
        let mut second = Vec::new();
        lines.write(&mut first, &snapshot, false, "now").unwrap();
        lines.write(&mut second, &snapshot, true, "then").unwrap();
        let first = String::from_utf8(first).unwrap();
        let second = String::from_utf8(second).unwrap();
        assert!(
            first.starts_with("# now: 1 job\n# 12 processes of other users cannot be read: "),
            "{first}"
        );
        assert!(
            first.contains("# process 9: a reason\n") && !second.contains("a reason"),
            "{first}{second}"
        );
        let rows: Vec<Vec<&str>> = second
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(rows.len(), 3, "{second}");
        assert!(rows.iter().all(|row| row.len() == 17), "{second}");
        assert_eq!(
            rows[0][..9],
            [
                "4711", "-", "a_b", "all", "all", "1.00", "0", "100.0", "1/1"
            ]
        );
        assert_eq!((rows[1][3], rows[2][3], rows[2][4]), ("b", "b", "r0"));
    }

    #[test]
    fn a_port_with_errors_gets_a_remark() {
        let mut packets = port(1.0);
        packets.per_s = Some([("port_xmit_packets".to_owned(), 5.0)].into());
        let snapshot = Snapshot {
            ports: vec![port(7.5), packets],
            ..Snapshot::default()
        };
        assert_eq!(remarks(&snapshot), ["port r0: 7.50 packet_seq_err/s"]);
    }

    #[test]
    fn missing_permissions_are_reported_with_the_cure() {
        assert_eq!(hidden(0, false), None);
        assert_eq!(
            hidden(1, false).unwrap(),
            "1 process of another user cannot be read: run with sudo"
        );
        assert_eq!(
            hidden(3, true).unwrap(),
            "3 processes of other users cannot be read: CAP_SYS_PTRACE is missing"
        );
    }
}
