use super::*;

const LIMITS: StallLimits = StallLimits {
    warn: 60 * SECOND,
    abort: Some(90 * SECOND),
};

const fn sends(begun: u64, is_granted: bool, running: u16, untested: u16) -> Progress {
    Progress::Sender {
        begun,
        is_granted,
        running,
        lanes: if running > 0 { 0b101 } else { 0 },
        untested,
    }
}

const fn receives(granted: u64, delivered: u64, untested: u16) -> Progress {
    Progress::Receiver {
        granted,
        delivered,
        open: (granted - delivered) as u16,
        arrived: 0,
        untested,
    }
}

/// This side's progress, the peer's, and the cause with its lanes.
type Case = (Progress, Progress, Option<(Cause, u8)>);

#[test]
fn each_cause_follows_from_both_sides() {
    for (own, peer, expected) in SENDER_CASES.into_iter().chain(RECEIVER_CASES) {
        assert_eq!(judge(&own, &peer), expected, "{own:?} {peer:?}");
    }
}

/// Cases of a sender. It has begun receives 0 to 3, so its next send is for receive 4.
const SENDER_CASES: [Case; 9] = [
    (
        sends(4, false, 1, 0),
        receives(4, 4, 0),
        Some((Cause::NotAcknowledged, 0b101)),
    ),
    (
        sends(4, true, 0, 0),
        receives(5, 4, 0),
        Some((Cause::HeldBack, 0)),
    ),
    (
        sends(4, false, 0, 0),
        receives(5, 4, 0),
        Some((Cause::NotGranted, 0)),
    ),
    (
        sends(4, false, 0, 0),
        receives(4, 4, 0),
        Some((Cause::NotPosted, 0)),
    ),
    (
        sends(4, false, 0, 0),
        receives(4, 4, 3),
        Some((Cause::NotTested, 0)),
    ),
    (
        sends(4, false, 0, 0),
        receives(4, 3, 0),
        Some((Cause::NotArrived, 0)),
    ),
    (
        sends(4, true, 0, 0),
        receives(5, 3, 0),
        Some((Cause::NotArrived, 0)),
    ),
    (
        sends(4, false, 1, 0),
        receives(4, 3, 0),
        Some((Cause::NotAcknowledged, 0b101)),
    ),
    (sends(4, false, 0, 0), receives(3, 3, 0), None),
];

const RECEIVER_CASES: [Case; 7] = [
    (
        receives(6, 4, 0),
        sends(4, true, 0, 0),
        Some((Cause::NotPosted, 0)),
    ),
    (
        receives(6, 4, 0),
        sends(4, true, 0, 2),
        Some((Cause::NotTested, 0)),
    ),
    (
        receives(6, 4, 0),
        sends(4, false, 0, 0),
        Some((Cause::NotGranted, 0)),
    ),
    (
        receives(6, 4, 0),
        sends(5, true, 1, 0),
        Some((Cause::NotAcknowledged, 0b101)),
    ),
    (
        receives(6, 4, 0),
        sends(4, true, 1, 0),
        Some((Cause::NotAcknowledged, 0b101)),
    ),
    (
        receives(6, 4, 0),
        sends(5, true, 0, 1),
        Some((Cause::NotArrived, 0)),
    ),
    (receives(6, 4, 0), sends(3, true, 0, 0), None),
];

#[test]
fn causes_have_their_numbers() {
    for (at, cause) in Cause::ALL.into_iter().enumerate() {
        assert_eq!(
            (cause as usize, Cause::of_number(cause as u64)),
            (at + 1, Some(cause))
        );
    }
    assert_eq!(
        (
            Cause::of_number(0),
            Cause::of_number(8),
            Cause::of_number(u64::MAX)
        ),
        (None, None, None)
    );
}

fn report(number: u32, idle_ms: u64, progress: Progress) -> StallReport {
    StallReport {
        number,
        idle_ms,
        progress,
        rail_changes: Some(0),
        operation: None,
    }
}

fn answer(watch: &mut StallWatch, number: u32, progress: Progress, now: u64) {
    watch.answered(&report(number, 0, progress), now);
}

fn cause(watch: &StallWatch) -> Option<Cause> {
    watch.verdict.map(|verdict| verdict.cause)
}

