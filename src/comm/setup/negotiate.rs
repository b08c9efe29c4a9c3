//! Parts of the handshake that both sides share: the survey of the rails, checks of the peer's
//! settings, and log lines and errors about rails that are left out.

use crate::clock;
use crate::comm::channel::{Channel, Received};
use crate::comm::datapath::lane::{Lane, Role};
use crate::comm::log::once::Subject;
use crate::comm::process::Process;
use crate::comm::rail::{Rail, RailSnapshot};
use host::config::SetupConfig;
use host::error::{Error, Network, PeerGone, Result, TimedOut, Usage, Violation};
use host::interfaces;
use proto::backoff::PathId;
use proto::flow::pairing::{self, Route};
use proto::flow::paths::{End, Paths, is_cable_full};
use proto::flow::striping::Striping;
use proto::time::Instant;
use proto::wire::fields::{Address, Attachment, RailAdvert};
use proto::wire::ids::RailId;
use proto::wire::message::{ByTcp, Hello, Message, NotYet};
use proto::wire::{MAX_OFFERED_RAILS, MAX_RAILS};
use std::net::Ipv6Addr;
use std::sync::Arc;

/// Rate that one queue pair reaches at least, in Mb/s. Published rates of a Spark's function are 92
/// to 102 Gb/s with one queue pair, and 111.7 Gb/s with four. A path with a higher rate than this
/// gets more than one queue pair.
const QP_MBPS: f64 = 92_000.0;
/// Largest number of a connection's queue pairs on one rail, unless the settings state a number.
/// More are not needed, because NCCL's channels add parallelism too.
const MOST_QPS: u8 = 4;
/// Largest chunk (the size of one write in bytes). It must fit into 32 bits, because a completion
/// reports the size in a field of 32 bits.
const MOST_CHUNK_BYTES: u32 = 1 << 30;

/// Refuses a peer whose tuner has another policy: different choices would make collectives hang.
///
/// # Errors
/// [`Error::Usage`] if the policies differ.
pub fn check_tuner(process: &Process, hello: &Hello) -> Result<()> {
    let ours = &process.tuner;
    if hello.tuner_hash == ours.hash {
        return Ok(());
    }
    let word = |hash: u64, gpu: &str| match hash {
        0 => format!("off, GPU {gpu}"),
        _ => format!("hash {hash:016x}, GPU {gpu}"),
    };
    Err(Usage::Tuners {
        peer: hello.name.clone(),
        theirs: word(hello.tuner_hash, &hello.gpu),
        host: process.name.clone(),
        ours: word(ours.hash, &ours.gpu),
    }
    .into())
}

/// Refuses a peer with another value of `NCCL_SPARK_RING_TCP`, because the tuner's choices depend
/// on the value.
///
/// # Errors
/// [`Error::Usage`] if the values differ.
pub fn check_ring_tcp(process: &Process, hello: &Hello) -> Result<()> {
    let ours = process.config.setup.ring_tcp;
    let theirs = hello.by_tcp != ByTcp::Off;
    if ours == theirs {
        return Ok(());
    }
    let (with, without) = if ours {
        (&process.name, &hello.name)
    } else {
        (&hello.name, &process.name)
    };
    Err(Usage::RingTcp {
        with: with.clone(),
        without: without.clone(),
    }
    .into())
}

/// Warns of a peer whose data has another priority than this host's data. Does not compare traffic
/// classes if this host's settings have none: NCCL may have set the peer's class for the
/// communicator.
pub fn warn_of_priority(process: &Process, hello: &Hello) {
    let ours = process.priority(None);
    let theirs = hello.priority;
    let peer = &hello.name;
    let differs = process
        .config
        .setup
        .traffic_class
        .is_some_and(|class| class != theirs.traffic_class)
        || ours.service_level != theirs.service_level;
    if differs && process.log.is_first(peer, Subject::Priority) {
        tracing::warn!(
            "{peer} sends with traffic class {} and service level {}, this host with {} and {}: a switch may drop packets of another \
             priority; set the same NCCL_IB_TC and NCCL_IB_SL on every host",
            theirs.traffic_class,
            theirs.service_level,
            ours.traffic_class,
            ours.service_level
        );
    }
}

/// This host's rails, including those that cannot be used now.
pub struct LocalRails {
    /// The rails whose addresses are known, in the order of the adverts.
    pub known: Vec<KnownRail>,
    /// Adverts of the known rails, for the peer.
    pub adverts: Vec<RailAdvert>,
    /// Rails whose addresses are not known, each with the reason.
    pub unknown: Vec<(Arc<Rail>, String)>,
}

/// A rail whose addresses are known.
pub struct KnownRail {
    /// The rail.
    pub rail: Arc<Rail>,
    /// Present state of the rail, or its last usable state.
    pub snapshot: RailSnapshot,
    /// Reason why the rail cannot be used now, if any.
    pub problem: Option<String>,
}

