//! The mailbox, memory that the peer writes. The peer writes any words at any time, while this side
//! takes the peer's control frames and writes control frames of its own.

use crate::control::{padded, sign};
use crate::tape::Tape;
use crate::target::Seeds;
use nccl_net_spark::comm::datapath::lane::MailboxKeys;
use nccl_net_spark::comm::datapath::mailbox::Mailboxes;
use proto::wire::codec::Writer;
use proto::wire::control::{ControlFrame, FRAME_WORDS};
use proto::wire::mailbox::{INBOX_AT, MAILBOX_BYTES, OUTBOX_AT, PROBE_AT, PROBE_BYTES};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use verbs::Region;

const PROBE: usize = PROBE_AT / 8;
const INBOX: usize = INBOX_AT / 8;
const OUTBOX: usize = OUTBOX_AT / 8;
/// Highest possible address of the peer's mailbox. With this address, adding an offset beyond the
/// mailbox's end would overflow.
const PEER_ADDR: u64 = u64::MAX - MAILBOX_BYTES as u64;

thread_local! {
    static REGION: Arc<Region> = Region::new(MAILBOX_BYTES).expect("memory for a mailbox");
}

enum Inbox {
    Whole(ControlFrame),
    /// No frame, or words that need not be a valid frame.
    Other,
}

/// Runs the input as a tape of writes and reads.
pub fn check(data: &[u8]) -> bool {
    let region = REGION.with(Arc::clone);
    region
        .words()
        .iter()
        .for_each(|word| word.store(0, Relaxed));
    let mailbox = Mailboxes {
        region,
        peer_addr: PEER_ADDR,
    };
    let mut tape = Tape::short(data);
    let mut inbox = Inbox::Other;
    let mut taken = 0;
    while let Some(step) = tape.step() {
        match step % 5 {
            0 => {
                let frame = frame(&mut tape);
                write(&mailbox, &padded(&frame), u64::MAX);
                // A control frame with number 0 that confirms nothing counts as no frame.
                inbox = if frame.number == 0 && frame.received == 0 {
                    Inbox::Other
                } else {
                    Inbox::Whole(frame)
                };
            }
            1 => {
                let frame = frame(&mut tape);
                write(&mailbox, &padded(&frame), tape.u64());
                inbox = Inbox::Other;
            }
            2 => {
                let at = tape.below(FRAME_WORDS);
                let word = tape.u64();
                let signs = tape.u8() & 1 == 1;
                let mut words = inbox_words(&mailbox);
                words[at] = word;
                if signs {
                    sign(&mut words);
                }
                write(&mailbox, &words, u64::MAX);
                inbox = Inbox::Other;
            }
            3 => taken += u32::from(take(&mailbox, std::mem::replace(&mut inbox, Inbox::Other))),
            _ => put(
                &mailbox,
                &frame(&mut tape),
                MailboxKeys {
                    own_lkey: tape.u32(),
                    peer_rkey: tape.u32(),
                },
            ),
        }
    }
    let ring = &mailbox.region.words()[..PROBE];
    assert!(
        ring.iter().all(|word| word.load(Relaxed) == 0),
        "control frames never touch the ring"
    );
    taken > 0
}

fn frame(tape: &mut Tape<'_>) -> ControlFrame {
    let number = u64::from(tape.u8());
    let received = u64::from(tape.u8());
    let awaits_confirmation = tape.u8() & 1 == 1;
    let count = usize::from(tape.u16() % 2100);
    ControlFrame {
        number,
        received,
        awaits_confirmation,
        message: tape.bytes(count).to_vec(),
    }
}

fn inbox_words(mailbox: &Mailboxes) -> [u64; FRAME_WORDS] {
    std::array::from_fn(|at| mailbox.region.words()[INBOX + at].load(Relaxed))
}

/// Returns the words behind the ring. [`check`] examines the ring's words once, after all steps.
fn all(mailbox: &Mailboxes) -> Vec<u64> {
    mailbox.region.words()[PROBE..]
        .iter()
        .map(|word| word.load(Relaxed))
        .collect()
}

