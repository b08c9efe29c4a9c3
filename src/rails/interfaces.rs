//! The network interfaces of this process's namespace, with their addresses.

use crate::error::{Error, Result};
use std::net::IpAddr;
use std::path::Path;

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its index in this network namespace.
    pub index: u32,
    /// Its MTU in bytes; 0 where it cannot be read.
    pub mtu: u32,
    /// Its addresses, each with the length of its subnet's prefix in bits.
    pub addresses: Vec<(IpAddr, u8)>,
}

/// All network interfaces that this process sees, in index order.
///
/// # Errors
/// [`Error::Os`] when `getifaddrs` fails.
pub fn interfaces() -> Result<Vec<Interface>> {
    let entries =
        nix::ifaddrs::getifaddrs().map_err(|errno| Error::Os { what: "getifaddrs".to_owned(), errno: errno as i32 })?;
    let mut found: Vec<Interface> = Vec::new();
    for entry in entries {
        let name = entry.interface_name;
        let at = match found.iter().position(|interface| interface.name == name) {
            Some(at) => at,
            None => {
                // An interface that went away meanwhile has no index any more.
                let Ok(index) = nix::net::if_::if_nametoindex(name.as_str()) else { continue };
                let mtu = super::sysfs::netdev_mtu(Path::new("/sys"), &name).unwrap_or(0);
                found.push(Interface { name, index, mtu, addresses: Vec::new() });
                found.len() - 1
            }
        };
        if let (Some(address), Some(mask)) = (entry.address.as_ref().and_then(ip), entry.netmask.as_ref().and_then(ip))
        {
            found[at].addresses.push((address, prefix_bits(mask)));
        }
    }
    found.sort_by_key(|interface| interface.index);
    Ok(found)
}

fn ip(address: &nix::sys::socket::SockaddrStorage) -> Option<IpAddr> {
    match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
        (Some(v4), _) => Some(IpAddr::V4(v4.ip())),
        (_, Some(v6)) => Some(IpAddr::V6(v6.ip())),
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
        let found = interfaces().unwrap();
        assert!(!found.is_empty());
        let mut indexes: Vec<u32> = found.iter().map(|interface| interface.index).collect();
        assert!(indexes.is_sorted());
        indexes.dedup();
        assert_eq!(indexes.len(), found.len());
        if let Some(lo) = found.iter().find(|interface| interface.name == "lo") {
            assert!(lo.addresses.is_empty() || lo.addresses.contains(&(IpAddr::V4(Ipv4Addr::LOCALHOST), 8)), "{lo:?}");
        }
    }
}
