//! Control messages that a lying peer may send.

use proto::wire::control::{ControlMessage, JoinAnswer};
use proto::wire::cts::Epoch;
use proto::wire::fields::{Address, Attachment, LaneEnd, QpEnd, RailAdvert};
use proto::wire::ids::LaneId;

pub const QPS: [QpEnd; 1] = [QpEnd {
    number: 0xff_ffff,
    psn: 0,
}];

pub fn lane(number: u64) -> LaneId {
    LaneId::new(number as usize).unwrap()
}

pub fn advert(prefix: Option<u8>) -> RailAdvert {
    RailAdvert {
        name: "x".to_owned(),
        phys_port: String::new(),
        attachment: Attachment {
            link: 0,
            link_mbps: 0,
            cable: 0,
            port_mbps: 1,
        },
        speed_mbps: 1,
        mtu_bytes: 4096,
        addresses: vec![Address {
            gid: [0x20; 16],
            prefix,
        }],
        is_usable: true,
    }
}

pub fn end(qps: &[QpEnd]) -> LaneEnd {
    LaneEnd {
        qps: qps.to_vec(),
        mailbox_rkey: 0,
    }
}

pub fn join(lane: LaneId, attempt: u8) -> ControlMessage {
    ControlMessage::Join {
        lane,
        attempt,
        rail: advert(None),
        end: end(&QPS),
    }
}

/// An answer to the first request for lane 1.
pub fn joined(mtu_bytes: u32, qps: &[QpEnd]) -> ControlMessage {
    ControlMessage::Joined {
        lane: lane(1),
        attempt: 1,
        answer: JoinAnswer {
            connector_gid: [0x20; 16],
            acceptor_gid: [0x21; 16],
            mtu_bytes,
            end: end(qps),
            epoch: Epoch::default(),
        },
    }
}

pub fn not_now(lane: LaneId, attempt: u8) -> ControlMessage {
    ControlMessage::NotNow {
        lane,
        attempt,
        why: "no".to_owned(),
    }
}
