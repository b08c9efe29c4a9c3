//! Control messages between the two ends of a running connection: lost rails, returning rails,
//! stalls, and the close.
//!
//! A [`ControlFrame`] has at most one numbered [`ControlMessage`], which the peer confirms. So a
//! message may be sent on several paths in parallel: over the TCP connection of the bootstrap (the
//! handshake), and on every rail as an RDMA write to the peer's [mailbox](super::mailbox). On each
//! path a message may arrive repeatedly, late or never. In a mailbox, a digest shows that a frame
//! has arrived completely, so the NIC may store the frame's words in any order.

use super::codec::{Malformed, Reader, Writer};
use super::cts::Epoch;
use super::fields::{LaneEnd, RailAdvert};
use super::fields::{mtu_bytes, read_gid};
use super::ids::LaneId;
use super::operation::Operation;
use super::{PARTS, SLOTS};

/// Size of a control frame in memory, in 64-bit words.
pub const FRAME_WORDS: usize = 256;
/// Largest size of an encoded control message, in bytes.
pub const MAX_CONTROL_BYTES: usize = (FRAME_WORDS - FRAME_HEADER) * 8;
const FRAME_HEADER: usize = 4;
const REASON_BYTES: usize = 512;

/// One control message.
#[derive(Debug, Clone, PartialEq, Hash)]
pub enum ControlMessage {
    /// A rail is lost. This side's queue pairs on it are stopped, and deliver no more data.
    Fenced {
        /// The rail's lane.
        lane: LaneId,
        /// From the receiving side: the shares of messages that have arrived. The sending side's
        /// list is empty.
        received: Received,
    },
    /// The connecting side offers new queue pairs for a lost rail.
    Join {
        /// The rail's lane.
        lane: LaneId,
        /// Number of this JOIN. Each lane has its own count, which wraps around after 255.
        attempt: u8,
        /// Current properties of the connecting side's rail.
        rail: RailAdvert,
        /// The connecting side's new queue pairs.
        end: LaneEnd,
    },
    /// The accepting side has connected its new queue pairs to the queue pairs of the JOIN.
    Joined {
        /// The rail's lane.
        lane: LaneId,
        /// Number of the answered JOIN. If the connecting side has given up that JOIN, it ignores
        /// the answer.
        attempt: u8,
        /// The new queue pairs, and what the connecting side must know to use them.
        answer: JoinAnswer,
    },
    /// From either side: the attempt to reconnect the rail has failed.
    NotNow {
        /// The rail's lane.
        lane: LaneId,
        /// Number of the JOIN that this message refers to.
        attempt: u8,
        /// The reason, for the peer's log.
        why: String,
    },
    /// The connecting side has tested the new queue pairs, and they work.
    Live {
        /// The rail's lane.
        lane: LaneId,
    },
    /// Asks only for a confirmation. Sent when the bootstrap's TCP connection is lost, to find out
    /// if the peer is still alive.
    AreYouThere,
    /// This side closes the connection.
    Bye {
        /// From the receiving side: the number of receives before the first one that waits for
        /// bytes. The sending side states 0.
        delivered: u64,
    },
    /// Asks for the peer's progress, because requests of this side make none.
    StallQuery(StallReport),
    /// Answers a STALL QUERY.
    StallReply(StallReport),
    /// The connection has failed on this side.
    Failed {
        /// The reason, for the peer's error.
        why: String,
    },
}

/// State of one side of a connection, for the cause of a stall. A question has the state of the
/// side that asks, so that both sides find the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StallReport {
    /// Number of the question, counted by the side that asks.
    pub number: u32,
    /// Milliseconds since a sample of this side's progress last differed from the sample before.
    pub idle_ms: u64,
    /// Progress of this side.
    pub progress: Progress,
    /// Number of times that this side has lost a rail or got it back. `None` if `progress` may not
    /// include everything that has arrived: a rail is being stopped or reconnected, a message about
    /// a rail is not acknowledged, or completions are not processed.
    pub rail_changes: Option<u32>,
    /// NCCL's operation on this side, if NCCL has announced one.
    pub operation: Option<Operation>,
}

