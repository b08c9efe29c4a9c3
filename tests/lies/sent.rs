//! A peer that posts sends in place of RDMA writes. Each send consumes a receive that this side has
//! posted on its queue pair.

use super::{Stage, breaks_protocol};
use crate::sim::fabric::ARENA;
use crate::sim::liar::Liar;
use host::error::Error;
use proto::wire::ids::{RailId, Slot};
use proto::wire::immediate::Immediate;
use softverbs::status;
use softverbs::work_request::Operation;
use verbs::HostMemory;

const WHOLE: Immediate = Immediate {
    slot: Slot::of(0),
    part: 0,
    generation: 0,
    shares: 1,
    share: 0,
    full_chunks: 0,
};
const ROOM: usize = 100;

impl Stage {
    /// Connects a sender that is not the plugin, and fills the receiver's memory with 0xee.
    fn with_liar(&mut self) -> Liar {
        let fabric = self.fabric();
        fabric.to.fill(0xee);
        let (pair, liar) = fabric.connect_liar();
        self.pair = pair;
        liar
    }

    /// Returns the address and the key that the first receive grants.
    fn granted(&mut self) -> (u64, u32) {
        let fabric = self.fabric();
        (
            fabric.to.as_ptr() as u64,
            fabric
                .into
                .keys(RailId::new(0).unwrap())
                .unwrap()
                .strict_rkey,
        )
    }

    /// Polls until the receive fails, and returns its error. Panics if the receive completes.
    fn receive_error(&mut self, liar: &Liar, receive: u16) -> Box<Error> {
        let error = self.poll_until(|stage| {
            liar.poll();
            stage
                .received(receive)
                .map(|done| assert!(!done, "it is done"))
                .err()
        });
        error.expect("the receive ended without an error")
    }

    /// Returns the end of the written part of the receiver's memory, in bytes.
    fn written_end(&mut self) -> usize {
        let to = &self.fabric().to;
        assert_eq!(to.len(), ARENA);
        to.iter()
            .rposition(|byte| *byte != 0xee)
            .map_or(0, |last| last + 1)
    }
}

/// Asserts that a message without an immediate caused the error.
fn assert_has_no_immediate(error: &Error) {
    assert!(
        breaks_protocol(
            error,
            "rail x0:1 to end 0",
            "message without immediate data"
        ),
        "{error:?}"
    );
}

#[test]
fn a_message_without_an_immediate_ends_the_connection_with_an_error_and_writes_nothing() {
    let mut stage = Stage::new(1);
    let right = Some(WHOLE.encode());
    // Each pair has the size and the immediate of a send. A write with the immediate `right` would
    // complete the receive.
    for (bytes, imm) in [
        (0, None),
        (1, None),
        (100, None),
        (4000, None),
        (0, right),
        (8, right),
        (100, right),
    ] {
        for is_early in [false, true] {
            let liar = stage.with_liar();
            if is_early {
                liar.post(Operation::Send, bytes, imm, (0, 0));
                stage.fabric().pass(1_000_000);
            }
            let receive = stage.irecv(&[ROOM]).unwrap().unwrap();
            if !is_early {
                liar.post(Operation::Send, bytes, imm, (0, 0));
            }
            let error = stage.receive_error(&liar, receive);
            assert_has_no_immediate(&error);
            assert_eq!(stage.written_end(), 0, "{bytes} bytes with {imm:?}");
            assert_eq!(stage.irecv(&[ROOM]), Err(error.clone()));
            assert_eq!(stage.received(receive), Err(error));
        }
    }
    stage.again();
    stage.check();
}

#[test]
fn a_write_without_an_immediate_does_not_complete_a_receive() {
    let mut stage = Stage::new(1);
    for imm in [None, Some(WHOLE.encode())] {
        let liar = stage.with_liar();
        let receive = stage.irecv(&[ROOM]).unwrap().unwrap();
        let to = stage.granted();
        liar.post(Operation::Write, ROOM as u32, None, to);
        for _ in 0..100 {
            stage.fabric().pass(1_000_000);
            liar.poll();
            assert_eq!(stage.received(receive), Ok(false));
        }
        liar.post(Operation::Send, 0, imm, (0, 0));
        assert_has_no_immediate(&stage.receive_error(&liar, receive));
        assert!(stage.written_end() <= ROOM);
    }
}

