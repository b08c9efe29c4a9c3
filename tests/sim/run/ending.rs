//! Runs in which one side's connection ends before all messages have arrived.

use super::{Ending, PATIENCE_NS, Run, Tally};
use crate::sim::model::Model;
use crate::sim::threads;
use host::error::{Error, Internal};
use nccl_net_spark::comm::datapath::path::Faults;
use nccl_net_spark::comm::datapath::shared::{SharedPath, leave};
use std::sync::Arc;

enum BreakOff {
    Caller,
    Driver,
    /// The data path fails, and the driver notices the failure later.
    DataPath,
}

impl Run<'_> {
    /// One side's connection fails while rails carry, or its caller closes it in the middle of a
    /// message. The caller then reuses the buffers of this side. The other side must not receive
    /// the new content of the buffers, and must not overwrite it.
    pub(super) fn break_off(mut self) -> Tally {
        let (side, by) = match (&self.ending, self.dice.below(3)) {
            (Ending::BrokenOffInUse { .. }, _) => (1, BreakOff::DataPath),
            (_, 0) => (self.dice.below(2) as usize, BreakOff::Caller),
            (_, 1) => (self.dice.below(2) as usize, BreakOff::Driver),
            _ => (self.dice.below(2) as usize, BreakOff::DataPath),
        };
        let path: Arc<dyn SharedPath> = if side == 0 {
            self.pair.send.clone()
        } else {
            self.pair.recv.clone()
        };
        let holds_buffers = path
            .borrow()
            .expect("no panic went through it")
            .holds_buffers();
        let why = || Error::from(Internal::PathPanicked);
        match by {
            BreakOff::Caller => {
                leave(&*path, &self.pair.contexts[side]).expect("no other thread uses it");
                self.close(side);
            }
            BreakOff::Driver => self.pair.drivers[side].give_up(why()),
            BreakOff::DataPath => {
                path.borrow()
                    .expect("no panic went through it")
                    .end(&self.pair.contexts[side], Box::new(why()));
            }
        }
        self.await_end(side, &*path);
        // After some seconds, the caller gets the error although a NIC has not stopped, and a
        // warning that the NIC may still use the buffers.
        let has_stopped = threads::hung_fences() == 0;
        if has_stopped && side == 1 && (holds_buffers || !matches!(by, BreakOff::Caller)) {
            self.model.take_back(&mut self.fabric.to);
        } else if has_stopped && side == 0 {
            self.model.overwrite_unfinished(&mut self.fabric.from);
        }
        for _ in 0..600 {
            let goes_on = if side == 0 {
                self.take_what_comes()
            } else {
                self.send_on()
            };
            if !goes_on && self.dice.one_in(8) {
                break;
            }
            if self.dice.one_in(2) {
                self.watch();
            }
            self.wait(u64::MAX, "the remaining side");
        }
        self.model.check_what_was_handed_back(&self.fabric.to);
        self.tally.messages = self
            .model
            .groups
            .iter()
            .map(|group| group.parts.len() as u64)
            .sum();
        let Self {
            fabric,
            pair,
            tally,
            ..
        } = self;
        drop((pair, path));
        threads::let_return();
        assert_eq!(fabric.queue_pairs(), 0, "queue pairs are left over");
        tally
    }

    /// Waits until NCCL gets the error of a failed connection, because its queue pairs have
    /// stopped.
    fn await_end(&mut self, side: usize, path: &dyn SharedPath) {
        let limit = self.fabric.now_ns() + PATIENCE_NS;
        let is_ending = || {
            path.borrow()
                .expect("no panic went through it")
                .rails()
                .status
                .is_ending()
        };
        while self.pair.drivers[side].is_ending() || is_ending() {
            self.watch();
            self.wait(limit, "the end of the connection");
        }
    }

    /// Sends although the receiver has left. Returns false once an error was reported.
    fn send_on(&mut self) -> bool {
        let running = self
            .model
            .groups
            .iter()
            .flat_map(|group| &group.parts)
            .find(|part| part.send.is_some() && !part.is_sent);
        let mut path = self.pair.send.enter().unwrap();
        if let Some(request) = running.and_then(|part| part.send)
            && path.test(&self.pair.contexts[0], request).is_err()
        {
            return false;
        }
        let Some(group) = self.model.next_to_send() else {
            return true;
        };
        let tag = group
            .parts
            .iter()
            .position(|part| part.send.is_none())
            .unwrap();
        let part = &mut group.parts[tag];
        Model::fill(&mut self.fabric.from, self.seed, part);
        let addr = self.fabric.from.as_ptr() as u64 + part.at as u64;
        match path.isend(
            &self.pair.contexts[0],
            addr,
            part.bytes,
            tag as i32,
            &self.fabric.out,
        ) {
            Ok(request) => part.send = request,
            Err(_) => return false,
        }
        true
    }

    /// Receives although the sender has left. Completed receives must have the right bytes. Returns
    /// false once an error was reported.
    fn take_what_comes(&mut self) -> bool {
        for at in 0..self.model.groups.len() {
            let group = &mut self.model.groups[at];
            if group.is_reported {
                continue;
            }
            let mut path = self.pair.recv.enter().unwrap();
            match path.test(&self.pair.contexts[1], group.receive, |_, _| {}) {
                Ok(is_reported) => group.is_reported = is_reported,
                Err(_) => return false,
            }
            drop(path);
            self.model.hand_back(at, self.seed, &mut self.fabric.to);
        }
        true
    }
}