/// Takes a sample each half second, from second `from` until second `to`. With `calls`, the caller
/// uses the data path before each sample. Returns the number of each question, with its time in
/// seconds.
fn run(
    watch: &mut StallWatch,
    progress: Progress,
    calls: bool,
    from: u64,
    to: u64,
) -> Vec<(u32, u64)> {
    let mut questions = Vec::new();
    for now in (2 * from..2 * to).map(|half| half * SECOND / 2) {
        if calls {
            watch.called(now);
        }
        questions.extend(
            watch
                .sample(progress, Some(0), now)
                .map(|question| (question.number, now / SECOND)),
        );
    }
    questions
}

#[test]
fn only_requests_that_wait_count() {
    let mut watch = StallWatch::new(LIMITS);
    for idle in [
        sends(4, true, 0, 0),
        sends(4, false, 0, 3),
        receives(4, 4, 2),
    ] {
        assert_eq!(run(&mut watch, idle, false, 10, 1000), []);
    }
    assert_eq!(
        run(&mut watch, sends(4, false, 0, 3), true, 1000, 2000),
        [],
        "it has finished sends to test"
    );
    // The caller repeats a send for less than the limit, and then stops.
    assert_eq!(run(&mut watch, sends(4, false, 0, 0), true, 2000, 2004), []);
    assert_eq!(
        run(&mut watch, sends(4, false, 0, 0), false, 2004, 3000),
        []
    );
    // The caller repeats a send for longer than the limit, counted from the first repetition.
    assert_eq!(
        run(&mut watch, sends(4, false, 0, 0), true, 3000, 3007),
        [(1, 3005)]
    );
    // The next send, which the caller repeats from then on, starts a new wait.
    assert_eq!(run(&mut watch, sends(5, false, 0, 0), true, 3007, 3012), []);
    // A caller does not count before its first call.
    let mut new = StallWatch::new(LIMITS);
    assert_eq!(run(&mut new, sends(0, false, 0, 0), false, 0, 1), []);
    assert_eq!(run(&mut new, sends(0, false, 0, 0), true, 1, 8), [(1, 6)]);
    // A posted request counts even if the caller makes no calls.
    assert_eq!(
        run(&mut watch, receives(5, 4, 0), false, 4000, 4007),
        [(2, 4005)]
    );
    assert_eq!(
        run(&mut watch, sends(5, false, 1, 0), false, 5000, 5007),
        [(3, 5005)]
    );
}

#[test]
fn progress_starts_again_and_makes_an_answer_void() {
    let mut watch = StallWatch::new(LIMITS);
    let own = receives(5, 4, 0);
    assert_eq!(run(&mut watch, own, false, 0, 6), [(1, 5)]);
    // The answer to question 1 arrives after the next progress, and after question 2.
    let own = receives(6, 5, 0);
    assert_eq!(run(&mut watch, own, false, 6, 12), [(2, 11)]);
    answer(&mut watch, 1, sends(4, true, 0, 0), 12 * SECOND);
    assert_eq!(watch.verdict, None);
    watch.answered(&report(2, 3_000, sends(5, true, 0, 0)), 12 * SECOND);
    let verdict = Verdict {
        cause: Cause::NotPosted,
        lanes: 0,
        since: 9 * SECOND,
    };
    assert_eq!(
        (watch.verdict, watch.waited(12 * SECOND)),
        (Some(verdict), 6 * SECOND)
    );
    watch.answered(&report(2, 3_000, sends(5, false, 0, 0)), 12 * SECOND);
    assert_eq!(watch.verdict, Some(verdict), "answered before");
    watch.sample(receives(7, 5, 0), None, 13 * SECOND);
    assert_eq!((watch.verdict, watch.waited(13 * SECOND)), (None, 0));
    // The idle time that the peer reports is impossible.
    assert_eq!(run(&mut watch, receives(7, 5, 0), false, 14, 19), [(3, 18)]);
    watch.answered(&report(3, u64::MAX, sends(5, true, 0, 0)), 19 * SECOND);
    assert_eq!(watch.verdict.map(|verdict| verdict.since), Some(0));
    // An answer from before receive 4 was delivered contradicts this side's progress.
    assert_eq!(run(&mut watch, receives(7, 5, 0), false, 19, 25), [(4, 24)]);
    answer(&mut watch, 4, sends(4, true, 0, 0), 25 * SECOND);
    assert_eq!(watch.verdict, None);
}

