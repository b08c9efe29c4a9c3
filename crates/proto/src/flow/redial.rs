//! Decides when the connecting side dials a new bootstrap TCP connection. The first attempt follows
//! immediately after the loss of the old TCP connection, later attempts after pauses that double.
//! Each attempt has a time limit.
//!
//! Attempts are numbered from 1. The accepting side refuses an attempt whose number is not above
//! the number that it accepted last: the peer has given up the TCP connection of that attempt.
//!
//! Times are nanoseconds since the connection came up. If time goes backwards, none has passed.

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;

/// Pause after the first failed attempt. Each further failure doubles the pause. A new TCP
/// connection that is lost within [`STEADY`] counts as a failure too.
const FIRST_PAUSE: u64 = 250 * MILLISECOND;
/// Longest pause. Long, because over a hundred connections of a process with one peer may dial.
const LONGEST_PAUSE: u64 = 16 * SECOND;
/// Longest pause in two urgent cases. While no rail is up, only TCP can carry the messages for a
/// rail's return. A peer that has closed TCP without a BYE must show within two seconds that it is
/// alive.
const LONGEST_URGENT_PAUSE: u64 = SECOND;
/// Time limit of an attempt, from its first packet to the peer's answer. Allows for two lost SYNs
/// (Linux resends them after one and three seconds) and for a peer whose service thread waits one
/// second for the kernel's address resolution.
const ATTEMPT: u64 = 5 * SECOND;
/// A TCP connection that worked for longer than this is replaced without a pause.
const STEADY: u64 = 10 * SECOND;

/// The connection's need for another TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// TCP works, or the connection needs no more control messages.
    No,
    /// TCP is down, and the rails carry control messages.
    NotUrgent,
    /// TCP is down or in doubt. In addition, no rail is up, or the peer is about to be given up.
    Urgent,
}

/// The next thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Dial with this attempt number, then call [`Attempts::failed`] or [`Attempts::succeeded`].
    Dial(u64),
    /// Close the dialled socket: the attempt exceeded its time limit.
    Abandon,
}

/// The attempts of one connection.
#[derive(Debug, Clone)]
pub struct Attempts {
    state: DialState,
    /// Number of the last attempt.
    last: u64,
}

/// State of the attempts. `pause` is the pause before the next attempt. In `UnderWay`, it is the
/// pause that preceded the current attempt.
#[derive(Debug, Clone, Copy)]
enum DialState {
    Idle { since: u64, pause: u64 },
    Waiting { since: u64, pause: u64 },
    UnderWay { until: u64, pause: u64 },
}

/// The state of a connection whose TCP works.
impl Default for Attempts {
    fn default() -> Self {
        Self {
            state: DialState::Idle { since: 0, pause: 0 },
            last: 0,
        }
    }
}

impl Attempts {
    /// Returns the next thing to do, if any.
    pub fn poll(&mut self, need: Need, now: u64) -> Option<Step> {
        if let DialState::Idle { since, pause } = self.state
            && need != Need::No
        {
            let is_steady = now.saturating_sub(since) > STEADY;
            self.state = DialState::Waiting {
                since: now,
                pause: if is_steady { 0 } else { pause },
            };
        }
        match (self.state, need) {
            // The old TCP connection has turned out to work.
            (DialState::Waiting { pause, .. }, Need::No) => {
                self.state = DialState::Idle { since: now, pause }
            }
            (DialState::Waiting { since, pause }, _) => {
                let most = if need == Need::Urgent {
                    LONGEST_URGENT_PAUSE
                } else {
                    LONGEST_PAUSE
                };
                if now.saturating_sub(since) >= pause.min(most) {
                    self.last += 1;
                    self.state = DialState::UnderWay {
                        until: now + ATTEMPT,
                        pause,
                    };
                    return Some(Step::Dial(self.last));
                }
            }
            // An attempt goes on even if the need has ended: the peer may have accepted it.
            (DialState::UnderWay { until, .. }, _) if now >= until => {
                self.failed(now);
                return Some(Step::Abandon);
            }
            _ => {}
        }
        None
    }

    /// Records that the attempt failed.
    pub fn failed(&mut self, now: u64) {
        if let DialState::UnderWay { pause, .. } = self.state {
            self.state = DialState::Waiting {
                since: now,
                pause: longer(pause),
            };
        }
    }

    /// Records that the peer accepted the new connection.
    pub fn succeeded(&mut self, now: u64) {
        if let DialState::UnderWay { pause, .. } = self.state {
            self.state = DialState::Idle {
                since: now,
                pause: longer(pause),
            };
        }
    }
}

fn longer(pause: u64) -> u64 {
    (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Polls every millisecond, and lets each attempt fail. Returns the attempts' times in ms.
    fn attempts(redial: &mut Attempts, need: Need, from_ms: u64, to_ms: u64) -> Vec<u64> {
        let mut found = Vec::new();
        for ms in from_ms..to_ms {
            if let Some(step) = redial.poll(need, ms * MILLISECOND) {
                assert_eq!(step, Step::Dial(redial.last));
                redial.failed(ms * MILLISECOND);
                found.push(ms);
            }
        }
        found
    }

    #[test]
    fn pauses_double_and_are_short_without_a_rail() {
        let mut not_urgent = Attempts::default();
        assert_eq!(not_urgent.poll(Need::No, 99 * SECOND), None);
        let found = attempts(&mut not_urgent, Need::NotUrgent, 100_000, 160_000);
        assert_eq!(
            found,
            [
                100_000, 100_250, 100_750, 101_750, 103_750, 107_750, 115_750, 131_750, 147_750
            ]
        );
        assert_eq!(
            attempts(&mut not_urgent, Need::Urgent, 160_000, 162_500),
            [160_000, 161_000, 162_000]
        );
    }

    #[test]
    fn an_attempt_is_abandoned_at_its_limit_and_not_before() {
        let mut redial = Attempts::default();
        assert_eq!(
            redial.poll(Need::NotUrgent, 20 * SECOND),
            Some(Step::Dial(1))
        );
        assert_eq!(redial.poll(Need::No, 25 * SECOND - 1), None);
        assert_eq!(redial.poll(Need::No, 25 * SECOND), Some(Step::Abandon));
        assert_eq!(redial.poll(Need::No, 99 * SECOND), None);
        assert_eq!(redial.poll(Need::Urgent, 199 * SECOND), Some(Step::Dial(2)));
    }

    #[test]
    fn a_connection_that_breaks_again_and_again_is_dialled_with_pauses() {
        let mut redial = Attempts::default();
        let mut found = Vec::new();
        for ms in 20_000..40_000 {
            if redial.poll(Need::Urgent, ms * MILLISECOND).is_some() {
                redial.succeeded(ms * MILLISECOND);
                found.push(ms);
            }
        }
        assert!(
            (20..25).contains(&found.len()) && found[..3] == [20_000, 20_251, 20_752],
            "{found:?}"
        );
        assert_eq!(redial.poll(Need::No, 40 * SECOND), None);
        assert!(redial.poll(Need::NotUrgent, 51 * SECOND).is_some());
    }
}
