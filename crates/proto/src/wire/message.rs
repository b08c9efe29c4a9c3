//! The messages of the bootstrap: the TCP connection over which two ends set up a connection, and
//! later send the connection's control messages.
//!
//! Handshake:
//!
//! 1. The connecting side sends [`Hello`] with its rails.
//! 2. The accepting side pairs these rails with its own, and sends an [`Offer`] or a refusal.
//! 3. The connecting side connects its queue pairs and sends [`Ready`].
//! 4. The accepting side connects its queue pairs, tests every pair of rails, and sends [`Go`],
//!    which names the pairs that work: all, some or none. The running connection tries the others
//!    again.
//!
//! Afterwards each side sends a [`ControlFrame`] for each control message. If the TCP connection is
//! lost, the connecting side opens another one and sends [`Redial`]; the answer is `RESUMED`.
//!
//! A message is one frame: a header of 8 bytes, then a body of at most [`MAX_BODY_BYTES`].
//!
//! If no rails can be paired, the accepting side may answer the hello with [`Streams`] instead. The
//! data then uses a stated number of TCP connections, the streams. The first stream is the
//! bootstrap's TCP connection. The connecting side opens the others, and sends [`Stream`] first on
//! each. When all are connected, the accepting side sends `CARRIES` on the first stream.
//! [`super::stream`] defines the frames that follow.

use super::codec::{Malformed, Reader, Writer};
use super::control::ControlFrame;
use super::fields::{
    Attachment, MAX_QPS, NAME_BYTES, Priority, QpEnd, RailAdvert, chunk_bytes, mtu_bytes, ranged,
    read_gid, read_qp_count, read_qps, write_qp,
};
use super::handle::TOKEN_BYTES;
use super::ids::RailId;
use super::mailbox::MAILBOX_BYTES;
use super::stream::MAX_STREAMS;
use super::{MAX_OFFERED_RAILS, MAX_RAILS, PROTOCOL_VERSION};
use std::num::NonZeroU16;

/// Largest body of a frame, in bytes. The largest hello, with all rails and addresses, takes 14
/// KiB.
pub const MAX_BODY_BYTES: usize = 32 * 1024;
/// Size in bytes of the header: magic number, kind, version and body length.
pub const HEADER_BYTES: usize = 8;

const MAGIC: u16 = 0x5350;
const TEXT_BYTES: usize = 2048;

/// One message. It is sent on the bootstrap's TCP connection, on a TCP connection that replaces the
/// bootstrap's, or as the first message of another stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// First message of the connecting side.
    Hello(Hello),
    /// The accepting side's answer.
    Offer(Offer),
    /// From either side: ends the handshake. The text is the reason, for the log of the other side.
    Refuse(String),
    /// The connecting side's queue pairs are connected.
    Ready(Ready),
    /// The accepting side has connected and tested its queue pairs. The message says which pairs
    /// work.
    Go(Go),
    /// From either side: a control frame of the running connection.
    Control(ControlFrame),
    /// First message of the connecting side on a TCP connection that replaces a lost one.
    Redial(Redial),
    /// The accepting side's answer: control frames use this TCP connection from now on.
    Resumed,
    /// The accepting side's answer to a hello if no rail reaches the peer.
    Streams(Streams),
    /// First message of the connecting side on each stream except the first.
    Stream(Stream),
    /// From the accepting side: all streams are connected, and data may follow.
    Carries,
}

/// The connecting side's first message: its name, settings and rails.
#[derive(Debug, Clone, PartialEq)]
pub struct Hello {
    /// The handle's token.
    pub token: [u8; TOKEN_BYTES],
    /// Host name and process id, for log lines.
    pub name: String,
    /// Largest write that this side can make, in bytes.
    pub chunk_bytes: u32,
    /// Number of queue pairs wanted on each rail. If 0, the accepting side chooses the number,
    /// based on the rails.
    pub qps_per_rail: u8,
    /// Hash of the rules by which this side's tuner decides; 0 if the tuner leaves every choice to
    /// NCCL. Two sides whose tuners decide differently would hang in a collective.
    pub tuner_hash: u64,
    /// Name of this side's GPU, for the log line if the tuners differ.
    pub gpu: String,
    /// Priority of this side's packets. The accepting side's queue pairs use the same priority, as
    /// in NCCL (net_ib, `ncclIbAccept`).
    pub priority: Priority,
    /// This side's permission for data over TCP.
    pub by_tcp: ByTcp,
    /// The rails, in this side's order.
    pub rails: Vec<RailAdvert>,
}

