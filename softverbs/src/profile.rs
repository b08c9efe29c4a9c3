//! Profiles of a fabric's machines: rails, the PCIe links and cables that they share, and their
//! rates. A profile is text, with one line for each item:
//!
//! ```text
//! link  NAME pci=DDDD:BB:DD gts=32 width=4 payload=112000
//! cable NAME payload=195000
//! rail  NAME netdev=IF port=p0 link=LINK cable=CABLE function=0 line=200000 qp=100000 latency=1400
//! wire  NAME ends=0.CABLE,1.CABLE subnets=each
//! node  NUMBER forbids=RAIL,RAIL
//! node  NUMBER forwards=CABLE,CABLE
//! ```
//!
//! `payload`, `line` and `qp` are in Mb/s (0: no limit), `latency` is in ns. A rail may also have
//! `speed=`, the speed that its port reports if it differs from the rate; `mtu=`, its port's path
//! MTU in bytes, 4096 by default; `silence=`, the ms after which its queue pairs report a peer that
//! does not answer, whatever time-out and retry count the program has set, as with a profile of
//! adaptive retransmission; and `path=`, faults of its path ([`PathFault`]), separated by commas.
//!
//! Without `wire` lines, each rail reaches the rail of the same name on every other machine. A
//! `wire` is a cable between ports of two nodes: the rails of one end reach the rails of the other.
//! With `wire` lines, the address of any other peer does not answer ([`crate::fabric`]), and a port
//! without a wire is down. `subnets=one` gives all rails of a wire addresses in one subnet.
//! Programs on a node may not open the devices that the node `forbids` (`EPERM`). A node's NIC
//! `forwards` packets between two of its ports, both ways. The rates of the rails at both ends of
//! the path limit a forwarded packet. The node in between adds no time, and its ports may be down.

mod sysfs;

use crate::path::{PathFault, PathFaults};
use crate::wiring::{Port, Subnets, Wire, Wires};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

/// Maximum number of rails of one machine.
pub const MAX_RAILS: usize = 8;
/// Maximum number of PCIe links and cables of one machine, counted together.
pub const MAX_SHARED: usize = 16;

/// Maximum number of machines of a fabric.
pub const MAX_NODES: usize = 16;

/// The largest path MTU of the InfiniBand specification.
const MOST_MTU_BYTES: u32 = 4096;
/// Speed that a port reports if its rate has no limit.
const UNLIMITED_SAYS_MBPS: f64 = 100_000.0;

/// The rails, PCIe links and cables of one machine, the same on all machines of a fabric, and the
/// cables between machines.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// The name of the built-in profile, or the path of the profile's file.
    pub name: String,
    /// PCIe links of a machine.
    pub links: Vec<Link>,
    /// Cables of a machine, with their rates. A cable also identifies the port that it is in.
    pub cables: Vec<Cable>,
    /// Rails of a machine: at most [`MAX_RAILS`].
    pub rails: Vec<RailSpec>,
    /// The cables between machines: which port leads to which port.
    pub wires: Wires,
    /// Devices that programs on a machine may not open.
    pub forbidden: Vec<ForbiddenDevice>,
}

/// A device that programs on a machine may not open, as under a container's device rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForbiddenDevice {
    /// The machine.
    pub node: usize,
    /// Index of the rail.
    pub rail: usize,
}

/// A PCIe link.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// The link's name in the profile.
    pub name: String,
    /// `domain:bus:device`.
    pub pci: String,
    /// GT/s per lane.
    pub gts: f64,
    /// Number of PCIe lanes.
    pub width: u32,
    /// Payload that it carries each way, in Mb/s; 0: no limit.
    pub payload_mbps: f64,
}

/// A cable.
#[derive(Debug, Clone, PartialEq)]
pub struct Cable {
    /// The cable's name in the profile.
    pub name: String,
    /// Payload that it carries each way, in Mb/s; 0: no limit.
    pub payload_mbps: f64,
}

