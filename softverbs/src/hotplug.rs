//! PCI functions that fail, leave the bus and return. The steps and their order are those of Linux
//! and mlx5.
//!
//! A function that is unplugged, or whose driver is unloaded, leaves in these steps ([`Phase`]):
//!
//! 1. The kernel cuts programs off: each call through the kernel returns `EIO`
//!    (`uverbs_disassociate_api_pre` in drivers/infiniband/core/uverbs_main.c). The device
//!    continues to read and write memory, because no object is destroyed yet.
//! 2. The objects are destroyed, the newest first: `rdma_alloc_commit_uobject` adds at the head of
//!    a list, and `__uverbs_cleanup_ufile` walks it from the head
//!    (drivers/infiniband/core/rdma_core.c). Registrations are mostly younger than queue pairs. So
//!    for a moment keys are refused while queue pairs live, and a peer's write fails with a remote
//!    access error. Softverbs is simpler: all keys become invalid together, including those that
//!    are older than the queue pairs.
//! 3. The device is removed, and the program gets `IBV_EVENT_DEVICE_FATAL`
//!    (`uverbs_async_event_destroy_uobj` in drivers/infiniband/core/uverbs_std_types_async_fd.c).
//!    Later posts have no effect, and completion queues stay silent.
//!
//! A function whose firmware fails has a step before these. mlx5's driver notices the failure, puts
//! the device into its internal error state and raises `MLX5_DEV_EVENT_SYS_ERROR`
//! (`mlx5_enter_error_state` in drivers/net/ethernet/mellanox/mlx5/core/health.c). mlx5_ib turns it
//! into a first `IBV_EVENT_DEVICE_FATAL` (drivers/infiniband/hw/mlx5/main.c). A program's queues
//! are silent: `mlx5_ib_handle_internal_error` (same file) completes requests only for kernel
//! users. Commands no longer reach the firmware. Commands that destroy an object, or move a queue
//! pair to error or reset, succeed without it. All others fail, with `ENOLINK` since Linux 5.18 and
//! `EIO` before (`mlx5_internal_err_ret_value` in drivers/net/ethernet/mellanox/mlx5/core/cmd.c).
//! Then the driver unloads (the steps above) and loads again. Nothing proves that such a device is
//! idle before its removal. So in softverbs, a failed device works again from step 1 until step 3.
//!
//! A function that returns is a new device of the same name: objects of the old one stay dead.

use crate::os::shm::RailMemory;
use std::sync::atomic::Ordering;

/// State of a function: its generation and its phase. A function that returns under the same name
/// is a new generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Presence {
    /// Number of times that the function has returned to the bus.
    pub generation: u32,
    /// Progress of its removal.
    pub phase: Phase,
}

/// Progress of a function's removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The function is on the bus.
    Here = 0,
    /// The function's firmware has failed. The device is silent, and the kernel answers commands in
    /// its place.
    Failed = 1,
    /// Programs are cut off from the device, which still reads and writes memory.
    Cut = 2,
    /// Programs are cut off from the device, which still works, but no key is valid.
    Keyless = 3,
    /// The device was removed.
    Gone = 4,
}

impl Presence {
    /// Phase of the function to which an object of this generation belongs. If a newer generation
    /// has replaced that function, the phase is [`Phase::Gone`].
    pub(crate) fn phase_of(self, generation: u32) -> Phase {
        if self.generation == generation {
            self.phase
        } else {
            Phase::Gone
        }
    }

    /// Checks that a command for an object of this generation can reach the device. Fails with
    /// `EIO` if programs are cut off or the device was removed, and with `ENOLINK` if its firmware
    /// has failed.
    pub(crate) fn check_generation(self, generation: u32) -> Result<(), i32> {
        match self.phase_of(generation) {
            Phase::Here => Ok(()),
            Phase::Failed => Err(libc::ENOLINK),
            Phase::Cut | Phase::Keyless | Phase::Gone => Err(libc::EIO),
        }
    }

