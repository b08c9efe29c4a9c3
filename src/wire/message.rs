//! The handshake's messages.
//!
//! The connecting side says [`Hello`] with its rails; the accepting side pairs them with its own and makes an
//! [`Offer`], or a refusal in words; the connecting side connects its queue pairs and answers [`Ready`]; the
//! accepting side connects its own, writes once over every rail, and says with [`Go`] which of them carry. From then on
//! each side sends a [`ControlFrame`] when it has something to tell. Each message is a frame: 8 bytes of header, then at most
//! [`MAX_BODY_BYTES`].

use super::codec::{Malformed, Reader, Writer};
use super::control::ControlFrame;
use super::fields::{
    Attachment, MAX_QPS, NAME_BYTES, QpEnd, RailAdvert, chunk_bytes, mtu_bytes, ranged, read_gid, read_qps, write_qp,
};
use super::handle::TOKEN_BYTES;
use super::ids::RailId;
use super::mailbox::MAILBOX_BYTES;
use super::{MAX_OFFERED_RAILS, MAX_RAILS, PROTOCOL_VERSION};

/// Largest body of a frame: a hello with all rails and addresses takes 14 KiB.
pub const MAX_BODY_BYTES: usize = 32 * 1024;
/// Bytes before the body: magic, kind, version, body length.
pub const HEADER_BYTES: usize = 8;

const MAGIC: u16 = 0x5350;
const TEXT_BYTES: usize = 2048;

