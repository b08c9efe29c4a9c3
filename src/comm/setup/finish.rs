//! The last step of the handshake, on both sides: creates the data path over the agreed rails, and
//! hands the connection to the service thread.
//!
//! NCCL gets a connection once a rail works. If no rail worked in the handshake, recovery continues
//! to try all of them ([`proto::flow::recovery`]). [`AwaitingRail`] keeps the connection until a
//! rail works or the time limit has passed.

use super::Setup;
use super::negotiate;
use crate::clock;
use crate::comm::channel::Channel;
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::fault::not_entered;
use crate::comm::datapath::lane::{Lane, Role, lanes_text};
use crate::comm::datapath::mailbox::Mailboxes;
use crate::comm::datapath::parts::PathParts;
use crate::comm::datapath::peer::Peer;
use crate::comm::datapath::shared::Shareable;
use crate::comm::datapath::try_cell::TryCell;
use crate::comm::endpoint::Endpoint;
use crate::comm::process::Process;
use crate::comm::rail::Rail;
use crate::comm::recovery::attempt::ManagedRail;
use crate::comm::recovery::driver::{Driver, Terms};
use crate::comm::recovery::redial::RedialHandle;
use crate::comm::recovery::tcp::Redialling;
use host::counters::layout::{Direction, State};
use host::counters::{CountedConnection, CountedLane};
#[cfg(doc)]
use host::error::Error;
use host::error::{PeerGone, Result};
use proto::flow::paths::{End, Paths};
use proto::flow::recovery::{Missing, PathChoice};
use proto::flow::striping::Striping;
use proto::time::Instant;
use proto::wire::fields::Priority;
use proto::wire::ids::{LaneId, RailId};
use std::sync::{Arc, OnceLock};
use verbs::Region;

/// The result of the handshake between the two sides.
pub struct Agreed {
    /// Role of this side.
    pub role: Role,
    /// The peer's name, for log lines.
    pub peer: String,
    /// Start of the handshake.
    pub started: Instant,
    /// Priority of the connection's packets.
    pub priority: Priority,
    /// Largest write, in bytes.
    pub chunk_bytes: u32,
    /// This side's memory, which the peer writes into.
    pub region: Arc<Region>,
    /// Address of the peer's region.
    pub peer_addr: u64,
    /// The pairs of rails, in the same order on both sides, including pairs that do not work yet.
    /// At most [`MAX_RAILS`](proto::wire::MAX_RAILS).
    pub pairs: Vec<AgreedPair>,
    /// This host's rails that are in no pair, each with the reason.
    pub left_out: Vec<(RailId, String)>,
}

/// A pair of rails.
pub struct AgreedPair {
    /// This host's rail.
    pub rail: Arc<Rail>,
    /// Both ends, this side's first.
    pub ends: [End; 2],
    /// The peer's rail, for log lines.
    pub peer_rail: String,
    /// Number of the connection's queue pairs on the rail.
    pub queue_count: u8,
    /// The peer's address and the path MTU used in the handshake.
    pub choice: PathChoice,
    /// True for a rail that may never have a link and an address
    /// ([`Pair::is_late`](proto::flow::pairing::Pair::is_late)).
    pub is_late: bool,
    /// The connected queue pairs, with both sides' keys, or the reason why they do not work yet.
    pub lane: std::result::Result<Lane, String>,
}

impl AgreedPair {
    /// Adds the rails of pairs that do not work yet to `left_out`, each with the reason.
    pub fn not_yet(pairs: &[Self], mut left_out: Vec<(RailId, String)>) -> Vec<(RailId, String)> {
        let why = |pair: &Self| Some((pair.rail.id, pair.lane.as_ref().err()?.clone()));
        left_out.extend(pairs.iter().filter_map(why));
        left_out
    }
}

/// A connection that waits for its first rail. Dropping it closes it.
pub struct AwaitingRail<P: Shareable> {
    role: Role,
    endpoint: Option<Endpoint<P>>,
}

impl<P: Shareable> AwaitingRail<P> {
    /// Returns the peer's name.
    pub fn peer(&self) -> String {
        self.endpoint
            .as_ref()
            .map_or_else(String::new, |endpoint| endpoint.context.peer.name.clone())
    }

    /// Returns the connection once it has a rail, `None` until then.
    ///
    /// # Errors
    /// [`Error::Network`] if no rail works in time; [`Error::PeerGone`] if the peer leaves first.
    pub fn step(&mut self) -> Result<Option<Endpoint<P>>> {
        let Some(endpoint) = &self.endpoint else {
            return Ok(None);
        };
        let process = &endpoint.process;
        let peer = &endpoint.context.peer;
        let Some(mut path) = endpoint.path.enter() else {
            return Ok(not_entered(&endpoint.path).map(|()| None)?);
        };
        path.rails().status.check()?;
        if path.rails().status.is_ending() {
            path.leave();
            return Ok(None);
        }
        let has_rail = path.rails().lanes.iter().any(Lane::is_open);
        if has_rail {
            negotiate::report_connected(process, &peer.name, self.role, &path.rails().lanes);
        }
        let has_left = !has_rail && !peer.is_here();
        let rails = if has_left {
            lanes_text(&path.rails().lanes)
        } else {
            String::new()
        };
        path.leave();
        if has_left {
            return Err(PeerGone::Left {
                peer: peer.name.clone(),
                rails,
            }
            .into());
        }
        Ok(if has_rail { self.endpoint.take() } else { None })
    }
}

