//! Control of fabrics from outside: creation for a job, injection of faults, and reports.

use crate::folder::Folder;
use crate::hotplug::Phase;
use crate::os::process::pid_namespace;
use crate::os::shm::{FabricMemory, QpMemory, RailMemory};
use crate::path::{PathFault, PathFaults};
use crate::profile::{MAX_NODES, Profile, RailSpec};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Duration of each of two phases of a removal: [`Phase::Cut`], in which keys are still valid, and
/// [`Phase::Keyless`], in which they are not. In Linux, the durations depend on the number of
/// objects to destroy.
pub const REMOVAL_STEP: Duration = Duration::from_millis(10);
/// Duration of [`Phase::Failed`], in which a function with failed firmware is still registered. The
/// duration is longer than the sleeps of the fabric's and the plugin's threads, so that both see
/// the phase. With mlx5, the phase takes seconds.
const FAILED: Duration = Duration::from_millis(300);
/// Time from the removal of a function with failed firmware to its return. As long as [`FAILED`],
/// for the same reason.
const REMOVED: Duration = Duration::from_millis(300);

/// A fabric that was made for a job. It counts as in use until this value is dropped.
#[derive(Debug)]
pub struct Prepared {
    /// Environment variables for the ranks, without `SOFTVERBS_NODE`.
    pub environment: Vec<(String, String)>,
    folder: Folder,
    _user: File,
}

/// A fault to inject into a rail, or the end of a fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Action {
    /// Take the port down.
    Down,
    /// Bring the port up.
    Up,
    /// Take the port's addresses away (false), or add them again at other indices of the GID table
    /// (true).
    Addresses(bool),
    /// Take the function off the bus: cut programs off, invalidate the keys, remove the device.
    Unplug,
    /// Let the firmware fail: the device stops answering, is removed as by [`Self::Unplug`], and
    /// returns as by [`Self::Plug`].
    Reset,
    /// Bring the function back, as a new device of the same name.
    Plug,
    /// Limit the rail to this fraction of its rate without faults ([`RailStatus::full_mbps`], or
    /// the reported speed if that is `None`). 1 ends the limit.
    Slow(f64),
    /// Refuse this many of the next incoming requests as invalid.
    Refuse(u32),
    /// For this many of the next queue pairs, let connecting fail with `ETIMEDOUT` after a second,
    /// as if the peer's address did not answer.
    Unresolved(u32),
    /// Give the rail's path this fault (true), or end the fault (false).
    Path(PathFault, bool),
    /// For this many of the rail's next completions, treat the completion queue as full.
    Overrun(u32),
    /// Block commands to the firmware (true), or let them return (false). Data flows in both cases.
    Hang(bool),
}

/// A fabric in use.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// The fabric's name.
    pub name: String,
    /// The folder of its files.
    pub folder: PathBuf,
    /// The nodes of its job.
    pub nodes: Vec<NodeStatus>,
}

/// A node of a fabric.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeStatus {
    /// The node's number.
    pub node: usize,
    /// PIDs of its processes, in their own PID namespace. Empty before the rank has started.
    pub pids: Vec<u32>,
    /// Number of queue pairs that its processes have.
    pub queue_pairs: usize,
    /// Number of memory regions that its processes have registered.
    pub registrations: u64,
    /// The node's rails.
    pub rails: Vec<RailStatus>,
}

/// A rail of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct RailStatus {
    /// The RDMA device.
    pub device: String,
    /// Rate without a fault, in Mb/s; `None`: no limit.
    pub full_mbps: Option<f64>,
    /// Rate now, in Mb/s; `None`: no limit. 0 while its port is down or its function is unplugged.
    pub now_mbps: Option<f64>,
    /// True while its port is down.
    pub is_down: bool,
    /// True while its port has no addresses.
    pub is_without_address: bool,
    /// True while its function has failed, is being removed, or is off the bus.
    pub is_unplugged: bool,
    /// Number of incoming requests that the rail will still refuse.
    pub refusals: u32,
    /// Number of queue pairs that will still fail to connect, with `ETIMEDOUT`.
    pub unanswered: u32,
    /// The faults of its path.
    pub path: PathFaults,
    /// Payload bytes that were carried for requests of this rail since the fabric was made. They
    /// include the control data of the program's connections, and the bytes that RDMA reads have
    /// fetched.
    pub sent_bytes: u64,
}