/// Writes words into the inbox as a NIC may do when it writes only some of them: word N is written
/// only if bit N % 64 of the mask is set.
fn write(mailbox: &Mailboxes, words: &[u64; FRAME_WORDS], mask: u64) {
    for (at, word) in words
        .iter()
        .enumerate()
        .filter(|(at, _)| mask >> (at % 64) & 1 == 1)
    {
        mailbox.region.words()[INBOX + at].store(*word, Relaxed);
    }
}

/// Takes a control frame, and checks that only the inbox's first two words change, to 0. Returns
/// true if there was a frame.
fn take(mailbox: &Mailboxes, inbox: Inbox) -> bool {
    let before = all(mailbox);
    let expected = ControlFrame::from_words(&inbox_words(mailbox));
    let found = mailbox.take_frame();
    assert_eq!(found, expected, "the taken frame differs from the inbox");
    if let Inbox::Whole(mut frame) = inbox {
        frame.message.truncate((FRAME_WORDS - 4) * 8);
        assert_eq!(found.as_ref(), Some(&frame), "a whole frame was not taken");
    }
    let mut after = before;
    if found.is_some() {
        (after[INBOX - PROBE], after[INBOX + 1 - PROBE]) = (0, 0);
    }
    assert_eq!(all(mailbox), after);
    assert_eq!(mailbox.take_frame(), None, "a frame taken twice");
    found.is_some()
}

/// Puts a control frame into the outbox, and checks that nothing else changes. Also checks that the
/// RDMA writes of a frame and of a test packet stay within both mailboxes.
fn put(mailbox: &Mailboxes, frame: &ControlFrame, keys: MailboxKeys) {
    let mut after = all(mailbox);
    let words = frame.to_words();
    after[OUTBOX - PROBE..][..words.len()].copy_from_slice(&words);
    let bytes = mailbox.put_frame(frame);
    assert_eq!((all(mailbox), bytes as usize), (after, words.len() * 8));
    let near = mailbox.region.addr();
    let end = MAILBOX_BYTES as u64;
    for (write, most) in [
        (mailbox.frame_write(keys, bytes), FRAME_WORDS * 8),
        (mailbox.probe_write(keys, u32::MAX), PROBE_BYTES),
    ] {
        let from = write.local_addr - near;
        let to = write.remote.addr - mailbox.peer_addr;
        assert!(
            write.bytes as usize <= most
                && from + u64::from(write.bytes) <= end
                && to + u64::from(write.bytes) <= end
        );
        assert_eq!(
            (write.lkey, write.remote.rkey),
            (keys.own_lkey, keys.peer_rkey)
        );
    }
}

/// Complete control frames mixed with this side's own, a torn frame that is then repaired, and an
/// invented frame.
pub fn seeds() -> Seeds {
    let frame = |w: &mut Writer, step: u8, number: u8, message: &[u8]| {
        w.u8(step)
            .u8(number)
            .u8(2)
            .u8(1)
            .u16(message.len() as u16)
            .bytes(message);
    };
    let mut whole = Writer::default();
    frame(&mut whole, 0, 3, &[5, 2]);
    whole.u8(3).u8(3);
    frame(&mut whole, 4, 7, &[6, 0, 0, 0, 0, 0, 0, 0, 1]);
    whole.u8(5);
    frame(&mut whole, 0, 4, &[4; 40]);
    whole.u8(3);
    let mut torn = Writer::default();
    frame(&mut torn, 0, 3, &[5, 2]);
    frame(&mut torn, 1, 4, &[5, 3]);
    torn.u64(0b1001).u8(3);
    frame(&mut torn, 0, 4, &[5, 3]);
    torn.u8(3);
    let mut made_up = Writer::default();
    made_up
        .u8(2)
        .u8(2)
        .u64(2016 | 1 << 32)
        .u8(0)
        .u8(2)
        .u8(1)
        .u64(u64::MAX)
        .u8(1)
        .u8(3);
    vec![
        ("whole", whole.into_bytes()),
        ("torn", torn.into_bytes()),
        ("made-up", made_up.into_bytes()),
    ]
}
