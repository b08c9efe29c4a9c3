//! Reaction of a receiver to lost and returning rails. It reports the receives that have arrived,
//! and grants again those whose CTS may be lost.

use super::{Found, RecvPath, Source, keep, kept, source_of};
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::Fault;
use crate::comm::datapath::lane::{Lane, Stopped};
use crate::comm::datapath::path::{DataPath, Faults};
use crate::comm::datapath::rails::Rails;
use crate::comm::datapath::status::Fenced;
use crate::comm::datapath::wr_id::Work;
use crate::error::{Network, Result, Usage};
use crate::flow::receives::Grant;
use crate::wire::control::{Progress, Received};
use crate::wire::cts::{Entry, Epoch, Terms};
use crate::wire::ids::LaneId;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Time for a device to return the completions of stopped queue pairs, before the device is checked
/// for being cut off or removed. It usually takes microseconds.
const FLUSH_LIMIT: Duration = Duration::from_millis(10);
/// Total time for a device that answers to return those completions.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

impl RecvPath {
    /// Processes everything that a lane has received, until its queue pairs are flushed.
    fn drain(&mut self, context: &PathContext, lane: LaneId) -> Stopped {
        let begun = Instant::now();
        let mut asked = begun;
        while !self.rails.lanes[lane.index()].is_drained() {
            let is_broken = match self.absorb(context, lane) {
                Err(fault) => self.is_broken_by(context, lane, *fault),
                Ok(_) => false,
            };
            if !is_broken && asked.elapsed() < FLUSH_LIMIT {
                continue;
            }
            asked = Instant::now();
            let stopped = self.rails.lanes[lane.index()].set_aside();
            if stopped != Stopped::Flushing {
                return stopped;
            }
            if is_broken || begun.elapsed() > DRAIN_LIMIT {
                let (rail, peer) = (self.rails.lanes[lane.index()].rail.name(), context.peer.name.clone());
                self.end(Box::new(Network::NotFlushed { rail, peer }.into()));
                break;
            }
        }
        Stopped::Flushing
    }

    /// Processes the remaining completions of a device that was removed.
    fn take_the_rest(&mut self, context: &PathContext, lane: LaneId) {
        loop {
            match self.absorb(context, lane) {
                Ok(Found::Nothing) => return,
                Ok(_) => {}
                Err(fault) => {
                    if self.is_broken_by(context, lane, *fault) {
                        return;
                    }
                }
            }
        }
    }

    /// Handles a fault of a lane that is being stopped, and returns true if its device does not
    /// answer. A protocol violation ends the connection. All other faults are a consequence of the
    /// lost rail.
    fn is_broken_by(&mut self, context: &PathContext, lane: LaneId, fault: Fault) -> bool {
        let is_broken = matches!(fault, Fault::Device(_));
        if let Fault::Violation(_) = fault {
            // The caller gets the error from its next call.
            let _ = self.fault(context, lane, fault);
        }
        is_broken
    }

    /// Sends again the grants that may be lost, as far as the rails have room.
    fn repay(&mut self, context: &PathContext) {
        if self.rails.status.has_failed() {
            return;
        }
        loop {
            let any = self.cts_lane();
            let Self { receives, rails: Rails { lanes, .. }, .. } = self;
            let Some(owed) = receives.next_owed(|lane| lanes[lane.unwrap_or(any).index()].has_room(0)) else { return };
            let (slot, lane) = (owed.grant.slot, owed.lane.unwrap_or(any));
            self.receives.repeats(slot, lane);
            if let Err(error) = self.write_from_shadow(lane, owed.grant, owed.parts, Work::Repeat { slot }) {
                self.lose_by(context, lane, error.to_string());
            }
        }
    }
}

