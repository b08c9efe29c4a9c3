//! Reads what tells whose machine this is, so that it can be left out. What cannot be read is left to the rules of `scrub`.

use super::scrub::Known;
use crate::commands::doctor::look::interfaces;
use crate::commands::doctor::place::Place;
use std::net::{IpAddr, Ipv6Addr};

/// What `place` says of its identity; `hosts` are those of the command line, `variables` the environment.
pub(super) fn known(place: &Place, hosts: &[String], variables: &[(String, String)]) -> Known {
    let mut known = Known::default();
    names(place, hosts, variables, &mut known);
    addresses(place, &mut known);
    rdma(place, &mut known);
    serials(place, &mut known);
    for (name, value) in variables {
        known.add_variable(name, value);
    }
    known
}

fn names(place: &Place, hosts: &[String], variables: &[(String, String)], known: &mut Known) {
    let value = |name: &str| variables.iter().find(|(one, _)| one == name).map(|(_, value)| value.clone());
    for host in hosts {
        let (user, host) = host.split_once('@').map_or((None, host.as_str()), |(user, host)| (Some(user), host));
        known.add_host(host);
        user.into_iter().for_each(|user| known.add_user(user));
    }
    let files = ["/proc/sys/kernel/hostname", "/etc/hostname", "/proc/sys/kernel/domainname"];
    let names = files.iter().filter_map(|path| place.text(path)).chain(value("HOSTNAME"));
    names.filter(|name| name != "(none)").for_each(|name| known.add_host(&name));
    let hosts_file = place.text("/etc/hosts").unwrap_or_default();
    for line in hosts_file.lines().filter_map(|line| line.split('#').next()) {
        let mut words = line.split_whitespace();
        let address = words.next().and_then(|address| address.parse::<IpAddr>().ok());
        // Lists of hosts that are to be blocked have these addresses, and no name of the owner's.
        let blocks =
            |address: &IpAddr| address.is_unspecified() || ["127.0.0.1", "::1"].contains(&address.to_string().as_str());
        if let Some(address) = address.filter(|address| !blocks(address)) {
            let is_own = |name: &&str| !name.starts_with("ip6-") && !name.starts_with("localhost");
            words.filter(is_own).for_each(|name| known.add_host(name));
            known.add_address(address, None);
        }
    }
    let resolver = place.text("/etc/resolv.conf").unwrap_or_default();
    let domains = resolver.lines().filter_map(|line| line.strip_prefix("search ").or(line.strip_prefix("domain ")));
    // As a host's domain: the whole is one name.
    domains.flat_map(str::split_whitespace).for_each(|domain| known.add_host(&format!("localhost.{domain}")));
    let home = value("HOME").unwrap_or_default();
    ssh_config(&place.text(format!("{home}/.ssh/config")).unwrap_or_default(), hosts, known);
    let of_home = home.rsplit('/').next().unwrap_or_default().to_owned();
    let variables = ["USER", "LOGNAME", "SUDO_USER"].into_iter().filter_map(value);
    variables.chain([of_home]).for_each(|user| known.add_user(&user));
    for line in place.text("/etc/passwd").unwrap_or_default().lines() {
        let fields: Vec<&str> = line.split(':').collect();
        // People's accounts by Debian's policy.
        if let [name, _, number, ..] = fields[..]
            && number.parse::<u32>().is_ok_and(|number| (1_000..60_000).contains(&number))
        {
            known.add_user(name);
        }
    }
}

/// What the names on the command line stand for.
fn ssh_config(text: &str, hosts: &[String], known: &mut Known) {
    let mut is_meant = false;
    for line in text.lines() {
        let mut words = line.split([' ', '\t', '=']).filter(|word| !word.is_empty());
        let Some(keyword) = words.next().map(str::to_ascii_lowercase) else { continue };
        match keyword.as_str() {
            "host" => is_meant = words.any(|word| hosts.iter().any(|host| host.rsplit('@').next() == Some(word))),
            "hostname" if is_meant => words.for_each(|name| known.add_host(name)),
            "user" if is_meant => words.for_each(|name| known.add_user(name)),
            _ => {}
        }
    }
}

fn addresses(place: &Place, known: &mut Known) {
    // Without them the rules still find what looks like an address.
    for interface in interfaces::all(place).unwrap_or_default() {
        for one in &interface.addresses {
            known.add_address(one.address.ip(), one.prefix);
        }
    }
    for name in place.names("/sys/class/net") {
        let text = place.text(format!("/sys/class/net/{name}/address"));
        text.and_then(|text| mac(&text)).into_iter().for_each(|mac| known.add_mac(mac));
    }
    // Neighbours: address, type, flags, hardware address.
    for line in place.text("/proc/net/arp").unwrap_or_default().lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.first().and_then(|word| word.parse().ok()).into_iter().for_each(|one| known.add_address(one, None));
        words.get(3).and_then(|word| mac(word)).into_iter().for_each(|mac| known.add_mac(mac));
    }
}

fn mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Result<Vec<u8>, _> = text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
    bytes.ok()?.try_into().ok()
}

fn rdma(place: &Place, known: &mut Known) {
    for device in place.names("/sys/class/infiniband") {
        let folder = format!("/sys/class/infiniband/{device}");
        for file in ["node_guid", "sys_image_guid"] {
            let text = place.text(format!("{folder}/{file}")).unwrap_or_default();
            let guid = u64::from_str_radix(&text.replace(':', ""), 16).ok().filter(|guid| *guid != 0);
            known.guids.extend(guid);
        }
        for port in place.names(format!("{folder}/ports")) {
            let gids = format!("{folder}/ports/{port}/gids");
            for index in place.names(&gids) {
                let gid = place.text(format!("{gids}/{index}")).and_then(|text| text.parse::<Ipv6Addr>().ok());
                gid.into_iter().for_each(|gid| known.add_address(gid.into(), None));
            }
        }
    }
}

fn serials(place: &Place, known: &mut Known) {
    let dmi =
        ["product_serial", "board_serial", "chassis_serial", "product_uuid", "board_asset_tag", "chassis_asset_tag"];
    let files = dmi.map(|name| format!("/sys/class/dmi/id/{name}"));
    let others = ["/proc/device-tree/serial-number", "/etc/machine-id", "/proc/sys/kernel/random/boot_id"];
    for path in files.iter().map(String::as_str).chain(others) {
        place.text(path).into_iter().for_each(|text| known.add_serial(&text));
    }
    for line in place.text("/etc/dgx-release").unwrap_or_default().lines() {
        let value = line.split_once('=').filter(|(name, _)| name.contains("SERIAL"));
        value.into_iter().for_each(|(_, value)| known.add_serial(value.trim_matches('"')));
    }
    for gpu in place.names("/proc/driver/nvidia/gpus") {
        let text = place.text(format!("/proc/driver/nvidia/gpus/{gpu}/information")).unwrap_or_default();
        let uuid = text.lines().find_map(|line| line.strip_prefix("GPU UUID:"));
        uuid.into_iter().for_each(|uuid| known.add_serial(uuid.trim().trim_start_matches("GPU-")));
    }
}
