//! The rails: the plugin's own warnings with their cures, and faults of the network around them.

use super::cures::{Cures, alike, by_number, list};
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::{AutomaticProfile, Facts};
use nccl_net_spark::interfaces::{ARP_CURE, Interface};
use nccl_net_spark::rails::{Rail, Refused, Survey, Warning, WarningKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(super) fn judge(facts: &Facts, cures: &Cures, found: &mut Vec<Finding>) {
    let survey = &facts.survey;
    if survey.rails.is_empty() && !survey.refused.is_empty() {
        no_rail(survey, found);
    }
    found.extend(survey.warnings.iter().map(|warning| of_warning(warning, survey)));
    twins_without_addresses(survey, found);
    foreign_interfaces_in_a_rails_subnet(facts, found);
    automatic_profiles(facts, found);
    bootstrap(facts, cures, found);
}

/// Tells why no port is usable, each reason once.
fn no_rail(survey: &Survey, found: &mut Vec<Finding>) {
    for (reason, ports) in alike(survey.refused.iter().map(|port| (port.reason.as_str(), port))) {
        let devices: Vec<&str> = ports.iter().map(|port| port.device.as_str()).collect();
        let reason = if ports.len() == 1 { reason.to_owned() } else { of_several(reason) };
        let text = format!("no rail: {} cannot be used: {reason}", list(&devices));
        found.push(Finding { cure: cure_of(&ports), ..Id::NoRail.finding(text) });
    }
}

/// Turns the plugin's reason for one port into one for several.
fn of_several(reason: &str) -> String {
    const NUMBERS: &[(&str, &str)] = &[
        ("excludes it", "excludes them"),
        ("it has", "they have"),
        ("its interface has", "their interfaces have"),
        ("its interface is", "their interfaces are"),
        ("its link layer", "their link layer"),
        ("the port is", "the ports are"),
    ];
    NUMBERS.iter().fold(reason.to_owned(), |text, (one, several)| text.replace(one, several))
}

/// Returns the commands that bring ports up, or give them addresses. All have the same reason.
fn cure_of(ports: &[&Refused]) -> Option<String> {
    let reason = ports.first()?.reason.as_str();
    let netdevs: Vec<&str> = ports.iter().filter_map(|port| port.netdev.as_deref()).collect();
    if reason.contains("NCCL_IB_HCA") {
        return Some(UNSET_FILTER.to_owned());
    }
    if netdevs.is_empty() || reason.contains("link layer") {
        return None;
    }
    if reason.starts_with("the port is") {
        let mut cages: Vec<&str> = ports.iter().filter_map(|port| port.phys_port.as_deref()).collect();
        cages.sort_unstable();
        cages.dedup();
        let cage =
            if cages.is_empty() { by_number(ports, "its port", "their ports").to_owned() } else { cages.join(" or ") };
        return Some(format!(
            "{}    # with a cable in {cage}",
            each(&netdevs, |netdev| format!("sudo ip link set {netdev} up"))
        ));
    }
    // The examples' subnets begin with 192.168.100.0/24.
    let mut subnets = 100_u8..;
    let add = |netdev: &str| format!("sudo ip address add 192.168.{}.1/24 dev {netdev}", subnets.next().unwrap_or(100));
    let subnets = by_number(&netdevs, "an address of a subnet of its own", "a subnet for each");
    Some(format!("{}    # {subnets}", each(&netdevs, add)))
}

const UNSET_FILTER: &str = "unset NCCL_IB_HCA";

/// Returns one command for each name, joined for a shell.
fn each(names: &[&str], command: impl FnMut(&str) -> String) -> String {
    names.iter().copied().map(command).collect::<Vec<_>>().join(" && ")
}

fn of_warning(warning: &Warning, survey: &Survey) -> Finding {
    let devices: Vec<&str> = warning.devices.iter().map(String::as_str).collect();
    let refused = |at: usize| survey.refused.iter().find(|one| Some(&one.device.as_str()) == devices.get(at));
    let netdev = |device: &str| {
        let rails = survey.rails.iter().map(|rail| (&rail.device, &rail.netdev));
        let mut all = rails.chain(survey.refused.iter().map(|one| (&one.device, &one.netdev)));
        all.find(|(name, _)| *name == device).and_then(|(_, netdev)| netdev.clone()).unwrap_or(device.to_owned())
    };
    let first = netdev(devices.first().copied().unwrap_or_default());
    let mtu = || each(&devices, |device| format!("sudo ip link set {} mtu 9000", netdev(device)));
    let (id, cure) = match warning.kind {
        WarningKind::FilterAdmitsNothing => (Id::HcaFilterEmpty, UNSET_FILTER.to_owned()),
        WarningKind::FilterWithinOneLink => (Id::HcaFilterOneLink, format!("export NCCL_IB_HCA={}", devices.join(","))),
        WarningKind::NamedButUnusable => {
            let other = refused(0).and_then(|port| cure_of(&[port])).map(|cure| format!("{cure}; or: {UNSET_FILTER}"));
            (Id::HcaFilterUnusable, other.unwrap_or_else(|| UNSET_FILTER.to_owned()))
        }
        WarningKind::HalfUsedCable => {
            let absent = "lspci -d 15b3:    # four functions are expected; in a container: --device /dev/infiniband";
            let cure = refused(1).map(|twin| cure_of(&[twin]).unwrap_or_else(|| "ip link".to_owned()));
            (Id::HalfCable, cure.unwrap_or_else(|| absent.to_owned()))
        }
        WarningKind::SlowLink => {
            let cure = "sudo fwupdmgr update && sudo poweroff    # then the power cable out for a minute";
            (Id::SlowPcieLink, cure.to_owned())
        }
        WarningKind::UnknownWiring => (Id::UnknownWiring, "docker run -v /sys:/sys:ro ...".to_owned()),
        WarningKind::UnknownSpeed => (Id::UnknownSpeed, format!("ethtool {first}")),
        WarningKind::SmallMtu => (Id::SmallMtu, mtu()),
        WarningKind::UnequalMtus => (Id::UnequalMtus, mtu()),
        WarningKind::SharedSubnet => {
            let remark = "# one subnet for each function: docs/guide/install.md";
            (Id::SharedSubnet, format!("sudo ip address change ... dev {first}    {remark}"))
        }
        WarningKind::Arp => {
            let loose = if warning.text.contains("rp_filter=2") { " net.ipv4.conf.all.rp_filter=2" } else { "" };
            (Id::Arp, format!("sudo {ARP_CURE}{loose}"))
        }
    };
    id.finding(warning.text.clone()).cured_by(cure)
}

/// A rail with link-local addresses alone beside a twin with IPv4 works if the peer has the same.
fn twins_without_addresses(survey: &Survey, found: &mut Vec<Finding>) {
    let has_v4 = |rail: &Rail| rail.addresses.iter().any(|address| ip(&address.gid).is_ipv4());
    for rail in survey.rails.iter().filter(|rail| !has_v4(rail)) {
        if let Some(twin) = rail.twin.map(|at| &survey.rails[at]).filter(|twin| has_v4(twin)) {
            let text = format!(
                "{} has link-local addresses alone, its twin {} has IPv4: it is used where the peer's function on that cable is the same",
                rail.device, twin.device
            );
            let netdev = rail.netdev.as_deref().unwrap_or("its interface");
            let cure =
                format!("sudo ip address add 192.168.101.1/24 dev {netdev}    # an address of a subnet of its own");
            found.push(Id::LinkLocalOnly.finding(text).cured_by(cure));
        }
    }
}

/// The kernel may route a rail's packets over another interface in the rail's subnet.
fn foreign_interfaces_in_a_rails_subnet(facts: &Facts, found: &mut Vec<Finding>) {
    let rails = &facts.survey.rails;
    let is_rail = |name: &str| rails.iter().any(|rail| rail.netdev.as_deref() == Some(name));
    for interface in facts.interfaces.iter().filter(|one| !one.is_loopback && !is_rail(&one.name)) {
        let shared = rails.iter().filter_map(|rail| {
            let mut own = rail.addresses.iter().filter_map(|own| subnet(ip(&own.gid), own.prefix));
            let is_its =
                |own| interface.addresses.iter().any(|other| subnet(other.address.ip(), other.prefix) == Some(own));
            Some((own.find(|own| is_its(*own))?, rail.device.as_str()))
        });
        for ((network, prefix), devices) in alike(shared) {
            let text = format!(
                "{} is in the subnet of {} ({}/{prefix}) and is no rail: the kernel may route the {} packets over it",
                interface.name,
                list(&devices),
                Ipv4Addr::from_bits(network),
                by_number(&devices, "rail's", "rails'")
            );
            let cure = format!("sudo ip address flush dev {}    # then an address of another subnet", interface.name);
            found.push(Id::SubnetClash.finding(text).cured_by(cure));
        }
    }
}

/// Owners saw such a profile keep a function on DHCP after netplan was written, until it was
/// deleted. On a network with a DHCP server it may be wanted.
fn automatic_profiles(facts: &Facts, found: &mut Vec<Finding>) {
    let has_v4 = |netdev: &str| {
        let its = facts.interfaces.iter().find(|interface| interface.name == netdev);
        its.is_some_and(|interface| interface.addresses.iter().any(|one| one.address.is_ipv4()))
    };
    for (has_v4, profiles) in alike(facts.profiles.iter().map(|profile| (has_v4(&profile.netdev), profile))) {
        let names: Vec<String> = profiles.iter().map(|one| format!("{} (\"{}\")", one.netdev, one.name)).collect();
        let keeps = by_number(&profiles, "automatic profile keeps it", "automatic profiles keep them");
        let (severity, follows) = match has_v4 {
            true => (Severity::Note, ": the address can change"),
            false => (Severity::Fragile, ", also where netplan has an address for it"),
        };
        let text = format!("{}: NetworkManager's {keeps} on DHCP{follows}", list(&names));
        let deleted = profiles.iter().map(|one| format!("sudo nmcli con delete {}", profile_word(one)));
        let cure = format!("{} && sudo netplan apply", deleted.collect::<Vec<_>>().join(" && "));
        found.push(Id::AutomaticProfile.finding(text).at(severity).cured_by(cure));
    }
}

/// Returns a profile's name as a word for a shell, or its UUID where the name has special
/// characters.
fn profile_word(profile: &AutomaticProfile) -> String {
    let is_harmless = profile.name.chars().all(|c| c.is_alphanumeric() || " ._-".contains(c));
    if is_harmless { format!("\"{}\"", profile.name) } else { profile.uuid.clone() }
}

/// `NCCL_SOCKET_IFNAME` must leave an interface.
fn bootstrap(facts: &Facts, cures: &Cures, found: &mut Vec<Finding>) {
    let Some(wanted) = &cures.socket_interfaces else { return };
    let pair = [("NCCL_SOCKET_IFNAME".to_owned(), wanted.clone())];
    let Ok(config) = nccl_net_spark::config::Config::from_variables(&pair) else { return };
    let usable: Vec<&Interface> =
        facts.interfaces.iter().filter(|one| one.is_up && !one.addresses.is_empty()).collect();
    if facts.interfaces.is_empty() || usable.iter().any(|one| config.socket_interfaces.admits(&one.name, None)) {
        return;
    }
    let names: Vec<&str> = usable.iter().map(|one| one.name.as_str()).collect();
    let text = format!("NCCL_SOCKET_IFNAME={wanted} leaves none of the interfaces that are up: {}", list(&names));
    found.push(Id::SocketIfname.finding(text).cured_by("unset NCCL_SOCKET_IFNAME"));
}

fn ip(gid: &[u8; 16]) -> IpAddr {
    Ipv6Addr::from(*gid).to_canonical()
}

fn subnet(ip: IpAddr, prefix: Option<u8>) -> Option<(u32, u8)> {
    let prefix = prefix.filter(|prefix| (1..=32).contains(prefix))?;
    match ip {
        IpAddr::V4(ip) => Some((ip.to_bits() & (u32::MAX << (32 - u32::from(prefix))), prefix)),
        IpAddr::V6(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reason of the plugin.
    #[test]
    fn a_reason_is_said_of_several_ports_as_of_one() {
        for (one, several) in [
            ("NCCL_IB_HCA excludes it", "NCCL_IB_HCA excludes them"),
            ("its link layer is not Ethernet", "their link layer is not Ethernet"),
            (
                "the port is down: no cable, or its interface is not up",
                "the ports are down: no cable, or their interfaces are not up",
            ),
            ("the port is not active yet (state INIT)", "the ports are not active yet (state INIT)"),
            (
                "it has no RoCE v2 GID: its interface has neither an IPv4 nor an IPv6 address",
                "they have no RoCE v2 GID: their interfaces have neither an IPv4 nor an IPv6 address",
            ),
        ] {
            assert_eq!(of_several(one), several);
        }
    }
}