#[test]
fn messages_before_one_without_an_immediate_are_delivered() {
    let mut stage = Stage::new(1);
    let liar = stage.with_liar();
    let receives = [0, 1].map(|_| stage.irecv(&[ROOM]).unwrap().unwrap());
    let to = stage.granted();
    liar.post(Operation::Write, ROOM as u32, Some(WHOLE.encode()), to);
    let delivered = stage.poll_until(|stage| {
        let ended = liar.poll();
        assert!(
            ended.iter().all(|completion| completion.status == 0),
            "{ended:?}"
        );
        stage.received(receives[0]).unwrap().then_some(())
    });
    delivered.expect("a true message is delivered");
    assert!(stage.written_end() <= ROOM);
    liar.post(Operation::Send, 0, None, (0, 0));
    assert_has_no_immediate(&stage.receive_error(&liar, receives[1]));
}

#[test]
fn a_send_longer_than_its_receive_fails_at_the_sender() {
    let mut stage = Stage::new(1);
    let liar = stage.with_liar();
    let receive = stage.irecv(&[ROOM]).unwrap().unwrap();
    liar.post(Operation::Send, 64, None, (0, 0));
    let ended = stage.poll_until(|_| Some(liar.poll()).filter(|ended| !ended.is_empty()));
    let ended = ended.expect("the sender gets an error");
    assert_has_no_immediate(&stage.receive_error(&liar, receive));
    assert_eq!(ended[0].status, status::REMOTE_INVALID);
}

#[test]
fn a_key_is_valid_only_for_the_registered_memory() {
    let mut stage = Stage::new(1);
    // The region starts in the middle of a page, like heap memory.
    const FIRST: usize = 1000;
    const LENGTH: usize = 77;
    let start = stage.fabric().to.as_ptr() as u64 + FIRST as u64;
    // SAFETY: the memory is a part of `to`, which lives as long as the fabric. This test reads or
    // fills `to` only while the fabric's NICs do not run.
    let memory = unsafe { HostMemory::from_caller(start as usize, LENGTH) };
    let registration = stage.fabric().hosts[1]
        .process()
        .register(memory, nccl_net_spark::comm::Purpose::Receive)
        .unwrap();
    let keys = registration.keys(RailId::new(0).unwrap()).unwrap();
    let end = start + LENGTH as u64;
    for key in [keys.strict_rkey, keys.relaxed_rkey] {
        for (addr, bytes, is_inside) in [
            (start, LENGTH as u32, true),
            (end - 1, 1, true),
            (start - 1, 1, false),
            (start - 1, 2, false),
            (end, 1, false),
            (end - 1, 2, false),
        ] {
            // A new liar each time, because a queue pair ends after a refused write.
            let liar = stage.with_liar();
            liar.post(Operation::Write, bytes, None, (addr, key));
            let ended = stage
                .poll_until(|_| Some(liar.poll()).filter(|ended| !ended.is_empty()))
                .expect("a completion");
            let wanted = if is_inside { 0 } else { status::REMOTE_ACCESS };
            assert_eq!(
                ended[0].status,
                wanted,
                "{bytes} bytes at {}",
                addr.wrapping_sub(start).cast_signed()
            );
            let to = &stage.fabric().to;
            let written = to.iter().filter(|byte| **byte != 0xee).count();
            assert_eq!(written, if is_inside { bytes as usize } else { 0 });
        }
    }
    // This side does not read beyond the region either.
    assert!(
        registration.covers(start, LENGTH)
            && !registration.covers(start - 1, 1)
            && !registration.covers(end, 1)
    );
    assert!(
        registration.readable(end - 1, 1).is_some() && registration.readable(end - 1, 2).is_none()
    );
}
