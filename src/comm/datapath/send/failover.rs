//! Reaction of a sender to lost and returning rails: it resends missing bytes over other rails.

use super::{Confirmation, SendPath};
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::lane::Lane;
use crate::comm::datapath::load::Sending;
use crate::comm::datapath::path::DataPath;
use crate::comm::datapath::rails::Rails;
use host::error::{Result, Usage};
use proto::flow::sends::LocalRoute;
use proto::wire::control::{Progress, Received};
use proto::wire::cts::Epoch;
use proto::wire::ids::LaneId;
use verbs::Completion;

impl SendPath {
    /// Sends the shares of lost lanes again, as far as other lanes can carry them.
    fn resend(&mut self, context: &PathContext) -> Result<()> {
        if self.rails.status.has_failed() {
            return Ok(());
        }
        let mut deregistered = false;
        let open = self.rails.open_lanes();
        let Self {
            sends,
            rails: Rails {
                lanes, striping, ..
            },
            ring,
            ..
        } = self;
        sends.resend(ring.words(), open, |share| {
            let by = share.lane(striping.lane_for(share.bytes, &Sending(lanes)));
            let lane = &mut lanes[by.index()];
            let Some(memory) = context.registrations.find(share.registration_id) else {
                deregistered = true;
                return None;
            };
            striping.record_queued(by, share.bytes, None);
            if striping.is_counted(share.bytes) {
                lane.add_backlog(share.bytes);
            }
            let lkey = memory.keys(lane.rail.id).map_or(0, |keys| keys.lkey);
            Some(LocalRoute {
                lane: by,
                queue: lane.next_queue(),
                lkey,
            })
        });
        if deregistered {
            return Err(Usage::DeregisteredSend {
                peer: context.peer.name.clone(),
            }
            .into());
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

    fn message_range(&self) -> (u64, u64) {
        self.sends.message_range()
    }

    fn stopped(&mut self, _context: &PathContext, lane: LaneId, completions: &[Completion]) {
        let Self {
            sends,
            rails: Rails {
                lanes, striping, ..
            },
            clock,
            now_ns,
            given_ns,
            ..
        } = self;
        let by = &mut lanes[lane.index()];
        // Ignore the errors, which the lost rail causes. The receiver's report shows which shares
        // have arrived.
        let _ = Confirmation {
            by: lane,
            lane: by,
            sends,
            striping,
            clock,
            now_ns,
            given_ns,
        }
        .take_in(completions, &mut false);
        self.rails.settle(lane);
    }

    fn progress(&self) -> Progress {
        self.sends.progress(self.ring.words())
    }

    fn received(&self) -> Received {
        Received::default()
    }

    fn recover(&mut self, context: &PathContext, lane: LaneId, received: &Received) -> Result<()> {
        self.sends.lost(lane, received);
        self.resend(context)
    }

    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool> {
        if !self.rails.regain(lane, new) {
            return Ok(false);
        }
        self.resend(context).map(|()| true)
    }

    fn poll(&mut self, context: &PathContext) -> Result<bool> {
        if self.rails.status.has_failed() {
            return Ok(false);
        }
        if self.sends.has_lost_shares() {
            self.resend(context)?;
        }
        self.progress(context).map_err(|error| *error)
    }

    fn epoch_of(
        &mut self,
        _context: &PathContext,
        lane: LaneId,
        _has_new_keys: bool,
    ) -> Result<Epoch> {
        Ok(self.sends.epoch_of(lane))
    }

    fn learn_epoch(&mut self, lane: LaneId, epoch: Epoch) {
        if self.sends.learn_epoch(lane, epoch) {
            // The peer's device has returned with new keys. The keys that it refused were old ones.
            self.rails.status.reset_key_losses();
        }
    }

    fn has_repeats(&mut self) -> bool {
        // Writes that only wait for room do not count: they are posted when NCCL tests their
        // request.
        self.sends.has_lost_shares() && self.rails.open_lanes() != 0
    }

    fn delivered(&self) -> u64 {
        0
    }

    fn holds_buffers(&self) -> bool {
        self.sends.is_running()
    }
}
