//! Finds the cause of a stall from the progress of both sides of a connection.
//!
//! The service thread samples the progress of its data path ([`StallWatch::sample`]). If requests
//! wait without progress for longer than the limit, this side sends a question: it asks the peer
//! for its progress. The [`Verdict`] follows from the progress of both sides
//! ([`StallWatch::answered`]), or from the lack of an answer. While the stall lasts, more questions
//! follow.
//!
//! A connection without requests never stalls. A send that the peer has not granted yet has no
//! request: the call returns, and the caller repeats it. Such a send counts as waiting as long as
//! the caller repeats the call.
//!
//! All times are nanoseconds of recovery's clock.

use crate::wire::control::Progress;

const SECOND: u64 = 1_000_000_000;

/// Time limit for the peer's answer. An answer usually takes milliseconds. It takes a few seconds
/// if TCP loses packets.
const ANSWER_TIMEOUT_NS: u64 = 5 * SECOND;
/// Pause between a verdict and the next question.
const PAUSE_NS: u64 = 5 * SECOND;
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
    /// send: the tags differ, no rail is usable, or the bound on bytes in flight is reached.
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
    /// Time without progress until this side sends a question. If `abort` is shorter, `abort`
    /// counts instead.
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
    progress_at: u64,
    called_at: u64,
    /// Time since which the caller has repeated a send that is not granted.
    repeated_since: Option<u64>,
    /// Number of the last question.
    number: u32,
    /// While a question is unanswered: the time at which it was asked, and the number of
    /// [`Cause::NoAnswer`] verdicts about it so far.
    asked: Option<(u64, u64)>,
    next_question: u64,
    verdict: Option<Verdict>,
    /// Number of verdicts in a row with the same cause.
    agreed: u32,
}

impl StallWatch {
    /// Returns the stall detection of a new connection.
    pub fn new(limits: StallLimits) -> Self {
        let (progress_at, called_at, number, next_question, agreed) = Default::default();
        let (progress, repeated_since, asked, verdict) = Default::default();
        Self { limits, progress, progress_at, called_at, repeated_since, number, asked, next_question, verdict, agreed }
    }

    /// Reports that the caller has used the data path since the last report.
    pub fn called(&mut self, now: u64) {
        self.called_at = now;
    }

    /// Reports the progress of this side. Returns the number of a question to send, if one is due.
    pub fn sample(&mut self, progress: Progress, now: u64) -> Option<u32> {
        if self.progress != Some(progress) {
            (self.progress, self.progress_at) = (Some(progress), now);
            (self.asked, self.verdict, self.agreed, self.next_question) = (None, None, 0, 0);
        }
        let repeats = matches!(progress, Progress::Sender { running: 0, untested: 0, .. })
            && self.called_at > 0
            && now.saturating_sub(self.called_at) < REPEAT_TIMEOUT_NS;
        self.repeated_since = repeats.then(|| self.repeated_since.unwrap_or(now));
        let limit = self.limits.abort.map_or(self.limits.warn, |abort| abort.min(self.limits.warn));
        if self.waited(now) < limit {
            return None;
        }
        match self.asked {
            None if now >= self.next_question => {
                self.number = self.number.wrapping_add(1);
                self.asked = Some((now, 0));
                return Some(self.number);
            }
            Some((asked, unanswered_verdicts))
                if now.saturating_sub(asked) >= ANSWER_TIMEOUT_NS * (unanswered_verdicts + 1) =>
            {
                self.asked = Some((asked, unanswered_verdicts + 1));
                self.conclude(Verdict { cause: Cause::NoAnswer, lanes: lanes(&progress), since: asked });
            }
            _ => {}
        }
        None
    }

    /// Reports the peer's answer to question `number`. `idle_ms` is the number of milliseconds
    /// since the peer's last progress. The answer is ignored if this side has made progress since
    /// the question.
    pub fn answered(&mut self, number: u32, idle_ms: u64, peer: &Progress, now: u64) {
        let Some(own) = self.progress.filter(|_| self.asked.is_some() && number == self.number) else { return };
        (self.asked, self.next_question) = (None, now + PAUSE_NS);
        match judge(&own, peer) {
            Some((cause, lanes)) => {
                let since = now.saturating_sub(idle_ms.saturating_mul(1_000_000));
                self.conclude(Verdict { cause, lanes, since });
            }
            None => (self.verdict, self.agreed) = (None, 0),
        }
    }

    /// Returns the last verdict about the current stall.
    pub fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref()
    }

    /// Returns the time that requests have waited without progress; 0 if none waits.
    pub fn waited(&self, now: u64) -> u64 {
        match (&self.progress, self.repeated_since) {
            (Some(Progress::Sender { running: 1.., .. } | Progress::Receiver { open: 1.., .. }), _) => {
                now.saturating_sub(self.progress_at)
            }
            // The wait counts up to the caller's last call, because the caller may have given up
            // the send after that call.
            (_, Some(since)) => self.called_at.saturating_sub(since.max(self.progress_at)),
            _ => 0,
        }
    }

    /// Returns the time since this side's last progress.
    pub fn idle(&self, now: u64) -> u64 {
        now.saturating_sub(self.progress_at)
    }

    /// Returns true if the stall ends the connection: requests have waited for the time
    /// [`StallLimits::abort`], and the last `VERDICTS_TO_ABORT` verdicts name the same cause.
    pub fn must_abort(&self, now: u64) -> bool {
        self.agreed >= VERDICTS_TO_ABORT && self.limits.abort.is_some_and(|abort| self.waited(now) >= abort)
    }

    fn conclude(&mut self, verdict: Verdict) {
        let agrees = self.verdict.is_some_and(|before| before.cause == verdict.cause);
        self.agreed = if agrees { self.agreed + 1 } else { 1 };
        self.verdict = Some(verdict);
    }
}

/// Returns the cause of a stall and the set of lanes with unacknowledged data. Returns `None` if
/// the two sides contradict each other: the peer's answer is then older than this side's progress.
fn judge(own: &Progress, peer: &Progress) -> Option<(Cause, u8)> {
    let cause = match (*own, *peer) {
        (Progress::Sender { running: 1.., .. }, _) => Cause::NotAcknowledged,
        (Progress::Sender { is_granted: true, .. }, _) => Cause::HeldBack,
        (Progress::Sender { begun, .. }, Progress::Receiver { granted, untested, .. }) => match granted {
            _ if granted > begun => Cause::NotGranted,
            _ if granted < begun => return None,
            _ if untested > 0 => Cause::NotTested,
            _ => Cause::NotPosted,
        },
        (Progress::Receiver { delivered, .. }, Progress::Sender { begun, is_granted, running, untested, .. }) => {
            match () {
                () if begun < delivered => return None,
                () if begun > delivered && running > 0 => Cause::NotAcknowledged,
                () if begun > delivered => Cause::NotArrived,
                () if !is_granted => Cause::NotGranted,
                () if running > 0 => Cause::NotAcknowledged,
                () if untested > 0 => Cause::NotTested,
                () => Cause::NotPosted,
            }
        }
        // Recovery refuses an answer from a peer of the same role.
        (Progress::Sender { .. }, Progress::Sender { .. }) | (Progress::Receiver { .. }, Progress::Receiver { .. }) => {
            return None;
        }
    };
    let lanes = if cause == Cause::NotAcknowledged { lanes(own) | lanes(peer) } else { 0 };
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
