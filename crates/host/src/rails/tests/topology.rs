//! The format of the files in `crates/host/topologies`. Each file is one topology: hosts, their
//! addresses, the wires between them, and the expected pairs of rails.

use crate::rails::testbed::{Function, SPARK_GUID, TestHost, spark, spark_function};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::DirEntry;
use std::net::IpAddr;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A topology. `HOST` is a key of [`Topology::hosts`], `PORT` is `p0` or `p1`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Topology {
    /// The file's name without `.toml`.
    #[serde(skip)]
    pub(super) name: String,
    /// Cables, as `HOST.PORT - HOST.PORT` or `HOST.PORT - switch`. A Spark's other ports are down.
    pub(super) wires: Vec<String>,
    /// Expected pairs, as `HOST INTERFACE - HOST INTERFACE`. `HOST.PORT - HOST.PORT` is a pair of
    /// functions in each PCIe domain of two Sparks. By default, the wires are the pairs.
    pairs: Option<Vec<String>>,
    /// Rails, as `HOST INTERFACE`, without which a cable does not reach its full rate. The plugin
    /// warns of them (`comm/setup/negotiate.rs`).
    #[serde(default)]
    pub(super) alone: Vec<String>,
    /// Expected rate of each connection. The rate is not checked if there is none.
    pub(super) rate_mbps: Option<u64>,
    /// Expected path MTU of each pair.
    #[serde(default = "largest_path_mtu")]
    pub(super) mtu_bytes: u32,
    /// Each host's interfaces with their addresses (`192.168.100.1/24`). A host `spark-N` has the
    /// four functions of a Spark. Other hosts have the listed functions; `""` is no address.
    pub(super) hosts: BTreeMap<String, BTreeMap<String, String>>,
    /// Functions that differ from a Spark's, by `INTERFACE` for all hosts or by `HOST INTERFACE`.
    #[serde(default)]
    functions: BTreeMap<String, Difference>,
    /// A part of each warning that is expected on a host.
    #[serde(default)]
    pub(super) warnings: BTreeMap<String, Vec<String>>,
    /// The kernel's routes on a host, as `ADDRESS dev INTERFACE`.
    #[serde(default)]
    pub(super) routes: BTreeMap<String, Vec<String>>,
    /// The row in the table of docs/guide/topologies.md, if it has one.
    pub(super) guide: Option<Guide>,
}

