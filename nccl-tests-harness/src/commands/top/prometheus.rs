//! The metrics file for node_exporter's textfile collector.

use super::rates::{Job, Snapshot};
use super::rows::{self, Row};
use crate::output::replacement;
use Value::{Count, Seconds};
use anyhow::{Context, Result};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeGaugeValue, GaugeValueEncoder, prometheus_text,
};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge};
use prometheus_client::registry::Registry;
use std::borrow::Cow;
use std::fmt;
use std::fs;
use std::path::PathBuf;

/// Name (without prefix, and without the `_total` of counters), type, help text, and the function
/// that takes the value from a row.
type Metric = (&'static str, MetricType, &'static str, fn(&Row) -> Value);

const OF_RAILS: [Metric; 13] = [
    (
        "rail_sent_bytes",
        Counter,
        "Payload bytes sent by a rail and confirmed.",
        |row| Count(row.sent.total.bytes),
    ),
    (
        "rail_received_bytes",
        Counter,
        "Payload bytes received by a rail.",
        |row| Count(row.received.total.bytes),
    ),
    (
        "rail_sent_writes",
        Counter,
        "RDMA writes that carried the sent bytes.",
        |row| Count(row.sent.total.writes),
    ),
    (
        "rail_received_writes",
        Counter,
        "RDMA writes that carried the received bytes.",
        |row| Count(row.received.total.writes),
    ),
    (
        "rail_timed_writes",
        Counter,
        "Sent writes that were timed.",
        |row| Count(row.sent.total.timed_writes),
    ),
    (
        "rail_timed_write_seconds",
        Counter,
        "Time from post to confirmation of the timed writes.",
        |row| Seconds(row.sent.total.timed_ns as f64 / 1e9),
    ),
    (
        "rail_longest_write_seconds",
        Gauge,
        "Longest time from post to confirmation of a timed write.",
        |row| Seconds(row.sent.total.longest_ns as f64 / 1e9),
    ),
    (
        "rail_losses",
        Counter,
        "Times that a connection lost a rail.",
        |row| Count(row.losses),
    ),
    (
        "rail_recoveries",
        Counter,
        "Times that a lost rail carried again for a connection.",
        |row| Count(row.recoveries),
    ),
    (
        "rail_lost_seconds",
        Counter,
        "Time for which connections had lost a rail, until its last recovery.",
        |row| Seconds(row.lost_s),
    ),
    (
        "rail_connections",
        Gauge,
        "Open connections that have a rail.",
        |row| Count(row.connections().0 as u64),
    ),
    (
        "rail_carrying_connections",
        Gauge,
        "Open connections that a rail carries for.",
        |row| Count(row.connections().1 as u64),
    ),
    (
        "rail_payload_bytes_per_second",
        Gauge,
        "Payload rate that a rail can carry; 0 if it is not known.",
        |row| Count(row.bits_per_s() / 8),
    ),
];

const OF_PEERS: [Metric; 2] = [
    (
        "peer_stalls",
        Counter,
        "Times that a request made no progress for a second or longer.",
        |row| Count(row.stalls.unwrap_or_default()),
    ),
    (
        "peer_stalled_seconds",
        Counter,
        "Time for which requests made no progress.",
        |row| Seconds(row.stalled_s.unwrap_or_default()),
    ),
];

enum Value {
    Count(u64),
    Seconds(f64),
}

impl EncodeGaugeValue for Value {
    fn encode(&self, encoder: &mut GaugeValueEncoder) -> fmt::Result {
        match self {
            Count(count) => count.encode(encoder),
            Seconds(seconds) => seconds.encode(encoder),
        }
    }
}