/// A side's permission to send data over TCP to a peer that no rail reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ByTcp {
    /// `NCCL_SPARK_RING_TCP` is off.
    Off,
    /// `NCCL_SPARK_RING_TCP` is on.
    Allowed,
    /// `NCCL_SPARK_RING_TCP` is on, but there is no permission: a rail whose addresses are unknown
    /// might reach the peer. The text names such rails.
    Withheld(String),
}

/// Parameters for a connection over TCP streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Streams {
    /// Host name and process id, for log lines.
    pub name: String,
    /// Number of streams, including the hello's TCP connection: 1 to [`MAX_STREAMS`].
    pub count: u8,
    /// Token that the connecting side sends in the first message on each other stream.
    pub token: [u8; TOKEN_BYTES],
}

/// First message on each stream except the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The token of [`Streams`].
    pub token: [u8; TOKEN_BYTES],
    /// Number of the stream, from 1. The hello's TCP connection is stream 0.
    pub number: u8,
}

/// The pairs that the accepting side proposes.
#[derive(Debug, Clone, PartialEq)]
pub struct Offer {
    /// Host name and process id, for log lines.
    pub name: String,
    /// Size of a full chunk on this connection: the smaller of the two sides' sizes.
    pub chunk_bytes: u32,
    /// The pairs. Their order defines the connection's lane numbers.
    pub pairs: Vec<PairOffer>,
}

/// One rail of each side, with the accepting side's queue pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct PairOffer {
    /// Index into the hello's rails.
    pub connector_rail: u8,
    /// The chosen address of the connecting side's rail.
    pub connector_gid: [u8; 16],
    /// Number of the accepting side's rail on its host.
    pub acceptor_rail: RailId,
    /// PCIe link and cable of the accepting side's rail.
    pub acceptor: Attachment,
    /// Name of the accepting side's rail, for log lines.
    pub acceptor_name: String,
    /// Address of the accepting side's rail.
    pub acceptor_gid: [u8; 16],
    /// Path MTU of the pair, in bytes.
    pub mtu_bytes: u32,
    /// The accepting side's queue pairs.
    pub queue_pairs: Offered,
}

/// The connecting side's queue pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct Ready {
    /// Address of the connecting side's mailbox.
    pub mailbox_addr: u64,
    /// One answer for each pair of the offer, in the same order.
    pub pairs: Vec<PairReady>,
}

/// The answer to one pair of an offer.
#[derive(Debug, Clone, PartialEq)]
pub enum PairReady {
    /// The connecting side has connected its queue pairs.
    Connected {
        /// Key of the connecting side's mailbox on this rail.
        mailbox_rkey: u32,
        /// The connecting side's queue pairs, in the order of the offer's queue pairs.
        qps: Vec<QpEnd>,
    },
    /// The connecting side has not connected its queue pairs.
    NotYet(NotYet),
}

/// Reason why a pair of rails does not work yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotYet {
    /// Text for log lines.
    pub why: String,
    /// True if a later attempt may succeed, for example after a port was down, an address was not
    /// resolved or packets were lost. False if a later attempt would fail too, for example because
    /// the kernel has refused the request (`EINVAL`), or because the pair needs a route and the
    /// connecting side has none back to the peer.
    pub is_temporary: bool,
}

impl NotYet {
    /// Returns a reason after which a later attempt may succeed.
    pub fn temporary(why: String) -> Self {
        Self {
            why,
            is_temporary: true,
        }
    }
}

