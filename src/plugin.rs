//! State of the process: settings, verbs library, merged device, and the count of inits.

use crate::clock;
use crate::comm::process::{Process, TunerIdentity};
use crate::comm::threads::lock;
use crate::comm::{self, Host, ListenComm, RailInfo, SendComm};
use host::config::{Config, RailConfig, RelaxedOrdering};
use host::error::{Argument, Internal, Missing, Result, Usage};
use host::rails::{self, Obstacle, Survey};
use once_cell::sync::OnceCell;
use proto::time::Instant;
use proto::tuner::communicators::Communicators;
use proto::tuner::table::Fingerprint;
use proto::tuner::{Policy, Tuner, TunerConfig};
use proto::wire::cts::MAX_RECEIVE_BYTES;
use proto::wire::handle::HANDLE_BYTES;
use proto::wire::ids::RailId;
use proto::wire::immediate::MAX_FULL_CHUNKS;
use proto::wire::{MAX_OFFERED_RAILS, PARTS};
use std::ffi::CStr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;
use verbs::{self, OpenPorts, Pd};

/// The network's name, for `NCCL_NET`.
pub const NETWORK_NAME: &CStr = c"Spark";

/// The merged device's name. It must differ from the names of all RDMA devices: NCCL's topology
/// code looks devices up by name, and would mistake the merged device for one of its rails.
const DEVICE_NAME: &CStr = c"spark-rails";

/// Machine-dependent properties of the merged device, for NCCL. `abi` adds the others.
#[derive(Debug, Clone)]
pub struct DeviceProperties {
    /// The device's name.
    pub name: &'static CStr,
    /// Identity of this machine, the same at every start.
    pub guid: u64,
    /// Combined payload bandwidth of the merged rails, in Mb/s.
    pub speed_mbps: i32,
    /// Latency in microseconds. Always 0, so that NCCL uses its own figure for a network's latency.
    pub latency_us: f32,
    /// Number of connections that the devices have enough queue pairs for.
    pub max_comms: i32,
    /// Largest number of buffers in one grouped receive.
    pub max_recvs: i32,
    /// Largest point-to-point transfer in bytes.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer in bytes.
    pub max_coll_bytes: usize,
}

struct Plugin {
    host: Arc<Host>,
    properties: DeviceProperties,
    policy: Policy,
}

static PLUGIN: OnceCell<Plugin> = OnceCell::new();
static INITS: AtomicUsize = AtomicUsize::new(0);
static TRACE: AtomicBool = AtomicBool::new(false);
static COMMUNICATORS: Mutex<Communicators<ThreadId>> = Mutex::new(Communicators::new());

/// Starts the network on the first call. After a first success it never fails: a later failure
/// would make NCCL disable the network on one rank only. `comm_id` is the communicator's id, which
/// NCCL passes since interface v11. `marks_optional` is true if the interface version can mark a
/// receive as optional, as NCCL does for LL and LL128. `nccl_version` returns NCCL's version.
///
/// # Errors
/// [`Setting`](host::error::Error::Setting) for an invalid setting; [`Missing`] without a verbs
/// library or a usable rail.
pub fn init(
    comm_id: Option<u64>,
    marks_optional: bool,
    nccl_version: impl FnOnce() -> Option<String>,
) -> Result<()> {
    PLUGIN.get_or_try_init(|| Plugin::start(marks_optional, nccl_version()))?;
    INITS.fetch_add(1, Ordering::Relaxed);
    if let Some(id) = comm_id {
        communicators(|all| all.announce(thread::current().id(), id));
    }
    Ok(())
}

/// Returns the tuner of the communicator whose id was passed to [`init`]. NCCL up to 2.27 passes no
/// id. Then every communicator counts as a user of this network once `init` has succeeded.
pub fn tuner(comm_id: Option<u64>, ranks: usize, nodes: usize) -> Tuner {
    let Some(plugin) = PLUGIN.get() else {
        return Tuner::Inert {
            reason: "this network is not initialised".to_owned(),
        };
    };
    let is_ours = comm_id.is_none_or(|id| communicators(|all| all.is_on_this_network(id)));
    plugin.policy.tuner(ranks, nodes, is_ours)
}