impl StallReport {
    /// Encoding of `None` in [`StallReport::rail_changes`].
    const UNKNOWN: u32 = u32::MAX;

    fn write(&self, w: &mut Writer) {
        w.u32(self.number)
            .u64(self.idle_ms)
            .u32(self.rail_changes.unwrap_or(Self::UNKNOWN));
        Operation::write(self.operation, w);
        self.progress.write(w);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let number = r.u32()?;
        let idle_ms = r.u64()?;
        let rail_changes = r.u32()?;
        let rail_changes = (rail_changes != Self::UNKNOWN).then_some(rail_changes);
        Ok(Self {
            number,
            idle_ms,
            rail_changes,
            operation: Operation::read(r)?,
            progress: Progress::read(r)?,
        })
    }
}

/// The accepting side's answer to a JOIN.
#[derive(Debug, Clone, PartialEq, Hash)]
pub struct JoinAnswer {
    /// Address of the connecting side.
    pub connector_gid: [u8; 16],
    /// Address of the accepting side.
    pub acceptor_gid: [u8; 16],
    /// Path MTU, in bytes.
    pub mtu_bytes: u32,
    /// The accepting side's queue pairs.
    pub end: LaneEnd,
    /// First epoch whose CTS entries have valid keys for the rail.
    pub epoch: Epoch,
}

impl JoinAnswer {
    fn write(&self, w: &mut Writer) {
        w.bytes(&self.connector_gid)
            .bytes(&self.acceptor_gid)
            .u32(self.mtu_bytes);
        self.end.write(w);
        w.u8(self.epoch.number());
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            connector_gid: read_gid(r)?,
            acceptor_gid: read_gid(r)?,
            mtu_bytes: mtu_bytes(r)?,
            end: LaneEnd::read(r)?,
            epoch: epoch(r)?,
        })
    }
}

/// Progress of one side of a connection. Two equal samples mean no progress between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Progress {
    /// Progress of the side that sends.
    Sender {
        /// Number of receives for which the sends of all parts have begun.
        begun: u64,
        /// True if the CTS entry of the next receive has arrived.
        is_granted: bool,
        /// Number of sends with unacknowledged shares.
        running: u16,
        /// Set of the lanes of the unacknowledged shares, by [`LaneId::bit`].
        lanes: u8,
        /// Number of finished sends that the caller has not tested.
        untested: u16,
    },
    /// Progress of the side that receives.
    Receiver {
        /// Number of receives granted so far.
        granted: u64,
        /// Number of receives before the first one that waits for bytes.
        delivered: u64,
        /// Number of granted receives that wait for bytes.
        open: u16,
        /// Number of shares that have arrived for the receives that `open` counts.
        arrived: u16,
        /// Number of receives with all their bytes that the caller has not tested.
        untested: u16,
    },
}

impl Progress {
    fn write(&self, w: &mut Writer) {
        match *self {
            Self::Sender {
                begun,
                is_granted,
                running,
                lanes,
                untested,
            } => w
                .u8(1)
                .u64(begun)
                .u8(u8::from(is_granted))
                .u16(running)
                .u8(lanes)
                .u16(untested),
            Self::Receiver {
                granted,
                delivered,
                open,
                arrived,
                untested,
            } => w
                .u8(2)
                .u64(granted)
                .u64(delivered)
                .u16(open)
                .u16(arrived)
                .u16(untested),
        };
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        match r.u8()? {
            1 => Ok(Self::Sender {
                begun: r.u64()?,
                is_granted: match r.u8()? {
                    0 => false,
                    1 => true,
                    value => {
                        return Err(Malformed::Value {
                            what: "grant flag",
                            value: u64::from(value),
                        });
                    }
                },
                running: r.u16()?,
                lanes: r.u8()?,
                untested: r.u16()?,
            }),
            2 => Ok(Self::Receiver {
                granted: r.u64()?,
                delivered: r.u64()?,
                open: r.u16()?,
                arrived: r.u16()?,
                untested: r.u16()?,
            }),
            side => Err(Malformed::Value {
                what: "kind of progress",
                value: u64::from(side),
            }),
        }
    }
}