impl RecvPath {
    /// Starts a new epoch for a lane whose device has returned, and grants every waiting receive
    /// again with the current keys.
    fn renew(&mut self, context: &PathContext, lane: LaneId) -> Result<()> {
        self.epoch = self.epoch.next();
        self.since[lane.index()] = self.epoch;
        self.since.iter_mut().for_each(|since| *since = since.near(self.epoch));
        let mut waiting = Vec::new();
        self.receives.renew(|grant, parts| waiting.push((grant, parts)));
        for (grant, parts) in waiting {
            for part in 0..parts {
                self.renew_entry(context, grant, part)?;
            }
        }
        self.repay(context);
        Ok(())
    }

    /// Writes the entry of a receive's part into the shadow again, with the current keys.
    fn renew_entry(&self, context: &PathContext, grant: Grant, part: usize) -> Result<()> {
        let Source { memory: id, strict } = self.memory[source_of(grant, part)];
        let memory = context
            .registrations
            .find(id)
            .ok_or_else(|| Usage::DeregisteredReceive { peer: context.peer.name.clone() })?;
        let Some(kept) = kept(&self.shadow, grant, part) else { return Ok(()) };
        let words = std::array::from_fn(|word| kept[word].load(Ordering::Relaxed));
        let Some(old) = Entry::whole(words, grant.sequence) else { return Ok(()) };
        let (addr, bytes, tag, parts, part) = (old.addr(), old.bytes(), old.tag(), old.parts(), old.part());
        let terms = Terms { addr, bytes, tag, parts, part, epoch: self.epoch };
        keep(kept, &Entry::new(&terms, &self.keys(&memory, strict), grant.sequence));
        Ok(())
    }
}

impl DataPath for RecvPath {
    fn renewed_epoch(&mut self, context: &PathContext, lane: LaneId, has_new_keys: bool) -> Result<Epoch> {
        if has_new_keys {
            self.renew(context, lane)?;
        }
        Ok(self.since[lane.index()])
    }

    fn take_epoch(&mut self, _lane: LaneId, _epoch: Epoch) {}

    fn rails(&mut self) -> &mut Rails {
        &mut self.rails
    }

    fn span(&self) -> (u64, u64) {
        self.receives.span()
    }

    fn lose(&mut self, context: &PathContext, lane: LaneId) -> Fenced {
        // Take in everything that has arrived on the lane. The sender may have seen it
        // acknowledged, and does not send it again then.
        let stopped = match self.rails.lanes[lane.index()].stop() {
            Stopped::Flushing => self.drain(context, lane),
            stopped => stopped,
        };
        match stopped {
            Stopped::Not => {
                self.rails.striping.lose(lane);
                return Fenced::NotYet;
            }
            Stopped::Gone => self.take_the_rest(context, lane),
            Stopped::Flushing => {}
        }
        self.rails.close_lane(lane);
        Fenced::Now
    }

    fn progress(&self) -> Progress {
        self.receives.progress()
    }

    fn received(&self) -> Received {
        self.receives.received()
    }

    fn recover(&mut self, context: &PathContext, lane: LaneId, _received: &Received) -> Result<()> {
        self.receives.lost(lane);
        self.repay(context);
        Ok(())
    }

    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool> {
        if !self.rails.regain(lane, new) {
            return Ok(false);
        }
        self.repay(context);
        Ok(true)
    }

    fn poll(&mut self, context: &PathContext) -> Result<bool> {
        if self.rails.status.has_failed() {
            return Ok(false);
        }
        let mut moved = false;
        for lane in LaneId::all(self.rails.lanes.len()) {
            moved |= self.take_in(context, lane).map_err(|error| *error)? != Found::Nothing;
        }
        self.repay(context);
        Ok(moved)
    }

    fn is_owing(&mut self) -> bool {
        // Without an open lane nothing can be granted again.
        self.receives.is_owing() && self.rails.lanes.iter().any(Lane::is_open)
    }

    fn delivered(&self) -> u64 {
        self.receives.delivered()
    }

    fn holds_buffers(&self) -> bool {
        self.receives.is_awaited()
    }
}
