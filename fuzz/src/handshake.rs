//! The handshake's framed messages, and the decisions made from them before any queue pair exists:
//! which rails pair, and the rates of the paths between them.
//!
//! Input: a byte with the message kind, then the message's body. If the byte is 0x80 or more, the
//! rest is a whole frame with its own header.

use crate::control;
use crate::fields::{
    MAX_LIST, NAME_BYTES, check_attachment, check_mtu, check_queue_pairs, check_rail, text_fits,
};
use crate::memory;
use crate::target::Seeds;
use nccl_net_spark::comm::setup::negotiate;
use proto::flow::pairing::{self, Route};
use proto::flow::paths::{End, Paths};
use proto::wire::control::{ControlFrame, MAX_CONTROL_BYTES};
use proto::wire::fields::{Address, Attachment, Priority, QpEnd, RailAdvert};
use proto::wire::ids::RailId;
use proto::wire::mailbox::MAILBOX_BYTES;
use proto::wire::message::{
    ByTcp, Go, HEADER_BYTES, Header, Hello, MAX_BODY_BYTES, Message, NotOurs, NotYet, Offer,
    Offered, PairGo, PairOffer, PairReady, Ready, Redial, RedialAt, Stream, Streams,
};
use proto::wire::stream::MAX_STREAMS;
use proto::wire::{MAX_OFFERED_RAILS, MAX_RAILS, PROTOCOL_VERSION};
use std::collections::BTreeMap;
use std::num::NonZeroU16;

const TEXT_BYTES: usize = 2048;
const RAW: u8 = 0x80;

/// Checks a frame.
pub fn check(data: &[u8]) -> bool {
    let Some((first, rest)) = data.split_first() else {
        return false;
    };
    let (header, body) = if first & RAW != 0 {
        let Some((header, body)) = rest.split_first_chunk::<HEADER_BYTES>() else {
            return false;
        };
        (*header, body)
    } else {
        let length = (rest.len() as u32).to_le_bytes();
        (
            [
                0x50,
                0x53,
                *first,
                PROTOCOL_VERSION as u8,
                length[0],
                length[1],
                length[2],
                length[3],
            ],
            rest,
        )
    };
    let header = match Header::decode(header) {
        Ok(header) => header,
        Err(not_ours) => {
            assert!(not_ours != NotOurs::Size(0) && !not_ours.to_string().is_empty());
            return false;
        }
    };
    assert!(
        header.body_bytes <= MAX_BODY_BYTES,
        "a body of {} bytes would be awaited",
        header.body_bytes
    );
    // The plugin decodes exactly as many bytes as the header announces (`comm::channel`).
    let Some(body) = body.get(..header.body_bytes) else {
        return false;
    };
    let message = match memory::bounded(body.len(), || Message::decode(header, body)) {
        Ok(message) => message,
        Err(malformed) => {
            assert!(malformed.to_string().len() < 256);
            return false;
        }
    };
    let frame = message.encode();
    assert!(
        frame.len() - HEADER_BYTES <= body.len(),
        "{message:?} grew from {} bytes to {}",
        body.len(),
        frame.len()
    );
    let (head, rest) = frame
        .split_first_chunk::<HEADER_BYTES>()
        .expect("a frame has a header");
    let again = Header::decode(*head).map(|header| {
        assert_eq!(header.body_bytes, rest.len());
        Message::decode(header, rest)
    });
    assert_eq!(again, Ok(Ok(message.clone())));
    check_message(&message);
    true
}