impl LocalRails {
    /// Queries every rail.
    ///
    /// # Errors
    /// [`Error::Os`] if the interfaces cannot be listed.
    pub fn query(process: &Process) -> Result<Self> {
        process.look_for_returned(clock::now());
        let interfaces = interfaces::all()?;
        let mut known = Vec::new();
        let mut adverts = Vec::new();
        let mut unknown = Vec::new();
        for rail in process.rails.iter().take(MAX_OFFERED_RAILS) {
            let (snapshot, problem) = match rail.snapshot(&interfaces) {
                Ok(snapshot) => (snapshot, None),
                Err(error) => match rail.last_snapshot() {
                    Some(last) => (last, Some(error.to_string())),
                    None => {
                        unknown.push((Arc::clone(rail), error.to_string()));
                        continue;
                    }
                },
            };
            adverts.push(RailAdvert {
                is_usable: problem.is_none(),
                ..rail.advert(&snapshot)
            });
            known.push(KnownRail {
                rail: Arc::clone(rail),
                snapshot,
                problem,
            });
        }
        Ok(Self {
            known,
            adverts,
            unknown,
        })
    }

    /// Returns this host's routes to addresses of the peer. With them, rails can be paired that
    /// share no subnet with a rail of the peer.
    pub fn routes(&self, process: &Process, theirs: &[RailAdvert]) -> Vec<Route> {
        process.routes(theirs, &self.adverts, |acceptor| {
            &self.known[acceptor].snapshot
        })
    }

    /// Returns the largest chunk, in bytes, that every known rail can send as one write. Rounded
    /// down to a multiple of 128, and at least 4096.
    pub fn chunk_bytes(&self) -> u32 {
        let most = self
            .known
            .iter()
            .map(|known| known.snapshot.port.max_message_bytes)
            .min();
        let chunk = most.unwrap_or(MOST_CHUNK_BYTES).min(MOST_CHUNK_BYTES);
        (chunk - chunk % 128).max(4096)
    }

    /// Returns both ends of a pair, this side's first. `place` is the index of this side's rail,
    /// `their_place` is the index of the peer's rail.
    pub fn ends(&self, place: usize, theirs: &[RailAdvert], their_place: usize) -> [End; 2] {
        let rail = &self.known[place].rail;
        let their_ends: Vec<End> = (RailId::all(theirs.len()).zip(theirs))
            .map(|(rail, advert)| End {
                rail,
                attachment: advert.attachment,
            })
            .collect();
        [rail.end(), their_ends[their_place]]
    }

    /// Returns the reason why TCP may not replace rails, if any. The only reason is that this host
    /// has rails whose addresses are unknown: one of them may be able to reach the peer.
    pub fn why_not_by_tcp(&self) -> Option<String> {
        let why = |(rail, why): &(Arc<Rail>, String)| format!("{} ({why})", rail.name());
        (!self.unknown.is_empty())
            .then(|| self.unknown.iter().map(why).collect::<Vec<_>>().join("; "))
    }

    /// Returns this side's offer of connections by TCP, for HELLO.
    pub fn by_tcp(&self, config: &SetupConfig) -> ByTcp {
        match self.why_not_by_tcp() {
            _ if !config.ring_tcp => ByTcp::Off,
            Some(why) => ByTcp::Withheld(why),
            None => ByTcp::Allowed,
        }
    }

    /// Returns the error text for hosts without a common rail. It names this host, because the peer
    /// shows the text too.
    pub fn nothing_in_common(
        &self,
        process: &Process,
        theirs: &[RailAdvert],
        peer: &str,
    ) -> String {
        let host = &process.name;
        let filter = match process.config.rails.hca.names_something() {
            true => format!("; NCCL_IB_HCA hides the other ports of {host}: unset it"),
            false => String::new(),
        };
        let unknown: Vec<String> = self
            .unknown
            .iter()
            .map(|(rail, why)| format!("; {} ({why})", rail.name()))
            .collect();
        format!(
            "no rail in common: {host} has {}{}; {peer} has {}{filter}; if a cable or switch joins them, give both its ends addresses in one \
             subnet, or routes",
            pairing::describe(&self.adverts),
            unknown.join(""),
            pairing::describe(theirs),
        )
    }
}

/// Returns the configured number of queue pairs per rail; 0 leaves the choice to [`queue_pairs`].
pub fn qps_wanted(config: &SetupConfig) -> u8 {
    config.qps_per_rail.unwrap_or(0)
}

/// Returns the number of queue pairs for each path: `wanted`, or if that is 0, as many as the path
/// needs for its rate while all paths are busy.
pub fn queue_pairs(wanted: u8, paths: &Paths) -> [u8; MAX_RAILS] {
    if wanted > 0 {
        return [wanted; MAX_RAILS];
    }
    paths.even_rates().map(qps_for)
}

