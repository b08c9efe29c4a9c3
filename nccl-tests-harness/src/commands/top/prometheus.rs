//! The file for node_exporter's textfile collector: what stands in it, and how it gets there in one piece.

use super::rates::Picture;
use super::rows::{self, Row, Subject};
use crate::output::replacement;
use anyhow::{Context, Result};
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

/// A metric: its name without the project's, its type, what it means, which rows have it, and its value there.
struct Metric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    of: Of,
    value: fn(&Row) -> f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Rail,
    Peer,
}

const METRICS: [Metric; 15] = [
    counter("rail_sent_bytes_total", "Payload bytes sent by a rail and confirmed.", Of::Rail, |row| {
        row.sent.total.bytes as f64
    }),
    counter("rail_received_bytes_total", "Payload bytes received by a rail.", Of::Rail, |row| {
        row.received.total.bytes as f64
    }),
    counter("rail_sent_writes_total", "RDMA writes that carried the sent bytes.", Of::Rail, |row| {
        row.sent.total.writes as f64
    }),
    counter("rail_received_writes_total", "RDMA writes that carried the received bytes.", Of::Rail, |row| {
        row.received.total.writes as f64
    }),
    counter("rail_timed_writes_total", "Sent writes that were timed.", Of::Rail, |row| {
        row.sent.total.timed_writes as f64
    }),
    counter("rail_timed_write_seconds_total", "Time from post to confirmation of the timed writes.", Of::Rail, |row| {
        seconds(row.sent.total.timed_ns)
    }),
    gauge("rail_longest_write_seconds", "Longest time from post to confirmation of a timed write.", Of::Rail, |row| {
        seconds(row.sent.total.longest_ns)
    }),
    counter("rail_losses_total", "Times that a connection lost a rail.", Of::Rail, |row| row.total().losses as f64),
    counter("rail_recoveries_total", "Times that a lost rail carried again for a connection.", Of::Rail, |row| {
        row.total().recoveries as f64
    }),
    counter(
        "rail_lost_seconds_total",
        "Time for which connections had lost a rail, until its last recovery.",
        Of::Rail,
        |row| seconds(row.total().lost_ns),
    ),
    gauge("rail_connections", "Open connections that have a rail.", Of::Rail, |row| row.connections().0 as f64),
    gauge("rail_carrying_connections", "Open connections that a rail carries for.", Of::Rail, |row| {
        row.connections().1 as f64
    }),
    gauge(
        "rail_payload_bytes_per_second",
        "What a rail can carry in payload; 0 if it is not known.",
        Of::Rail,
        |row| row.bits_per_s as f64 / 8.0,
    ),
    counter("peer_stalls_total", "Times that a request made no progress for a second or longer.", Of::Peer, |row| {
        row.total().stalls as f64
    }),
    counter("peer_stalled_seconds_total", "Time for which requests made no progress.", Of::Peer, |row| {
        seconds(row.total().stalled_ns)
    }),
];

const fn counter(name: &'static str, help: &'static str, of: Of, value: fn(&Row) -> f64) -> Metric {
    Metric { name, kind: "counter", help, of, value }
}

