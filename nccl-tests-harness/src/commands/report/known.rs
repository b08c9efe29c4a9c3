//! Reads what tells whose machine this is, so that it can be left out. What cannot be read is left to the rules of `scrub`.

use super::nccls_files::{passing, with_files};
use super::scrub::Known;
use crate::commands::doctor::look::interfaces;
use crate::commands::doctor::place::Place;
use std::net::{IpAddr, Ipv6Addr};

/// What `place` says of its identity; `hosts` are those of the command line, `variables` the environment.
pub(super) fn known(place: &Place, hosts: &[String], variables: &[(String, String)]) -> Known {
    let mut known = Known::default();
    let variables = &with_nccls_files(place, variables);
    names(place, hosts, variables, &mut known);
    addresses(place, &mut known);
    rdma(place, &mut known);
    serials(place, &mut known);
    for (name, value) in variables {
        known.add_variable(name, value);
    }
    known
}

/// The environment, and behind it what NCCL's own files set, also where the environment has a variable of that name.
fn with_nccls_files(place: &Place, variables: &[(String, String)]) -> Vec<(String, String)> {
    let home = variables.iter().find(|(name, _)| name == "HOME").map(|(_, value)| value.as_str());
    let file: Vec<_> = variables.iter().filter(|(name, _)| name == "NCCL_CONF_FILE").cloned().collect();
    let of_files = with_files(passing(&file), home, place);
    let of_files = of_files.into_iter().map(|one| (one.name, one.value));
    variables.iter().cloned().chain(of_files).collect()
}

/// The hosts that a variable names; none where it is no such variable, or has an address.
fn hosts_of<'v>(name: &str, value: &'v str) -> Vec<&'v str> {
    match name {
        "HOSTNAME" => vec![value],
        // Any text: the doctor may fold it between its words. A word of one or two characters is in too much else.
        "NCCL_HOSTID" => value.split_whitespace().filter(|word| word.len() > 2 || *word == value.trim()).collect(),
        "NCCL_COMM_ID" | "NCCL_RAS_ADDR" | "MASTER_ADDR" => {
            let value = value.rsplit("//").next().unwrap_or(value).trim();
            let is_address = |text: &str| text.split('%').next().is_some_and(|text| text.parse::<IpAddr>().is_ok());
            // IPv6 has its port behind brackets.
            let host = value.split(':').next().filter(|_| !value.starts_with('[') && !is_address(value));
            host.filter(|host| !is_address(host)).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

fn names(place: &Place, hosts: &[String], variables: &[(String, String)], known: &mut Known) {
    let value = |name: &str| variables.iter().find(|(one, _)| one == name).map(|(_, value)| value.clone());
    for host in hosts {
        let (user, host) = host.split_once('@').map_or((None, host.as_str()), |(user, host)| (Some(user), host));
        known.add_host(host);
        user.into_iter().for_each(|user| known.add_user(user));
    }
    let files = ["/proc/sys/kernel/hostname", "/etc/hostname", "/proc/sys/kernel/domainname"];
    let names = files.iter().filter_map(|path| place.text(path));
    names.filter(|name| name != "(none)").for_each(|name| known.add_host(&name));
    variables.iter().flat_map(|(name, value)| hosts_of(name, value)).for_each(|host| known.add_host(host));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)], files: &[(&str, &str)]) -> Known {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let variables: Vec<_> = variables.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        known(&Place::new(root.path()), &[], &variables)
    }

    #[test]
    fn hosts_in_variables_are_known_and_addresses_are_no_hosts() {
        for (name, value, hosts) in [
            ("NCCL_COMM_ID", "gpu-node-77.corp.acme.com:12345", &["corp.acme.com", "gpu-node-77"][..]),
            ("NCCL_RAS_ADDR", "node5.internal:28028", &["internal", "node5"]),
            ("MASTER_ADDR", " Thor-7 ", &["thor-7"]),
            ("MASTER_ADDR", "tcp://thor-7:29501", &["thor-7"]),
            ("NCCL_HOSTID", "acme-secret-host-42", &["acme-secret-host-42"]),
            ("NCCL_HOSTID", "rack:7 of acme 1", &["acme", "rack:7"]),
            ("NCCL_HOSTID", "17", &[]),
            ("NCCL_COMM_ID", "10.0.0.7:12345", &[]),
            ("NCCL_COMM_ID", "[fe80::1%enp1s0f0np0]:12345", &[]),
            ("MASTER_ADDR", "fe80::1%enp1s0f0np0", &[]),
            ("MASTER_ADDR", "2001:db8::a", &[]),
            ("MASTER_ADDR", "localhost", &[]),
            ("NCCL_SOCKET_IFNAME", "thor-7", &[]),
        ] {
            let found: Vec<_> = of(&[(name, value)], &[]).hosts.into_iter().collect();
            assert_eq!(found, hosts, "{name}={value}");
        }
    }

    #[test]
    fn what_nccls_files_set_is_known_too() {
        let home = [("home/me/.nccl.conf", "NCCL_TOKEN= two words 1234 leak \nNCCL_COMM_ID=thor-7:1\n")];
        let etc = [("etc/nccl.conf", "NCCL_PASSWORD=three other words\nNCCL_HOSTID=thor-8\n")];
        let own = [("own.conf", "NCCL_RAS_ADDR=thor-9:1\n")];
        let files = [home, etc, own].concat();
        let known = of(&[("HOME", "/home/me"), ("NCCL_TOKEN", "of the environment")], &files);
        let secrets: Vec<_> = known.secrets.iter().map(String::as_str).collect();
        assert_eq!(secrets, ["of the environment", "three other words", "two words 1234 leak"]);
        assert_eq!(known.hosts.into_iter().collect::<Vec<_>>(), ["thor-7", "thor-8"]);
        let known = of(&[("HOME", "/home/me"), ("NCCL_CONF_FILE", "/own.conf")], &files);
        assert_eq!(known.hosts.into_iter().collect::<Vec<_>>(), ["thor-8", "thor-9"]);
    }
}
