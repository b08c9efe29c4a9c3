//! Counters of the ports. They count since boot, so what matters is how many there are to so many packets.

use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::{Facts, Function};

/// One in so many packets is where losses begin to show in bandwidth: each costs a round of retransmission, some 100 us of a link
/// that sends 3 million packets of 4 KiB a second.
const ONE_IN: u64 = 100_000;

struct Group {
    id: Id,
    /// Counters whose sum counts (rdma-core's and mlx5's names: drivers/infiniband/hw/mlx5/counters.c).
    names: &'static [&'static str],
    what: &'static str,
    cure: &'static str,
}

const GROUPS: &[Group] = &[
    Group {
        id: Id::Retransmissions,
        names: &["local_ack_timeout_err", "packet_seq_err", "req_transport_retries_exceeded"],
        what: "has sent packets again",
        cure: "ethtool -S NETDEV | grep -E 'discard|pause|err'    # then cable, MTU, pause frames at both ends",
    },
    Group {
        id: Id::OutOfSequence,
        names: &["out_of_sequence"],
        what: "has received packets out of sequence: some were lost on the way",
        cure: "ethtool -S NETDEV | grep -E 'discard|pause|err'    # then cable, switch, pause frames at both ends",
    },
    Group {
        id: Id::Congestion,
        names: &["np_cnp_sent", "rp_cnp_handled"],
        what: "has sent or taken congestion notifications, which slow the sender",
        cure: "ethtool -a NETDEV    # on a direct cable there should be none: is a switch or another job on it?",
    },
    Group {
        id: Id::LinkErrors,
        names: &[
            "symbol_error",
            "port_rcv_errors",
            "local_link_integrity_errors",
            "excessive_buffer_overrun_errors",
            "link_error_recovery",
            "rx_icrc_encapsulated",
        ],
        what: "has seen errors on the wire",
        cure: "sudo ethtool -m NETDEV    # then clean, re-seat or replace the cable",
    },
    Group {
        id: Id::ReceiverNotReady,
        names: &["rnr_nak_retry_err", "out_of_buffer"],
        what: "had no receive posted for messages",
        cure: "NCCL_DEBUG=INFO nccl-spark all-gather -b 8 -e 1G    # and report it: the plugin posts receives in advance",
    },
    Group {
        id: Id::Discards,
        names: &["port_xmit_discards"],
        what: "has dropped packets before sending them",
        cure: "ethtool -S NETDEV | grep discard    # then pause frames and MTU at both ends",
    },
];

pub(super) fn judge(facts: &Facts, found: &mut Vec<Finding>) {
    for rail in facts.functions.iter().filter(|function| function.is_rail) {
        let value = |name: &str| rail.counters.get(name).copied().unwrap_or(0);
        let packets = value("port_xmit_packets").saturating_add(value("port_rcv_packets"));
        for group in GROUPS {
            let count = group.names.iter().map(|name| value(name)).fold(0, u64::saturating_add);
            if count > 0 {
                found.push(finding(rail, group, count, packets));
            }
        }
        link_downed(rail, value("link_downed"), found);
    }
}

fn finding(rail: &Function, group: &Group, count: u64, packets: u64) -> Finding {
    let names: Vec<String> = group
        .names
        .iter()
        .filter_map(|name| Some((name, rail.counters.get(*name).filter(|value| **value > 0)?)))
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    // Without a count of packets nobody can say whether it is much.
    let is_much = packets > 0 && count.saturating_mul(ONE_IN) > packets;
    let (severity, of) = match is_much {
        true => (Severity::Fragile, format!("{packets} packets, more than one in {ONE_IN}")),
        false => (Severity::Note, format!("{packets} packets")),
    };
    let text = format!("{} {} ({} of {of})", rail.device, group.what, names.join(", "));
    let netdev = rail.netdev.as_deref().unwrap_or("its interface");
    Finding::new(severity, group.id, text).cured_by(group.cure.replace("NETDEV", netdev))
}

/// A cable that was pulled once is ordinary.
fn link_downed(rail: &Function, count: u64, found: &mut Vec<Finding>) {
    const ORDINARY: u64 = 10;
    if count > ORDINARY {
        let text = format!("the link of {} has gone down {count} times since boot", rail.device);
        let netdev = rail.netdev.as_deref().unwrap_or("its interface");
        let cure = format!("sudo ethtool -m {netdev}    # then re-seat or replace the cable");
        found.push(Finding::new(Severity::Fragile, Id::FlappingLink, text).cured_by(cure));
    }
}
