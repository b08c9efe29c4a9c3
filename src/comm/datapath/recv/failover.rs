//! Reaction of a receiver to lost and returning rails. The receiver reports the shares that have
//! arrived, so that the sender resends only the others. It repeats the grants (the CTS entries of a
//! receive) that may be lost.

use super::{Found, RecvPath, Source, absorb_all, keys, source_of};
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::Fault;
use crate::comm::datapath::lane::Lane;
use crate::comm::datapath::path::{DataPath, Faults};
use crate::comm::datapath::rails::Rails;
use crate::comm::datapath::wr_id::Work;
use host::error::{Error, Result, Usage};
use proto::flow::receives::Repeat;
use proto::wire::control::{Progress, Received};
use proto::wire::cts::Epoch;
use proto::wire::ids::LaneId;
use verbs::Completion;

impl RecvPath {
    /// Repeats the grants that may be lost or have old keys, as far as the queue pairs have room.
    fn repeat_grants(&mut self, context: &PathContext) {
        if self.rails.status.has_failed() {
            return;
        }
        loop {
            let preferred = self.cts_lane();
            let Self {
                receives,
                rails: Rails { lanes, .. },
                ..
            } = self;
            let repeat = receives.next_repeat(preferred, |lane| lanes[lane.index()].has_room(0));
            let Some(Repeat { grant, parts, lane }) = repeat else {
                return;
            };
            if let Err(error) =
                self.write_from_shadow(lane, grant, parts, Work::Repeat { slot: grant.slot })
            {
                self.lose_rail(context, lane, error.to_string());
            }
        }
    }

    /// Begins a new epoch (generation of keys) for a lane whose device has returned. Repeats the
    /// grants of all receives that wait for bytes, with the current keys.
    fn take_new_keys(&mut self, context: &PathContext, lane: LaneId) -> Result<()> {
        let Self {
            receives,
            shadow,
            key_sources,
            rails,
            lanes_are_rails,
            ..
        } = self;
        receives.take_new_keys(lane, shadow.words(), |grant, part| {
            let Source { memory: id, strict } = key_sources[source_of(grant, part)];
            let memory = context.registrations.find(id);
            let memory = memory.ok_or_else(|| Usage::DeregisteredReceive {
                peer: context.peer.name.clone(),
            })?;
            Ok::<_, Error>(keys(&rails.lanes, *lanes_are_rails, &memory, strict))
        })?;
        self.repeat_grants(context);
        Ok(())
    }
}

impl DataPath for RecvPath {
    fn epoch_of(
        &mut self,
        context: &PathContext,
        lane: LaneId,
        has_new_keys: bool,
    ) -> Result<Epoch> {
        if has_new_keys {
            self.take_new_keys(context, lane)?;
        }
        Ok(self.receives.epoch_of(lane))
    }

    fn learn_epoch(&mut self, _lane: LaneId, _epoch: Epoch) {}

    fn rails(&mut self) -> &mut Rails {
        &mut self.rails
    }

    fn message_range(&self) -> (u64, u64) {
        self.receives.message_range()
    }

    fn stopped(&mut self, context: &PathContext, lane: LaneId, completions: &[Completion]) {
        // Process everything that has arrived on the lane, because the sender does not resend bytes
        // once it has seen the acknowledgement of this host's NIC. One at a time, because only the
        // first fault of a list is reported.
        for completion in completions.chunks(1) {
            let Self {
                receives, rails, ..
            } = self;
            let absorbed = absorb_all(
                &mut rails.lanes[lane.index()],
                receives,
                context,
                completion,
            );
            if let Err(fault) = absorbed
                && let Fault::Violation(_) = *fault
            {
                // NCCL gets the error from a later call. The lost rail causes the other faults.
                let _ = self.fault(context, lane, *fault);
            }
        }
        self.rails.settle(lane);
    }

    fn progress(&self) -> Progress {
        self.receives.progress()
    }

    fn received(&self) -> Received {
        self.receives.received()
    }

    fn recover(&mut self, context: &PathContext, lane: LaneId, _received: &Received) -> Result<()> {
        self.receives.lost(lane);
        self.repeat_grants(context);
        Ok(())
    }

    fn regain(&mut self, context: &PathContext, lane: LaneId, new: Lane) -> Result<bool> {
        if !self.rails.regain(lane, new) {
            return Ok(false);
        }
        self.repeat_grants(context);
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
        self.repeat_grants(context);
        Ok(moved)
    }

    fn has_repeats(&mut self) -> bool {
        // Without an open lane no grant can be repeated.
        self.receives.has_repeats() && self.rails.open_lanes() != 0
    }

    fn delivered(&self) -> u64 {
        self.receives.delivered()
    }

    fn holds_buffers(&self) -> bool {
        self.receives.is_awaited()
    }
}