impl Collector for Snapshot {
    /// Writes every time series once, because node_exporter's collector drops a file with
    /// duplicates. Omits families without series.
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let jobs = rows::of_snapshot(self, true);
        let mut gauge = |name, help, value: usize| {
            encoder
                .encode_descriptor(name, help, None, Gauge)?
                .encode_gauge(&Count(value as u64))
        };
        gauge(
            "jobs",
            "Processes with connections of this network.",
            jobs.len(),
        )?;
        gauge(
            "hidden_processes",
            "Processes that could not be read.",
            self.hidden,
        )?;
        if !self.ports.is_empty() {
            let help =
                "Counters of a rail's port since the driver was loaded, for all of its users.";
            let mut family = encoder.encode_descriptor("port_counter", help, None, Counter)?;
            let counters = self
                .ports
                .iter()
                .flat_map(|port| port.counters.iter().map(move |counter| (port, counter)));
            for (port, (name, value)) in counters {
                let labels = [("rail", port.rail.as_str()), ("counter", name.as_str())];
                family
                    .encode_family(&labels)?
                    .encode_gauge(&Count(*value))?;
            }
        }
        let rows = || {
            jobs.iter()
                .flat_map(|(job, rows)| rows.iter().map(move |row| (*job, row)))
        };
        let rails: Vec<_> = rows().filter(|(_, row)| row.rail.is_some()).collect();
        let peers: Vec<_> = rows()
            .filter(|(_, row)| row.rail.is_none() && row.peer.is_some())
            .collect();
        let all = OF_RAILS
            .map(|metric| (metric, &rails))
            .into_iter()
            .chain(OF_PEERS.map(|metric| (metric, &peers)));
        for ((name, kind, help, value), rows) in all.filter(|(_, rows)| !rows.is_empty()) {
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for (job, row) in rows {
                // Counters are encoded like gauges here. `encode_counter` would also need an
                // exemplar.
                family
                    .encode_family(&labels(job, row))?
                    .encode_gauge(&value(row))?;
            }
        }
        Ok(())
    }
}

fn labels<'a>(job: &'a Job, row: &'a Row) -> Vec<(&'static str, Cow<'a, str>)> {
    let rank = job
        .seen
        .rank
        .map(|rank| rank.to_string())
        .unwrap_or_default();
    let process = [
        ("command", job.seen.command.as_str().into()),
        ("pid", job.seen.pid.to_string().into()),
        ("rank", rank.into()),
    ];
    let place = [("rail", &row.rail), ("peer", &row.peer)];
    let place = place
        .into_iter()
        .filter_map(|(name, value)| Some((name, value.as_deref()?.into())));
    process.into_iter().chain(place).collect()
}

pub fn text(snapshot: &Snapshot) -> Result<String> {
    let mut registry = Registry::with_prefix("nccl_spark");
    registry.register_collector(Box::new(snapshot.clone()));
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry)?;
    Ok(text)
}

/// Parses a path that the textfile collector accepts.
pub fn parse_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.file_name().is_some()
        && path
            .extension()
            .is_some_and(|extension| extension == "prom")
    {
        true => Ok(path),
        false => Err("must end in .prom, as the textfile collector asks for".to_owned()),
    }
}

/// The metrics file, replaced at each reading. It is removed when this program ends, because the
/// collector would otherwise continue to serve the file's figures as current.
#[derive(Debug)]
pub struct Textfile {
    path: PathBuf,
    is_there: bool,
}

impl Textfile {
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            is_there: false,
        }
    }

    /// Writes a temporary file and renames it, so readers see either the old text or the new text.
    ///
    /// # Errors
    /// The file cannot be written; the error names it. No temporary file remains.
    pub fn write(&mut self, text: &str) -> Result<()> {
        // The temporary file must not end in .prom, or the collector would read it.
        let written = replacement::beside(&self.path).and_then(|mut file| {
            replacement::fill(&mut file, text)?;
            // The error also owns the temporary file, which is removed when that part of the error
            // is dropped here.
            file.persist(&self.path).map_err(|error| error.error)
        });
        written.with_context(|| format!("--prometheus {}", self.path.display()))?;
        self.is_there = true;
        Ok(())
    }

    /// Keeps the file when this program ends, because after --count users want the last reading.
    pub fn keep(mut self) {
        self.is_there = false;
    }
}