/// Creates a fabric for a job of `nodes` nodes, without processes.
///
/// # Errors
/// Names the failed step, and how to correct the failure.
pub fn prepare(
    dir: &Path,
    name: &str,
    profile: &Profile,
    nodes: usize,
) -> Result<Prepared, String> {
    if let Some(most) = profile.wires.nodes().filter(|most| nodes > *most) {
        return Err(format!(
            "profile {} has cables for {most} nodes, not for {nodes}",
            profile.name
        ));
    }
    let folder = Folder::new(dir, name);
    let _membership = folder.lock_membership()?;
    if folder.has_users() {
        return Err(format!(
            "the fabric {name:?} is in use by another run: choose another name"
        ));
    }
    // The folder is deleted when the job ends, so it must not have other files.
    if let Some(foreign) = folder.foreign_file() {
        return Err(format!(
            "{} does not belong to a fabric: choose another name for the fabric",
            foreign.display()
        ));
    }
    folder.clear()?;
    let (memory, _) = folder.open(Some(profile))?;
    memory.nodes.store(nodes as u32, Ordering::Release);
    for node in 0..nodes {
        profile.write_sysfs(&own_sysfs(&folder, node))?;
    }
    let user = folder.lock_as_user()?;
    Ok(Prepared {
        environment: environment(dir, name),
        folder,
        _user: user,
    })
}

