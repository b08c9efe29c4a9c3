//! A GB10's graph for NCCL (`NCCL_TOPO_FILE`). This machine's GPUs are in the GB10's place, and the
//! software fabric's functions where a Spark has its ConnectX-7. So NCCL, and its own IB transport,
//! choose channels and merge functions as on a Spark.
//!
//! The attributes of the CPU, the GPU and the link between them are those of a published dump of a
//! DGX Spark. NCCL treats the rest as follows (read in 2.28.3 and 2.30.7):
//! - A GPU without an `nvlink` gets the NVLinks that NVML reports (graph/xml.cc,
//!   `ncclTopoGetXmlFromGpu`), and a GPU with NVLinks gets other channels than a GB10. An `nvlink`
//!   to a GPU that the graph does not have makes no link (graph/topo.cc, `ncclTopoAddNvLinks`). So
//!   each GPU of the graph has such an `nvlink`.
//! - NCCL keeps the attributes of a `net`, and adds missing ones from the network in use
//!   (graph/topo.cc, `ncclTopoPopulateNics`). So NCCL plans with the speeds in the graph, whatever
//!   the fabric's real speed is.
//! - NCCL drops a `net` whose name is not a device of the network in use (graph/xml.cc,
//!   `ncclTopoTrimXml`), so one graph serves all networks.

use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::Command;

/// The network device of this plugin (`DEVICE_NAME` in src/plugin.rs).
const MERGED_DEVICE: &str = "spark-rails";

#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    pub functions: Vec<Function>,
    /// Speed that this plugin announces for the device that merges all functions.
    pub merged_mbps: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Function {
    pub device: String,
    /// Domain, bus and device, as in `0000:01:00`.
    pub slot: String,
    /// Number within the slot.
    pub number: u32,
    pub gts: f64,
    pub width: u32,
    /// Speed that the port announces.
    pub speed_mbps: u32,
}

/// Returns the bus ids of this machine's GPUs, as NCCL writes them. Fails when nvidia-smi, which
/// comes with the driver, does not list them.
pub fn gpus() -> Result<Vec<String>> {
    const ASKED: &str = "nvidia-smi --query-gpu=pci.bus_id --format=csv,noheader";
    let mut words = ASKED.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    let said = command
        .args(words)
        .output()
        .with_context(|| format!("run {ASKED}"))?;
    let text = String::from_utf8_lossy(&said.stdout).to_lowercase();
    // nvidia-smi writes the domain with eight digits, NCCL with four.
    let buses: Vec<String> = text
        .lines()
        .map(|line| {
            line.trim()
                .strip_prefix("0000")
                .unwrap_or(line.trim())
                .to_owned()
        })
        .collect();
    let is_bus = |bus: &String| {
        bus.len() == 12
            && bus
                .bytes()
                .all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
    };
    ensure!(
        said.status.success() && !buses.is_empty() && buses.iter().all(is_bus),
        "{ASKED} says: {}",
        text.trim()
    );
    Ok(buses)
}

