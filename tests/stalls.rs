//! Requests without progress, in virtual time. Each side with such a request logs one line for each
//! peer. The line names the cause. The connection ends with an error after
//! `NCCL_SPARK_STALL_ABORT_S`, and at both ends if data was acknowledged and never arrived. Without
//! a waiting request nothing is logged.

#![allow(unsafe_code)]

mod common;
mod sim;

use common::captured_log::CapturedLog;
use host::error::{Error, Internal, Quick, StallCause, TimedOut};
use nccl_net_spark::comm::{CurrentOperation, Purpose, RecvPart, Registration};
use proto::wire::control::ControlFrame;
use proto::wire::operation::Operation;
use sim::fabric::{Fabric, Pair, RAILS, Start};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::Level;
use verbs::HostMemory;

/// Index of the sending side in a [`Pair`]'s arrays.
const SENDER: usize = 0;
const BYTES: usize = 64;
const ROUND_NS: u64 = 50_000_000;

struct Bed {
    fabric: Fabric,
    log: CapturedLog,
    pairs: Vec<Pair>,
    /// True while the receivers' service thread does not run.
    is_receiver_stopped: bool,
    /// WARN lines other than those about stalls.
    warnings: Vec<String>,
    /// Memory of the sending side's host, for receives of a backward connection.
    into_sender: Arc<Registration>,
}

/// Lines about stalls, each with its time in seconds.
type Lines = Vec<(u64, String)>;

// One test only: a process has one fabric and one virtual clock.
#[test]
fn the_stall_warning_names_the_side_that_waits_and_the_cause() {
    // Above 80 s: the scenarios that must not abort wait that long.
    let fabric = Fabric::with_settings(&[("NCCL_SPARK_STALL_ABORT_S", "90")]);
    // SAFETY: the arena lives as long as the fabric, and no test reads it.
    let memory =
        unsafe { HostMemory::from_caller(fabric.from.as_ptr() as usize, fabric.from.len()) };
    let into_sender = fabric.hosts[0]
        .process()
        .register(memory, Purpose::Receive)
        .unwrap();
    let mut bed = Bed {
        fabric,
        log: Default::default(),
        pairs: Default::default(),
        is_receiver_stopped: Default::default(),
        warnings: Default::default(),
        into_sender,
    };
    bed.nothing_posted();
    bed.no_receive_posted();
    bed.no_send_posted();
    bed.stalls_again();
    bed.this_side_has_closed();
    bed.no_first_rail();
    bed.one_line_for_many_connections();
    bed.lost_grant();
    bed.receiver_does_not_test();
    bed.sender_does_not_test();
    bed.other_tag();
    bed.no_answer();
    bed.lost_data();
    bed.lost_arrival();
    bed.lost_arrival_while_a_rail_is_lost();
    bed.lost_arrival_delays_the_peer();
    bed.both_wait_for_each_other();
    bed.aborts();
}

impl Bed {
    fn connect(&mut self, rails: &[usize], count: usize) {
        self.is_receiver_stopped = false;
        self.pairs = (0..count)
            .map(|_| self.fabric.connect_over(rails, 1, Start::default()))
            .collect();
    }

    /// Lets this time pass, and calls `caller` in each round. Returns the lines about stalls.
    fn pass(&mut self, seconds: u64, mut caller: impl FnMut(&Self)) -> Lines {
        let log = self.log.clone();
        let begun = self.fabric.now_ns();
        let mut lines = Vec::new();
        while self.fabric.now_ns() - begun < seconds * 1_000_000_000 {
            log.capture(|| {
                caller(self);
                self.round();
            });
            let at = (self.fabric.now_ns() - begun) / 1_000_000_000;
            for (level, line) in log.take() {
                match line.starts_with("no progress with ") {
                    true if level == Level::WARN => lines.push((at, line)),
                    false if level == Level::WARN => self.warnings.push(line),
                    _ => {}
                }
            }
        }
        lines
    }

    fn round(&mut self) {
        (0..10).for_each(|_| self.fabric.pass(ROUND_NS / 10));
        let now = self.fabric.now();
        for pair in &mut self.pairs {
            let mut frames = [Vec::<ControlFrame>::new(), Vec::new()];
            for (side, driver) in pair
                .drivers
                .iter_mut()
                .enumerate()
                .filter(|(side, _)| *side == SENDER || !self.is_receiver_stopped)
            {
                driver.poll(now, false, &mut |frame| {
                    frames[1 - side].push(frame);
                    true
                });
            }
            for ((side, driver), frames) in pair.drivers.iter_mut().enumerate().zip(frames) {
                if side == SENDER || !self.is_receiver_stopped {
                    frames
                        .iter()
                        .for_each(|frame| driver.receive_frame(frame, now));
                }
            }
        }
        self.fabric
            .hosts
            .iter()
            .for_each(|host| host.process().tick(now));
    }