/// A RoCE function.
#[derive(Debug, Clone, PartialEq)]
pub struct RailSpec {
    /// RDMA device.
    pub name: String,
    /// Network interface.
    pub netdev: String,
    /// `phys_port_name`.
    pub phys_port: String,
    /// Index of its PCIe link.
    pub link: usize,
    /// Index of its cable.
    pub cable: usize,
    /// PCI function number.
    pub function: u32,
    /// Rate of the port, in Mb/s; 0: no limit.
    pub line_mbps: f64,
    /// Port speed that programs read, in Mb/s. Unlike the rates, it is not multiplied by the scale,
    /// so that a program plans as on the real machine.
    pub speed_mbps: f64,
    /// Rate of one queue pair, in Mb/s; 0: no limit.
    pub qp_mbps: f64,
    /// One-way latency, in nanoseconds.
    pub latency_ns: u64,
    /// The port's path MTU, in bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
    /// Time after which its queue pairs report a silent peer, in milliseconds; 0: the program's
    /// time-out and retry count decide.
    pub silence_ms: u64,
    /// Faults that its path has when the fabric starts.
    pub path: PathFaults,
}

macro_rules! two_cables {
    () => {
        "link A pci=0000:01:00 gts=32 width=4 payload=112000
         link B pci=0002:01:00 gts=32 width=4 payload=112000
         cable p0 payload=195000
         cable p1 payload=195000
         rail rocep1s0f0 netdev=enp1s0f0np0 port=p0 link=A cable=p0 function=0 line=200000 qp=100000 latency=1400
         rail rocep1s0f1 netdev=enp1s0f1np1 port=p1 link=A cable=p1 function=1 line=200000 qp=100000 latency=1400
         rail roceP2p1s0f0 netdev=enP2p1s0f0np0 port=p0 link=B cable=p0 function=0 line=200000 qp=100000 latency=1400
         rail roceP2p1s0f1 netdev=enP2p1s0f1np1 port=p1 link=B cable=p1 function=1 line=200000 qp=100000 latency=1400"
    };
}

/// The built-in profiles. On a Spark, the two functions of a cable (twins) share its 200 Gb/s
/// (about 195 after RoCE framing), and each has its own 32 GT/s x4 link (112 Gb/s of payload). One
/// queue pair gives 100 Gb/s (published: 92 to 102), and a 2-byte write takes 1.4 us (published:
/// 1.42 to 1.57). With two cables, two functions share each link. Without a switch, three Sparks
/// make a triangle, and four a ring.
const BUILT_IN: [(&str, &str); 5] = [
    (
        "spark-1cable",
        "link A pci=0000:01:00 gts=32 width=4 payload=112000
         link B pci=0002:01:00 gts=32 width=4 payload=112000
         cable p0 payload=195000
         rail rocep1s0f0 netdev=enp1s0f0np0 port=p0 link=A cable=p0 function=0 line=200000 qp=100000 latency=1400
         rail roceP2p1s0f0 netdev=enP2p1s0f0np0 port=p0 link=B cable=p0 function=0 line=200000 qp=100000 latency=1400",
    ),
    ("spark-2cable", two_cables!()),
    (
        "spark-triangle",
        concat!(
            two_cables!(),
            "
         wire a ends=0.p0,1.p1
         wire b ends=1.p0,2.p1
         wire c ends=2.p0,0.p1"
        ),
    ),
    (
        "spark-ring",
        concat!(
            two_cables!(),
            "
         wire a ends=0.p0,1.p1
         wire b ends=1.p0,2.p1
         wire c ends=2.p0,3.p1
         wire d ends=3.p0,0.p1"
        ),
    ),
    (
        "unpaced",
        "link A pci=0000:01:00 gts=32 width=4 payload=0
         link B pci=0002:01:00 gts=32 width=4 payload=0
         cable p0 payload=0
         rail rocep1s0f0 netdev=enp1s0f0np0 port=p0 link=A cable=p0 function=0 line=0 qp=0 latency=0
         rail roceP2p1s0f0 netdev=enP2p1s0f0np0 port=p0 link=B cable=p0 function=0 line=0 qp=0 latency=0",
    ),
];

impl Profile {
    /// The names of the built-in profiles.
    pub fn names() -> [&'static str; BUILT_IN.len()] {
        BUILT_IN.map(|(name, _)| name)
    }

