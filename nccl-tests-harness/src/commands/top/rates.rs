//! The traffic between two looks. Pure: without a clock and without files.
//!
//! A record with the sequence of the look before describes the same lane. Another sequence, or a
//! counter that went backwards, begins a new lane. Counts are added up here by rail, peer and
//! direction, so that a sum does not fall when the record of a closed connection is reused. No data
//! of a process can make this module panic or grow without end.

use super::look::{self, FileId, Look, PassedOver};
use nccl_net_spark::counters::layout::{Counts, Direction, Record, State};
use nccl_net_spark::counters::nic::{self, PortCounters};
use nccl_net_spark::flow::stall::Cause;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// The traffic over one rail, with one peer, in one direction: of all connections of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    /// The rail of this host.
    pub rail: String,
    /// The peer's host.
    pub peer: String,
    pub direction: Direction,
    pub side: Side,
}

/// The figures of one direction, with the field names of the JSON.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Side {
    /// Counts since the process started, as far as they were read.
    #[serde(skip)]
    pub total: Counts,
    /// Counts since the look before, unknown at the first look. `longest_ns` is that of `total`.
    #[serde(skip)]
    pub gained: Option<Counts>,
    /// Highest payload rate of the rails in any record, or 0 where it is unknown.
    #[serde(skip)]
    pub bits_per_s: u64,
    /// Bytes since the process started.
    pub bytes: u64,
    /// Writes since the process started.
    pub writes: u64,
    pub bytes_per_s: Option<f64>,
    /// Part of the job's bytes in this direction, in percent.
    pub share_percent: Option<f64>,
    /// Open connections.
    pub connections: usize,
    /// Open connections that the rail carries for.
    pub carrying: usize,
    /// The greatest cause of the connections' present stalls.
    #[serde(skip)]
    pub stall: Option<Cause>,
}

impl Side {
    /// Adds the counts and connections of `other`.
    pub fn add(&mut self, other: &Self) {
        self.total = sum(&self.total, &other.total);
        self.gained = match (self.gained, other.gained) {
            (Some(gained), Some(more)) => Some(sum(&gained, &more)),
            (gained, more) => gained.or(more),
        };
        self.bits_per_s = self.bits_per_s.max(other.bits_per_s);
        self.connections += other.connections;
        self.carrying += other.carrying;
        self.stall = self.stall.max(other.stall);
    }
}

/// A process that keeps counters.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The process at this look.
    pub seen: look::Job,
    /// Time since the look before, unknown at the first look.
    pub elapsed_ns: Option<u64>,
    /// Flows, sorted by rail, peer and direction.
    pub flows: Vec<Flow>,
}

/// Counters of a rail's port: those of all processes that use it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Port {
    pub rail: String,
    /// Counts since the driver was loaded, by the kernel's names.
    pub counters: PortCounters,
    /// Rates of the counters that have grown since the look before. Unknown at the first look.
    pub per_s: Option<BTreeMap<String, f64>>,
}

/// A look with the traffic since the one before.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Picture {
    /// Jobs, sorted by process number.
    pub jobs: Vec<Job>,
    /// Number of processes whose open files this user may not see.
    pub hidden: usize,
    pub passed_over: Vec<PassedOver>,
    /// Ports, sorted by rail.
    pub ports: Vec<Port>,
}

/// The memory of the look before.
#[derive(Debug, Default)]
pub struct Rates {
    jobs: HashMap<(u32, FileId), Known>,
    ports: BTreeMap<String, PortCounters>,
    ports_at_ns: u64,
}

/// A process at the look before.
#[derive(Debug, Default)]
struct Known {
    at_ns: u64,
    /// True where all records were read: a record that was not there is new.
    is_whole: bool,
    lanes: HashMap<usize, Record>,
    totals: BTreeMap<Key, Counts>,
}

type Key = (String, String, Direction);

impl Rates {
    /// Takes a look, and compares it with the one before.
    pub fn take(&mut self, look: Look) -> Picture {
        let mut jobs = HashMap::new();
        let elapsed_ns = look.ports_at_ns.saturating_sub(self.ports_at_ns);
        let port = |(rail, counters): (&String, &PortCounters)| {
            let grown = self.ports.get(rail).map(|before| nic::growth(before, counters));
            let per_s = |(name, count)| Some((name, per_second(count, elapsed_ns)?));
            let per_s = grown.map(|grown| grown.into_iter().filter_map(per_s).collect());
            Port { rail: rail.clone(), counters: counters.clone(), per_s }
        };
        let ports = look.ports.iter().map(port).collect();
        let mut picture = Picture { hidden: look.hidden, passed_over: look.passed_over, jobs: Vec::new(), ports };
        (self.ports, self.ports_at_ns) = (look.ports, look.ports_at_ns);
        for job in look.jobs {
            let before = self.jobs.remove(&(job.pid, job.file));
            let elapsed_ns = before.as_ref().map(|before| job.at_ns.saturating_sub(before.at_ns));
            let flows = flows(before.as_ref(), &job.counters.records);
            let known = Known {
                at_ns: job.at_ns,
                is_whole: job.counters.passed_over == 0,
                totals: flows.iter().map(|(key, flow)| (key.clone(), flow.side.total)).collect(),
                lanes: job.counters.records.iter().map(|record| (record.index, record.clone())).collect(),
            };
            jobs.insert((job.pid, job.file), known);
            picture.jobs.push(Job { seen: job, elapsed_ns, flows: flows.into_values().collect() });
        }
        self.jobs = jobs;
        picture
    }
}

