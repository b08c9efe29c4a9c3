//! What has happened between two looks. Pure: it knows neither a clock nor a file.
//!
//! A record describes the same lane as before while its sequence is the same. With another one it starts anew, and so does one whose counters
//! went backwards. What was counted is added up here, by rail, peer and direction, so that a sum does not fall when a closed connection's record is used for
//! another.
//! Nothing that a process writes makes anything here panic or grow without end.

use super::look::{FileId, Look, PassedOver};
use nccl_net_spark::counters::layout::{Counts, Direction, Record, State};
use std::collections::{BTreeMap, HashMap};

/// What flows over one rail, to or from one peer, in one direction: the connections of a job that do this, together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// The rail here.
    pub rail: String,
    /// The peer's host.
    pub peer: String,
    /// Which way.
    pub direction: Direction,
    /// What was counted since the process started, as far as it was seen.
    pub total: Counts,
    /// What was counted since the look before; not known at the first look. Of `longest_ns` it has what `total` has.
    pub gained: Option<Counts>,
    /// Connections that are open.
    pub connections: usize,
    /// Of those, the ones that this rail carries for.
    pub carrying: usize,
    /// The rail's payload rate, the highest that any record says; 0 if it is not known.
    pub bits_per_s: u64,
}

/// A process that keeps counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Its number here.
    pub pid: u32,
    /// The command's name.
    pub command: String,
    /// What its launcher calls it.
    pub rank: Option<u32>,
    /// How long before this look it was looked at; not known at the first look.
    pub elapsed_ns: Option<u64>,
    /// By rail, peer and direction.
    pub flows: Vec<Flow>,
    /// Lanes that the process could not count.
    pub not_counted: u64,
    /// Records that made no sense, or were being changed.
    pub passed_over: usize,
}

/// One look, with what has happened since the one before.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Picture {
    /// By their numbers.
    pub jobs: Vec<Job>,
    /// Processes whose open files this user may not see.
    pub hidden: usize,
    /// What is not shown, and why.
    pub passed_over: Vec<PassedOver>,
}

/// Remembers what the look before said.
#[derive(Debug, Default)]
pub struct Rates {
    jobs: HashMap<(u32, FileId), Known>,
}

/// What is known of a process from the look before.
#[derive(Debug, Default)]
struct Known {
    at_ns: u64,
    /// Whether all its records were read: then what is new began since.
    is_whole: bool,
    lanes: HashMap<usize, Record>,
    totals: BTreeMap<Key, Counts>,
}

type Key = (String, String, Direction);

impl Rates {
    /// Takes in a look.
    pub fn take(&mut self, look: Look) -> Picture {
        let mut jobs = HashMap::new();
        let mut picture = Picture { hidden: look.hidden, passed_over: look.passed_over, jobs: Vec::new() };
        for job in look.jobs {
            let before = self.jobs.remove(&(job.pid, job.file));
            let elapsed_ns = before.as_ref().map(|before| job.at_ns.saturating_sub(before.at_ns));
            let flows = flows(before.as_ref(), &job.counters.records);
            let known = Known {
                at_ns: job.at_ns,
                is_whole: job.counters.passed_over == 0,
                totals: flows.iter().map(|(key, flow)| (key.clone(), flow.total)).collect(),
                lanes: job.counters.records.into_iter().map(|record| (record.index, record)).collect(),
            };
            jobs.insert((job.pid, job.file), known);
            picture.jobs.push(Job {
                pid: job.pid,
                command: job.command,
                rank: job.rank,
                elapsed_ns,
                flows: flows.into_values().collect(),
                not_counted: job.counters.not_counted,
                passed_over: job.counters.passed_over,
            });
        }
        self.jobs = jobs;
        picture
    }
}

