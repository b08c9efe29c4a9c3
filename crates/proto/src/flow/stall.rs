//! Finds the cause of a stall from the progress of both sides of a connection.
//!
//! The service thread samples the progress of its data path ([`StallWatch::sample`]). If requests
//! wait without progress for some seconds, this side sends a question: it asks the peer for its
//! progress, and reports its own. The [`Verdict`] follows from the progress of both sides
//! ([`StallWatch::answered`]), or from the lack of an answer. While the stall lasts, more questions
//! follow. The verdict is shown once the stall has lasted for the limit.
//!
//! Data that was acknowledged and has not arrived can never arrive, because no NIC sends it again.
//! Both sides find this [`Cause::NotArrived`] from each question and its answer. After two that
//! agree, each side ends the connection ([`StallWatch::has_lost_data`]).
//!
//! A connection without requests never stalls. A send that the peer has not granted yet has no
//! request: the call returns, and the caller repeats it. Such a send counts as waiting as long as
//! the caller repeats the call.
//!
//! All times are nanoseconds of recovery's clock.

use crate::wire::control::{Progress, StallReport};

const SECOND: u64 = 1_000_000_000;

/// Time limit for the peer's answer. An answer usually takes milliseconds. It takes a few seconds
/// if TCP loses packets.
const ANSWER_TIMEOUT_NS: u64 = 5 * SECOND;
/// Time without progress until this side sends the first question, unless a limit is shorter. Also
/// the pause between a verdict and the next question.
const PAUSE_NS: u64 = 5 * SECOND;
/// Least time between the two verdicts that show that data is lost. A NIC may show a completion
/// shortly after it has acknowledged the data.
const APART_NS: u64 = SECOND;
/// A caller that has made no call for this long no longer counts as repeating a send.
const REPEAT_TIMEOUT_NS: u64 = 2 * SECOND;
/// A stall can end the connection only after this number of verdicts in a row with the same cause.
const VERDICTS_TO_ABORT: u32 = 2;

/// Cause of a stall. A cause with a higher number tells more about the stall, so a log line about
/// several connections names the highest. The counters' memory file stores the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Cause {
    /// The peer's caller has not posted the receive, or the send.
    NotPosted = 1,
    /// The peer's requests are done, but its caller has not tested them.
    NotTested = 2,
    /// This side is the sender. The peer has granted a receive, but this side does not start its
    /// send: the tags differ, or no rail is usable.
    HeldBack = 3,
    /// A receive is posted, but its CTS entry has not arrived.
    NotGranted = 4,
    /// The sender has seen all data acknowledged, but some of it has not arrived at the receiver.
    NotArrived = 5,
    /// A send has started, but not all of its data is acknowledged.
    NotAcknowledged = 6,
    /// The peer does not answer.
    NoAnswer = 7,
}

impl Cause {
    /// All causes.
    pub const ALL: [Self; 7] = [
        Self::NotPosted,
        Self::NotTested,
        Self::HeldBack,
        Self::NotGranted,
        Self::NotArrived,
        Self::NotAcknowledged,
        Self::NoAnswer,
    ];

    /// Returns the cause with this number.
    pub fn of_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| *cause as u64 == number)
    }

    /// Returns the cause's name: two words, joined by a hyphen.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotPosted => "not-posted",
            Self::NotTested => "not-tested",
            Self::HeldBack => "held-back",
            Self::NotGranted => "not-granted",
            Self::NotArrived => "not-arrived",
            Self::NotAcknowledged => "not-acknowledged",
            Self::NoAnswer => "no-answer",
        }
    }
}

/// Result of one question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The cause.
    pub cause: Cause,
    /// Set of lanes with unacknowledged data, by [`crate::wire::ids::LaneId::bit`].
    pub lanes: u8,
    /// For [`Cause::NoAnswer`], the time of the unanswered question. Otherwise the time of the
    /// peer's last progress.
    pub since: u64,
}

