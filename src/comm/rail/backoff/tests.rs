use super::*;
use crate::clock;
use host::error::Call;

const PATH: PathId = PathId {
    rail: RailId::new(0).unwrap(),
    peer_gid: [7; 16],
};
const LIMIT: Duration = Duration::from_secs(4);

fn failed(errno: i32) -> Error {
    Error::Os {
        call: Call::ModifyQp {
            device: "mlx5_0".to_owned(),
            qp: 5,
            state: "RTR",
        },
        errno,
    }
}

fn unanswered() -> Error {
    failed(libc::ETIMEDOUT)
}

struct Bed {
    backoff: Backoff,
    now: Instant,
}

impl Bed {
    fn new() -> Self {
        Self {
            backoff: Backoff::default(),
            now: clock::now(),
        }
    }

    fn is_dead(&self) -> bool {
        lock(&self.backoff.0).dead(PATH).is_some()
    }

    fn ask(&self, need: Requirement) -> Advice {
        self.backoff.ask(PATH, need, 4096, LIMIT, self.now)
    }

    fn trial(&self, need: Requirement) -> Trial {
        match self.ask(need) {
            Advice::Try(trial) => trial,
            other => panic!("{other:?}"),
        }
    }

    fn waits(&self, need: Requirement) -> bool {
        matches!(self.ask(need), Advice::Wait)
    }

    fn uses(&self, need: Requirement) -> bool {
        matches!(self.ask(need), Advice::Use)
    }

    fn why(&self) -> String {
        match self.ask(Requirement::Address) {
            Advice::LeaveOut(why) => why,
            other => panic!("{other:?}"),
        }
    }

    fn pass(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
    }
}

#[test]
fn one_connection_tries_a_path_and_the_others_wait_for_its_result() {
    let stage = Bed::new();
    let trial = stage.trial(Requirement::Acknowledgement);
    assert!(stage.waits(Requirement::Address) && stage.waits(Requirement::Acknowledgement));
    // The address resolves, which is enough for the connecting side.
    trial.connected(None, stage.now);
    assert!(stage.uses(Requirement::Address) && stage.waits(Requirement::Acknowledgement));
    stage.backoff.carried(PATH, stage.now);
    drop(trial);
    assert!(stage.uses(Requirement::Acknowledgement));
    // Findings do not apply to other paths.
    let other = PathId {
        peer_gid: [8; 16],
        ..PATH
    };
    assert!(matches!(
        stage
            .backoff
            .ask(other, Requirement::Address, 4096, LIMIT, stage.now),
        Advice::Try(_)
    ));
}

#[test]
fn a_dropped_or_slow_trial_blocks_no_other_connection() {
    let mut stage = Bed::new();
    drop(stage.trial(Requirement::Address));
    let kept = stage.trial(Requirement::Address);
    assert!(stage.waits(Requirement::Address));
    stage.pass(4000);
    let next = stage.trial(Requirement::Address);
    // The end of an overdue trial does not end the next one.
    drop(kept);
    assert!(stage.waits(Requirement::Address));
    drop(next);
    drop(stage.trial(Requirement::Address));
}

#[test]
fn a_dead_path_is_skipped_immediately_and_later_tried_by_one_connection() {
    let mut stage = Bed::new();
    let trial = stage.trial(Requirement::Address);
    trial.connected(Some(&unanswered()), stage.now);
    drop(trial);
    assert_eq!(
        stage.why(),
        "cannot move QP 5 of mlx5_0 to RTR: Connection timed out (os error 110); next attempt in 2s"
    );
    // A failed attempt that ran at the same time does not lengthen the pause.
    stage.backoff.silent(PATH, "test write lost", stage.now);
    stage.pass(1999);
    assert!(stage.why().contains("timed out"));
    stage.pass(1);
    let trial = stage.trial(Requirement::Address);
    assert!(stage.waits(Requirement::Address));
    trial.connected(Some(&unanswered()), stage.now);
    drop(trial);
    assert!(
        stage.why().ends_with("next attempt in 4s"),
        "{}",
        stage.why()
    );
    stage.pass(4000);
    let trial = stage.trial(Requirement::Address);
    trial.connected(None, stage.now);
    assert!(stage.uses(Requirement::Address));
}