    /// Loads a built-in profile or a file, and multiplies all its rates by `scale`. The error names
    /// the wrong line, or lists the built-in names.
    pub fn load(name_or_path: &str, scale: f64) -> Result<Self, String> {
        if !crate::settings::SCALES.contains(&scale) {
            let low = crate::settings::SCALES.start();
            let high = crate::settings::SCALES.end();
            return Err(format!("the scale must be {low} to {high}, not {scale}"));
        }
        let built_in = BUILT_IN.iter().find(|(name, _)| *name == name_or_path);
        let text = match built_in {
            Some((_, text)) => (*text).to_owned(),
            None => std::fs::read_to_string(name_or_path).map_err(|e| {
                let names = Self::names().join(", ");
                format!("profile {name_or_path:?} is neither built in ({names}) nor a readable file: {e}")
            })?,
        };
        let mut profile = Self::parse(name_or_path, &text)?;
        for rail in &mut profile.rails {
            rail.line_mbps *= scale;
            rail.qp_mbps *= scale;
        }
        profile
            .links
            .iter_mut()
            .for_each(|link| link.payload_mbps *= scale);
        profile
            .cables
            .iter_mut()
            .for_each(|cable| cable.payload_mbps *= scale);
        Ok(profile)
    }

    /// Reads a profile's text. The error names the line, and the allowed values.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        let mut profile = Self {
            name: name.to_owned(),
            links: Vec::new(),
            cables: Vec::new(),
            rails: Vec::new(),
            wires: Wires::default(),
            forbidden: Vec::new(),
        };
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                profile
                    .line(line)
                    .map_err(|why| format!("{name}, line {}: {why} in {line:?}", number + 1))?;
            }
        }
        let count = profile.rails.len();
        if !(1..=MAX_RAILS).contains(&count) {
            return Err(format!("{name}: {count} rails; must be 1 to {MAX_RAILS}"));
        }
        let mut faults = (0..count).flat_map(|rail| {
            profile.rails[rail]
                .path
                .iter()
                .map(move |fault| (rail, fault))
        });
        faults
            .try_for_each(|(rail, fault)| profile.allows(rail, fault))
            .map_err(|why| format!("{name}: {why}"))?;
        Ok(profile)
    }

    /// Fails with the reason if the path of this rail cannot have this fault.
    pub(crate) fn allows(&self, rail: usize, fault: PathFault) -> Result<(), String> {
        let spec = &self.rails[rail];
        let has_twin = self
            .rails
            .iter()
            .filter(|other| other.cable == spec.cable)
            .count()
            > 1;
        match fault {
            PathFault::CrossedArp if !has_twin => Err(format!(
                "rail {} has no twin on its cable that could answer ARP for it",
                spec.name
            )),
            _ => Ok(()),
        }
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        let mut words = line.split_whitespace();
        let kind = words.next().unwrap_or_default();
        let name = words.next().ok_or("no name")?.to_owned();
        let fields = Fields(
            words
                .map(|w| w.split_once('=').ok_or(format!("{w:?} must be KEY=VALUE")))
                .collect::<Result<_, _>>()?,
        );
        match kind {
            "link" => {
                fields.only(&["pci", "gts", "width", "payload"])?;
                let gts = fields.number("gts")?;
                let width = fields.number("width")? as u32;
                self.links.push(Link {
                    name,
                    pci: fields.text("pci")?,
                    gts,
                    width,
                    payload_mbps: fields.number("payload")?,
                });
            }
            "cable" => {
                fields.only(&["payload"])?;
                self.cables.push(Cable {
                    name,
                    payload_mbps: fields.number("payload")?,
                });
            }
            "rail" => self.rail(name, &fields)?,
            "wire" => self.wire(name, &fields)?,
            "node" => self.node(&name, &fields)?,
            other => {
                return Err(format!(
                    "{other:?}: a line must begin with link, cable, rail, wire or node"
                ));
            }
        }
        let shared = self.links.len() + self.cables.len();
        if shared > MAX_SHARED {
            Err(format!("more than {MAX_SHARED} links and cables"))
        } else {
            Ok(())
        }
    }

    fn rail(&mut self, name: String, fields: &Fields) -> Result<(), String> {
        fields.only(&[
            "netdev", "port", "link", "cable", "function", "line", "qp", "latency", "speed", "mtu",
            "silence", "path",
        ])?;
        let line_mbps = fields.number("line")?;
        let says = if line_mbps > 0.0 {
            line_mbps
        } else {
            UNLIMITED_SAYS_MBPS
        };
        let link = fields.text("link")?;
        self.rails.push(RailSpec {
            name,
            netdev: fields.text("netdev")?,
            phys_port: fields.text("port")?,
            link: self
                .links
                .iter()
                .position(|l| l.name == link)
                .ok_or(format!("no link {link:?} above"))?,
            cable: self.cable(&fields.text("cable")?)?,
            function: fields.number("function")? as u32,
            line_mbps,
            speed_mbps: if fields.has("speed") {
                fields.number("speed")?
            } else {
                says
            },
            qp_mbps: fields.number("qp")?,
            latency_ns: fields.number("latency")? as u64,
            mtu_bytes: if fields.has("mtu") {
                fields.path_mtu()?
            } else {
                MOST_MTU_BYTES
            },
            silence_ms: if fields.has("silence") {
                fields.number("silence")? as u64
            } else {
                0
            },
            path: if fields.has("path") {
                fields.path_faults()?
            } else {
                PathFaults::default()
            },
        });
        Ok(())
    }

    fn cable(&self, name: &str) -> Result<usize, String> {
        self.cables
            .iter()
            .position(|cable| cable.name == name)
            .ok_or(format!("no cable {name:?} above"))
    }

    fn wire(&mut self, name: String, fields: &Fields) -> Result<(), String> {
        fields.only(&["ends", "subnets"])?;
        let text = fields.text("ends")?;
        let port = |text: &str| {
            let (number, cable) = text
                .split_once('.')
                .ok_or(format!("{text:?} must be NODE.CABLE"))?;
            Ok::<Port, String>(Port {
                node: node(number)?,
                cable: self.cable(cable)?,
            })
        };
        let (one, other) = text
            .split_once(',')
            .ok_or(format!("ends={text}: must be NODE.CABLE,NODE.CABLE"))?;
        let ends = [port(one)?, port(other)?];
        let subnets = if fields.has("subnets") {
            Subnets::parse(&fields.text("subnets")?)?
        } else {
            Subnets::default()
        };
        self.wires.add(Wire {
            name,
            ends,
            subnets,
        })
    }

    fn node(&mut self, number: &str, fields: &Fields) -> Result<(), String> {
        fields.only(&["forbids", "forwards"])?;
        let node = node(number)?;
        if fields.has("forwards") {
            let text = fields.text("forwards")?;
            let (one, other) = text
                .split_once(',')
                .ok_or(format!("forwards={text}: must be CABLE,CABLE"))?;
            let port = |name: &str| {
                Ok::<Port, String>(Port {
                    node,
                    cable: self.cable(name)?,
                })
            };
            self.wires.forward([port(one)?, port(other)?])?;
        }
        if !fields.has("forbids") && fields.has("forwards") {
            return Ok(());
        }
        for name in fields.text("forbids")?.split(',') {
            let rail = self
                .rails
                .iter()
                .position(|rail| rail.name == name)
                .ok_or(format!("no rail {name:?} above"))?;
            if self.forbids(node, rail) {
                return Err(format!("{name:?} is forbidden already"));
            }
            self.forbidden.push(ForbiddenDevice { node, rail });
        }
        Ok(())
    }

    /// True if programs on a machine may not open a device.
    pub fn forbids(&self, node: usize, rail: usize) -> bool {
        self.forbidden.contains(&ForbiddenDevice { node, rail })
    }

    /// True if packets of one rail reach another rail. The arguments are each rail's machine and
    /// index.
    pub fn reaches(
        &self,
        (node, rail): (usize, usize),
        (to_node, to_rail): (usize, usize),
    ) -> bool {
        let is_same = (node, rail) == (to_node, to_rail);
        match self.wires.is_empty() {
            true => rail == to_rail,
            false => {
                is_same
                    || self
                        .wires
                        .join(self.port(node, rail), self.port(to_node, to_rail))
            }
        }
    }

    /// True if a rail's port has a cable.
    pub fn is_cabled(&self, node: usize, rail: usize) -> bool {
        self.wires.is_empty() || self.wires.has(self.port(node, rail))
    }

    /// A rail's addresses: a link-local address, in the form that is made from a hardware address,
    /// and an IPv4 address. Without wires, the IPv4 address is 192.168.(100 + rail).(machine + 1).
    /// With wires, it is [`Wires::address`], and a rail without a cable has none.
    pub fn gids(&self, node: usize, rail: usize) -> Vec<[u8; 16]> {
        let [n, d] = [node, rail].map(|n| n as u8);
        let link_local = [
            0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0x5e, 0x5f, 0x5f, 0xff, 0xfe, 0x5f, n, d,
        ];
        let place = self.rails[..rail]
            .iter()
            .filter(|other| other.cable == self.rails[rail].cable)
            .count();
        let ipv4 = match self.wires.is_empty() {
            true => Some(Ipv4Addr::new(192, 168, 100 + d, n + 1)),
            false => self.wires.address(self.port(node, rail), place),
        };
        std::iter::once(link_local)
            .chain(ipv4.map(|ip| ip.to_ipv6_mapped().octets()))
            .collect()
    }

    fn port(&self, node: usize, rail: usize) -> Port {
        Port {
            node,
            cable: self.rails[rail].cable,
        }
    }

    /// The profile in the form that [`Profile::parse`] reads.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        for l in &self.links {
            let _ = writeln!(
                text,
                "link {} pci={} gts={} width={} payload={}",
                l.name, l.pci, l.gts, l.width, l.payload_mbps
            );
        }
        for c in &self.cables {
            let _ = writeln!(text, "cable {} payload={}", c.name, c.payload_mbps);
        }
        for r in &self.rails {
            let link = &self.links[r.link].name;
            let cable = &self.cables[r.cable].name;
            let mtu = if r.mtu_bytes == MOST_MTU_BYTES {
                String::new()
            } else {
                format!(" mtu={}", r.mtu_bytes)
            };
            let silence = if r.silence_ms == 0 {
                String::new()
            } else {
                format!(" silence={}", r.silence_ms)
            };
            let faults: Vec<String> = r.path.iter().map(|fault| fault.to_string()).collect();
            let path = if faults.is_empty() {
                String::new()
            } else {
                format!(" path={}", faults.join(","))
            };
            let _ = writeln!(
                text,
                "rail {} netdev={} port={} link={link} cable={cable} function={} line={} qp={} latency={} \
                 speed={}{mtu}{silence}{path}",
                r.name,
                r.netdev,
                r.phys_port,
                r.function,
                r.line_mbps,
                r.qp_mbps,
                r.latency_ns,
                r.speed_mbps
            );
        }
        for Wire {
            name,
            ends: [one, other],
            subnets,
        } in self.wires.iter()
        {
            let end = |port: &Port| format!("{}.{}", port.node, self.cables[port.cable].name);
            let _ = writeln!(
                text,
                "wire {name} ends={},{} subnets={}",
                end(one),
                end(other),
                subnets.name()
            );
        }
        for [one, other] in self.wires.forwards() {
            let cables = [one, other].map(|port| self.cables[port.cable].name.as_str());
            let _ = writeln!(text, "node {} forwards={}", one.node, cables.join(","));
        }
        for ForbiddenDevice { node, rail } in &self.forbidden {
            let _ = writeln!(text, "node {node} forbids={}", self.rails[*rail].name);
        }
        text
    }
}

