//! Findings about the ports' counters since boot. Errors are judged by their share of the packets,
//! and lost links by their number.

use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::finding::{Kind, kinds};
use crate::commands::doctor::look::{Facts, Function};
use crate::output::numbers::count;
use host::counters::nic::TOLERATED_LOSS_ONE_IN;
use host::nic::{HOT_MODULE_MARK, MLX5_COUNTERS, Meaning};

kinds! {
    MODULE_FAULT = Fragile "module-fault": "the kernel log has errors of a port's cable or module", "`ethtool -m`; a passive cable if the module is hot";
    RETRANSMISSIONS = Fragile "retransmissions": "a rail has sent packets again", "[Loss](#loss)";
    OUT_OF_SEQUENCE = Fragile "out-of-sequence": "packets were lost on the way to a rail", "[Loss](#loss)";
    CONGESTION = Fragile "congestion": "a rail was slowed by congestion notifications", "look for other jobs, or a switch that marks packets";
    LINK_ERRORS = Fragile "link-errors": "a rail has seen errors on the wire", "clean, re-seat or replace the cable";
    RECEIVER_NOT_READY = Fragile "receiver-not-ready": "messages came for which no receive was posted", "report it, with the job's log";
    DISCARDS = Fragile "discards": "a rail has dropped packets before sending them", "pause frames and MTU at both ends";
    FLAPPING_LINK = Fragile "flapping-link": "a rail's link has gone down often", "re-seat or replace the cable";
}

struct Group {
    id: &'static Kind,
    /// Meanings of the counters to add up.
    meanings: &'static [Meaning],
    what: &'static str,
    cure: &'static str,
}

const GROUPS: &[Group] = &[
    Group {
        id: RETRANSMISSIONS,
        meanings: &[Meaning::Unacknowledged, Meaning::LostSent],
        what: "has sent packets again",
        cure: "ethtool -S NETDEV | grep -E 'discard|pause|err'    # then cable, MTU, pause frames at both ends",
    },
    Group {
        id: OUT_OF_SEQUENCE,
        meanings: &[Meaning::LostReceived],
        what: "has received packets out of sequence: some were lost on the way",
        cure: "ethtool -S NETDEV | grep -E 'discard|pause|err'    # then cable, switch, pause frames at both ends",
    },
    Group {
        id: CONGESTION,
        meanings: &[Meaning::Congestion],
        what: "has sent or taken congestion notifications, which slow the sender",
        cure: "ethtool -a NETDEV    # on a direct cable there should be none: is a switch or another job on it?",
    },
    Group {
        id: LINK_ERRORS,
        meanings: &[Meaning::LinkError],
        what: "has seen errors on the wire",
        cure: "sudo ethtool -m NETDEV    # then clean, re-seat or replace the cable",
    },
    Group {
        id: RECEIVER_NOT_READY,
        meanings: &[Meaning::NotReady],
        what: "had no receive posted for messages",
        cure: "NCCL_DEBUG=INFO nccl-spark all-gather -b 8 -e 1G    # and report it: the plugin posts receives in advance",
    },
    Group {
        id: DISCARDS,
        meanings: &[Meaning::Discarded],
        what: "has dropped packets before sending them",
        cure: "ethtool -S NETDEV | grep discard    # then pause frames and MTU at both ends",
    },
];

pub(super) fn judge(facts: &Facts, found: &mut Vec<Finding>) {
    for rail in facts.functions.iter().filter(|function| function.is_rail) {
        let packets = sum(rail, &[Meaning::PacketsSent, Meaning::PacketsReceived]);
        for group in GROUPS {
            let events = sum(rail, group.meanings);
            if events > 0 {
                found.push(finding(rail, group, events, packets));
            }
        }
    }
    facts
        .functions
        .iter()
        .for_each(|function| flapping_link(function, found));
    module_faults(facts, found);
}

