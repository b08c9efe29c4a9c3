//! The handshake's messages.
//!
//! The connecting side says [`Hello`] with its rails; the accepting side pairs them with its own and makes an
//! [`Offer`], or a refusal in words; the connecting side connects its queue pairs and answers [`Ready`]; the
//! accepting side connects its own, tests every rail, and says with [`Go`] which of them carry: all, some or
//! none, as the others are tried again by the running connection. From then on each side sends a [`ControlFrame`] when it has something to tell. Where their TCP connection is given up, the connecting side dials
//! another one, says [`Redial`] and is answered `RESUMED`. Each message is a frame: 8 bytes of header, then at most
//! [`MAX_BODY_BYTES`].
//!
//! Where no rails pair, the accepting side may answer a hello with [`Streams`] instead: the connecting side opens that many TCP connections,
//! says [`Stream`] first on each but the one of the hello, and hears `CARRIES` on that one once all are there. What follows on them is
//! [`super::stream`]'s.

use super::codec::{Malformed, Reader, Writer};
use super::control::ControlFrame;
use super::fields::{
    Attachment, MAX_QPS, NAME_BYTES, Priority, QpEnd, RailAdvert, chunk_bytes, mtu_bytes, ranged, read_gid, read_qps,
    write_qp,
};
use super::handle::TOKEN_BYTES;
use super::ids::RailId;
use super::mailbox::MAILBOX_BYTES;
use super::stream::MAX_STREAMS;
use super::{MAX_OFFERED_RAILS, MAX_RAILS, PROTOCOL_VERSION};
use std::num::NonZeroU16;

/// Largest body of a frame: a hello with all rails and addresses takes 14 KiB.
pub const MAX_BODY_BYTES: usize = 32 * 1024;
/// Bytes before the body: magic, kind, version, body length.
pub const HEADER_BYTES: usize = 8;

const MAGIC: u16 = 0x5350;
const TEXT_BYTES: usize = 2048;

/// One message of the bootstrap's TCP: of the handshake, a control frame, or of a TCP connection that takes the place of another.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// Connecting side, first.
    Hello(Hello),
    /// Accepting side's answer.
    Offer(Offer),
    /// Either side gives up; the text says why, for the other's log.
    Refuse(String),
    /// Connecting side's queue pairs are connected.
    Ready(Ready),
    /// Accepting side's are too, and these rails carried a write.
    Go(Go),
    /// What either side has to tell once the connection runs.
    Control(ControlFrame),
    /// Connecting side, first on a TCP connection that is to take the place of the one that was given up.
    Redial(Redial),
    /// Accepting side's answer: control frames go by this TCP connection from here on.
    Resumed,
    /// Accepting side's answer to a hello, where no rail reaches the peer.
    Streams(Streams),
    /// Connecting side, first on a TCP connection that is to carry data.
    Stream(Stream),
    /// Accepting side: all streams are there, and carry data from here on.
    Carries,
}

/// Who connects, and over what.
#[derive(Debug, Clone, PartialEq)]
pub struct Hello {
    /// The handle's token.
    pub token: [u8; TOKEN_BYTES],
    /// Host name and process, for messages.
    pub name: String,
    /// Largest write this side can make, in bytes.
    pub chunk_bytes: u32,
    /// Queue pairs wanted on each rail; 0: to be chosen from the rails.
    pub qps_per_rail: u8,
    /// By what this side's tuner decides; 0 where it leaves all to NCCL. Two sides that differ would hang in a collective.
    pub tuner_hash: u64,
    /// Name of this side's GPU, for the message about tuners that differ.
    pub gpu: String,
    /// Priority of this side's packets. The accepting side's queue pairs use it too, as NCCL's do
    /// (net_ib, `ncclIbAccept`).
    pub priority: Priority,
    /// Whether a peer that no rail reaches may be reached by TCP.
    pub by_tcp: ByTcp,
    /// The rails, in this side's order.
    pub rails: Vec<RailAdvert>,
}

/// Whether a side connects by TCP with peers that no rail reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ByTcp {
    /// `NCCL_SPARK_RING_TCP` is off.
    Off,
    /// It is on.
    Allowed,
    /// It is on, but the addresses of some rails are not known, one of which may reach the peer: why, in words.
    Withheld(String),
}