fn communicators<T>(use_them: impl FnOnce(&mut Communicators<ThreadId>) -> T) -> T {
    // `lock` also succeeds after a panic of a thread that held the lock. The set is intact then.
    use_them(&mut lock(&COMMUNICATORS))
}

/// Undoes one `init` and logs the totals of closed connections. The rails stay open: NCCL may call
/// `init` again, and an open device costs nothing.
pub fn finalize() {
    let one_less = |count: usize| count.checked_sub(1);
    if INITS
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
        .is_err()
    {
        tracing::debug!("finalize without an init");
    }
    if let Some(plugin) = PLUGIN.get() {
        plugin.host.process().log_summary();
    }
}

/// Returns the number of devices that NCCL sees: one, the merged device.
///
/// # Errors
/// [`Usage`] before a successful `init`.
pub fn devices() -> Result<i32> {
    plugin().map(|_| 1)
}

/// Returns NCCL's description of device `dev`.
///
/// # Errors
/// [`Argument`] for a device that does not exist.
pub fn properties(dev: i32) -> Result<&'static DeviceProperties> {
    let plugin = device(dev)?;
    communicators(|all| all.confirm(&thread::current().id()));
    Ok(&plugin.properties)
}

/// Opens a listener. Also returns the handle for the peer.
///
/// # Errors
/// The errors of [`Host::listen`].
pub fn listen(dev: i32) -> Result<(ListenComm, [u8; HANDLE_BYTES])> {
    device(dev)?.host.listen()
}

/// Continues a connection. Returns `None` until it is ready.
///
/// # Errors
/// The errors of [`Host::connect`].
pub fn connect(
    dev: i32,
    handle: &mut [u8; HANDLE_BYTES],
    traffic_class: Option<u8>,
) -> Result<Option<SendComm>> {
    device(dev)?.host.connect(handle, traffic_class)
}

/// Returns true if the user asked NCCL for its most detailed log. Valid after `init`.
pub fn wants_trace() -> bool {
    TRACE.load(Ordering::Relaxed)
}

/// Returns true if this process was forked from one that uses the network.
#[inline]
pub fn forked() -> bool {
    verbs::forked()
}

fn plugin() -> Result<&'static Plugin> {
    PLUGIN.get().ok_or_else(|| Usage::NotInitialised.into())
}

fn device(dev: i32) -> Result<&'static Plugin> {
    match dev {
        0 => plugin(),
        other => Err(Argument::Device(other).into()),
    }
}

impl Plugin {
    fn start(marks_optional: bool, nccl_version: Option<String>) -> Result<Self> {
        let mut config = Config::from_environment()?;
        TRACE.store(config.trace, Ordering::Relaxed);
        for warning in config.qp.warnings() {
            tracing::warn!("{warning}");
        }
        keep_order_unless_marked(&mut config.rails, marks_optional);
        Self::bring_up(config, nccl_version)
    }

    fn bring_up(config: Config, nccl_version: Option<String>) -> Result<Self> {
        verbs::watch_for_fork()?;
        let survey = wait_for_link(&config.rails, config.setup.connect_timeout)?;
        wait_for_twins(&config.rails, survey)?;
        let (survey, rails) = retry_removals(|| open_rails(&config.rails))?;
        let properties = DeviceProperties::new(&survey, &rails, config.setup.qps_per_rail);
        let names: Vec<String> = rails.iter().map(|rail| rail.name()).collect();
        let (names, late) = names.split_at(survey.rails.len().min(names.len()));
        if !late.is_empty() {
            tracing::info!(
                "used as soon as they have a link and an address: {}",
                late.join(", ")
            );
        }
        tracing::info!(
            "merged {} rail{} into one device of {} Mb/s: {}; {}",
            names.len(),
            if names.len() == 1 { "" } else { "s" },
            properties.speed_mbps,
            names.join(", "),
            rails::host_pointers_reason(&rails::cuda_devices())
        );
        let gpu = rails::gpu_name().unwrap_or_else(|_| "unknown".to_owned());
        let host = fingerprint(&survey, &gpu, nccl_version);
        let policy = policy(config.tuner.clone(), config.setup.ring_tcp, &host);
        let tuner = TunerIdentity {
            hash: policy.hash(),
            gpu,
        };
        let host = Arc::new(Host::new(config, rails, tuner));
        report_qos(&survey, host.process());
        Ok(Self {
            host,
            properties,
            policy,
        })
    }
}

