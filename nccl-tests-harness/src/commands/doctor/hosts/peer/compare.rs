//! Makes findings from the differences between the sheets of two hosts, without I/O.

use super::sheet::{NcclSheet, Sheet};
use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::findings::MTU_FOR_GOOD;
use crate::commands::doctor::hosts::rail::{Pair, PairedBy, RailSheet};
use proto::tuner;
use std::collections::BTreeSet;
use std::net::Ipv6Addr;

kinds! {
    PEER_VERSION = Fragile "peer-version": "the hosts have different versions of `nccl-spark`", "one version on both hosts";
    PEER_PLUGIN = Fragile "peer-plugin": "the hosts have different builds of the plugin", "copy one file to the other host";
    PEER_PLUGIN_MISSING = Broken "peer-plugin-missing": "one host has no plugin", "`sudo nccl-spark install` there";
    PEER_NCCL = Fragile "peer-nccl": "the hosts have different versions of NCCL", "one version: NCCL does not start with two";
    PEER_NCCL_BUILD = Note "peer-nccl-build": "the hosts have different builds of one version of NCCL", "nothing, unless one of them is `nccl-bad-build`";
    PEER_TUNER = Broken "peer-tuner": "the tuners of the hosts decide differently", "[tuning.md](tuning.md#all-ranks-must-agree)";
    PEER_SETTINGS = Fragile "peer-settings": "a variable differs that must be the same on both hosts", "set it on both, or on neither";
    PEER_DUPLICATE_ADDRESS = Broken "peer-duplicate-address": "both hosts have one address", "another address on one of the hosts";
    NO_COMMON_SUBNET = Broken "no-common-subnet": "no rail of one host shares a subnet with one of the other, or has a route to one", "[topologies.md](topologies.md)";
    PEER_PRIORITY = Fragile "peer-priority": "the two ends of a path have different priorities or PFC", "[switches.md](switches.md#priority)";
    PEER_MTU = Slow "peer-mtu": "the two ends of a path have different MTUs", "`mtu: 9000` in the netplan file where it is smaller";
    PEER_HALF_CABLE = Slow "peer-half-cable": "one function of a cable has no counterpart on the other host", "[an address](install.md#addresses) for the other function";
    ASYMMETRIC_CABLING = Note "asymmetric-cabling": "a cable leads from p0 to p1", "nothing: the plugin pairs by subnets";
}

pub fn compare(here: &Sheet, there: &Sheet, pairs: &[Pair]) -> Vec<Finding> {
    let mut found = Vec::new();
    versions(here, there, &mut found);
    gpus(here, there, &mut found);
    settings(here, there, &mut found);
    rails(here, there, pairs, &mut found);
    found
}

fn versions(here: &Sheet, there: &Sheet, found: &mut Vec<Finding>) {
    let a = &here.host;
    let b = &there.host;
    if here.program != there.program {
        let text = format!(
            "nccl-spark is {} on {a} and {} on {b}: nothing is measured",
            here.program, there.program
        );
        found.push(PEER_VERSION.finding(text));
    }
    match (&here.plugin, &there.plugin) {
        (Some(one), Some(other)) if one.sha256 != other.sha256 => {
            let text = format!(
                "{} of {a} and {} of {b} are different builds of the plugin",
                one.path, other.path
            );
            let cure = format!("scp {} {b}:{}", one.path, other.path);
            found.push(PEER_PLUGIN.finding(text).cured_by(cure));
        }
        (Some(_), None) => found.push(no_plugin(b)),
        (None, Some(_)) => found.push(no_plugin(a)),
        _ => {}
    }
    if let (Some(one), Some(other)) = (&here.nccl, &there.nccl) {
        let version = |nccl: &NcclSheet| {
            nccl.version
                .clone()
                .unwrap_or_else(|| "of an unknown version".to_owned())
        };
        let (version, others) = (version(one), version(other));
        if version != others {
            let follows = "NCCL refuses to start a job with two versions";
            found.push(PEER_NCCL.finding(format!(
                "NCCL is {version} on {a} and {others} on {b}: {follows}"
            )));
        } else if one.build_id != other.build_id {
            let id = &one.build_id;
            let others = &other.build_id;
            let text = format!(
                "NCCL {version} is another build on {a} (build id {id}) than on {b} ({others})"
            );
            found.push(PEER_NCCL_BUILD.finding(text));
        }
    }
}

