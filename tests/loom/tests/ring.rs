//! The ring of clear-to-sends (`flow/next.rs`, `wire/cts.rs`) under a NIC's writes. A thread takes
//! the NIC's place. It stores the words of an entry with relaxed ordering, so the reader may see
//! any mix of old and new words. The tests try several orders of the stores. The entry's digest
//! tells complete entries from torn ones.

use loom::model::Builder;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use proto::flow::next::{Head, Peek};
use proto::flow::sends::Sends;
use proto::wire::cts::{ENTRY_WORDS, Entry, Epoch, PackedKeys, Terms};
use proto::wire::ids::LaneId;
use proto::wire::{MAX_RAILS, SLOTS};
use std::sync::Arc;

type Ring = Arc<Vec<AtomicU64>>;

const TAG: i32 = 5;
const KEYS: PackedKeys = [0x11, 0x22, 0x33, 0x44];
/// Sequence number of the entry that the first slot has before the first receive is granted.
const LAP_BEFORE: u64 = 0u64.wrapping_sub(SLOTS as u64);

fn words(terms: &Terms, keys: &PackedKeys, sequence: u64) -> [u64; ENTRY_WORDS] {
    *Entry::new(terms, keys, sequence).words()
}

fn ring_of(words: &[u64]) -> Ring {
    Arc::new(words.iter().map(|word| AtomicU64::new(*word)).collect())
}

/// Allows three switches from a thread that could continue. Loom still tries every combination of
/// stored words that a load may return, which is the part that matters here.
fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(run);
}

/// Starts a thread that stores the changed words in this order, like a NIC.
fn nic(
    ring: &Ring,
    old: &[u64],
    new: &[u64],
    order: impl Iterator<Item = usize>,
) -> thread::JoinHandle<()> {
    let ring = Arc::clone(ring);
    let stores: Vec<_> = order
        .filter(|at| old[*at] != new[*at])
        .map(|at| (at, new[at]))
        .collect();
    thread::spawn(move || {
        for (at, word) in stores {
            ring[at].store(word, Ordering::Relaxed);
        }
    })
}

/// Creates the value in a system thread: it is large, and a model's threads have small stacks.
fn sends() -> Sends {
    std::thread::spawn(Sends::default).join().unwrap()
}

fn look(sends: &mut Sends, ring: &Ring, tag: i32) -> Option<Head> {
    match sends.peek(ring, tag) {
        Peek::Nothing => None,
        Peek::Found(head) => Some(head),
        Peek::Search => sends.search(ring, tag).expect("only granted entries"),
    }
}

fn is_as_granted(head: &Head, ring: &Ring, terms: &Terms) {
    assert_eq!(
        (head.addr, head.buffer_bytes, head.part),
        (terms.addr, terms.bytes, terms.part),
        "torn"
    );
    // The keys are read later, when a share is posted.
    let keys: Vec<u32> = LaneId::all(MAX_RAILS)
        .map(|lane| head.rkey(ring, lane))
        .collect();
    assert_eq!(keys, [0x11, 0, 0x22, 0, 0x33, 0, 0x44, 0], "torn keys");
}

/// Grants one receive. Each word of its entry differs from the same word of the old entry.
fn one_receive(order: [usize; ENTRY_WORDS]) {
    let old = words(
        &Terms {
            addr: 0x1000,
            bytes: 64,
            tag: TAG,
            parts: 1,
            part: 0,
            epoch: Epoch::default(),
        },
        &[1, 2, 3, 4],
        LAP_BEFORE,
    );
    let terms = Terms {
        addr: 0x2000,
        bytes: 128,
        tag: TAG,
        parts: 1,
        part: 0,
        epoch: Epoch::default(),
    };
    let new = words(&terms, &KEYS, 0);
    assert!((0..ENTRY_WORDS).all(|at| old[at] != new[at]));
    model(move || {
        let ring = ring_of(&old);
        let mut sends = sends();
        let nic = nic(&ring, &old, &new, order.into_iter());
        if let Some(head) = look(&mut sends, &ring, TAG) {
            is_as_granted(&head, &ring, &terms);
        }
        nic.join().unwrap();
        is_as_granted(
            &look(&mut sends, &ring, TAG).expect("it has come"),
            &ring,
            &terms,
        );
    });
}

#[test]
fn a_partly_written_entry_is_not_taken() {
    one_receive([0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn an_entry_is_not_taken_when_its_words_arrive_backwards() {
    one_receive([7, 6, 5, 4, 3, 2, 1, 0]);
}

#[test]
fn an_entry_is_not_taken_when_both_ends_arrive_first_or_last() {
    one_receive([7, 0, 3, 1, 6, 4, 2, 5]);
    one_receive([3, 1, 6, 4, 2, 5, 0, 7]);
}

#[test]
fn a_group_is_taken_once_all_its_entries_have_arrived() {
    let terms = |part| Terms {
        addr: 0x1000,
        bytes: 64,
        tag: TAG + i32::from(part),
        parts: 2,
        part,
        epoch: Epoch::default(),
    };
    let all = |sequence| {
        [
            words(&terms(0), &KEYS, sequence),
            words(&terms(1), &KEYS, sequence),
        ]
        .concat()
    };
    let old = all(LAP_BEFORE);
    let new = all(0);
    for backwards in [false, true] {
        let old = old.clone();
        let new = new.clone();
        model(move || {
            let ring = ring_of(&old);
            let mut sends = sends();
            let order = (0..old.len()).map(|at| if backwards { old.len() - 1 - at } else { at });
            let nic = nic(&ring, &old, &new, order);
            // If one part was found, the whole group has come, so the other part must be found too.
            for part in [0, 1] {
                if let Some(head) = look(&mut sends, &ring, TAG + i32::from(part)) {
                    is_as_granted(&head, &ring, &terms(part));
                    let other = look(&mut sends, &ring, TAG + 1 - i32::from(part))
                        .expect("the group has come");
                    is_as_granted(&other, &ring, &terms(1 - part));
                }
            }
            nic.join().unwrap();
            is_as_granted(
                &look(&mut sends, &ring, TAG).expect("it has come"),
                &ring,
                &terms(0),
            );
        });
    }
}

/// A rail was lost, and its grant may have arrived. The grant is repeated on another rail, and its
/// words are stored again while its send runs.
#[test]
fn a_repeated_grant_counts_once() {
    let terms = Terms {
        addr: 0x2000,
        bytes: 64,
        tag: TAG,
        parts: 1,
        part: 0,
        epoch: Epoch::default(),
    };
    let old = words(
        &Terms {
            addr: 0x1000,
            ..terms
        },
        &KEYS,
        LAP_BEFORE,
    );
    let new = words(&terms, &KEYS, 0);
    model(move || {
        let ring = ring_of(&old);
        let mut sends = sends();
        let first = nic(&ring, &old, &new, 0..ENTRY_WORDS);
        let second = nic(&ring, &old, &new, (0..ENTRY_WORDS).rev());
        if let Some(head) = look(&mut sends, &ring, TAG) {
            is_as_granted(&head, &ring, &terms);
        }
        first.join().unwrap();
        second.join().unwrap();
        is_as_granted(
            &look(&mut sends, &ring, TAG).expect("it has come"),
            &ring,
            &terms,
        );
    });
}
