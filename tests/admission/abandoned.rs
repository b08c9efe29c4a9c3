//! Handshakes that NCCL has begun and does not continue: after an abort it calls no more.

use crate::attack::{Listener, dial, host, read_frame};
use crate::common::{turn, until};
use crate::{hello_for, old_handshake};
use host::error::{Error, Network};
use nccl_net_spark::clock;
use nccl_net_spark::comm::Host;
use nccl_net_spark::comm::setup::pending::ABANDONED;
use proto::time::Instant;
use proto::wire::handle::{HANDLE_BYTES, Handle};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

const HANDSHAKES: usize = 20;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A listener that has answered HELLO with OFFER, so it has queue pairs. Its peer does not answer.
fn answered(old: &[Vec<u8>], to: &Arc<Host>) -> (Listener, TcpStream) {
    let listener = Listener::open(to);
    let mut peer = dial(listener.known.address);
    peer.write_all(&hello_for(&old[0], &listener)).unwrap();
    let mut reads = peer.try_clone().unwrap();
    let offer = std::thread::spawn(move || read_frame(&mut reads).expect("an OFFER"));
    until(|| {
        assert!(listener.listen.accept().unwrap().is_none());
        offer.is_finished().then_some(())
    });
    offer.join().unwrap();
    (listener, peer)
}

/// The handle of a peer that does not answer HELLO, after a first call of `connect`.
fn dialled(from: &Arc<Host>) -> (TcpListener, [u8; HANDLE_BYTES]) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut handle = Handle {
        address: listener.local_addr().unwrap(),
        token: [1; 16],
    }
    .encode();
    assert!(from.connect(&mut handle, None).unwrap().is_none());
    (listener, handle)
}

#[test]
fn abandoned_handshakes_leave_no_descriptor_and_their_next_call_fails() {
    let _turn = turn();
    let old = old_handshake();
    let hosts = [host(0), host(1)];
    let before = until(|| {
        // The service threads of the earlier connection may still be ending.
        let count = descriptors();
        std::thread::sleep(Duration::from_millis(100));
        (descriptors() == count).then_some(count)
    });
    let mut accepting: Vec<_> = (0..HANDSHAKES).map(|_| answered(&old, &hosts[1])).collect();
    let mut connecting: Vec<_> = (0..HANDSHAKES).map(|_| dialled(&hosts[0])).collect();
    assert!(
        descriptors() >= before + 5 * HANDSHAKES,
        "two sockets and a listener here, a listener and a socket there"
    );
    let give_up = |now: Instant| {
        accepting
            .iter()
            .for_each(|(listener, _)| listener.listen.give_up_abandoned(now));
        hosts[0].pending().give_up_abandoned(now);
    };
    give_up(clock::now());
    for (listener, _) in &accepting {
        assert!(
            listener.listen.accept().unwrap().is_none(),
            "given up although NCCL asks for it"
        );
    }
    for (_, handle) in &mut connecting {
        assert!(
            hosts[0].connect(handle, None).unwrap().is_none(),
            "given up although NCCL asks for it"
        );
    }
    give_up(clock::now() + ABANDONED);
    let has_ended = |error: &Error| matches!(error, Error::Network(Network::SetupEnded));
    for (listener, mut peer) in accepting.drain(..) {
        assert!(
            read_frame(&mut peer).is_none(),
            "the peer's connection is still open"
        );
        let error = listener.listen.accept().map(|_| ()).unwrap_err();
        assert!(has_ended(&error), "{error}");
    }
    for (_, mut handle) in connecting.drain(..) {
        let error = hosts[0].connect(&mut handle, None).map(|_| ()).unwrap_err();
        assert!(has_ended(&error), "{error}");
    }
    until(|| (descriptors() <= before).then_some(()));
}