/// Returns the variables of a process in the fabric `name`, without `SOFTVERBS_NODE`.
pub fn environment(dir: &Path, name: &str) -> Vec<(String, String)> {
    let sysfs = dir.join(name).join("sys").display().to_string();
    [
        ("SOFTVERBS_DIR", dir.display().to_string()),
        ("SOFTVERBS_FABRIC", name.to_owned()),
        ("NCCL_SPARK_SYSFS", sysfs),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

impl Prepared {
    /// The folder of the fabric's files.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Deletes the fabric's files. Processes that still use the fabric keep the memory mapped.
    pub fn remove(&self) {
        self.folder.remove();
    }
}

/// Lists the fabrics in `dir` that a process uses, sorted by name.
pub fn used(dir: &Path) -> Vec<String> {
    let mut names = names(dir);
    names.retain(|name| Folder::new(dir, name).is_used());
    names
}

/// True if a process uses the fabric `name`.
pub fn is_used(dir: &Path, name: &str) -> bool {
    Folder::new(dir, name).is_used()
}

/// Deletes the fabrics in `dir` that no process uses and whose names `is_ours` accepts. Keeps a
/// folder that has other files than a fabric's.
pub fn remove_unused(dir: &Path, is_ours: impl Fn(&str) -> bool) {
    for name in names(dir).into_iter().filter(|name| is_ours(name)) {
        let folder = Folder::new(dir, &name);
        let Some(_membership) = folder
            .has_fabric()
            .then(|| folder.lock_membership().ok())
            .flatten()
        else {
            continue;
        };
        if !folder.has_users() && folder.foreign_file().is_none() {
            folder.remove();
        }
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Returns the folder that a process of a node uses as `/sys`: the node's own if it exists, else
/// `shared`.
pub fn sysfs_of_node(shared: &str, node: usize) -> String {
    let own = Path::new(shared).join("nodes").join(node.to_string());
    if own.exists() {
        own.display().to_string()
    } else {
        shared.to_owned()
    }
}

/// Returns the root of the node's own sysfs tree. An unplugged function has no entry there. The
/// shared tree has every function.
fn own_sysfs(folder: &Folder, node: usize) -> PathBuf {
    folder.path().join("sys/nodes").join(node.to_string())
}

/// Injects a fault into a rail of a fabric in use, or ends the fault. `node` is `None` for all
/// nodes.
///
/// # Errors
/// Lists the fabrics in use, the nodes or the rails if the given one is not among them. Names the
/// reason if the rail cannot have the fault, or if sysfs cannot be changed.
pub fn control(
    dir: &Path,
    fabric: &str,
    node: Option<usize>,
    rail: &str,
    action: Action,
) -> Result<(), String> {
    let (memory, profile) = open_used(dir, fabric)?;
    let index = rail_index(&profile, fabric, rail)?;
    check_node(memory, fabric, node)?;
    if let Action::Path(fault, true) = action {
        profile.allows(index, fault)?;
    }
    let wanted = || (0..MAX_NODES).filter(|at| node.is_none_or(|wanted| wanted == *at));
    let folder = Folder::new(dir, fabric);
    let enter_phase = |phase, pause| {
        wanted().for_each(|at| memory.rails[at][index].move_to(phase));
        std::thread::sleep(pause);
    };
    let show = |is_there| {
        let shared = folder.path().join("sys").display().to_string();
        wanted()
            .map(|at| PathBuf::from(sysfs_of_node(&shared, at)))
            .try_for_each(|root| profile.show_device(&root, index, is_there))
    };
    let unplug = || {
        enter_phase(Phase::Cut, REMOVAL_STEP);
        enter_phase(Phase::Keyless, REMOVAL_STEP);
        enter_phase(Phase::Gone, Duration::ZERO);
        show(false)
    };
    // The device's entry in sysfs must exist before programs see the device.
    let plug = || {
        show(true)?;
        wanted().for_each(|at| memory.rails[at][index].link_up(memory.now_ns()));
        enter_phase(Phase::Here, Duration::ZERO);
        Ok(())
    };
    wanted().for_each(|at| {
        set(
            &memory.rails[at][index],
            &profile,
            index,
            action,
            memory.now_ns(),
        )
    });
    match action {
        Action::Unplug => unplug(),
        Action::Plug => plug(),
        Action::Reset => {
            enter_phase(Phase::Failed, FAILED);
            unplug()?;
            std::thread::sleep(REMOVED);
            plug()
        }
        _ => Ok(()),
    }
}

/// Finds a rail by the name of its device. The error lists the fabric's rails.
fn rail_index(profile: &Profile, fabric: &str, rail: &str) -> Result<usize, String> {
    let names: Vec<&str> = profile
        .rails
        .iter()
        .map(|spec| spec.name.as_str())
        .collect();
    let unknown = || {
        format!(
            "fabric {fabric} has no rail {rail:?}; its rails: {}",
            names.join(", ")
        )
    };
    names
        .iter()
        .position(|name| *name == rail)
        .ok_or_else(unknown)
}

/// Fails if the fabric has no such node. The error lists the fabric's nodes. `None` stands for all
/// nodes, so it always passes.
fn check_node(memory: &FabricMemory, fabric: &str, node: Option<usize>) -> Result<(), String> {
    let nodes = nodes(memory);
    let Some(node) = node.filter(|node| !nodes.contains(node)) else {
        return Ok(());
    };
    let nodes: Vec<String> = nodes.iter().map(usize::to_string).collect();
    let nodes = if nodes.is_empty() {
        "none yet".to_owned()
    } else {
        nodes.join(", ")
    };
    Err(format!(
        "fabric {fabric} has no node {node}; its nodes: {nodes}"
    ))
}

fn set(rail_memory: &RailMemory, profile: &Profile, rail: usize, action: Action, now_ns: u64) {
    match action {
        Action::Unplug | Action::Plug | Action::Reset => {}
        Action::Down => rail_memory.set_port(false, now_ns),
        Action::Up => rail_memory.set_port(true, now_ns),
        Action::Addresses(is_there) => rail_memory.set_addresses(is_there),
        Action::Refuse(count) => rail_memory.refusals.store(count, Ordering::Relaxed),
        Action::Unresolved(count) => rail_memory.unanswered.store(count, Ordering::Relaxed),
        Action::Path(fault, is_on) => rail_memory.set_path(rail_memory.path().with(fault, is_on)),
        Action::Overrun(count) => rail_memory.overruns.store(count, Ordering::Relaxed),
        Action::Hang(is_hung) => rail_memory.hang(is_hung),
        Action::Slow(factor) => {
            let spec = &profile.rails[rail];
            let full = full_mbps(profile, spec).unwrap_or(spec.speed_mbps);
            let rate = if factor >= 1.0 {
                spec.line_mbps
            } else {
                full * factor
            };
            rail_memory.line.tx.set_rate(rate);
            rail_memory.line.rx.set_rate(rate);
        }
    }
}

/// Reports the nodes and rails of a fabric in use. The error lists the fabrics that are in use.
pub fn status(dir: &Path, fabric: &str) -> Result<Status, String> {
    let (memory, profile) = open_used(dir, fabric)?;
    let rail = |node: usize, index: usize| {
        let spec = &profile.rails[index];
        let rail_memory = &memory.rails[node][index];
        let is_down = rail_memory.down.load(Ordering::Acquire) != 0;
        let is_unplugged = rail_memory.presence().phase != Phase::Here;
        let full_mbps = full_mbps(&profile, spec);
        let rate_mbps = Some(rail_memory.line.tx.rate_mbps()).filter(|mbps| *mbps > 0.0);
        let now_mbps = [rate_mbps, full_mbps]
            .into_iter()
            .flatten()
            .reduce(f64::min);
        RailStatus {
            device: spec.name.clone(),
            full_mbps,
            now_mbps: if is_down || is_unplugged {
                Some(0.0)
            } else {
                now_mbps
            },
            is_down,
            is_without_address: !rail_memory.gid_table().has_addresses(),
            is_unplugged,
            refusals: rail_memory.refusals.load(Ordering::Relaxed),
            unanswered: rail_memory.unanswered.load(Ordering::Relaxed),
            path: rail_memory.path(),
            sent_bytes: rail_memory.sent_bytes.load(Ordering::Relaxed),
        }
    };
    let pid = |process: usize| memory.processes[process].pid.load(Ordering::Acquire);
    let registrations = |process: usize| {
        u64::from(
            memory.processes[process]
                .registrations
                .load(Ordering::Relaxed),
        )
    };
    let node = |node: usize| NodeStatus {
        node,
        pids: processes(memory)
            .filter(|(_, on)| *on == node)
            .map(|(process, _)| pid(process))
            .collect(),
        queue_pairs: processes(memory)
            .filter(|(_, on)| *on == node)
            .map(|(process, _)| queue_pairs_of(memory, process))
            .sum(),
        registrations: processes(memory)
            .filter(|(_, on)| *on == node)
            .map(|(process, _)| registrations(process))
            .sum(),
        rails: (0..profile.rails.len())
            .map(|index| rail(node, index))
            .collect(),
    };
    let folder = Folder::new(dir, fabric).path().to_owned();
    Ok(Status {
        name: fabric.to_owned(),
        folder,
        nodes: nodes(memory).into_iter().map(node).collect(),
    })
}

/// Returns the kernel's numbers of the threads that gave the last commands to a rail's firmware, on
/// all nodes. The error lists the fabrics that are in use.
pub fn callers(dir: &Path, fabric: &str, rail: &str) -> Result<Vec<u32>, String> {
    let (memory, profile) = open_used(dir, fabric)?;
    let index = profile.rails.iter().position(|spec| spec.name == rail);
    let index = index.ok_or_else(|| format!("fabric {fabric} has no rail {rail:?}"))?;
    Ok(memory
        .rails
        .iter()
        .flat_map(|rails| rails[index].callers())
        .collect())
}

/// Returns the profile of a fabric in use. The profile's rates are those without faults. The error
/// lists the fabrics that are in use.
pub fn profile(dir: &Path, fabric: &str) -> Result<Profile, String> {
    open_used(dir, fabric).map(|(_, profile)| profile)
}

fn open_used(dir: &Path, fabric: &str) -> Result<(&'static FabricMemory, Profile), String> {
    let folder = Folder::new(dir, fabric);
    if !folder.is_used() {
        let running = used(dir);
        let running = if running.is_empty() {
            "none".to_owned()
        } else {
            running.join(", ")
        };
        return Err(format!(
            "no fabric {fabric:?} runs in {}; running: {running}",
            dir.display()
        ));
    }
    folder.open(None)
}

fn nodes(memory: &FabricMemory) -> Vec<usize> {
    let prepared = memory.nodes.load(Ordering::Acquire) as usize;
    let is_there = |node: &usize| *node < prepared || processes(memory).any(|(_, on)| on == *node);
    (0..MAX_NODES).filter(is_there).collect()
}

/// Returns the traffic class and service level of each connected queue pair.
pub fn priorities(dir: &Path, fabric: &str) -> Result<Vec<(u8, u8)>, String> {
    let (memory, _) = open_used(dir, fabric)?;
    let is_connected = |qp: &&QpMemory| {
        qp.number.load(Ordering::Acquire) != 0 && qp.remote.load(Ordering::Relaxed) != 0
    };
    let priority = |qp: &QpMemory| {
        let [traffic_class, service_level, ..] = qp.priority.load(Ordering::Relaxed).to_le_bytes();
        (traffic_class, service_level)
    };
    Ok(memory
        .qps
        .iter()
        .filter(is_connected)
        .map(priority)
        .collect())
}

fn queue_pairs_of(memory: &FabricMemory, process: usize) -> usize {
    let is_its_own = |qp: &&QpMemory| {
        qp.number.load(Ordering::Acquire) != 0
            && qp.process.load(Ordering::Relaxed) as usize == process
    };
    memory.qps.iter().filter(is_its_own).count()
}

/// Returns the index and node of each running process. If the fabric's processes are in another PID
/// namespace than this process, their PIDs cannot be checked, so all of them count as running.
fn processes(memory: &FabricMemory) -> impl Iterator<Item = (usize, usize)> {
    let elsewhere = memory.pid_namespace.load(Ordering::Acquire) != pid_namespace();
    memory
        .processes
        .iter()
        .enumerate()
        .filter_map(move |(index, process)| {
            let pid = process.pid.load(Ordering::Acquire);
            let runs = pid != 0 && (elsewhere || memory.is_alive(index));
            runs.then(|| (index, process.node.load(Ordering::Acquire) as usize))
        })
}

/// Returns the lowest of the rates of a rail's line, PCIe link and cable, in Mb/s. `None` means
/// that none of them has a limit.
fn full_mbps(profile: &Profile, spec: &RailSpec) -> Option<f64> {
    let link = &profile.links[spec.link];
    let cable = &profile.cables[spec.cable];
    let limits = [spec.line_mbps, link.payload_mbps, cable.payload_mbps];
    limits
        .into_iter()
        .filter(|mbps| *mbps > 0.0)
        .reduce(f64::min)
}
