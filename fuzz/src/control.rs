//! Control messages, and the control frames that carry them in a mailbox: whole, torn, and
//! invented.
//!
//! Input: a byte that selects the check, then a control message's bytes, a mailbox's words, or the
//! fields of two frames whose words are mixed.

use crate::fields::{check_queue_pairs, check_rail};
use crate::memory;
use crate::tape::{Tape, lane};
use crate::target::Seeds;
use proto::wire::codec::Writer;
use proto::wire::control::{
    ControlFrame, ControlMessage, FRAME_WORDS, JoinAnswer, MAX_CONTROL_BYTES, OpenReceive,
    Progress, Received, StallReport,
};
use proto::wire::cts::Epoch;
use proto::wire::fields::{Address, Attachment, LaneEnd, QpEnd, RailAdvert};
use proto::wire::ids::LaneId;
use proto::wire::{MAX_RAILS, PARTS, SLOTS};

/// Dispatches by the first byte.
pub fn check(data: &[u8]) -> bool {
    let mut tape = Tape::new(data);
    match tape.step() {
        Some(0) => check_message(tape.rest()),
        Some(1) => check_mailbox(&mut tape, true),
        Some(2) => check_mailbox(&mut tape, false),
        Some(3) => check_mix(&mut tape),
        _ => false,
    }
}

fn check_message(bytes: &[u8]) -> bool {
    let Ok(message) = memory::bounded(bytes.len(), || ControlMessage::decode(bytes)) else {
        return false;
    };
    let encoded = message.encode();
    assert!(
        encoded.len() <= bytes.len().min(MAX_CONTROL_BYTES),
        "{} bytes of {}",
        encoded.len(),
        bytes.len()
    );
    assert_eq!(ControlMessage::decode(&encoded).as_ref(), Ok(&message));
    // The decoder must return the lane that is in the bytes.
    let assert_lane = |lane: LaneId| assert_eq!(lane.index(), usize::from(bytes[1]));
    match &message {
        ControlMessage::Fenced { lane, received } => {
            assert_lane(*lane);
            assert!(received.open.len() <= SLOTS);
            check_received(received);
        }
        ControlMessage::Join {
            lane, rail, end, ..
        } => {
            assert_lane(*lane);
            check_rail(rail);
            check_queue_pairs(&end.qps);
        }
        ControlMessage::Joined { lane, answer, .. } => {
            assert_lane(*lane);
            assert!((256..=4096).contains(&answer.mtu_bytes) && answer.mtu_bytes.is_power_of_two());
            check_queue_pairs(&answer.end.qps);
        }
        ControlMessage::NotNow { lane, .. } | ControlMessage::Live { lane } => assert_lane(*lane),
        ControlMessage::AreYouThere
        | ControlMessage::Bye { .. }
        | ControlMessage::StallQuery(_)
        | ControlMessage::StallReply(_)
        | ControlMessage::Failed { .. } => {}
    }
    true
}

/// Checks `Received::has` for every part and share. For a receive that is not open, `has` must
/// return true exactly if the receive was granted.
fn check_received(received: &Received) {
    for sequence in
        received
            .open
            .iter()
            .map(|open| open.sequence)
            .chain([0, received.granted, u64::MAX])
    {
        let open = received.open.iter().find(|open| open.sequence == sequence);
        for part in 0..PARTS as u8 {
            for share in 0..MAX_RAILS as u8 {
                let expected = match open {
                    Some(open) => open.shares[usize::from(part)] & (1 << share) != 0,
                    None => sequence < received.granted,
                };
                assert_eq!(received.has(sequence, part, share), expected);
            }
        }
        // Numbers out of range must not be used as an index.
        received.has(sequence, u8::MAX, u8::MAX);
    }
}

/// Reads arbitrary words as a mailbox's content. If `signed` is true, makes the words' digest valid
/// first.
fn check_mailbox(tape: &mut Tape<'_>, signed: bool) -> bool {
    let mut words = [0; FRAME_WORDS];
    words.iter_mut().for_each(|word| *word = tape.u64());
    if signed {
        sign(&mut words);
    }
    let Some(frame) = memory::bounded(FRAME_WORDS * 8, || ControlFrame::from_words(&words)) else {
        let number = words[0];
        let received = words[1];
        let sizes = words[2];
        let possible = (number, received) != (0, 0)
            && sizes & 0xffff_ffff <= MAX_CONTROL_BYTES as u64
            && sizes >> 33 == 0;
        assert!(!signed || !possible, "a whole frame is refused");
        return false;
    };
    assert!(frame.message.len() <= MAX_CONTROL_BYTES);
    assert_eq!((frame.number, frame.received), (words[0], words[1]));
    let bytes: Vec<u8> = words[4..]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    assert_eq!(frame.message, bytes[..frame.message.len()]);
    assert_eq!(
        ControlFrame::from_words(&padded(&frame)),
        Some(frame.clone())
    );
    // A valid frame may carry arbitrary bytes as its message.
    check_message(&frame.message);
    true
}

/// Mixes the words of two control frames. The result must be refused, unless it equals one of them.
fn check_mix(tape: &mut Tape<'_>) -> bool {
    let mut frame = || ControlFrame {
        number: u64::from(tape.u8()),
        received: u64::from(tape.u8()),
        awaits_confirmation: tape.u8() & 1 == 1,
        message: {
            let count = usize::from(tape.u8());
            tape.bytes(count).to_vec()
        },
    };
    let one = frame();
    let other = frame();
    let below = padded(&one);
    let above = padded(&other);
    let mask = tape.u64();
    let mixed = std::array::from_fn(|at| {
        if mask >> (at % 64) & 1 == 1 {
            above[at]
        } else {
            below[at]
        }
    });
    let Some(found) = ControlFrame::from_words(&mixed) else {
        return false;
    };
    assert!(
        found == one || found == other,
        "{found:?} out of {one:?} and {other:?}"
    );
    true
}

