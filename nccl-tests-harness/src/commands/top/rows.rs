//! What is shown of a picture: a row for each job, for each of its peers if asked for, and for each rail. Pure.

use super::rates::{self, Flow, Job, Picture};
use nccl_net_spark::counters::layout::{Counts, Direction};
use std::collections::BTreeMap;

/// A rail that carries less than this part of what the busiest one of the job carries, each by its own rate, is marked.
const SLOW: f64 = 0.5;
/// Rails are compared where the busiest one carries at least this part of its payload rate.
const BUSY: f64 = 0.1;
/// They are compared at any rate where its writes have at least this size on average: smaller
/// messages may go by one rail alone.
const SHARED_BYTES: u64 = 64 << 10;

/// What a row is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// A job, over all rails and peers.
    Job,
    /// One of its peers, over all rails.
    Peer(String),
    /// A rail, over all peers.
    Rail(String),
    /// A rail, to and from one peer.
    RailOfPeer {
        /// The rail here.
        rail: String,
        /// The peer's host.
        peer: String,
    },
}

/// How the connections of a row are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// All carry, as far as anybody knows.
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

/// A line of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// What it is about.
    pub subject: Subject,
    /// What the process sends.
    pub sent: Side,
    /// What it receives.
    pub received: Side,
    /// The row's part of the job's bytes in both directions, in percent.
    pub share_percent: Option<f64>,
    /// The rails' payload rate, where the row is one rail's; 0 if it is not known.
    pub bits_per_s: u64,
    /// How the connections are.
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

    /// Stalls are a connection's and not a rail's: rows of rails have none.
    pub fn has_stalls(&self) -> bool {
        matches!(self.subject, Subject::Job | Subject::Peer(_))
    }

    fn of(subject: Subject) -> Self {
        let (side, condition) = (Side::default(), Condition::Good);
        Self { subject, sent: side, received: side, share_percent: None, bits_per_s: 0, condition }
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

/// The rows of a job: its own, then for each peer its own and its rails', or the rails' alone.
pub fn of_job(job: &Job, by_peer: bool) -> Vec<Row> {
    let mut whole = Row::of(Subject::Job);
    let mut below: BTreeMap<(Option<&str>, Option<&str>), Row> = BTreeMap::new();
    for flow in &job.flows {
        let (rail, peer) = (flow.rail.clone(), flow.peer.clone());
        whole.add(flow);
        if by_peer {
            let of_peer = below.entry((Some(&flow.peer), None));
            of_peer.or_insert_with(|| Row::of(Subject::Peer(peer.clone()))).add(flow);
            let of_rail = below.entry((Some(&flow.peer), Some(&flow.rail)));
            of_rail.or_insert_with(|| Row::of(Subject::RailOfPeer { rail, peer })).add(flow);
        } else {
            below.entry((None, Some(&flow.rail))).or_insert_with(|| Row::of(Subject::Rail(rail))).add(flow);
        }
    }
    let mut rows = vec![whole];
    rows.extend(below.into_values());
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

/// Rails of one job and peer carry equal parts of their rates. Only rails with connections in this direction are compared.
fn mark_slow(rows: &mut [Row], side: fn(&Row) -> Side) {
    let load = |row: &Row| match side(row) {
        Side { connections: 1.., bytes_per_s: Some(bytes_per_s), .. } if row.is_rail() => {
            Some(bytes_per_s * 8.0 / row.bits_per_s.max(1) as f64)
        }
        _ => None,
    };
    let write_bytes =
        |row: &Row| side(row).gained.and_then(|gained| gained.bytes.checked_div(gained.writes)).unwrap_or(0);
    let busiest = |rows: &[Row], peer: Option<&str>| {
        let rails = rows.iter().filter(|row| row.peer() == peer);
        let loads = rails.filter_map(|row| Some((load(row)?, write_bytes(row))));
        let (load, write_bytes) = loads.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
        (load >= BUSY || write_bytes >= SHARED_BYTES).then_some(load)
    };
    let peers: Vec<Option<String>> = rows.iter().map(|row| row.peer().map(str::to_owned)).collect();
    for (at, peer) in peers.iter().enumerate() {
        let busiest = busiest(rows, peer.as_deref());
        let row = &mut rows[at];
        let is_slow = load(row).zip(busiest).is_some_and(|(load, busiest)| load < busiest * SLOW);
        if is_slow && row.condition == Condition::Good {
            row.condition = Condition::Slow;
        }
    }
}

impl Row {
    /// True for a rail, over all peers or of one.
    pub fn is_rail(&self) -> bool {
        matches!(self.subject, Subject::Rail(_) | Subject::RailOfPeer { .. })
    }

    /// The peer that the row is about.
    pub fn peer(&self) -> Option<&str> {
        match &self.subject {
            Subject::Peer(peer) | Subject::RailOfPeer { peer, .. } => Some(peer),
            Subject::Job | Subject::Rail(_) => None,
        }
    }
}

/// What the jobs are ordered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// The number of the process.
    #[default]
    Pid,
    /// Most bytes a second first, both directions together.
    Rate,
    /// The rank, then the number of the process.
    Rank,
}

impl Order {
    /// The one after this, round and round.
    pub fn next(self) -> Self {
        match self {
            Self::Pid => Self::Rate,
            Self::Rate => Self::Rank,
            Self::Rank => Self::Pid,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pid => "pid",
            Self::Rate => "rate",
            Self::Rank => "rank",
        }
    }
}

/// Each job with its rows.
pub fn of_picture(picture: &Picture, by_peer: bool, order: Order) -> Vec<(&Job, Vec<Row>)> {
    let mut jobs: Vec<_> = picture.jobs.iter().map(|job| (job, of_job(job, by_peer))).collect();
    let rate = |rows: &[Row]| {
        rows.first().map_or(0.0, |row| row.sent.bytes_per_s.unwrap_or(0.0) + row.received.bytes_per_s.unwrap_or(0.0))
    };
    match order {
        Order::Pid => {}
        Order::Rate => jobs.sort_by(|(_, a), (_, b)| rate(b).total_cmp(&rate(a))),
        Order::Rank => jobs.sort_by_key(|(job, _)| (job.rank.is_none(), job.rank)),
    }
    jobs
}

#[cfg(test)]
pub mod tests;
