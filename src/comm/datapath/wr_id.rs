//! What a completion's 64-bit work request number says.

use crate::wire::ids::Slot;

/// The meaning of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Work {
    /// The last write of a share of a send.
    Share {
        /// The send.
        request: u16,
        /// Its share.
        share: u8,
        /// Whether its time tells how fast the rail is.
        timed: bool,
    },
    /// A chunk before the last of a share, confirmed to make room.
    #[default]
    Lead,
    /// Clear-to-send entries.
    Cts,
    /// Clear-to-send entries that went by a rail that was lost, once more.
    Repeat {
        /// The receive's slot.
        slot: Slot,
    },
    /// A control frame into the peer's mailbox.
    Control,
    /// A receive that an immediate used up.
    Receive,
    /// The write that tries a rail: during the handshake, and when it returns.
    Probe,
}

/// A work request number: what it is, its queue pair in the lane, and how many requests its completion retires. It stays packed:
/// who looks at a completion asks for what it needs, and most of them are shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrId(u64);

impl WrId {
    /// Of a request on queue pair `queue`. `retires`: the work requests that are done when this one is, itself and the
    /// unsignaled ones before it.
    #[inline(always)]
    pub fn new(work: Work, queue: u8, retires: u16) -> Self {
        let (kind, share, request) = match work {
            Work::Share { request, share, timed } => (u64::from(timed), share, request),
            Work::Lead => (2, 0, 0),
            Work::Cts => (3, 0, 0),
            Work::Receive => (4, 0, 0),
            Work::Probe => (5, 0, 0),
            Work::Repeat { slot } => (6, 0, slot.number()),
            Work::Control => (7, 0, 0),
        };
        let route = u64::from(queue) << 8 | u64::from(retires) << 16;
        Self(kind | route | u64::from(share) << 32 | u64::from(request) << 40)
    }

    /// As a completion has it; the numbers are all of our own making.
    #[inline(always)]
    pub fn of(bits: u64) -> Self {
        Self(bits)
    }

    /// For the device.
    #[inline(always)]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Queue pair in the lane.
    #[inline(always)]
    pub fn queue(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Work requests that are done when this one is.
    #[inline(always)]
    pub fn retires(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// The send, its share and whether that is timed, where the request is [`Work::Share`].
    #[inline(always)]
    pub fn share(self) -> Option<(u16, u8, bool)> {
        (self.kind() < 2).then(|| ((self.0 >> 40) as u16, (self.0 >> 32) as u8, self.kind() == 1))
    }

    /// What it is.
    #[inline(always)]
    pub fn work(self) -> Work {
        if let Some((request, share, timed)) = self.share() {
            return Work::Share { request, share, timed };
        }
        match self.kind() {
            2 => Work::Lead,
            3 => Work::Cts,
            4 => Work::Receive,
            6 => Work::Repeat { slot: Slot::of_bits((self.0 >> 40) as u32) },
            7 => Work::Control,
            _ => Work::Probe,
        }
    }

    #[inline(always)]
    fn kind(self) -> u8 {
        self.0 as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_comes_back() {
        let share = |timed| Work::Share { request: 65_535, share: 7, timed };
        for work in [
            share(false),
            share(true),
            Work::Lead,
            Work::Cts,
            Work::Receive,
            Work::Probe,
            Work::Repeat { slot: Slot::of(31) },
            Work::Control,
        ] {
            let id = WrId::of(WrId::new(work, 255, 65_535).bits());
            assert_eq!((id.work(), id.queue(), id.retires()), (work, 255, 65_535));
            assert_eq!(id.share().is_some(), matches!(work, Work::Share { .. }));
        }
    }
}
