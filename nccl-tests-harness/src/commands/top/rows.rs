//! The rows of a snapshot (all jobs of one reading): one for each job, for each of its peers if
//! requested, and for each rail. A row has the fields of the JSON (docs/guide/monitoring.md). This
//! module does no I/O.

use super::rates::{self, Flow, Job, Side, Snapshot};
use host::counters::layout::Direction;
use proto::flow::stall::Cause;
use serde::Serialize;
use std::collections::BTreeMap;

/// A rail is slow if its load is less than this fraction of the busiest rail's load. A load is a
/// rail's traffic divided by its payload rate.
const SLOW: f64 = 0.5;
/// Rails are compared if the busiest rail's load is at least this fraction.
const BUSY: f64 = 0.1;
/// Rails are also compared at lower loads if the busiest rail's writes have at least this mean
/// size. Smaller messages may use one rail only.
const SHARED_BYTES: u64 = 64 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    /// Every rail of every connection carries data.
    #[default]
    Good,
    /// The rail's load is less than half of the busiest rail's load.
    Slow,
    /// A rail of a connection is lost, or has not carried data yet.
    Lost,
}

/// A line of the table. A row without a peer is for all peers, and a row without a rail for all
/// rails. The row of the whole job has neither.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Row {
    #[serde(skip)]
    pub peer: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rail: Option<String>,
    pub sent: Side,
    pub received: Side,
    /// The row's bytes in both directions since the previous reading, in percent of the job's bytes
    /// in both directions since then.
    pub share_percent: Option<f64>,
    /// Mean time from post to confirmation of the writes timed since the previous reading.
    pub mean_latency_us: Option<f64>,
    pub longest_latency_us: f64,
    pub losses: u64,
    pub recoveries: u64,
    pub lost_s: f64,
    /// Number of stalls. `None` for a rail, because a connection stalls as a whole.
    pub stalls: Option<u64>,
    /// Duration of all stalls. `None` for a rail.
    pub stalled_s: Option<f64>,
    /// Cause of the connections' current stall, from the peers' answers.
    pub stall_cause: Option<&'static str>,
    pub condition: Condition,
}

impl Row {
    /// Returns the number of open lanes, and the number of these lanes that carry data. In a rail's
    /// row the numbers count connections, because a connection has one lane on each rail.
    pub fn connections(&self) -> (usize, usize) {
        (
            self.sent.connections + self.received.connections,
            self.sent.carrying + self.received.carrying,
        )
    }

    pub fn bits_per_s(&self) -> u64 {
        self.sent.bits_per_s.max(self.received.bits_per_s)
    }

    /// Returns the rate of both directions together. An unknown rate counts as 0.
    pub fn bytes_per_s(&self) -> f64 {
        self.sent.bytes_per_s.unwrap_or(0.0) + self.received.bytes_per_s.unwrap_or(0.0)
    }

    fn new(peer: Option<&str>, rail: Option<&str>) -> Self {
        Self {
            peer: peer.map(str::to_owned),
            rail: rail.map(str::to_owned),
            ..Self::default()
        }
    }

    fn add(&mut self, flow: &Flow) {
        let side = match flow.direction {
            Direction::Send => &mut self.sent,
            Direction::Receive => &mut self.received,
        };
        side.add(&flow.side);
        if side.carrying < side.connections {
            self.condition = Condition::Lost;
        }
    }

    fn gained_bytes(&self) -> u64 {
        let bytes = |side: &Side| side.since_last.map_or(0, |since_last| since_last.bytes);
        bytes(&self.sent).saturating_add(bytes(&self.received))
    }