    fn isend(&self, pair: usize, tag: i32) -> Quick<Option<u16>> {
        let Pair { send, contexts, .. } = &self.pairs[pair];
        send.enter().unwrap().isend(
            &contexts[0],
            self.fabric.from.as_ptr() as u64,
            BYTES,
            tag,
            &self.fabric.out,
        )
    }

    fn is_sent(&self, request: u16) -> bool {
        let Pair { send, contexts, .. } = &self.pairs[0];
        send.enter()
            .unwrap()
            .test(&contexts[0], request)
            .unwrap()
            .is_some()
    }

    fn irecv(&self) -> u16 {
        self.try_irecv().expect("room")
    }

    fn try_irecv(&self) -> Option<u16> {
        let Pair { recv, contexts, .. } = &self.pairs[0];
        let part = RecvPart {
            addr: self.fabric.to.as_ptr() as u64,
            bytes: BYTES,
            tag: 0,
            memory: &self.fabric.into,
        };
        recv.enter()
            .unwrap()
            .irecv(&contexts[1], &[part], false)
            .unwrap()
    }

    fn is_received(&self, request: u16) -> bool {
        self.test_receive(0, request).unwrap()
    }

    fn test_receive(&self, pair: usize, request: u16) -> Quick<bool> {
        let Pair { recv, contexts, .. } = &self.pairs[pair];
        recv.enter().unwrap().test(&contexts[1], request, |_, _| {})
    }

    /// Adds a connection in the other direction. Its receiving side, on the sending side's host,
    /// posts a receive. Returns the request.
    fn connect_backward(&mut self) -> u16 {
        let start = Start {
            is_backward: true,
            ..Start::default()
        };
        self.pairs.push(self.fabric.connect_over(&[0, 1], 1, start));
        let Pair { recv, contexts, .. } = &self.pairs[1];
        let addr = self.fabric.from.as_ptr() as u64;
        let memory = &self.into_sender;
        let part = RecvPart {
            addr,
            bytes: BYTES,
            tag: 0,
            memory,
        };
        recv.enter()
            .unwrap()
            .irecv(&contexts[1], &[part], false)
            .unwrap()
            .expect("room")
    }

    /// Sends a message whose arrival the receiver's NIC does not show. Returns the receive.
    fn lose_an_arrival(&mut self) -> u16 {
        let receive = self.irecv();
        assert_eq!(self.pass(1, |_| ()), []);
        (0..RAILS).for_each(|rail| self.fabric.lose_arrivals(rail, 1));
        let send = self.isend(0, 0).unwrap().expect("a grant");
        assert_eq!(self.pass(1, |_| ()), []);
        (0..RAILS).for_each(|rail| self.fabric.lose_arrivals(rail, 0));
        assert!(self.is_sent(send) && !self.is_received(receive));
        receive
    }

    /// Waits until both ends have failed. Both must name the fault, and the sender must log it.
    /// Returns the time in seconds until both had failed.
    fn wait_for_loss(&mut self, receive: u16, seconds: u64) -> u64 {
        let mut errors = [None, None];
        let mut failed_at = 0;
        let begun = self.fabric.now_ns();
        self.warnings.clear();
        let lines = self.pass(seconds, |bed| {
            let both = [bed.isend(0, 0).err(), bed.test_receive(0, receive).err()];
            for (kept, error) in errors
                .iter_mut()
                .zip(both)
                .filter(|(kept, _)| kept.is_none())
            {
                failed_at = (bed.fabric.now_ns() - begun) / 1_000_000_000;
                *kept = error;
            }
        });
        assert_eq!(lines, [], "the ends fail before the limit for warnings");
        let [Some(at_sender), Some(at_receiver)] = errors else {
            panic!("{errors:?}")
        };
        assert!(
            matches!(
                *at_sender,
                Error::Internal(Internal::NotArrivedThere { .. })
            ),
            "{at_sender}"
        );
        assert!(
            matches!(
                *at_receiver,
                Error::Internal(Internal::NotArrivedHere { .. })
            ),
            "{at_receiver}"
        );
        for error in [&at_sender, &at_receiver] {
            assert!(
                error
                    .to_string()
                    .contains("a fault of this plugin or of a NIC; please report it"),
                "{error}"
            );
        }
        let never_arrived: Vec<_> = self
            .warnings
            .iter()
            .filter(|line| line.contains("never arrived"))
            .collect();
        assert_eq!(
            never_arrived,
            [&at_sender.to_string()],
            "the sender's caller may make no call"
        );
        failed_at
    }

