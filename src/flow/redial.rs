//! When the connecting side dials for another bootstrap TCP connection: at once when the one it had is given up, then with pauses that
//! double, more often while no rail is up, each attempt with a limit.
//!
//! Attempts are numbered by the milliseconds since the connection came up, so that who learns the token and dials with a number far ahead
//! of its time cannot make every later attempt a late one.
//!
//! Pure: times are nanoseconds of one clock since the connection came up; if time goes backwards, none has passed.

const MILLISECOND: u64 = 1_000_000;
const SECOND: u64 = 1000 * MILLISECOND;

/// The pause after the first attempt in vain; each further one doubles it.
const FIRST_PAUSE: u64 = 250 * MILLISECOND;
/// At most so long: a process has a hundred connections and more with a peer, and each dials by itself.
const LONGEST_PAUSE: u64 = 16 * SECOND;
/// The same while no rail is up: what the peer has to be asked for a rail's return goes by TCP alone. And while a peer whose TCP was closed
/// has not shown that it is there: it counts as gone after two seconds.
const LONGEST_URGENT_PAUSE: u64 = SECOND;
/// How long an attempt may take, from its first packet to the peer's answer: two SYNs that are lost (Linux sends them again after one and
/// three seconds), and a peer whose service thread waits for the kernel's address resolution for a second.
const ATTEMPT: u64 = 5 * SECOND;
/// A TCP connection that has carried for so long is dialled again without a pause.
const STEADY: u64 = 10 * SECOND;

/// How far an attempt may be ahead of the accepting side's clock: what a handshake takes between the two sides' beginnings is far less.
const AHEAD: u64 = 60 * SECOND;
/// And by this part of the time that has passed: Linux lets two clocks differ by 500 ppm each at most while it adjusts them (adjtimex(2)).
const DRIFT: u64 = 1000;

/// Whether the accepting side, for which so much time has passed since the connection came up, takes an attempt after this `last` one.
pub fn is_timely(attempt: u64, last: u64, passed: u64) -> bool {
    let most = passed.saturating_add(passed / DRIFT).saturating_add(AHEAD) / MILLISECOND;
    attempt > last && attempt <= most
}

/// What the connection has to do with another TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// It has one that carries, or control messages have no use any more.
    No,
    /// It has none, and its rails carry control messages.
    Calm,
    /// It has none that is known to carry, and no rail, or little time to hear of the peer.
    Urgent,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Dial; this is the attempt's number. Then call [`Attempts::failed`] or [`Attempts::succeeded`].
    Dial(u64),
    /// The attempt takes too long: close what was dialled.
    Abandon,
}

/// The attempts of one connection.
#[derive(Debug, Clone)]
pub struct Attempts {
    state: State,
    /// The number of the last one.
    last: u64,
}

/// `pause` is the one before the attempt that comes next or is under way.
#[derive(Debug, Clone, Copy)]
enum State {
    Idle { since: u64, pause: u64 },
    Waiting { since: u64, pause: u64 },
    UnderWay { until: u64, pause: u64 },
}

impl Attempts {
    /// Of a connection whose TCP carries.
    pub fn new() -> Self {
        Self { state: State::Idle { since: 0, pause: 0 }, last: 0 }
    }

    /// What to do now.
    pub fn poll(&mut self, need: Need, now: u64) -> Option<Step> {
        if let State::Idle { since, pause } = self.state
            && need != Need::No
        {
            let is_steady = now.saturating_sub(since) > STEADY;
            self.state = State::Waiting { since: now, pause: if is_steady { 0 } else { pause } };
        }
        match (self.state, need) {
            // The TCP connection that was in doubt carries after all.
            (State::Waiting { pause, .. }, Need::No) => self.state = State::Idle { since: now, pause },
            (State::Waiting { since, pause }, _) => {
                let most = if need == Need::Urgent { LONGEST_URGENT_PAUSE } else { LONGEST_PAUSE };
                if now.saturating_sub(since) >= pause.min(most) {
                    self.last = (self.last + 1).max(now / MILLISECOND);
                    self.state = State::UnderWay { until: now + ATTEMPT, pause };
                    return Some(Step::Dial(self.last));
                }
            }
            // Whatever the need is by now: the peer may have taken the new connection already.
            (State::UnderWay { until, .. }, _) if now >= until => {
                self.failed(now);
                return Some(Step::Abandon);
            }
            _ => {}
        }
        None
    }