struct Fields<'a>(Vec<(&'a str, &'a str)>);

impl Fields<'_> {
    fn only(&self, allowed: &[&str]) -> Result<(), String> {
        match self.0.iter().find(|(key, _)| !allowed.contains(key)) {
            Some((key, _)) => Err(format!("{key:?} is not one of {}", allowed.join(", "))),
            None => Ok(()),
        }
    }

    fn has(&self, key: &str) -> bool {
        self.0.iter().any(|(known, _)| *known == key)
    }

    fn text(&self, key: &str) -> Result<String, String> {
        let found = self.0.iter().find(|(known, _)| *known == key);
        found
            .map(|(_, value)| (*value).to_owned())
            .ok_or(format!("{key}= is missing"))
    }

    fn path_mtu(&self) -> Result<u32, String> {
        let text = self.text("mtu")?;
        match text.parse() {
            Ok(bytes @ (256 | 512 | 1024 | 2048 | MOST_MTU_BYTES)) => Ok(bytes),
            _ => Err(format!(
                "mtu={text}: must be 256, 512, 1024, 2048 or {MOST_MTU_BYTES}"
            )),
        }
    }

    fn path_faults(&self) -> Result<PathFaults, String> {
        let text = self.text("path")?;
        let mut faults = text
            .split(',')
            .map(|fault| PathFault::parse(fault).map_err(|why| format!("path={text}: {why}")));
        faults.try_fold(PathFaults::default(), |all, fault| {
            Ok(all.with(fault?, true))
        })
    }

    fn number(&self, key: &str) -> Result<f64, String> {
        let text = self.text(key)?;
        match text.parse::<f64>() {
            Ok(n) if n.is_finite() && n >= 0.0 => Ok(n),
            _ => Err(format!("{key}={text}: must be a number, 0 or more")),
        }
    }
}