fn no_plugin(host: &str) -> Finding {
    let text = format!(
        "{host} has no plugin that can be read: NCCL uses another network there, and the job does not start"
    );
    PEER_PLUGIN_MISSING
        .finding(text)
        .cured_by("sudo nccl-spark install    # there")
}

/// Settings of the tuner. When two ranks connect, their plugins also compare hashes of the rows and
/// restrictions by which their tuners decide, and refuse to connect if the hashes differ.
const TUNER: [&str; 3] = [
    "NCCL_SPARK_TUNER",
    "NCCL_SPARK_TUNER_TABLE",
    "NCCL_SPARK_LL128",
];

/// Compares the GPUs. With the setting `auto`, the tuner is active only on a GB10.
fn gpus(here: &Sheet, there: &Sheet, found: &mut Vec<Finding>) {
    let is_auto = |sheet: &Sheet| {
        sheet
            .settings
            .get("NCCL_SPARK_TUNER")
            .is_none_or(|mode| mode == "auto")
    };
    let (Some(one), Some(other)) = (&here.gpu, &there.gpu) else {
        return;
    };
    if !is_auto(here) || !is_auto(there) || tuner::is_for(one) == tuner::is_for(other) {
        return;
    }
    let text = format!(
        "the GPU is {one} on {} and {other} on {}: the tuner is active on a GB10 alone, and the plugin refuses to connect ranks \
         whose tuners decide differently",
        here.host, there.host
    );
    found.push(
        PEER_TUNER
            .finding(text)
            .cured_by("export NCCL_SPARK_TUNER=off    # on both"),
    );
}

fn settings(here: &Sheet, there: &Sheet, found: &mut Vec<Finding>) {
    let names: BTreeSet<&String> = here.settings.keys().chain(there.settings.keys()).collect();
    for name in names {
        let one = here.settings.get(name);
        let other = there.settings.get(name);
        if one == other {
            continue;
        }
        let word = |value: Option<&String>| value.map_or("unset".to_owned(), |value| short(value));
        let (severity, id, what) = match name.as_str() {
            name if TUNER.contains(&name) => (
                Severity::Broken,
                PEER_TUNER,
                "the plugin refuses to connect ranks whose tuners decide differently",
            ),
            "NCCL_IB_TC" | "NCCL_IB_SL" => (
                Severity::Fragile,
                PEER_SETTINGS,
                "packets of one host have another priority than those of the other",
            ),
            "NCCL_SPARK_RING_TCP" => (
                Severity::Broken,
                PEER_SETTINGS,
                "the plugin refuses to connect such hosts",
            ),
            _ => (
                Severity::Fragile,
                PEER_SETTINGS,
                "ranks that decide differently hang",
            ),
        };
        let text = format!(
            "{name} is {} on {} and {} on {}: {what}",
            word(one),
            here.host,
            word(other),
            there.host
        );
        found.push(
            id.finding(text)
                .at(severity)
                .cured_by(format!("unset {name}    # on both, or set it on both")),
        );
    }
}

fn short(value: &str) -> String {
    const SHOWN: usize = 40;
    match value.chars().count() > SHOWN {
        true => format!(
            "{}... ({} characters)",
            value.chars().take(SHOWN).collect::<String>(),
            value.chars().count()
        ),
        false => value.to_owned(),
    }
}

