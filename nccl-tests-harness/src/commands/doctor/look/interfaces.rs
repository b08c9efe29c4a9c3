//! The network interfaces of this machine. For a copied machine, those in `answers/ip-addr.json`,
//! the output of `ip -json address`.

use crate::commands::doctor::place::Place;
use host::interfaces::{self, Interface, InterfaceAddress};
use serde_json::Value;
use std::net::SocketAddr;

pub fn all(place: &Place) -> Result<Vec<Interface>, String> {
    if place.is_live() {
        return interfaces::all().map_err(|error| error.to_string());
    }
    let text = place
        .read("/answers/ip-addr.json")
        .map_err(|error| error.to_string())?;
    let text = text.ok_or("the copy has no answers/ip-addr.json (ip -json address)")?;
    let links: Vec<Value> =
        serde_json::from_str(&text).map_err(|error| format!("answers/ip-addr.json: {error}"))?;
    links
        .iter()
        .map(|link| interface(link).ok_or(format!("answers/ip-addr.json: {link}")))
        .collect()
}

fn interface(link: &Value) -> Option<Interface> {
    let list = |name: &str| link[name].as_array().map_or(&[][..], Vec::as_slice);
    let has = |flag: &str| list("flags").iter().any(|one| one == flag);
    let address = |one: &Value| {
        let address = SocketAddr::new(one["local"].as_str()?.parse().ok()?, 0);
        Some(InterfaceAddress {
            address,
            prefix: Some(one["prefixlen"].as_u64()? as u8),
        })
    };
    Some(Interface {
        index: link["ifindex"].as_u64()? as u32,
        is_loopback: has("LOOPBACK"),
        is_up: has("UP"),
        is_running: has("LOWER_UP"),
        addresses: list("addr_info")
            .iter()
            .map(address)
            .collect::<Option<_>>()?,
        name: link["ifname"].as_str()?.to_owned(),
    })
}
