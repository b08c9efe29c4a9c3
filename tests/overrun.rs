//! An overrun of the plugin's completion queue, in real time over the software fabric. An overrun
//! cannot happen in normal operation (`completions.rs`). So the fabric treats a queue with room as
//! full.

#![allow(unsafe_code)]

mod common;

use common::comms::{Receiving, Sending};
use common::{fill, is_filled, until};
use nccl_net_spark::comm::RecvPart;
use nccl_net_spark::config::Config;
use nccl_net_spark::error::Error;
use nccl_net_spark::plugin::bring_up;
use nccl_net_spark::verbs::HostMemory;
use softverbs::control::{Action, control};
use std::path::Path;

const RAILS: [&str; 2] = ["rocep1s0f0", "roceP2p1s0f0"];

#[test]
fn an_overrun_ends_the_receivers_connection_with_an_error_that_the_sender_gets_too() {
    let (rails, library) = common::test_rails();
    let mut variables = vec![
        ("NCCL_IB_HCA".to_owned(), rails[0].clone()),
        ("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()),
    ];
    // The sender waits for this time, because the receiver never confirms that it has fenced the
    // rail.
    variables.push(("NCCL_SPARK_LOSS_TIMEOUT_S".to_owned(), "1".to_owned()));
    variables.extend(library);
    // Both ends use one host. With two, this process would open each device twice, and only one of
    // the two contexts would get an event.
    let host = bring_up(Config::from_variables(&variables).unwrap())
        .unwrap()
        .0;
    let (listener, mut handle) = host.listen().unwrap();
    let mut send = None;
    let mut recv = None;
    let (send, recv) = until(|| {
        send = send
            .take()
            .or_else(|| host.connect(&mut handle, None).unwrap());
        recv = recv.take().or_else(|| listener.accept().unwrap());
        if send.is_some() && recv.is_some() {
            send.take().zip(recv.take())
        } else {
            None
        }
    });
    let mut from = vec![0_u8; 4096];
    let to = vec![0_u8; 4096];
    fill(&mut from, 1);
    // SAFETY: both buffers live until the end of the test, after the connection; received bytes are
    // read after the receive is done.
    let memory =
        |bytes: &[u8]| unsafe { HostMemory::from_caller(bytes.as_ptr() as usize, bytes.len()) };
    let out = send.register(memory(&from)).unwrap();
    let into = recv.register(memory(&to)).unwrap();
    let part = || RecvPart {
        addr: to.as_ptr() as u64,
        bytes: to.len(),
        tag: 3,
        memory: &into,
    };
    let receive = until(|| recv.irecv(&[part()], false).unwrap());
    let request = until(|| {
        send.isend(from.as_ptr() as u64, from.len(), 3, &out)
            .unwrap()
    });
    until(|| {
        recv.test(receive, |_, bytes| assert_eq!(bytes, 4096))
            .unwrap()
            .then_some(())
    });
    until(|| send.test(request).unwrap());
    assert!(is_filled(&to, 1), "all is well so far");

    // The fault hits the receiver. Nothing is sent, so the next completion is that of a grant:
    // every sixteenth grant is signaled.
    overrun(1);
    let mut error = None;
    let mut receives: Vec<u16> = (0..20)
        .map_while(|_| until_granted(|| recv.irecv(&[part()], false), &mut error))
        .collect();
    let receive = receives.pop().unwrap_or(receive);
    let error = error.unwrap_or_else(|| until(|| recv.test(receive, |_, _| ()).err()).to_string());
    assert!(
        error.contains("IBV_EVENT_CQ_ERR") && RAILS.iter().any(|rail| error.contains(rail)),
        "{error}"
    );
    overrun(0);
    // The sender gets the error, at the latest through its own sends and tests.
    let mut sends = Vec::new();
    until(
        || match send.isend(from.as_ptr() as u64, from.len(), 3, &out) {
            Ok(Some(request)) => {
                sends.push(request);
                None
            }
            Ok(None) => sends.iter().find_map(|request| send.test(*request).err()),
            Err(error) => Some(error),
        },
    );
}

/// Returns a granted receive, or `None` with the reason in `error` if the connection has failed.
fn until_granted(
    mut irecv: impl FnMut() -> Result<Option<u16>, Box<Error>>,
    error: &mut Option<String>,
) -> Option<u16> {
    until(|| match irecv() {
        Ok(granted) => granted.map(Some),
        Err(failed) => {
            *error = Some(failed.to_string());
            Some(None)
        }
    })
}

fn overrun(completions: u32) {
    let dir = std::env::var("SOFTVERBS_DIR").unwrap();
    let fabric = std::env::var("SOFTVERBS_FABRIC").unwrap();
    RAILS.iter().for_each(|rail| {
        control(
            Path::new(&dir),
            &fabric,
            None,
            rail,
            Action::Overrun(completions),
        )
        .unwrap()
    });
}
