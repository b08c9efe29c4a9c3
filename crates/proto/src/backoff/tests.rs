use super::*;

const PATH: PathId = PathId {
    rail: RailId::new(0).unwrap(),
    peer_gid: [7; 16],
};
const OTHER: PathId = PathId {
    peer_gid: [8; 16],
    ..PATH
};
const LIMIT: Duration = Duration::from_secs(4);
const UNRESOLVED: Connected<&str> = Connected::Unresolved("timed out");
const LOST: &str = "test write lost";

struct Bed {
    backoff: KnownPaths<&'static str>,
    now: Instant,
}

impl Bed {
    fn new() -> Self {
        Self {
            backoff: KnownPaths::default(),
            now: Instant::default(),
        }
    }

    fn ask(&mut self, need: Requirement) -> Advice<&'static str> {
        self.backoff.ask(PATH, need, 4096, LIMIT, self.now)
    }

    #[track_caller]
    fn trial(&mut self, need: Requirement) -> u64 {
        match self.ask(need) {
            Advice::Try(trial) => trial,
            other => panic!("{other:?}"),
        }
    }

    fn waits(&mut self, need: Requirement) -> bool {
        self.ask(need) == Advice::Wait
    }

    fn uses(&mut self, need: Requirement) -> bool {
        self.ask(need) == Advice::Use
    }

    fn pass(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
    }
}

