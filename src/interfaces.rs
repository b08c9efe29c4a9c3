//! The network interfaces of this process's namespace: the one place that asks the system for them.

use crate::error::{Error, Result};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Whether it is a loopback.
    pub is_loopback: bool,
    /// Whether it is up.
    pub is_up: bool,
    /// Whether it has a carrier.
    pub is_running: bool,
    /// Its addresses.
    pub addresses: Vec<InterfaceAddress>,
}

/// An address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address, with port 0 and, for IPv6, its scope.
    pub address: SocketAddr,
    /// Length of the subnet's prefix in the address's own bits.
    pub prefix: Option<u8>,
}

/// All network interfaces that this process sees.
///
/// # Errors
/// [`Error::Os`] when `getifaddrs` fails.
pub fn all() -> Result<Vec<Interface>> {
    let entries = getifaddrs().map_err(|errno| Error::Os {
        what: "cannot list the network interfaces (getifaddrs)".to_owned(),
        errno: errno as i32,
    })?;
    let mut found: Vec<Interface> = Vec::new();
    for entry in entries {
        let at = found.iter().position(|interface| interface.name == entry.interface_name).unwrap_or_else(|| {
            let has = |flag| entry.flags.contains(flag);
            found.push(Interface {
                name: entry.interface_name.clone(),
                is_loopback: has(InterfaceFlags::IFF_LOOPBACK),
                is_up: has(InterfaceFlags::IFF_UP),
                is_running: has(InterfaceFlags::IFF_RUNNING),
                addresses: Vec::new(),
            });
            found.len() - 1
        });
        if let Some(address) = entry.address.as_ref().and_then(socket_address) {
            let prefix = entry.netmask.as_ref().and_then(socket_address).map(|mask| prefix_bits(mask.ip()));
            found[at].addresses.push(InterfaceAddress { address, prefix });
        }
    }
    Ok(found)
}

fn socket_address(storage: &SockaddrStorage) -> Option<SocketAddr> {
    match (storage.as_sockaddr_in(), storage.as_sockaddr_in6()) {
        (Some(v4), _) => Some(SocketAddr::from((v4.ip(), 0))),
        (_, Some(v6)) => Some(SocketAddr::V6(SocketAddrV6::new(v6.ip(), 0, 0, v6.scope_id()))),
        _ => None,
    }
}

fn prefix_bits(mask: IpAddr) -> u8 {
    let ones = match mask {
        IpAddr::V4(mask) => mask.to_bits().leading_ones(),
        IpAddr::V6(mask) => mask.to_bits().leading_ones(),
    };
    // At most 128.
    ones as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn masks_become_prefix_lengths() {
        assert_eq!(prefix_bits(IpAddr::V4(Ipv4Addr::new(255, 255, 255, 0))), 24);
        assert_eq!(prefix_bits(IpAddr::V4(Ipv4Addr::new(255, 255, 255, 252))), 30);
        assert_eq!(prefix_bits(IpAddr::V6(Ipv6Addr::new(0xffff, 0xffff, 0xffff, 0xffff, 0, 0, 0, 0))), 64);
        assert_eq!(prefix_bits(IpAddr::V4(Ipv4Addr::UNSPECIFIED)), 0);
    }

    #[test]
    fn every_interface_of_this_host_comes_once() {
        let found = all().unwrap();
        assert!(!found.is_empty());
        let names: std::collections::BTreeSet<&str> = found.iter().map(|interface| interface.name.as_str()).collect();
        assert_eq!(names.len(), found.len());
        if let Some(lo) = found.iter().find(|interface| interface.is_loopback) {
            let local = InterfaceAddress { address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), prefix: Some(8) };
            assert!(lo.addresses.is_empty() || lo.addresses.contains(&local), "{lo:?}");
        }
    }
}