#[test]
fn a_question_has_the_state_of_this_side() {
    let mut watch = StallWatch::new(LIMITS);
    assert_eq!(watch.report(3, 0), None);
    let own = receives(5, 4, 0);
    assert_eq!(watch.sample(own, Some(7), SECOND), None);
    let question = StallReport {
        number: 1,
        idle_ms: 5_000,
        progress: own,
        rail_changes: Some(8),
        operation: None,
    };
    assert_eq!(watch.sample(own, Some(8), 6 * SECOND), Some(question));
    assert_eq!(
        watch.report(3, 7 * SECOND),
        Some(StallReport {
            number: 3,
            idle_ms: 6_000,
            ..question
        })
    );
}

#[test]
fn a_verdict_shows_after_the_limit() {
    let mut watch = StallWatch::new(LIMITS);
    let own = receives(5, 4, 0);
    assert_eq!(run(&mut watch, own, false, 0, 6), [(1, 5)]);
    answer(&mut watch, 1, sends(4, true, 0, 0), 6 * SECOND);
    assert_eq!(watch.verdict(60 * SECOND - 1), None);
    assert_eq!(
        watch.verdict(60 * SECOND).map(|verdict| verdict.cause),
        Some(Cause::NotPosted)
    );
    // A shorter limit asks earlier.
    for limits in [
        StallLimits {
            warn: 2 * SECOND,
            abort: None,
        },
        StallLimits {
            abort: Some(2 * SECOND),
            ..LIMITS
        },
    ] {
        let mut watch = StallWatch::new(limits);
        assert_eq!(run(&mut watch, own, false, 0, 3), [(1, 2)]);
        answer(&mut watch, 1, sends(4, true, 0, 0), 3 * SECOND);
        assert!(watch.verdict(3 * SECOND).is_some());
    }
}

#[test]
fn a_silent_peer_is_a_cause_until_it_answers() {
    let mut watch = StallWatch::new(LIMITS);
    let own = sends(4, false, 2, 0);
    assert_eq!(run(&mut watch, own, true, 0, 10), [(1, 5)]);
    assert_eq!(watch.verdict, None);
    assert_eq!(run(&mut watch, own, true, 10, 14), []);
    let verdict = Verdict {
        cause: Cause::NoAnswer,
        lanes: 0b101,
        since: 5 * SECOND,
    };
    assert_eq!((watch.verdict, watch.agreed), (Some(verdict), 1));
    assert_eq!(
        run(&mut watch, own, true, 14, 16),
        [],
        "the question is under way"
    );
    assert_eq!((watch.verdict, watch.agreed), (Some(verdict), 2));
    answer(&mut watch, 1, receives(4, 4, 0), 16 * SECOND);
    assert_eq!(cause(&watch), Some(Cause::NotAcknowledged));
    assert_eq!(
        run(&mut watch, own, true, 16, 22),
        [(2, 21)],
        "asked again after a pause"
    );
}

#[test]
fn a_stall_ends_the_connection_if_two_verdicts_agree() {
    let mut watch = StallWatch::new(LIMITS);
    let own = receives(5, 4, 0);
    assert_eq!(run(&mut watch, own, false, 0, 6), [(1, 5)]);
    answer(&mut watch, 1, sends(4, true, 0, 0), 6 * SECOND);
    assert_eq!(
        run(&mut watch, own, false, 6, 95),
        [(2, 11)],
        "no answer to the second question"
    );
    assert!(watch.must_abort(95 * SECOND) && cause(&watch) == Some(Cause::NoAnswer));
    answer(&mut watch, 2, sends(4, true, 0, 1), 95 * SECOND);
    assert!(!watch.must_abort(95 * SECOND), "the last two differ");
    assert_eq!(run(&mut watch, own, false, 95, 101), [(3, 100)]);
    answer(&mut watch, 3, sends(4, true, 0, 1), 101 * SECOND);
    assert!(watch.must_abort(101 * SECOND) && !watch.must_abort(89 * SECOND));
    // Without `abort`, a stall never ends the connection.
    watch.limits.abort = None;
    assert!(!watch.must_abort(u64::MAX));
}