const fn gauge(name: &'static str, help: &'static str, of: Of, value: fn(&Row) -> f64) -> Metric {
    Metric { name, kind: "gauge", help, of, value }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// A picture in Prometheus' text format. No name and labels stand there twice: the collector would drop the whole file.
pub fn text(picture: &Picture) -> String {
    let jobs = rows::of_picture(picture, true, rows::Order::Pid);
    let mut text = String::new();
    family(&mut text, "jobs", "gauge", "Processes with connections of this network.");
    let _ = writeln!(text, "nccl_spark_jobs {}", jobs.len());
    family(&mut text, "hidden_processes", "gauge", "Processes that could not be looked into.");
    let _ = writeln!(text, "nccl_spark_hidden_processes {}", picture.hidden);
    for metric in METRICS {
        let mut lines = String::new();
        for (job, rows) in &jobs {
            let rank = job.rank.map(|rank| rank.to_string()).unwrap_or_default();
            for row in rows {
                let place = match (&row.subject, metric.of) {
                    (Subject::RailOfPeer { rail, peer }, Of::Rail) => {
                        format!("rail=\"{}\",peer=\"{}\"", escaped(rail), escaped(peer))
                    }
                    (Subject::Peer(peer), Of::Peer) => format!("peer=\"{}\"", escaped(peer)),
                    _ => continue,
                };
                let (name, command, value) = (metric.name, escaped(&job.command), (metric.value)(row));
                let pid = job.pid;
                // Writing into a string does not fail.
                let _ = writeln!(
                    lines,
                    "nccl_spark_{name}{{command=\"{command}\",pid=\"{pid}\",rank=\"{rank}\",{place}}} {value}"
                );
            }
        }
        if !lines.is_empty() {
            family(&mut text, metric.name, metric.kind, metric.help);
            text += &lines;
        }
    }
    text
}

fn family(text: &mut String, name: &str, kind: &str, help: &str) {
    *text += &format!("# HELP nccl_spark_{name} {help}\n# TYPE nccl_spark_{name} {kind}\n");
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Whether a path is one that the textfile collector reads.
pub fn parse_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.file_name().is_some() && path.extension().is_some_and(|extension| extension == "prom") {
        true => Ok(path),
        false => Err("must end in .prom, as the textfile collector asks for".to_owned()),
    }
}

/// The file, written anew at each look. It goes with this program: figures that nobody brings up to date would be taken for those of now.
#[derive(Debug)]
pub struct Textfile {
    path: PathBuf,
    is_there: bool,
}

impl Textfile {
    /// Nothing is written yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, is_there: false }
    }

    /// Writes it beside itself and puts it in place: a reader sees the old one or the new one.
    ///
    /// # Errors
    /// When it cannot be written; nothing new is left behind then.
    pub fn write(&mut self, text: &str) -> Result<()> {
        self.replace(text).with_context(|| format!("--prometheus {}", self.path.display()))?;
        self.is_there = true;
        Ok(())
    }

    fn replace(&self, text: &str) -> Result<()> {
        // The collector reads *.prom, which its name does not end in.
        let mut file = replacement::beside(&self.path)?;
        replacement::fill(&mut file, text)?;
        // The error would keep the temporary file.
        file.persist(&self.path).map_err(|error| error.error)?;
        Ok(())
    }

    /// Leaves the file: who asked for a number of looks wants the last one.
    pub fn keep(mut self) {
        self.is_there = false;
    }
}

impl Drop for Textfile {
    fn drop(&mut self) {
        if self.is_there {
            // Somebody may have removed it already, and nobody is left to tell.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rows::tests::{flow, job};
    use nccl_net_spark::counters::layout::Direction;
    use std::collections::BTreeSet;
    use std::os::unix::fs::PermissionsExt;

    fn hostile() -> Picture {
        let mut job =
            job(7, vec![flow("r\"0\\", "b", Direction::Send, 5), flow("r\"0\\", "b", Direction::Receive, u64::MAX)]);
        (job.command, job.rank) = ("a\"} 1\\".to_owned(), Some(3));
        Picture { jobs: vec![job], ..Picture::default() }
    }

    #[test]
    fn labels_are_escaped_and_no_series_is_there_twice() {
        let text = text(&hostile());
        let expected = "nccl_spark_rail_sent_bytes_total{command=\"a\\\"} 1\\\\\",pid=\"7\",rank=\"3\",rail=\"r\\\"0\\\\\",peer=\"b\"} 10\n";
        assert!(text.contains(expected), "{text}");
        let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let names: BTreeSet<&str> = series.iter().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
        assert_eq!((names.len(), series.len()), (17, 17), "{text}");
        assert_eq!(super::text(&Picture::default()).lines().count(), 6, "families without figures are left out");
    }

    #[test]
    fn the_guide_names_every_metric() {
        let guide = include_str!("../../../../docs/guide/monitoring.md");
        let missing: Vec<_> =
            METRICS.iter().filter(|metric| !guide.contains(&format!("`nccl_spark_{}`", metric.name))).collect();
        assert!(missing.is_empty(), "{:?}", missing.iter().map(|metric| metric.name).collect::<Vec<_>>());
    }

    #[test]
    fn the_file_is_readable_by_all_replaced_whole_and_goes_with_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("spark.prom");
        let names = || fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
        let mut file = Textfile::new(path.clone());
        file.write("one\n").unwrap();
        file.write("two\n").unwrap();
        assert_eq!((fs::read_to_string(&path).unwrap().as_str(), names().len()), ("two\n", 1));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o644);
        drop(file);
        assert!(names().is_empty());
        let mut file = Textfile::new(path.clone());
        file.write("three\n").unwrap();
        file.keep();
        assert_eq!(names(), ["spark.prom"]);
        // A folder in its place.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = Textfile::new(path.clone()).write("four\n").unwrap_err();
        assert!(format!("{error:#}").starts_with(&format!("--prometheus {}: ", path.display())), "{error:#}");
        assert_eq!(names(), ["spark.prom"], "the temporary file is gone");
        let error = Textfile::new("/no/such/spark.prom".into()).write("five\n").unwrap_err();
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
