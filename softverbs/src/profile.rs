//! What a fabric's machines look like: rails, the PCIe links and cables that they share, and their rates.
//!
//! A profile is text, a line each:
//!
//! ```text
//! link  NAME pci=DDDD:BB:DD gts=32 width=4 payload=112000        # Mb/s of payload; 0: no limit
//! cable NAME payload=195000
//! rail  NAME netdev=IF port=p0 link=LINK cable=CABLE function=0 line=200000 qp=100000 latency=1400   # Mb/s, Mb/s, ns
//! ```
//!
//! A rail may have `speed=` as well: what its port says of its speed, where that is not what it carries. And `mtu=`: its port's
//! path MTU in bytes, 4096 unless said.

use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Rails of one machine.
pub const MAX_RAILS: usize = 8;
/// Links and cables of one machine.
pub const MAX_SHARED: usize = 16;

/// The largest path MTU that there is.
const MOST_MTU_BYTES: u32 = 4096;
/// What a port without a limit says of its speed.
const UNLIMITED_SAYS_MBPS: f64 = 100_000.0;

/// One machine's wiring; all machines of a fabric have the same.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Its name, or the file's.
    pub name: String,
    /// PCIe links.
    pub links: Vec<Link>,
    /// Cables.
    pub cables: Vec<Cable>,
    /// Rails: at most [`MAX_RAILS`].
    pub rails: Vec<RailSpec>,
}

/// A PCIe link.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Its name in the profile.
    pub name: String,
    /// `domain:bus:device`.
    pub pci: String,
    /// GT/s per lane.
    pub gts: f64,
    /// Lanes.
    pub width: u32,
    /// What it carries each way, in Mb/s of payload; 0: no limit.
    pub payload_mbps: f64,
}

/// A cable.
#[derive(Debug, Clone, PartialEq)]
pub struct Cable {
    /// Its name in the profile.
    pub name: String,
    /// What it carries each way, in Mb/s of payload; 0: no limit.
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
    /// What the port carries, in Mb/s; 0: no limit.
    pub line_mbps: f64,
    /// What the port says of its speed, in Mb/s: scaling leaves it, so that who plans by what ports and links say plans as
    /// on the machine that the profile is of.
    pub speed_mbps: f64,
    /// What one queue pair carries, in Mb/s; 0: no limit.
    pub qp_mbps: f64,
    /// One way, in nanoseconds.
    pub latency_ns: u64,
    /// The port's path MTU, in bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu_bytes: u32,
}

