//! The ownership word of a data path (`comm/datapath/try_cell.rs`). It admits one user at a time,
//! who sees the previous user's changes. The word also tells the service thread that the path was
//! used.

use loom::model;
use loom::thread;
use loom_models::comm::datapath::try_cell::TryCell;
use std::sync::Arc;

/// Two numbers in place of a data path. A user changes both, so the next user finds them equal.
type Path = (u32, u32);

fn use_it(path: &TryCell<Path>) -> bool {
    let Some(mut held) = path.enter() else {
        return false;
    };
    held.0 += 1;
    assert_eq!(held.0, held.1 + 1, "another user is in the middle of it");
    held.1 += 1;
    held.leave();
    true
}

/// One visit of the service thread.
fn look_at_it(path: &TryCell<Path>) -> bool {
    let Some(held) = path.visit() else {
        return false;
    };
    assert_eq!(held.0, held.1, "a user is in the middle of it");
    held.leave();
    true
}

#[test]
fn users_are_exclusive_and_see_earlier_changes() {
    model(|| {
        let path = Arc::new(TryCell::new((0, 0)));
        let user = || {
            let path = Arc::clone(&path);
            thread::spawn(move || u32::from(use_it(&path)) + u32::from(use_it(&path)))
        };
        let first = user();
        let second = user();
        let used = first.join().unwrap() + second.join().unwrap();
        assert!(used >= 2, "a thread was refused while the path was free");
        let held = path.enter().expect("nobody holds it");
        assert_eq!(*held, (used, used));
    });
}

/// The service thread asks if the path was used, and enters in either case, as after a wake-up.
#[test]
fn a_query_for_use_does_not_admit_a_second_user() {
    model(|| {
        let path = Arc::new(TryCell::new((0, 0)));
        let nccl = {
            let path = Arc::clone(&path);
            thread::spawn(move || u32::from(use_it(&path)) + u32::from(use_it(&path)))
        };
        if !path.is_unused() {
            path.is_unused();
        }
        let borrowed = u32::from(use_it(&path));
        let used = nccl.join().unwrap() + borrowed;
        assert_eq!(*path.enter().expect("nobody holds it"), (used, used));
    });
}

#[test]
fn a_use_is_reported_to_the_next_query_and_only_once() {
    model(|| {
        let path = Arc::new(TryCell::new((0, 0)));
        let nccl = {
            let path = Arc::clone(&path);
            thread::spawn(move || assert!(use_it(&path), "no other thread enters"))
        };
        let early = [path.is_unused(), path.is_unused()];
        nccl.join().unwrap();
        let late = [path.is_unused(), path.is_unused()];
        assert!(late[1], "no other thread came between the two");
        assert!(
            !late[0] || early.contains(&false),
            "it was used, but no query reported that: {early:?}, {late:?}"
        );
    });
}

#[test]
fn peeking_does_not_count_as_a_use() {
    model(|| {
        let path = Arc::new(TryCell::new((0, 0)));
        let service = {
            let path = Arc::clone(&path);
            thread::spawn(move || {
                look_at_it(&path);
                path.is_unused()
            })
        };
        let used = use_it(&path);
        let is_unused = service.join().unwrap();
        assert!(
            used || is_unused || path.is_unused(),
            "it was not used, but counts as used"
        );
        assert_eq!(path.enter().expect("nobody holds it").0, u32::from(used));
    });
}

/// One thread panics while it has the path. After that, neither of two other threads may enter,
/// even if both try at the same time. The path must count as broken, not only as taken.
#[test]
fn a_data_path_that_panicked_stays_unusable() {
    model(|| {
        let path = Arc::new(TryCell::new((0, 0)));
        let user = || {
            let path = Arc::clone(&path);
            thread::spawn(move || u32::from(use_it(&path)))
        };
        let first = user();
        let second = user();
        let broke = path.enter().is_some_and(|mut held| {
            held.0 += 1;
            loom_std::thread::as_if_panicking(|| drop(held));
            true
        });
        let used = first.join().unwrap() + second.join().unwrap();
        assert!(
            broke || used > 0,
            "a thread was refused while the path was free"
        );
        assert_eq!(path.is_broken(), broke);
        assert_eq!(path.enter().is_none(), broke);
        assert_eq!(path.is_broken(), broke);
    });
}
