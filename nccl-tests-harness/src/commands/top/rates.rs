//! Computes the traffic between two readings of all counters. This module uses no clock and no
//! files.
//!
//! A counters file has a record for each lane. A record with the same sequence as in the previous
//! reading describes the same lane. A different sequence, or a counter that decreased, begins a new
//! lane. This module adds up counts by rail, peer and direction, so that a sum does not fall when
//! the record of a closed connection is reused. No data of a process can make this module panic or
//! grow without limit.

use super::look::{self, FileId, Reading, SkippedProcess};
use host::counters::layout::{Counts, Direction, Record, State};
use host::counters::nic::{self, PortCounters};
use proto::flow::stall::Cause;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Traffic over one rail, with one peer, in one direction, over all connections of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    pub rail: String,
    pub peer: String,
    pub direction: Direction,
    pub side: Side,
}

/// The figures of one direction, with the field names of the JSON.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Side {
    /// Counts since the process started, as far as top has read them.
    #[serde(skip)]
    pub total: Counts,
    /// Counts since the previous reading, except `longest_ns`, which is the same as in `total`.
    /// Unknown at the first reading.
    #[serde(skip)]
    pub since_last: Option<Counts>,
    /// Highest payload rate that any record states for the rail, or 0 if unknown.
    #[serde(skip)]
    pub bits_per_s: u64,
    /// Bytes in `total`.
    pub bytes: u64,
    /// Writes in `total`.
    pub writes: u64,
    pub bytes_per_s: Option<f64>,
    /// Bytes since the previous reading, in percent of the job's bytes in the same direction since
    /// then.
    pub share_percent: Option<f64>,
    /// Number of open lanes. For a single rail this is the number of open connections.
    pub connections: usize,
    /// Number of open lanes that carry data.
    pub carrying: usize,
    /// The most important cause of the connections' current stalls.
    #[serde(skip)]
    pub stall: Option<Cause>,
}

impl Side {
    pub fn add(&mut self, other: &Self) {
        self.total = sum(&self.total, &other.total);
        self.since_last = match (self.since_last, other.since_last) {
            (Some(since_last), Some(more)) => Some(sum(&since_last, &more)),
            (since_last, more) => since_last.or(more),
        };
        self.bits_per_s = self.bits_per_s.max(other.bits_per_s);
        self.connections += other.connections;
        self.carrying += other.carrying;
        self.stall = self.stall.max(other.stall);
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub seen: look::Job,
    /// Time since the previous reading. Unknown at the first reading.
    pub elapsed_ns: Option<u64>,
    /// The flows, sorted by rail, peer and direction.
    pub flows: Vec<Flow>,
}

/// Counters of a rail's port since the driver was loaded, for all processes together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Port {
    pub rail: String,
    pub counters: PortCounters,
    /// Rates of the counters that have grown since the previous reading. Unknown at the first
    /// reading.
    pub per_s: Option<BTreeMap<String, f64>>,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    pub jobs: Vec<Job>,
    pub hidden: usize,
    pub passed_over: Vec<SkippedProcess>,
    pub uncounted: Vec<String>,
    pub ports: Vec<Port>,
}

#[derive(Debug, Default)]
pub struct Rates {
    jobs: HashMap<(u32, FileId), PreviousReading>,
    ports: BTreeMap<String, PortCounters>,
    ports_at_ns: u64,
}

#[derive(Debug, Default)]
struct PreviousReading {
    at_ns: u64,
    /// True if all records were read. Then a record that first appears in the next reading is new.
    is_whole: bool,
    lanes: HashMap<usize, Record>,
    totals: BTreeMap<Key, Counts>,
}

type Key = (String, String, Direction);

