//! One reading of all counters as JSON. docs/guide/monitoring.md lists the fields.
//! `SCHEMA` increases when a field is removed or changes its meaning.

use super::look::SkippedProcess;
use super::rates::{Job, Port, Snapshot};
use super::rows::{self, Row};
use serde::Serialize;

const SCHEMA: u32 = 1;

#[derive(Debug, Serialize)]
pub struct SnapshotJson<'a> {
    schema: u32,
    /// Time of the reading, in seconds since 1970.
    time_s: f64,
    hidden_processes: usize,
    passed_over: &'a [SkippedProcess],
    jobs: Vec<JobJson<'a>>,
    ports: &'a [Port],
}

#[derive(Debug, Serialize)]
struct JobJson<'a> {
    pid: u32,
    rank: Option<u32>,
    command: &'a str,
    /// Time since the previous reading. Null in the first reading that has this process.
    interval_s: Option<f64>,
    /// Memory pinned for devices. Null if unknown.
    pinned_bytes: Option<u64>,
    /// True while the process holds a request for a CPU wake-up latency. Null if unknown.
    holds_cpu_latency: Option<bool>,
    not_counted_lanes: u64,
    passed_over_lanes: usize,
    #[serde(flatten)]
    row: Row,
    /// Rails, each summed over all peers. Empty with `--peers`, because then each peer lists its
    /// own rails.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rails: Vec<RailJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    peers: Vec<PeerJson>,
}

#[derive(Debug, Serialize)]
struct PeerJson {
    peer: String,
    #[serde(flatten)]
    row: Row,
    rails: Vec<RailJson>,
}

#[derive(Debug, Serialize)]
struct RailJson {
    /// Null if unknown.
    payload_bits_per_s: Option<u64>,
    #[serde(flatten)]
    row: Row,
}

impl<'a> SnapshotJson<'a> {
    pub fn new(snapshot: &'a Snapshot, by_peer: bool, time_s: f64) -> Self {
        let jobs = rows::of_snapshot(snapshot, by_peer)
            .into_iter()
            .map(|(job, rows)| job_json(job, &rows))
            .collect();
        Self {
            schema: SCHEMA,
            time_s,
            hidden_processes: snapshot.hidden,
            passed_over: &snapshot.passed_over,
            jobs,
            ports: &snapshot.ports,
        }
    }
}

fn job_json<'a>(job: &'a Job, rows: &[Row]) -> JobJson<'a> {
    let rails_of = |peer: &Option<String>| {
        let rows = rows
            .iter()
            .filter(|row| row.peer == *peer && row.rail.is_some());
        let rate = |row: &Row| Some(row.bits_per_s()).filter(|rate| *rate > 0);
        rows.map(|row| RailJson {
            payload_bits_per_s: rate(row),
            row: row.clone(),
        })
        .collect()
    };
    let peer = |row: &Row| {
        Some(PeerJson {
            peer: row.peer.clone()?,
            row: row.clone(),
            rails: rails_of(&row.peer),
        })
    };
    JobJson {
        pid: job.seen.pid,
        rank: job.seen.rank,
        command: &job.seen.command,
        interval_s: job.elapsed_ns.map(|ns| ns as f64 / 1e9),
        pinned_bytes: job.seen.pinned_bytes,
        holds_cpu_latency: job.seen.holds_cpu_latency,
        not_counted_lanes: job.seen.counters.not_counted,
        passed_over_lanes: job.seen.counters.passed_over,
        row: rows[0].clone(),
        rails: rails_of(&None),
        peers: rows
            .iter()
            .filter(|row| row.rail.is_none())
            .filter_map(peer)
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rows::tests::{flow, job, port};
    use host::counters::layout::Direction;
    use serde_json::Value;

    /// Scripts rely on these field names.
    #[test]
    fn the_schema_matches_the_documentation() {
        let flows = vec![
            flow("r0", "b", Direction::Send, 1000),
            flow("r1", "c", Direction::Receive, 500),
        ];
        let snapshot = Snapshot {
            jobs: vec![job(7, flows)],
            hidden: 2,
            ports: vec![port(7.5)],
            ..Snapshot::default()
        };
        let json =
            |by_peer| serde_json::to_value(SnapshotJson::new(&snapshot, by_peer, 5.0)).unwrap();
        let by_rail = json(false);
        let by_peer = json(true);
        assert_eq!(
            (&by_rail["schema"], &by_rail["hidden_processes"]),
            (&1.into(), &2.into())
        );
        let rail = &by_rail["jobs"][0]["rails"][0];
        assert_eq!(
            (&rail["rail"], &rail["sent"]["bytes"], &rail["stalls"]),
            (&"r0".into(), &2000.into(), &Value::Null)
        );
        assert_eq!(rail["sent"]["bytes_per_s"], 1000.0);
        assert_eq!(
            (
                &by_rail["jobs"][0]["stalls"],
                by_rail["jobs"][0].get("peers")
            ),
            (&0.into(), None)
        );
        let peer = &by_peer["jobs"][0]["peers"][1];
        assert_eq!(
            (&peer["peer"], &peer["rails"][0]["received"]["bytes"]),
            (&"c".into(), &1000.into())
        );
        let port = &by_peer["ports"][0];
        assert_eq!(
            (
                &port["rail"],
                &port["counters"]["packet_seq_err"],
                &port["per_s"]["packet_seq_err"]
            ),
            (&"r0".into(), &4830.into(), &7.5.into())
        );
        let guide = include_str!("../../../../docs/guide/monitoring.md");
        let mut names = std::collections::BTreeSet::new();
        names_in(&by_rail, &mut names);
        names_in(&by_peer, &mut names);
        let missing: Vec<_> = names
            .iter()
            .filter(|name| !guide.contains(&format!("`{name}`")))
            .collect();
        assert!(
            missing.is_empty() && names.len() > 25,
            "docs/guide/monitoring.md does not name {missing:?}"
        );
    }

    fn names_in(value: &Value, names: &mut std::collections::BTreeSet<String>) {
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, value)| {
                names.insert(name.clone());
                names_in(value, names);
            }),
            Value::Array(values) => values.iter().for_each(|value| names_in(value, names)),
            _ => {}
        }
    }
}
