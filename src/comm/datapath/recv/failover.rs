//! What a receiver does when a rail is lost or returns: it tells what it has, and grants once more what may not have been heard.

use super::{Found, RecvPath};
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::Fault;
use crate::comm::datapath::lane::Lane;
use crate::comm::datapath::path::DataPath;
use crate::comm::datapath::status::Status;
use crate::comm::datapath::wr_id::Work;
use crate::error::{Error, Result};
use crate::flow::striping::Striping;
use crate::wire::control::Received;
use crate::wire::ids::LaneId;
use std::time::{Duration, Instant};

/// How long a device may take to hand out what it has received when its queue pairs are stopped. (It takes microseconds.)
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

impl RecvPath {
    /// Grants once more what may not have been heard, as far as there is room on the rails.
    fn repay(&mut self, context: &PathContext) {
        if self.status.has_failed() {
            return;
        }
        while let Some(owed) = self.receives.next_owed() {
            let lane = self.cts_lane();
            if !self.lanes[lane.index()].has_room(0) {
                return;
            }
            let slot = owed.grant.slot;
            self.receives.repeats(slot, lane);
            if let Err(error) = self.write_from_shadow(lane, owed.grant, owed.parts, Work::Repeat { slot }) {
                self.lose_by(context, lane, error.to_string());
            }
        }
    }
}

impl DataPath for RecvPath {
    fn status(&mut self) -> &mut Status {
        &mut self.status
    }

    fn lanes(&mut self) -> &mut [Lane] {
        &mut self.lanes
    }

    fn striping(&mut self) -> &mut Striping {
        &mut self.striping
    }

    fn span(&self) -> (u64, u64) {
        self.receives.span()
    }

    fn lose(&mut self, context: &PathContext, lane: LaneId) {
        self.lanes[lane.index()].stop();
        // All that has come by it: the sender may have heard of it, and then it does not come again.
        let begun = Instant::now();
        while !self.lanes[lane.index()].is_drained() {
            let gone = matches!(self.absorb(context, lane), Err(fault) if matches!(*fault, Fault::Device(_)));
            if gone || begun.elapsed() > DRAIN_LIMIT {
                let (rail, peer) = (self.lanes[lane.index()].rail.name(), &context.peer.name);
                let text = format!("rail {rail} to {peer} lost, and its device does not return what it has received");
                self.end(Box::new(Error::Network(text)));
                break;
            }
        }
        self.lanes[lane.index()].close();
        self.striping.lose(lane);
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
        if self.status.has_failed() {
            return Ok(false);
        }
        self.lanes[lane.index()] = new;
        self.striping.regain(lane);
        self.repay(context);
        Ok(true)
    }

    fn tend(&mut self, context: &PathContext) -> Result<bool> {
        if self.status.has_failed() {
            return Ok(false);
        }
        let mut moved = false;
        for lane in LaneId::all(self.lanes.len()) {
            moved |= self.take_in(context, lane).map_err(|error| *error)? != Found::Nothing;
        }
        self.repay(context);
        Ok(moved)
    }

    fn is_owing(&mut self) -> bool {
        !self.status.has_failed() && self.receives.next_owed().is_some()
    }

    fn delivered(&self) -> u64 {
        self.receives.delivered()
    }

    fn holds_buffers(&self) -> bool {
        self.receives.is_awaited()
    }
}