    /// Posts a receive and a send, and waits until both service threads have seen the data. Returns
    /// the requests of the send and of the receive.
    fn exchange(&mut self) -> (u16, u16) {
        let receive = self.irecv();
        assert_eq!(self.pass(1, |_| ()), []);
        let send = self.isend(0, 0).unwrap().expect("a grant");
        assert_eq!(self.pass(1, |_| ()), []);
        (send, receive)
    }

    fn repeat_send(&mut self) -> Lines {
        self.pass(80, |bed| assert_eq!(bed.isend(0, 0).unwrap(), None))
    }

    fn nothing_posted(&mut self) {
        self.connect(&[0, 1], 1);
        for _ in 0..6 {
            let (send, receive) = self.exchange();
            // The service threads have seen the data, so the caller need not test.
            assert_eq!(
                self.pass(300, |_| ()),
                [],
                "warned although no request waits: the caller has not tested them"
            );
            assert!(self.is_sent(send) && self.is_received(receive));
            assert_eq!(
                self.pass(300, |_| ()),
                [],
                "warned although no request is posted"
            );
        }
    }

    fn no_receive_posted(&mut self) {
        self.connect(&[0, 1], 1);
        let (send, receive) = self.exchange();
        assert!(self.is_sent(send) && self.is_received(receive));
        assert_eq!(self.pass(30, |_| ()), []);
        let lines = self.repeat_send();
        assert_one_line(
            &lines,
            "end 1",
            "the peer's rank has posted no receive for 9",
            "GPU or its program is late",
        );
    }

    /// Announces an operation on each side's communicator, the sender's first.
    fn announce(&mut self, operations: [Option<Operation>; 2]) {
        for (context, operation) in self.pairs[0].contexts.iter().zip(operations) {
            let current = Box::leak(Box::new(CurrentOperation::new()));
            current.set(operation);
            context.operation.set(current).expect("announced once");
        }
    }

    fn no_send_posted(&mut self) {
        self.connect(&[0, 1], 1);
        let receive = self.irecv();
        let all_gather = Operation::of_bits(1 << 2, 1 << 1, 1 << 2);
        let all_reduce = Operation::of_bits(1 << 4, 1 << 1, 1);
        self.announce([all_reduce, all_gather]);
        let lines = self.pass(80, |bed| assert!(!bed.is_received(receive)));
        assert_one_line(
            &lines,
            "end 0",
            "the peer's rank has posted no send for 6",
            "it has not entered message 1, which this rank has posted, and is in AllReduce (Ring, LL); its GPU or its program is late",
        );
        assert!(lines[0].1.contains("s in AllGather (Ring, Simple) on "));
        let is_late = |line: &mut String| line.starts_with("end 1 has waited for 6");
        let late: Vec<String> = self.warnings.extract_if(.., is_late).collect();
        assert!(
            matches!(&late[..], [line] if line.contains("it has not entered message 1, for which the peer waits in AllGather (Ring, Simple); this rank is in AllReduce (Ring, LL)")),
            "{late:?}"
        );
    }

    fn stalls_again(&mut self) {
        self.connect(&[0, 1], 1);
        for _ in 0..2 {
            let lines = self.repeat_send();
            assert_one_line(
                &lines,
                "end 1",
                "the peer's rank has posted no receive for 6",
                "",
            );
            let (send, receive) = self.exchange();
            assert!(self.is_sent(send) && self.is_received(receive));
        }
    }

    fn this_side_has_closed(&mut self) {
        self.connect(&[0, 1], 1);
        self.irecv();
        assert_eq!(self.pass(1, |_| ()), []);
        let now = self.fabric.now();
        self.pairs[0].close(1 - SENDER, now);
        assert_eq!(
            self.pass(80, |_| ()),
            [],
            "warned although this side needs its receive no longer"
        );
    }