/// State of an offered pair.
#[derive(Debug, Clone, PartialEq)]
pub enum Offered {
    /// To be connected now, to these queue pairs of the accepting side.
    Now(Vec<QpEnd>),
    /// To be connected later, with this number of queue pairs. Now one of the rails cannot be used,
    /// the path between them is known to be dead, or the accepting side could not create queue
    /// pairs.
    Later(u8),
    /// To be connected as `Later`, if one of the rails gets its first link or address
    /// ([`Pair::is_late`](crate::flow::pairing::Pair::is_late)).
    Late(u8),
}

impl Offered {
    /// Returns the number of queue pairs that the pair has or will have.
    pub fn count(&self) -> u8 {
        match self {
            // At most `MAX_QPS` (16): `read_qps` checks the count.
            Self::Now(qps) => qps.len() as u8,
            Self::Later(count) | Self::Late(count) => *count,
        }
    }
}

/// The accepting side's result of the handshake.
#[derive(Debug, Clone, PartialEq)]
pub struct Go {
    /// Address of the accepting side's mailbox.
    pub mailbox_addr: u64,
    /// One answer for each pair of the offer, in the same order.
    pub pairs: Vec<PairGo>,
    /// Data for replacing a lost TCP connection; `None` if the accepting side cannot listen.
    pub redial: Option<RedialAt>,
}

/// Port and token for replacing the TCP connection of a running connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedialAt {
    /// Port on which the accepting side listens, at the address of the lost TCP connection.
    pub port: NonZeroU16,
    /// Token that identifies the connection and authenticates the connecting side.
    pub token: [u8; TOKEN_BYTES],
}

/// First message on a TCP connection that replaces a lost one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Redial {
    /// The token of [`RedialAt`].
    pub token: [u8; TOKEN_BYTES],
    /// Number of the attempt, from 1. A late attempt does not replace a newer one.
    pub attempt: u64,
}

/// The accepting side's result for one pair.
#[derive(Debug, Clone, PartialEq)]
pub enum PairGo {
    /// The pair passed a test write.
    Carries {
        /// Key of the accepting side's mailbox on this rail.
        mailbox_rkey: u32,
    },
    /// The pair does not work yet, for the reason in the text. It begins in the state of a lost
    /// rail.
    NotYet(String),
}

/// The checked header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    kind: u8,
    /// Length of the body in bytes.
    pub body_bytes: usize,
}

/// Error of decoding a frame header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotOurs {
    /// Another protocol uses this port.
    #[error("not a message of this plugin")]
    OtherProtocol,
    /// Another version of the protocol.
    #[error(
        "the peer uses protocol version {0}, this host uses {PROTOCOL_VERSION}: install the same plugin version on every node"
    )]
    Version(u8),
    /// A body larger than any message.
    #[error("message of {0} bytes announced; at most {MAX_BODY_BYTES} are allowed")]
    Size(usize),
}

impl Header {
    /// Decodes a header.
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Result<Self, NotOurs> {
        let [m0, m1, kind, version, l0, l1, l2, l3] = bytes;
        if u16::from_le_bytes([m0, m1]) != MAGIC {
            return Err(NotOurs::OtherProtocol);
        }
        if u16::from(version) != PROTOCOL_VERSION {
            return Err(NotOurs::Version(version));
        }
        let body_bytes = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if body_bytes > MAX_BODY_BYTES {
            return Err(NotOurs::Size(body_bytes));
        }
        Ok(Self { kind, body_bytes })
    }
}