/// How to connect by TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Streams {
    /// Host name and process, for messages.
    pub name: String,
    /// How many streams there are to be, with that of the hello: 1 to [`MAX_STREAMS`].
    pub count: u8,
    /// What the others have to show.
    pub token: [u8; TOKEN_BYTES],
}

/// A TCP connection that is to be a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// The token of [`Streams`].
    pub token: [u8; TOKEN_BYTES],
    /// Which stream, from 1 on: that of the hello is 0.
    pub number: u8,
}

/// The pairs that the accepting side proposes.
#[derive(Debug, Clone, PartialEq)]
pub struct Offer {
    /// Host name and process, for messages.
    pub name: String,
    /// Size of a full chunk of this connection, the smaller of both sides'.
    pub chunk_bytes: u32,
    /// The pairs; their order is the connection's rail numbering.
    pub pairs: Vec<PairOffer>,
}

/// One rail of each side, with the accepting side's queue pairs.
#[derive(Debug, Clone, PartialEq)]
pub struct PairOffer {
    /// Index into the hello's rails.
    pub connector_rail: u8,
    /// Which of that rail's addresses to use.
    pub connector_gid: [u8; 16],
    /// The accepting side's rail: its number there.
    pub acceptor_rail: RailId,
    /// What it hangs on.
    pub acceptor: Attachment,
    /// Its name, for messages.
    pub acceptor_name: String,
    /// Its address.
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
    /// One answer for each pair of the offer.
    pub pairs: Vec<PairReady>,
}

/// The answer to one pair of an offer.
#[derive(Debug, Clone, PartialEq)]
pub enum PairReady {
    /// Connected on this side.
    Connected {
        /// Key of the mailbox on this rail.
        mailbox_rkey: u32,
        /// The connecting side's queue pairs, in the order of the offer's.
        qps: Vec<QpEnd>,
    },
    /// Not connected on this side.
    NotYet(NotYet),
}

/// The reason why a pair of rails does not carry yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotYet {
    /// The reason in words, for a message.
    pub why: String,
    /// True where a later attempt may succeed: a port that is down, an address that does not
    /// resolve, packets that get lost. A refused request (`EINVAL`) stays refused.
    pub may_pass: bool,
}

/// How a pair is offered.
#[derive(Debug, Clone, PartialEq)]
pub enum Offered {
    /// With the accepting side's queue pairs, to be connected now.
    Now(Vec<QpEnd>),
    /// For later, with so many: one of its rails cannot be used now.
    Later(u8),
}

impl Offered {
    /// How many queue pairs there are, or will be.
    pub fn count(&self) -> u8 {
        match self {
            // At most 16: as read.
            Self::Now(qps) => qps.len() as u8,
            Self::Later(count) => *count,
        }
    }
}

/// Which pairs carry.
#[derive(Debug, Clone, PartialEq)]
pub struct Go {
    /// Address of the accepting side's mailbox.
    pub mailbox_addr: u64,
    /// One answer for each pair of the offer.
    pub pairs: Vec<PairGo>,
    /// How the connecting side gets another TCP connection when this one is given up; none where the accepting side cannot listen.
    pub redial: Option<RedialAt>,
}

/// How the connecting side gets another TCP connection for a connection that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedialAt {
    /// Where the accepting side's process listens, at the address that it was reached by.
    pub port: NonZeroU16,
    /// Names the connection, and shows who dials.
    pub token: [u8; TOKEN_BYTES],
}

/// For which connection a TCP connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Redial {
    /// The token of [`RedialAt`].
    pub token: [u8; TOKEN_BYTES],
    /// Counts the attempts for this connection from 1 on: one that comes late does not replace a later one.
    pub attempt: u64,
}

/// The accepting side's word on one pair.
#[derive(Debug, Clone, PartialEq)]
pub enum PairGo {
    /// It carried a write.
    Carries {
        /// Key of the accepting side's mailbox on this rail.
        mailbox_rkey: u32,
    },
    /// It does not carry, and begins as a lost rail does.
    NotYet(String),
}

/// The header of a frame, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    kind: u8,
    /// Bytes that follow.
    pub body_bytes: usize,
}

