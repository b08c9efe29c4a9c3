//! Choice of the network interface on which the bootstrap listens. The bootstrap is the TCP
//! connection over which two ends set up a connection.

use host::config::{SetupConfig, SocketFamily};
#[cfg(doc)]
use host::error::Error;
use host::error::{Missing, Result};
use host::interfaces;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

/// One address of one interface that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BootstrapCandidate {
    /// Interface name.
    pub interface: String,
    /// The address, with port 0 and, for IPv6, its scope.
    pub address: SocketAddr,
    /// True for a loopback interface.
    pub loopback: bool,
    /// True if the interface has a carrier.
    pub running: bool,
}

/// Returns the addresses of all interfaces that are up.
pub fn addresses() -> Result<Vec<BootstrapCandidate>> {
    let mut found = Vec::new();
    for up in interfaces::all()?
        .into_iter()
        .filter(|interface| interface.is_up)
    {
        found.extend(up.addresses.iter().map(|each| BootstrapCandidate {
            interface: up.name.clone(),
            address: each.address,
            loopback: up.is_loopback,
            running: up.is_running,
        }));
    }
    Ok(found)
}

/// Chooses the bootstrap's listening address among those that the settings admit, on interfaces
/// with a carrier. IPv4 precedes IPv6, and link-local addresses come last in each family. If the
/// settings name no interfaces, all addresses of Docker's bridges come after all other addresses,
/// and those of the loopback come last, as in NCCL.
///
/// # Errors
/// [`Error::Missing`] if no address qualifies. The error lists all addresses.
pub fn bootstrap_address(
    addresses: &[BootstrapCandidate],
    config: &SetupConfig,
) -> Result<SocketAddr> {
    let rank = |each: &&BootstrapCandidate| {
        let awkward = match each.address.ip() {
            IpAddr::V4(v4) => u8::from(v4.is_link_local()),
            IpAddr::V6(v6) => 2 + u8::from(v6.is_unicast_link_local()),
        };
        let last_resort = match (config.interfaces.names_something(), each.loopback) {
            (true, _) => 0,
            (false, true) => 2,
            (false, false) => u8::from(each.interface.starts_with("docker")),
        };
        (last_resort, awkward)
    };
    let admitted = addresses.iter().filter(|each| {
        let right_family = match config.family {
            SocketFamily::Any => true,
            SocketFamily::V4 => each.address.is_ipv4(),
            SocketFamily::V6 => each.address.is_ipv6(),
        };
        right_family && each.running && config.interfaces.admits(&each.interface, None)
    });
    admitted
        .min_by_key(rank)
        .map(|each| each.address)
        .ok_or_else(|| {
            let one = |a: &BootstrapCandidate| {
                let carrier = if a.running { "" } else { ", no carrier" };
                format!("{} ({}{carrier})", a.interface, a.address.ip())
            };
            let have: Vec<String> = addresses.iter().map(one).collect();
            Missing::Interface(have.join(", ")).into()
        })
}

/// Converts a peer's address to the form that this host must dial. A link-local address gets the
/// scope of the interface on which this host's own bootstrap listens, because the peer's scope
/// number means nothing here.
pub fn in_own_scope(address: SocketAddr, config: &SetupConfig) -> Result<SocketAddr> {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => {
            let own = bootstrap_address(&addresses()?, config)?;
            let scope = if let SocketAddr::V6(own) = own {
                own.scope_id()
            } else {
                v6.scope_id()
            };
            Ok(SocketAddr::V6(SocketAddrV6::new(
                *v6.ip(),
                v6.port(),
                0,
                scope,
            )))
        }
        other => Ok(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::config::Config;

    fn host() -> Vec<BootstrapCandidate> {
        let one = |interface: &str, address: &str| BootstrapCandidate {
            interface: interface.into(),
            address: address.parse().unwrap(),
            loopback: interface == "lo",
            running: interface != "enp1s0f1np1",
        };
        vec![
            one("lo", "127.0.0.1:0"),
            one("docker0", "172.17.0.1:0"),
            one("enP7s7", "[fe80::1%2]:0"),
            one("enP7s7", "10.0.0.5:0"),
            one("enp1s0f1np1", "192.168.102.1:0"),
            one("enp1s0f0np0", "192.168.100.1:0"),
        ]
    }

    fn chosen(name: &str, family: &str) -> Result<SocketAddr> {
        let variables = [("NCCL_SOCKET_IFNAME", name), ("NCCL_SOCKET_FAMILY", family)];
        let config =
            Config::from_variables(&variables.map(|(n, v)| (n.to_owned(), v.to_owned()))).unwrap();
        bootstrap_address(&host(), &config.setup)
    }

    #[test]
    fn the_settings_choose_and_loopback_comes_last() {
        assert_eq!(chosen("", "").unwrap().to_string(), "10.0.0.5:0");
        assert_eq!(chosen("enp1", "").unwrap().to_string(), "192.168.100.1:0");
        assert_eq!(chosen("lo", "").unwrap().to_string(), "127.0.0.1:0");
        assert_eq!(
            chosen("^enP7s7,enp1", "").unwrap().to_string(),
            "172.17.0.1:0"
        );
        assert_eq!(chosen("", "AF_INET6").unwrap().to_string(), "[fe80::1%2]:0");
        let error = chosen("eth9", "").unwrap_err().to_string();
        assert!(
            error.contains("NCCL_SOCKET_IFNAME") && error.contains("enP7s7 (10.0.0.5)"),
            "{error}"
        );
    }

    #[test]
    fn this_machine_has_a_loopback_interface() {
        assert!(addresses().unwrap().iter().any(|each| each.loopback));
    }
}
