//! Reaction of a sender to lost and returning rails. Bytes that the receiver does not have are sent
//! again over another rail.

use super::SendPath;
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::Fault;
use crate::comm::datapath::lane::{Lane, Stopped};
use crate::comm::datapath::load::Sending;
use crate::comm::datapath::path::DataPath;
use crate::comm::datapath::rails::Rails;
use crate::comm::datapath::status::Fenced;
use crate::error::{Result, Usage};
use crate::flow::next;
use crate::flow::sends::{Route, Stranded};
use crate::wire::MAX_RAILS;
use crate::wire::control::{Progress, Received};
use crate::wire::cts::Epoch;
use crate::wire::ids::LaneId;

impl SendPath {
    /// Finds new lanes for the shares that wait for one.
    fn reroute(&mut self, context: &PathContext) -> Result<()> {
        if self.rails.status.has_failed() {
            return Ok(());
        }
        let mut deregistered = false;
        let Self { sends, rails: Rails { lanes, striping, .. }, ring, since, .. } = self;
        self.is_stranded = sends.reroute(|Stranded { bytes, memory, sequence, part }| {
            // No entry is found while the receiver is just writing this grant again.
            let entry = next::granted(ring.words(), sequence, part)?;
            let is_usable = |by: &LaneId| lanes[by.index()].is_open() && entry.epoch().is_since(since[by.index()]);
            let wanted = striping.lane_for(bytes, &Sending(lanes));
            let by = Some(wanted).filter(is_usable).or_else(|| LaneId::all(lanes.len()).find(is_usable))?;
            let lane = &mut lanes[by.index()];
            let Some(memory) = context.registrations.find(memory) else {
                deregistered = true;
                return None;
            };
            striping.given(by, bytes, None);
            if striping.is_counted(bytes) {
                lane.began(bytes);
            }
            let lkey = memory.keys(lane.rail.id).map_or(0, |keys| keys.lkey);
            Some((by, Route { queue: lane.next_queue(), lkey, rkey: entry.rkey(by), timed: false }))
        });
        if deregistered {
            return Err(Usage::DeregisteredSend { peer: context.peer.name.clone() }.into());
        }
        let waiting: Vec<u16> = self.sends.waiting().collect();
        for request in waiting {
            self.post(context, request);
        }
        Ok(())
    }
}

impl DataPath for SendPath {
    fn rails(&mut self) -> &mut Rails {
        &mut self.rails
    }

    fn span(&self) -> (u64, u64) {
        self.sends.span()
    }

    fn lose(&mut self, _context: &PathContext, lane: LaneId) -> Fenced {
        if self.rails.lanes[lane.index()].stop() == Stopped::Not {
            self.rails.striping.lose(lane);
            return Fenced::NotYet;
        }
        let mut is_read = false;
        // Errors here have the same cause: the rail was lost or stopped. The receiver reports which
        // shares are missing.
        loop {
            match self.take_in(lane, &mut is_read) {
                Ok(false) => break,
                Err(fault) if matches!(*fault, Fault::Device(_)) => break,
                _ => {}
            }
        }
        self.rails.close_lane(lane);
        Fenced::Now
    }

    fn progress(&self) -> Progress {
        self.sends.progress(self.ring.words())
    }

    fn received(&self) -> Received {
        Received::default()
    }

    fn recover(&mut self, context: &PathContext, lane: LaneId, received: &Received) -> Result<()> {
        self.sends.lost(lane, received);
        self.reroute(context)
    }

    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool> {
        if !self.rails.regain(lane, new) {
            return Ok(false);
        }
        self.reroute(context).map(|()| true)
    }

    fn poll(&mut self, context: &PathContext) -> Result<bool> {
        if self.rails.status.has_failed() {
            return Ok(false);
        }
        if self.is_stranded {
            self.reroute(context)?;
        }
        self.progress(context).map_err(|error| *error)
    }

    fn renewed_epoch(&mut self, _context: &PathContext, lane: LaneId, _has_new_keys: bool) -> Result<Epoch> {
        Ok(self.since[lane.index()])
    }

    fn take_epoch(&mut self, lane: LaneId, epoch: Epoch) {
        if self.since[lane.index()] != epoch {
            // The peer's device has returned with new keys. The refused keys were those from
            // before.
            self.rails.status.forgive();
        }
        self.since[lane.index()] = epoch;
        let since = &self.since[..self.rails.lanes.len().min(MAX_RAILS)];
        let newest = since.iter().fold(epoch, |newest, other| if other.is_since(newest) { *other } else { newest });
        self.since.iter_mut().for_each(|since| *since = since.near(newest));
        self.sends.set_epoch(newest);
    }

    fn is_owing(&mut self) -> bool {
        // Other waiting writes are posted when their request is tested.
        self.is_stranded && self.rails.lanes.iter().any(Lane::is_open)
    }

    fn delivered(&self) -> u64 {
        0
    }

    fn ended(&mut self) {
        self.sends.ended();
    }

    fn holds_buffers(&self) -> bool {
        self.sends.is_running()
    }
}
