//! Findings about rails: the plugin's own warnings, each with a cure, and faults of the network
//! around the rails.

use super::cures::{each, group_by_key, list, show_roce, singular_or_plural};
use super::functions::spark_nic;
use super::machine::container_cure;
use super::qos;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::finding::{Kind, kinds};
use crate::commands::doctor::look::{AutomaticProfile, Facts};
use host::interfaces::ARP_FIX_COMMAND;
use host::rails::{
    LinkLayer, Obstacle, PortState, Rail, Refused, Survey, Warning, WarningKind, gbps,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

kinds! {
    NO_RAIL = Broken "no-rail": "no port can be used as a rail", "the finding has the reason for each port";
    HALF_CABLE = Slow "half-cable": "one of the two functions of a cable is not used", "bring the twin up, or give it [an address](install.md#addresses)";
    HCA_FILTER_ONE_LINK = Slow "hca-filter-one-link": "`NCCL_IB_HCA` names two functions of one PCIe link", "unset `NCCL_IB_HCA`";
    HCA_FILTER_EMPTY = Broken "hca-filter-empty": "`NCCL_IB_HCA` admits no device of this host", "unset `NCCL_IB_HCA`";
    HCA_FILTER_UNUSABLE = Fragile "hca-filter-unusable": "`NCCL_IB_HCA` names a port that cannot be used", "unset `NCCL_IB_HCA`";
    IWARP = Broken "iwarp": "a device speaks iWARP, which the plugin does not use", "an E810 can be switched to RoCE, an X722 cannot";
    BOND = Slow "bond": "the ports of one PCIe link are a bond (RoCE LAG)", "remove the bond, and give each function [an address](install.md#addresses)";
    SLOW_PORT = Slow "slow-port": "a Spark's port has a link that is slower than the port", "a cable for the port's speed";
    DUPLICATE_ADDRESS = Broken "duplicate-address": "two interfaces of this host have one address", "[a subnet for each function](install.md#addresses)";
    SLOW_PCIE_LINK = Slow "slow-pcie-link": "a PCIe link has fewer lanes or a lower generation than it could", "on a Spark a BIOS update, then the power cable out for a minute; else another slot";
    UNKNOWN_WIRING = Fragile "unknown-wiring": "sysfs does not show a device, so its PCIe link and cable are unknown", "mount `/sys` in the container";
    UNKNOWN_SPEED = Note "unknown-speed": "a port reports no speed", "`ethtool` on its interface; nothing if the interface is virtual";
    SMALL_MTU = Slow "small-mtu": "the interface's MTU makes a path MTU below 4096 bytes", "`mtu: 9000` in the netplan file, at both ends";
    SHARED_SUBNET = Fragile "shared-subnet": "rails of this host are in one subnet", "[a subnet for each function](install.md#addresses)";
    ARP = Fragile "arp": "rails of this host answer ARP requests for each other", "[the settings for ARP](#functions-that-answer-for-each-other)";
    LINK_LOCAL_ONLY = Note "link-local-only": "a rail has link-local addresses alone, and its twin has IPv4", "an IPv4 address, unless the peer's rail has none either";
    SUBNET_CLASH = Fragile "subnet-clash": "an interface that is no rail is in a rail's subnet", "another subnet for the rails";
    AUTOMATIC_PROFILE = Fragile "automatic-profile": "NetworkManager's automatic profile keeps a rail's interface on DHCP", "[delete it](install.md#networkmanagers-automatic-profile)";
    UNPROTECTED_PRIORITY = Fragile "unprotected-priority": "RoCE has a priority without PFC, and PFC is on for another", "[switches.md](switches.md#priority)";
}

pub(super) fn judge(facts: &Facts, found: &mut Vec<Finding>) {
    let survey = &facts.survey;
    if survey.rails.is_empty() && !survey.refused.is_empty() {
        no_rail(facts, found);
    }
    let shown = survey
        .warnings
        .iter()
        .filter(|warning| !is_of_a_port_on_dhcp(warning, facts));
    found.extend(shown.map(|warning| of_warning(warning, facts)));
    slow_ports(facts, found);
    duplicate_addresses(facts, found);
    link_local_only_rails(survey, found);
    foreign_interfaces_in_a_rails_subnet(facts, found);
    automatic_profiles(facts, found);
}

fn no_rail(facts: &Facts, found: &mut Vec<Finding>) {
    let survey = &facts.survey;
    // NetworkManager's profile explains a port without an address, and has its own finding.
    let is_explained = survey
        .refused
        .iter()
        .any(|port| waits_for_dhcp(port, facts));
    let unexplained = survey
        .refused
        .iter()
        .filter(|port| !is_explained || !(waits_for_dhcp(port, facts) || port.obstacle.is_link()));
    for (obstacle, ports) in group_by_key(unexplained.map(|port| (alike(&port.obstacle), port))) {
        let obstacle = &obstacle;
        let devices: Vec<&str> = ports.iter().map(|port| port.device.as_str()).collect();
        let reason = if let [port] = &ports[..] {
            port.obstacle.to_string()
        } else {
            text_for_several(obstacle)
        };
        let text = explained(
            obstacle,
            format!("no rail: {} cannot be used: {reason}", list(&devices)),
        );
        let id = match obstacle {
            Obstacle::Iwarp => IWARP,
            _ => NO_RAIL,
        };
        found.push(with_cure(
            id.finding(text),
            obstacle,
            &ports,
            facts.machine.container,
        ));
    }
}

/// Returns the obstacle without the name of an interface, so that ports with one fault are one
/// finding. The text of a single port has the name.
fn alike(obstacle: &Obstacle) -> Obstacle {
    match obstacle {
        Obstacle::NoCarrier(_) => Obstacle::NoCarrier("the interfaces".to_owned()),
        Obstacle::NoRoce(_) => Obstacle::NoRoce("the interfaces".to_owned()),
        Obstacle::RoceV1(_) => Obstacle::RoceV1("the interfaces".to_owned()),
        Obstacle::NoAddress(_) => Obstacle::NoAddress("the interfaces".to_owned()),
        other => other.clone(),
    }
}

/// Returns true if the port lacks an address, and NetworkManager's automatic profile keeps its
/// interface on DHCP.
fn waits_for_dhcp(port: &Refused, facts: &Facts) -> bool {
    let is_automatic = |netdev: &String| facts.profiles.iter().any(|one| one.netdev == *netdev);
    matches!(port.obstacle, Obstacle::NoGid | Obstacle::NoAddress(_))
        && port.netdev.as_ref().is_some_and(is_automatic)
}

fn is_of_a_port_on_dhcp(warning: &Warning, facts: &Facts) -> bool {
    let mut twins = facts.survey.refused.iter();
    warning.kind == WarningKind::HalfUsedCable
        && twins
            .any(|port| warning.devices.get(1) == Some(&port.device) && waits_for_dhcp(port, facts))
}

fn text_for_several(obstacle: &Obstacle) -> String {
    let text = match obstacle {
        Obstacle::Excluded => "NCCL_IB_HCA excludes them",
        Obstacle::LinkLayer(LinkLayer::InfiniBand) => {
            "their link layer is InfiniBand, not Ethernet"
        }
        Obstacle::LinkLayer(_) => "their link layer is not Ethernet",
        Obstacle::Iwarp => "they are iWARP devices, and the plugin needs RoCE v2",
        Obstacle::State(PortState::Down) => {
            "the ports are down: no cable, or their interfaces are not up"
        }
        Obstacle::NoCarrier(_) => {
            "the ports are down: their interfaces are up and have no carrier (no cable, a faulty cable or module, or the other end is down)"
        }
        Obstacle::State(PortState::Init) => "the ports are not active yet (state INIT)",
        Obstacle::State(PortState::Armed) => "the ports are not active yet (state ARMED)",
        Obstacle::State(state) => return format!("the ports are not active (state {state:?})"),
        Obstacle::NoGid => {
            "they have no RoCE v2 GID: their interfaces have neither an IPv4 nor an IPv6 address"
        }
        Obstacle::NoInterface => {
            "they have no RoCE v2 GID: their interfaces are not in this network namespace"
        }
        Obstacle::NoRoce(_) => {
            "they have no RoCE v2 GID, although their interfaces have addresses: RoCE is off on the devices"
        }
        Obstacle::RoceV1(_) => {
            "they have no RoCE v2 GID: their interfaces have GIDs of RoCE v1 alone. Older devices, such as ConnectX-3, do not have RoCE v2"
        }
        Obstacle::NoAddress(_) => {
            "their RoCE v2 GIDs are link-local, and their interfaces have none of these addresses"
        }
    };
    text.to_owned()
}

/// Adds an explanation to the text about ports without an address.
fn explained(obstacle: &Obstacle, text: String) -> String {
    match obstacle {
        Obstacle::NoGid | Obstacle::NoAddress(_) => with_addresses_explained(&text),
        Obstacle::Excluded
        | Obstacle::LinkLayer(_)
        | Obstacle::Iwarp
        | Obstacle::State(_)
        | Obstacle::NoCarrier(_)
        | Obstacle::NoInterface
        | Obstacle::NoRoce(_)
        | Obstacle::RoceV1(_) => text,
    }
}

/// Adds an explanation in place of a cure. A command would have to name an address, and the right
/// one depends on the other ports and on the other host.
fn with_addresses_explained(text: &str) -> String {
    format!(
        "{}. A function needs an address in a subnet of its own, which only the function at the other end of the cable \
         shares (docs/guide/install.md, Addresses)",
        text.trim_end_matches('.')
    )
}

/// Adds the commands that remove this obstacle from the ports, if commands can.
fn with_cure(
    finding: Finding,
    obstacle: &Obstacle,
    ports: &[&Refused],
    container: Option<&str>,
) -> Finding {
    let netdevs: Vec<&str> = ports
        .iter()
        .filter_map(|port| port.netdev.as_deref())
        .collect();
    let addresses: Vec<&str> = ports
        .iter()
        .filter_map(|port| Some(port.pci.as_ref()?.address.as_str()))
        .collect();
    match obstacle {
        Obstacle::Excluded => finding.cured_by(UNSET_FILTER),
        Obstacle::NoInterface => match container {
            Some(engine) => finding.cured_by(container_cure(engine)),
            None => finding,
        },
        Obstacle::LinkLayer(LinkLayer::InfiniBand) => finding.cured_by(OWN_NETWORK),
        Obstacle::Iwarp if !addresses.is_empty() => finding.until_boot_by(format!(
            "{}    # an E810; an X722 has iWARP alone",
            each(&addresses, |address| format!(
                "sudo devlink dev param set pci/{address} name enable_iwarp value false cmode runtime && \
                 sudo devlink dev param set pci/{address} name enable_roce value true cmode runtime"
            ))
        )),
        Obstacle::NoRoce(_) if !addresses.is_empty() => finding.cured_by(show_roce(&addresses)),
        Obstacle::NoCarrier(_) if !netdevs.is_empty() => finding.cured_by(format!(
            "{}    # then the cable, and the port at its other end",
            each(&netdevs, |netdev| format!("sudo ethtool -m {netdev}"))
        )),
        Obstacle::State(_) if !netdevs.is_empty() => {
            let up = each(&netdevs, |netdev| format!("sudo ip link set {netdev} up"));
            finding.until_boot_by(format!("{up}    # with a cable in {}", labels(ports)))
        }
        _ => finding,
    }
}

/// Returns the names of physical ports, as in "p0 or p1".
fn labels(ports: &[&Refused]) -> String {
    let mut labels: Vec<&str> = ports
        .iter()
        .filter_map(|port| port.phys_port.as_deref())
        .collect();
    labels.sort_unstable();
    labels.dedup();
    if labels.is_empty() {
        singular_or_plural(ports, "its port", "their ports").to_owned()
    } else {
        labels.join(" or ")
    }
}

const OWN_NETWORK: &str = "unset NCCL_NET NCCL_NET_PLUGIN    # NCCL's own network is for InfiniBand; mlxconfig's LINK_TYPE_P1=2 makes a VPI card Ethernet";
const UNSET_FILTER: &str = "unset NCCL_IB_HCA";

fn of_warning(warning: &Warning, facts: &Facts) -> Finding {
    let survey = &facts.survey;
    let devices: Vec<&str> = warning.devices.iter().map(String::as_str).collect();
    let refused = |at: usize| {
        survey
            .refused
            .iter()
            .find(|one| Some(&one.device.as_str()) == devices.get(at))
    };
    let netdev = |device: &str| {
        let rails = survey.rails.iter().map(|rail| (&rail.device, &rail.netdev));
        let mut all = rails.chain(survey.refused.iter().map(|one| (&one.device, &one.netdev)));
        all.find(|(name, _)| *name == device)
            .and_then(|(_, netdev)| netdev.clone())
            .unwrap_or(device.to_owned())
    };
    let first = netdev(devices.first().copied().unwrap_or_default());
    let plain = |id: &'static Kind| id.finding(warning.text.clone());
    match warning.kind {
        WarningKind::FilterAdmitsNothing => plain(HCA_FILTER_EMPTY).cured_by(UNSET_FILTER),
        // On a ring or triangle, a filter for a pair of one cable would cut off a neighbour.
        WarningKind::FilterWithinOneLink => plain(HCA_FILTER_ONE_LINK).cured_by(UNSET_FILTER),
        WarningKind::NamedButUnusable => {
            let finding = plain(HCA_FILTER_UNUSABLE);
            let finding = match refused(0) {
                Some(port) => with_cure(finding, &port.obstacle, &[port], facts.machine.container),
                None => finding,
            };
            finding.cured_by(UNSET_FILTER)
        }
        WarningKind::HalfUsedCable => {
            let Some(twin) = refused(1) else {
                return plain(HALF_CABLE).cured_by(
                    "lspci -d 15b3:    # four functions are expected; in a container: --device /dev/infiniband",
                );
            };
            let text = explained(&twin.obstacle, warning.text.clone());
            with_cure(
                HALF_CABLE.finding(text),
                &twin.obstacle,
                &[twin],
                facts.machine.container,
            )
        }
        WarningKind::Bond if fits_its_link(survey, devices[0]) => plain(BOND).at(Severity::Note),
        WarningKind::Bond => plain(BOND),
        WarningKind::SlowLink => plain(SLOW_PCIE_LINK).cured_by(if spark_nic(facts).is_some() {
            "sudo fwupdmgr update && sudo poweroff    # then the power cable out for a minute"
        } else {
            "sudo lspci -vv -d 15b3: | grep -E 'LnkCap:|LnkSta:'    # then re-seat the card, or a slot with more lanes"
        }),
        WarningKind::UnknownWiring => {
            plain(UNKNOWN_WIRING).cured_by("docker run -v /sys:/sys:ro ...")
        }
        WarningKind::UnknownSpeed => plain(UNKNOWN_SPEED).cured_by(format!("ethtool {first}")),
        WarningKind::SmallMtu => {
            let netdevs: Vec<String> = devices.iter().map(|device| netdev(device)).collect();
            small_mtu(&warning.text, &netdevs, facts)
        }
        WarningKind::SharedSubnet => SHARED_SUBNET.finding(with_addresses_explained(&warning.text)),
        WarningKind::Arp { is_strict } => plain(ARP).cured_by(arp_cure(is_strict)),
        WarningKind::UnprotectedPriority => qos::cure(plain(UNPROTECTED_PRIORITY), facts, &devices),
    }
}

/// Returns true if a rail's PCIe link carries the whole rate of its port, as an x16 link can carry
/// both ports of a bond.
fn fits_its_link(survey: &Survey, device: &str) -> bool {
    let mut rails = survey.rails.iter();
    rails
        .find(|rail| rail.device == device)
        .is_some_and(|rail| {
            let payload = survey.links[rail.link].payload_mbps;
            payload.is_some_and(|payload| payload >= rail.speed_mbps)
        })
}

/// Adds the cure of a small MTU. In a pod no command can help: the pod's network definition sets
/// the MTU. A VLAN cannot have a larger MTU than the interface below it, so that comes first.
fn small_mtu(text: &str, netdevs: &[String], facts: &Facts) -> Finding {
    const IN_A_POD: &str = "In Kubernetes: `mtu: 9000` for the node's interface, then \"mtu\": 9000 in the pod's NetworkAttachmentDefinition.";
    if facts.machine.container == Some("kubernetes") {
        return SMALL_MTU.finding(format!("{text} {IN_A_POD}"));
    }
    let mut names: Vec<&str> = Vec::new();
    let mut of_vlan = "";
    for netdev in netdevs {
        let its = facts
            .functions
            .iter()
            .find(|one| one.netdev.as_ref() == Some(netdev));
        let below = its.and_then(|one| one.below.as_ref());
        if let Some(below) = below.filter(|below| below.mtu_bytes.is_none_or(|mtu| mtu < 9000)) {
            of_vlan = " The interface below a VLAN needs the line too.";
            names.push(&below.netdev);
        }
        names.push(netdev);
    }
    let set = each(&names, |name| format!("sudo ip link set {name} mtu 9000"));
    SMALL_MTU
        .finding(format!("{text} {MTU_FOR_GOOD}{of_vlan}"))
        .until_boot_by(set)
}

/// The lasting cure of a small MTU. A command would have to know which program sets the addresses.
pub const MTU_FOR_GOOD: &str = "For good: the line `mtu: 9000` in the netplan file that has the address (docs/guide/install.md, Addresses).";

/// Returns the command after which each interface answers ARP only for its own addresses, now and
/// after each boot.
pub fn arp_cure(is_strict: bool) -> String {
    const FILE: &str = "/etc/sysctl.d/90-nccl-spark.conf";
    let settings = ARP_FIX_COMMAND.trim_start_matches("sysctl -w ");
    let loose = if is_strict {
        " net.ipv4.conf.all.rp_filter=2"
    } else {
        ""
    };
    format!("printf '%s\\n' {settings}{loose} | sudo tee {FILE} && sudo sysctl -p {FILE}")
}

/// Finds ports of a Spark whose link is slower than the port. Shop cables link at 40 or 100 Gb/s.
/// Owners who compared links of 100 and 200 Gb/s saw 3 % in decoding, so 100 Gb/s is a note.
fn slow_ports(facts: &Facts, found: &mut Vec<Finding>) {
    const HALF_MBPS: u32 = 100_000;
    let Some(nic) = spark_nic(facts) else {
        return;
    };
    let slow = facts.survey.rails.iter().filter(|rail| {
        // Without a speed, the plugin assumes one, and `unknown-speed` says so.
        rail.speed_mbps < nic.port_mbps && !has_unknown_speed(facts, &rail.device)
    });
    for (mbps, devices) in group_by_key(slow.map(|rail| (rail.speed_mbps, rail.device.as_str()))) {
        let severity = if mbps < HALF_MBPS {
            Severity::Slow
        } else {
            Severity::Note
        };
        let text = format!(
            "the {} of {} {} at {}, and a Spark's ports can do {}: the cable, or the port at its other end, is made for less",
            singular_or_plural(&devices, "port", "ports"),
            list(&devices),
            singular_or_plural(&devices, "runs", "run"),
            gbps(mbps),
            gbps(nic.port_mbps),
        );
        found.push(SLOW_PORT.finding(text).at(severity));
    }
}

fn has_unknown_speed(facts: &Facts, device: &str) -> bool {
    let mut warnings = facts.survey.warnings.iter();
    warnings.any(|one| {
        one.kind == WarningKind::UnknownSpeed && one.devices.iter().any(|name| name == device)
    })
}

/// Finds addresses that two interfaces have, one of them a rail's. The peer's packets then reach
/// either of them.
fn duplicate_addresses(facts: &Facts, found: &mut Vec<Finding>) {
    let rails: Vec<&str> = facts
        .survey
        .rails
        .iter()
        .filter_map(|rail| rail.netdev.as_deref())
        .collect();
    let all = facts.interfaces.iter().filter(|one| !one.is_loopback);
    let pairs = all.flat_map(|one| {
        let own = one.addresses.iter().map(|own| own.address.ip());
        own.map(|address| (address, one.name.as_str()))
    });
    for (address, netdevs) in group_by_key(pairs) {
        if netdevs.len() > 1 && netdevs.iter().any(|netdev| rails.contains(netdev)) {
            let text = format!(
                "{} have one address, {address}: the peer's packets reach either of them",
                list(&netdevs)
            );
            found.push(DUPLICATE_ADDRESS.finding(with_addresses_explained(&text)));
        }
    }
}

/// Finds rails with only link-local addresses whose twin has IPv4. Such a rail is used only if the
/// peer's unpaired rail on the same cable has a link-local address too.
fn link_local_only_rails(survey: &Survey, found: &mut Vec<Finding>) {
    let has_v4 = |rail: &Rail| {
        rail.addresses
            .iter()
            .any(|address| ip(&address.gid).is_ipv4())
    };
    for rail in survey.rails.iter().filter(|rail| !has_v4(rail)) {
        if let Some(twin) = rail
            .twin
            .map(|at| &survey.rails[at])
            .filter(|twin| has_v4(twin))
        {
            let text = format!(
                "{0} has only link-local addresses, but its twin {1} has IPv4: {0} is used only if the peer's unpaired rail on that cable has a link-local address too",
                rail.device, twin.device
            );
            found.push(LINK_LOCAL_ONLY.finding(with_addresses_explained(&text)));
        }
    }
}

/// Finds interfaces that are no rail but are in a rail's subnet. The kernel may route the rail's
/// packets through such an interface.
fn foreign_interfaces_in_a_rails_subnet(facts: &Facts, found: &mut Vec<Finding>) {
    let rails = &facts.survey.rails;
    let is_rail = |name: &str| {
        rails
            .iter()
            .any(|rail| rail.netdev.as_deref() == Some(name))
    };
    for interface in facts
        .interfaces
        .iter()
        .filter(|one| !one.is_loopback && !is_rail(&one.name))
    {
        let shared = rails.iter().filter_map(|rail| {
            let mut own = rail
                .addresses
                .iter()
                .filter_map(|own| subnet(ip(&own.gid), own.prefix));
            let shares_subnet = |own| {
                interface
                    .addresses
                    .iter()
                    .any(|other| subnet(other.address.ip(), other.prefix) == Some(own))
            };
            Some((own.find(|own| shares_subnet(*own))?, rail.device.as_str()))
        });
        for ((network, prefix), devices) in group_by_key(shared) {
            let text = format!(
                "{} is in the subnet of {} ({}/{prefix}) and is no rail: the kernel may route the {} packets over it. \
                 Give the rails another subnet (docs/guide/install.md, Addresses)",
                interface.name,
                list(&devices),
                Ipv4Addr::from_bits(network),
                singular_or_plural(&devices, "rail's", "rails'")
            );
            found.push(SUBNET_CLASH.finding(text));
        }
    }
}

/// Finds NetworkManager's automatic profiles. Owners wrote netplan files for a function, but such a
/// profile kept the function on DHCP until they deleted it. On a network with a DHCP server the
/// profile may be wanted.
fn automatic_profiles(facts: &Facts, found: &mut Vec<Finding>) {
    let has_v4 = |netdev: &str| {
        let its = facts
            .interfaces
            .iter()
            .find(|interface| interface.name == netdev);
        its.is_some_and(|interface| interface.addresses.iter().any(|one| one.address.is_ipv4()))
    };
    let is_cause = |netdev: &str| {
        let mut waiting = facts
            .survey
            .refused
            .iter()
            .filter(|port| waits_for_dhcp(port, facts));
        waiting.any(|port| port.netdev.as_deref() == Some(netdev))
    };
    let kinds = facts.profiles.iter().map(|profile| {
        let netdev = &profile.netdev;
        ((has_v4(netdev), is_cause(netdev)), profile)
    });
    for ((has_v4, is_cause), profiles) in group_by_key(kinds) {
        let names: Vec<String> = profiles
            .iter()
            .map(|one| format!("{} (\"{}\")", one.netdev, one.name))
            .collect();
        let keeps = singular_or_plural(
            &profiles,
            "automatic profile keeps it",
            "automatic profiles keep them",
        );
        let (severity, follows) = match (has_v4, is_cause) {
            (true, _) => (Severity::Note, ": the address can change"),
            (false, false) => (Severity::Fragile, ", even if netplan sets an address"),
            (false, true) if facts.survey.rails.is_empty() => (Severity::Broken, TAKES_ADDRESSES),
            (false, true) => (Severity::Slow, TAKES_ADDRESSES),
        };
        let text = format!(
            "{}: NetworkManager's {keeps} on DHCP{follows}",
            list(&names)
        );
        let deleted = each(&profiles, |one| {
            format!("sudo nmcli con delete {}", profile_word(one))
        });
        let cure = format!("{deleted} && sudo netplan apply");
        found.push(AUTOMATIC_PROFILE.finding(text).at(severity).cured_by(cure));
    }
}

/// The effect of a profile on a port that is no rail, because it has no address. Owners saw
/// NetworkManager remove a hand-set address within 30 s.
const TAKES_ADDRESSES: &str = ", so it has no address and is no rail; NetworkManager also removes an address that is set by hand";

/// Returns a profile's name as a shell word, or its UUID if the name has special characters.
fn profile_word(profile: &AutomaticProfile) -> String {
    let is_harmless = profile
        .name
        .chars()
        .all(|c| c.is_alphanumeric() || " ._-".contains(c));
    if is_harmless {
        format!("\"{}\"", profile.name)
    } else {
        profile.uuid.clone()
    }
}

fn ip(gid: &[u8; 16]) -> IpAddr {
    Ipv6Addr::from(*gid).to_canonical()
}

fn subnet(ip: IpAddr, prefix: Option<u8>) -> Option<(u32, u8)> {
    let prefix = prefix.filter(|prefix| (1..=32).contains(prefix))?;
    match ip {
        IpAddr::V4(ip) => Some((
            ip.to_bits() & (u32::MAX << (32 - u32::from(prefix))),
            prefix,
        )),
        IpAddr::V6(_) => None,
    }
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::bed::{Bed, FUNCTIONS, addresses, link};
    use crate::commands::doctor::tests::faults::{faults, iwarp, one, two, with, without_carrier};

    faults! {
        "no cable": Bed::spark(&[]) => Broken "no-rail" ["rocep1s0f0", "no cable"] "ip link set enp1s0f0np0 up";
        "the twin's interface is down": with(one(), |bed| bed.port("roceP2p1s0f0", "state", "1: DOWN\n")) =>
            Slow "half-cable" ["rocep1s0f0", "roceP2p1s0f0"] "ip link set enP2p1s0f0np0 up";
        "the twin has no address": with(one(), |bed| {
            bed.no_gids("roceP2p1s0f0");
            bed.interfaces(&[link("enp1s0f0np0", 10, "192.168.100.1/24"), link("enP2p1s0f0np0", 12, "")]);
        }) => Slow "half-cable" ["roceP2p1s0f0", "a subnet of its own"] "";
        "a twin with an address and without RoCE": with(one(), |bed| bed.no_gids("roceP2p1s0f0")) =>
            Slow "half-cable" ["no RoCE v2 GID, although its interface enP2p1s0f0np0 has an address"]
            "devlink dev param show pci/0002:01:00.0 name enable_roce";
        "a twin without a carrier": with(one(), |bed| {
            bed.port("roceP2p1s0f0", "state", "1: DOWN\n");
            bed.interfaces(&[link("enp1s0f0np0", 10, "192.168.100.1/24"), without_carrier("enP2p1s0f0np0", 12)]);
        }) => Slow "half-cable" ["enP2p1s0f0np0 is up and has no carrier"] "sudo ethtool -m enP2p1s0f0np0";
        "ports without a carrier": with(Bed::spark(&[]), |bed| bed.interfaces(&[
            without_carrier("enp1s0f0np0", 10), without_carrier("enp1s0f1np1", 11),
            without_carrier("enP2p1s0f0np0", 12), without_carrier("enP2p1s0f1np1", 13),
        ])) => Broken "no-rail" ["their interfaces are up and have no carrier"] "sudo ethtool -m enp1s0f0np0";
        // tensorflow/tensorflow 22077: show_gids has v1 alone for each GID of a ConnectX-3.
        "ports with RoCE v1 alone": with(one(), |bed| {
            for device in ["rocep1s0f0", "roceP2p1s0f0"] {
                (0..4).for_each(|at| bed.port(device, &format!("gid_attrs/types/{at}"), "IB/RoCE v1\n"));
            }
        }) => Broken "no-rail" ["rocep1s0f0 and roceP2p1s0f0", "GIDs of RoCE v1 alone"] "";
        // deepseek-ai/DeepEP 38: the four fast ports of each host are InfiniBand.
        "ports for InfiniBand": with(two(), |bed| {
            for (device, ..) in FUNCTIONS {
                bed.port(device, "link_layer", "InfiniBand\n");
                bed.no_gids(device);
            }
        }) => Broken "no-rail" ["their link layer is InfiniBand"] "unset NCCL_NET NCCL_NET_PLUGIN";
        // Mellanox/k8s-rdma-shared-dev-plugin 72: /dev/infiniband and no interfaces, zero GIDs.
        "a pod without the ports' interfaces": with(two(), |bed| {
            bed.write("run/secrets/kubernetes.io/serviceaccount/token", "");
            FUNCTIONS.iter().for_each(|one| bed.hide_interface(one));
        }) => Broken "no-rail" ["their interfaces are not in this network namespace"] "hostNetwork";
        // NVIDIA/nccl 925: every container sees all devices and has one interface.
        "a container with one of two interfaces": with(one(), |bed| {
            bed.write(".dockerenv", "");
            bed.hide_interface(&FUNCTIONS[2]);
        }) => Slow "half-cable" ["roceP2p1s0f0", "its interface is not in this network namespace"] "--for docker";
        "an iWARP device": iwarp() => Broken "iwarp" ["rocep1s0f0", "iWARP"] "enable_roce value true";
        "a bond over both ports": with(two(), |bed| bed.bond()) =>
            Slow "bond" ["mlx5_bond_0 is the bond bond0", "one PCIe link"] "";
        // NVIDIA/nccl-tests 265: a bond of two ports of 200 Gb/s, on a link of 16 lanes.
        "a bond on a link that carries it": with(two(), |bed| {
            bed.bond();
            ["current_link_width", "max_link_width"].iter().for_each(|file| bed.pci("mlx5_bond_0", file, "16\n"));
        }) => Note "bond" ["448.1 Gb/s at most"] "";
        "a cable for 40 Gb/s": with(one(), |bed| {
            ["rocep1s0f0", "roceP2p1s0f0"].iter().for_each(|device| bed.port(device, "rate", "40 Gb/sec (4X QDR)\n"));
        }) => Slow "slow-port" ["rocep1s0f0 and roceP2p1s0f0 run at 40 Gb/s"] "";
        "a cable for 100 Gb/s": with(one(), |bed| {
            ["rocep1s0f0", "roceP2p1s0f0"].iter().for_each(|device| bed.port(device, "rate", "100 Gb/sec (4X EDR)\n"));
        }) => Note "slow-port" ["100 Gb/s"] "";
        "one address on two interfaces": with(one(), |bed| {
            bed.interfaces(&[link("enp1s0f0np0", 10, "192.168.100.1/24"), link("enP2p1s0f0np0", 12, "192.168.101.1/24"), link("enP7s7", 2, "192.168.100.1/32")]);
        }) => Broken "duplicate-address" ["enp1s0f0np0 and enP7s7 have one address, 192.168.100.1"] "";
        "two functions of one link selected": with(two(), |bed| bed.set("NCCL_IB_HCA", "rocep1s0f0,rocep1s0f1")) =>
            Slow "hca-filter-one-link" ["rocep1s0f0 and rocep1s0f1", "excludes roceP2p1s0f0"] "unset NCCL_IB_HCA";
        "a filter that admits nothing": with(one(), |bed| bed.set("NCCL_IB_HCA", "mlx5_7")) => Broken "hca-filter-empty" ["NCCL_IB_HCA"] "unset NCCL_IB_HCA";
        "a filter that names a port without an address": with(two(), |bed| {
            bed.no_gids("rocep1s0f1");
            let mut links = bed.links(&["p0", "p1"]);
            links.retain(|link| link["ifname"] != "enp1s0f1np1");
            bed.interfaces(&links);
            bed.set("NCCL_IB_HCA", "=rocep1s0f0,roceP2p1s0f0,rocep1s0f1");
        }) => Fragile "hca-filter-unusable" ["rocep1s0f1"] "unset NCCL_IB_HCA";
        "a PCIe link of two lanes": with(one(), |bed| bed.pci("rocep1s0f0", "current_link_width", "2\n")) => Slow "slow-pcie-link" ["Gen5 x2", "Gen5 x4"] "fwupdmgr";
        "a PCIe link at generation 4": with(one(), |bed| bed.pci("roceP2p1s0f0", "current_link_speed", "16.0 GT/s PCIe\n")) =>
            Slow "slow-pcie-link" ["Gen4 x4"] "fwupdmgr";
        // geerlingguy/raspberry-pi-pcie-devices 143: a ConnectX-3 on one of its lanes.
        "a card on one lane, on another machine": with(one(), |bed| {
            bed.other_machine();
            bed.pci("rocep1s0f0", "current_link_width", "1\n");
        }) => Slow "slow-pcie-link" ["Gen5 x1"] "lspci -vv -d 15b3:";
        "PFC for another priority, trust PCP": with(one(), |bed| {
            bed.mlnx_qos("pcp", "0   0   0   1   0   0   0   0");
            bed.qos_unit();
        }) => Fragile "unprotected-priority" ["rocep1s0f0 and roceP2p1s0f0", "priority 0", "for 3 alone"]
            "sudo dcb app replace dev enp1s0f0np0 dscp-prio 26:3 && sudo dcb app replace dev enP2p1s0f0np0 dscp-prio 26:3";
        "PFC for another priority, trust DSCP": with(one(), |bed| {
            bed.mlnx_qos("dscp", "0   0   0   0   0   1   0   0");
            bed.qos_unit();
            bed.set("NCCL_IB_TC", "106");
        }) => Fragile "unprotected-priority" ["priority 3", "for 5 alone"] "export NCCL_IB_TC=162";
        "an interface MTU of 1500 on all rails": with(one(), |bed| {
            for name in ["enp1s0f0np0", "enP2p1s0f0np0"] {
                bed.write(&format!("sys/class/net/{name}/mtu"), "1500\n");
            }
        }) => Slow "small-mtu" ["enp1s0f0np0", "1024"] "ip link set enp1s0f0np0 mtu 9000";
        "an MTU that differs": with(one(), |bed| bed.write("sys/class/net/enP2p1s0f0np0/mtu", "1500\n")) => Slow "small-mtu" ["roceP2p1s0f0 has a path MTU of 1024"] "mtu 9000";
        // NVIDIA/nccl 1573: pods with net1 and net2 (macvlan).
        "an interface MTU of 1500 in a pod": with(one(), |bed| {
            bed.write("run/secrets/kubernetes.io/serviceaccount/token", "");
            for name in ["enp1s0f0np0", "enP2p1s0f0np0"] {
                bed.write(&format!("sys/class/net/{name}/mtu"), "1500\n");
            }
        }) => Slow "small-mtu" ["NetworkAttachmentDefinition"] "";
        // NVIDIA/nccl 177: bond0.2973 has MTU 1500, and bond0 below it 8888.
        "a VLAN with an MTU of 1500": with(one(), |bed| bed.vlan(&FUNCTIONS[0], "1500\n")) =>
            Slow "small-mtu" ["below a VLAN needs the line"] "ip link set enp1s0f0np0 mtu 9000 && sudo ip link set enp1s0f0np0.100 mtu 9000";
        "twins in one subnet": with(one(), |bed| {
            let links = [link("lo", 1, "127.0.0.1/8"), link("enp1s0f0np0", 10, "192.168.100.1/16"), link("enP2p1s0f0np0", 12, "192.168.101.1/16")];
            bed.write("answers/ip-addr.json", &addresses(&links));
            // A shared subnet does harm only if functions answer ARP for each other.
            bed.write("proc/sys/net/ipv4/conf/all/arp_ignore", "0\n");
        }) => Fragile "shared-subnet" ["rocep1s0f0 and roceP2p1s0f0", "a subnet of its own"] "";
        "the management network in a rail's subnet": with(one(), |bed| {
            let links = [link("enP7s7", 2, "192.168.100.77/24"), link("enp1s0f0np0", 10, "192.168.100.1/24"), link("enP2p1s0f0np0", 12, "192.168.101.1/24")];
            bed.write("answers/ip-addr.json", &addresses(&links));
        }) => Fragile "subnet-clash" ["enP7s7", "rocep1s0f0", "192.168.100.0/24", "another subnet"] "";
        "twins that answer ARP for each other": with(one(), |bed| bed.write("proc/sys/net/ipv4/conf/all/arp_ignore", "0\n")) =>
            Fragile "arp" ["rocep1s0f0", "roceP2p1s0f0"] "arp_ignore=1";
        "ARP with rp_filter 1 in one subnet": with(one(), |bed| {
            for name in ["enp1s0f0np0", "enP2p1s0f0np0", "all"] {
                bed.write(&format!("proc/sys/net/ipv4/conf/{name}/rp_filter"), "1\n");
            }
            let links = [link("enp1s0f0np0", 10, "192.168.100.1/16"), link("enP2p1s0f0np0", 12, "192.168.101.1/16")];
            bed.write("answers/ip-addr.json", &addresses(&links));
        }) => Fragile "arp" ["rp_filter"] "rp_filter=2";
        "a twin with a link-local address alone": with(one(), |bed| {
            for at in [2, 3] {
                bed.port("roceP2p1s0f0", &format!("gids/{at}"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
            }
            let local = serde_json::json!({"family": "inet6", "local": "fe80::fe4c:eaff:fef9:4234", "prefixlen": 64});
            let mut twin = link("enP2p1s0f0np0", 12, "");
            twin["addr_info"] = serde_json::json!([local]);
            bed.write("answers/ip-addr.json", &addresses(&[link("enp1s0f0np0", 10, "192.168.100.1/24"), twin]));
        }) => Note "link-local-only" ["roceP2p1s0f0", "rocep1s0f0", "a subnet of its own"] "";
        "a port that reports no speed": with(one(), |bed| bed.port("rocep1s0f0", "rate", "unknown\n")) => Note "unknown-speed" ["rocep1s0f0"] "ethtool enp1s0f0np0";
        "an automatic profile on a twin without an address": with(one(), |bed| {
            let links = [link("lo", 1, "127.0.0.1/8"), link("enp1s0f0np0", 10, "192.168.100.1/24"), link("enP2p1s0f0np0", 12, "")];
            bed.write("answers/ip-addr.json", &addresses(&links));
            bed.profile("enP2p1s0f0np0", "-999", "Wired connection 1", "auto");
        }) => Fragile "automatic-profile" ["enP2p1s0f0np0 (\"Wired connection 1\")", "DHCP", "even if netplan"] "sudo nmcli con delete \"Wired connection 1\" && sudo netplan apply";
        "an automatic profile that leaves a twin without an address": with(one(), |bed| {
            bed.no_gids("roceP2p1s0f0");
            bed.interfaces(&[link("enp1s0f0np0", 10, "192.168.100.1/24"), link("enP2p1s0f0np0", 12, "")]);
            bed.profile("enP2p1s0f0np0", "-999", "Wired connection 1", "auto");
        }) => Slow "automatic-profile" ["enP2p1s0f0np0", "no address and is no rail", "by hand"] "sudo nmcli con delete";
        "automatic profiles that leave no rail": with(one(), |bed| {
            for (device, netdev) in [("rocep1s0f0", "enp1s0f0np0"), ("roceP2p1s0f0", "enP2p1s0f0np0")] {
                bed.no_gids(device);
                bed.profile(netdev, "-999", &format!("Wired {netdev}"), "auto");
            }
            bed.interfaces(&[link("enp1s0f0np0", 10, ""), link("enP2p1s0f0np0", 12, "")]);
        }) => Broken "automatic-profile" ["enp1s0f0np0", "no address and is no rail"] "sudo nmcli con delete";
        "an automatic profile on a rail with an address": with(one(), |bed| bed.profile("enp1s0f0np0", "-999", "Kabelgebunden 1", "auto")) =>
            Note "automatic-profile" ["enp1s0f0np0 (\"Kabelgebunden 1\")", "can change"] "nmcli con delete \"Kabelgebunden 1\"";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_obstacle_has_a_text_for_several_ports() {
        for (obstacle, several) in [
            (Obstacle::Excluded, "NCCL_IB_HCA excludes them"),
            (
                Obstacle::LinkLayer(LinkLayer::Unspecified),
                "their link layer is not Ethernet",
            ),
            (
                Obstacle::State(PortState::Down),
                "the ports are down: no cable, or their interfaces are not up",
            ),
            (
                Obstacle::State(PortState::Init),
                "the ports are not active yet (state INIT)",
            ),
            (
                Obstacle::NoGid,
                "they have no RoCE v2 GID: their interfaces have neither an IPv4 nor an IPv6 address",
            ),
        ] {
            assert_eq!(text_for_several(&obstacle), several);
            assert!(
                !several.contains(" it") && obstacle.to_string() != several,
                "{obstacle}"
            );
        }
    }

    #[test]
    fn a_cure_follows_from_the_obstacle() {
        let port = |obstacle| Refused {
            device: "mlx5_0".to_owned(),
            port: 1,
            netdev: Some("eth0".to_owned()),
            phys_port: Some("p0".to_owned()),
            pci: None,
            speed_mbps: None,
            obstacle,
            is_late: false,
        };
        let commands = |obstacle: Obstacle| {
            let finding = with_cure(
                NO_RAIL.finding(""),
                &obstacle,
                &[&port(obstacle.clone())],
                None,
            );
            (
                finding.cure.unwrap_or_default(),
                finding.now.unwrap_or_default(),
            )
        };
        let cure = |obstacle: Obstacle| commands(obstacle).0;
        assert_eq!(cure(Obstacle::Excluded), "unset NCCL_IB_HCA");
        assert_eq!(
            cure(Obstacle::LinkLayer(LinkLayer::InfiniBand)),
            OWN_NETWORK
        );
        assert_eq!(cure(Obstacle::NoInterface), "");
        for state in [PortState::Down, PortState::Init, PortState::Other(5)] {
            let (for_good, now) = commands(Obstacle::State(state));
            assert_eq!(for_good, "");
            assert_eq!(now, "sudo ip link set eth0 up    # with a cable in p0");
        }
        for without in [Obstacle::NoGid, Obstacle::NoAddress("eth0".to_owned())] {
            assert_eq!(cure(without), "");
        }
    }
}