    /// Computes the figures that depend on the counts. `whole` is the row of the whole job.
    fn figure(&mut self, whole: &Row, elapsed_ns: Option<u64>) {
        self.share_percent =
            elapsed_ns.and_then(|_| rates::percent(self.gained_bytes(), whole.gained_bytes()));
        // A direction without a connection has 0 bytes.
        for (side, all) in [
            (&mut self.sent, &whole.sent),
            (&mut self.received, &whole.received),
        ] {
            let bytes = side.since_last.map_or(0, |since_last| since_last.bytes);
            side.bytes = side.total.bytes;
            side.writes = side.total.writes;
            side.bytes_per_s =
                elapsed_ns.and_then(|elapsed_ns| rates::per_second(bytes, elapsed_ns));
            side.share_percent = all
                .since_last
                .and_then(|all| rates::percent(bytes, all.bytes));
        }
        let total = rates::sum(&self.sent.total, &self.received.total);
        let seconds = |ns: u64| ns as f64 / 1e9;
        self.mean_latency_us = self.sent.since_last.as_ref().and_then(rates::mean_us);
        self.longest_latency_us = total.longest_ns as f64 / 1e3;
        self.losses = total.losses;
        self.recoveries = total.recoveries;
        self.lost_s = seconds(total.lost_ns);
        if self.rail.is_none() {
            self.stalls = Some(total.stalls);
            self.stalled_s = Some(seconds(total.stalled_ns));
            self.stall_cause = self.sent.stall.max(self.received.stall).map(Cause::name);
        }
    }
}

/// Returns the row of the job and, with `by_peer`, for each peer its row and the rows of its rails.
/// Without `by_peer`, returns the row of the job and the rows of the rails.
pub fn of_job(job: &Job, by_peer: bool) -> Vec<Row> {
    // `None` sorts before all names, so a row precedes the rows that it sums up.
    let mut rows: BTreeMap<(Option<&str>, Option<&str>), Row> =
        BTreeMap::from([((None, None), Row::default())]);
    for flow in &job.flows {
        let peer = by_peer.then_some(flow.peer.as_str());
        let of_peer = peer.map(|peer| (Some(peer), None));
        for (peer, rail) in [(None, None)]
            .into_iter()
            .chain(of_peer)
            .chain([(peer, Some(flow.rail.as_str()))])
        {
            rows.entry((peer, rail))
                .or_insert_with(|| Row::new(peer, rail))
                .add(flow);
        }
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    let whole = rows[0].clone();
    rows.iter_mut()
        .for_each(|row| row.figure(&whole, job.elapsed_ns));
    for side in [|row: &Row| row.sent, |row: &Row| row.received] {
        mark_slow(&mut rows, side);
    }
    rows
}

/// Marks slow rails. Rails of one job and peer should have equal loads. Only rails with connections
/// in the direction that `side` selects are compared.
fn mark_slow(rows: &mut [Row], side: fn(&Row) -> Side) {
    let load = |row: &Row| match side(row) {
        Side {
            connections: 1..,
            bytes_per_s: Some(bytes_per_s),
            ..
        } if row.rail.is_some() => Some(bytes_per_s * 8.0 / row.bits_per_s().max(1) as f64),
        _ => None,
    };
    let write_bytes = |row: &Row| {
        side(row)
            .since_last
            .and_then(|since_last| since_last.bytes.checked_div(since_last.writes))
            .unwrap_or(0)
    };
    let busiest = |rows: &[Row], peer: &Option<String>| {
        let rails = rows.iter().filter(|row| row.peer == *peer);
        let loads = rails.filter_map(|row| Some((load(row)?, write_bytes(row))));
        let (load, write_bytes) = loads.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
        (load >= BUSY || write_bytes >= SHARED_BYTES).then_some(load)
    };
    for at in 0..rows.len() {
        let busiest = busiest(rows, &rows[at].peer);
        let row = &mut rows[at];
        let is_slow = load(row)
            .zip(busiest)
            .is_some_and(|(load, busiest)| load < busiest * SLOW);
        if is_slow && row.condition == Condition::Good {
            row.condition = Condition::Slow;
        }
    }
}

pub fn of_snapshot(snapshot: &Snapshot, by_peer: bool) -> Vec<(&Job, Vec<Row>)> {
    snapshot
        .jobs
        .iter()
        .map(|job| (job, of_job(job, by_peer)))
        .collect()
}

#[cfg(test)]
pub mod tests;