/// Turns relaxed PCIe ordering off if NCCL does not mark the receives of LL and LL128: the order in
/// which their bytes arrive counts, and they look like all others. `version_marks` is true if the
/// interface version can mark receives; the user can turn that off in NCCL.
fn keep_order_unless_marked(config: &mut RailConfig, version_marks: bool) {
    if !(version_marks && config.marks_optional) {
        config.relaxed_ordering = RelaxedOrdering::Off;
        tracing::debug!(
            "PCIe relaxed ordering is not used: NCCL does not mark the receives of LL and LL128"
        );
    }
}

/// Logs the priorities of the rails' ports. Does nothing on the software fabric, whose sysfs is not
/// at "/sys": its interfaces have no priorities.
fn report_qos(survey: &Survey, process: &Process) {
    if process.config.rails.sysfs != Path::new("/sys") {
        return;
    }
    let (rails, errors) = survey.qos();
    for (netdev, error) in errors {
        tracing::debug!("priorities of {netdev} not known: {error}");
    }
    // A communicator may choose another traffic class later.
    let roce = process.priority(None);
    for line in rails::qos_info(&rails, roce) {
        tracing::info!("{line}");
    }
    if let Some(warning) = rails::qos_warning(&rails, roce) {
        tracing::warn!("{warning}");
    }
}

/// Opens this host's rails as the settings require. `init` does this once, tests do it repeatedly.
///
/// # Errors
/// The errors of [`init`].
pub fn bring_up(config: Config) -> Result<(Arc<Host>, DeviceProperties)> {
    Plugin::bring_up(config, None).map(|plugin| (plugin.host, plugin.properties))
}

/// Returns the identity of this host, in the form in which a learned tuner table stores it.
fn fingerprint(survey: &Survey, gpu: &str, nccl_version: Option<String>) -> Fingerprint {
    let rails = format!("{}x{}", survey.rails.len(), survey.speed_mbps);
    Fingerprint::new(
        gpu,
        &rails,
        &nccl_version.unwrap_or_else(|| "unknown".to_owned()),
    )
}

fn policy(config: TunerConfig, ring_tcp: bool, host: &Fingerprint) -> Policy {
    let (policy, warnings) = Policy::new(config, ring_tcp, host);
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!("tuner: {policy}; this host is {host}");
    policy
}

/// Number of attempts to survey and then open the rails. A device may be removed in between.
const SURVEYS: usize = 3;

fn retry_removals<T>(mut take: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..SURVEYS {
        match take() {
            Err(error) if error.is_removal() || error.is_failed_device() => {
                tracing::warn!("a device disappeared during start-up ({error}); rescanning rails")
            }
            done => return done,
        }
    }
    take()
}

/// Interval between checks of the ports while none has a link.
const LINK_POLL: Duration = Duration::from_millis(500);
/// Interval between warnings while no port has a link.
const LINK_WARNING: Duration = Duration::from_secs(15);

/// Waits while no port is usable and every port that the settings admit lacks only a link. The wait
/// helps if a cable is plugged in, or a peer is switched on, after the job has started. Returns the
/// last survey, after `limit` too.
fn wait_for_link(config: &RailConfig, limit: Duration) -> Result<Survey> {
    static WAITS_SINCE: OnceCell<Instant> = OnceCell::new();
    let mut warn_at = Duration::ZERO;
    loop {
        let survey = retry_removals(|| survey_ports(config))?;
        let refused = survey
            .refused
            .iter()
            .filter(|port| port.obstacle != Obstacle::Excluded);
        let (down, unusable): (Vec<_>, Vec<_>) = refused.partition(|port| port.obstacle.is_link());
        let down: Vec<String> = down
            .iter()
            .map(|port| format!("{}:{}", port.device, port.port))
            .collect();
        let has_others = !survey.rails.is_empty() || !unusable.is_empty();
        if has_others || down.is_empty() {
            return Ok(survey);
        }
        // The whole process waits once for at most `limit`: after a failure, NCCL may call `init`
        // again from several threads.
        let waited = clock::elapsed(*WAITS_SINCE.get_or_init(clock::now));
        if waited >= limit {
            return Ok(survey);
        }
        if waited >= warn_at {
            warn_at += LINK_WARNING;
            tracing::warn!(
                "no port has a link after {:.0} s, waiting until NCCL_SPARK_CONNECT_TIMEOUT_S={}: {}; plug in the cable, or \
                 switch the peer on",
                waited.as_secs_f64(),
                limit.as_secs(),
                down.join(", ")
            );
        }
        thread::sleep(LINK_POLL);
    }
}