#[test]
fn a_question_shows_why_the_peer_waits_for_data() {
    let mut watch = StallWatch::new(LIMITS);
    assert_eq!(
        watch.peer_asked(&report(1, 0, receives(5, 4, 0)), 0),
        None,
        "not sampled yet"
    );
    for (own, peer, expected) in [
        (
            sends(4, true, 0, 0),
            receives(5, 4, 0),
            Some(Cause::NotPosted),
        ),
        (
            sends(5, false, 1, 0),
            receives(5, 4, 0),
            Some(Cause::NotAcknowledged),
        ),
        (
            sends(5, false, 0, 0),
            receives(5, 4, 0),
            Some(Cause::NotArrived),
        ),
        // This side's progress is older than the question.
        (sends(3, true, 0, 0), receives(5, 4, 0), None),
        // The peer waits for a grant, not for data.
        (receives(5, 5, 0), sends(5, false, 0, 0), None),
    ] {
        watch.sample(own, Some(0), SECOND);
        let found = watch
            .peer_asked(&report(1, 0, peer), SECOND)
            .map(|verdict| verdict.cause);
        assert_eq!((found, watch.verdict), (expected, None), "{own:?} {peer:?}");
    }
}

/// Receive 4 is granted and its data acknowledged, but not arrived.
const MISSING: [Progress; 2] = [sends(5, true, 0, 1), receives(6, 4, 0)];
const SENDER: usize = 0;
const RECEIVER: usize = 1;

/// Both sides of a connection. Questions and answers arrive immediately.
struct Bed {
    watches: [StallWatch; 2],
    progress: [Progress; 2],
    rail_changes: [Option<u32>; 2],
    /// Seconds.
    now: u64,
}

impl Bed {
    fn new() -> Self {
        let watches = [0, 1].map(|_| StallWatch::new(LIMITS));
        Self {
            watches,
            progress: MISSING,
            rail_changes: [Some(3); 2],
            now: 100,
        }
    }

    fn sample(&mut self, side: usize) -> Option<StallReport> {
        self.watches[side].sample(
            self.progress[side],
            self.rail_changes[side],
            self.now * SECOND,
        )
    }

    fn ask(&mut self, asker: usize, question: &StallReport) {
        let peer = 1 - asker;
        let now = self.now * SECOND;
        self.sample(peer);
        self.watches[peer].peer_asked(question, now);
        let answer = self.watches[peer].report(question.number, now).unwrap();
        self.sample(asker);
        self.watches[asker].answered(&answer, now);
    }

    /// Lets the receiver wait until it has asked. Returns the answer to the question.
    fn asks(&mut self) {
        for _ in 0..20 {
            if let Some(question) = self.sample(RECEIVER) {
                return self.ask(RECEIVER, &question);
            }
            self.now += 1;
        }
        panic!("no question");
    }

    fn has_lost_data(&self) -> [bool; 2] {
        self.watches
            .each_ref()
            .map(|watch| watch.has_lost_data(false, self.now * SECOND))
    }
}

#[test]
fn acknowledged_data_is_lost_after_two_equal_answers() {
    let mut bed = Bed::new();
    bed.asks();
    assert_eq!(
        (bed.has_lost_data(), cause(&bed.watches[RECEIVER])),
        ([false; 2], Some(Cause::NotArrived))
    );
    bed.asks();
    assert_eq!(
        (bed.has_lost_data(), bed.now),
        ([true; 2], 110),
        "both sides, and long before the limits"
    );
    // The end waits for the acknowledgement of the last message, up to a limit.
    for watch in &bed.watches {
        let after = |seconds: u64| watch.has_lost_data(true, (110 + seconds) * SECOND);
        assert_eq!([after(0), after(4), after(5)], [false, false, true]);
    }
    // Late data has arrived after all.
    bed.progress[RECEIVER] = receives(6, 5, 0);
    bed.sample(RECEIVER);
    assert!(!bed.has_lost_data()[RECEIVER]);
    bed.now += 10;
    bed.asks();
    assert_eq!(
        bed.has_lost_data(),
        [false; 2],
        "the peer knows of the arrival"
    );
}

#[test]
fn the_sender_asks_too() {
    let mut bed = Bed::new();
    bed.progress[SENDER] = sends(6, false, 0, 0);
    for _ in 0..2 {
        let question = (0..20).find_map(|_| {
            bed.now += 1;
            bed.watches[SENDER].called(bed.now * SECOND);
            bed.sample(SENDER)
        });
        bed.ask(SENDER, &question.expect("a repeated send waits"));
    }
    assert_eq!(
        (bed.has_lost_data(), cause(&bed.watches[SENDER])),
        ([true; 2], Some(Cause::NotArrived))
    );
}

