//! What tells whose a machine is, and what of it is left out.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

/// What a machine says of its identity.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Host names and domains, each name by itself.
    pub hosts: BTreeSet<String>,
    /// Users.
    pub users: BTreeSet<String>,
    /// Addresses of interfaces, GIDs and neighbours, with the length of the prefix where it is known.
    pub addresses: BTreeSet<(IpAddr, Option<u8>)>,
    /// Hardware addresses.
    pub macs: BTreeSet<[u8; 6]>,
    /// GUIDs of nodes, ports and system images.
    pub guids: BTreeSet<u64>,
    /// Serial numbers, asset tags, machine ids.
    pub serials: BTreeSet<String>,
    /// Values of variables that hold secrets.
    pub secrets: BTreeSet<String>,
}

/// What is not left out.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keep {
    /// Names of hosts and users, and e-mail addresses.
    pub names: bool,
    /// IP and hardware addresses, GIDs and GUIDs.
    pub addresses: bool,
    /// Serial numbers.
    pub serials: bool,
}

/// Words that a report has anyway: a host or user of such a name is not named by it.
pub(super) const ORDINARY: &[&str] = &[
    "admin",
    "any",
    "broadcasthost",
    "cuda",
    "debian",
    "default",
    "dgx",
    "docker",
    "domain",
    "email",
    "external",
    "fabric",
    "gid",
    "gpu",
    "guid",
    "home",
    "host",
    "ip4",
    "ip6",
    "link",
    "linux",
    "local",
    "localdomain",
    "localhost",
    "mac",
    "mapped",
    "nccl",
    "nccl-spark",
    "net",
    "nobody",
    "node",
    "none",
    "nvidia",
    "rail",
    "report",
    "root",
    "serial",
    "spark",
    "test",
    "token",
    "ubuntu",
    "user",
    "v",
    "verbs",
    "version",
];

impl Known {
    /// A host's name, as in `spark-1` or `spark-1.example.com`: the domain is a name by itself.
    pub fn add_host(&mut self, name: &str) {
        let name = name.trim().trim_end_matches('.').to_ascii_lowercase();
        if name.parse::<IpAddr>().is_ok() {
            return;
        }
        let (host, domain) = name.split_once('.').unwrap_or((&name, ""));
        let names = [host, domain].into_iter().filter(|name| is_name(name));
        self.hosts.extend(names.map(str::to_owned));
    }

    /// A user's name.
    pub fn add_user(&mut self, name: &str) {
        let name = name.trim().to_ascii_lowercase();
        if is_name(&name) && !self.hosts.contains(&name) {
            self.users.insert(name);
        }
    }

    /// A hardware address, and the addresses and GUID that the kernel makes of it (EUI-64).
    pub fn add_mac(&mut self, mac: [u8; 6]) {
        if mac == [0; 6] || mac == [0xff; 6] {
            return;
        }
        self.macs.insert(mac);
        let [a, b, c, d, e, f] = mac;
        let of_guid = u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
        let link_local = Ipv6Addr::from((0xfe80_u128 << 112) | u128::from(of_guid));
        self.addresses.insert((link_local.into(), None));
        self.guids.insert(of_guid);
    }

    /// A GID or address.
    pub fn add_address(&mut self, address: IpAddr, prefix: Option<u8>) {
        let address = address.to_canonical();
        if !address.is_unspecified() && !address.is_loopback() {
            self.addresses.insert((address, prefix));
        }
    }

    /// A serial number. What has fewer than four characters, or says that there is none, is no one's.
    pub fn add_serial(&mut self, text: &str) {
        let text = text.trim().trim_end_matches('\0');
        let says_none =
            ["none", "not specified", "default string", "to be filled by o.e.m.", "system serial number", "unknown"];
        let has_digit = text.bytes().any(|byte| byte.is_ascii_digit());
        if text.len() >= 4 && has_digit && !says_none.contains(&text.to_ascii_lowercase().as_str()) {
            self.serials.insert(text.to_owned());
        }
    }

    /// A variable of the environment; what its name says to be a secret is one. Short values and plain words occur elsewhere too.
    pub fn add_variable(&mut self, name: &str, value: &str) {
        // Programs leave out the blanks around it.
        let value = value.trim();
        if is_secret_name(name) && value.len() >= 8 {
            self.secrets.insert(value.to_owned());
        }
    }
}

fn is_name(name: &str) -> bool {
    name.bytes().any(|byte| byte.is_ascii_alphabetic()) && !ORDINARY.contains(&name)
}

/// Whether a variable of this name holds a secret.
pub(super) fn is_secret_name(name: &str) -> bool {
    let upper = name.to_ascii_uppercase();
    let says = ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL"];
    let is_key = |upper: &str| upper.contains("_KEY") || upper.contains("APIKEY") || upper.contains("-KEY");
    says.iter().any(|word| upper.contains(word)) || is_key(&upper) || (name == upper && name.contains("KEY"))
}