/// The built-in profiles. A Spark: both twins of a cable share its 200 Gb/s (about 195 after RoCE framing), each is on a 32 GT/s x4
/// link of its own (112 Gb/s of payload), one queue pair gives 100 Gb/s (published: 92 to 102), and a 2-byte write takes 1.4 us
/// (published: 1.42 to 1.57). With two cables two functions share each link.
const BUILT_IN: [(&str, &str); 3] = [
    (
        "spark-1cable",
        "link A pci=0000:01:00 gts=32 width=4 payload=112000
         link B pci=0002:01:00 gts=32 width=4 payload=112000
         cable p0 payload=195000
         rail rocep1s0f0 netdev=enp1s0f0np0 port=p0 link=A cable=p0 function=0 line=200000 qp=100000 latency=1400
         rail roceP2p1s0f0 netdev=enP2p1s0f0np0 port=p0 link=B cable=p0 function=0 line=200000 qp=100000 latency=1400",
    ),
    (
        "spark-2cable",
        "link A pci=0000:01:00 gts=32 width=4 payload=112000
         link B pci=0002:01:00 gts=32 width=4 payload=112000
         cable p0 payload=195000
         cable p1 payload=195000
         rail rocep1s0f0 netdev=enp1s0f0np0 port=p0 link=A cable=p0 function=0 line=200000 qp=100000 latency=1400
         rail rocep1s0f1 netdev=enp1s0f1np1 port=p1 link=A cable=p1 function=1 line=200000 qp=100000 latency=1400
         rail roceP2p1s0f0 netdev=enP2p1s0f0np0 port=p0 link=B cable=p0 function=0 line=200000 qp=100000 latency=1400
         rail roceP2p1s0f1 netdev=enP2p1s0f1np1 port=p1 link=B cable=p1 function=1 line=200000 qp=100000 latency=1400",
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
    pub fn names() -> [&'static str; 3] {
        BUILT_IN.map(|(name, _)| name)
    }

    /// A built-in profile, or one from a file, with all rates times `scale`.
    ///
    /// # Errors
    /// Names the line that is not usable, or the names that there are.
    pub fn load(name_or_path: &str, scale: f64) -> Result<Self, String> {
        if !crate::settings::SCALES.contains(&scale) {
            let (low, high) = (crate::settings::SCALES.start(), crate::settings::SCALES.end());
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
        profile.links.iter_mut().for_each(|link| link.payload_mbps *= scale);
        profile.cables.iter_mut().for_each(|cable| cable.payload_mbps *= scale);
        Ok(profile)
    }

    /// Reads a profile's text.
    ///
    /// # Errors
    /// Names the line, and what is allowed.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        let mut profile = Self { name: name.to_owned(), links: Vec::new(), cables: Vec::new(), rails: Vec::new() };
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                profile.line(line).map_err(|why| format!("{name}, line {}: {why} in {line:?}", number + 1))?;
            }
        }
        match profile.rails.len() {
            1..=MAX_RAILS => Ok(profile),
            n => Err(format!("{name}: {n} rails; must be 1 to {MAX_RAILS}")),
        }
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        let mut words = line.split_whitespace();
        let (kind, name) = (words.next().unwrap_or_default(), words.next().ok_or("no name")?.to_owned());
        let fields = Fields(
            words.map(|w| w.split_once('=').ok_or(format!("{w:?} must be KEY=VALUE"))).collect::<Result<_, _>>()?,
        );
        match kind {
            "link" => {
                fields.only(&["pci", "gts", "width", "payload"])?;
                let (gts, width) = (fields.number("gts")?, fields.number("width")? as u32);
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
                self.cables.push(Cable { name, payload_mbps: fields.number("payload")? });
            }
            "rail" => {
                fields
                    .only(&["netdev", "port", "link", "cable", "function", "line", "qp", "latency", "speed", "mtu"])?;
                let line_mbps = fields.number("line")?;
                let says = if line_mbps > 0.0 { line_mbps } else { UNLIMITED_SAYS_MBPS };
                let (link, cable) = (fields.text("link")?, fields.text("cable")?);
                self.rails.push(RailSpec {
                    name,
                    netdev: fields.text("netdev")?,
                    phys_port: fields.text("port")?,
                    link: self.links.iter().position(|l| l.name == link).ok_or(format!("no link {link:?} above"))?,
                    cable: self
                        .cables
                        .iter()
                        .position(|c| c.name == cable)
                        .ok_or(format!("no cable {cable:?} above"))?,
                    function: fields.number("function")? as u32,
                    line_mbps,
                    speed_mbps: if fields.has("speed") { fields.number("speed")? } else { says },
                    qp_mbps: fields.number("qp")?,
                    latency_ns: fields.number("latency")? as u64,
                    mtu_bytes: if fields.has("mtu") { fields.path_mtu()? } else { MOST_MTU_BYTES },
                });
            }
            other => return Err(format!("{other:?}: a line must begin with link, cable or rail")),
        }
        let shared = self.links.len() + self.cables.len();
        if shared > MAX_SHARED { Err(format!("more than {MAX_SHARED} links and cables")) } else { Ok(()) }
    }

    /// Writes the tree of files that a kernel would show of such a machine under `/sys`, as far as somebody reads it: interfaces
    /// with their physical ports, devices with their PCIe links.
    ///
    /// # Errors
    /// Names the file.
    pub fn write_sysfs(&self, root: &Path) -> Result<(), String> {
        for (index, rail) in self.rails.iter().enumerate() {
            let link = &self.links[rail.link];
            let domain = link.pci.split(':').next().unwrap_or("0000");
            let function = root.join(format!("devices/pci{domain}:00/{}.{}", link.pci, rail.function));
            let (infiniband, net) =
                (function.join("infiniband").join(&rail.name), function.join("net").join(&rail.netdev));
            let speed = format!("{:.1} GT/s PCIe\n", link.gts);
            for name in ["current_link_speed", "max_link_speed"] {
                put(&function.join(name), &speed)?;
            }
            for name in ["current_link_width", "max_link_width"] {
                put(&function.join(name), &format!("{}\n", link.width))?;
            }
            put(&net.join("phys_port_name"), &format!("{}\n", rail.phys_port))?;
            put(&net.join("phys_switch_id"), "5f5f5f5f5f5f\n")?;
            // What a path MTU leaves for the headers: an interface of 1500 has one of 1024.
            let netdev_mtu = if rail.mtu_bytes == MOST_MTU_BYTES { 9000 } else { rail.mtu_bytes + 476 };
            put(&net.join("mtu"), &format!("{netdev_mtu}\n"))?;
            put(&net.join("dev_port"), "0\n")?;
            put(&infiniband.join("sys_image_guid"), "5f5f:5f00:0000:0001\n")?;
            put(&infiniband.join("node_guid"), &format!("5f5f:5f00:0000:{:04x}\n", index + 1))?;
            put(&infiniband.join("ports/1/gid_attrs/types/0"), "RoCE v2\n")?;
            put(&infiniband.join("ports/1/gid_attrs/types/1"), "RoCE v2\n")?;
            put(&infiniband.join("ports/1/gid_attrs/ndevs/0"), &format!("{}\n", rail.netdev))?;
            put(&infiniband.join("ports/1/gid_attrs/ndevs/1"), &format!("{}\n", rail.netdev))?;
            link_to(&infiniband.join("device"), &function)?;
            link_to(&net.join("device"), &function)?;
            link_to(&root.join("class/infiniband").join(&rail.name), &infiniband)?;
            link_to(&root.join("class/net").join(&rail.netdev), &net)?;
            link_to(&root.join("bus/pci/devices").join(format!("{}.{}", link.pci, rail.function)), &function)?;
        }
        Ok(())
    }

    /// Shows a rail's RDMA device in such a tree, or no longer, as far as there is a tree. An entry that is shown again is another one, with
    /// another inode, as in sysfs.
    ///
    /// # Errors
    /// Names the file.
    pub fn show_device(&self, root: &Path, rail: usize, is_there: bool) -> Result<(), String> {
        let (class, rail) = (root.join("class/infiniband"), &self.rails[rail]);
        let (entry, link) = (class.join(&rail.name), &self.links[rail.link]);
        let domain = link.pci.split(':').next().unwrap_or("0000");
        let function = root.join(format!("devices/pci{domain}:00/{}.{}", link.pci, rail.function));
        match is_there {
            _ if !class.exists() => Ok(()),
            true if entry.symlink_metadata().is_err() => link_to(&entry, &function.join("infiniband").join(&rail.name)),
            false => match entry.symlink_metadata() {
                // Each is kept, under a name of its own: a file system may give the inode of what is deleted to what is made next.
                Ok(found) => {
                    let removed = root.join("removed");
                    let kept = removed.join(format!("{}-{}", rail.name, found.ino()));
                    std::fs::create_dir_all(&removed)
                        .and_then(|()| std::fs::rename(&entry, kept))
                        .map_err(|error| format!("{}: {error}", entry.display()))
                }
                Err(_) => Ok(()),
            },
            true => Ok(()),
        }
    }

    /// The profile as text, as [`Profile::parse`] reads it.
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
            let (link, cable) = (&self.links[r.link].name, &self.cables[r.cable].name);
            let mtu = if r.mtu_bytes == MOST_MTU_BYTES { String::new() } else { format!(" mtu={}", r.mtu_bytes) };
            let _ = writeln!(
                text,
                "rail {} netdev={} port={} link={link} cable={cable} function={} line={} qp={} latency={} \
                 speed={}{mtu}",
                r.name, r.netdev, r.phys_port, r.function, r.line_mbps, r.qp_mbps, r.latency_ns, r.speed_mbps
            );
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
        found.map(|(_, value)| (*value).to_owned()).ok_or(format!("{key}= is missing"))
    }

    fn path_mtu(&self) -> Result<u32, String> {
        let text = self.text("mtu")?;
        match text.parse() {
            Ok(bytes @ (256 | 512 | 1024 | 2048 | MOST_MTU_BYTES)) => Ok(bytes),
            _ => Err(format!("mtu={text}: must be 256, 512, 1024, 2048 or {MOST_MTU_BYTES}")),
        }
    }

    fn number(&self, key: &str) -> Result<f64, String> {
        let text = self.text(key)?;
        match text.parse::<f64>() {
            Ok(n) if n.is_finite() && n >= 0.0 => Ok(n),
            _ => Err(format!("{key}={text}: must be a number from 0 on")),
        }
    }
}