impl<P: Shareable> Drop for AwaitingRail<P> {
    fn drop(&mut self) {
        if let Some(endpoint) = &self.endpoint {
            endpoint.close_unused();
        }
    }
}

/// Builds the data path of a connection and hands the connection to the service thread.
/// `send_last_message` is called before the thread gets the connection. On the receiving side,
/// `send_last_message` sends GO, the last message of the handshake. On both sides, it returns the
/// means to get another TCP connection.
///
/// # Errors
/// [`Error::Os`] if the service thread cannot be started; the error of `send_last_message`.
pub fn finish<P: Shareable + 'static>(
    setup: &Setup,
    channel: Channel,
    agreed: Agreed,
    path: impl FnOnce(PathParts) -> P,
    send_last_message: impl FnOnce(&mut Channel, &mut RedialHandle) -> Result<Redialling>,
) -> Result<AwaitingRail<P>> {
    let Agreed {
        role,
        peer,
        started,
        priority,
        chunk_bytes,
        region,
        peer_addr,
        pairs,
        left_out,
    } = agreed;
    let process = Arc::clone(&setup.process);
    let left_out = AgreedPair::not_yet(&pairs, left_out);
    let paths: Vec<[End; 2]> = pairs.iter().map(|pair| pair.ends).collect();
    let late: Vec<bool> = pairs.iter().map(|pair| pair.is_late).collect();
    let routed: Vec<bool> = pairs
        .iter()
        .map(|pair| negotiate::is_routed(&pair.rail, pair.choice.peer_gid))
        .collect();
    let mut striping = negotiate::striping(&process, &Paths::with_late(&paths, &late));
    let counted = counted(&process, role, &peer, &pairs);
    let missing = AgreedPair::missing(&pairs, &mut striping);
    let (lanes, rails) = AgreedPair::into_lanes(pairs, &counted);
    negotiate::report_left_out(&process, &peer, &lanes, &paths, &routed, &left_out);
    let context = Arc::new(PathContext {
        peer: Arc::new(Peer::new(peer)),
        registrations: Arc::clone(&process.registrations),
        stall_warn: process.config.data_path.stall_warn,
        waker: setup.service.clone(),
        operation: OnceLock::new(),
    });
    let parts = PathParts {
        lanes,
        region: Arc::clone(&region),
        peer_addr,
        chunk_bytes,
        striping,
    };
    let path = Arc::new(TryCell::new(path(parts)));
    let mailboxes = Mailboxes { region, peer_addr };
    let connect_timeout = process.config.setup.connect_timeout;
    let terms = Terms {
        role,
        priority,
        first_rail_timeout: connect_timeout.saturating_sub(clock::elapsed(started)),
    };
    let driver = Driver::new(
        Arc::clone(&process),
        Arc::clone(&context),
        path.clone(),
        terms,
        mailboxes,
        rails,
        &missing,
    );
    let watch = setup.service.watch(channel, driver, send_last_message)?;
    process.opened(&context.peer.name);
    let endpoint = Endpoint {
        context,
        process,
        service: Arc::clone(&setup.service),
        watch,
        path,
        counted,
    };
    Ok(AwaitingRail {
        role,
        endpoint: Some(endpoint),
    })
}

impl AgreedPair {
    /// Returns the pairs that do not work yet. `striping` no longer uses them.
    fn missing(pairs: &[Self], striping: &mut Striping) -> Vec<Missing> {
        let missing = |(lane, pair): (LaneId, &Self)| {
            let why = pair.lane.as_ref().err()?.clone();
            striping.lose(lane);
            Some(Missing {
                lane,
                path: pair.choice,
                why,
                is_late: pair.is_late,
            })
        };
        LaneId::all(pairs.len())
            .zip(pairs)
            .filter_map(missing)
            .collect()
    }

    /// Returns the lanes for the data path, and the driver's handles for their rails. A pair that
    /// does not work yet gives a lane without queue pairs.
    fn into_lanes(pairs: Vec<Self>, counted: &CountedConnection) -> (Vec<Lane>, Vec<ManagedRail>) {
        let into_lane = |(id, pair): (LaneId, Self)| {
            let mut lane = pair
                .lane
                .unwrap_or_else(|_| Lane::without_queues(&pair.rail, pair.peer_rail));
            lane.record = counted.record(id.index());
            let managed = ManagedRail::of(&lane, usize::from(pair.queue_count));
            (lane, managed)
        };
        LaneId::all(pairs.len()).zip(pairs).map(into_lane).unzip()
    }
}

fn counted(process: &Process, role: Role, peer: &str, pairs: &[AgreedPair]) -> CountedConnection {
    let lane = |pair: &AgreedPair| CountedLane {
        rail: pair.rail.name(),
        peer_rail: pair.peer_rail.clone(),
        bits_per_s: u64::from(pair.rail.info.speed_mbps) * 1_000_000,
        path_mtu_bytes: pair.lane.as_ref().map_or(0, Lane::path_mtu_bytes),
        state: match pair.lane {
            Ok(_) => State::Carries,
            // Readers do not see a lane that may never work.
            Err(_) if pair.is_late => State::Free,
            Err(_) => State::Lost,
        },
    };
    let direction = match role {
        Role::Sender => Direction::Send,
        Role::Receiver => Direction::Receive,
    };
    // A peer's name is HOST:PID.
    let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
    process
        .counting
        .connection(direction, host, &pairs.iter().map(lane).collect::<Vec<_>>())
}
