//! The network interfaces, from the system, or of a copied machine from `answers/ip-addr.json`: the
//! output of `ip -json address` there.

use crate::commands::doctor::place::Place;
use nccl_net_spark::interfaces::{self, Interface, InterfaceAddress};
use serde::Deserialize;
use std::net::{IpAddr, SocketAddr};

/// Lists all interfaces.
///
/// # Errors
/// The reason why they cannot be listed.
pub fn all(place: &Place) -> Result<Vec<Interface>, String> {
    if place.is_live() {
        return interfaces::all().map_err(|error| error.to_string());
    }
    let text = place.read("/answers/ip-addr.json").map_err(|error| error.to_string())?;
    let text = text.ok_or("the copy has no answers/ip-addr.json (ip -json address)")?;
    let links: Vec<Link> = serde_json::from_str(&text).map_err(|error| format!("answers/ip-addr.json: {error}"))?;
    Ok(links.into_iter().map(Interface::from).collect())
}

#[derive(Debug, Deserialize)]
struct Link {
    ifindex: u32,
    ifname: String,
    #[serde(default)]
    flags: Vec<String>,
    #[serde(default)]
    addr_info: Vec<Address>,
}

#[derive(Debug, Deserialize)]
struct Address {
    local: IpAddr,
    prefixlen: u8,
}

impl From<Link> for Interface {
    fn from(link: Link) -> Self {
        let has = |flag: &str| link.flags.iter().any(|one| one == flag);
        let address =
            |one: &Address| InterfaceAddress { address: SocketAddr::new(one.local, 0), prefix: Some(one.prefixlen) };
        Self {
            index: link.ifindex,
            is_loopback: has("LOOPBACK"),
            is_up: has("UP"),
            is_running: has("LOWER_UP"),
            addresses: link.addr_info.iter().map(address).collect(),
            name: link.ifname,
        }
    }
}
