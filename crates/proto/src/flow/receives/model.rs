//! Hash of all receives, for the search through recovery's states (`recovery/tests/search.rs`).

use super::{Receives, SlotState};
use crate::wire::ids::Slot;
use std::hash::{Hash, Hasher};

impl<const N: usize> Receives<N> {
    pub(in crate::flow) fn hash_state(&self, hasher: &mut impl Hasher) {
        (self.next, self.open, self.repeating, self.epochs).hash(hasher);
        for (slot, state) in Slot::all().zip(&self.slots) {
            state.hash(hasher);
            let is_repeating = self.repeating & slot.bit() != 0;
            (state.is_waiting() || is_repeating)
                .then_some(self.lanes[slot.index()])
                .hash(hasher);
            if let SlotState::Granted(granted) = state {
                let has = |set: u32| set & slot.bit() != 0 && state.is_waiting();
                (has(self.to_repeat), has(self.to_repeat & self.same_lane)).hash(hasher);
                self.parts[slot.index()][..usize::from(granted.count)].hash(hasher);
            }
        }
    }
}