#[test]
fn a_path_that_loses_large_packets_is_used_with_small_ones_until_its_port_comes_up_again() {
    let mut stage = Bed::new();
    stage.backoff.silent(PATH, "test write lost", stage.now);
    stage.backoff.set_largest_mtu(PATH, 1024, stage.now);
    let ask = |stage: &Bed, mtu_bytes| {
        stage
            .backoff
            .ask(PATH, Requirement::Address, mtu_bytes, LIMIT, stage.now)
    };
    let Advice::LeaveOut(why) = ask(&stage, 2048) else {
        panic!("large packets are tried again")
    };
    assert_eq!(why, "packets above 1024 bytes are lost on this path");
    assert!(matches!(ask(&stage, 1024), Advice::Use));
    // The largest path MTU does not expire.
    stage.pass(600_000);
    assert_eq!(stage.backoff.largest_mtu(PATH), Some(1024));
    assert_eq!(
        stage.backoff.largest_mtu(PathId {
            peer_gid: [9; 16],
            ..PATH
        }),
        None
    );
}

#[test]
fn a_resolved_address_does_not_make_a_silent_path_usable() {
    let mut stage = Bed::new();
    stage.backoff.silent(PATH, "test write lost", stage.now);
    stage.backoff.connected(PATH, None, stage.now);
    assert_eq!(stage.why(), "test write lost; next attempt in 2s");
    stage.pass(2000);
    drop(stage.trial(Requirement::Acknowledgement));
    stage.backoff.carried(PATH, stage.now);
    assert!(stage.uses(Requirement::Acknowledgement));
    // A successful attempt proves nothing after a while.
    stage.pass(10_000);
    drop(stage.trial(Requirement::Address));
}

#[test]
fn lost_rails_are_all_asked_for_together_until_their_path_is_known_dead() {
    let mut stage = Bed::new();
    let retry = |stage: &Bed| stage.backoff.retry(PATH, LIMIT, stage.now);
    for _ in 0..3 {
        assert!(retry(&stage).unwrap().is_none());
    }
    stage.backoff.silent(PATH, "test write lost", stage.now);
    assert_eq!(
        retry(&stage).unwrap_err().to_string(),
        "test write lost; next attempt in 2s"
    );
    stage.pass(2000);
    let trial = retry(&stage).unwrap();
    assert!(trial.is_some());
    assert_eq!(
        retry(&stage).unwrap_err().to_string(),
        "another connection tests this path"
    );
    assert!(
        stage.backoff.is_due(PATH, stage.now).is_err() && stage.waits(Requirement::Acknowledgement)
    );
    stage.backoff.carried(PATH, stage.now);
    drop(trial);
    assert!(retry(&stage).unwrap().is_none());
}

#[test]
fn a_dead_path_rests_for_15_s_at_most_and_is_forgotten_a_minute_after() {
    let mut stage = Bed::new();
    for _ in 0..9 {
        stage
            .backoff
            .connected(PATH, Some(&unanswered()), stage.now);
        stage.pass(15_000);
    }
    assert!(stage.backoff.is_due(PATH, stage.now).is_ok() && stage.is_dead());
    let other = PathId {
        peer_gid: [8; 16],
        ..PATH
    };
    let knows_after = |stage: &mut Bed, ms: u64| {
        stage.pass(ms);
        stage.backoff.carried(other, stage.now);
        stage.is_dead()
    };
    assert!(knows_after(&mut stage, 59_999));
    assert!(!knows_after(&mut stage, 1));
}

#[test]
fn a_failure_that_is_not_the_paths_leaves_it_usable() {
    let stage = Bed::new();
    let refused = failed(libc::EINVAL);
    stage.backoff.connected(PATH, Some(&refused), stage.now);
    assert!(stage.backoff.is_due(PATH, stage.now).is_ok() && !stage.is_dead());
}
