//! Reads the facts of a machine, and judges nothing. A fact that cannot be read is noted with the
//! reason.
//!
//! It starts no Python and loads no library. A broken one would take the doctor down, and a folder
//! with a machine's files can be examined in the same way. The dynamic loader's choice is worked
//! out from its documented order. `object` and `memchr` read build ids, compilers, search paths and
//! version strings without loading anything; both are well kept, and their authors fuzz the
//! parsers.

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

pub use elf::Library;
pub use functions::Function;
pub use libraries::{Job, Libraries, NcclFile, PluginKind, libraries};
pub use machine::{Cpus, DeviceFile, Machine};
pub use pcie::{Aer, PciePort};
pub use process::Process;
pub use profiles::AutomaticProfile;
pub use qos::Qos;

use crate::commands::doctor::environment::Variable;
use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use nccl_net_spark::config::{Config, RailConfig};
use nccl_net_spark::interfaces::Interface;
use nccl_net_spark::rails::{self, CudaDevice, PortFacts, Survey};

/// The facts of a machine.
#[derive(Debug)]
pub struct Facts {
    pub machine: Machine,
    pub functions: Vec<Function>,
    /// Functions of RDMA-capable NICs that have no RDMA device.
    pub unbound: Vec<(Option<String>, String)>,
    /// PCIe ports above the functions.
    pub ports: Vec<PciePort>,
    /// Lines of the kernel log about uncorrected errors of functions and ports.
    pub pcie_log: Vec<String>,
    /// NetworkManager's automatic profiles on the functions' interfaces.
    pub profiles: Vec<AutomaticProfile>,
    /// Priorities of the rails.
    pub qos: Qos,
    pub interfaces: Vec<Interface>,
    /// The rails and the other ports, as the plugin finds them.
    pub survey: Survey,
    /// The error of verbs, where sysfs was read in place of it.
    pub verbs: Result<(), String>,
    /// The GPUs' attributes.
    pub cuda: Result<Vec<CudaDevice>, String>,
}

/// Reads a machine. Limits and processors are those of process `pid`, or of this one.
pub fn facts(place: &Place, pid: Option<u32>, variables: &[Variable], not_seen: &mut Vec<NotSeen>) -> Facts {
    let interfaces = interfaces::all(place).unwrap_or_else(|why| {
        not_seen.push(NotSeen::new("network interfaces and their addresses", why));
        Vec::new()
    });
    let config = config(variables);
    let (ports, verbs) = ports(place, &config.rails, not_seen);
    // The software fabric has a sysfs of its own.
    let sysfs = if place.is_live() { config.rails.sysfs.clone() } else { place.path("/sys") };
    let mut survey = rails::survey(&sysfs, &place.path("/proc/sys"), &ports, &interfaces, &config.rails.hca);
    let qos = qos::qos(place, &config, &survey, not_seen);
    survey.warnings.extend(rails::qos_warning(&qos.rails, qos.roce));
    let cuda = if place.is_live() { rails::cuda_devices() } else { machine::cuda_of_copy(place) };
    if let Err(why) = &cuda {
        not_seen.push(NotSeen::new("CUDA's attributes of the GPUs", why));
    }
    let mut machine = machine::machine(place, pid, not_seen);
    // Verbs has opened the devices. The software fabric has no device files.
    machine.has_dev_infiniband |= place.is_live() && verbs.is_ok() && !ports.is_empty();
    let functions = functions::functions(place, &sysfs, &survey, not_seen);
    let pci = functions.iter().filter_map(|one| Some((&one.device, one.pci.as_ref()?)));
    let ports = pcie::ports(place, pci);
    let netdevs: Vec<&str> = functions.iter().filter_map(|one| one.netdev.as_deref()).collect();
    let addresses = functions.iter().filter_map(|one| Some(one.pci.as_ref()?.address.as_str()));
    let addresses: Vec<&str> = addresses.chain(ports.iter().map(|port| port.address.as_str())).collect();
    Facts {
        machine,
        pcie_log: pcie::log(place, &addresses, not_seen),
        profiles: profiles::automatic_profiles(place, &netdevs, not_seen),
        unbound: functions::unbound(place),
        functions,
        ports,
        qos,
        interfaces,
        survey,
        verbs,
        cuda,
    }
}

/// The plugin's settings with these variables. One with a refused value has a finding of its own,
/// and counts as unset here.
fn config(variables: &[Variable]) -> Config {
    let usable = |one: &&Variable| Config::from_variables(&[(one.name.clone(), one.value.clone())]).is_ok();
    let pairs: Vec<_> = variables.iter().filter(usable).map(|one| (one.name.clone(), one.value.clone())).collect();
    // Each is accepted alone, and no setting depends on another. Without any, the defaults hold.
    Config::from_variables(&pairs)
        .or_else(|_| Config::from_variables(&[]))
        .unwrap_or_else(|error| unreachable!("{error}"))
}

/// Reads the ports by verbs, or by sysfs where verbs fails.
fn ports(place: &Place, config: &RailConfig, not_seen: &mut Vec<NotSeen>) -> (Vec<PortFacts>, Result<(), String>) {
    let by_sysfs = || rails::ports_from_sysfs(&place.path("/sys"));
    if !place.is_live() {
        return (by_sysfs(), Ok(()));
    }
    match nccl_net_spark::plugin::ports(&config.verbs_library) {
        Ok(ports) => (ports, Ok(())),
        Err(error) => {
            let why = error.to_string();
            not_seen.push(NotSeen::new("what verbs says of the ports; sysfs alone was read", &why));
            (by_sysfs(), Err(why))
        }
    }
}
