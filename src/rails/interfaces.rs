//! The network interfaces as the survey needs them.

use crate::error::Result;
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

/// All network interfaces that this process sees, in index order. `sysfs` is where sysfs is mounted.
///
/// # Errors
/// As [`crate::interfaces::all`].
pub fn interfaces(sysfs: &Path) -> Result<Vec<Interface>> {
    let mut found: Vec<Interface> = Vec::new();
    for interface in crate::interfaces::all()? {
        // An interface that went away meanwhile has no index any more.
        let Ok(index) = nix::net::if_::if_nametoindex(interface.name.as_str()) else { continue };
        let mtu = super::sysfs::netdev_mtu(sysfs, &interface.name).unwrap_or(0);
        let addresses = interface.addresses.iter().filter_map(|each| Some((each.address.ip(), each.prefix?))).collect();
        found.push(Interface { name: interface.name, index, mtu, addresses });
    }
    found.sort_by_key(|interface| interface.index);
    Ok(found)
}
