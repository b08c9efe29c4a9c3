use super::*;

const LIMITS: StallLimits = StallLimits { warn: 60 * SECOND, abort: Some(90 * SECOND) };

fn sends(begun: u64, is_granted: bool, running: u16, untested: u16) -> Progress {
    Progress::Sender { begun, is_granted, running, lanes: if running > 0 { 0b101 } else { 0 }, untested }
}

fn receives(granted: u64, delivered: u64, untested: u16) -> Progress {
    Progress::Receiver { granted, delivered, open: (granted - delivered) as u16, arrived: 0, untested }
}

#[test]
fn each_cause_follows_from_both_sides() {
    for (own, peer, expected) in [
        // In rows that begin with `sends`, this side is the sender. It has begun receives 0 to 3,
        // so its next send is for receive 4. In the other rows this side is the receiver.
        (sends(4, false, 1, 0), receives(4, 4, 0), Some((Cause::NotAcknowledged, 0b101))),
        (sends(4, true, 0, 0), receives(5, 4, 0), Some((Cause::HeldBack, 0))),
        (sends(4, false, 0, 0), receives(5, 4, 0), Some((Cause::NotGranted, 0))),
        (sends(4, false, 0, 0), receives(4, 4, 0), Some((Cause::NotPosted, 0))),
        (sends(4, false, 0, 0), receives(4, 4, 3), Some((Cause::NotTested, 0))),
        (sends(4, false, 0, 0), receives(4, 3, 0), Some((Cause::NotPosted, 0))),
        (sends(4, false, 0, 0), receives(3, 3, 0), None),
        (receives(6, 4, 0), sends(4, true, 0, 0), Some((Cause::NotPosted, 0))),
        (receives(6, 4, 0), sends(4, true, 0, 2), Some((Cause::NotTested, 0))),
        (receives(6, 4, 0), sends(4, false, 0, 0), Some((Cause::NotGranted, 0))),
        (receives(6, 4, 0), sends(5, true, 1, 0), Some((Cause::NotAcknowledged, 0b101))),
        (receives(6, 4, 0), sends(4, true, 1, 0), Some((Cause::NotAcknowledged, 0b101))),
        (receives(6, 4, 0), sends(5, true, 0, 1), Some((Cause::NotArrived, 0))),
        (receives(6, 4, 0), sends(3, true, 0, 0), None),
    ] {
        assert_eq!(judge(&own, &peer), expected, "{own:?} {peer:?}");
    }
}

#[test]
fn causes_have_their_numbers() {
    for (at, cause) in Cause::ALL.into_iter().enumerate() {
        assert_eq!((cause as usize, Cause::of_number(cause as u64)), (at + 1, Some(cause)));
    }
    assert_eq!((Cause::of_number(0), Cause::of_number(8), Cause::of_number(u64::MAX)), (None, None, None));
}

/// Takes a sample each half second, from second `from` until second `to`. With `calls`, the caller
/// uses the data path before each sample. Returns the number of each question, with its time in
/// seconds.
fn run(watch: &mut StallWatch, progress: Progress, calls: bool, from: u64, to: u64) -> Vec<(u32, u64)> {
    let mut questions = Vec::new();
    for now in (2 * from..2 * to).map(|half| half * SECOND / 2) {
        if calls {
            watch.called(now);
        }
        questions.extend(watch.sample(progress, now).map(|number| (number, now / SECOND)));
    }
    questions
}

#[test]
fn only_requests_that_wait_count() {
    let mut watch = StallWatch::new(LIMITS);
    for idle in [sends(4, true, 0, 0), sends(4, false, 0, 3), receives(4, 4, 2)] {
        assert_eq!(run(&mut watch, idle, false, 10, 1000), []);
    }
    assert_eq!(run(&mut watch, sends(4, false, 0, 3), true, 1000, 2000), [], "it has finished sends to test");
    // The caller repeats a send for less than the limit, and then stops.
    assert_eq!(run(&mut watch, sends(4, false, 0, 0), true, 2000, 2059), []);
    assert_eq!(run(&mut watch, sends(4, false, 0, 0), false, 2059, 3000), []);
    // The caller repeats a send for longer than the limit, counted from the first repetition.
    assert_eq!(run(&mut watch, sends(4, false, 0, 0), true, 3000, 3063), [(1, 3060)]);
    // The next send, which the caller repeats from then on, starts a new wait.
    assert_eq!(run(&mut watch, sends(5, false, 0, 0), true, 3063, 3122), []);
    // A caller does not count before its first call.
    let mut new = StallWatch::new(LIMITS);
    assert_eq!(run(&mut new, sends(0, false, 0, 0), false, 0, 1), []);
    assert_eq!(run(&mut new, sends(0, false, 0, 0), true, 1, 62), [(1, 61)]);
    // A posted request counts even if the caller makes no calls.
    assert_eq!(run(&mut watch, receives(5, 4, 0), false, 4000, 4063), [(2, 4060)]);
    assert_eq!(run(&mut watch, sends(5, false, 1, 0), false, 5000, 5063), [(3, 5060)]);
}

