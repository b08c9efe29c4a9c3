//! Findings about the ports' counters since boot. Errors are judged by their share of the packets,
//! and lost links by their number.

use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::{Facts, Function};
use nccl_net_spark::counters::nic::TOLERATED_LOSS_ONE_IN;

struct Group {
    id: Id,
    /// The counters to add up, separated by blanks. Their names are those of rdma-core and of the
    /// kernel's drivers/infiniband/hw/mlx5/counters.c.
    names: &'static str,
    what: &'static str,
    cure: &'static str,
}

const GROUPS: &[Group] = &[
    Group {
        id: Id::Retransmissions,
        names: "local_ack_timeout_err packet_seq_err req_transport_retries_exceeded",
        what: "has sent packets again",
        cure: "ethtool -S NETDEV | grep -E 'discard|pause|err'    # then cable, MTU, pause frames at both ends",
    },
    Group {
        id: Id::OutOfSequence,
        names: "out_of_sequence",
        what: "has received packets out of sequence: some were lost on the way",
        cure: "ethtool -S NETDEV | grep -E 'discard|pause|err'    # then cable, switch, pause frames at both ends",
    },
    Group {
        id: Id::Congestion,
        names: "np_cnp_sent rp_cnp_handled",
        what: "has sent or taken congestion notifications, which slow the sender",
        cure: "ethtool -a NETDEV    # on a direct cable there should be none: is a switch or another job on it?",
    },
    Group {
        id: Id::LinkErrors,
        names: "symbol_error port_rcv_errors local_link_integrity_errors excessive_buffer_overrun_errors link_error_recovery rx_icrc_encapsulated",
        what: "has seen errors on the wire",
        cure: "sudo ethtool -m NETDEV    # then clean, re-seat or replace the cable",
    },
    Group {
        id: Id::ReceiverNotReady,
        names: "rnr_nak_retry_err out_of_buffer",
        what: "had no receive posted for messages",
        cure: "NCCL_DEBUG=INFO nccl-spark all-gather -b 8 -e 1G    # and report it: the plugin posts receives in advance",
    },
    Group {
        id: Id::Discards,
        names: "port_xmit_discards",
        what: "has dropped packets before sending them",
        cure: "ethtool -S NETDEV | grep discard    # then pause frames and MTU at both ends",
    },
];

pub(super) fn judge(facts: &Facts, found: &mut Vec<Finding>) {
    for rail in facts.functions.iter().filter(|function| function.is_rail) {
        let value = |name: &str| rail.counters.get(name).copied().unwrap_or(0);
        let packets = value("port_xmit_packets").saturating_add(value("port_rcv_packets"));
        for group in GROUPS {
            let count = group
                .names
                .split(' ')
                .map(value)
                .fold(0, u64::saturating_add);
            if count > 0 {
                found.push(finding(rail, group, count, packets));
            }
        }
        // A cable that was pulled a few times is no fault.
        let downed = value("link_downed");
        if downed > ORDINARY_DOWNED {
            let text = format!(
                "the link of {} has gone down {downed} times since boot",
                rail.device
            );
            let cure = format!(
                "sudo ethtool -m {}    # then re-seat or replace the cable",
                netdev(rail)
            );
            found.push(Id::FlappingLink.finding(text).cured_by(cure));
        }
    }
}

const ORDINARY_DOWNED: u64 = 10;

fn finding(rail: &Function, group: &Group, count: u64, packets: u64) -> Finding {
    let counted = |name| {
        rail.counters
            .get(name)
            .filter(|value| **value > 0)
            .map(|value| format!("{name} {value}"))
    };
    let names: Vec<String> = group.names.split(' ').filter_map(counted).collect();
    // Without a packet count the share is unknown, and the finding is only a note.
    let is_much = packets > 0 && count.saturating_mul(TOLERATED_LOSS_ONE_IN) > packets;
    let (severity, of) = match is_much {
        true => (
            Severity::Fragile,
            format!("{packets} packets, more than one in {TOLERATED_LOSS_ONE_IN}"),
        ),
        false => (Severity::Note, format!("{packets} packets")),
    };
    let text = format!(
        "{} {} ({} of {of})",
        rail.device,
        group.what,
        names.join(", ")
    );
    group
        .id
        .finding(text)
        .at(severity)
        .cured_by(group.cure.replace("NETDEV", netdev(rail)))
}

fn netdev(rail: &Function) -> &str {
    rail.netdev.as_deref().unwrap_or("its interface")
}