/// Longest wait for the other function of a cable. DHCP and NetworkManager take some seconds.
const TWIN_WAIT: Duration = Duration::from_secs(10);

/// Waits while a function of a cable is usable and the other one has a carrier, but no address yet:
/// at boot and after a cable event one of the two is often late. After [`TWIN_WAIT`], logs a WARN
/// and returns without an error. The process waits once. `survey` is the current survey.
fn wait_for_twins(config: &RailConfig, mut survey: Survey) -> Result<()> {
    static WAITS_SINCE: OnceCell<Instant> = OnceCell::new();
    loop {
        let late: Vec<String> = survey
            .refused
            .iter()
            .filter(|port| port.is_late)
            .map(|port| format!("{}:{} ({})", port.device, port.port, port.obstacle))
            .collect();
        if late.is_empty() {
            return Ok(());
        }
        let late = late.join(", ");
        let is_first = WAITS_SINCE.get().is_none();
        if clock::elapsed(*WAITS_SINCE.get_or_init(clock::now)) >= TWIN_WAIT {
            let used: Vec<&str> = survey
                .rails
                .iter()
                .map(|rail| rail.device.as_str())
                .collect();
            tracing::warn!(
                "{} used without the other function of the cable, which has a link and was awaited for {TWIN_WAIT:?}: {late}; give it \
                 an address, or name the functions to use in NCCL_IB_HCA, so that jobs start without the wait",
                used.join(", ")
            );
            return Ok(());
        }
        if is_first {
            tracing::info!("waiting up to {TWIN_WAIT:?} for the other function of a cable: {late}");
        }
        thread::sleep(LINK_POLL);
        survey = retry_removals(|| survey_ports(config))?;
    }
}

fn open_rails(config: &RailConfig) -> Result<(Survey, Vec<Arc<comm::Rail>>)> {
    let ports = OpenPorts::new(&config.verbs_library)?;
    ports.log_unusable();
    let survey = ports.survey(config)?;
    for refused in &survey.refused {
        tracing::info!(
            "{}:{} not used as a rail: {}",
            refused.device,
            refused.port,
            refused.obstacle
        );
    }
    for warning in &survey.warnings {
        tracing::warn!("{warning}");
    }
    let rails = open(&survey, &ports, config)?;
    Ok((survey, rails))
}

fn survey_ports(config: &RailConfig) -> Result<Survey> {
    OpenPorts::new(&config.verbs_library)?.survey(config)
}

fn open(survey: &Survey, ports: &OpenPorts, config: &RailConfig) -> Result<Vec<Arc<comm::Rail>>> {
    if survey.rails.is_empty() {
        let all: Vec<String> = survey
            .refused
            .iter()
            .map(|r| format!("{}:{} ({})", r.device, r.port, r.obstacle))
            .collect();
        return Err(Missing::Rails(all.join("; ")).into());
    }
    let mut rails = Vec::with_capacity(survey.rails.len() + survey.late.len());
    let mut ids = RailId::all(MAX_OFFERED_RAILS);
    for (found, id) in survey.rails.iter().zip(&mut ids) {
        rails.push(Arc::new(open_rail(survey, ports, config, found, id)?));
    }
    let mut id = ids.next();
    for found in &survey.late {
        let Some(free) = id else { break };
        // A late rail has one address, its placeholder.
        let announced = open_rail(survey, ports, config, found, free).and_then(|rail| {
            let mut gids = found.addresses.iter().map(|address| address.gid);
            gids.try_for_each(|gid| rail.announce(gid))?;
            Ok(rail)
        });
        match announced {
            Ok(rail) => {
                rails.push(Arc::new(rail));
                id = ids.next();
            }
            Err(error) => tracing::info!(
                "{}:{} will not become a rail without a restart: {error}",
                found.device,
                found.port
            ),
        }
    }
    Ok(rails)
}

