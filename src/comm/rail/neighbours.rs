//! Finds which of a peer's rails has the hardware (MAC) address that this host sends to. Used in
//! set-up, for the message about a path that does not carry data.
//!
//! The kernel looks up the hardware address of a peer's IP address when a queue pair is connected,
//! and the NIC keeps that hardware address. If two functions of the peer answer ARP for each other,
//! the kernel may get the hardware address of the wrong one. This module reads the address from the
//! kernel's present ARP table (`/proc/net/arp`, `proc(5)`), which any user may read and which
//! contains only IPv4. A rail's own hardware address is part of its link-local GID in EUI-64 form
//! (RFC 4291 appendix A). Link-local GIDs of other forms do not contain it.

use host::interfaces::ARP_FIX_COMMAND;
use proto::wire::fields::RailAdvert;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

#[derive(Clone, Copy, PartialEq, Eq)]
struct HardwareAddress([u8; 6]);

/// Returns text about the hardware address used for `peer_gid`, to append to the reason why the
/// path does not carry data. Empty if that hardware address is unknown. `netdev` is this host's
/// interface. `theirs` are the rails of the peer, `rail` is the index of the rail that this host
/// means to reach, and `peer` is the peer's name.
pub fn sent_to(
    netdev: Option<&str>,
    peer_gid: [u8; 16],
    theirs: &[RailAdvert],
    rail: usize,
    peer: &str,
) -> String {
    let Some(ip) = Ipv6Addr::from(peer_gid).to_ipv4_mapped() else {
        return String::new();
    };
    let table = Path::new("/proc/net/arp");
    match std::fs::read_to_string(table) {
        Ok(table) => in_table(&table, ip, netdev)
            .map_or_else(String::new, |found| compared(found, ip, theirs, rail, peer)),
        Err(error) => {
            tracing::debug!(
                "{}: hardware address of {ip} not known: {error}",
                table.display()
            );
            String::new()
        }
    }
}

/// Returns the hardware address of `ip` in the text of `/proc/net/arp`, if resolved on `netdev`.
fn in_table(table: &str, ip: Ipv4Addr, netdev: Option<&str>) -> Option<HardwareAddress> {
    /// Flag of entries with a hardware address (`ATF_COM`, Linux' `include/uapi/linux/if_arp.h`).
    const COMPLETE: u32 = 0x2;
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let (address, _, flags) = (fields.next()?, fields.next()?, fields.next()?);
        let (hardware, _, device) = (fields.next()?, fields.next()?, fields.next()?);
        let flags = u32::from_str_radix(flags.strip_prefix("0x")?, 16).ok()?;
        let is_meant = address.parse() == Ok(ip) && netdev.is_none_or(|netdev| netdev == device);
        if is_meant && flags & COMPLETE != 0 {
            HardwareAddress::parse(hardware)
        } else {
            None
        }
    })
}

fn compared(
    found: HardwareAddress,
    ip: Ipv4Addr,
    theirs: &[RailAdvert],
    rail: usize,
    peer: &str,
) -> String {
    let own = theirs.get(rail).and_then(HardwareAddress::of);
    let name = theirs.get(rail).map_or("that rail", |advert| &advert.name);
    if own == Some(found) {
        return format!("; {ip} resolves to {found}, which is the address of {name}");
    }
    let beside = own.map_or_else(String::new, |own| format!(" (its own address is {own})"));
    let others = theirs
        .iter()
        .enumerate()
        .filter(|(place, _)| *place != rail);
    match others
        .map(|(_, advert)| advert)
        .find(|advert| HardwareAddress::of(advert) == Some(found))
    {
        Some(other) => format!(
            "; {ip} resolves to {found}, which is the address of {} and not of {name}{beside}: they answer ARP for each other; run \
             {ARP_FIX_COMMAND} on {}",
            other.name,
            // A peer's name is HOST:PID.
            peer.rsplit_once(':').map_or(peer, |(host, _)| host)
        ),
        None => match own {
            Some(own) => format!("; {ip} resolves to {found}, but the address of {name} is {own}"),
            None => format!("; {ip} resolves to {found}"),
        },
    }
}

impl HardwareAddress {
    /// Derives a rail's hardware address from its link-local GID, if that GID contains it.
    fn of(advert: &RailAdvert) -> Option<Self> {
        advert
            .addresses
            .iter()
            .find_map(|address| match address.gid {
                [0xfe, 0x80, 0, 0, 0, 0, 0, 0, a, b, c, 0xff, 0xfe, d, e, f] => {
                    Some(Self([a ^ 2, b, c, d, e, f]))
                }
                _ => None,
            })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
        }
        parts.next().is_none().then_some(Self(bytes))
    }
}

