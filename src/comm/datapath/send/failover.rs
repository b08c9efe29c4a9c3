//! What a sender does when a rail is lost or returns: what is missing at the receiver goes once more, by another rail.

use super::SendPath;
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::Fault;
use crate::comm::datapath::lane::Lane;
use crate::comm::datapath::load::Sending;
use crate::comm::datapath::path::DataPath;
use crate::comm::datapath::status::Status;
use crate::error::{Error, Result};
use crate::flow::next;
use crate::flow::sends::{Route, Stranded};
use crate::flow::striping::Striping;
use crate::wire::control::Received;
use crate::wire::ids::LaneId;

impl SendPath {
    /// Finds another lane for what waits on lost lanes, and on one that has just come back.
    fn reroute(&mut self, context: &PathContext, back: Option<LaneId>) -> Result<()> {
        if self.status.has_failed() {
            return Ok(());
        }
        let mut deregistered = false;
        let Self { sends, lanes, striping, ring, fenced, .. } = self;
        for lost in LaneId::all(lanes.len()) {
            // Not where only this side has stopped: what was posted there could still land.
            if *fenced & lost.bit() == 0 && back != Some(lost) {
                continue;
            }
            sends.reroute(lost, |Stranded { bytes, memory, sequence, part }| {
                let by = striping.lane_for(bytes, &Sending(lanes));
                let lane = &mut lanes[by.index()];
                if !lane.is_open() {
                    return None;
                }
                let Some(memory) = context.registrations.find(memory) else {
                    deregistered = true;
                    return None;
                };
                striping.given(by, bytes, None);
                if striping.is_counted(bytes) {
                    lane.began(bytes);
                }
                let lkey = memory.keys(lane.rail.id).map_or(0, |keys| keys.lkey);
                let rkey = next::rkey(ring.words(), sequence, part, by);
                Some((by, Route { queue: lane.next_queue(), lkey, rkey, timed: false }))
            });
        }
        if deregistered {
            let what = format!("memory was deregistered while a send from it to {} was running", context.peer.name);
            return Err(Error::Usage(what));
        }
        let waiting: Vec<u16> = self.sends.waiting().collect();
        for request in waiting {
            self.post(context, request);
        }
        Ok(())
    }
}

impl DataPath for SendPath {
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
        self.sends.span()
    }

    fn lose(&mut self, _context: &PathContext, lane: LaneId) {
        self.lanes[lane.index()].stop();
        let mut is_read = false;
        // What fails here fails because the rail was stopped, or was lost before: it is found missing by its receiver.
        loop {
            match self.take_in(lane, &mut is_read) {
                Ok(false) => break,
                Err(fault) if matches!(*fault, Fault::Device(_)) => break,
                _ => {}
            }
        }
        self.lanes[lane.index()].close();
        self.striping.lose(lane);
    }

    fn received(&self) -> Received {
        Received::default()
    }

    fn recover(&mut self, context: &PathContext, lane: LaneId, received: &Received) -> Result<()> {
        self.sends.lost(lane, received);
        self.fenced |= lane.bit();
        self.reroute(context, None)
    }

    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool> {
        if self.status.has_failed() {
            return Ok(false);
        }
        self.lanes[lane.index()] = new;
        self.striping.regain(lane);
        self.fenced &= !lane.bit();
        self.reroute(context, Some(lane)).map(|()| true)
    }

    fn tend(&mut self, context: &PathContext) -> Result<bool> {
        if self.status.has_failed() {
            return Ok(false);
        }
        self.progress(context).map_err(|error| *error)
    }

    fn is_owing(&mut self) -> bool {
        // What waits here is posted when its request is tested.
        false
    }

    fn delivered(&self) -> u64 {
        0
    }

    fn holds_buffers(&self) -> bool {
        self.sends.is_running()
    }
}
