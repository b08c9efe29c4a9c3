//! Parts of a connection that is made without a handshake. Index 0 is the sending side, index 1 the
//! receiving side.

use super::waker::Mark;
use nccl_net_spark::comm::datapath::context::PathContext;
use nccl_net_spark::comm::datapath::lane::Lane;
use nccl_net_spark::comm::datapath::mailbox::Mailboxes;
use nccl_net_spark::comm::datapath::peer::Peer;
use nccl_net_spark::comm::process::Process;
use nccl_net_spark::comm::recovery::attempt::ManagedRail;
use proto::flow::paths::End;
use proto::flow::recovery::{Missing, PathChoice};
use proto::wire::ids::LaneId;
use std::sync::Arc;
use verbs::Region;

/// Registers the mailbox of each side for its lanes that have queue pairs, and gives each lane the
/// key of its peer.
pub fn exchange_mailbox_keys(lanes: &mut [Vec<Lane>; 2], mailboxes: &[Arc<Region>; 2]) {
    for (lanes, mailbox) in lanes.iter_mut().zip(mailboxes) {
        for lane in lanes.iter_mut().filter(|lane| !lane.ends().is_empty()) {
            lane.register_mailbox(mailbox).unwrap();
        }
    }
    let [senders, receivers] = lanes;
    for (sender, receiver) in senders.iter_mut().zip(receivers) {
        sender.peer_mailbox_rkey = receiver.mailbox_rkey();
        receiver.peer_mailbox_rkey = sender.mailbox_rkey();
    }
}

/// Returns the mailboxes as `side` sees them.
pub fn mailboxes_of(side: usize, mailboxes: &[Arc<Region>; 2]) -> Mailboxes {
    Mailboxes {
        region: Arc::clone(&mailboxes[side]),
        peer_addr: mailboxes[1 - side].addr(),
    }
}

pub fn context(process: &Process, peer_name: String, waker: Arc<Mark>) -> Arc<PathContext> {
    Arc::new(PathContext {
        peer: Arc::new(Peer::new(peer_name)),
        registrations: Arc::clone(&process.registrations),
        stall_warn: process.config.data_path.stall_warn,
        waker,
        operation: Default::default(),
    })
}

/// Returns the path of each lane. The rails at both ends of a path are alike.
pub fn paths(lanes: &[Lane]) -> Vec<[End; 2]> {
    let path = |lane: &Lane| {
        let end = End {
            rail: lane.rail.id,
            attachment: lane.rail.info.attachment,
        };
        [end; 2]
    };
    lanes.iter().map(path).collect()
}

/// Returns the rails that a driver manages for these lanes.
pub fn managed_rails(lanes: &[Lane], queue_count: usize) -> Vec<ManagedRail> {
    let managed = |lane| ManagedRail::of(lane, queue_count);
    lanes.iter().map(managed).collect()
}

/// Returns the rails that begin as lost, or late if `is_late` is true: those with a bit in
/// `not_yet`. Their path is unlike any that an attempt will choose.
pub fn missing(not_yet: u8, lanes: usize, is_late: bool) -> Vec<Missing> {
    LaneId::all(lanes)
        .filter(|lane| not_yet >> lane.index() & 1 == 1)
        .map(|lane| Missing {
            lane,
            is_late,
            path: PathChoice {
                peer_gid: [0; 16],
                mtu_bytes: 4096,
            },
            why: "not yet".to_owned(),
        })
        .collect()
}
