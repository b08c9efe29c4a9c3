//! Progress of the receives, for the service thread.

use super::{Completion, Granted, Receives, SlotState};
use crate::wire::control::Progress;

impl<const N: usize> Receives<N> {
    /// Returns true if a receive that is not optional waits for bytes.
    pub fn is_awaited(&self) -> bool {
        self.granted()
            .any(|(granted, _)| granted.unfinished > 0 && granted.completion == Completion::Pending)
    }

    /// Returns the progress of all receives.
    pub fn progress(&self) -> Progress {
        let (delivered, granted) = self.message_range();
        let mut arrived = 0;
        let mut untested = 0;
        for (receive, seen) in self.granted() {
            match receive.unfinished {
                0 => untested += 1,
                _ => arrived += seen,
            }
        }
        Progress::Receiver {
            granted,
            delivered,
            open: self.open() as u16,
            arrived,
            untested,
        }
    }

    /// Returns the granted receives, each with its number of arrived shares.
    fn granted(&self) -> impl Iterator<Item = (&Granted, u16)> {
        self.slots
            .iter()
            .zip(&self.parts)
            .filter_map(|(state, parts)| {
                let SlotState::Granted(granted) = state else {
                    return None;
                };
                let parts = parts.iter().take(usize::from(granted.count));
                Some((
                    granted,
                    parts.map(|part| part.seen.count_ones() as u16).sum(),
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::{LaneId, Slot};
    use crate::wire::immediate::Immediate;

    #[test]
    fn arrivals_and_tests_show_as_progress() {
        let mut receives: Receives = Receives::new(4096);
        let of = |granted, delivered, open, arrived, untested| Progress::Receiver {
            granted,
            delivered,
            open,
            arrived,
            untested,
        };
        assert_eq!(receives.progress(), of(0, 0, 0, 0, 0));
        let slots = [false, true].map(|optional| {
            receives
                .grant([8, 8].into_iter(), optional, LaneId::default())
                .map(|grant| grant.slot)
                .unwrap()
        });
        assert_eq!(receives.progress(), of(2, 0, 2, 0, 0));
        let mut arrives = |slot: Slot, part| {
            let immediate = Immediate {
                slot,
                part,
                generation: 0,
                share: 0,
                shares: 1,
                full_chunks: 0,
            };
            receives.arrived(&immediate, 8).unwrap();
            receives.progress()
        };
        assert_eq!(arrives(slots[1], 1), of(2, 0, 2, 1, 0));
        assert_eq!(arrives(slots[1], 0), of(2, 0, 1, 0, 1));
        assert_eq!(arrives(slots[0], 0), of(2, 0, 1, 1, 1));
        assert_eq!(arrives(slots[0], 1), of(2, 2, 0, 0, 2));
        assert!(receives.test(slots[0], |_, _| {}).unwrap());
        assert_eq!(receives.progress(), of(2, 2, 0, 0, 1));
    }
}
