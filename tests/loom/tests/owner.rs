//! The ownership word of a data path (`comm/owner.rs`): one user at a time, who sees what the one before him did; and what the
//! service thread goes by when it leaves a data path alone.

use loom::model;
use loom::thread;
use loom_models::comm::owner::Owner;
use std::sync::Arc;

/// A data path, in two places: whoever holds it sees both changed or none.
type Path = (u32, u32);

fn use_it(path: &Owner<Path>) -> bool {
    let Some(mut held) = path.enter() else { return false };
    held.0 += 1;
    assert_eq!(held.0, held.1 + 1, "another user is in the middle of it");
    held.1 += 1;
    true
}

#[test]
fn one_user_at_a_time_sees_what_the_last_one_did() {
    model(|| {
        let path = Arc::new(Owner::new((0, 0)));
        let user = || {
            let path = Arc::clone(&path);
            thread::spawn(move || u32::from(use_it(&path)) + u32::from(use_it(&path)))
        };
        let (first, second) = (user(), user());
        let used = first.join().unwrap() + second.join().unwrap();
        assert!(used >= 2, "somebody was refused by nobody");
        let held = path.enter().expect("nobody holds it");
        assert_eq!(*held, (used, used));
    });
}

/// NCCL's thread comes and goes; the service thread asks whether it did, and enters in either case, as it does when there are news.
#[test]
fn asking_whether_it_was_used_lets_nobody_in_beside_its_user() {
    model(|| {
        let path = Arc::new(Owner::new((0, 0)));
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
fn a_use_is_told_to_the_next_who_asks_and_told_once() {
    model(|| {
        let path = Arc::new(Owner::new((0, 0)));
        let nccl = {
            let path = Arc::clone(&path);
            thread::spawn(move || assert!(use_it(&path), "nobody else enters"))
        };
        let early = [path.is_unused(), path.is_unused()];
        nccl.join().unwrap();
        let late = [path.is_unused(), path.is_unused()];
        assert!(late[1], "nobody came between the two");
        assert!(!late[0] || early.contains(&false), "it was used, and nobody was told: {early:?}, {late:?}");
    });
}