/// Returns the largest number of queue pairs that a connection gets on a rail with this attachment.
pub fn most_queue_pairs(qps_per_rail: Option<u8>, attachment: &Attachment) -> u8 {
    qps_per_rail.unwrap_or_else(|| {
        let link_mbps = if attachment.link_mbps == 0 {
            u32::MAX
        } else {
            attachment.link_mbps
        };
        qps_for(f64::from(attachment.port_mbps.min(link_mbps)))
    })
}

fn qps_for(mbps: f64) -> u8 {
    (mbps / QP_MBPS).ceil().clamp(1.0, f64::from(MOST_QPS)) as u8
}

/// Creates the striping for one direction of a new connection.
pub fn striping(process: &Process, paths: &Paths) -> Striping {
    Striping::new(paths, process.config.data_path.min_share_bytes)
}

/// Logs the rails of a new connection, once for all connections with the peer on the same rails.
pub fn report_connected(process: &Process, peer: &str, role: Role, lanes: &[Lane]) {
    let live = lanes.iter().filter(|lane| lane.is_open());
    let rails: Vec<String> = live
        .map(|lane| format!("{} to {}", lane.rail.name(), lane.peer_rail))
        .collect();
    let count = rails.len();
    let plural = if rails.len() == 1 { "" } else { "s" };
    let direction = match role {
        Role::Sender => "send",
        Role::Receiver => "receive",
    };
    let line = format!(
        "connected with {peer} over {count} rail{plural}: {} ({direction})",
        rails.join(", ")
    );
    if process.log.is_first(peer, Subject::Connected(line.clone())) {
        tracing::info!("{line}");
    } else {
        tracing::debug!("{line}");
    }
}

/// Logs each rail that a connection leaves out or that does not work yet, once for all connections
/// with the peer. The line is a warning if the rail's twin, the other function of the same port,
/// works and both rails together would carry more. A twin that reaches the peer by a route causes
/// no warning: the owner of hosts in a ring may have set routes for some rails only. `ends` and
/// `routed` have an element for each lane. In `ends`, this side's end comes first.
pub fn report_left_out(
    process: &Process,
    peer: &str,
    lanes: &[Lane],
    ends: &[[End; 2]],
    routed: &[bool],
    left_out: &[(RailId, String)],
) {
    let live_in_subnet = || {
        lanes
            .iter()
            .zip(routed)
            .filter(|(lane, routed)| lane.is_open() && !**routed)
    };
    let live_ends: Vec<[End; 2]> = lanes
        .iter()
        .zip(ends)
        .filter(|(lane, _)| lane.is_open())
        .map(|(_, ends)| *ends)
        .collect();
    for (rail, why) in left_out {
        let Some(rail) = process.rails.get(rail.index()) else {
            continue;
        };
        let cable = rail.info.attachment.cable;
        let is_twin_alone = live_in_subnet()
            .any(|(lane, _)| lane.rail.info.attachment.cable == cable)
            && !is_cable_full(&live_ends, cable);
        let name = rail.name();
        if !process.log.is_first(peer, Subject::NotUsed(rail.id)) {
            tracing::debug!("rail {name} not used by one more connection with {peer}: {why}");
        } else if is_twin_alone {
            tracing::warn!(
                "rail {name} not used with {peer}, which halves the bandwidth of its cable: {why}"
            );
        } else {
            tracing::info!("rail {name} not used with {peer}: {why}");
        }
    }
}

/// Describes why a pair of rails does not work yet, after a call has failed with `error`.
/// If the rail's device is not in use, the reason is temporary.
pub fn not_yet(rail: &Rail, error: &Error) -> NotYet {
    let is_away = rail.device.opened().is_err();
    NotYet {
        why: error.to_string(),
        is_temporary: is_away || error.is_temporary(),
    }
}

/// Returns the reason why a path is left out for now, if it is known to be dead.
pub fn dead_path_reason(process: &Process, rail: &Rail, peer_gid: [u8; 16]) -> Option<String> {
    process.backoff.dead(
        PathId {
            rail: rail.id,
            peer_gid,
        },
        clock::now(),
    )
}

/// Returns true if a rail reaches a peer's address only by a route.
pub fn is_routed(rail: &Rail, peer_gid: [u8; 16]) -> bool {
    let needs_route = |own: &Address| own.is_link_local() || pairing::needs_route(own, peer_gid);
    !Ipv6Addr::from(peer_gid).is_unicast_link_local()
        && rail
            .last_snapshot()
            .is_some_and(|snapshot| snapshot.addresses.iter().all(needs_route))
}

