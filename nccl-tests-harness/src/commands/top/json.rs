//! A look as JSON: the fields of docs/guide/monitoring.md. A field that goes or changes its meaning
//! makes another schema.

use super::look::PassedOver;
use super::rates::{Job, Picture};
use super::rows::{self, Condition, Row, Side};
use serde::Serialize;

const SCHEMA: u32 = 1;

/// A look.
#[derive(Debug, Serialize)]
pub struct LookJson<'a> {
    schema: u32,
    /// Seconds since 1970, when it was shown.
    time_s: f64,
    hidden_processes: usize,
    passed_over: &'a [PassedOver],
    jobs: Vec<JobJson<'a>>,
}

#[derive(Debug, Serialize)]
struct JobJson<'a> {
    pid: u32,
    rank: Option<u32>,
    command: &'a str,
    /// Since the look before; null at the first look at this process.
    interval_s: Option<f64>,
    not_counted_lanes: u64,
    passed_over_lanes: usize,
    #[serde(flatten)]
    figures: Figures,
    /// Over all peers; with --peers in `peers`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rails: Vec<RailJson>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    peers: Vec<PeerJson>,
}

#[derive(Debug, Serialize)]
struct PeerJson {
    peer: String,
    #[serde(flatten)]
    figures: Figures,
    rails: Vec<RailJson>,
}

#[derive(Debug, Serialize)]
struct RailJson {
    rail: String,
    /// Null if it is not known.
    payload_bits_per_s: Option<u64>,
    #[serde(flatten)]
    figures: Figures,
}

/// Figures of a job, a peer or a rail.
#[derive(Debug, Serialize)]
struct Figures {
    sent: SideJson,
    received: SideJson,
    share_percent: Option<f64>,
    mean_latency_us: Option<f64>,
    longest_latency_us: f64,
    losses: u64,
    recoveries: u64,
    lost_s: f64,
    /// Null for a rail.
    stalls: Option<u64>,
    stalled_s: Option<f64>,
    condition: Condition,
}

#[derive(Debug, Serialize)]
struct SideJson {
    bytes: u64,
    writes: u64,
    bytes_per_s: Option<f64>,
    share_percent: Option<f64>,
    connections: usize,
    carrying: usize,
}

impl<'a> LookJson<'a> {
    /// Returns the JSON of a look.
    pub fn new(picture: &'a Picture, by_peer: bool, time_s: f64) -> Self {
        let jobs = rows::of_picture(picture, by_peer).into_iter().map(|(job, rows)| job_json(job, &rows)).collect();
        Self { schema: SCHEMA, time_s, hidden_processes: picture.hidden, passed_over: &picture.passed_over, jobs }
    }
}

fn job_json<'a>(job: &'a Job, rows: &[Row]) -> JobJson<'a> {
    let rails_of = |peer: &Option<String>| {
        let rows = rows.iter().filter(|row| row.peer == *peer);
        rows.filter_map(|row| Some(rail_json(row.rail.clone()?, row))).collect()
    };
    let peers = rows.iter().filter(|row| row.rail.is_none());
    let peers = peers
        .filter_map(|row| Some(PeerJson { peer: row.peer.clone()?, figures: row.into(), rails: rails_of(&row.peer) }));
    JobJson {
        pid: job.pid,
        rank: job.rank,
        command: &job.command,
        interval_s: job.elapsed_ns.map(seconds),
        not_counted_lanes: job.not_counted,
        passed_over_lanes: job.passed_over,
        figures: (&rows[0]).into(),
        rails: rails_of(&None),
        peers: peers.collect(),
    }
}

fn rail_json(rail: String, row: &Row) -> RailJson {
    RailJson { rail, payload_bits_per_s: Some(row.bits_per_s).filter(|rate| *rate > 0), figures: row.into() }
}

impl From<&Row> for Figures {
    fn from(row: &Row) -> Self {
        let total = row.total();
        Self {
            sent: (&row.sent).into(),
            received: (&row.received).into(),
            share_percent: row.share_percent,
            mean_latency_us: row.mean_us(),
            longest_latency_us: total.longest_ns as f64 / 1e3,
            losses: total.losses,
            recoveries: total.recoveries,
            lost_s: seconds(total.lost_ns),
            stalls: row.has_stalls().then_some(total.stalls),
            stalled_s: row.has_stalls().then_some(seconds(total.stalled_ns)),
            condition: row.condition,
        }
    }
}

impl From<&Side> for SideJson {
    fn from(side: &Side) -> Self {
        Self {
            bytes: side.total.bytes,
            writes: side.total.writes,
            bytes_per_s: side.bytes_per_s,
            share_percent: side.share_percent,
            connections: side.connections,
            carrying: side.carrying,
        }
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rows::tests::{flow, job};
    use nccl_net_spark::counters::layout::Direction;
    use serde_json::Value;

    /// Scripts read the fields by these names.
    #[test]
    fn the_schema_is_the_documented_one() {
        let flows = vec![flow("r0", "b", Direction::Send, 1000), flow("r1", "c", Direction::Receive, 500)];
        let picture = Picture { jobs: vec![job(7, flows)], hidden: 2, ..Picture::default() };
        let json = |by_peer| serde_json::to_value(LookJson::new(&picture, by_peer, 5.0)).unwrap();
        let (by_rail, by_peer) = (json(false), json(true));
        assert_eq!((&by_rail["schema"], &by_rail["hidden_processes"]), (&1.into(), &2.into()));
        let rail = &by_rail["jobs"][0]["rails"][0];
        assert_eq!(
            (&rail["rail"], &rail["sent"]["bytes"], &rail["stalls"]),
            (&"r0".into(), &2000.into(), &Value::Null)
        );
        assert_eq!(rail["sent"]["bytes_per_s"], 1000.0);
        assert_eq!((&by_rail["jobs"][0]["stalls"], by_rail["jobs"][0].get("peers")), (&0.into(), None));
        let peer = &by_peer["jobs"][0]["peers"][1];
        assert_eq!((&peer["peer"], &peer["rails"][0]["received"]["bytes"]), (&"c".into(), &1000.into()));
        let guide = include_str!("../../../../docs/guide/monitoring.md");
        let mut names = std::collections::BTreeSet::new();
        names_in(&by_rail, &mut names);
        names_in(&by_peer, &mut names);
        let missing: Vec<_> = names.iter().filter(|name| !guide.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty() && names.len() > 25, "docs/guide/monitoring.md does not name {missing:?}");
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