/// Adds up the records of each flow.
fn flows(before: Option<&Known>, records: &[Record]) -> BTreeMap<Key, Flow> {
    let mut flows: BTreeMap<Key, Flow> = BTreeMap::new();
    for record in records {
        let key = (record.rail.clone(), record.peer.clone(), record.direction);
        let total = before.and_then(|before| before.totals.get(&key)).copied().unwrap_or_default();
        let flow = flows.entry(key).or_insert_with(|| Flow {
            rail: record.rail.clone(),
            peer: record.peer.clone(),
            direction: record.direction,
            side: Side { total, gained: before.map(|_| Counts::default()), ..Side::default() },
        });
        let new = before.map_or(record.counts, |before| gained(before, record));
        flow.side.add(&Side {
            total: new,
            gained: before.map(|_| new),
            bits_per_s: record.bits_per_s,
            connections: usize::from(record.state != State::Closed),
            carrying: usize::from(record.state == State::Carries),
            stall: record
                .stall
                .filter(|_| record.state != State::Closed)
                .and_then(|(cause, _)| Cause::of_number(cause.into())),
            ..Side::default()
        });
    }
    for Flow { side, .. } in flows.values_mut() {
        side.gained = side.gained.map(|gained| Counts { longest_ns: side.total.longest_ns, ..gained });
    }
    flows
}

/// Returns the counts of a record since the look before.
fn gained(before: &Known, record: &Record) -> Counts {
    match before.lanes.get(&record.index) {
        Some(old) if old.sequence == record.sequence => {
            // Counters that went backwards belong to another lane, or are forged.
            difference(&old.counts, &record.counts).unwrap_or(record.counts)
        }
        Some(_) => record.counts,
        None if before.is_whole => record.counts,
        // At the look before, the record may have been one that was being changed. The time of its
        // counts is unknown.
        None => Counts { longest_ns: record.counts.longest_ns, ..Counts::default() },
    }
}

/// Adds up two counts. `longest_ns` is the longer one.
pub fn sum(a: &Counts, b: &Counts) -> Counts {
    let sum = each(a, b, |a, b| Some(a.saturating_add(b)));
    Counts { longest_ns: a.longest_ns.max(b.longest_ns), ..sum.unwrap_or_default() }
}

/// Subtracts `old` from `new`, or returns `None` if any counter went backwards. `longest_ns` is the
/// new one.
fn difference(old: &Counts, new: &Counts) -> Option<Counts> {
    Some(Counts { longest_ns: new.longest_ns, ..each(new, old, u64::checked_sub)? })
}

fn each(a: &Counts, b: &Counts, both: fn(u64, u64) -> Option<u64>) -> Option<Counts> {
    Some(Counts {
        bytes: both(a.bytes, b.bytes)?,
        writes: both(a.writes, b.writes)?,
        timed_writes: both(a.timed_writes, b.timed_writes)?,
        timed_ns: both(a.timed_ns, b.timed_ns)?,
        longest_ns: both(a.longest_ns, b.longest_ns)?,
        losses: both(a.losses, b.losses)?,
        recoveries: both(a.recoveries, b.recoveries)?,
        lost_ns: both(a.lost_ns, b.lost_ns)?,
        stalls: both(a.stalls, b.stalls)?,
        stalled_ns: both(a.stalled_ns, b.stalled_ns)?,
    })
}

/// Returns `amount` for each second, or `None` if no time has passed.
pub fn per_second(amount: u64, elapsed_ns: u64) -> Option<f64> {
    (elapsed_ns > 0).then(|| amount as f64 * 1e9 / elapsed_ns as f64)
}

/// Returns `part` of `whole` in percent, or `None` for an empty whole.
pub fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}

/// Returns the mean time from post to confirmation in µs, or `None` if no write was timed.
pub fn mean_us(counts: &Counts) -> Option<f64> {
    (counts.timed_writes > 0).then(|| counts.timed_ns as f64 / counts.timed_writes as f64 / 1e3)
}

#[cfg(test)]
mod tests;