impl Drop for Textfile {
    fn drop(&mut self) {
        if self.is_there {
            // Another program may have removed the file. There is no way to report the error here.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rows::tests::{flow, job, port};
    use host::counters::layout::Direction;
    use std::collections::BTreeSet;
    use std::os::unix::fs::PermissionsExt;

    fn hostile() -> Snapshot {
        let mut job = job(
            7,
            vec![
                flow("r\"0\\", "b", Direction::Send, 5),
                flow("r\"0\\", "b", Direction::Receive, u64::MAX),
            ],
        );
        job.seen.command = "a\"} 1\\".to_owned();
        job.seen.rank = Some(3);
        Snapshot {
            jobs: vec![job],
            ports: vec![port(1.0)],
            ..Snapshot::default()
        }
    }

    #[test]
    fn labels_are_escaped_and_series_are_unique() {
        let text = text(&hostile()).unwrap();
        let expected = "nccl_spark_rail_sent_bytes_total{command=\"a\\\"} 1\\\\\",pid=\"7\",rank=\"3\",rail=\"r\\\"0\\\\\",peer=\"b\"} 10\n";
        assert!(text.contains(expected), "{text}");
        let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let names: BTreeSet<&str> = series
            .iter()
            .filter_map(|line| Some(line.rsplit_once(' ')?.0))
            .collect();
        assert_eq!((names.len(), series.len()), (18, 18), "{text}");
        assert!(
            text.contains(
                "nccl_spark_port_counter_total{rail=\"r0\",counter=\"packet_seq_err\"} 4830\n"
            ),
            "{text}"
        );
        assert_eq!(
            super::text(&Snapshot::default()).unwrap().lines().count(),
            6,
            "families without figures are left out"
        );
    }

    #[test]
    fn the_guide_names_every_metric_with_its_type() {
        let guide = include_str!("../../../../docs/guide/monitoring.md");
        let text = text(&hostile()).unwrap();
        let names = text
            .lines()
            .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let row = |name: &str, kind: &str| {
            let rows = guide
                .lines()
                .filter(|line| line.contains(&format!("`{name}`")));
            rows.filter(|line| line.split('|').any(|cell| cell.trim() == kind))
                .count()
        };
        let missing: Vec<_> = names
            .clone()
            .filter(|(name, kind)| row(name, kind) != 1)
            .collect();
        assert!(
            missing.is_empty() && names.count() == 18,
            "docs/guide/monitoring.md does not name {missing:?}"
        );
    }

    #[test]
    fn the_file_is_readable_by_all_replaced_atomically_and_removed_at_exit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spark.prom");
        let names = || {
            fs::read_dir(&folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name())
                .collect::<Vec<_>>()
        };
        let mut file = Textfile::new(path.clone());
        file.write("one\n").unwrap();
        file.write("two\n").unwrap();
        assert_eq!(
            (fs::read_to_string(&path).unwrap().as_str(), names().len()),
            ("two\n", 1)
        );
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
            0o644
        );
        drop(file);
        assert!(names().is_empty());
        let mut file = Textfile::new(path.clone());
        file.write("three\n").unwrap();
        file.keep();
        assert_eq!(names(), ["spark.prom"]);
        // A folder with the file's name is in the way.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = Textfile::new(path.clone()).write("four\n").unwrap_err();
        assert!(
            format!("{error:#}").starts_with(&format!("--prometheus {}: ", path.display())),
            "{error:#}"
        );
        assert_eq!(names(), ["spark.prom"], "no temporary file is left");
        let error = Textfile::new("/no/such/spark.prom".into())
            .write("five\n")
            .unwrap_err();
        let text = "--prometheus /no/such/spark.prom: No such file or directory (os error 2)";
        assert_eq!(format!("{error:#}"), text);
    }

    #[test]
    fn only_files_that_the_collector_reads_are_taken() {
        assert!(parse_path("/x/a.prom").is_ok() && parse_path("a.prom").is_ok());
        for wrong in ["a.txt", "prom", ".prom", "a.prom/", "", "a.prom.tmp"] {
            assert_eq!(parse_path(wrong).is_err(), wrong != "a.prom/", "{wrong}");
        }
    }
}
