//! What a sender does when a rail is lost or returns: what is missing at the receiver goes once more, by another rail.

use super::SendPath;
use crate::comm::half::{Ends, Half};
use crate::comm::health::Health;
use crate::comm::lane::Lane;
use crate::comm::reputation::Sending;
use crate::comm::trouble::Failure;
use crate::error::{Error, Result};
use crate::flow::next;
use crate::flow::sends::{Route, Stranded};
use crate::flow::striping::Striping;
use crate::wire::control::Received;

impl SendPath {
    /// Finds a way for what waits on lost lanes, and on one that has just come back.
    fn reroute(&mut self, ends: &Ends, back: Option<usize>) -> Result<()> {
        if self.health.has_failed() {
            return Ok(());
        }
        let mut deregistered = false;
        let Self { sends, lanes, striping, ring, fenced, .. } = self;
        for lost in 0..lanes.len() {
            // Not where only this side has stopped: what was posted there could still land.
            if *fenced >> lost & 1 == 0 && back != Some(lost) {
                continue;
            }
            sends.reroute(lost, |Stranded { bytes, memory, sequence, part }| {
                let rail = striping.rail_for(bytes, &Sending(lanes));
                let lane = &mut lanes[rail];
                if !lane.is_open() {
                    return None;
                }
                let Some(memory) = ends.host.registrations.find(memory) else {
                    deregistered = true;
                    return None;
                };
                striping.given(rail, bytes, None);
                if striping.is_counted(bytes) {
                    lane.began(bytes);
                }
                let lkey = memory.keys(lane.rail.index).map_or(0, |keys| keys.lkey);
                let rkey = next::rkey(ring.words(), sequence, part, rail);
                Some((rail as u8, Route { queue: lane.next_queue(), lkey, rkey, timed: false }))
            });
        }
        if deregistered {
            let what = format!("memory was deregistered while a send from it to {} was running", ends.peer.name);
            return Err(Error::Usage(what));
        }
        let waiting: Vec<u16> = self.sends.waiting().collect();
        for request in waiting {
            self.post(ends, request);
        }
        Ok(())
    }
}

impl Half for SendPath {
    fn health(&mut self) -> &mut Health {
        &mut self.health
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

    fn lose(&mut self, _ends: &Ends, lane: usize) {
        self.lanes[lane].stop();
        let mut is_read = false;
        // What fails here fails because the rail was stopped, or was lost before: it is found missing by its receiver.
        loop {
            match self.take_in(lane, &mut is_read) {
                Ok(false) => break,
                Err(failure) if matches!(*failure, Failure::Device(_)) => break,
                _ => {}
            }
        }
        self.lanes[lane].close();
        self.striping.lose(lane);
    }

    fn received(&self) -> Received {
        Received::default()
    }

    fn recover(&mut self, ends: &Ends, lane: usize, received: &Received) -> Result<()> {
        self.sends.lost(lane, received);
        self.fenced |= 1 << lane;
        self.reroute(ends, None)
    }

    fn regain(&mut self, ends: &Ends, lane: usize, new: Lane) -> Result<()> {
        if self.health.has_failed() {
            // What it no longer needs goes with `new`.
            return Ok(());
        }
        self.lanes[lane] = new;
        self.striping.regain(lane);
        self.fenced &= !(1 << lane);
        self.reroute(ends, Some(lane))
    }

    fn tend(&mut self, ends: &Ends) -> Result<bool> {
        if self.health.has_failed() {
            return Ok(false);
        }
        self.progress(ends).map_err(|error| *error)
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
