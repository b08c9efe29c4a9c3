//! Network interfaces in this process's network namespace. [`gid_owner`] finds the interface that
//! has the address of a GID. Only this file queries the system for interfaces; `routes` queries
//! routes through `netlink`.
//!
//! A port's GID table always has the link-local address that follows from the MAC address of the
//! port's interface (`ib_cache_gid_set_default_gid` in Linux' `drivers/infiniband/core/cache.c`).
//! The interface itself may not have that address. With NetworkManager's stable-privacy it has
//! another link-local address; with IPv6 off or netplan's `link-local: []` it has none. Neighbour
//! solicitations for an address that the interface does not have get no answer. Connecting a QP to
//! such an address fails after a second (`ETIMEDOUT`) or immediately (`ENETUNREACH`). [`gid_owner`]
//! detects these GIDs. It is called for the GIDs of each port when the plugin looks for rails at
//! init, and again for each connection.

pub mod netlink;
pub mod qos;
pub mod routes;

use crate::error::{Call, Error, Result};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::Path;

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// Index in this network namespace; 0 if the system does not report it.
    pub index: u32,
    /// True for a loopback interface.
    pub is_loopback: bool,
    /// True if the interface is up.
    pub is_up: bool,
    /// True if the interface has a carrier.
    pub is_running: bool,
    /// Addresses of the interface.
    pub addresses: Vec<InterfaceAddress>,
}

/// An address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address, with port 0 and, for IPv6, its scope.
    pub address: SocketAddr,
    /// Length of the subnet prefix, in bits of the address's own family. `None` if the system
    /// reports no mask.
    pub prefix: Option<u8>,
}

/// Lists all network interfaces that this process sees.
///
/// # Errors
/// [`Error::Os`] if `getifaddrs` fails.
pub fn all() -> Result<Vec<Interface>> {
    let entries = getifaddrs().map_err(|errno| Error::Os {
        call: Call::ListInterfaces,
        errno: errno as i32,
    })?;
    let mut found: Vec<Interface> = Vec::new();
    for entry in entries {
        let at = found
            .iter()
            .position(|interface| interface.name == entry.interface_name)
            .unwrap_or_else(|| {
                let has = |flag| entry.flags.contains(flag);
                found.push(Interface {
                    name: entry.interface_name.clone(),
                    index: 0,
                    is_loopback: has(InterfaceFlags::IFF_LOOPBACK),
                    is_up: has(InterfaceFlags::IFF_UP),
                    is_running: has(InterfaceFlags::IFF_RUNNING),
                    addresses: Vec::new(),
                });
                found.len() - 1
            });
        // The entry with the interface's link-layer address also has the index (`packet(7)`).
        if let Some(link) = entry
            .address
            .as_ref()
            .and_then(SockaddrStorage::as_link_addr)
        {
            found[at].index = u32::try_from(link.ifindex()).unwrap_or(0);
        }
        if let Some(address) = entry.address.as_ref().and_then(socket_address) {
            let prefix = entry
                .netmask
                .as_ref()
                .and_then(socket_address)
                .map(|mask| prefix_bits(mask.ip()));
            found[at]
                .addresses
                .push(InterfaceAddress { address, prefix });
        }
    }
    Ok(found)
}

/// An entry of a port's GID table, as reported by verbs.
#[derive(Debug, Clone, Copy)]
pub struct TableEntry<'a> {
    /// The RDMA device.
    pub device: &'a str,
    /// The port, from 1.
    pub port: u8,
    /// Index in the table.
    pub index: u16,
    /// The GID.
    pub gid: [u8; 16],
    /// Index of the GID's network interface; 0 for none. It is an index in the interface's own
    /// namespace, which may differ from this process's.
    pub ifindex: u32,
}

/// The network interface that has the address of a GID, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidOwner<'i> {
    /// An interface of this namespace.
    Found {
        /// The interface.
        interface: &'i Interface,
        /// Length of the subnet prefix in bits of the address's own family, if reported.
        prefix: Option<u8>,
    },
    /// No interface of this namespace has the address. The GID's interface may have it in another
    /// namespace.
    Elsewhere,
    /// The GID's interface is in this namespace and does not have the address. Only for link-local
    /// GIDs.
    Missing(&'i Interface),
}

