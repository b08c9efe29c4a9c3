use super::*;
use crate::wire::fields::{Address, MAX_ADDRESSES};
use proptest::prelude::*;

fn decode(frame: &[u8]) -> Result<Message, Malformed> {
    let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
    assert_eq!(header.body_bytes, frame.len() - 8);
    Message::decode(header, &frame[8..])
}

pub(super) fn samples() -> Vec<Message> {
    vec![
        Message::Hello(hello()),
        Message::Offer(offer()),
        Message::Refuse("no rail in common".into()),
        Message::Ready(ready()),
        Message::Go(go()),
        Message::Control(ControlFrame {
            number: 3,
            received: 2,
            awaits_confirmation: true,
            message: vec![6, 1, 0, 0, 0, 0, 0, 0, 0],
        }),
        Message::Redial(Redial {
            token: [8; 16],
            attempt: 3,
        }),
        Message::Go(Go {
            mailbox_addr: 0,
            pairs: Vec::new(),
            redial: None,
        }),
        Message::Resumed,
        Message::Streams(Streams {
            name: "spark-3:9".into(),
            count: 8,
            token: [6; 16],
        }),
        Message::Stream(Stream {
            token: [6; 16],
            number: 7,
        }),
        Message::Carries,
    ]
}

const GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 100, 1];

fn hello() -> Hello {
    Hello {
        token: [3; 16],
        name: "spark-1:4242".into(),
        chunk_bytes: 8 << 20,
        qps_per_rail: 2,
        tuner_hash: 0x0123_4567_89ab_cdef,
        gpu: "NVIDIA GB10".into(),
        priority: Priority {
            traffic_class: 106,
            service_level: 3,
        },
        by_tcp: ByTcp::Withheld("x0:1 has no address".into()),
        rails: vec![RailAdvert {
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
                    gid: GID,
                    prefix: Some(120),
                },
                Address {
                    gid: [0xfe; 16],
                    prefix: None,
                },
            ],
            is_usable: true,
        }],
    }
}

fn offer() -> Offer {
    let pair = |queue_pairs| PairOffer {
        connector_rail: 0,
        connector_gid: GID,
        acceptor_rail: RailId::of_byte(3),
        acceptor: Attachment {
            link: 0,
            link_mbps: 0,
            cable: 1,
            port_mbps: 100_000,
        },
        acceptor_name: "rocep1s0f0:1".into(),
        acceptor_gid: GID,
        mtu_bytes: 1024,
        queue_pairs,
    };
    Offer {
        name: "spark-2:77".into(),
        chunk_bytes: 1 << 30,
        pairs: [Offered::Now(two_qps()), Offered::Later(2), Offered::Late(1)]
            .map(pair)
            .to_vec(),
    }
}

fn ready() -> Ready {
    Ready {
        mailbox_addr: 0x7f00_0000_1000,
        pairs: vec![
            PairReady::Connected {
                mailbox_rkey: 5,
                qps: two_qps(),
            },
            PairReady::NotYet(NotYet::temporary("Network is unreachable".into())),
            PairReady::NotYet(NotYet {
                why: "Invalid argument".into(),
                is_temporary: false,
            }),
        ],
    }
}

fn two_qps() -> Vec<QpEnd> {
    vec![
        QpEnd {
            number: 17,
            psn: 0xff_ffff,
        },
        QpEnd { number: 18, psn: 0 },
    ]
}

fn go() -> Go {
    Go {
        mailbox_addr: 0x7f00_0000_2000,
        pairs: vec![
            PairGo::Carries { mailbox_rkey: 9 },
            PairGo::NotYet("no answer".into()),
        ],
        redial: Some(RedialAt {
            port: NonZeroU16::MAX,
            token: [7; 16],
        }),
    }
}

#[test]
fn every_message_survives_encoding_and_no_part_of_one_is_accepted() {
    for message in samples() {
        let frame = message.encode();
        assert_eq!(decode(&frame).unwrap(), message);
        for cut in 8..frame.len() {
            let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
            assert!(
                Message::decode(header, &frame[8..cut]).is_err(),
                "{} cut to {cut}",
                message.kind()
            );
        }
        let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
        let longer = [&frame[8..], &[0]].concat();
        assert_eq!(Message::decode(header, &longer), Err(Malformed::Long(1)));
    }
}

#[test]
fn the_largest_hello_fits_a_frame() {
    let mut hello = hello();
    hello.rails[0].name = "n".repeat(64);
    hello.rails[0].phys_port = "p".repeat(64);
    hello.rails[0].addresses = vec![hello.rails[0].addresses[0]; MAX_ADDRESSES];
    hello.rails = vec![hello.rails[0].clone(); MAX_OFFERED_RAILS];
    hello.by_tcp = ByTcp::Withheld("w".repeat(TEXT_BYTES));
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
    header[3] = 200;
    assert_eq!(Header::decode(header), Err(NotOurs::Version(200)));
}

proptest! {
    #[test]
    fn any_body_is_decoded_or_refused(kind in 0..13u8, body: Vec<u8>) {
        if let Ok(message) = Message::decode(Header { kind, body_bytes: body.len() }, &body) {
            prop_assert_eq!(decode(&message.encode()).unwrap(), message);
        }
    }

    #[test]
    fn a_flipped_bit_is_decoded_or_refused(which in 0..8usize, at: prop::sample::Index, bit in 0..8u8) {
        let mut frame = samples()[which].encode();
        let at = 8 + at.index(frame.len() - 8);
        frame[at] ^= 1 << bit;
        let header = Header::decode(frame[..8].try_into().unwrap()).unwrap();
        let _ = Message::decode(header, &frame[8..]);
    }
}

#[test]
fn stream_numbers_must_be_new_and_in_range() {
    let read = |message: Message, at: usize, value: u8| {
        let mut frame = message.encode();
        frame[at] = value;
        decode(&frame)
    };
    let stream = || {
        Message::Stream(Stream {
            token: [6; 16],
            number: 1,
        })
    };
    for (value, is_one) in [(0, false), (1, true), (7, true), (8, false)] {
        assert_eq!(
            read(stream(), HEADER_BYTES + 16, value).is_ok(),
            is_one,
            "stream {value}"
        );
    }
    let streams = || {
        Message::Streams(Streams {
            name: String::new(),
            count: 1,
            token: [6; 16],
        })
    };
    for (value, is_count) in [(0, false), (1, true), (8, true), (9, false)] {
        assert_eq!(
            read(streams(), HEADER_BYTES + 2, value).is_ok(),
            is_count,
            "{value} streams"
        );
    }
}