/// Returns the rails without a pair, each with the reason.
pub fn unpaired(rails: &LocalRails, paired: &[usize], role: Role) -> Vec<(RailId, String)> {
    let mut all: Vec<(RailId, String)> = rails
        .unknown
        .iter()
        .map(|(rail, why)| (rail.id, why.clone()))
        .collect();
    for (place, (KnownRail { rail, problem, .. }, advert)) in
        rails.known.iter().zip(&rails.adverts).enumerate()
    {
        if !paired.contains(&place) {
            let why = if let Some(problem) = problem {
                problem.clone()
            } else if paired.len() >= MAX_RAILS {
                format!("a connection uses at most {MAX_RAILS} rails")
            } else {
                unpaired_reason(advert, role)
            };
            all.push((rail.id, why));
        }
    }
    all
}

/// Returns the reason why a rail has no pair. Only the accepting side, which forms the pairs, knows
/// the reason.
fn unpaired_reason(advert: &RailAdvert, role: Role) -> String {
    let rail = pairing::describe(std::slice::from_ref(advert));
    match role {
        Role::Receiver => {
            format!("no rail of the peer shares a subnet with {rail}, and no route leads to one")
        }
        Role::Sender => {
            format!("no peer rail for {rail}: no shared subnet or route; see the peer's log")
        }
    }
}

/// Formats the names of rails that are left out, each with its reason.
pub fn left_out_text(process: &Process, left_out: &[(RailId, String)]) -> String {
    let name = |id: RailId| {
        process
            .rails
            .get(id.index())
            .map_or_else(|| format!("rail {id}"), |rail| rail.name())
    };
    let one = |(id, why): &(RailId, String)| format!("{} ({why})", name(*id));
    left_out.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// Returns the error for a connection on which no rail can be used.
pub fn no_usable_rail(process: &Process, peer: &str, left_out: &[(RailId, String)]) -> Error {
    Network::NoRail {
        peer: peer.to_owned(),
        rails: left_out_text(process, left_out),
    }
    .into()
}

/// Checks that a handshake has not taken too long.
///
/// # Errors
/// [`Error::TimedOut`], which names `waiting_for`.
pub fn in_time(process: &Process, started: Instant, waiting_for: &str) -> Result<()> {
    let waited = clock::elapsed(started);
    let limit = process.config.setup.connect_timeout;
    if waited < limit {
        return Ok(());
    }
    Err(TimedOut::Setup {
        what: waiting_for.to_owned(),
        waited,
        limit: limit.as_secs(),
    }
    .into())
}

/// Returns the next message from the peer, or `None` if none has arrived.
///
/// # Errors
/// [`Error::Usage`] if the peer refuses the connection; otherwise the error of the channel.
pub fn receive(channel: &mut Channel) -> Result<Option<Message>> {
    let received = channel.receive()?;
    understood(channel, received)
}

/// Converts the channel's result to a message. Returns `None` if no message has arrived.
///
/// # Errors
/// The errors of [`receive`].
pub fn understood(channel: &Channel, received: Received) -> Result<Option<Message>> {
    match received {
        Received::Message(Message::Refuse(why)) => Err(Usage::Refused {
            peer: channel.peer(),
            why,
        }
        .into()),
        Received::Message(message) => Ok(Some(message)),
        Received::Nothing => Ok(None),
        Received::Unreachable(network) => Err(network.into()),
        Received::Closed => Err(PeerGone::ClosedInSetup {
            peer: channel.peer(),
        }
        .into()),
    }
}

/// Checks that the peer answered for every pair of the OFFER.
///
/// # Errors
/// [`Error::Protocol`] if the numbers differ.
pub fn check_pair_count(peer: &str, theirs: usize, ours: usize) -> Result<()> {
    if theirs == ours {
        return Ok(());
    }
    Err(Violation::RailCount {
        peer: peer.to_owned(),
        theirs,
        ours,
    }
    .into())
}

/// Returns the error for a message that the handshake does not expect now.
pub fn out_of_turn(channel: &Channel, message: &Message) -> Error {
    Violation::Unexpected {
        peer: channel.peer(),
        kind: message.kind(),
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_pairing_side_reports_different_subnets() {
        let attachment = Attachment {
            link: 0,
            link_mbps: 0,
            cable: 0,
            port_mbps: 1,
        };
        let name = "x0:1".to_owned();
        let phys_port = String::new();
        let addresses = Vec::new();
        let advert = RailAdvert {
            name,
            phys_port,
            attachment,
            speed_mbps: 1,
            mtu_bytes: 4096,
            addresses,
            is_usable: true,
        };
        assert_eq!(
            unpaired_reason(&advert, Role::Receiver),
            "no rail of the peer shares a subnet with x0:1 (), and no route leads to one"
        );
        let told = unpaired_reason(&advert, Role::Sender);
        assert!(
            told.starts_with("no peer rail for x0:1 ()") && told.ends_with("see the peer's log"),
            "{told}"
        );
    }
}