/// Why eight bytes are not a header of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotOurs {
    /// Something else talks to this port.
    #[error("not a message of this plugin")]
    OtherProtocol,
    /// Another version of the protocol.
    #[error("peer speaks protocol {0}, this host {PROTOCOL_VERSION}: install the same plugin version on every node")]
    Version(u8),
    /// A body larger than any message.
    #[error("message of {0} bytes announced; at most {MAX_BODY_BYTES} are allowed")]
    Size(usize),
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// [`NotOurs`].
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
    /// What it is called in messages to a person.
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

    /// The whole frame.
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
        frame.u16(MAGIC).u8(kind).u8(PROTOCOL_VERSION as u8).u32(body.len() as u32).bytes(&body);
        frame.into_bytes()
    }

    /// Reads a body that came behind `header`.
    ///
    /// # Errors
    /// [`Malformed`] names the field.
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
            7 => Self::Redial(Redial { token: r.array()?, attempt: r.u64()? }),
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
            kind => return Err(Malformed::Value { what: "message kind", value: u64::from(kind) }),
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
                value => return Err(Malformed::Value { what: "setting of TCP", value: u64::from(value) }),
            },
            rails: r.list("rails", MAX_OFFERED_RAILS, RailAdvert::read)?,
        })
    }
}

impl Offer {
    fn write(&self, w: &mut Writer) {
        w.text(&self.name, NAME_BYTES).u32(self.chunk_bytes);
        w.list(&self.pairs, |w, pair| {
            w.u8(pair.connector_rail).bytes(&pair.connector_gid).u8(pair.acceptor_rail.byte());
            pair.acceptor.write(w);
            w.text(&pair.acceptor_name, NAME_BYTES).bytes(&pair.acceptor_gid).u32(pair.mtu_bytes);
            match &pair.queue_pairs {
                Offered::Now(qps) => w.u8(1).list(qps, write_qp),
                Offered::Later(count) => w.u8(0).u8(*count),
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
                        0 => Offered::Later(ranged("queue pairs", u64::from(r.u8()?), 1, MAX_QPS as u64)? as u8),
                        value => return Err(Malformed::Value { what: "pair state", value: u64::from(value) }),
                    },
                })
            })?,
        })
    }
}

impl Ready {
    fn write(&self, w: &mut Writer) {
        w.u64(self.mailbox_addr).list(&self.pairs, |w, pair| match pair {
            PairReady::Connected { mailbox_rkey, qps } => {
                w.u8(1).u32(*mailbox_rkey).list(qps, write_qp);
            }
            PairReady::NotYet(NotYet { why, may_pass }) => {
                w.u8(if *may_pass { 2 } else { 0 }).text(why, TEXT_BYTES);
            }
        });
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            mailbox_addr: mailbox_addr(r)?,
            pairs: r.list("pairs", MAX_RAILS, |r| match r.u8()? {
                1 => Ok(PairReady::Connected { mailbox_rkey: r.u32()?, qps: read_qps(r)? }),
                state @ (0 | 2) => {
                    Ok(PairReady::NotYet(NotYet { why: r.text("reason", TEXT_BYTES)?, may_pass: state == 2 }))
                }
                value => Err(Malformed::Value { what: "pair state", value: u64::from(value) }),
            })?,
        })
    }
}

impl Go {
    fn write(&self, w: &mut Writer) {
        w.u64(self.mailbox_addr).list(&self.pairs, |w, pair| match pair {
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
                1 => Ok(PairGo::Carries { mailbox_rkey: r.u32()? }),
                0 => Ok(PairGo::NotYet(r.text("reason", TEXT_BYTES)?)),
                value => Err(Malformed::Value { what: "pair state", value: u64::from(value) }),
            })?,
            redial: match NonZeroU16::new(r.u16()?) {
                Some(port) => Some(RedialAt { port, token: r.array()? }),
                None => None,
            },
        })
    }
}

fn mailbox_addr(r: &mut Reader<'_>) -> Result<u64, Malformed> {
    let addr = r.u64()?;
    match addr.checked_add(MAILBOX_BYTES as u64) {
        Some(_) => Ok(addr),
        None => Err(Malformed::Value { what: "mailbox address", value: addr }),
    }
}

#[cfg(test)]
mod tests;