fn check_message(message: &Message) {
    let chunk = |bytes: u32| {
        assert!(
            (4096..=1 << 30).contains(&bytes) && bytes.is_multiple_of(128),
            "{bytes}"
        )
    };
    match message {
        Message::Hello(hello) => {
            text_fits(&hello.name, NAME_BYTES);
            text_fits(&hello.gpu, NAME_BYTES);
            assert!(hello.priority.service_level <= 15);
            chunk(hello.chunk_bytes);
            assert!(
                hello.rails.len() <= MAX_OFFERED_RAILS
                    && usize::from(hello.qps_per_rail) <= MAX_LIST
            );
            hello.rails.iter().for_each(check_rail);
            if let ByTcp::Withheld(why) = &hello.by_tcp {
                text_fits(why, TEXT_BYTES);
            }
            for (connector, acceptor) in
                [(&hello.rails, &own_rails()), (&own_rails(), &hello.rails)]
            {
                check_pairing(connector, acceptor, &[]);
                check_pairing(
                    connector,
                    acceptor,
                    &pairing::existing_routes(connector, acceptor, |_| true),
                );
            }
        }
        Message::Offer(offer) => {
            text_fits(&offer.name, NAME_BYTES);
            chunk(offer.chunk_bytes);
            assert!(offer.pairs.len() <= MAX_RAILS);
            let own = own_rails()[0].attachment;
            let mut ends = Vec::new();
            for pair in &offer.pairs {
                text_fits(&pair.acceptor_name, NAME_BYTES);
                check_attachment(&pair.acceptor);
                check_mtu(pair.mtu_bytes);
                match &pair.queue_pairs {
                    Offered::Now(qps) => check_queue_pairs(qps),
                    Offered::Later(count) | Offered::Late(count) => {
                        assert!((1..=MAX_LIST as u8).contains(count));
                    }
                }
                let near = End {
                    rail: rail(usize::from(pair.connector_rail % 4)),
                    attachment: own,
                };
                ends.push([
                    near,
                    End {
                        rail: pair.acceptor_rail,
                        attachment: pair.acceptor,
                    },
                ]);
            }
            check_rates(&ends);
        }
        Message::Refuse(why) => text_fits(why, TEXT_BYTES),
        Message::Ready(ready) => {
            assert!(
                ready
                    .mailbox_addr
                    .checked_add(MAILBOX_BYTES as u64)
                    .is_some()
                    && ready.pairs.len() <= MAX_RAILS
            );
            for pair in &ready.pairs {
                match pair {
                    PairReady::Connected { qps, .. } => check_queue_pairs(qps),
                    PairReady::NotYet(not_yet) => text_fits(&not_yet.why, TEXT_BYTES),
                }
            }
        }
        Message::Go(go) => {
            assert!(
                go.mailbox_addr.checked_add(MAILBOX_BYTES as u64).is_some()
                    && go.pairs.len() <= MAX_RAILS
            );
            for pair in &go.pairs {
                if let PairGo::NotYet(why) = pair {
                    text_fits(why, TEXT_BYTES);
                }
            }
        }
        Message::Control(frame) => assert!(frame.message.len() <= MAX_CONTROL_BYTES),
        Message::Streams(streams) => {
            text_fits(&streams.name, NAME_BYTES);
            assert!((1..=MAX_STREAMS).contains(&usize::from(streams.count)));
        }
        Message::Stream(stream) => assert!((1..MAX_STREAMS).contains(&usize::from(stream.number))),
        Message::Redial(_) | Message::Resumed | Message::Carries => {}
    }
}

/// Pairs the rails of two sides. Asserts that the pairs name rails and addresses that exist.
fn check_pairing(connector: &[RailAdvert], acceptor: &[RailAdvert], routes: &[Route]) {
    let pairs = pairing::pair(connector, acceptor, routes);
    assert!(pairs.len() <= MAX_RAILS);
    assert!(!pairing::describe(connector).is_empty());
    let mut ends = Vec::new();
    for (at, pair) in pairs.iter().enumerate() {
        let c = &connector[pair.connector];
        let a = &acceptor[pair.acceptor];
        let has = |rail: &RailAdvert, gid| rail.addresses.iter().any(|address| address.gid == gid);
        assert!(
            has(c, pair.connector_gid) && has(a, pair.acceptor_gid),
            "{pair:?}"
        );
        assert_eq!(pair.mtu_bytes, c.mtu_bytes.min(a.mtu_bytes));
        assert!(
            pair.speed_mbps > 0 && pair.speed_mbps <= c.speed_mbps.min(a.speed_mbps),
            "{pair:?}"
        );
        let twice = pairs[..at]
            .iter()
            .any(|p| (p.connector, p.acceptor) == (pair.connector, pair.acceptor));
        assert!(!twice, "{pair:?} twice");
        let end = |place: usize, advert: &RailAdvert| End {
            rail: rail(place),
            attachment: advert.attachment,
        };
        ends.push([end(pair.acceptor, a), end(pair.connector, c)]);
    }
    check_rates(&ends);
}