fn open_rail(
    survey: &Survey,
    ports: &OpenPorts,
    config: &RailConfig,
    found: &host::rails::Rail,
    id: RailId,
) -> Result<comm::Rail> {
    let Some(context) = ports.context(&found.device, found.port) else {
        return Err(Internal::PortGone {
            device: found.device.clone(),
            port: found.port,
        }
        .into());
    };
    let info = RailInfo {
        device: found.device.clone(),
        port: found.port,
        netdev: found.netdev.clone(),
        phys_port: found.phys_port.clone(),
        attachment: survey.attachment(found),
        speed_mbps: survey.share_of_link_mbps(found),
    };
    comm::Rail::new(id, info, Pd::new(context)?, config)
}

impl DeviceProperties {
    fn new(survey: &Survey, rails: &[Arc<comm::Rail>], qps_per_rail: Option<u8>) -> Self {
        let limits = rails.iter().filter_map(|rail| {
            let queue_pairs =
                comm::setup::negotiate::most_queue_pairs(qps_per_rail, &rail.info.attachment);
            Some(rail.device.pd().ok()?.context().limits().max_qp / u32::from(queue_pairs))
        });
        let chunk = survey
            .rails
            .iter()
            .map(|rail| rail.max_message_bytes)
            .min()
            .unwrap_or(0);
        let largest = (u64::from(chunk) * (MAX_FULL_CHUNKS + 1)).min(MAX_RECEIVE_BYTES) as usize;
        Self {
            name: DEVICE_NAME,
            guid: survey.guid,
            speed_mbps: i32::try_from(survey.speed_mbps).unwrap_or(i32::MAX),
            latency_us: 0.0,
            max_comms: i32::try_from(limits.min().unwrap_or(0)).unwrap_or(i32::MAX),
            max_recvs: PARTS as i32,
            max_p2p_bytes: largest,
            max_coll_bytes: largest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::error::{Call, Error};

    #[test]
    fn relaxed_ordering_needs_marked_receives() {
        let relaxed = |variable: Option<&str>, version_marks| {
            let set = variable.map(|value| {
                (
                    "NCCL_NET_OPTIONAL_RECV_COMPLETION".to_owned(),
                    value.to_owned(),
                )
            });
            let mut config = Config::from_variables(set.as_slice()).unwrap();
            keep_order_unless_marked(&mut config.rails, version_marks);
            config.rails.relaxed_ordering != RelaxedOrdering::Off
        };
        assert!(relaxed(None, true) && relaxed(Some("1"), true));
        assert!(
            !relaxed(None, false),
            "version 8 of the interface marks none"
        );
        assert!(
            !relaxed(Some("0"), true),
            "the user has turned the marks off"
        );
    }

    #[test]
    fn removed_devices_are_searched_for_again_for_a_limited_time() {
        let failed = |errno| Error::Os {
            call: Call::Open {
                device: "mlx5_0".to_owned(),
            },
            errno,
        };
        let mut looks = 0;
        let mut after = |failures: usize, errno| {
            looks = 0;
            let found = retry_removals(|| {
                looks += 1;
                if looks > failures {
                    Ok(looks)
                } else {
                    Err(failed(errno))
                }
            });
            (found.ok(), looks)
        };
        assert_eq!(after(0, libc::EIO), (Some(1), 1));
        assert_eq!(after(2, libc::EIO), (Some(3), 3));
        assert_eq!(after(1, libc::ENOLINK), (Some(2), 2));
        assert_eq!(after(3, libc::EIO), (None, 3));
        assert_eq!(after(1, libc::ENOMEM), (None, 1));
    }
}
