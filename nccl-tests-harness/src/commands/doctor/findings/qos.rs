//! Findings about the priorities of RoCE packets, and the cure for a priority without PFC.

use super::cures::list;
use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::look::Facts;
use host::rails::RailQos;

kinds! {
    QOS_UNTIL_REBOOT = Fragile "qos-until-reboot": "PFC and trust mode are set, and nothing sets them at boot", "[switches.md](switches.md#priority)";
}

pub(super) fn judge(facts: &Facts, found: &mut Vec<Finding>) {
    let set = |rail: &&RailQos| rail.port.pfc != 0 || rail.port.dscp.is_some();
    let netdevs: Vec<&str> = facts
        .qos
        .rails
        .iter()
        .filter(set)
        .map(|rail| rail.netdev.as_str())
        .collect();
    // A container does not show the boot files of its host.
    if netdevs.is_empty() || facts.qos.at_boot.is_some() || facts.machine.container.is_some() {
        return;
    }
    let text = format!(
        "PFC and trust mode of {} are set now, and neither a script nor an enabled unit sets them at boot: after it RoCE has no PFC",
        list(&netdevs)
    );
    let cure = "nccl-spark env --for systemd | sudo sh    # not during a job: a change of PFC takes the link down";
    found.push(QOS_UNTIL_REBOOT.finding(text).cured_by(cure));
}

/// Adds the commands that give RoCE a priority with PFC on the rails of these devices.
pub(super) fn cure(finding: Finding, facts: &Facts, devices: &[&str]) -> Finding {
    let rails = facts
        .qos
        .rails
        .iter()
        .filter(|rail| devices.contains(&rail.device.as_str()));
    let mut commands = Vec::new();
    let mut traffic_class = 0;
    for RailQos { netdev, port, .. } in rails {
        traffic_class = port.lossless_traffic_class();
        if port.dscp.is_none() {
            let dscp = port.lossless_dscp();
            let priority = port.lossless();
            commands.push(format!(
                "sudo dcb app replace dev {netdev} dscp-prio {dscp}:{priority}"
            ));
        }
    }
    let export = format!("export NCCL_IB_TC={traffic_class}    # on every host");
    if commands.is_empty() {
        return finding.cured_by(export);
    }
    finding
        .cured_by(format!(
            "nccl-spark env --for systemd | sudo sh && {export}"
        ))
        .until_boot_by(commands.join(" && "))
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::faults::{faults, one, with};

    faults! {
        "PFC that nothing sets at boot": with(one(), |bed| {
            bed.mlnx_qos("dscp", "0   0   0   1   0   0   0   0");
            bed.set("NCCL_IB_TC", "106");
        }) => Fragile "qos-until-reboot" ["enp1s0f0np0 and enP2p1s0f0np0"] "nccl-spark env --for systemd | sudo sh";
    }
}