/// Asserts that the rates of paths are possible and maximal. A passage is a PCIe link, a port or a
/// cable. No passage may carry more than its capacity, and each path must have a passage that is
/// full.
fn check_rates(ends: &[[End; 2]]) {
    let paths = Paths::new(ends);
    assert_eq!(paths.count(), ends.len());
    let rates = paths.even_rates();
    let passages = |pair: &[End; 2]| {
        let side = |(
            side,
            End {
                rail,
                attachment: at,
            },
        ): (usize, &End)| {
            let link = if at.link_mbps == 0 {
                f64::INFINITY
            } else {
                f64::from(at.link_mbps)
            };
            let port = f64::from(at.port_mbps);
            [
                ((side, 0, at.link.into()), link),
                ((side, 1, rail.index()), port),
                ((side, 2, at.cable.into()), port),
            ]
        };
        pair.iter().enumerate().flat_map(side).collect::<Vec<_>>()
    };
    let mut load: BTreeMap<(usize, u8, usize), (f64, f64)> = BTreeMap::new();
    for (pair, rate) in ends.iter().zip(rates) {
        assert!(rate.is_finite() && rate > 0.0, "{rates:?} for {ends:?}");
        for (passage, capacity) in passages(pair) {
            let (carried, most) = load.entry(passage).or_default();
            (*carried, *most) = (*carried + rate, most.max(capacity));
        }
    }
    assert!(
        load.values()
            .all(|(carried, most)| *carried <= most * 1.000_01),
        "{rates:?} for {ends:?}"
    );
    for pair in ends {
        let is_full = passages(pair)
            .iter()
            .any(|(passage, _)| load[passage].0 >= load[passage].1 * 0.9999);
        assert!(is_full, "a path could carry more: {rates:?} for {ends:?}");
    }
    assert!(
        negotiate::queue_pairs(0, &paths)
            .iter()
            .all(|count| (1..=MAX_LIST as u8).contains(count))
    );
}

/// This side's rails for the pairings: a Spark's four, two of which have only a link-local address.
fn own_rails() -> Vec<RailAdvert> {
    let gid = |text: &str| {
        text.parse::<std::net::Ipv6Addr>()
            .expect("an address")
            .octets()
    };
    let rail = |(at, address): (u8, &str)| RailAdvert {
        name: format!("roce{at}:1"),
        phys_port: format!("p{}", at % 2),
        attachment: Attachment {
            link: at / 2,
            link_mbps: 112_000,
            cable: at % 2,
            port_mbps: 200_000,
        },
        speed_mbps: 112_000,
        mtu_bytes: 4096,
        addresses: vec![Address {
            gid: gid(address),
            prefix: (at < 2).then_some(120),
        }],
        is_usable: true,
    };
    [
        (0, "::ffff:192.168.100.1"),
        (1, "::ffff:192.168.101.1"),
        (2, "fe80::2"),
        (3, "fe80::3"),
    ]
    .map(rail)
    .to_vec()
}

fn rail(number: usize) -> RailId {
    RailId::new(number).expect("a byte")
}

