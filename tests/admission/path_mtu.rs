//! Path MTUs in HELLO and OFFER that a port cannot use, or that do not exist.

use crate::attack::{Listener, connect_through_proxy, decoded, dial, host, proxy};
use crate::common::captured_log::CapturedLog;
use crate::common::ends::Ends;
use crate::common::turn;
use crate::common::until;
use host::error::Error;
use nccl_net_spark::comm::{Host, Rail};
use proto::wire::message::{Hello, Message};
use std::io::Write;
use std::sync::Arc;
use tracing::Level;

const NO_MTUS: [u32; 8] = [0, 1, 255, 1023, 1500, 4095, 8192, u32::MAX];

/// Returns the path MTU of a host's ports. Checks that all ports have the same path MTU, and that
/// it is below 4096, the largest that exists: the tests need a larger one.
fn own_mtu(host: &Host) -> u32 {
    let mtu = |rail: &Arc<Rail>| {
        rail.device
            .pd()
            .unwrap()
            .context()
            .port(rail.info.port)
            .unwrap()
            .active_mtu_bytes
    };
    let mtus: Vec<u32> = host.process().rails.iter().map(mtu).collect();
    assert!(
        mtus.iter().all(|mtu| *mtu == mtus[0] && *mtu < 4096),
        "{mtus:?}: nothing is above, or they differ"
    );
    mtus[0]
}

/// Connects through a proxy that falsifies message number `place`: 0 is the HELLO, 1 is the OFFER.
/// The proxy sets the path MTU to `mtu` for the HELLO's rails, or for the OFFER's pairs, from index
/// `first` on.
fn lied(hosts: &[Arc<Host>; 2], place: usize, first: usize, mtu: u32) -> Result<Ends, Error> {
    let listener = Listener::open(&hosts[1]);
    let (handle, _taken) = proxy(&listener, move |at, frame| {
        if at != place {
            return frame;
        }
        let mut message = decoded(&frame);
        match &mut message {
            Message::Hello(hello) => hello.rails[first..]
                .iter_mut()
                .for_each(|rail| rail.mtu_bytes = mtu),
            Message::Offer(offer) => offer.pairs[first..]
                .iter_mut()
                .for_each(|pair| pair.mtu_bytes = mtu),
            other => panic!("a {} has no path MTU", other.kind()),
        }
        message.encode()
    });
    listener.try_by(&hosts[0], handle)
}

fn larger_than(own: u32) -> impl Iterator<Item = u32> {
    [512, 1024, 2048, 4096]
        .into_iter()
        .filter(move |mtu| *mtu > own)
}

#[test]
fn an_offer_above_the_ports_path_mtu_is_refused_with_an_error_and_the_others_continue() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let own = own_mtu(&hosts[0]);
    let (other, _taken) = connect_through_proxy(&hosts);
    for mtu in larger_than(own) {
        // The connecting end reports the reason in READY. So the accepting end fails first, with
        // that reason, and sends it back as its refusal.
        let error = lied(&hosts, 1, 0, mtu)
            .err()
            .expect("no rail is left")
            .to_string();
        let reason = format!(
            "the peer asked for path MTU {mtu} on {}, whose port has {own}",
            hosts[0].process().rails[0].name()
        );
        assert!(
            error.contains(&reason) && error.contains(&format!(":{}", std::process::id())),
            "{error}"
        );
        other.check(20);
    }
}

#[test]
fn a_rail_with_an_offer_above_its_path_mtu_is_left_out_with_a_log_line() {
    let _turn = turn();
    let own = own_mtu(&host(0));
    for mtu in larger_than(own) {
        // A host logs the line once for all connections with a peer, so each round needs new hosts.
        let hosts = [host(0), host(1)];
        let log = CapturedLog::default();
        let met = log
            .capture(|| lied(&hosts, 1, 1, mtu))
            .expect("a rail is left");
        let left_out = hosts[0].process().rails[1].name();
        let reason =
            format!("the peer asked for path MTU {mtu} on {left_out}, whose port has {own}");
        let lines: Vec<String> = log
            .take()
            .into_iter()
            .filter(|(level, _)| *level <= Level::INFO)
            .map(|(_, line)| line)
            .collect();
        let count = lines
            .iter()
            .filter(|line| line.contains(&reason) && line.contains(&hosts[0].process().name))
            .count();
        assert_eq!(count, 2, "{lines:?}");
        met.check(21);
    }
}

#[test]
fn an_invalid_path_mtu_is_refused_with_an_error_and_other_connections_continue() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let (other, _taken) = connect_through_proxy(&hosts);
    for mtu in NO_MTUS {
        let error = lied(&hosts, 1, 0, mtu)
            .err()
            .expect("it cannot be")
            .to_string();
        let reason = format!("path MTU {mtu} is not 256, 512, 1024, 2048 or 4096");
        assert!(
            error.contains(&reason) && error.contains("127.0.0.1:"),
            "{error}"
        );
        other.check(22);
    }
}

#[test]
fn a_hello_with_an_unknown_path_mtu_is_not_admitted() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    for mtu in NO_MTUS {
        let listener = Listener::open(&hosts[1]);
        let log = CapturedLog::default();
        let mut hello = hello_of(&hosts, &listener);
        let reason = format!("path MTU {mtu} is not 256, 512, 1024");
        hello.rails[0].mtu_bytes = mtu;
        let mut client = dial(listener.known.address);
        client.write_all(&Message::Hello(hello).encode()).unwrap();
        let lines = log.capture(|| {
            until(|| {
                assert!(listener.listen.accept().unwrap().is_none());
                let lines = log.take();
                lines
                    .iter()
                    .any(|(_, line)| line.contains("rejected"))
                    .then_some(lines)
            })
        });
        let has_reason = |line: &str| line.contains(&reason) && line.contains("127.0.0.1:");
        assert!(
            lines
                .iter()
                .any(|(level, line)| *level == Level::INFO && has_reason(line)),
            "{lines:?}"
        );
        // The liar had the token, but did not take the honest peer's place.
        listener.meet(&hosts[0]).check(23);
    }
}

fn hello_of(hosts: &[Arc<Host>; 2], listener: &Listener) -> Hello {
    let (_met, taken) = connect_through_proxy(hosts);
    let Message::Hello(mut hello) = decoded(&taken.frames[0]) else {
        panic!("the first message is no HELLO")
    };
    hello.token = listener.known.token;
    hello
}

#[test]
fn the_smaller_of_both_path_mtus_is_used_whatever_a_hello_says() {
    let _turn = turn();
    let hosts = [host(0), host(1)];
    let own = own_mtu(&hosts[0]);
    for mtu in [256, 512, 1024, 2048, 4096] {
        let listener = Listener::open(&hosts[1]);
        let (handle, taken) = proxy(&listener, move |at, frame| match (at, decoded(&frame)) {
            (0, Message::Hello(mut hello)) => {
                hello.rails.iter_mut().for_each(|rail| rail.mtu_bytes = mtu);
                Message::Hello(hello).encode()
            }
            _ => frame,
        });
        listener.try_by(&hosts[0], handle).unwrap().check(24);
        let Message::Offer(offer) = decoded(&taken.join().unwrap().frames[1]) else {
            panic!("no offer")
        };
        assert!(
            offer
                .pairs
                .iter()
                .all(|pair| pair.mtu_bytes == mtu.min(own)),
            "{mtu}: {offer:?}"
        );
    }
}
