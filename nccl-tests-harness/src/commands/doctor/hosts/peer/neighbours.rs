//! Compares two hardware addresses of a rail: its own, and the one that the other host's ARP table
//! has for it. The two differ if functions answer ARP for each other, or if two hosts have the same
//! IP address. Packets then go to a wrong interface.

use super::sheet::{MAX_LIST_LEN, Neighbour, Sheet};
use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::findings::arp_cure;
use crate::commands::doctor::hosts::rail::{Pair, RailSheet};
use crate::commands::doctor::place::Place;
use std::net::Ipv4Addr;

kinds! {
    ARP_ANSWERED_BY_ANOTHER = Fragile "arp-answered-by-another": "a host's ARP table gives a rail another function's hardware address", "as for `arp`, on that host";
    ARP_FOREIGN = Fragile "arp-foreign": "a host has the hardware address of another host for a rail", "find the second owner of the address: `ip neigh`";
}

/// Returns the entries of `/proc/net/arp` (`proc(5)`) for the interfaces of these rails. IPv6 needs
/// no check, because no function answers for the IPv6 address of another.
pub fn read(place: &Place, rails: &[RailSheet]) -> Vec<Neighbour> {
    let mut table = parse(&place.text("/proc/net/arp").unwrap_or_default());
    table.retain(|entry| rails.iter().any(|rail| is_of(rail, entry)));
    table.truncate(MAX_LIST_LEN);
    table
}

fn is_of(rail: &RailSheet, entry: &Neighbour) -> bool {
    rail.netdev
        .as_deref()
        .is_none_or(|netdev| netdev == entry.interface)
}

fn parse(table: &str) -> Vec<Neighbour> {
    /// `ATF_COM` in Linux' `include/uapi/linux/if_arp.h`.
    const COMPLETE: u32 = 0x2;
    let entry = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [address, _, flags, hardware, _, interface] = fields[..] else {
            return None;
        };
        let is_complete = u32::from_str_radix(flags.strip_prefix("0x")?, 16).ok()? & COMPLETE != 0;
        let address = address.parse().ok().filter(|_| is_complete)?;
        Some(Neighbour {
            address,
            hardware: hardware.to_owned(),
            interface: interface.to_owned(),
        })
    };
    table.lines().skip(1).filter_map(entry).collect()
}

/// Judges the entries that host `viewer` has in its ARP table for the rails of host `other`.
/// `table` is the ARP table. Each of `pairs` has the index of a rail of `viewer` and the index of a
/// rail of `other`.
pub fn judge(
    viewer: &Sheet,
    table: &[Neighbour],
    other: &Sheet,
    pairs: &[(usize, usize)],
) -> Vec<Finding> {
    let mut found = Vec::new();
    for (own, theirs) in pairs
        .iter()
        .map(|(own, theirs)| (&viewer.rails[*own], &other.rails[*theirs]))
    {
        let is_meant = |entry: &&Neighbour| is_of(own, entry) && has(theirs, entry.address);
        for entry in table.iter().filter(is_meant) {
            found.extend(of_entry(viewer, entry, other, theirs));
        }
    }
    found
}

fn of_entry(viewer: &Sheet, entry: &Neighbour, other: &Sheet, rail: &RailSheet) -> Option<Finding> {
    let netdev = rail.netdev.as_deref()?;
    let is_that = |address: &str| address.eq_ignore_ascii_case(&entry.hardware);
    let own = other
        .interfaces
        .iter()
        .find(|(name, _)| name == netdev)
        .map(|(_, address)| address)?;
    if is_that(own) {
        return None;
    }
    let (
        seer,
        owner,
        Neighbour {
            address, hardware, ..
        },
    ) = (&viewer.host, &other.host, entry);
    let way = format!("{seer} sends what is for {address} ({netdev} of {owner}");
    Some(
        match other
            .interfaces
            .iter()
            .find(|(_, address)| is_that(address))
        {
            Some((answering, _)) => {
                let text = format!(
                    "{way}) to {hardware}, which is {answering} of {owner}: the functions of {owner} answer ARP for each other"
                );
                let cure = format!(
                    "{}    # on {owner}; then on {seer}: sudo ip neigh flush to {address}",
                    arp_cure(false)
                );
                ARP_ANSWERED_BY_ANOTHER.finding(text).cured_by(cure)
            }
            None => {
                let text = format!(
                    "{way}, {own}) to {hardware}, which is no interface of {owner}: another host has this address too"
                );
                let cure = format!(
                    "ip neigh show {address}    # on {seer}; then give that host another address"
                );
                ARP_FOREIGN.finding(text).cured_by(cure)
            }
        },
    )
}

fn has(rail: &RailSheet, address: Ipv4Addr) -> bool {
    rail.addresses
        .iter()
        .any(|(ip, _)| ip.to_ipv4_mapped() == Some(address))
}

pub fn swapped(pairs: &[Pair]) -> Vec<(usize, usize)> {
    pairs.iter().map(|pair| (pair.there, pair.here)).collect()
}
