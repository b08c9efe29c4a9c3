//! Replaces the plugin's `comm/streams/farewell.rs`: streams that end after a number of rounds.

pub mod farewell {
    use crate::comm::recovery::driver::Notes;
    use std::sync::Arc;
    use std::time::Instant;

    /// Streams that record their end.
    pub struct StreamClose {
        rounds: usize,
        notes: Arc<Notes>,
    }

    impl StreamClose {
        /// Ends after `rounds` rounds.
        pub fn new(rounds: usize, notes: &Arc<Notes>) -> Self {
            Self { rounds, notes: Arc::clone(notes) }
        }

        /// Runs one round. Returns true at the end.
        pub fn poll(&mut self, _: Instant) -> bool {
            self.rounds = self.rounds.saturating_sub(1);
            if self.rounds == 0 {
                self.notes.note(|told| told.gone = true);
            }
            self.rounds == 0
        }
    }
}