fn messages() -> Vec<(&'static str, Message)> {
    let qps = vec![
        QpEnd {
            number: 17,
            psn: 0xff_ffff,
        },
        QpEnd { number: 18, psn: 0 },
    ];
    let rails = own_rails();
    let pair = |at: u8, queue_pairs| PairOffer {
        connector_rail: at,
        connector_gid: rails[0].addresses[0].gid,
        acceptor_rail: rail(usize::from(at) + 1),
        acceptor: rails[usize::from(at)].attachment,
        acceptor_name: "rocep1s0f0:1".into(),
        acceptor_gid: [9; 16],
        mtu_bytes: 1024,
        queue_pairs,
    };
    let connected = PairReady::Connected {
        mailbox_rkey: 5,
        qps: qps.clone(),
    };
    let carries = PairGo::Carries { mailbox_rkey: 9 };
    let offer = Offer {
        name: "spark-2:77".into(),
        chunk_bytes: 1 << 30,
        pairs: vec![
            pair(0, Offered::Now(qps)),
            pair(1, Offered::Later(4)),
            pair(2, Offered::Late(1)),
        ],
    };
    let ready = Ready {
        mailbox_addr: 0x7f00_0000_1000,
        pairs: vec![
            connected,
            PairReady::NotYet(NotYet {
                why: "no route".into(),
                is_temporary: true,
            }),
        ],
    };
    let redial = RedialAt {
        port: NonZeroU16::MAX,
        token: [7; 16],
    };
    let go = Go {
        mailbox_addr: 0x7f00_0000_2000,
        pairs: vec![carries, PairGo::NotYet("no answer".into())],
        redial: Some(redial),
    };
    let frame = ControlFrame {
        number: 3,
        received: 2,
        awaits_confirmation: true,
        message: control::messages()[1].1.encode(),
    };
    vec![
        ("hello", Message::Hello(hello([3; 16], rails))),
        (
            "hello-without-rails",
            Message::Hello(hello([4; 16], Vec::new())),
        ),
        ("offer", Message::Offer(offer)),
        ("refuse", Message::Refuse("no rail in common".into())),
        ("ready", Message::Ready(ready)),
        ("go", Message::Go(go)),
        ("frame", Message::Control(frame)),
        (
            "redial",
            Message::Redial(Redial {
                token: [7; 16],
                attempt: 1,
            }),
        ),
        ("resumed", Message::Resumed),
        (
            "hello-withheld",
            Message::Hello(Hello {
                by_tcp: ByTcp::Withheld("x0:1".into()),
                ..hello([5; 16], Vec::new())
            }),
        ),
        (
            "streams",
            Message::Streams(Streams {
                name: "spark-3:9".into(),
                count: 4,
                token: [6; 16],
            }),
        ),
        (
            "stream",
            Message::Stream(Stream {
                token: [6; 16],
                number: 3,
            }),
        ),
        (
            "hello-by-tcp",
            Message::Hello(Hello {
                by_tcp: ByTcp::Allowed,
                ..hello([5; 16], Vec::new())
            }),
        ),
        ("carries", Message::Carries),
    ]
}

/// A connecting side's first message.
pub fn hello(token: [u8; 16], rails: Vec<RailAdvert>) -> Hello {
    let name = "spark-1:4242".into();
    let by_tcp = ByTcp::Off;
    let gpu = "NVIDIA GB10".into();
    let priority = Priority {
        traffic_class: 106,
        service_level: 3,
    };
    Hello {
        token,
        name,
        chunk_bytes: 8 << 20,
        qps_per_rail: 2,
        tuner_hash: 0,
        gpu,
        priority,
        by_tcp,
        rails,
    }
}

/// Messages of each kind without their header, and one message with its header.
pub fn seeds() -> Seeds {
    let seed = |(name, message): (&'static str, Message)| {
        let frame = message.encode();
        (name, [&frame[2..3], &frame[HEADER_BYTES..]].concat())
    };
    let mut seeds: Seeds = messages().into_iter().map(seed).collect();
    seeds.push((
        "with-header",
        [&[RAW][..], &Message::Refuse("in full".into()).encode()].concat(),
    ));
    seeds
}
