//! Layout of the 64-bit work request number that a completion returns.

use crate::wire::ids::Slot;

/// Purpose of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Work {
    /// Last write of a share of a send.
    Share {
        /// Request number of the send.
        request: u16,
        /// Number of the share within the send.
        share: u8,
        /// True if the time until its completion is used to measure the rail's rate.
        timed: bool,
    },
    /// A write of a share before its last write. Its completion only frees room on the queue pair.
    #[default]
    Lead,
    /// CTS entries of a receive.
    Cts,
    /// CTS entries written again, because their rail was lost or their keys are no longer valid.
    Repeat {
        /// Slot of the receive.
        slot: Slot,
    },
    /// A control frame, written into the peer's mailbox.
    Control,
    /// A posted receive, used up by an immediate or flushed.
    Receive,
    /// A write that tests a rail during the handshake and when the rail returns.
    Probe,
}

/// Work request number: purpose, queue pair within the lane, and number of requests retired. The
/// fields stay packed, because a completion handler usually needs [`WrId::share`] alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrId(u64);

impl WrId {
    /// Packs the number of a request on queue pair `queue`. `retires` counts the requests that its
    /// completion retires: itself and the unsignaled requests before it.
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

    /// Wraps a completion's number. It is valid, because only results of [`WrId::new`] are posted.
    #[inline(always)]
    pub fn of(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the number to post.
    #[inline(always)]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns the index of the queue pair within the lane.
    #[inline(always)]
    pub fn queue(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Returns the number of work requests that this one's completion retires.
    #[inline(always)]
    pub fn retires(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Returns the send, the share, and true if the share is timed, for a [`Work::Share`].
    #[inline(always)]
    pub fn share(self) -> Option<(u16, u8, bool)> {
        (self.kind() < 2).then(|| ((self.0 >> 40) as u16, (self.0 >> 32) as u8, self.kind() == 1))
    }

    /// Returns the purpose of the request.
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
    fn every_kind_survives_encoding_and_decoding() {
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
