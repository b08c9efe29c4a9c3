//! The rows of a picture: one for each job, for each of its peers if asked for, and for each rail.
//! Pure.

use super::rates::{self, Flow, Job, Picture};
use nccl_net_spark::counters::layout::{Counts, Direction};
use serde::Serialize;
use std::collections::BTreeMap;

/// A rail that carries less than this part of what the busiest one of the job carries, each by its
/// own rate, is marked.
const SLOW: f64 = 0.5;
/// Rails are compared where the busiest one carries at least this part of its payload rate.
const BUSY: f64 = 0.1;
/// They are compared at any rate where its writes have at least this size on average: smaller
/// messages may go by one rail alone.
const SHARED_BYTES: u64 = 64 << 10;

/// State of a row's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    /// Every connection carries.
    Good,
    /// This rail carries less than half of what another does.
    Slow,
    /// A rail of a connection is lost, or has not carried yet.
    Lost,
}

/// One direction of a row.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Side {
    /// Since the process started.
    pub total: Counts,
    /// Since the look before.
    pub gained: Option<Counts>,
    /// Of `gained`, for each second.
    pub bytes_per_s: Option<f64>,
    /// The row's part of the job's bytes in this direction, in percent.
    pub share_percent: Option<f64>,
    /// Connections that are open.
    pub connections: usize,
    /// Of those, the ones that this rail carries for.
    pub carrying: usize,
}

/// A line of the table. The row of the whole job has neither a peer nor a rail.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Host of the peer; none over all peers.
    pub peer: Option<String>,
    /// The rail here; none over all rails.
    pub rail: Option<String>,
    /// Figures of the process as a sender.
    pub sent: Side,
    /// Figures of the process as a receiver.
    pub received: Side,
    /// The row's part of the job's bytes in both directions, in percent.
    pub share_percent: Option<f64>,
    /// The rails' payload rate, where the row is one rail's; 0 if it is not known.
    pub bits_per_s: u64,
    /// State of the connections.
    pub condition: Condition,
}

impl Row {
    /// Both directions together, since the process started.
    pub fn total(&self) -> Counts {
        rates::sum(&self.sent.total, &self.received.total)
    }

    /// Connections that are open, and those of them that are carried for.
    pub fn connections(&self) -> (usize, usize) {
        (self.sent.connections + self.received.connections, self.sent.carrying + self.received.carrying)
    }

    /// The mean time of a write in this interval, in µs.
    pub fn mean_us(&self) -> Option<f64> {
        self.sent.gained.as_ref().and_then(rates::mean_us)
    }

    /// Both directions together; 0 where the rates are not known.
    pub fn bytes_per_s(&self) -> f64 {
        self.sent.bytes_per_s.unwrap_or(0.0) + self.received.bytes_per_s.unwrap_or(0.0)
    }

    /// Stalls are a connection's and not a rail's: rows of rails have none.
    pub fn has_stalls(&self) -> bool {
        self.rail.is_none()
    }

    fn new(peer: Option<&str>, rail: Option<&str>) -> Self {
        let (side, condition) = (Side::default(), Condition::Good);
        let (peer, rail) = (peer.map(str::to_owned), rail.map(str::to_owned));
        Self { peer, rail, sent: side, received: side, share_percent: None, bits_per_s: 0, condition }
    }

    fn add(&mut self, flow: &Flow) {
        let side = match flow.direction {
            Direction::Send => &mut self.sent,
            Direction::Receive => &mut self.received,
        };
        side.total = rates::sum(&side.total, &flow.total);
        side.gained = match (side.gained, flow.gained) {
            (Some(gained), Some(more)) => Some(rates::sum(&gained, &more)),
            (gained, more) => gained.or(more),
        };
        side.connections += flow.connections;
        side.carrying += flow.carrying;
        self.bits_per_s = self.bits_per_s.max(flow.bits_per_s);
        if side.carrying < side.connections {
            self.condition = Condition::Lost;
        }
    }