/// Returns the control frame's words, followed by zeros up to [`FRAME_WORDS`].
pub fn padded(frame: &ControlFrame) -> [u64; FRAME_WORDS] {
    let words = frame.to_words();
    assert!(words.len() <= FRAME_WORDS);
    std::array::from_fn(|at| words.get(at).copied().unwrap_or(0))
}

/// Makes the words' digest valid, as any peer can: the digest detects torn frames, not forged ones.
/// The code is independent of the plugin's, so that a change of the digest makes the check fail.
pub fn sign(words: &mut [u64; FRAME_WORDS]) {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let bytes = (words[2] & 0xffff_ffff).min(MAX_CONTROL_BYTES as u64) as usize;
    words[3] = 0;
    let mut state = MULTIPLIER;
    for word in &words[..4 + bytes.div_ceil(8)] {
        state = (state.rotate_left(29) ^ *word).wrapping_mul(MULTIPLIER);
    }
    words[3] = state ^ (state >> 32);
}

fn stall_report(progress: Progress, rail_changes: Option<u32>) -> StallReport {
    StallReport {
        number: 1,
        idle_ms: 61_000,
        progress,
        rail_changes,
        operation: None,
    }
}

/// One control message of each kind.
pub fn messages() -> Vec<(&'static str, ControlMessage)> {
    let qps = vec![
        QpEnd {
            number: 17,
            psn: 0xff_ffff,
        },
        QpEnd { number: 18, psn: 0 },
    ];
    let end = LaneEnd {
        qps,
        mailbox_rkey: 5,
    };
    let gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 100, 1];
    let open = (0..3)
        .map(|at| OpenReceive {
            sequence: 40 + at,
            shares: [at as u8, 1, 0, 0, 0, 0, 0, 0xff],
        })
        .collect();
    let sends = Progress::Sender {
        begun: 9,
        is_granted: true,
        running: 2,
        lanes: 0b101,
        untested: 1,
    };
    let receives = Progress::Receiver {
        granted: 9,
        delivered: 7,
        open: 2,
        arrived: 3,
        untested: 1,
    };
    let rail = RailAdvert {
        name: "rocep1s0f0:1".into(),
        phys_port: "p0".into(),
        attachment: Attachment {
            link: 1,
            link_mbps: 112_000,
            cable: 0,
            port_mbps: 200_000,
        },
        speed_mbps: 112_000,
        mtu_bytes: 4096,
        addresses: vec![
            Address {
                gid,
                prefix: Some(120),
            },
            Address {
                gid: [0xfe; 16],
                prefix: None,
            },
        ],
        is_usable: true,
    };
    vec![
        (
            "fenced",
            ControlMessage::Fenced {
                lane: lane(3),
                received: Received { granted: 43, open },
            },
        ),
        (
            "join",
            ControlMessage::Join {
                lane: lane(7),
                attempt: 1,
                rail,
                end: end.clone(),
            },
        ),
        (
            "joined",
            ControlMessage::Joined {
                lane: lane(0),
                attempt: 1,
                answer: JoinAnswer {
                    connector_gid: gid,
                    acceptor_gid: [7; 16],
                    mtu_bytes: 1024,
                    end,
                    epoch: Epoch::default(),
                },
            },
        ),
        (
            "not-now",
            ControlMessage::NotNow {
                lane: lane(1),
                attempt: 2,
                why: "its port is down".into(),
            },
        ),
        ("live", ControlMessage::Live { lane: lane(2) }),
        ("are-you-there", ControlMessage::AreYouThere),
        (
            "failed",
            ControlMessage::Failed {
                why: "its device did not stop".into(),
            },
        ),
        ("bye", ControlMessage::Bye { delivered: 1 << 40 }),
        (
            "stall-query",
            ControlMessage::StallQuery(stall_report(receives, None)),
        ),
        (
            "stall-reply-of-sender",
            ControlMessage::StallReply(stall_report(sends, Some(2))),
        ),
        (
            "stall-reply-of-receiver",
            ControlMessage::StallReply(stall_report(receives, Some(0))),
        ),
    ]
}

/// Each control message, control frames that are checked with and without a call of [`sign`], and a
/// mix of two frames.
pub fn seeds() -> Seeds {
    let mut seeds: Seeds = messages()
        .into_iter()
        .map(|(name, message)| (name, [&[0][..], &message.encode()].concat()))
        .collect();
    let frame = ControlFrame {
        number: 4,
        received: 9,
        awaits_confirmation: true,
        message: messages()[0].1.encode(),
    };
    let echo = ControlFrame {
        number: 4,
        received: 10,
        awaits_confirmation: false,
        message: Vec::new(),
    };
    let words = |frame: &ControlFrame| -> Vec<u8> {
        frame
            .to_words()
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect()
    };
    seeds.push(("frame", [&[1][..], &words(&frame)].concat()));
    seeds.push(("frame-as-it-lies", [&[2][..], &words(&frame)].concat()));
    seeds.push(("echo", [&[2][..], &words(&echo)].concat()));
    let mut mix = Writer::default();
    mix.u8(3)
        .u8(4)
        .u8(9)
        .u8(1)
        .u8(2)
        .bytes(&[5, 2])
        .u8(5)
        .u8(9)
        .u8(1)
        .u8(2)
        .bytes(&[5, 3])
        .u64(0);
    seeds.push(("mix", mix.into_bytes()));
    seeds
}