fn largest_path_mtu() -> u32 {
    4096
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Guide {
    pub(super) cabling: String,
    pub(super) addresses: String,
    pub(super) notes: Option<String>,
    /// The comment in the files `docs/guide/netplan/NAME-N.yaml`, if there are such files.
    pub(super) netplan: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Difference {
    is_absent: bool,
    is_down: bool,
    /// True with netplan's `link-local: []`.
    no_link_local: bool,
    mtu: Option<u32>,
    device: Option<String>,
    pci: Option<String>,
    /// PCI address of the physical function, if this is a virtual function.
    physical: Option<String>,
    port: Option<String>,
    width: Option<u16>,
    speed_mbps: Option<u32>,
}

impl Difference {
    fn apply(&self, function: Function) -> Function {
        let text = |new: &Option<String>| new.as_ref().map(|text| &*text.clone().leak());
        let width = self.width.unwrap_or(function.width);
        let function = Function {
            device: text(&self.device).unwrap_or(function.device),
            pci: text(&self.pci).or(function.pci),
            physical: text(&self.physical),
            phys_port: text(&self.port).or(function.phys_port),
            width,
            max_width: width,
            speed_mbps: self.speed_mbps.unwrap_or(function.speed_mbps),
            netdev_mtu: self.mtu.unwrap_or(function.netdev_mtu),
            interface_has_link_local: !self.no_link_local,
            ..function
        };
        match self.is_down {
            true => function.down(),
            false => function,
        }
    }
}

impl Topology {
    pub(super) fn all() -> Vec<Self> {
        let stem = |file: std::io::Result<DirEntry>| {
            let name = file.unwrap().file_name().into_string().unwrap();
            name.strip_suffix(".toml").expect(&name).to_owned()
        };
        let files = std::fs::read_dir(format!("{ROOT}/topologies")).unwrap();
        let mut names: Vec<String> = files.map(stem).collect();
        names.sort();
        names.iter().map(|name| Self::read(name)).collect()
    }

    pub(super) fn read(name: &str) -> Self {
        let file = format!("{ROOT}/topologies/{name}.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        let topology: Self =
            basic_toml::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        let lines = topology.pairs.iter().flatten().flat_map(|pair| ends(pair));
        let rails = lines.chain(topology.alone.iter().map(String::as_str));
        let mut named: Vec<&str> = rails
            .filter_map(|end| end.split([' ', '.']).next())
            .collect();
        let tables = topology.warnings.keys().chain(topology.routes.keys());
        named.extend(tables.map(String::as_str));
        for host in named {
            assert!(topology.hosts.contains_key(host), "{file}: no host {host}");
        }
        let name = name.to_owned();
        Self { name, ..topology }
    }

    /// Sets the speed of the ports of all Sparks.
    pub(super) fn set_speed(&mut self, mbps: u32) {
        for interface in ["p0", "p1"].into_iter().flat_map(interfaces) {
            let difference = self.functions.entry(interface).or_default();
            difference.speed_mbps = Some(mbps);
        }
    }

    /// Returns the two ends of each expected pair, each as `HOST INTERFACE`.
    pub(super) fn pairs(&self) -> Vec<[String; 2]> {
        let entries = self.pairs.as_ref().unwrap_or(&self.wires);
        entries
            .iter()
            .flat_map(|entry| pairs_of_entry(entry))
            .collect()
    }

    /// Returns the address of `HOST INTERFACE` without its prefix length.
    pub(super) fn ip(&self, end: &str) -> Option<&str> {
        let (host, interface) = end.split_once(' ').unwrap();
        let (ip, _) = self.hosts[host].get(interface)?.split_once('/')?;
        Some(ip)
    }

    /// Returns what is at the other end of the wire in a port, as `HOST.PORT` or `switch`.
    pub(super) fn far_end(&self, host: &str, port: &str) -> Option<&str> {
        let here = format!("{host}.{port}");
        self.wires.iter().find_map(|wire| match ends(wire) {
            [one, other] if one == here => Some(other),
            [one, other] if other == here => Some(one),
            _ => None,
        })
    }

    pub(super) fn functions(&self, host: &str) -> Vec<Function> {
        let addresses = &self.hosts[host];
        let functions = if host.starts_with("spark-") {
            let is_cabled = |port: &u8| self.far_end(host, &format!("p{port}")).is_some();
            spark(&[0, 1].into_iter().filter(is_cabled).collect::<Vec<_>>())
        } else {
            let other = |(interface, number): (&String, u64)| Function {
                netdev: Some(interface.clone().leak()),
                phys_port: None,
                guid: SPARK_GUID + number,
                ..spark_function(0, 0)
            };
            addresses.keys().zip(4..).map(other).collect()
        };
        let known: Vec<&str> = functions.iter().filter_map(|f| f.netdev).collect();
        let is_known = |interface: &String| known.contains(&interface.as_str());
        assert!(addresses.keys().all(is_known), "{}: {host}", self.name);
        let index = self.hosts.keys().position(|name| name == host).unwrap() as u64;
        let own = |function| self.function(host, (index + 1) << 24, function);
        functions.into_iter().filter_map(own).collect()
    }

    fn function(&self, host: &str, guid: u64, mut function: Function) -> Option<Function> {
        let interface = function.netdev.unwrap();
        function.guid += guid;
        function.system_image_guid = Some(SPARK_GUID + guid);
        function.v4 = None;
        let address = self.hosts[host].get(interface);
        if let Some((ip, prefix)) = address.and_then(|address| address.split_once('/')) {
            match ip.parse().unwrap() {
                IpAddr::V4(v4) => {
                    function.v4 = Some(v4.octets());
                    function.v4_prefix = prefix.parse().unwrap();
                }
                IpAddr::V6(v6) => function.v6 = Some(v6),
            }
        }
        let on_this_host = self.functions.get(&format!("{host} {interface}"));
        match on_this_host.or_else(|| self.functions.get(interface)) {
            Some(difference) if difference.is_absent => None,
            Some(difference) => Some(difference.apply(function)),
            None => Some(function),
        }
    }
}

/// Returns the pairs of an entry of [`Topology::pairs`] or of a wire between Sparks.
pub(super) fn pairs_of_entry(entry: &str) -> Vec<[String; 2]> {
    let rails = |end: &str| match end.split_once('.') {
        Some((host, port)) => interfaces(port)
            .map(|name| format!("{host} {name}"))
            .to_vec(),
        None => vec![end.to_owned()],
    };
    let [here, there] = ends(entry).map(rails);
    here.into_iter()
        .zip(there)
        .map(<[String; 2]>::from)
        .collect()
}

/// Splits `END - END`.
fn ends(text: &str) -> [&str; 2] {
    text.split_once(" - ").expect(text).into()
}

/// Returns the interfaces of a Spark's port, one for each PCIe domain.
pub(super) fn interfaces(port: &str) -> [String; 2] {
    let number = &port[1..];
    ["enp1s0", "enP2p1s0"].map(|card| format!("{card}f{number}np{number}"))
}

/// A host whose interfaces answer ARP only for their own addresses.
pub(super) fn host(functions: &[Function]) -> TestHost {
    with_arp(functions, 1, 2)
}

pub(super) fn with_arp(functions: &[Function], arp_ignore: u32, rp_filter: u32) -> TestHost {
    let host = TestHost::new(functions);
    let interfaces = functions.iter().filter_map(|function| function.netdev);
    interfaces
        .chain(["all"])
        .for_each(|interface| host.set_arp(interface, arp_ignore, rp_filter));
    host
}
