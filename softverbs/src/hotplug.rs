//! Functions that leave the bus and return, in the order in which Linux takes one away.
//!
//! First the kernel cuts programs off: each call that goes through it answers `EIO`, while the device goes on reading and writing
//! memory (`uverbs_disassociate_api_pre` in drivers/infiniband/core/uverbs_main.c comes before the objects are destroyed). Then the
//! objects are destroyed with the device's own, and the program gets `IBV_EVENT_DEVICE_FATAL`
//! (`uverbs_async_event_destroy_uobj` in uverbs_std_types_async_fd.c). From then on what is posted vanishes, and completion queues are
//! silent. A function that returns is a new device of the same name: what was made on the old one stays dead.

use crate::os::shm::RailMemory;
use std::sync::atomic::Ordering;

/// Whether a function is there, and which of those that had its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Presence {
    /// Counts the times that it has returned.
    pub generation: u32,
    /// How far it is gone.
    pub phase: Phase,
}

/// How far a function is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It is on the bus.
    Here = 0,
    /// Programs are cut off, and the device works.
    Cut = 1,
    /// The device is gone.
    Gone = 2,
}

impl Presence {
    /// Whether the kernel answers calls about what was made on the function of this generation.
    pub(crate) fn answers(self, generation: u32) -> bool {
        self.generation == generation && self.phase == Phase::Here
    }

    /// Whether the device works for what was made on the function of this generation.
    pub(crate) fn works(self, generation: u32) -> bool {
        self.generation == generation && self.phase != Phase::Gone
    }

    /// What it is after a step to `phase`; none where that is no step: a function that is there cannot come, and one that is gone cannot
    /// be cut off.
    fn after(self, phase: Phase) -> Option<Self> {
        match (self.phase, phase) {
            (Phase::Gone, Phase::Here) => Some(Self { generation: self.generation + 1, phase }),
            (Phase::Here, Phase::Cut | Phase::Gone) | (Phase::Cut, Phase::Gone) => Some(Self { phase, ..self }),
            _ => None,
        }
    }

    // Zeros are a function that is there.
    fn word(self) -> u32 {
        self.generation << 2 | self.phase as u32
    }

    fn of(word: u32) -> Self {
        let phase = match word & 3 {
            0 => Phase::Here,
            1 => Phase::Cut,
            _ => Phase::Gone,
        };
        Self { generation: word >> 2, phase }
    }
}

impl RailMemory {
    /// Whether the rail's function is there.
    pub fn presence(&self) -> Presence {
        Presence::of(self.presence.load(Ordering::Acquire))
    }

    /// Takes the function away as far as `phase`, or brings a new one; nothing where it is as far already.
    pub fn move_to(&self, phase: Phase) {
        let step = |word| Presence::of(word).after(phase).map(Presence::word);
        let _ = self.presence.fetch_update(Ordering::AcqRel, Ordering::Acquire, step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_returns_is_another_one() {
        let there = Presence::of(0);
        assert_eq!(there, Presence { generation: 0, phase: Phase::Here });
        assert!(there.answers(0) && there.works(0) && !there.answers(1) && !there.works(1));
        assert_eq!(there.after(Phase::Here), None);
        let cut = there.after(Phase::Cut).unwrap();
        assert!(!cut.answers(0) && cut.works(0));
        assert_eq!((cut.after(Phase::Cut), cut.after(Phase::Here)), (None, None));
        let gone = cut.after(Phase::Gone).unwrap();
        assert_eq!(there.after(Phase::Gone), Some(gone));
        assert!(!gone.answers(0) && !gone.works(0));
        assert_eq!((gone.after(Phase::Gone), gone.after(Phase::Cut)), (None, None));
        let back = gone.after(Phase::Here).unwrap();
        assert!(!back.answers(0) && !back.works(0) && back.answers(1));
        for presence in [there, cut, gone, back] {
            assert_eq!(Presence::of(presence.word()), presence);
        }
    }
}
