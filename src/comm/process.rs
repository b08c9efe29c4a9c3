//! State shared by all connections of this process.

mod cpu_latency;

use super::log::losses::{Losses, Port};
use super::log::once::LogOnce;
use super::log::outages::RailOutages;
use super::log::returned::ReturnedPorts;
use super::log::stalls::Stalls;
use super::log::tcp::TcpOutages;
use super::rail::backoff::Backoff;
use super::rail::registration::{Purpose, Registration, Registrations};
use super::rail::{Rail, RailSnapshot};
use super::streams::context::Totals;
use super::threads::lock;
use crate::clock;
use cpu_latency::CpuLatency;
use host::config::Config;
use host::counters::Counting;
use host::error::Result;
use proto::device::Return;
use proto::flow::pairing::{self, Route};
use proto::time::Instant;
use proto::wire::fields::{Priority, RailAdvert};
use std::sync::{Arc, Mutex};
use verbs::HostMemory;

/// State shared by all connections of this process. It has no access to the connections themselves.
pub struct Process {
    /// The settings.
    pub config: Config,
    /// The rails in use.
    pub rails: Vec<Arc<Rail>>,
    /// Host name and process id, for log lines.
    pub name: String,
    /// Identity of this host's tuner.
    pub tuner: TunerIdentity,
    /// Memory registered with devices.
    pub registrations: Arc<Registrations>,
    /// Memory of connections over TCP streams. It is not registered with devices.
    for_streams: Registrations,
    /// Totals of data sent over TCP streams.
    pub by_streams: Arc<Totals>,
    /// Back-off for unreachable paths.
    pub backoff: Backoff,
    /// Outages of rails, each with one line in the log.
    pub outages: Arc<RailOutages>,
    /// Outages of TCP to peers, each with one line in the log.
    pub tcp_outages: Arc<TcpOutages>,
    /// Connections without progress. For all connections to a peer there is one line in the log.
    pub stalls: Arc<Stalls>,
    /// Record of the log lines about peers that are written only once.
    pub log: Arc<LogOnce>,
    /// Monitor of packet losses on the rails.
    pub losses: Arc<Losses>,
    /// Settings that an interface may lose with its device.
    pub returned: Arc<ReturnedPorts>,
    /// Counters of all connections.
    pub counting: Arc<Counting>,
    open: Mutex<Open>,
}

/// Identity of a host's tuner, which the two sides of a connection compare.
#[derive(Debug, Clone, Default)]
pub struct TunerIdentity {
    /// Hash of the policy ([`proto::tuner::Policy::hash`]); 0 if NCCL makes every choice.
    pub hash: u64,
    /// Name of this host's GPU, which the policy depends on; for log lines.
    pub gpu: String,
}

struct Open {
    connections: u64,
    cpu_latency: CpuLatency,
}