/// Returns the values of a function's counters with these meanings.
fn values<'a>(
    function: &'a Function,
    meanings: &'a [Meaning],
) -> impl Iterator<Item = (&'static str, u64)> + 'a {
    let wanted = MLX5_COUNTERS
        .iter()
        .filter(|counter| meanings.contains(&counter.meaning));
    wanted.filter_map(|counter| Some((counter.name, *function.counters.get(counter.name)?)))
}

fn sum(function: &Function, meanings: &[Meaning]) -> u64 {
    values(function, meanings)
        .map(|(_, value)| value)
        .fold(0, u64::saturating_add)
}

/// Finds a link that has gone down often. A cable that was pulled a few times is no fault. The
/// function need not be a rail now.
fn flapping_link(function: &Function, found: &mut Vec<Finding>) {
    let downed = sum(function, &[Meaning::LinkDown]);
    if downed > ORDINARY_DOWNED {
        let text = format!(
            "the link of {} has gone down {downed} times since boot",
            function.device
        );
        let cure = format!(
            "sudo ethtool -m {}    # then re-seat or replace the cable",
            netdev(function)
        );
        found.push(FLAPPING_LINK.finding(text).cured_by(cure));
    }
}

/// Finds the kernel's messages about the cable or module of a port.
fn module_faults(facts: &Facts, found: &mut Vec<Finding>) {
    let log = &facts.kernel_log.module;
    let Some(last) = log.last() else {
        return;
    };
    let is_hot = log.iter().any(|line| line.contains(HOT_MODULE_MARK));
    let why = if is_hot {
        "a module overheats, which takes the link down: some machines blow their exhaust over the \
         cages, and a passive cable (DAC) stays cool"
    } else {
        "the cable or module is faulty, or not for this port"
    };
    let text = format!(
        "the kernel log has {} about the cable or module of a port, the last: {last}: {why}",
        count(log.len(), "line")
    );
    let netdevs: Vec<&str> = facts
        .functions
        .iter()
        .filter(|one| {
            one.pci
                .as_ref()
                .is_some_and(|pci| last.contains(&pci.address))
        })
        .filter_map(|one| one.netdev.as_deref())
        .collect();
    let cure = format!(
        "sudo ethtool -m {}    # temperature and type of the module",
        netdevs.first().unwrap_or(&"NETDEV")
    );
    found.push(MODULE_FAULT.finding(text).cured_by(cure));
}

const ORDINARY_DOWNED: u64 = 10;

fn finding(rail: &Function, group: &Group, events: u64, packets: u64) -> Finding {
    let names: Vec<String> = values(rail, group.meanings)
        .filter(|(_, value)| *value > 0)
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    // Without a packet count the share is unknown, and the finding is only a note.
    let is_much = packets > 0 && events.saturating_mul(TOLERATED_LOSS_ONE_IN) > packets;
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

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::bed::KERNEL_LOG;
    use crate::commands::doctor::tests::faults::{faults, one, with};

    faults! {
        "a module that overheats": with(one(), |bed| bed.write("dev/kmsg", &format!("{KERNEL_LOG}\
6,1100,9934567,-;mlx5_core 0000:01:00.0: Port module event[info]: module 0, Cable plugged
3,1101,9934568,-;mlx5_core 0000:01:00.0: Port module event[error]: module 0, Cable error, High Temperature
"))) => Fragile "module-fault" ["1 line", "overheats", "Cable error, High Temperature"] "ethtool -m enp1s0f0np0";
        "a link of a port that is down flaps": with(one(), |bed| bed.port("rocep1s0f1", "counters/link_downed", "40\n")) =>
            Fragile "flapping-link" ["rocep1s0f1", "40 times"] "ethtool -m enp1s0f1np1";
        "retransmissions, one in 1,000": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/local_ack_timeout_err", "100000\n")) =>
            Fragile "retransmissions" ["rocep1s0f0", "local_ack_timeout_err 100000"] "ethtool -S enp1s0f0np0";
        "a few retransmissions": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/packet_seq_err", "3\n")) =>
            Note "retransmissions" ["packet_seq_err 3"] "ethtool";
        "packets out of sequence": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/out_of_sequence", "50000\n")) =>
            Fragile "out-of-sequence" ["out_of_sequence 50000"] "pause";
        "congestion notifications": with(one(), |bed| bed.port("roceP2p1s0f0", "hw_counters/np_cnp_sent", "50000\n")) =>
            Fragile "congestion" ["roceP2p1s0f0", "np_cnp_sent"] "enP2p1s0f0np0";
        "errors on the wire": with(one(), |bed| bed.port("rocep1s0f0", "counters/symbol_error", "9000\n")) =>
            Fragile "link-errors" ["symbol_error 9000"] "ethtool -m enp1s0f0np0";
        "discards": with(one(), |bed| bed.port("rocep1s0f0", "counters/port_xmit_discards", "9000\n")) => Fragile "discards" ["9000"] "ethtool";
        "receiver not ready": with(one(), |bed| bed.port("rocep1s0f0", "hw_counters/out_of_buffer", "9000\n")) =>
            Fragile "receiver-not-ready" ["out_of_buffer"] "NCCL_DEBUG";
        "a link that flaps": with(one(), |bed| bed.port("rocep1s0f0", "counters/link_downed", "40\n")) => Fragile "flapping-link" ["40 times"] "ethtool -m";
    }
}