fn node(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|node| *node < MAX_NODES)
        .ok_or(format!("node {text:?}: must be 0 to {}", MAX_NODES - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profiles_are_read_scaled_and_written_again() {
        for name in Profile::names() {
            let profile = Profile::load(name, 0.5).unwrap();
            assert_eq!(Profile::parse(name, &profile.to_text()).unwrap(), profile);
        }
        let two = Profile::load("spark-2cable", 0.1).unwrap();
        assert_eq!(
            (two.rails.len(), two.links.len(), two.cables.len()),
            (4, 2, 2)
        );
        assert!(
            (two.links[0].payload_mbps - 11_200.0).abs() < 1e-6
                && (two.rails[3].qp_mbps - 10_000.0).abs() < 1e-6
        );
        assert!(
            (two.rails[3].line_mbps - 20_000.0).abs() < 1e-6
                && (two.rails[3].speed_mbps - 200_000.0).abs() < 1e-6
        );
        assert_eq!(
            (two.rails[0].link, two.rails[1].link, two.rails[2].link),
            (0, 0, 1)
        );
    }

    const WIRES: &str = "link L pci=0000:01:00 gts=32 width=4 payload=0\ncable c payload=0\n";
    const PORT: &str = "netdev=e port=p link=L cable=c function=0 line=1 qp=1 latency=1";

    #[test]
    fn a_port_has_the_largest_path_mtu_by_default() {
        let text = format!("{WIRES}rail r {PORT} mtu=1024\nrail s {PORT}");
        let profile = Profile::parse("test", &text).unwrap();
        assert_eq!(
            (profile.rails[0].mtu_bytes, profile.rails[1].mtu_bytes),
            (1024, 4096)
        );
        assert_eq!(Profile::parse("test", &profile.to_text()).unwrap(), profile);
    }

    #[test]
    fn a_profile_of_adaptive_retransmission_is_read_and_written_again() {
        let text = format!("{WIRES}rail r {PORT} silence=4000\nrail s {PORT}");
        let profile = Profile::parse("test", &text).unwrap();
        assert_eq!(
            (profile.rails[0].silence_ms, profile.rails[1].silence_ms),
            (4000, 0)
        );
        assert_eq!(Profile::parse("test", &profile.to_text()).unwrap(), profile);
    }

    #[test]
    fn wires_define_which_addresses_reach_which_nodes() {
        let triangle = Profile::load("spark-triangle", 1.0).unwrap();
        let rail = |name: &str| {
            triangle
                .rails
                .iter()
                .position(|rail| rail.name == name)
                .unwrap()
        };
        let [f0, p2f0, f1, p2f1] =
            ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"].map(rail);
        // Any function of a port reaches itself, and any function at the other end of the cable.
        assert!(triangle.reaches((0, f0), (1, f1)) && triangle.reaches((0, f0), (1, p2f1)));
        assert!(triangle.reaches((1, f1), (0, f0)) && triangle.reaches((0, f0), (0, f0)));
        assert!(!triangle.reaches((0, f0), (1, f0)) && !triangle.reaches((0, f0), (2, f1)));
        let ip = |node, rail| {
            Ipv4Addr::from(<[u8; 4]>::try_from(&triangle.gids(node, rail)[1][12..]).unwrap())
        };
        assert_eq!(
            (ip(0, f0), ip(1, f1)),
            (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2))
        );
        assert_eq!(
            (ip(1, p2f1), ip(0, f1)),
            (Ipv4Addr::new(10, 0, 1, 2), Ipv4Addr::new(10, 2, 0, 1))
        );
        let ring = Profile::load("spark-ring", 1.0).unwrap();
        assert_eq!(
            (triangle.wires.nodes(), ring.wires.nodes()),
            (Some(3), Some(4))
        );
        for (one, other) in [(0, 2), (1, 3)] {
            assert!((0..4).all(|a| (0..4).all(|b| !ring.reaches((one, a), (other, b)))));
        }
        // A port that no wire names has no cable.
        let pair = Profile::parse(
            "test",
            &format!("{WIRES}cable d payload=0\nrail r {PORT}\nrail s {PORT}\nwire w ends=0.c,1.c"),
        )
        .unwrap();
        assert!(pair.is_cabled(1, 0) && !pair.is_cabled(2, 0) && pair.gids(2, 0).len() == 1);
        // Node 1 forwards between its cables, to nodes 0 and 2; nothing else changes.
        let routed =
            Profile::parse("routed", &(ring.to_text() + "node 1 forwards=p0,p1\n")).unwrap();
        assert_eq!(Profile::parse("routed", &routed.to_text()).unwrap(), routed);
        let beyond: Vec<(usize, usize)> = (0..4)
            .flat_map(|one| (0..4).map(move |other| (one, other)))
            .filter(|(one, other)| routed.reaches((0, *one), (2, *other)))
            .collect();
        assert_eq!(
            beyond,
            [f0, p2f0]
                .iter()
                .flat_map(|one| [f1, p2f1].map(|other| (*one, other)))
                .collect::<Vec<_>>()
        );
        assert!(
            routed.reaches((2, f1), (0, f0))
                && !routed.reaches((1, f0), (3, f1))
                && !routed.reaches((0, f0), (0, f1))
        );
        // Without wires each rail reaches the rail of its name on every machine.
        let switched = Profile::load("spark-2cable", 1.0).unwrap();
        assert!(
            switched.reaches((0, 1), (9, 1))
                && !switched.reaches((0, 1), (9, 2))
                && switched.is_cabled(9, 3)
        );
        assert_eq!(switched.gids(2, 3)[1][12..], [192, 168, 103, 3]);
    }

    #[test]
    fn devices_are_forbidden_on_one_node() {
        let text =
            format!("{WIRES}rail r {PORT}\nrail s {PORT}\nnode 1 forbids=s\nnode 3 forbids=r,s");
        let profile = Profile::parse("test", &text).unwrap();
        assert!(
            profile.forbids(1, 1)
                && profile.forbids(3, 0)
                && !profile.forbids(1, 0)
                && !profile.forbids(0, 1)
        );
        assert_eq!(Profile::parse("test", &profile.to_text()).unwrap(), profile);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, word) in [
            ("rail x", "is missing"),
            ("reel x", "must begin with"),
            ("cable c payload=fast", "payload=fast"),
            ("cable c payload=1 colour=red", "colour"),
            (
                "rail r netdev=e port=p link=L cable=c function=0 line=1 qp=1 latency=1",
                "no link",
            ),
            (
                &format!("{WIRES}rail r {PORT} mtu=1500"),
                "mtu=1500: must be 256, 512",
            ),
            (&format!("{WIRES}wire w ends=0.c"), "NODE.CABLE,NODE.CABLE"),
            (&format!("{WIRES}wire w ends=0.c,16.c"), "must be 0 to 15"),
            (&format!("{WIRES}wire w ends=0.c,1.x"), "no cable \"x\""),
            (
                &format!("{WIRES}wire w ends=0.c,1.c subnets=six"),
                "each or one",
            ),
            (
                &format!("{WIRES}wire w ends=0.c,1.c\nwire v ends=0.c,2.c"),
                "already",
            ),
            (
                &format!("{WIRES}rail r {PORT}\nnode 0 forbids=q"),
                "no rail \"q\"",
            ),
            (&format!("{WIRES}node 0 forwards=c"), "must be CABLE,CABLE"),
            (&format!("{WIRES}node 0 forwards=c,d"), "no cable \"d\""),
            (&format!("{WIRES}node 0 forwards=c,c"), "two ports"),
            ("", "0 rails"),
        ] {
            let error = Profile::parse("test", text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        assert!(
            Profile::load("spark-3cable", 1.0)
                .unwrap_err()
                .contains("spark-2cable")
        );
    }
}