impl Process {
    /// Creates the state for open rails.
    pub fn new(config: Config, rails: Vec<Arc<Rail>>, tuner: TunerIdentity) -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname")
            .unwrap_or_else(|_| "host".to_owned());
        let name = format!("{}:{}", host.trim(), std::process::id());
        let (registrations, for_streams, by_streams, backoff) = Default::default();
        let (outages, tcp_outages, stalls, log) = Default::default();
        let open = Mutex::new(Open {
            connections: 0,
            cpu_latency: CpuLatency::new(config.cpu_latency, &tuner.gpu),
        });
        let counting = Counting::new(config.counters);
        let ports = rails.iter().map(|rail| Port {
            device: rail.info.device.clone(),
            port: rail.info.port,
        });
        let losses = Losses::new(&config.rails.sysfs, ports.collect());
        let Priority {
            traffic_class,
            service_level,
        } = priority(&config, None);
        let named = rails
            .iter()
            .map(|rail| (rail.name(), rail.info.netdev.clone()));
        let returned = Arc::new(ReturnedPorts::new(
            &config.rails.sysfs,
            (traffic_class, service_level),
            named,
        ));
        Self {
            config,
            rails,
            name,
            tuner,
            registrations,
            for_streams,
            by_streams,
            backoff,
            outages,
            tcp_outages,
            stalls,
            log,
            losses,
            returned,
            counting,
            open,
        }
    }

    /// Writes the log lines about outages and stalls that are due, and reads the ports' counters if
    /// that is due. The service thread calls this in each round.
    pub fn tick(&self, now: Instant) {
        self.outages.tick(now);
        self.tcp_outages.tick(now);
        self.losses.tick(now);
        self.returned.tick(now);
        self.stalls.tick(self.config.data_path.stall_warn, now, || {
            self.losses.grown(None)
        });
    }

    /// Follows the work of the connections for the CPU latency request. `by_rails` is the number of
    /// connections with counters, and `work` returns the sum of these counters. The service thread
    /// calls this in each round. Connections over TCP have no counters, so they count as busy.
    pub fn follow_work(&self, now: Instant, by_rails: usize, work: impl FnOnce() -> u64) {
        let mut open = lock(&self.open);
        // The service thread keeps a closed connection for a moment.
        if open.connections > by_rails as u64 {
            open.cpu_latency.hold(now);
        } else if open.connections > 0 {
            open.cpu_latency.follow(now, work);
        }
    }

    /// Returns the priority of a connection's packets. `traffic_class` is NCCL's choice for the
    /// communicator; `NCCL_IB_TC` overrides it, as in NCCL's net_ib (connect.cc).
    pub fn priority(&self, traffic_class: Option<u8>) -> Priority {
        priority(&self.config, traffic_class)
    }

    /// Returns the kernel's routes from rails of this host to addresses of the connecting side, for
    /// rails that cannot be paired without routes. `snapshot` returns the state of a rail of this
    /// host, by the rail's index in `acceptor`. Returns no routes with `NCCL_SPARK_RING_TCP`: hosts
    /// on a route may forward IP but not RoCE, and then only TCP works.
    pub fn routes<'l>(
        &self,
        connector: &[RailAdvert],
        acceptor: &[RailAdvert],
        snapshot: impl Fn(usize) -> &'l RailSnapshot,
    ) -> Vec<Route> {
        if self.config.setup.ring_tcp {
            return Vec::new();
        }
        let exists = |route: &Route| {
            snapshot(route.acceptor).has_route(route.acceptor_gid, route.connector_gid)
                == Some(true)
        };
        pairing::existing_routes(connector, acceptor, exists)
    }

    /// Registers memory on every rail whose device is in use, for all connections.
    pub fn register(&self, memory: HostMemory, purpose: Purpose) -> Result<Arc<Registration>> {
        self.registrations.register(&self.rails, memory, purpose)
    }

    /// Records memory for connections over TCP streams.
    ///
    /// # Errors
    /// [`Error::Argument`](host::error::Error::Argument) for an empty or impossible range.
    pub fn register_for_streams(
        &self,
        memory: HostMemory,
        purpose: Purpose,
    ) -> Result<Arc<Registration>> {
        self.for_streams.register(&[], memory, purpose)
    }

    /// Brings back the device of each rail for which that is due. Returns the rails whose devices
    /// are back.
    pub fn look_for_returned(&self, now: Instant) -> Vec<Arc<Rail>> {
        let is_back = |rail: &&Arc<Rail>| {
            let how = rail.device.begin_return(now);
            how.is_some_and(|how| self.bring_back(rail, how, now))
        };
        self.rails.iter().filter(is_back).cloned().collect()
    }

    /// Reopens the removed device of a rail if the device has returned, resumes a silent device
    /// that answers again, or begins to use the device of a late rail. Registers all memory with
    /// the device, and forgets the findings about the rail's paths. Returns true if the device is
    /// in use.
    pub fn bring_back(&self, rail: &Rail, how: Return, now: Instant) -> bool {
        let back = rail
            .device
            .bring_back(how, || self.registrations.renew(rail));
        let name = rail.name();
        match &back {
            Ok(true) => {
                self.backoff.forget(rail);
                if how == Return::FirstUse {
                    tracing::info!("rail {name} is ready: its memory is registered");
                } else {
                    tracing::info!("rail {name}: its device is back");
                    self.returned.returned(rail.id.index(), now);
                }
            }
            Ok(false) => {}
            Err(error) if how == Return::FirstUse => {
                // Other rails may need what this one holds of the limit of locked memory.
                self.registrations.deregister(rail);
                rail.warn_once_of_refusal(error);
            }
            Err(error) => {
                tracing::debug!("rail {name}: its device has returned but cannot be used: {error}")
            }
        }
        back == Ok(true)
    }

    /// Counts a new connection with a peer. The first connection starts what runs only while there
    /// are connections: the CPU latency request and the reading of the ports' counters.
    pub fn opened(&self, peer: &str) {
        self.log.opened(peer);
        let mut open = lock(&self.open);
        open.connections += 1;
        open.cpu_latency.hold(clock::now());
        let is_first = open.connections == 1;
        drop(open);
        if is_first {
            self.losses.start();
        }
    }

    /// Counts a closed connection with a peer. After the last connection, ends the CPU latency
    /// request and logs the totals ([`Self::log_summary`]).
    pub fn closed(&self, peer: &str) {
        tracing::debug!("connection with {peer} closed");
        self.log.closed(peer);
        let is_last = {
            let mut open = lock(&self.open);
            open.connections = open.connections.saturating_sub(1);
            if open.connections == 0 {
                open.cpu_latency.release();
            }
            open.connections == 0
        };
        if is_last {
            self.log_summary();
        }
    }

    /// Logs the totals of the connections closed since the last call. Called when the last
    /// connection is closed, and when NCCL finalizes a communicator, whose connections are closed
    /// by then. So the lines appear at the end of each communicator, even if other communicators
    /// continue.
    pub fn log_summary(&self) {
        if self.counting.log_summary(self.by_streams.take())
            && let Some(text) = self.losses.end()
        {
            tracing::info!("counters of the rails' ports {text}");
        }
    }
}

fn priority(config: &Config, traffic_class: Option<u8>) -> Priority {
    let traffic_class = config.setup.traffic_class.or(traffic_class).unwrap_or(0);
    Priority {
        traffic_class,
        service_level: config.setup.service_level.unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::config::LatencyLimit;
    use std::time::Duration;

    #[test]
    fn the_latency_request_holds_from_the_first_connection_to_the_end_of_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("cpu_dma_latency");
        std::fs::write(&device, b"").unwrap();
        let process = Process::new(
            Config::from_variables(&[]).unwrap(),
            Vec::new(),
            TunerIdentity::default(),
        );
        lock(&process.open).cpu_latency = CpuLatency::of(device, LatencyLimit::Us(7), "");
        let is_held = || lock(&process.open).cpu_latency.is_held();
        assert!(!is_held());
        let now = clock::now();
        let second = Duration::from_secs(1);
        for _ in 0..2 {
            process.opened("a");
            process.opened("b");
            assert!(is_held());
            process.closed("a");
            assert!(is_held(), "one connection is open");
            process.closed("b");
            assert!(!is_held());
            process.follow_work(now + 2 * second, 1, || panic!("no connection is open"));
            assert!(!is_held(), "the last connection is closed");
        }
    }
}
