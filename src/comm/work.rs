//! What a completion's 64-bit work request number says.

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
        slot: u16,
    },
    /// A letter into the peer's mailbox.
    Letter,
    /// A receive that an immediate used up.
    Receive,
    /// The write that tries a rail during the handshake.
    Probe,
}

/// A work request number: what it is, its queue pair in the lane, and how many requests its completion retires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkId {
    /// What it is.
    pub work: Work,
    /// Queue pair in the lane.
    pub queue: u8,
    /// Work requests that are done when this one is: itself and the unsignaled ones before it.
    pub retires: u16,
}

impl WorkId {
    /// Packs it.
    #[inline(always)]
    pub fn encode(self) -> u64 {
        let (kind, share, request) = match self.work {
            Work::Share { request, share, timed } => (u64::from(timed), share, request),
            Work::Lead => (2, 0, 0),
            Work::Cts => (3, 0, 0),
            Work::Receive => (4, 0, 0),
            Work::Probe => (5, 0, 0),
            Work::Repeat { slot } => (6, 0, slot),
            Work::Letter => (7, 0, 0),
        };
        kind | u64::from(self.queue) << 8
            | u64::from(self.retires) << 16
            | u64::from(share) << 32
            | u64::from(request) << 40
    }

    /// Unpacks it; the numbers are all of our own making.
    #[inline(always)]
    pub fn decode(bits: u64) -> Self {
        let work = match bits & 0xff {
            kind @ (0 | 1) => Work::Share { request: (bits >> 40) as u16, share: (bits >> 32) as u8, timed: kind == 1 },
            2 => Work::Lead,
            3 => Work::Cts,
            4 => Work::Receive,
            6 => Work::Repeat { slot: (bits >> 40) as u16 },
            7 => Work::Letter,
            _ => Work::Probe,
        };
        Self { work, queue: (bits >> 8) as u8, retires: (bits >> 16) as u16 }
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
            Work::Repeat { slot: 31 },
            Work::Letter,
        ] {
            let id = WorkId { work, queue: 255, retires: 65_535 };
            assert_eq!(WorkId::decode(id.encode()), id);
        }
    }
}