#[test]
fn progress_begins_anew_and_makes_an_answer_void() {
    let mut watch = StallWatch::new(LIMITS);
    let (own, peer) = (receives(5, 4, 0), sends(4, true, 0, 0));
    assert_eq!(run(&mut watch, own, false, 0, 61), [(1, 60)]);
    // The answer to question 1 arrives after the next progress, and after question 2.
    let own = receives(6, 5, 0);
    assert_eq!(run(&mut watch, own, false, 61, 122), [(2, 121)]);
    watch.answered(1, 0, &peer, 122 * SECOND);
    assert_eq!(watch.verdict(), None);
    watch.answered(2, 3_000, &sends(5, true, 0, 0), 122 * SECOND);
    let verdict = Verdict { cause: Cause::NotPosted, lanes: 0, since: 119 * SECOND };
    assert_eq!((watch.verdict(), watch.waited(122 * SECOND)), (Some(&verdict), 61 * SECOND));
    watch.answered(2, 3_000, &sends(5, false, 0, 0), 122 * SECOND);
    assert_eq!(watch.verdict(), Some(&verdict), "answered before");
    watch.sample(receives(7, 5, 0), 123 * SECOND);
    assert_eq!((watch.verdict(), watch.waited(123 * SECOND)), (None, 0));
    // The idle time that the peer reports is impossible.
    assert_eq!(run(&mut watch, receives(7, 5, 0), false, 124, 190), [(3, 183)]);
    watch.answered(3, u64::MAX, &sends(5, true, 0, 0), 190 * SECOND);
    assert_eq!(watch.verdict().map(|verdict| verdict.since), Some(0));
    // An answer from before receive 4 was delivered contradicts this side's progress.
    assert_eq!(run(&mut watch, receives(7, 5, 0), false, 190, 196), [(4, 195)]);
    watch.answered(4, 0, &sends(4, true, 0, 0), 196 * SECOND);
    assert_eq!(watch.verdict(), None);
}

#[test]
fn a_silent_peer_is_a_cause_until_it_answers() {
    let mut watch = StallWatch::new(LIMITS);
    let own = sends(4, false, 2, 0);
    assert_eq!(run(&mut watch, own, true, 0, 65), [(1, 60)]);
    assert_eq!(watch.verdict(), None);
    assert_eq!(run(&mut watch, own, true, 65, 69), []);
    let verdict = Verdict { cause: Cause::NoAnswer, lanes: 0b101, since: 60 * SECOND };
    assert_eq!((watch.verdict(), watch.agreed), (Some(&verdict), 1));
    assert_eq!(run(&mut watch, own, true, 69, 71), [], "the question is under way");
    assert_eq!((watch.verdict(), watch.agreed), (Some(&verdict), 2));
    watch.answered(1, 0, &receives(4, 4, 0), 71 * SECOND);
    assert_eq!(watch.verdict().map(|verdict| verdict.cause), Some(Cause::NotAcknowledged));
    assert_eq!(run(&mut watch, own, true, 71, 77), [(2, 76)], "asked again after a pause");
}

#[test]
fn a_stall_ends_the_connection_if_two_verdicts_agree() {
    let mut watch = StallWatch::new(LIMITS);
    let own = receives(5, 4, 0);
    assert_eq!(run(&mut watch, own, false, 0, 61), [(1, 60)]);
    watch.answered(1, 0, &sends(4, true, 0, 0), 61 * SECOND);
    assert_eq!(run(&mut watch, own, false, 61, 95), [(2, 66)], "no answer to the second question");
    assert!(!watch.must_abort(95 * SECOND) || watch.verdict().unwrap().cause == Cause::NoAnswer);
    watch.answered(2, 0, &sends(4, true, 0, 1), 95 * SECOND);
    assert!(!watch.must_abort(95 * SECOND), "the last two differ");
    assert_eq!(run(&mut watch, own, false, 95, 101), [(3, 100)]);
    watch.answered(3, 0, &sends(4, true, 0, 1), 101 * SECOND);
    assert!(watch.must_abort(101 * SECOND) && !watch.must_abort(89 * SECOND));
    // Without `abort`, a stall never ends the connection. If `abort` is shorter than `warn`, the
    // question already follows after `abort`.
    watch.limits.abort = None;
    assert!(!watch.must_abort(u64::MAX));
    let mut watch = StallWatch::new(StallLimits { warn: 60 * SECOND, abort: Some(10 * SECOND) });
    assert_eq!(run(&mut watch, own, false, 0, 11), [(1, 10)]);
}