fn dead(why: &'static str, ms: u64) -> Refusal<&'static str> {
    Refusal::Dead {
        why,
        left: Duration::from_millis(ms),
    }
}

#[test]
fn one_connection_tries_a_path_and_the_others_wait_for_its_result() {
    let mut bed = Bed::new();
    let trial = bed.trial(Requirement::Acknowledgement);
    assert!(bed.waits(Requirement::Address) && bed.waits(Requirement::Acknowledgement));
    // The address resolves, which is enough for the connecting side.
    bed.backoff.tried(PATH, trial, Connected::Resolved, bed.now);
    assert!(bed.uses(Requirement::Address) && bed.waits(Requirement::Acknowledgement));
    bed.backoff.carried(PATH, bed.now);
    bed.backoff.end_trial(trial);
    assert!(bed.uses(Requirement::Acknowledgement));
    // Findings do not apply to other paths.
    let advice = bed
        .backoff
        .ask(OTHER, Requirement::Address, 4096, LIMIT, bed.now);
    assert!(matches!(advice, Advice::Try(_)));
}

#[test]
fn an_ended_or_slow_trial_blocks_no_other_connection() {
    let mut bed = Bed::new();
    let ended = bed.trial(Requirement::Address);
    bed.backoff.end_trial(ended);
    let slow = bed.trial(Requirement::Address);
    assert!(bed.waits(Requirement::Address));
    bed.pass(4000);
    let next = bed.trial(Requirement::Address);
    // The end of an overdue trial does not end the next one, and its result no longer counts.
    bed.backoff.tried(PATH, slow, UNRESOLVED, bed.now);
    bed.backoff.end_trial(slow);
    assert!(bed.waits(Requirement::Address));
    bed.backoff.end_trial(next);
    bed.trial(Requirement::Address);
}

#[test]
fn a_dead_path_is_skipped_immediately_and_later_tried_by_one_connection() {
    let mut bed = Bed::new();
    let trial = bed.trial(Requirement::Address);
    bed.backoff.tried(PATH, trial, UNRESOLVED, bed.now);
    bed.backoff.end_trial(trial);
    let left_out = |ms| Advice::LeaveOut(dead("timed out", ms));
    assert_eq!(bed.ask(Requirement::Address), left_out(2000));
    // A failed attempt that ran at the same time does not lengthen the pause.
    bed.backoff.silent(PATH, LOST, bed.now);
    bed.pass(1999);
    assert_eq!(bed.ask(Requirement::Address), left_out(1));
    bed.pass(1);
    let trial = bed.trial(Requirement::Address);
    assert!(bed.waits(Requirement::Address));
    bed.backoff.tried(PATH, trial, UNRESOLVED, bed.now);
    bed.backoff.end_trial(trial);
    assert_eq!(bed.ask(Requirement::Address), left_out(4000));
    bed.pass(4000);
    let trial = bed.trial(Requirement::Address);
    bed.backoff.tried(PATH, trial, Connected::Resolved, bed.now);
    assert!(bed.uses(Requirement::Address));
}

#[test]
fn a_path_that_loses_large_packets_is_used_with_small_ones_until_its_port_comes_up_again() {
    let mut bed = Bed::new();
    bed.backoff.silent(PATH, LOST, bed.now);
    bed.backoff.set_largest_mtu(PATH, 1024, bed.now);
    let mut ask = |mtu_bytes| {
        bed.backoff
            .ask(PATH, Requirement::Address, mtu_bytes, LIMIT, bed.now)
    };
    assert_eq!(ask(2048), Advice::LeaveOut(Refusal::LosesAbove(1024)));
    assert_eq!(ask(1024), Advice::Use);
    // The largest path MTU does not expire.
    bed.pass(600_000);
    bed.backoff.carried(OTHER, bed.now);
    assert_eq!(bed.backoff.largest_mtu(PATH), Some(1024));
    assert_eq!(bed.backoff.largest_mtu(OTHER), None);
    bed.backoff.forget(PATH.rail);
    assert_eq!(bed.backoff.largest_mtu(PATH), None);
}

#[test]
fn a_resolved_address_does_not_make_a_silent_path_usable() {
    let mut bed = Bed::new();
    bed.backoff.silent(PATH, LOST, bed.now);
    bed.backoff.connected(PATH, Connected::Resolved, bed.now);
    assert_eq!(
        bed.ask(Requirement::Address),
        Advice::LeaveOut(dead(LOST, 2000))
    );
    bed.pass(2000);
    let trial = bed.trial(Requirement::Acknowledgement);
    bed.backoff.end_trial(trial);
    bed.backoff.carried(PATH, bed.now);
    assert!(bed.uses(Requirement::Acknowledgement));
    // A successful attempt proves nothing after a while.
    bed.pass(10_000);
    bed.trial(Requirement::Address);
}

#[test]
fn lost_rails_are_all_asked_for_together_until_their_path_is_known_dead() {
    let mut bed = Bed::new();
    let retry = |bed: &mut Bed| bed.backoff.retry(PATH, LIMIT, bed.now);
    for _ in 0..3 {
        assert_eq!(retry(&mut bed), Ok(None));
    }
    bed.backoff.silent(PATH, LOST, bed.now);
    assert_eq!(retry(&mut bed), Err(dead(LOST, 2000)));
    bed.pass(2000);
    let trial = retry(&mut bed).unwrap().unwrap();
    assert_eq!(retry(&mut bed), Err(Refusal::OnTrial));
    assert_eq!(bed.backoff.is_due(PATH, bed.now), Err(Refusal::OnTrial));
    assert!(bed.waits(Requirement::Acknowledgement));
    bed.backoff.carried(PATH, bed.now);
    bed.backoff.end_trial(trial);
    assert_eq!(retry(&mut bed), Ok(None));
}

#[test]
fn a_dead_path_rests_for_15_s_at_most_and_is_forgotten_a_minute_after() {
    let mut bed = Bed::new();
    for _ in 0..9 {
        bed.backoff.connected(PATH, UNRESOLVED, bed.now);
        bed.pass(15_000);
    }
    let is_known_dead = |bed: &Bed| {
        bed.backoff
            .known(PATH)
            .is_some_and(|path| path.death().is_some())
    };
    assert!(bed.backoff.is_due(PATH, bed.now).is_ok() && is_known_dead(&bed));
    for (ms, is_kept) in [(59_999, true), (1, false)] {
        bed.pass(ms);
        bed.backoff.carried(OTHER, bed.now);
        assert_eq!(is_known_dead(&bed), is_kept);
    }
}

#[test]
fn a_failure_that_is_not_the_paths_leaves_it_usable() {
    let mut bed = Bed::new();
    bed.backoff.connected(PATH, Connected::Failed, bed.now);
    assert_eq!(bed.backoff.is_due(PATH, bed.now), Ok(()));
    bed.trial(Requirement::Address);
}

#[test]
fn a_peer_with_many_addresses_does_not_fill_the_memory() {
    let mut bed = Bed::new();
    for address in 0..=u16::MAX {
        let mut id = PATH;
        id.peer_gid[..2].copy_from_slice(&address.to_be_bytes());
        bed.backoff.silent(id, LOST, bed.now);
    }
    assert_eq!(bed.backoff.paths.len(), MOST_PATHS);
}
