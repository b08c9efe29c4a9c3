//! Findings about the priorities of RoCE packets, and the cure for a priority without PFC.

use super::cures::list;
use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::Facts;
use nccl_net_spark::rails::RailQos;

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
    found.push(Id::QosUntilReboot.finding(text).cured_by(cure));
}

/// Returns the commands that give RoCE a priority with PFC on the rails of these devices.
pub(super) fn cure(facts: &Facts, devices: &[&str]) -> String {
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
    commands.push(format!(
        "export NCCL_IB_TC={traffic_class}    # on every host"
    ));
    commands.join(" && ")
}
