//! A look as JSON. docs/guide/monitoring.md says what each field means; a field that goes or changes its meaning makes another schema.

use super::rates::{Job, Picture};
use super::rows::{self, Condition, Order, Row, Side, Subject};
use crate::output::numbers::number;
use serde::Serialize;
use serde_json::Value;

/// Of these fields.
const SCHEMA: u32 = 1;

/// A look.
#[derive(Debug, Serialize)]
pub struct LookJson {
    schema: u32,
    /// Seconds since 1970, when it was shown.
    time_s: f64,
    hidden_processes: usize,
    passed_over: Vec<PassedOverJson>,
    jobs: Vec<JobJson>,
}

#[derive(Debug, Serialize)]
struct PassedOverJson {
    pid: u32,
    reason: String,
}

#[derive(Debug, Serialize)]
struct JobJson {
    pid: u32,
    rank: Option<u32>,
    command: String,
    /// Since the look before; null at the first look at this process.
    interval_s: Option<f64>,
    not_counted_lanes: u64,
    passed_over_lanes: usize,
    #[serde(flatten)]
    figures: RowJson,
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
    figures: RowJson,
    rails: Vec<RailJson>,
}

#[derive(Debug, Serialize)]
struct RailJson {
    rail: String,
    /// In bits per second; null if it is not known.
    payload_bits_per_s: Option<u64>,
    #[serde(flatten)]
    figures: RowJson,
}

#[derive(Debug, Serialize)]
struct RowJson {
    sent: SideJson,
    received: SideJson,
    share_percent: Value,
    mean_latency_us: Value,
    longest_latency_us: f64,
    losses: u64,
    recoveries: u64,
    lost_s: f64,
    /// Null for a rail.
    stalls: Option<u64>,
    stalled_s: Option<f64>,
    /// `good`, `slow` or `lost`.
    condition: &'static str,
}

#[derive(Debug, Serialize)]
struct SideJson {
    bytes: u64,
    writes: u64,
    bytes_per_s: Value,
    share_percent: Value,
    connections: usize,
    carrying: usize,
}

impl LookJson {
    /// What was seen.
    pub fn new(picture: &Picture, by_peer: bool, time_s: f64) -> Self {
        let passed_over = picture.passed_over.iter();
        let passed_over = passed_over.map(|one| PassedOverJson { pid: one.pid, reason: one.reason.clone() }).collect();
        let jobs = rows::of_picture(picture, by_peer, Order::Pid);
        let jobs = jobs.into_iter().map(|(job, rows)| job_json(job, &rows)).collect();
        Self { schema: SCHEMA, time_s, hidden_processes: picture.hidden, passed_over, jobs }
    }
}

fn job_json(job: &Job, rows: &[Row]) -> JobJson {
    let (mut rails, mut peers) = (Vec::new(), Vec::<PeerJson>::new());
    for row in &rows[1..] {
        match &row.subject {
            Subject::Job => {}
            Subject::Peer(peer) => peers.push(PeerJson { peer: peer.clone(), figures: row.into(), rails: Vec::new() }),
            Subject::Rail(rail) => rails.push(rail_json(rail, row)),
            // Rails come after their peer.
            Subject::RailOfPeer { rail, .. } => {
                if let Some(peer) = peers.last_mut() {
                    peer.rails.push(rail_json(rail, row));
                }
            }
        }
    }
    JobJson {
        pid: job.pid,
        rank: job.rank,
        command: job.command.clone(),
        interval_s: job.elapsed_ns.map(|elapsed_ns| elapsed_ns as f64 / 1e9),
        not_counted_lanes: job.not_counted,
        passed_over_lanes: job.passed_over,
        figures: (&rows[0]).into(),
        rails,
        peers,
    }
}

fn rail_json(rail: &str, row: &Row) -> RailJson {
    let payload_bits_per_s = Some(row.bits_per_s).filter(|rate| *rate > 0);
    RailJson { rail: rail.to_owned(), payload_bits_per_s, figures: row.into() }
}

impl From<&Row> for RowJson {
    fn from(row: &Row) -> Self {
        let total = row.total();
        Self {
            sent: (&row.sent).into(),
            received: (&row.received).into(),
            share_percent: optional(row.share_percent),
            mean_latency_us: optional(row.mean_us()),
            longest_latency_us: total.longest_ns as f64 / 1e3,
            losses: total.losses,
            recoveries: total.recoveries,
            lost_s: total.lost_ns as f64 / 1e9,
            stalls: row.has_stalls().then_some(total.stalls),
            stalled_s: row.has_stalls().then_some(total.stalled_ns as f64 / 1e9),
            condition: match row.condition {
                Condition::Good => "good",
                Condition::Slow => "slow",
                Condition::Lost => "lost",
            },
        }
    }
}

impl From<&Side> for SideJson {
    fn from(side: &Side) -> Self {
        Self {
            bytes: side.total.bytes,
            writes: side.total.writes,
            bytes_per_s: optional(side.bytes_per_s),
            share_percent: optional(side.share_percent),
            connections: side.connections,
            carrying: side.carrying,
        }
    }
}

fn optional(value: Option<f64>) -> Value {
    value.map_or(Value::Null, number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rows::tests::{flow, job};
    use nccl_net_spark::counters::layout::Direction;

    /// Whoever reads the objects goes by these names.
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