/// One message of the bootstrap's TCP: of the handshake, or a control frame.
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
    /// The rails, in this side's order.
    pub rails: Vec<RailAdvert>,
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
    /// This side cannot use the pair.
    Failed(String),
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
            .u64(self.tuner_hash);
        w.list(&self.rails, |w, rail| rail.write(w));
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            token: r.array()?,
            name: r.text("name", NAME_BYTES)?,
            chunk_bytes: chunk_bytes(r)?,
            qps_per_rail: ranged("queue pairs", u64::from(r.u8()?), 0, MAX_QPS as u64)? as u8,
            tuner_hash: r.u64()?,
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
            PairReady::Failed(reason) => {
                w.u8(0).text(reason, TEXT_BYTES);
            }
        });
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            mailbox_addr: mailbox_addr(r)?,
            pairs: r.list("pairs", MAX_RAILS, |r| match r.u8()? {
                1 => Ok(PairReady::Connected { mailbox_rkey: r.u32()?, qps: read_qps(r)? }),
                0 => Ok(PairReady::Failed(r.text("reason", TEXT_BYTES)?)),
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
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            mailbox_addr: mailbox_addr(r)?,
            pairs: r.list("pairs", MAX_RAILS, |r| match r.u8()? {
                1 => Ok(PairGo::Carries { mailbox_rkey: r.u32()? }),
                0 => Ok(PairGo::NotYet(r.text("reason", TEXT_BYTES)?)),
                value => Err(Malformed::Value { what: "pair state", value: u64::from(value) }),
            })?,
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
mod tests {
    use super::*;
    use crate::wire::fields::{Address, MAX_ADDRESSES};
    use proptest::prelude::*;

    fn decode(frame: &[u8]) -> Result<Message, Malformed> {
        let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
        assert_eq!(header.body_bytes, frame.len() - 8);
        Message::decode(header, &frame[8..])
    }

    pub(super) fn samples() -> Vec<Message> {
        let gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 100, 1];
        let qps = vec![QpEnd { number: 17, psn: 0xff_ffff }, QpEnd { number: 18, psn: 0 }];
        let pair = |queue_pairs| PairOffer {
            connector_rail: 0,
            connector_gid: gid,
            acceptor_rail: RailId::of_byte(3),
            acceptor: Attachment { link: 0, link_mbps: 0, cable: 1, port_mbps: 100_000 },
            acceptor_name: "rocep1s0f0:1".into(),
            acceptor_gid: gid,
            mtu_bytes: 1024,
            queue_pairs,
        };
        vec![
            Message::Hello(Hello {
                token: [3; 16],
                name: "spark-1:4242".into(),
                chunk_bytes: 8 << 20,
                qps_per_rail: 2,
                tuner_hash: 0x0123_4567_89ab_cdef,
                rails: vec![RailAdvert {
                    name: "rocep1s0f0:1".into(),
                    phys_port: "p0".into(),
                    attachment: Attachment { link: 1, link_mbps: 112_000, cable: 0, port_mbps: 200_000 },
                    speed_mbps: 112_000,
                    mtu_bytes: 4096,
                    addresses: vec![Address { gid, prefix: Some(120) }, Address { gid: [0xfe; 16], prefix: None }],
                    is_usable: true,
                }],
            }),
            Message::Offer(Offer {
                name: "spark-2:77".into(),
                chunk_bytes: 1 << 30,
                pairs: [Offered::Now(qps.clone()), Offered::Later(2)].map(pair).to_vec(),
            }),
            Message::Refuse("no rail in common".into()),
            Message::Ready(Ready {
                mailbox_addr: 0x7f00_0000_1000,
                pairs: vec![
                    PairReady::Connected { mailbox_rkey: 5, qps },
                    PairReady::Failed("Network is unreachable".into()),
                ],
            }),
            Message::Go(Go {
                mailbox_addr: 0x7f00_0000_2000,
                pairs: vec![PairGo::Carries { mailbox_rkey: 9 }, PairGo::NotYet("no answer".into())],
            }),
            Message::Control(ControlFrame {
                number: 3,
                heard: 2,
                asks: true,
                message: vec![6, 1, 0, 0, 0, 0, 0, 0, 0],
            }),
        ]
    }

    #[test]
    fn every_message_comes_back_and_no_part_of_it_does() {
        for message in samples() {
            let frame = message.encode();
            assert_eq!(decode(&frame).unwrap(), message);
            for cut in 8..frame.len() {
                let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
                assert!(Message::decode(header, &frame[8..cut]).is_err(), "{} cut to {cut}", message.kind());
            }
            let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
            let longer = [&frame[8..], &[0]].concat();
            assert_eq!(Message::decode(header, &longer), Err(Malformed::Long(1)));
        }
    }

    #[test]
    fn the_largest_hello_fits_a_frame() {
        let Message::Hello(mut hello) = samples().remove(0) else { unreachable!() };
        hello.rails[0].name = "n".repeat(64);
        hello.rails[0].phys_port = "p".repeat(64);
        hello.rails[0].addresses = vec![hello.rails[0].addresses[0]; MAX_ADDRESSES];
        hello.rails = vec![hello.rails[0].clone(); MAX_OFFERED_RAILS];
        let frame = Message::Hello(hello.clone()).encode();
        assert!(frame.len() - 8 <= MAX_BODY_BYTES, "{}", frame.len());
        assert_eq!(decode(&frame).unwrap(), Message::Hello(hello));
    }

    #[test]
    fn other_protocols_are_known_by_their_header() {
        assert_eq!(Header::decode(*b"GET / HT"), Err(NotOurs::OtherProtocol));
        let frame = Message::Control(ControlFrame::default()).encode();
        let mut header: [u8; 8] = frame[..8].try_into().unwrap();
        header[7] = 1;
        assert_eq!(Header::decode(header), Err(NotOurs::Size((1 << 24) + 19)));
        header[3] = 9;
        assert_eq!(Header::decode(header), Err(NotOurs::Version(9)));
    }

    proptest! {
        #[test]
        fn any_body_is_answered(kind in 0..8u8, body: Vec<u8>) {
            if let Ok(message) = Message::decode(Header { kind, body_bytes: body.len() }, &body) {
                prop_assert_eq!(decode(&message.encode()).unwrap(), message);
            }
        }

        #[test]
        fn a_flipped_bit_is_answered(which in 0..6usize, at: prop::sample::Index, bit in 0..8u8) {
            let mut frame = samples()[which].encode();
            let at = 8 + at.index(frame.len() - 8);
            frame[at] ^= 1 << bit;
            let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
            let _ = Message::decode(header, &frame[8..]);
        }
    }
}