/// The receiving side's list of the shares that have arrived. A share is the part of a message that
/// is sent on one lane.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Received {
    /// Number of receives granted so far.
    pub granted: u64,
    /// Granted receives that still wait for data, at most [`SLOTS`].
    pub open: Vec<OpenReceive>,
}

/// A receive that waits for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OpenReceive {
    /// Number of the receive on the connection.
    pub sequence: u64,
    /// For each part of the receive, the set of the arrived shares: bit `n` stands for share number
    /// `n`.
    pub shares: [u8; PARTS],
}

impl Received {
    /// Returns true if a correct receiver can have sent this list, perhaps some time ago. `begun`
    /// is the number of receives whose sends have begun on this side. A correct receiver has
    /// granted at most `begun` plus [`SLOTS`] receives. Each open receive is one of its last
    /// [`SLOTS`] grants, and is listed once.
    pub fn is_possible(&self, begun: u64) -> bool {
        let last = |sequence| sequence < self.granted && self.granted - sequence <= SLOTS as u64;
        let twice = |at: usize| {
            self.open[..at]
                .iter()
                .any(|before| before.sequence == self.open[at].sequence)
        };
        self.granted <= begun.saturating_add(SLOTS as u64)
            && self.open.iter().all(|open| last(open.sequence))
            && !(0..self.open.len()).any(twice)
    }

    /// Returns true if a share has arrived. A granted receive not in `open` has all its shares.
    pub fn has(&self, sequence: u64, part: u8, share: u8) -> bool {
        match self.open.iter().find(|open| open.sequence == sequence) {
            Some(open) => open.shares[usize::from(part) % PARTS] >> (share & 7) & 1 == 1,
            None => sequence < self.granted,
        }
    }
}

impl ControlMessage {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        match self {
            Self::Fenced { lane, received } => {
                w.u8(1)
                    .u8(lane.byte())
                    .u64(received.granted)
                    .list(&received.open, |w, open| {
                        w.u64(open.sequence).bytes(&open.shares);
                    });
            }
            Self::Join {
                lane,
                attempt,
                rail,
                end,
            } => {
                rail.write(w.u8(2).u8(lane.byte()).u8(*attempt));
                end.write(&mut w);
            }
            Self::Joined {
                lane,
                attempt,
                answer,
            } => answer.write(w.u8(3).u8(lane.byte()).u8(*attempt)),
            Self::NotNow { lane, attempt, why } => {
                w.u8(4).u8(lane.byte()).u8(*attempt).text(why, REASON_BYTES);
            }
            Self::Live { lane } => {
                w.u8(5).u8(lane.byte());
            }
            Self::Bye { delivered } => {
                w.u8(6).u64(*delivered);
            }
            Self::AreYouThere => {
                w.u8(7);
            }
            Self::StallQuery(report) => report.write(w.u8(8)),
            Self::StallReply(report) => report.write(w.u8(9)),
            Self::Failed { why } => {
                w.u8(10).text(why, REASON_BYTES);
            }
        }
        w.into_bytes()
    }

    /// Decodes a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let r = &mut reader;
        let message = match r.u8()? {
            1 => Self::Fenced {
                lane: lane(r)?,
                received: Received {
                    granted: r.u64()?,
                    open: r.list("open receives", SLOTS, |r| {
                        Ok(OpenReceive {
                            sequence: r.u64()?,
                            shares: r.array()?,
                        })
                    })?,
                },
            },
            2 => Self::Join {
                lane: lane(r)?,
                attempt: r.u8()?,
                rail: RailAdvert::read(r)?,
                end: LaneEnd::read(r)?,
            },
            3 => Self::Joined {
                lane: lane(r)?,
                attempt: r.u8()?,
                answer: JoinAnswer::read(r)?,
            },
            4 => Self::NotNow {
                lane: lane(r)?,
                attempt: r.u8()?,
                why: r.text("reason", REASON_BYTES)?,
            },
            5 => Self::Live { lane: lane(r)? },
            6 => Self::Bye {
                delivered: r.u64()?,
            },
            7 => Self::AreYouThere,
            8 => Self::StallQuery(StallReport::read(r)?),
            9 => Self::StallReply(StallReport::read(r)?),
            10 => Self::Failed {
                why: r.text("reason", REASON_BYTES)?,
            },
            kind => {
                return Err(Malformed::Value {
                    what: "kind of control message",
                    value: u64::from(kind),
                });
            }
        };
        reader.end()?;
        Ok(message)
    }
}