impl Rates {
    pub fn take(&mut self, reading: Reading) -> Snapshot {
        let mut jobs = HashMap::new();
        let elapsed_ns = reading.ports_at_ns.saturating_sub(self.ports_at_ns);
        let port = |(rail, counters): (&String, &PortCounters)| {
            let grown = self
                .ports
                .get(rail)
                .map(|before| nic::growth(before, counters));
            let per_s = |(name, count)| Some((name, per_second(count, elapsed_ns)?));
            let per_s = grown.map(|grown| grown.into_iter().filter_map(per_s).collect());
            Port {
                rail: rail.clone(),
                counters: counters.clone(),
                per_s,
            }
        };
        let ports = reading.ports.iter().map(port).collect();
        let Reading {
            hidden,
            passed_over,
            uncounted,
            ..
        } = reading;
        let mut snapshot = Snapshot {
            hidden,
            passed_over,
            uncounted,
            jobs: Vec::new(),
            ports,
        };
        self.ports = reading.ports;
        self.ports_at_ns = reading.ports_at_ns;
        for job in reading.jobs {
            let before = self.jobs.remove(&(job.pid, job.file));
            let elapsed_ns = before
                .as_ref()
                .map(|before| job.at_ns.saturating_sub(before.at_ns));
            let flows = flows(before.as_ref(), &job.counters.records);
            let previous = PreviousReading {
                at_ns: job.at_ns,
                is_whole: job.counters.passed_over == 0,
                totals: flows
                    .iter()
                    .map(|(key, flow)| (key.clone(), flow.side.total))
                    .collect(),
                lanes: job
                    .counters
                    .records
                    .iter()
                    .map(|record| (record.index, record.clone()))
                    .collect(),
            };
            jobs.insert((job.pid, job.file), previous);
            snapshot.jobs.push(Job {
                seen: job,
                elapsed_ns,
                flows: flows.into_values().collect(),
            });
        }
        self.jobs = jobs;
        snapshot
    }
}

fn flows(before: Option<&PreviousReading>, records: &[Record]) -> BTreeMap<Key, Flow> {
    let mut flows: BTreeMap<Key, Flow> = BTreeMap::new();
    for record in records {
        let key = (record.rail.clone(), record.peer.clone(), record.direction);
        let total = before
            .and_then(|before| before.totals.get(&key))
            .copied()
            .unwrap_or_default();
        let flow = flows.entry(key).or_insert_with(|| Flow {
            rail: record.rail.clone(),
            peer: record.peer.clone(),
            direction: record.direction,
            side: Side {
                total,
                since_last: before.map(|_| Counts::default()),
                ..Side::default()
            },
        });
        let new = before.map_or(record.counts, |before| growth(before, record));
        flow.side.add(&Side {
            total: new,
            since_last: before.map(|_| new),
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
        side.since_last = side.since_last.map(|since_last| Counts {
            longest_ns: side.total.longest_ns,
            ..since_last
        });
    }
    flows
}

fn growth(before: &PreviousReading, record: &Record) -> Counts {
    match before.lanes.get(&record.index) {
        Some(old) if old.sequence == record.sequence => {
            // Decreased counters belong to another lane, or are forged.
            difference(&old.counts, &record.counts).unwrap_or(record.counts)
        }
        Some(_) => record.counts,
        None if before.is_whole => record.counts,
        // The previous reading may have skipped this record, so the time of its counts is unknown.
        None => Counts {
            longest_ns: record.counts.longest_ns,
            ..Counts::default()
        },
    }
}

pub fn sum(a: &Counts, b: &Counts) -> Counts {
    let sum = each(a, b, |a, b| Some(a.saturating_add(b)));
    Counts {
        longest_ns: a.longest_ns.max(b.longest_ns),
        ..sum.unwrap_or_default()
    }
}

/// Returns the growth of each counter, or `None` if any decreased. `longest_ns` is that of `new`.
fn difference(old: &Counts, new: &Counts) -> Option<Counts> {
    Some(Counts {
        longest_ns: new.longest_ns,
        ..each(new, old, u64::checked_sub)?
    })
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

/// Returns `amount` per second, or `None` if no time has passed.
pub fn per_second(amount: u64, elapsed_ns: u64) -> Option<f64> {
    (elapsed_ns > 0).then(|| amount as f64 * 1e9 / elapsed_ns as f64)
}

/// Returns `part` of `whole` in percent, or `None` for an empty whole.
pub fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}

/// Returns the mean time from post to confirmation of the timed writes in us, or `None` if no write
/// was timed.
pub fn mean_us(counts: &Counts) -> Option<f64> {
    (counts.timed_writes > 0).then(|| counts.timed_ns as f64 / counts.timed_writes as f64 / 1e3)
}

#[cfg(test)]
mod tests;