impl Message {
    /// Returns the message's name for log lines.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Hello(_) => "HELLO",
            Self::Offer(_) => "OFFER",
            Self::Refuse(_) => "REFUSE",
            Self::Ready(_) => "READY",
            Self::Go(_) => "GO",
            Self::Control(_) => "control",
            Self::Redial(_) => "REDIAL",
            Self::Resumed => "RESUMED",
            Self::Streams(_) => "STREAMS",
            Self::Stream(_) => "STREAM",
            Self::Carries => "CARRIES",
        }
    }

    /// Encodes the whole frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Writer::default();
        let kind: u8 = match self {
            Self::Hello(hello) => {
                hello.write(&mut body);
                1
            }
            Self::Offer(offer) => {
                offer.write(&mut body);
                2
            }
            Self::Refuse(text) => {
                body.text(text, TEXT_BYTES);
                3
            }
            Self::Ready(ready) => {
                ready.write(&mut body);
                4
            }
            Self::Go(go) => {
                go.write(&mut body);
                5
            }
            Self::Control(frame) => {
                frame.write(&mut body);
                6
            }
            Self::Redial(Redial { token, attempt }) => {
                body.bytes(token).u64(*attempt);
                7
            }
            Self::Resumed => 8,
            Self::Streams(Streams { name, count, token }) => {
                body.text(name, NAME_BYTES).u8(*count).bytes(token);
                9
            }
            Self::Stream(Stream { token, number }) => {
                body.bytes(token).u8(*number);
                10
            }
            Self::Carries => 11,
        };
        let body = body.into_bytes();
        let mut frame = Writer::default();
        frame
            .u16(MAGIC)
            .u8(kind)
            .u8(PROTOCOL_VERSION as u8)
            .u32(body.len() as u32)
            .bytes(&body);
        frame.into_bytes()
    }

    /// Decodes the body that follows `header`.
    pub fn decode(header: Header, body: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(body);
        let r = &mut reader;
        let message = match header.kind {
            1 => Self::Hello(Hello::read(r)?),
            2 => Self::Offer(Offer::read(r)?),
            3 => Self::Refuse(r.text("reason", TEXT_BYTES)?),
            4 => Self::Ready(Ready::read(r)?),
            5 => Self::Go(Go::read(r)?),
            6 => Self::Control(ControlFrame::read(r)?),
            7 => Self::Redial(Redial {
                token: r.array()?,
                attempt: r.u64()?,
            }),
            8 => Self::Resumed,
            9 => Self::Streams(Streams {
                name: r.text("name", NAME_BYTES)?,
                count: ranged("streams", u64::from(r.u8()?), 1, MAX_STREAMS as u64)? as u8,
                token: r.array()?,
            }),
            10 => {
                let token = r.array()?;
                Self::Stream(Stream {
                    token,
                    number: ranged("stream", u64::from(r.u8()?), 1, MAX_STREAMS as u64 - 1)? as u8,
                })
            }
            11 => Self::Carries,
            kind => {
                return Err(Malformed::Value {
                    what: "message kind",
                    value: u64::from(kind),
                });
            }
        };
        reader.end()?;
        Ok(message)
    }
}

impl Hello {
    fn write(&self, w: &mut Writer) {
        w.bytes(&self.token)
            .text(&self.name, NAME_BYTES)
            .u32(self.chunk_bytes)
            .u8(self.qps_per_rail)
            .u64(self.tuner_hash)
            .text(&self.gpu, NAME_BYTES);
        self.priority.write(w);
        match &self.by_tcp {
            ByTcp::Off => w.u8(0),
            ByTcp::Allowed => w.u8(1),
            ByTcp::Withheld(why) => w.u8(2).text(why, TEXT_BYTES),
        };
        w.list(&self.rails, |w, rail| rail.write(w));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            token: r.array()?,
            name: r.text("name", NAME_BYTES)?,
            chunk_bytes: chunk_bytes(r)?,
            qps_per_rail: ranged("queue pairs", u64::from(r.u8()?), 0, MAX_QPS as u64)? as u8,
            tuner_hash: r.u64()?,
            gpu: r.text("GPU", NAME_BYTES)?,
            priority: Priority::read(r)?,
            by_tcp: match r.u8()? {
                0 => ByTcp::Off,
                1 => ByTcp::Allowed,
                2 => ByTcp::Withheld(r.text("reason", TEXT_BYTES)?),
                value => {
                    return Err(Malformed::Value {
                        what: "NCCL_SPARK_RING_TCP setting",
                        value: u64::from(value),
                    });
                }
            },
            rails: r.list("rails", MAX_OFFERED_RAILS, RailAdvert::read)?,
        })
    }
}