    fn no_first_rail(&mut self) {
        self.is_receiver_stopped = false;
        let start = Start {
            not_yet: 0b11,
            ..Start::default()
        };
        self.pairs = vec![self.fabric.connect_over(&[0, 1], 1, start)];
        (0..RAILS).for_each(|rail| self.fabric.set(rail, false));
        let lines = self.pass(80, |bed| {
            assert_eq!((bed.isend(0, 0).unwrap(), bed.try_irecv()), (None, None))
        });
        assert_eq!(
            lines,
            [],
            "other warnings tell of a connection without a first rail"
        );
        self.pairs.clear();
        (0..RAILS).for_each(|rail| self.fabric.set(rail, true));
    }

    fn one_line_for_many_connections(&mut self) {
        self.connect(&[0, 1], 3);
        let lines = self.pass(80, |bed| {
            (0..3).for_each(|pair| assert_eq!(bed.isend(pair, 0).unwrap(), None))
        });
        assert_one_line(
            &lines,
            "end 1",
            "the peer's rank has posted no receive for 6",
            "",
        );
        assert!(lines[0].1.contains(" on 3 connections: "), "{lines:?}");
    }

    fn lost_grant(&mut self) {
        self.connect(&[0, 1], 1);
        let receive = self.irecv();
        assert_eq!(self.pass(1, |_| ()), []);
        let ring = self.pairs[0].mailboxes[0].words();
        assert_ne!(
            ring[0].swap(0, Ordering::Relaxed),
            0,
            "the entry that gets lost"
        );
        let lines = self.pass(80, |bed| {
            assert_eq!(bed.isend(0, 0).unwrap(), None);
            assert!(!bed.is_received(receive));
        });
        let [sender, receiver] = by_side(&lines);
        assert_one_line(
            &sender,
            "end 1",
            "the peer has posted a receive, and its clear-to-send has not arrived here",
            "",
        );
        assert_one_line(
            &receiver,
            "end 0",
            "a receive is posted here, and its clear-to-send has not arrived at the peer",
            "",
        );
    }

    fn receiver_does_not_test(&mut self) {
        self.connect(&[0, 1], 1);
        let (send, _) = self.exchange();
        assert!(self.is_sent(send));
        let lines = self.repeat_send();
        assert_one_line(
            &lines,
            "end 1",
            "the peer's requests are done, and its program has not tested them for 6",
            "proxy thread",
        );
    }

    fn sender_does_not_test(&mut self) {
        self.connect(&[0, 1], 1);
        let (_, receive) = self.exchange();
        assert!(self.is_received(receive));
        let receive = self.irecv();
        let lines = self.pass(80, |bed| assert!(!bed.is_received(receive)));
        assert_one_line(
            &lines,
            "end 0",
            "the peer's requests are done, and its program has not tested them for 6",
            "proxy thread",
        );
    }

    fn other_tag(&mut self) {
        self.connect(&[0, 1], 1);
        let receive = self.irecv();
        let lines = self.pass(80, |bed| {
            assert_eq!(bed.isend(0, 7).unwrap(), None);
            assert!(!bed.is_received(receive));
        });
        let [sender, receiver] = by_side(&lines);
        assert_one_line(
            &sender,
            "end 1",
            "the peer has granted a receive, and the send waits on this host",
            "another tag",
        );
        assert_one_line(&receiver, "end 0", "the peer's rank has posted no send", "");
    }

    fn no_answer(&mut self) {
        self.connect(&[0, 1], 1);
        self.is_receiver_stopped = true;
        let lines = self.repeat_send();
        assert_one_line(
            &lines,
            "end 1",
            "the peer has not answered for",
            "its process is stopped",
        );
    }

    fn lost_data(&mut self) {
        self.connect(&[1, 2], 1);
        let receive = self.irecv();
        assert_eq!(self.pass(1, |_| ()), []);
        for rail in [1, 2] {
            self.fabric.set(rail, false);
        }
        let send = self.isend(0, 0).unwrap().expect("a grant");
        let lines = self.pass(80, |bed| {
            assert!(!bed.is_sent(send) && !bed.is_received(receive))
        });
        let [sender, receiver] = by_side(&lines);
        assert_one_line(
            &sender,
            "end 1",
            "the peer has not acknowledged the data posted on x2:1 (peer rail x2:1)",
            "",
        );
        assert_one_line(
            &receiver,
            "end 0",
            "the peer's data on x2:1 (peer rail x2:1) is not acknowledged",
            "",
        );
        self.pairs.clear();
        for rail in [1, 2] {
            self.fabric.set(rail, true);
        }
    }