impl fmt::Display for HardwareAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::wire::fields::{Address, Attachment};

    const TABLE: &str = "\
IP address       HW type     Flags       HW address            Mask     Device
192.168.100.2    0x1         0x2         4c:bb:47:00:00:01     *        enp1s0f0np0
192.168.100.2    0x1         0x2         4c:bb:47:00:00:05     *        enP2p1s0f0np0
192.168.100.3    0x1         0x0         00:00:00:00:00:00     *        enp1s0f0np0
192.168.100.4    0x1         0x6         4c:bb:47:00:00:09     *        enp1s0f0np0
";

    fn rail(name: &str, addresses: &[&str]) -> RailAdvert {
        let address = |text: &&str| Address {
            gid: text.parse::<Ipv6Addr>().unwrap().octets(),
            prefix: None,
        };
        RailAdvert {
            name: name.into(),
            phys_port: String::new(),
            attachment: Attachment {
                link: 0,
                link_mbps: 0,
                cable: 0,
                port_mbps: 1,
            },
            speed_mbps: 1,
            mtu_bytes: 4096,
            addresses: addresses.iter().map(address).collect(),
            is_usable: true,
        }
    }

    fn twins() -> [RailAdvert; 2] {
        [
            rail("f0:1", &["::ffff:192.168.100.2", "fe80::4ebb:47ff:fe00:1"]),
            rail(
                "P2f0:1",
                &["fe80::4ebb:47ff:fe00:5", "::ffff:192.168.100.4"],
            ),
        ]
    }

    fn said(ip: [u8; 4], netdev: &str, theirs: &[RailAdvert], rail: usize) -> String {
        let found = in_table(TABLE, ip.into(), Some(netdev));
        found.map_or_else(String::new, |found| {
            compared(found, ip.into(), theirs, rail, "spark-2:4711")
        })
    }

    #[test]
    fn only_resolved_entries_of_the_interface_count() {
        let text =
            |ip: [u8; 4], netdev| in_table(TABLE, ip.into(), netdev).map(|found| found.to_string());
        assert_eq!(
            text([192, 168, 100, 2], Some("enp1s0f0np0")).as_deref(),
            Some("4c:bb:47:00:00:01")
        );
        assert_eq!(
            text([192, 168, 100, 2], Some("enP2p1s0f0np0")).as_deref(),
            Some("4c:bb:47:00:00:05")
        );
        assert_eq!(
            text([192, 168, 100, 2], None).as_deref(),
            Some("4c:bb:47:00:00:01")
        );
        assert_eq!(
            text([192, 168, 100, 4], None).as_deref(),
            Some("4c:bb:47:00:00:09")
        );
        assert_eq!(text([192, 168, 100, 3], None), None);
        assert_eq!(text([192, 168, 100, 9], None), None);
        for odd in [
            "",
            "x",
            "\n192.168.100.2 0x1 0x2",
            "\n192.168.100.2 0x1 0x2 4c:bb * e",
            "\n192.168.100.2 0x1 2 4c:bb:47:0:0:1 * e",
        ] {
            assert!(
                in_table(odd, [192, 168, 100, 2].into(), None).is_none(),
                "{odd:?}"
            );
        }
    }

    #[test]
    fn the_twin_that_answered_is_named_with_the_cure_on_the_peer() {
        let line = said([192, 168, 100, 2], "enP2p1s0f0np0", &twins(), 0);
        let begin = "; 192.168.100.2 resolves to 4c:bb:47:00:00:05, which is the address of P2f0:1 and not of f0:1 (its own address is \
                     4c:bb:47:00:00:01): they answer ARP for each other; run sysctl -w";
        assert!(
            line.starts_with(begin) && line.ends_with(" on spark-2"),
            "{line}"
        );
        // The rail's own GID does not contain the address (stable-privacy); the other rail's does.
        let mut theirs = twins();
        theirs[0].addresses[1] = rail("", &["fe80::9a1c:77d2:41f0:5b3e"]).addresses[0];
        let line = said([192, 168, 100, 2], "enP2p1s0f0np0", &theirs, 0);
        assert!(
            line.contains("is the address of P2f0:1 and not of f0:1: they answer"),
            "{line}"
        );
    }

    #[test]
    fn known_facts_are_reported_without_a_guess() {
        let own = "; 192.168.100.2 resolves to 4c:bb:47:00:00:01, which is the address of f0:1";
        assert_eq!(said([192, 168, 100, 2], "enp1s0f0np0", &twins(), 0), own);
        let other = "; 192.168.100.4 resolves to 4c:bb:47:00:00:09, but the address of P2f0:1 is 4c:bb:47:00:00:05";
        assert_eq!(said([192, 168, 100, 4], "enp1s0f0np0", &twins(), 1), other);
        let unknown = [rail("f0:1", &["::ffff:192.168.100.2"])];
        assert_eq!(
            said([192, 168, 100, 2], "enp1s0f0np0", &unknown, 0),
            "; 192.168.100.2 resolves to 4c:bb:47:00:00:01"
        );
        assert_eq!(said([192, 168, 100, 3], "enp1s0f0np0", &twins(), 0), "");
        assert_eq!(
            sent_to(None, twins()[0].addresses[1].gid, &twins(), 0, "spark-2"),
            "",
            "there is no table of IPv6 to read"
        );
    }
}