fn rails(here: &Sheet, there: &Sheet, pairs: &[Pair], found: &mut Vec<Finding>) {
    let a = &here.host;
    let b = &there.host;
    if pairs.is_empty() {
        duplicate_addresses(here, there, found);
        let own = addresses(here);
        let theirs = addresses(there);
        let text = format!(
            "no rail of {a} shares a subnet with a rail of {b}, or has a route to one: {own}; {theirs}"
        );
        let cure = "nccl-spark rails    # on both; the two ends of a cable need addresses of one subnet, other rails a route";
        found.push(NO_COMMON_SUBNET.finding(text).cured_by(cure));
        return;
    }
    duplicate_addresses(here, there, found);
    for pair in pairs {
        let one = &here.rails[pair.here];
        let other = &there.rails[pair.there];
        let names = format!("{} of {a} and {} of {b}", one.name, other.name);
        if one.mtu_bytes != other.mtu_bytes {
            let text = format!(
                "{names} have path MTUs of {} and {} bytes: the smaller one is used, and larger packets of others get lost",
                one.mtu_bytes, other.mtu_bytes
            );
            let (less, host) = if one.mtu_bytes < other.mtu_bytes {
                (one, a)
            } else {
                (other, b)
            };
            let netdev = less.netdev.as_deref().unwrap_or("INTERFACE");
            found.push(
                PEER_MTU
                    .finding(format!("{text}. {MTU_FOR_GOOD}"))
                    .until_boot_by(format!("sudo ip link set {netdev} mtu 9000    # on {host}")),
            );
        }
        let qos = |host: &Sheet, rail: &RailSheet| host.qos.get(rail.netdev.as_ref()?).cloned();
        if let (Some(own), Some(theirs)) = (qos(here, one), qos(there, other))
            && (own.priority, own.pfc) != (theirs.priority, theirs.pfc)
        {
            let text = format!(
                "{names} have different priorities: {}; {}",
                own.text, theirs.text
            );
            let cure = "nccl-spark doctor -v    # on both; then the same dcb commands and NCCL_IB_TC on both";
            found.push(PEER_PRIORITY.finding(text).cured_by(cure));
        }
        if let (Some(port), Some(others)) = (&one.phys_port, &other.phys_port)
            && port != others
            && pair.by != PairedBy::Route
        {
            let text = format!(
                "the cable leads from {port} of {a} to {others} of {b}, which is harmless, because the plugin pairs by subnet ({names})"
            );
            found.push(ASYMMETRIC_CABLING.finding(text));
        }
    }
    let ends = |end: fn(&Pair) -> usize| pairs.iter().map(|pair| (end(pair), pair.by)).collect();
    without_a_pair(here, there, ends(|pair| pair.here), found);
    without_a_pair(there, here, ends(|pair| pair.there), found);
}

/// Finds addresses that a rail of each host has. Link-local IPv6 addresses come from the hardware,
/// and are left out: they count only on their own link.
fn duplicate_addresses(here: &Sheet, there: &Sheet, found: &mut Vec<Finding>) {
    for one in &here.rails {
        for other in &there.rails {
            let has = |ip: &Ipv6Addr| other.addresses.iter().any(|(their, _)| their == ip);
            let mut own = one.addresses.iter().map(|(ip, _)| ip);
            let Some(ip) = own.find(|ip| !ip.is_unicast_link_local() && has(ip)) else {
                continue;
            };
            let text = format!(
                "{} of {} and {} of {} have one address, {}: give one of them another address of the same subnet \
                 (docs/guide/install.md, Addresses)",
                one.name,
                here.host,
                other.name,
                there.host,
                ip.to_canonical()
            );
            found.push(PEER_DUPLICATE_ADDRESS.finding(text));
        }
    }
}

/// Finds unpaired rails whose cable has another rail that is paired by cable or subnet. A cable
/// without any such pair is taken to lead to another host, so its rails are not reported.
fn without_a_pair(
    host: &Sheet,
    other: &Sheet,
    paired: Vec<(usize, PairedBy)>,
    found: &mut Vec<Finding>,
) {
    let is_lonely = |at: &usize| {
        let is_on_cable = |rail: usize| host.rails[rail].cable == host.rails[*at].cable;
        !paired.iter().any(|(rail, _)| rail == at)
            && paired
                .iter()
                .any(|(rail, by)| *by != PairedBy::Route && is_on_cable(*rail))
    };
    for rail in (0..host.rails.len())
        .filter(is_lonely)
        .map(|at| &host.rails[at].name)
    {
        let own = &host.host;
        let other = &other.host;
        let text = format!(
            "{rail} of {own} has no counterpart on {other}, although the other function of its port has one: half of the cable's PCIe links are unused"
        );
        let cure = format!("ip address show    # on {other}: an address in the subnet of {rail}");
        found.push(PEER_HALF_CABLE.finding(text).cured_by(cure));
    }
}

fn addresses(sheet: &Sheet) -> String {
    let of_rail = |rail: &RailSheet| {
        let texts = rail.addresses.iter().map(|(ip, prefix)| match prefix {
            Some(prefix) => format!("{}/{prefix}", ip.to_canonical()),
            None => ip.to_canonical().to_string(),
        });
        format!("{} ({})", rail.name, texts.collect::<Vec<_>>().join(", "))
    };
    match sheet.rails.is_empty() {
        true => format!("{} has no rail", sheet.host),
        false => format!(
            "{} has {}",
            sheet.host,
            sheet
                .rails
                .iter()
                .map(of_rail)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    }
}