/// Finds the interface that has the address of a GID. `sysfs` is the mount point of sysfs ("/sys").
pub fn gid_owner<'i>(
    sysfs: &Path,
    entry: TableEntry<'_>,
    interfaces: &'i [Interface],
) -> GidOwner<'i> {
    let gid = Ipv6Addr::from(entry.gid);
    let own = if gid.is_unicast_link_local() {
        own_interface(sysfs, entry, interfaces)
    } else {
        None
    };
    let ip = gid.to_canonical();
    let found = |interface: &'i Interface| {
        let address = interface
            .addresses
            .iter()
            .find(|each| each.address.ip() == ip)?;
        Some(GidOwner::Found {
            interface,
            prefix: address.prefix,
        })
    };
    if let Some(own) = own {
        return found(own).unwrap_or(GidOwner::Missing(own));
    }
    // The index may be from another namespace, and an unrelated interface may have the same index
    // here. So `found` compares the address.
    let by_index = interfaces
        .iter()
        .find(|interface| interface.index == entry.ifindex)
        .and_then(found);
    by_index
        .or_else(|| interfaces.iter().find_map(found))
        .unwrap_or(GidOwner::Elsewhere)
}

/// Returns the kernel's name of the network interface for an entry of a port's GID table.
pub fn gid_netdev(sysfs: &Path, device: &str, port: u8, gid_index: u16) -> Option<String> {
    let file = format!("class/infiniband/{device}/ports/{port}/gid_attrs/ndevs/{gid_index}");
    let name = std::fs::read_to_string(sysfs.join(file)).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Returns true for a Wi-Fi interface. cfg80211 or the older wireless extensions add an entry to
/// its sysfs directory (`net/wireless/core.c` and `net/core/net-sysfs.c` in Linux).
pub fn is_wireless(sysfs: &Path, interface: &str) -> bool {
    let folder = sysfs.join("class/net").join(interface);
    ["phy80211", "wireless"]
        .iter()
        .any(|entry| folder.join(entry).exists())
}

/// Command after which each interface of a host answers ARP only for its own addresses, and sends
/// ARP requests only from its own addresses (`arp_ignore` and `arp_announce` in Linux' `ip-sysctl`
/// documentation).
pub const ARP_FIX_COMMAND: &str =
    "sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2";

/// Returns a GID's interface if it is in this namespace. Name and index must both match, because
/// an unrelated interface of this namespace may have the same name or the same index.
fn own_interface<'i>(
    sysfs: &Path,
    entry: TableEntry<'_>,
    interfaces: &'i [Interface],
) -> Option<&'i Interface> {
    let by_index = interfaces
        .iter()
        .find(|interface| entry.ifindex > 0 && interface.index == entry.ifindex)?;
    let name = gid_netdev(sysfs, entry.device, entry.port, entry.index)?;
    Some(by_index).filter(|interface| interface.name == name)
}

fn socket_address(storage: &SockaddrStorage) -> Option<SocketAddr> {
    match (storage.as_sockaddr_in(), storage.as_sockaddr_in6()) {
        (Some(v4), _) => Some(SocketAddr::from((v4.ip(), 0))),
        (_, Some(v6)) => Some(SocketAddr::V6(SocketAddrV6::new(
            v6.ip(),
            0,
            0,
            v6.scope_id(),
        ))),
        _ => None,
    }
}

fn prefix_bits(mask: IpAddr) -> u8 {
    let ones = match mask {
        IpAddr::V4(mask) => mask.to_bits().leading_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones(),
    };
    // At most 128, so it fits.
    ones as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn masks_become_prefix_lengths() {
        assert_eq!(prefix_bits(IpAddr::V4(Ipv4Addr::new(255, 255, 255, 0))), 24);
        assert_eq!(
            prefix_bits(IpAddr::V4(Ipv4Addr::new(255, 255, 255, 252))),
            30
        );
        assert_eq!(
            prefix_bits(IpAddr::V6(Ipv6Addr::new(
                0xffff, 0xffff, 0xffff, 0xffff, 0, 0, 0, 0
            ))),
            64
        );
        assert_eq!(prefix_bits(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), 0);
    }

    #[test]
    fn wifi_is_recognised_in_sysfs() {
        let sysfs = tempfile::tempdir().unwrap();
        for entry in ["wlan0/phy80211", "wlan1/wireless", "eth0/queues"] {
            std::fs::create_dir_all(sysfs.path().join("class/net").join(entry)).unwrap();
        }
        let wireless = ["wlan0", "wlan1", "eth0", "eth1"]
            .map(|interface| is_wireless(sysfs.path(), interface));
        assert_eq!(wireless, [true, true, false, false]);
    }

    #[test]
    fn every_interface_of_this_host_is_listed_once() {
        let found = all().unwrap();
        assert!(!found.is_empty());
        let names: std::collections::BTreeSet<&str> = found
            .iter()
            .map(|interface| interface.name.as_str())
            .collect();
        assert_eq!(names.len(), found.len());
        if let Some(lo) = found.iter().find(|interface| interface.is_loopback) {
            let local = InterfaceAddress {
                address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
                prefix: Some(8),
            };
            assert!(
                lo.addresses.is_empty() || lo.addresses.contains(&local),
                "{lo:?}"
            );
        }
    }
}