#[test]
fn two_answers_within_a_second_are_not_enough() {
    let mut bed = Bed::new();
    bed.asks();
    // Questions of both sides cross.
    let question = report(1, 0, bed.progress[SENDER]);
    bed.watches[RECEIVER].peer_asked(
        &StallReport {
            rail_changes: Some(3),
            ..question
        },
        bed.now * SECOND,
    );
    assert_eq!(bed.has_lost_data(), [false; 2]);
    bed.now += 1;
    bed.watches[RECEIVER].peer_asked(
        &StallReport {
            rail_changes: Some(3),
            ..question
        },
        bed.now * SECOND,
    );
    assert_eq!(bed.has_lost_data(), [false, true]);
}

#[test]
fn data_is_not_lost_while_anything_else_explains_its_absence() {
    let not_lost = |why: &str, alter: &dyn Fn(&mut Bed)| {
        let mut bed = Bed::new();
        bed.asks();
        alter(&mut bed);
        bed.asks();
        assert_eq!(bed.has_lost_data(), [false; 2], "{why}");
        bed
    };
    let twice = |why: &str, alter: &dyn Fn(&mut Bed)| {
        let mut bed = not_lost(why, alter);
        bed.asks();
        assert_eq!(
            bed.has_lost_data(),
            [true; 2],
            "{why}, and then nothing changes"
        );
    };
    twice("the sender has begun another send", &|bed| {
        bed.progress[SENDER] = sends(6, true, 0, 1)
    });
    twice("the sender's caller has tested a send", &|bed| {
        bed.progress[SENDER] = sends(5, true, 0, 0)
    });
    twice("the receiver has granted another receive", &|bed| {
        bed.progress[RECEIVER] = receives(7, 4, 0)
    });
    twice("a later receive has its data", &|bed| {
        bed.progress[RECEIVER] = Progress::Receiver {
            granted: 6,
            delivered: 4,
            open: 1,
            arrived: 0,
            untested: 1,
        };
    });
    twice("a share has arrived", &|bed| {
        bed.progress[RECEIVER] = Progress::Receiver {
            granted: 6,
            delivered: 4,
            open: 2,
            arrived: 1,
            untested: 0,
        };
    });
    for side in [SENDER, RECEIVER] {
        twice("a rail was lost or came back", &|bed| {
            bed.rail_changes[side] = Some(4)
        });
        let mut bed = not_lost("a rail or completions are being processed", &|bed| {
            bed.rail_changes[side] = None
        });
        bed.asks();
        assert_eq!(bed.has_lost_data(), [false; 2], "still being processed");
    }
    // A send that runs.
    let mut bed = not_lost("data is not acknowledged", &|bed| {
        bed.progress[SENDER] = sends(5, true, 1, 0)
    });
    bed.asks();
    assert_eq!(bed.has_lost_data(), [false; 2]);
}

#[test]
fn the_first_answer_counts_only_if_nothing_is_being_processed() {
    for side in [SENDER, RECEIVER] {
        let mut bed = Bed::new();
        bed.rail_changes[side] = None;
        bed.asks();
        bed.rail_changes[side] = Some(3);
        bed.asks();
        assert_eq!(bed.has_lost_data(), [false; 2]);
        bed.asks();
        assert_eq!(bed.has_lost_data(), [true; 2]);
    }
}

#[test]
fn no_side_ends_the_connection_on_what_the_other_does_not_know() {
    // The receiver's rails changed when it asked, and no longer change when the answer arrives.
    let mut bed = Bed::new();
    for _ in 0..3 {
        bed.rail_changes[RECEIVER] = None;
        let question = (0..20).find_map(|_| {
            bed.now += 1;
            bed.sample(RECEIVER)
        });
        bed.rail_changes[RECEIVER] = Some(3);
        bed.ask(RECEIVER, &question.unwrap());
        assert_eq!(bed.has_lost_data(), [false; 2]);
    }
    // The receiver's rails change again when each answer arrives, so the sender ends first. Its
    // queue pairs are destroyed then, but its answers keep their state.
    let mut bed = Bed::new();
    for _ in 0..2 {
        bed.rail_changes[RECEIVER] = Some(3);
        let question = (0..20).find_map(|_| {
            bed.now += 1;
            bed.sample(RECEIVER)
        });
        bed.rail_changes[RECEIVER] = None;
        bed.ask(RECEIVER, &question.unwrap());
    }
    assert_eq!(bed.has_lost_data(), [true, false]);
    bed.rail_changes = [None, Some(3)];
    bed.progress[RECEIVER] = Progress::Receiver {
        granted: 6,
        delivered: 4,
        open: 1,
        arrived: 0,
        untested: 1,
    };
    bed.asks();
    bed.asks();
    assert_eq!(bed.has_lost_data(), [true; 2]);
}
