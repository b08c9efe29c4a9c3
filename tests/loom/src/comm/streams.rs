//! In place of the plugin's `comm/streams/farewell.rs`: a closed connection's streams that are over after so many rounds.

pub mod farewell {
    use crate::comm::recovery::driver::Notes;
    use std::sync::Arc;
    use std::time::Instant;

    /// Says that it is over when it is.
    pub struct Farewell {
        rounds: usize,
        notes: Arc<Notes>,
    }

    impl Farewell {
        /// Over after `rounds` rounds.
        pub fn new(rounds: usize, notes: &Arc<Notes>) -> Self {
            Self { rounds, notes: Arc::clone(notes) }
        }

        /// One round.
        pub fn tend(&mut self, _: Instant) -> bool {
            self.rounds = self.rounds.saturating_sub(1);
            if self.rounds == 0 {
                self.notes.note(|told| told.gone = true);
            }
            self.rounds == 0
        }
    }
}