    fn gained_bytes(&self) -> u64 {
        let bytes = |side: &Side| side.gained.map_or(0, |gained| gained.bytes);
        bytes(&self.sent).saturating_add(bytes(&self.received))
    }
}

/// Returns the rows of a job: the job's, then for each peer its own and its rails', or with
/// `by_peer` false the rails' alone.
pub fn of_job(job: &Job, by_peer: bool) -> Vec<Row> {
    // None comes before all names, so a row comes before the rows that it is the sum of.
    let mut rows: BTreeMap<(Option<&str>, Option<&str>), Row> = BTreeMap::from([((None, None), Row::new(None, None))]);
    for flow in &job.flows {
        let peer = by_peer.then_some(flow.peer.as_str());
        let of_peer = peer.map(|peer| (Some(peer), None));
        for (peer, rail) in [(None, None)].into_iter().chain(of_peer).chain([(peer, Some(flow.rail.as_str()))]) {
            rows.entry((peer, rail)).or_insert_with(|| Row::new(peer, rail)).add(flow);
        }
    }
    let mut rows: Vec<Row> = rows.into_values().collect();
    measure(&mut rows, job.elapsed_ns);
    rows
}

/// Fills in what needs the whole job: rates, shares, and which rails are slow beside the others.
fn measure(rows: &mut [Row], elapsed_ns: Option<u64>) {
    let whole = rows[0].clone();
    for row in rows.iter_mut() {
        row.share_percent = elapsed_ns.and_then(|_| rates::percent(row.gained_bytes(), whole.gained_bytes()));
        // Before a process has a connection in this direction, nothing goes there.
        for (side, all) in [(&mut row.sent, &whole.sent), (&mut row.received, &whole.received)] {
            let bytes = side.gained.map_or(0, |gained| gained.bytes);
            side.bytes_per_s = elapsed_ns.and_then(|elapsed_ns| rates::per_second(bytes, elapsed_ns));
            side.share_percent = all.gained.and_then(|all| rates::percent(bytes, all.bytes));
        }
    }
    for side in [|row: &Row| row.sent, |row: &Row| row.received] {
        mark_slow(rows, side);
    }
}

/// Rails of one job and peer carry equal parts of their rates. Only rails with connections in this
/// direction are compared.
fn mark_slow(rows: &mut [Row], side: fn(&Row) -> Side) {
    let load = |row: &Row| match side(row) {
        Side { connections: 1.., bytes_per_s: Some(bytes_per_s), .. } if row.rail.is_some() => {
            Some(bytes_per_s * 8.0 / row.bits_per_s.max(1) as f64)
        }
        _ => None,
    };
    let write_bytes =
        |row: &Row| side(row).gained.and_then(|gained| gained.bytes.checked_div(gained.writes)).unwrap_or(0);
    let busiest = |rows: &[Row], peer: &Option<String>| {
        let rails = rows.iter().filter(|row| row.peer == *peer);
        let loads = rails.filter_map(|row| Some((load(row)?, write_bytes(row))));
        let (load, write_bytes) = loads.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
        (load >= BUSY || write_bytes >= SHARED_BYTES).then_some(load)
    };
    for at in 0..rows.len() {
        let busiest = busiest(rows, &rows[at].peer);
        let row = &mut rows[at];
        let is_slow = load(row).zip(busiest).is_some_and(|(load, busiest)| load < busiest * SLOW);
        if is_slow && row.condition == Condition::Good {
            row.condition = Condition::Slow;
        }
    }
}

/// Returns each job with its rows, in the order of the processes' numbers.
pub fn of_picture(picture: &Picture, by_peer: bool) -> Vec<(&Job, Vec<Row>)> {
    picture.jobs.iter().map(|job| (job, of_job(job, by_peer))).collect()
}

#[cfg(test)]
pub mod tests;