/// Returns the graph. `gpus` are bus ids as in `0000:41:00.0`.
pub fn xml(gpus: &[String], machine: &Machine) -> String {
    let mut text = String::from(
        "<system version=\"1\">\n <cpu numaid=\"0\" affinity=\"ffffffff\" arch=\"arm64\">\n",
    );
    for bus in gpus {
        // Each rank is a host of its own, whose only GPU has the number 0. NCCL rotates the order
        // of NICs by this number (graph/topo.cc, ncclTopoGetLocalNet), so with other numbers the
        // ranks would pair NICs of different subnets. The 2.5 GT/s are from the published dump;
        // NCCL plans with the C2C link instead. No GPU has the bus id that the nvlink names.
        let _ = writeln!(
            text,
            "  <pci busid=\"{bus}\" class=\"0x030200\" link_speed=\"2.5 GT/s PCIe\" link_width=\"16\">\n   \
             <gpu dev=\"0\" sm=\"121\" gdr=\"0\"><nvlink target=\"fffe:ff:ff.0\" count=\"0\" tclass=\"0x030200\"/>\
             <c2c bw=\"43125\" count=\"8\"/></gpu>\n  </pci>"
        );
    }
    let mut slots: BTreeMap<&str, Vec<&Function>> = BTreeMap::new();
    for function in &machine.functions {
        slots.entry(&function.slot).or_default().push(function);
    }
    for (slot, functions) in slots {
        let link = format!(
            "link_speed=\"{:.1} GT/s PCIe\" link_width=\"{}\"",
            functions[0].gts, functions[0].width
        );
        let domain = slot.split(':').next().unwrap_or(slot);
        // Each PCIe link of a Spark's ConnectX-7 has a domain and a root port of its own.
        let _ = writeln!(
            text,
            "  <pci busid=\"{domain}:00:00.0\" class=\"0x060400\" {link}>"
        );
        for Function {
            device,
            number,
            speed_mbps,
            ..
        } in functions
        {
            let _ = writeln!(
                text,
                "   <pci busid=\"{slot}.{number}\" class=\"0x020000\" {link}><nic>\
                 <net name=\"{device}\" speed=\"{speed_mbps}\"/></nic></pci>"
            );
        }
        text.push_str("  </pci>\n");
    }
    // The merged device has no PCI path, so NCCL attaches it to the CPU (graph/xml.cc,
    // ncclTopoFillNet).
    let _ = writeln!(
        text,
        "  <nic><net name=\"{MERGED_DEVICE}\" speed=\"{}\"/></nic>",
        machine.merged_mbps
    );
    text.push_str(" </cpu>\n</system>\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let function = |device: &str, slot: &str, number| {
            let device = device.to_owned();
            let slot = slot.to_owned();
            Function {
                device,
                slot,
                number,
                gts: 32.0,
                width: 4,
                speed_mbps: 200_000,
            }
        };
        let functions = vec![
            function("a", "0000:01:00", 0),
            function("c", "0002:01:00", 0),
            function("b", "0000:01:00", 1),
        ];
        Machine {
            functions,
            merged_mbps: 224_054,
        }
    }

    #[test]
    fn functions_of_a_link_are_behind_one_root_port() {
        let text = xml(&["0000:41:00.0".to_owned()], &machine());
        let first = text.find("busid=\"0000:00:00.0\"").unwrap();
        let second = text.find("busid=\"0002:00:00.0\"").unwrap();
        let place = |name: &str| {
            text.find(&format!("<net name=\"{name}\" speed=\"200000\"/>"))
                .unwrap()
        };
        assert!(
            first < place("a") && place("b") < second && second < place("c"),
            "{text}"
        );
        assert!(
            text.contains("busid=\"0000:01:00.1\" class=\"0x020000\" link_speed=\"32.0 GT/s PCIe\" link_width=\"4\"")
        );
        assert!(
            text.contains("busid=\"0000:41:00.0\"") && text.contains("sm=\"121\""),
            "{text}"
        );
        assert_eq!(text.matches("<pci").count(), text.matches("</pci>").count());
    }

    #[test]
    fn every_gpu_has_an_nvlink_entry_without_a_link() {
        let text = xml(
            &["0000:41:00.0".to_owned(), "0000:42:00.0".to_owned()],
            &machine(),
        );
        for gpu in text.split("<gpu ").skip(1) {
            let nvlink =
                gpu.find("<nvlink target=\"fffe:ff:ff.0\" count=\"0\" tclass=\"0x030200\"/>");
            assert!(nvlink.unwrap() < gpu.find("</gpu>").unwrap(), "{text}");
        }
        assert!(
            text.matches("<gpu ").count() == 2 && !text.contains("busid=\"fffe"),
            "{text}"
        );
    }

    #[test]
    fn the_merged_device_is_attached_to_the_cpu() {
        let text = xml(&["0000:41:00.0".to_owned()], &machine());
        let net = text
            .find("<nic><net name=\"spark-rails\" speed=\"224054\"/></nic>")
            .unwrap();
        assert_eq!(
            text[..net].matches("<pci").count(),
            text[..net].matches("</pci>").count()
        );
        assert!(
            text.rfind("</pci>").unwrap() < net && net < text.find("</cpu>").unwrap(),
            "{text}"
        );
    }
}