impl Offer {
    fn write(&self, w: &mut Writer) {
        w.text(&self.name, NAME_BYTES).u32(self.chunk_bytes);
        w.list(&self.pairs, |w, pair| {
            w.u8(pair.connector_rail)
                .bytes(&pair.connector_gid)
                .u8(pair.acceptor_rail.byte());
            pair.acceptor.write(w);
            w.text(&pair.acceptor_name, NAME_BYTES)
                .bytes(&pair.acceptor_gid)
                .u32(pair.mtu_bytes);
            match &pair.queue_pairs {
                Offered::Now(qps) => w.u8(1).list(qps, write_qp),
                Offered::Later(count) => w.u8(0).u8(*count),
                Offered::Late(count) => w.u8(2).u8(*count),
            };
        });
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: r.text("name", NAME_BYTES)?,
            chunk_bytes: chunk_bytes(r)?,
            pairs: r.list("pairs", MAX_RAILS, |r| {
                Ok(PairOffer {
                    connector_rail: r.u8()?,
                    connector_gid: read_gid(r)?,
                    acceptor_rail: RailId::of_byte(r.u8()?),
                    acceptor: Attachment::read(r)?,
                    acceptor_name: r.text("rail name", NAME_BYTES)?,
                    acceptor_gid: read_gid(r)?,
                    mtu_bytes: mtu_bytes(r)?,
                    queue_pairs: match r.u8()? {
                        1 => Offered::Now(read_qps(r)?),
                        0 => Offered::Later(read_qp_count(r)?),
                        2 => Offered::Late(read_qp_count(r)?),
                        value => {
                            return Err(Malformed::Value {
                                what: "pair state",
                                value: u64::from(value),
                            });
                        }
                    },
                })
            })?,
        })
    }
}

impl Ready {
    fn write(&self, w: &mut Writer) {
        w.u64(self.mailbox_addr)
            .list(&self.pairs, |w, pair| match pair {
                PairReady::Connected { mailbox_rkey, qps } => {
                    w.u8(1).u32(*mailbox_rkey).list(qps, write_qp);
                }
                PairReady::NotYet(NotYet { why, is_temporary }) => {
                    w.u8(if *is_temporary { 2 } else { 0 })
                        .text(why, TEXT_BYTES);
                }
            });
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            mailbox_addr: mailbox_addr(r)?,
            pairs: r.list("pairs", MAX_RAILS, |r| match r.u8()? {
                1 => Ok(PairReady::Connected {
                    mailbox_rkey: r.u32()?,
                    qps: read_qps(r)?,
                }),
                state @ (0 | 2) => Ok(PairReady::NotYet(NotYet {
                    why: r.text("reason", TEXT_BYTES)?,
                    is_temporary: state == 2,
                })),
                value => Err(Malformed::Value {
                    what: "pair state",
                    value: u64::from(value),
                }),
            })?,
        })
    }
}

impl Go {
    fn write(&self, w: &mut Writer) {
        w.u64(self.mailbox_addr)
            .list(&self.pairs, |w, pair| match pair {
                PairGo::Carries { mailbox_rkey } => {
                    w.u8(1).u32(*mailbox_rkey);
                }
                PairGo::NotYet(reason) => {
                    w.u8(0).text(reason, TEXT_BYTES);
                }
            });
        match &self.redial {
            Some(RedialAt { port, token }) => w.u16(port.get()).bytes(token),
            None => w.u16(0),
        };
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            mailbox_addr: mailbox_addr(r)?,
            pairs: r.list("pairs", MAX_RAILS, |r| match r.u8()? {
                1 => Ok(PairGo::Carries {
                    mailbox_rkey: r.u32()?,
                }),
                0 => Ok(PairGo::NotYet(r.text("reason", TEXT_BYTES)?)),
                value => Err(Malformed::Value {
                    what: "pair state",
                    value: u64::from(value),
                }),
            })?,
            redial: match NonZeroU16::new(r.u16()?) {
                Some(port) => Some(RedialAt {
                    port,
                    token: r.array()?,
                }),
                None => None,
            },
        })
    }
}

fn mailbox_addr(r: &mut Reader<'_>) -> Result<u64, Malformed> {
    let addr = r.u64()?;
    match addr.checked_add(MAILBOX_BYTES as u64) {
        Some(_) => Ok(addr),
        None => Err(Malformed::Value {
            what: "mailbox address",
            value: addr,
        }),
    }
}

#[cfg(test)]
mod tests;