    /// The same as [`Self::check_generation`] for destroying an object. This succeeds even if the
    /// firmware has failed, because the kernel can do it without the firmware.
    pub(crate) fn end(self, generation: u32) -> Result<(), i32> {
        match self.phase_of(generation) {
            Phase::Here | Phase::Failed => Ok(()),
            Phase::Cut | Phase::Keyless | Phase::Gone => Err(libc::EIO),
        }
    }

    pub(crate) fn works(self, generation: u32) -> bool {
        matches!(
            self.phase_of(generation),
            Phase::Here | Phase::Cut | Phase::Keyless
        )
    }

    /// Returns the state after a step to `phase`. The only step back is from gone to here. Returns
    /// `None` for all other steps back, and if the phase is the same.
    fn after(self, phase: Phase) -> Option<Self> {
        match (self.phase, phase) {
            (Phase::Gone, Phase::Here) => Some(Self {
                generation: self.generation + 1,
                phase,
            }),
            (from, to) if (to as u32) > from as u32 => Some(Self { phase, ..self }),
            _ => None,
        }
    }

    // The word 0 means generation 0 in phase `Here`. This is the state at the start, because new
    // shared memory has zeros.
    fn word(self) -> u32 {
        self.generation << 3 | self.phase as u32
    }

    fn of(word: u32) -> Self {
        let phase = match word & 7 {
            0 => Phase::Here,
            1 => Phase::Failed,
            2 => Phase::Cut,
            3 => Phase::Keyless,
            _ => Phase::Gone,
        };
        Self {
            generation: word >> 3,
            phase,
        }
    }
}

impl RailMemory {
    /// State of the rail's function.
    pub fn presence(&self) -> Presence {
        Presence::of(self.presence.load(Ordering::Acquire))
    }

    /// Advances the removal to `phase`, or plugs in a new function after a removal. Ignores any
    /// other step.
    pub fn move_to(&self, phase: Phase) {
        let step = |word| Presence::of(word).after(phase).map(Presence::word);
        let _ = self
            .presence
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_that_returns_is_another_one() {
        let there = Presence::of(0);
        assert_eq!(
            there,
            Presence {
                generation: 0,
                phase: Phase::Here
            }
        );
        assert!(
            there.check_generation(0).is_ok()
                && there.works(0)
                && there.check_generation(1) == Err(libc::EIO)
                && !there.works(1)
        );
        assert_eq!(there.after(Phase::Here), None);
        let failed = there.after(Phase::Failed).unwrap();
        assert!(
            failed.check_generation(0) == Err(libc::ENOLINK)
                && failed.end(0).is_ok()
                && !failed.works(0)
        );
        assert_eq!(failed.after(Phase::Here), None);
        let cut = failed.after(Phase::Cut).unwrap();
        assert_eq!(there.after(Phase::Cut), Some(cut));
        assert!(
            cut.check_generation(0) == Err(libc::EIO)
                && cut.end(0) == Err(libc::EIO)
                && cut.works(0)
        );
        assert_eq!(
            (
                cut.after(Phase::Cut),
                cut.after(Phase::Failed),
                cut.after(Phase::Here)
            ),
            (None, None, None)
        );
        let keyless = cut.after(Phase::Keyless).unwrap();
        assert!(keyless.check_generation(0) == Err(libc::EIO) && keyless.works(0));
        let gone = keyless.after(Phase::Gone).unwrap();
        assert_eq!(
            (there.after(Phase::Gone), cut.after(Phase::Gone)),
            (Some(gone), Some(gone))
        );
        assert!(gone.check_generation(0) == Err(libc::EIO) && !gone.works(0));
        assert_eq!(
            (gone.after(Phase::Gone), gone.after(Phase::Cut)),
            (None, None)
        );
        let back = gone.after(Phase::Here).unwrap();
        assert!(
            back.check_generation(0) == Err(libc::EIO)
                && !back.works(0)
                && back.check_generation(1).is_ok()
        );
        for presence in [there, failed, cut, keyless, gone, back] {
            assert_eq!(Presence::of(presence.word()), presence);
        }
    }
}