fn lane(r: &mut Reader<'_>) -> Result<LaneId, Malformed> {
    let number = r.u8()?;
    LaneId::new(usize::from(number)).ok_or(Malformed::Value {
        what: "lane number",
        value: u64::from(number),
    })
}

fn epoch(r: &mut Reader<'_>) -> Result<Epoch, Malformed> {
    let number = r.u8()?;
    Epoch::new(number).ok_or(Malformed::Value {
        what: "epoch",
        value: u64::from(number),
    })
}

/// A control frame: a control message or none, and the confirmation of the peer's last message.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct ControlFrame {
    /// Number of the writer's last control message, from 1; 0 before the first.
    pub number: u64,
    /// Number of the last control message that the writer has received.
    pub received: u64,
    /// True if the writer waits for the confirmation of its control message.
    pub awaits_confirmation: bool,
    /// The encoded control message, at most [`MAX_CONTROL_BYTES`]. Empty if `awaits_confirmation`
    /// is false.
    pub message: Vec<u8>,
}

impl ControlFrame {
    /// Encodes the frame as the words of a mailbox's inbox or outbox.
    pub fn to_words(&self) -> Vec<u64> {
        let body = &self.message[..self.message.len().min(MAX_CONTROL_BYTES)];
        let sizes = body.len() as u64 | u64::from(self.awaits_confirmation) << 32;
        let mut words = vec![self.number, self.received, sizes, 0];
        words.extend(body.chunks(8).map(|chunk| {
            let mut bytes = [0; 8];
            bytes[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(bytes)
        }));
        words[3] = digest(&words);
        words
    }

    /// Decodes the frame in an inbox. Returns `None` if the words are not one complete frame, or if
    /// the inbox is empty.
    pub fn from_words(words: &[u64; FRAME_WORDS]) -> Option<Self> {
        let [number, received, sizes, stated, ..] = *words;
        let bytes = (sizes & 0xffff_ffff) as usize;
        if number == 0 && received == 0 || bytes > MAX_CONTROL_BYTES || sizes >> 33 != 0 {
            return None;
        }
        let mut used = words[..FRAME_HEADER + bytes.div_ceil(8)].to_vec();
        used[3] = 0;
        if digest(&used) != stated {
            return None;
        }
        let mut message: Vec<u8> = used[FRAME_HEADER..]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        message.truncate(bytes);
        Some(Self {
            number,
            received,
            awaits_confirmation: sizes >> 32 == 1,
            message,
        })
    }

    pub(super) fn write(&self, w: &mut Writer) {
        w.u64(self.number)
            .u64(self.received)
            .u8(u8::from(self.awaits_confirmation))
            .u16(self.message.len() as u16)
            .bytes(&self.message);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let number = r.u64()?;
        let received = r.u64()?;
        let awaits_confirmation = r.u8()?;
        if awaits_confirmation > 1 {
            return Err(Malformed::Value {
                what: "confirmation flag",
                value: u64::from(awaits_confirmation),
            });
        }
        let count = usize::from(r.u16()?);
        if count > MAX_CONTROL_BYTES {
            return Err(Malformed::Above {
                what: "message",
                count,
                most: MAX_CONTROL_BYTES,
            });
        }
        Ok(Self {
            number,
            received,
            awaits_confirmation: awaits_confirmation == 1,
            message: r.bytes(count)?.to_vec(),
        })
    }
}

/// Digest that detects a mix of the words of several frames. It does not protect against an
/// adversary.
fn digest(words: &[u64]) -> u64 {
    // The odd constant of Fibonacci hashing, 2^64 / golden ratio.
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let state = words.iter().fold(MULTIPLIER, |state, word| {
        (state.rotate_left(29) ^ word).wrapping_mul(MULTIPLIER)
    });
    state ^ state >> 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::fields::{Address, Attachment, MAX_QPS, QpEnd};
    use crate::wire::ids::lane;
    use proptest::prelude::*;

    /// Returns a message of each kind, most of them of the largest size.
    fn samples() -> Vec<ControlMessage> {
        let mut samples = about_rails().to_vec();
        samples.extend([
            ControlMessage::Bye { delivered: 12 },
            ControlMessage::AreYouThere,
            ControlMessage::Failed {
                why: "w".repeat(REASON_BYTES),
            },
        ]);
        samples.extend(about_stalls());
        samples
    }

    fn about_rails() -> [ControlMessage; 5] {
        let open = OpenReceive {
            sequence: u64::MAX,
            shares: [255; PARTS],
        };
        [
            ControlMessage::Fenced {
                lane: lane(7),
                received: Received {
                    granted: 99,
                    open: vec![open; SLOTS],
                },
            },
            ControlMessage::Join {
                lane: lane(0),
                attempt: 255,
                rail: largest_advert(),
                end: largest_end(),
            },
            ControlMessage::Joined {
                lane: lane(3),
                attempt: 0,
                answer: JoinAnswer {
                    connector_gid: [1; 16],
                    acceptor_gid: [2; 16],
                    mtu_bytes: 1024,
                    end: largest_end(),
                    epoch: Epoch::new(127).unwrap(),
                },
            },
            ControlMessage::NotNow {
                lane: lane(1),
                attempt: 7,
                why: "port is Down".repeat(100),
            },
            ControlMessage::Live { lane: lane(2) },
        ]
    }

    fn largest_advert() -> RailAdvert {
        RailAdvert {
            name: "n".repeat(64),
            phys_port: "p".repeat(64),
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
                    gid: [0xfe; 16],
                    prefix: Some(120)
                };
                16
            ],
            is_usable: true,
        }
    }

    fn largest_end() -> LaneEnd {
        LaneEnd {
            qps: vec![
                QpEnd {
                    number: 17,
                    psn: 0xff_ffff
                };
                MAX_QPS
            ],
            mailbox_rkey: u32::MAX,
        }
    }

    fn about_stalls() -> [ControlMessage; 2] {
        [
            ControlMessage::StallQuery(StallReport {
                number: u32::MAX,
                idle_ms: u64::MAX,
                progress: Progress::Sender {
                    begun: u64::MAX,
                    is_granted: true,
                    running: 256,
                    lanes: 0xff,
                    untested: 256,
                },
                rail_changes: None,
                operation: None,
            }),
            ControlMessage::StallReply(StallReport {
                number: 2,
                idle_ms: 0,
                progress: Progress::Receiver {
                    granted: 99,
                    delivered: 67,
                    open: 32,
                    arrived: 2048,
                    untested: 31,
                },
                rail_changes: Some(u32::MAX - 1),
                operation: None,
            }),
        ]
    }

    fn padded(words: &[u64]) -> [u64; FRAME_WORDS] {
        std::array::from_fn(|at| words.get(at).copied().unwrap_or(0x55))
    }

    #[test]
    fn the_largest_messages_fit_and_come_back() {
        for message in samples() {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_CONTROL_BYTES, "{}", bytes.len());
            let back = ControlMessage::decode(&bytes).unwrap();
            assert_eq!(back.encode(), bytes);
            (0..bytes.len())
                .for_each(|cut| assert!(ControlMessage::decode(&bytes[..cut]).is_err()));
            let frame = ControlFrame {
                number: 3,
                received: 2,
                awaits_confirmation: true,
                message: bytes,
            };
            assert_eq!(
                ControlFrame::from_words(&padded(&frame.to_words())),
                Some(frame)
            );
        }
        assert_eq!(
            ControlFrame::from_words(&[0; FRAME_WORDS]),
            None,
            "an empty mailbox"
        );
        let acknowledgement = ControlFrame {
            number: 0,
            received: 5,
            awaits_confirmation: false,
            message: Vec::new(),
        };
        assert_eq!(
            ControlFrame::from_words(&padded(&acknowledgement.to_words())),
            Some(acknowledgement)
        );
    }

    #[test]
    fn a_closed_receive_counts_as_delivered_if_it_was_granted() {
        let open = OpenReceive {
            sequence: 6,
            shares: [0b101, 0, 0, 0, 0, 0, 0, 1],
        };
        let received = Received {
            granted: 8,
            open: vec![open],
        };
        let has = |sequence, part, share| received.has(sequence, part, share);
        assert!(has(7, 0, 0) && has(6, 0, 0) && has(6, 0, 2) && has(6, 7, 0) && has(0, 3, 3));
        assert!(!has(8, 0, 0) && !has(6, 0, 1) && !has(6, 1, 0));
    }

    #[test]
    fn impossible_receive_counts_are_recognised() {
        let open = |sequence| OpenReceive {
            sequence,
            shares: [0; PARTS],
        };
        let of = |granted, open: Vec<OpenReceive>| Received { granted, open };
        assert!(of(0, vec![]).is_possible(0) && of(32, (0..32).map(open).collect()).is_possible(0));
        assert!(
            of(40, vec![open(8), open(39)]).is_possible(100),
            "an old word"
        );
        assert!(
            !of(33, vec![]).is_possible(0) && !of(u64::MAX, vec![]).is_possible(7),
            "more than there are slots"
        );
        assert!(of(u64::MAX, vec![]).is_possible(u64::MAX));
        assert!(!of(40, vec![open(40)]).is_possible(40), "not granted");
        assert!(!of(40, vec![open(7)]).is_possible(40), "slot used since");
        assert!(!of(40, vec![open(9), open(9)]).is_possible(40), "twice");
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes: Vec<u8>, words in prop::collection::vec(any::<u64>(), FRAME_WORDS)) {
            if let Ok(message) = ControlMessage::decode(&bytes) {
                prop_assert_eq!(ControlMessage::decode(&message.encode()), Ok(message));
            }
            let _ = ControlFrame::from_words(&words.try_into().unwrap());
        }

        #[test]
        fn a_mix_of_two_frames_is_not_read(which in 0..samples().len(), other in 0..samples().len(), mask: u64) {
            let frame = |number, which: usize| {
                ControlFrame { number, received: 1, awaits_confirmation: true, message: samples()[which].encode() }
            };
            let (old, new) = (padded(&frame(4, which).to_words()), padded(&frame(5, other).to_words()));
            let mixed: [u64; FRAME_WORDS] = std::array::from_fn(|at| if mask >> (at % 64) & 1 == 1 { old[at] } else { new[at] });
            let found = ControlFrame::from_words(&mixed);
            prop_assert!(found.is_none() || found == Some(frame(4, which)) || found == Some(frame(5, other)));
        }
    }
}