/// Time limits, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct StallLimits {
    /// Time without progress until [`StallWatch::verdict`] shows the cause. If `abort` is shorter,
    /// `abort` counts instead.
    pub warn: u64,
    /// Least time without progress until a stall ends the connection ([`StallWatch::must_abort`]).
    /// `None` if no stall ends it.
    pub abort: Option<u64>,
}

/// Stall detection of one side of a connection.
#[derive(Debug)]
pub struct StallWatch {
    limits: StallLimits,
    progress: Option<Progress>,
    /// See [`StallReport::rail_changes`].
    rail_changes: Option<u32>,
    progress_at: u64,
    called_at: u64,
    /// Time since which the caller has repeated a send that is not granted.
    repeated_since: Option<u64>,
    /// Number of the last question.
    number: u32,
    /// The last question, while it is unanswered.
    asked: Option<Question>,
    next_question: u64,
    verdict: Option<Verdict>,
    /// Number of verdicts in a row with the same cause.
    agreed: u32,
    missing: Option<Missing>,
}

#[derive(Debug, Clone, Copy)]
struct Question {
    asked_at: u64,
    rail_changes: Option<u32>,
    /// Number of [`Cause::NoAnswer`] verdicts about the question so far.
    unanswered_verdicts: u64,
}

/// Acknowledged data that has not arrived.
#[derive(Debug, Clone, Copy)]
struct Missing {
    /// This side when the data was first missed, then the peer.
    sides: [Settled; 2],
    since: u64,
    /// Time at which another verdict has shown the same state of both sides.
    confirmed_at: Option<u64>,
}

/// Progress of a side whose rails do not change, and the number of their earlier changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Settled {
    progress: Progress,
    rail_changes: u32,
}

impl StallWatch {
    /// Returns the stall detection of a new connection.
    pub fn new(limits: StallLimits) -> Self {
        let (progress_at, called_at, number, next_question, agreed) = Default::default();
        let (progress, rail_changes, repeated_since, asked, verdict, missing) = Default::default();
        Self {
            limits,
            progress,
            rail_changes,
            progress_at,
            called_at,
            repeated_since,
            number,
            asked,
            next_question,
            verdict,
            agreed,
            missing,
        }
    }

    /// Reports that the caller has used the data path since the last report.
    pub fn called(&mut self, now: u64) {
        self.called_at = now;
    }

    /// Reports the state of this side ([`StallReport::rail_changes`]). Returns the question to
    /// send, if one is due.
    pub fn sample(
        &mut self,
        progress: Progress,
        rail_changes: Option<u32>,
        now: u64,
    ) -> Option<StallReport> {
        if self.progress != Some(progress) {
            (self.progress, self.progress_at) = (Some(progress), now);
            (
                self.asked,
                self.verdict,
                self.agreed,
                self.next_question,
                self.missing,
            ) = (None, None, 0, 0, None);
        }
        self.rail_changes = match self.missing {
            // The peer may still need this state to miss the data too, although this side has ended
            // the connection meanwhile.
            Some(Missing {
                sides: [own, _],
                confirmed_at: Some(_),
                ..
            }) => Some(own.rail_changes),
            _ => rail_changes,
        };
        let repeats = matches!(
            progress,
            Progress::Sender {
                running: 0,
                untested: 0,
                ..
            }
        ) && self.called_at > 0
            && now.saturating_sub(self.called_at) < REPEAT_TIMEOUT_NS;
        self.repeated_since = repeats.then(|| self.repeated_since.unwrap_or(now));
        if self.waited(now) < PAUSE_NS.min(self.limit()) {
            return None;
        }
        match &mut self.asked {
            None if now >= self.next_question => {
                self.number = self.number.wrapping_add(1);
                self.asked = Some(Question {
                    asked_at: now,
                    rail_changes: self.rail_changes,
                    unanswered_verdicts: 0,
                });
                return self.report(self.number, now);
            }
            Some(Question {
                asked_at,
                unanswered_verdicts,
                ..
            }) if now.saturating_sub(*asked_at)
                >= ANSWER_TIMEOUT_NS * (*unanswered_verdicts + 1) =>
            {
                *unanswered_verdicts += 1;
                let since = *asked_at;
                self.conclude(Verdict {
                    cause: Cause::NoAnswer,
                    lanes: lanes(&progress),
                    since,
                });
            }
            _ => {}
        }
        None
    }

