//! Replaces the plugin's `comm/streams/farewell.rs`: streams that end after a number of rounds.

/// Stand-in for the module of this name.
pub mod farewell {
    use crate::comm::recovery::driver::CallLog;
    use std::sync::Arc;
    use std::time::Instant;

    /// Streams that record their end.
    pub struct StreamClose {
        rounds: usize,
        log: Arc<CallLog>,
    }

    impl StreamClose {
        /// Creates streams that end after `rounds` rounds.
        pub fn new(rounds: usize, log: &Arc<CallLog>) -> Self {
            Self { rounds, log: Arc::clone(log) }
        }

        /// Runs one round. Returns true at the end.
        pub fn poll(&mut self, _: Instant) -> bool {
            self.rounds = self.rounds.saturating_sub(1);
            if self.rounds == 0 {
                self.log.record(|calls| calls.is_unwatched = true);
            }
            self.rounds == 0
        }
    }
}