    fn lost_arrival(&mut self) {
        self.connect(&[0, 1], 1);
        let (send, receive) = self.exchange();
        assert!(self.is_sent(send) && self.is_received(receive));
        let receive = self.lose_an_arrival();
        let seconds = self.wait_for_loss(receive, 30);
        // Two seconds have passed before, and both ends ask.
        assert!(
            (4..12).contains(&seconds),
            "after two questions and answers, not after {seconds} s"
        );
    }

    /// The attempts to reconnect the lost rail do not hide the loss of data.
    fn lost_arrival_while_a_rail_is_lost(&mut self) {
        self.connect(&[0, 1], 1);
        self.fabric.set(1, false);
        let (send, receive) = self.exchange();
        assert!(self.is_sent(send) && self.is_received(receive));
        let receive = self.lose_an_arrival();
        self.wait_for_loss(receive, 59);
        self.pairs.clear();
        self.fabric.set(1, true);
    }

    fn lost_arrival_delays_the_peer(&mut self) {
        self.connect(&[0, 1], 1);
        self.lose_an_arrival();
        let waiting = self.connect_backward();
        let lines = self.pass(80, |bed| assert!(!bed.test_receive(1, waiting).unwrap()));
        assert_one_line(
            &lines,
            "end 1",
            "the peer waits for data of this host on another connection (all data for the peer was acknowledged, and some has not arrived there)",
            "has made no progress here for",
        );
    }

    fn both_wait_for_each_other(&mut self) {
        self.connect(&[0, 1], 1);
        let receive = self.irecv();
        let waiting = self.connect_backward();
        let lines = self.pass(80, |bed| {
            assert!(!bed.is_received(receive) && !bed.test_receive(1, waiting).unwrap());
        });
        let cause = "the peer waits for data of this host on another connection (this host's rank has posted no send: it has not entered message 1, for which the peer waits)";
        for (lines, peer) in by_side(&lines).iter().zip(["end 1", "end 0"]) {
            assert_one_line(lines, peer, cause, "");
        }
        let mut error = None;
        self.pass(30, |bed| {
            error = error.take().or(bed.test_receive(1, waiting).err())
        });
        let error = error.expect("the connection's end").to_string();
        assert!(
            error.contains("NCCL_SPARK_STALL_ABORT_S=90") && error.contains(cause),
            "{error}"
        );
        self.pairs.clear();
    }

    fn aborts(&mut self) {
        self.connect(&[0, 1], 1);
        let lines = self.repeat_send();
        assert_one_line(
            &lines,
            "end 1",
            "the peer's rank has posted no receive for 6",
            "",
        );
        let mut error = None;
        self.pass(30, |bed| error = error.take().or(bed.isend(0, 0).err()));
        let error = *error.expect("the connection's end");
        let Error::TimedOut(TimedOut::Stalled {
            waited,
            limit: 90,
            why,
            ..
        }) = &error
        else {
            panic!("{error}")
        };
        assert!(
            (90..92).contains(&waited.as_secs()) && matches!(why, StallCause::NoReceive { .. }),
            "{error}"
        );
        assert!(
            error.to_string().contains("NCCL_SPARK_STALL_ABORT_S=90"),
            "{error}"
        );
        // Another cause, so that a new line would be due.
        self.is_receiver_stopped = true;
        assert_eq!(
            self.pass(200, |bed| assert!(bed.isend(0, 0).is_err())),
            [],
            "the connection has failed"
        );
    }
}

/// Asserts that `lines` is one line about `peer`, logged after 60 to 67 s. The line must give
/// `cause` and contain `more`.
fn assert_one_line(lines: &[(u64, String)], peer: &str, cause: &str, more: &str) {
    let [(at, line)] = lines else {
        panic!("{cause}: {lines:?}")
    };
    let is_timely =
        (60..=67).contains(at) && line.starts_with(&format!("no progress with {peer} for 6"));
    assert!(
        is_timely && line.contains(&format!(": {cause}")) && line.contains(more),
        "{at} s: {line}"
    );
}

fn by_side(lines: &[(u64, String)]) -> [Lines; 2] {
    ["with end 1 ", "with end 0 "].map(|peer| {
        lines
            .iter()
            .filter(|(_, line)| line.contains(peer))
            .cloned()
            .collect()
    })
}