    /// Returns the progress of this side, as last sampled.
    pub fn progress(&self) -> Option<Progress> {
        self.progress
    }

    /// Returns the state of this side, as last sampled, for a question or an answer. `None` before
    /// the first sample.
    pub fn report(&self, number: u32, now: u64) -> Option<StallReport> {
        let idle_ms = now.saturating_sub(self.progress_at) / 1_000_000;
        Some(StallReport {
            number,
            idle_ms,
            progress: self.progress?,
            rail_changes: self.rail_changes,
            operation: None,
        })
    }

    /// Reports the peer's answer. The answer is ignored if this side has made progress since the
    /// question.
    pub fn answered(&mut self, answer: &StallReport, now: u64) {
        let Some(own) = self.progress else { return };
        let Some(question) = self.asked.take_if(|_| answer.number == self.number) else {
            return;
        };
        self.next_question = now + PAUSE_NS;
        let found = judge(&own, &answer.progress);
        // The peer has judged by the question. So this side judges only by what the question said,
        // and never ends the connection without the peer.
        let rail_changes = self
            .rail_changes
            .filter(|_| self.rail_changes == question.rail_changes);
        self.weigh(found.map(|(cause, _)| cause), rail_changes, answer, now);
        match found {
            Some((cause, lanes)) => {
                let since = now.saturating_sub(answer.idle_ms.saturating_mul(1_000_000));
                self.conclude(Verdict {
                    cause,
                    lanes,
                    since,
                });
            }
            None => (self.verdict, self.agreed) = (None, 0),
        }
    }

    /// Reports a question of the peer. Returns the peer's verdict about its own stall, if the peer
    /// waits for data.
    pub fn peer_asked(&mut self, question: &StallReport, now: u64) -> Option<Verdict> {
        let found = judge(&question.progress, &self.progress?);
        self.weigh(
            found.map(|(cause, _)| cause),
            self.rail_changes,
            question,
            now,
        );
        let waits_for_data = matches!(question.progress, Progress::Receiver { open: 1.., .. });
        let (cause, lanes) = found.filter(|_| waits_for_data)?;
        Some(Verdict {
            cause,
            lanes,
            since: self.progress_at,
        })
    }

    /// Returns true if the connection must end, because acknowledged data can never arrive.
    /// `is_waiting` is true while the peer has not acknowledged a message. The peer needs the last
    /// answer to end its side too, so the end waits for the acknowledgement, but not for ever.
    pub fn has_lost_data(&self, is_waiting: bool, now: u64) -> bool {
        let confirmed_at = self.missing.and_then(|missing| missing.confirmed_at);
        confirmed_at.is_some_and(|at| !is_waiting || now.saturating_sub(at) >= ANSWER_TIMEOUT_NS)
    }

    /// Returns the last verdict about the current stall, once the stall has lasted for the limit.
    pub fn verdict(&self, now: u64) -> Option<&Verdict> {
        self.verdict
            .as_ref()
            .filter(|_| self.waited(now) >= self.limit())
    }

    /// Returns the time that requests have waited without progress; 0 if none waits.
    pub fn waited(&self, now: u64) -> u64 {
        match (&self.progress, self.repeated_since) {
            (
                Some(Progress::Sender { running: 1.., .. } | Progress::Receiver { open: 1.., .. }),
                _,
            ) => now.saturating_sub(self.progress_at),
            // The wait counts up to the caller's last call, because the caller may have given up
            // the send after that call.
            (_, Some(since)) => self.called_at.saturating_sub(since.max(self.progress_at)),
            _ => 0,
        }
    }

