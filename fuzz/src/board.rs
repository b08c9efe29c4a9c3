//! The mailbox on the board: the peer writes any words at any time, this side takes letters and puts down its own.

use crate::Seeds;
use crate::control::{padded, sign};
use crate::tape::Tape;
use nccl_net_spark::comm::datapath::mailbox::{Mailboxes, PeerMailbox};
use nccl_net_spark::verbs::Region;
use nccl_net_spark::wire::MAX_RAILS;
use nccl_net_spark::wire::board::{BOARD_BYTES, INBOX_AT, OUTBOX_AT, PROBE_AT, PROBE_BYTES};
use nccl_net_spark::wire::codec::Writer;
use nccl_net_spark::wire::control::{LETTER_WORDS, Letter};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

const PROBE: usize = PROBE_AT / 8;
const INBOX: usize = INBOX_AT / 8;
const OUTBOX: usize = OUTBOX_AT / 8;
/// The far board, as far up as one can be: what is added to its address must stay below the end of memory.
const FAR_ADDR: u64 = u64::MAX - BOARD_BYTES as u64;

thread_local! {
    static REGION: Arc<Region> = Region::new(BOARD_BYTES).expect("memory for a board");
}

/// What lies in the inbox by the model.
enum Inbox {
    /// One letter and nothing else.
    Whole(Letter),
    /// Nothing, or what nobody can tell.
    Other,
}

/// A tape of writes and looks.
pub fn check(data: &[u8]) -> bool {
    let region = REGION.with(Arc::clone);
    region.words().iter().for_each(|word| word.store(0, Relaxed));
    let far = PeerMailbox { addr: FAR_ADDR, rkeys: std::array::from_fn(|lane| 100 + lane as u32) };
    let board = Mailboxes { region, lkeys: std::array::from_fn(|lane| lane as u32), far };
    let mut tape = Tape::short(data);
    let (mut inbox, mut taken) = (Inbox::Other, 0);
    while let Some(step) = tape.step() {
        match step % 5 {
            0 => {
                let letter = letter(&mut tape);
                write(&board, &padded(&letter), u64::MAX);
                // A letter of nobody's, before the first and without an answer, is none.
                inbox = if letter.number == 0 && letter.heard == 0 { Inbox::Other } else { Inbox::Whole(letter) };
            }
            1 => {
                let letter = letter(&mut tape);
                write(&board, &padded(&letter), tape.u64());
                inbox = Inbox::Other;
            }
            2 => {
                let (at, word, signs) = (tape.below(LETTER_WORDS), tape.u64(), tape.u8() & 1 == 1);
                let mut words = mailbox(&board);
                words[at] = word;
                if signs {
                    sign(&mut words);
                }
                write(&board, &words, u64::MAX);
                inbox = Inbox::Other;
            }
            3 => taken += u32::from(take(&board, std::mem::replace(&mut inbox, Inbox::Other))),
            _ => put(&board, &letter(&mut tape), usize::from(tape.u8())),
        }
    }
    let ring = &board.region.words()[..PROBE];
    assert!(ring.iter().all(|word| word.load(Relaxed) == 0), "the ring is the clear-to-sends'");
    taken > 0
}

fn letter(tape: &mut Tape<'_>) -> Letter {
    let (number, heard, asks) = (u64::from(tape.u8()), u64::from(tape.u8()), tape.u8() & 1 == 1);
    let count = usize::from(tape.u16() % 2100);
    Letter { number, heard, asks, notice: tape.bytes(count).to_vec() }
}

fn mailbox(board: &Mailboxes) -> [u64; LETTER_WORDS] {
    std::array::from_fn(|at| board.region.words()[INBOX + at].load(Relaxed))
}

/// What is behind the ring: nothing here comes near that, and the whole board is compared at the end.
fn all(board: &Mailboxes) -> Vec<u64> {
    board.region.words()[PROBE..].iter().map(|word| word.load(Relaxed)).collect()
}

/// As a NIC does it: those words that the mask names, by 64.
fn write(board: &Mailboxes, words: &[u64; LETTER_WORDS], mask: u64) {
    for (at, word) in words.iter().enumerate().filter(|(at, _)| mask >> (at % 64) & 1 == 1) {
        board.region.words()[INBOX + at].store(*word, Relaxed);
    }
}

/// Takes a letter as it lies, once, and touches nothing else; whether there was one.
fn take(board: &Mailboxes, inbox: Inbox) -> bool {
    let before = all(board);
    let expected = Letter::from_words(&mailbox(board));
    let found = board.take_letter();
    assert_eq!(found, expected, "what is taken is not what lies there");
    if let Inbox::Whole(mut letter) = inbox {
        letter.notice.truncate((LETTER_WORDS - 4) * 8);
        assert_eq!(found.as_ref(), Some(&letter), "a whole letter was not taken");
    }
    let mut after = before;
    if found.is_some() {
        (after[INBOX - PROBE], after[INBOX + 1 - PROBE]) = (0, 0);
    }
    assert_eq!(all(board), after);
    assert_eq!(board.take_letter(), None, "a letter taken twice");
    found.is_some()
}

/// Puts a letter down in its place alone, and sends it within both boards.
fn put(board: &Mailboxes, letter: &Letter, lane: usize) {
    let mut after = all(board);
    let words = letter.to_words();
    after[OUTBOX - PROBE..][..words.len()].copy_from_slice(&words);
    let bytes = board.put_letter(letter);
    assert_eq!((all(board), bytes as usize), (after, words.len() * 8));
    let (near, end) = (board.region.addr(), BOARD_BYTES as u64);
    for (write, most) in
        [(board.letter_write(lane, bytes), LETTER_WORDS * 8), (board.probe_write(lane, u32::MAX), PROBE_BYTES)]
    {
        let (from, to) = (write.local_addr - near, write.remote.addr - board.far.addr);
        assert!(
            write.bytes as usize <= most && from + u64::from(write.bytes) <= end && to + u64::from(write.bytes) <= end
        );
        assert_eq!((write.lkey, write.remote.rkey), ((lane % MAX_RAILS) as u32, 100 + (lane % MAX_RAILS) as u32));
    }
}

/// Letters whole, torn and healed, made up; and this side's own between.
pub fn seeds() -> Seeds {
    let letter = |w: &mut Writer, step: u8, number: u8, notice: &[u8]| {
        w.u8(step).u8(number).u8(2).u8(1).u16(notice.len() as u16).bytes(notice);
    };
    let mut whole = Writer::default();
    letter(&mut whole, 0, 3, &[5, 2]);
    whole.u8(3).u8(3);
    letter(&mut whole, 4, 7, &[6, 0, 0, 0, 0, 0, 0, 0, 1]);
    whole.u8(5);
    letter(&mut whole, 0, 4, &[4; 40]);
    whole.u8(3);
    let mut torn = Writer::default();
    letter(&mut torn, 0, 3, &[5, 2]);
    letter(&mut torn, 1, 4, &[5, 3]);
    torn.u64(0b1001).u8(3);
    letter(&mut torn, 0, 4, &[5, 3]);
    torn.u8(3);
    let mut made_up = Writer::default();
    made_up.u8(2).u8(2).u64(2016 | 1 << 32).u8(0).u8(2).u8(1).u64(u64::MAX).u8(1).u8(3);
    vec![("whole", whole.into_bytes()), ("torn", torn.into_bytes()), ("made-up", made_up.into_bytes())]
}