fn put(file: &Path, text: &str) -> Result<(), String> {
    let folder = file.parent().unwrap_or(file);
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(file, text))
        .map_err(|e| format!("{}: {e}", file.display()))
}

fn link_to(place: &Path, target: &Path) -> Result<(), String> {
    let folder = place.parent().unwrap_or(place);
    let made = std::fs::create_dir_all(folder).and_then(|()| std::os::unix::fs::symlink(target, place));
    match made {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(format!("{}: {e}", place.display())),
        _ => Ok(()),
    }
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
        assert_eq!((two.rails.len(), two.links.len(), two.cables.len()), (4, 2, 2));
        assert!((two.links[0].payload_mbps - 11_200.0).abs() < 1e-6 && (two.rails[3].qp_mbps - 10_000.0).abs() < 1e-6);
        assert!((two.rails[3].line_mbps - 20_000.0).abs() < 1e-6 && (two.rails[3].speed_mbps - 200_000.0).abs() < 1e-6);
        assert_eq!((two.rails[0].link, two.rails[1].link, two.rails[2].link), (0, 0, 1));
    }

    const WIRES: &str = "link L pci=0000:01:00 gts=32 width=4 payload=0\ncable c payload=0\n";
    const PORT: &str = "netdev=e port=p link=L cable=c function=0 line=1 qp=1 latency=1";

    #[test]
    fn a_port_has_the_largest_path_mtu_unless_another_is_said() {
        let text = format!("{WIRES}rail r {PORT} mtu=1024\nrail s {PORT}");
        let profile = Profile::parse("test", &text).unwrap();
        assert_eq!((profile.rails[0].mtu_bytes, profile.rails[1].mtu_bytes), (1024, 4096));
        assert_eq!(Profile::parse("test", &profile.to_text()).unwrap(), profile);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, word) in [
            ("rail x", "is missing"),
            ("reel x", "must begin with"),
            ("cable c payload=fast", "payload=fast"),
            ("cable c payload=1 colour=red", "colour"),
            ("rail r netdev=e port=p link=L cable=c function=0 line=1 qp=1 latency=1", "no link"),
            (&format!("{WIRES}rail r {PORT} mtu=1500"), "mtu=1500: must be 256, 512"),
            ("", "0 rails"),
        ] {
            let error = Profile::parse("test", text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        assert!(Profile::load("spark-3cable", 1.0).unwrap_err().contains("spark-2cable"));
    }
}