    /// Returns true if the stall ends the connection: requests have waited for the time
    /// [`StallLimits::abort`], and the last `VERDICTS_TO_ABORT` verdicts name the same cause.
    pub fn must_abort(&self, now: u64) -> bool {
        self.agreed >= VERDICTS_TO_ABORT
            && self
                .limits
                .abort
                .is_some_and(|abort| self.waited(now) >= abort)
    }

    fn limit(&self) -> u64 {
        self.limits
            .abort
            .map_or(self.limits.warn, |abort| abort.min(self.limits.warn))
    }

    /// Records that data is missing, or confirms it. Two verdicts confirm each other if both sides'
    /// progress is the same, no rail changed between them, and they are [`APART_NS`] apart.
    fn weigh(
        &mut self,
        cause: Option<Cause>,
        rail_changes: Option<u32>,
        peer: &StallReport,
        now: u64,
    ) {
        if cause != Some(Cause::NotArrived) {
            self.missing = None;
            return;
        }
        let (Some(progress), Some(rail_changes), Some(peer_changes)) =
            (self.progress, rail_changes, peer.rail_changes)
        else {
            return;
        };
        let peer = Settled {
            progress: peer.progress,
            rail_changes: peer_changes,
        };
        let sides = [
            Settled {
                progress,
                rail_changes,
            },
            peer,
        ];
        match &mut self.missing {
            Some(missing) if missing.sides == sides => {
                if now.saturating_sub(missing.since) >= APART_NS {
                    missing.confirmed_at.get_or_insert(now);
                }
            }
            // Once confirmed, the data stays lost.
            Some(Missing {
                confirmed_at: Some(_),
                ..
            }) => {}
            _ => {
                self.missing = Some(Missing {
                    sides,
                    since: now,
                    confirmed_at: None,
                })
            }
        }
    }

    fn conclude(&mut self, verdict: Verdict) {
        let agrees = self
            .verdict
            .is_some_and(|before| before.cause == verdict.cause);
        self.agreed = if agrees { self.agreed + 1 } else { 1 };
        self.verdict = Some(verdict);
    }
}

/// Returns the cause of a stall and the set of lanes with unacknowledged data. Returns `None` if
/// the two sides contradict each other: the peer's answer is then older than this side's progress.
fn judge(own: &Progress, peer: &Progress) -> Option<(Cause, u8)> {
    let cause = match (*own, *peer) {
        (Progress::Sender { running: 1.., .. }, _) => Cause::NotAcknowledged,
        (
            Progress::Sender {
                begun, is_granted, ..
            },
            Progress::Receiver {
                granted,
                delivered,
                untested,
                ..
            },
        ) => match () {
            () if granted < begun => return None,
            () if begun > delivered => Cause::NotArrived,
            () if is_granted => Cause::HeldBack,
            () if granted > begun => Cause::NotGranted,
            () if untested > 0 => Cause::NotTested,
            () => Cause::NotPosted,
        },
        (
            Progress::Receiver { delivered, .. },
            Progress::Sender {
                begun,
                is_granted,
                running,
                untested,
                ..
            },
        ) => match () {
            () if begun < delivered => return None,
            () if begun > delivered && running > 0 => Cause::NotAcknowledged,
            () if begun > delivered => Cause::NotArrived,
            () if !is_granted => Cause::NotGranted,
            () if running > 0 => Cause::NotAcknowledged,
            () if untested > 0 => Cause::NotTested,
            () => Cause::NotPosted,
        },
        // Recovery refuses an answer from a peer of the same role.
        (Progress::Sender { .. }, Progress::Sender { .. })
        | (Progress::Receiver { .. }, Progress::Receiver { .. }) => {
            return None;
        }
    };
    let lanes = if cause == Cause::NotAcknowledged {
        lanes(own) | lanes(peer)
    } else {
        0
    };
    Some((cause, lanes))
}

fn lanes(progress: &Progress) -> u8 {
    match progress {
        Progress::Sender { lanes, .. } => *lanes,
        Progress::Receiver { .. } => 0,
    }
}

#[cfg(test)]
mod tests;
