//! Layout of the 64-bit work request number that a completion returns.

use proto::wire::ids::Slot;

/// Purpose of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Work {
    /// Last write of a share. A share is the part of a send's bytes that one lane carries.
    Share {
        /// Request number of the send.
        request: u16,
        /// Number of the share within the send.
        share: u8,
        /// True if the time until the write's completion is used to measure the rail's rate.
        timed: bool,
    },
    /// A write of a share before its last write. Its completion only frees room on the queue pair.
    #[default]
    Lead,
    /// A write of the CTS (clear-to-send) entries of a receive.
    Cts,
    /// A repeated write of CTS entries, because their rail was lost or their keys are no longer
    /// valid.
    Repeat {
        /// Slot of the receive.
        slot: Slot,
    },
    /// A control frame, written into the peer's mailbox.
    Control,
    /// A posted receive. It completes when an immediate uses it up, or when the queue pair is
    /// flushed.
    Receive,
    /// A write that tests a rail during the handshake and when the rail returns.
    Probe,
}

/// Number of a work request. Its fields are the purpose ([`Work`]), the queue pair within the lane,
/// and the number of work requests that the completion retires, which frees their room in the
/// queue. The fields stay packed, because a completion handler usually needs [`WrId::share`] alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrId(u64);

impl WrId {
    /// Packs the number of a request on queue pair `queue`. `retires` counts the requests that the
    /// completion retires: this request and the unsignaled requests before it.
    #[inline(always)]
    pub fn new(work: Work, queue: u8, retires: u16) -> Self {
        let (kind, share, request) = match work {
            Work::Share {
                request,
                share,
                timed,
            } => (u64::from(timed), share, request),
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

    /// Returns the number to post for every receive on a queue pair.
    #[inline(always)]
    pub fn of_receives(queue: u8) -> u64 {
        Self::new(Work::Receive, queue, 0).bits()
    }

    /// Wraps the number in a completion. Every such number is valid, because only results of
    /// [`WrId::new`] are posted.
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

    /// Returns the number of work requests that the completion retires.
    #[inline(always)]
    pub fn retires(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// For a [`Work::Share`], returns the fields `request`, `share` and `timed`, in this order.
    #[inline(always)]
    pub fn share(self) -> Option<(u16, u8, bool)> {
        (self.kind() < 2).then(|| {
            (
                (self.0 >> 40) as u16,
                (self.0 >> 32) as u8,
                self.kind() == 1,
            )
        })
    }

    /// Returns the purpose of the request.
    #[inline(always)]
    pub fn work(self) -> Work {
        if let Some((request, share, timed)) = self.share() {
            return Work::Share {
                request,
                share,
                timed,
            };
        }
        match self.kind() {
            2 => Work::Lead,
            3 => Work::Cts,
            4 => Work::Receive,
            6 => Work::Repeat {
                slot: Slot::of_bits((self.0 >> 40) as u32),
            },
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
        let share = |timed| Work::Share {
            request: 65_535,
            share: 7,
            timed,
        };
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