    /// The attempt was in vain.
    pub fn failed(&mut self, now: u64) {
        if let State::UnderWay { pause, .. } = self.state {
            self.state = State::Waiting { since: now, pause: longer(pause) };
        }
    }

    /// The peer has taken the new connection.
    pub fn succeeded(&mut self, now: u64) {
        if let State::UnderWay { pause, .. } = self.state {
            self.state = State::Idle { since: now, pause: longer(pause) };
        }
    }
}

impl Default for Attempts {
    fn default() -> Self {
        Self::new()
    }
}

fn longer(pause: u64) -> u64 {
    (2 * pause).clamp(FIRST_PAUSE, LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times of the attempts that fail at once, in milliseconds.
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
        let mut calm = Attempts::new();
        assert_eq!(calm.poll(Need::No, 99 * SECOND), None);
        let found = attempts(&mut calm, Need::Calm, 100_000, 160_000);
        assert_eq!(found, [100_000, 100_250, 100_750, 101_750, 103_750, 107_750, 115_750, 131_750, 147_750]);
        // What was a long pause is over at once when no rail is left.
        assert_eq!(attempts(&mut calm, Need::Urgent, 160_000, 162_500), [160_000, 161_000, 162_000]);
    }

    #[test]
    fn an_attempt_has_a_limit_and_is_not_given_up_before() {
        let mut redial = Attempts::new();
        assert_eq!(redial.poll(Need::Calm, 20 * SECOND), Some(Step::Dial(20_000)));
        assert_eq!(redial.poll(Need::No, 25 * SECOND - 1), None);
        assert_eq!(redial.poll(Need::No, 25 * SECOND), Some(Step::Abandon));
        assert_eq!(redial.poll(Need::No, 99 * SECOND), None);
        assert_eq!(redial.poll(Need::Urgent, 199 * SECOND), Some(Step::Dial(199_000)));
    }

    #[test]
    fn numbers_grow_and_only_those_of_about_now_are_taken() {
        let (mut redial, mut last) = (Attempts::new(), 0);
        for at in [0, 0, 1, MILLISECOND, 5 * MILLISECOND, 9 * SECOND, 3_000_000 * SECOND] {
            redial.state = State::Waiting { since: 0, pause: 0 };
            let Some(Step::Dial(attempt)) = redial.poll(Need::Urgent, at) else { panic!("no attempt") };
            // The accepting side's clock may be slow.
            assert!(is_timely(attempt, last, at - at / (DRIFT + 1)), "{attempt} after {last} at {at}");
            assert!(!is_timely(attempt, attempt, at));
            last = attempt;
        }
        assert!(!is_timely(u64::MAX, 0, 99 * SECOND) && !is_timely(159_101, 0, 99 * SECOND));
        // Who dials with the most that is taken keeps the connecting side away for so long.
        assert!(is_timely(159_099, 0, 99 * SECOND) && is_timely(159_200, 159_099, 159 * SECOND));
    }

    #[test]
    fn a_connection_that_breaks_again_and_again_is_dialled_with_pauses() {
        let (mut redial, mut found) = (Attempts::new(), Vec::new());
        for ms in 20_000..40_000 {
            if redial.poll(Need::Urgent, ms * MILLISECOND).is_some() {
                redial.succeeded(ms * MILLISECOND);
                found.push(ms);
            }
        }
        assert!((20..25).contains(&found.len()) && found[..3] == [20_000, 20_251, 20_752], "{found:?}");
        // After some time in which it carried, at once.
        assert_eq!(redial.poll(Need::No, 40 * SECOND), None);
        assert!(redial.poll(Need::Calm, 51 * SECOND).is_some());
    }
}