/// What the records say together, and what of it is new.
fn flows(before: Option<&Known>, records: &[Record]) -> BTreeMap<Key, Flow> {
    let mut flows: BTreeMap<Key, Flow> = BTreeMap::new();
    for record in records {
        let key = (record.rail.clone(), record.peer.clone(), record.direction);
        let flow = flows.entry(key).or_insert_with_key(|key| Flow {
            rail: record.rail.clone(),
            peer: record.peer.clone(),
            direction: record.direction,
            total: before.and_then(|before| before.totals.get(key)).copied().unwrap_or_default(),
            gained: before.map(|_| Counts::default()),
            connections: 0,
            carrying: 0,
            bits_per_s: 0,
        });
        let new = match before {
            None => record.counts,
            Some(before) => gained(before, record),
        };
        flow.total = sum(&flow.total, &new);
        flow.gained = flow.gained.map(|gained| sum(&gained, &new));
        flow.connections += usize::from(record.state != State::Closed);
        flow.carrying += usize::from(record.state == State::Carries);
        flow.bits_per_s = flow.bits_per_s.max(record.bits_per_s);
    }
    for flow in flows.values_mut() {
        if let Some(gained) = &mut flow.gained {
            gained.longest_ns = flow.total.longest_ns;
        }
    }
    flows
}

/// What a record has counted since the look before.
fn gained(before: &Known, record: &Record) -> Counts {
    match before.lanes.get(&record.index) {
        Some(old) if old.sequence == record.sequence => {
            // Backwards: the counters of another lane, or of somebody who makes fun of us.
            difference(&old.counts, &record.counts).unwrap_or(record.counts)
        }
        Some(_) => record.counts,
        None if before.is_whole => record.counts,
        // It may have been one of those that were being changed: when it counted this is not known.
        None => Counts { longest_ns: record.counts.longest_ns, ..Counts::default() },
    }
}

/// Both together; of the longest the longer one.
pub fn sum(a: &Counts, b: &Counts) -> Counts {
    Counts {
        bytes: a.bytes.saturating_add(b.bytes),
        writes: a.writes.saturating_add(b.writes),
        timed_writes: a.timed_writes.saturating_add(b.timed_writes),
        timed_ns: a.timed_ns.saturating_add(b.timed_ns),
        longest_ns: a.longest_ns.max(b.longest_ns),
        losses: a.losses.saturating_add(b.losses),
        recoveries: a.recoveries.saturating_add(b.recoveries),
        lost_ns: a.lost_ns.saturating_add(b.lost_ns),
        stalls: a.stalls.saturating_add(b.stalls),
        stalled_ns: a.stalled_ns.saturating_add(b.stalled_ns),
    }
}

/// What `new` has more; nothing if any counter went backwards.
fn difference(old: &Counts, new: &Counts) -> Option<Counts> {
    if new.longest_ns < old.longest_ns {
        return None;
    }
    Some(Counts {
        bytes: new.bytes.checked_sub(old.bytes)?,
        writes: new.writes.checked_sub(old.writes)?,
        timed_writes: new.timed_writes.checked_sub(old.timed_writes)?,
        timed_ns: new.timed_ns.checked_sub(old.timed_ns)?,
        longest_ns: new.longest_ns,
        losses: new.losses.checked_sub(old.losses)?,
        recoveries: new.recoveries.checked_sub(old.recoveries)?,
        lost_ns: new.lost_ns.checked_sub(old.lost_ns)?,
        stalls: new.stalls.checked_sub(old.stalls)?,
        stalled_ns: new.stalled_ns.checked_sub(old.stalled_ns)?,
    })
}

/// `amount` in a second; not known if no time has passed.
pub fn per_second(amount: u64, elapsed_ns: u64) -> Option<f64> {
    (elapsed_ns > 0).then(|| amount as f64 * 1e9 / elapsed_ns as f64)
}

/// `part` of `whole` in percent; not known of nothing.
pub fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}

/// The mean time from post to confirmation, in µs; not known if nothing was timed.
pub fn mean_us(counts: &Counts) -> Option<f64> {
    (counts.timed_writes > 0).then(|| counts.timed_ns as f64 / counts.timed_writes as f64 / 1e3)
}

#[cfg(test)]
mod tests;
