//! Reads the facts of a machine without judging them, or notes why a fact cannot be read.
//!
//! To examine a job's libraries, the doctor only reads files. It starts no Python for this and
//! loads no library, because a broken library would crash it, and the files may be copies from
//! another machine. (For the ports and GPUs of a live machine it does load libibverbs and CUDA's
//! driver.) `loader` derives the dynamic loader's choice from the documented search order. The
//! crates `object` and `memchr` read build ids, compilers, search paths and version strings. Both
//! crates are well maintained, and their authors fuzz the parsers.

mod elf;
mod functions;
pub mod interfaces;
mod libraries;
mod loader;
mod machine;
mod pcie;
mod process;
mod profiles;
mod python;
mod qos;
pub mod silence;
pub mod variables;

pub use elf::Library;
pub use functions::Function;
pub use libraries::{Job, Libraries, NcclFile, PluginKind, libraries};
pub use machine::{Cpus, DeviceFile, Machine};
pub use pcie::{KernelLog, PcieErrorCounts, PciePort};
pub use process::Process;
pub use profiles::AutomaticProfile;
pub use qos::Qos;

use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::look::variables::Variable;
use crate::commands::doctor::place::Place;
use host::config::{Config, RailConfig};
use host::interfaces::Interface;
use host::rails::{self, CudaDevice, PortFacts, Survey};
use verbs::OpenPorts;

#[derive(Debug)]
pub struct Facts {
    pub machine: Machine,
    pub functions: Vec<Function>,
    /// The driver, if any, and the PCI address of each NIC without an RDMA device.
    pub unbound: Vec<(Option<String>, String)>,
    /// True if PCI has a Mellanox device; `None` if sysfs shows no PCI device at all.
    pub has_nic: Option<bool>,
    pub ports: Vec<PciePort>,
    /// Lines about `functions` and (PCIe) `ports`.
    pub kernel_log: KernelLog,
    pub profiles: Vec<AutomaticProfile>,
    pub qos: Qos,
    pub interfaces: Vec<Interface>,
    pub survey: Survey,
    /// Error of libibverbs, if any. `survey` then has the ports from sysfs.
    pub verbs: Result<(), String>,
    pub cuda: Result<Vec<CudaDevice>, String>,
}

/// Reads a machine. Limits and processors are those of process `pid`, if given, or of this process.
pub fn facts(
    place: &Place,
    pid: Option<u32>,
    variables: &[Variable],
    not_seen: &mut Vec<NotSeen>,
) -> Facts {
    let interfaces = interfaces::all(place).unwrap_or_else(|why| {
        not_seen.push(NotSeen::new("network interfaces and their addresses", why));
        Vec::new()
    });
    let config = config(variables);
    let (ports, verbs) = ports(place, &config.rails, not_seen);
    // The software fabric has its own sysfs folder.
    let sysfs = if place.is_live() {
        config.rails.sysfs.clone()
    } else {
        place.path("/sys")
    };
    let mut survey = rails::survey(
        &sysfs,
        &place.path("/proc/sys"),
        &ports,
        &interfaces,
        &config.rails.hca,
    );
    let qos = qos::qos(place, &config, &survey, not_seen);
    survey
        .warnings
        .extend(rails::qos_warning(&qos.rails, qos.roce));
    let cuda = if place.is_live() {
        rails::cuda_devices()
    } else {
        machine::cuda_of_copy(place)
    };
    if let Err(why) = &cuda {
        not_seen.push(NotSeen::new("CUDA's attributes of the GPUs", why));
    }
    let mut machine = machine::machine(place, pid, not_seen);
    // If libibverbs lists ports, it has opened their devices, so /dev/infiniband counts as present.
    // The software fabric has no device files.
    machine.has_dev_infiniband |= place.is_live() && verbs.is_ok() && !ports.is_empty();
    let functions = functions::functions(place, &sysfs, &survey, not_seen);
    let pci = functions
        .iter()
        .filter_map(|one| Some((&one.device, one.pci.as_ref()?)));
    let pcie_ports = pcie::ports(place, pci);
    let netdevs: Vec<&str> = functions
        .iter()
        .filter_map(|one| one.netdev.as_deref())
        .collect();
    let addresses = functions
        .iter()
        .filter_map(|one| Some(one.pci.as_ref()?.address.as_str()));
    let addresses: Vec<&str> = addresses
        .chain(pcie_ports.iter().map(|port| port.address.as_str()))
        .collect();
    Facts {
        machine,
        kernel_log: pcie::log(place, &addresses, not_seen),
        profiles: profiles::automatic_profiles(place, &netdevs, not_seen),
        unbound: functions::unbound(place),
        has_nic: functions::has_nic(place),
        functions,
        ports: pcie_ports,
        qos,
        interfaces,
        survey,
        verbs,
        cuda,
    }
}

/// Returns the configuration that the variables give. A variable with a refused value has its own
/// finding, and counts as unset here.
fn config(variables: &[Variable]) -> Config {
    let usable =
        |one: &&Variable| Config::from_variables(&[(one.name.clone(), one.value.clone())]).is_ok();
    let pairs: Vec<_> = variables
        .iter()
        .filter(usable)
        .map(|one| (one.name.clone(), one.value.clone()))
        .collect();
    // This should not fail, because each value was accepted alone and no setting depends on
    // another. If it fails, use the defaults.
    Config::from_variables(&pairs)
        .or_else(|_| Config::from_variables(&[]))
        .unwrap_or_else(|error| unreachable!("{error}"))
}

fn ports(
    place: &Place,
    config: &RailConfig,
    not_seen: &mut Vec<NotSeen>,
) -> (Vec<PortFacts>, Result<(), String>) {
    let by_sysfs = || rails::ports_from_sysfs(&place.path("/sys"));
    if !place.is_live() {
        return (by_sysfs(), Ok(()));
    }
    match OpenPorts::new(&config.verbs_library) {
        Ok(ports) => (ports.facts(), Ok(())),
        Err(error) => {
            let why = error.to_string();
            not_seen.push(NotSeen::new(
                "ports as reported by libibverbs (read from sysfs instead)",
                &why,
            ));
            (by_sysfs(), Err(why))
        }
    }
}
