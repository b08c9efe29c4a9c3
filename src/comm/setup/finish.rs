//! The last step of the handshake, on both sides: a data path over the rails that carry, watched by the service thread.

use super::Setup;
use super::negotiate;
use crate::comm::channel::Channel;
use crate::comm::datapath::context::PathContext;
use crate::comm::datapath::lane::{Lane, Role};
use crate::comm::datapath::mailbox::Mailboxes;
use crate::comm::datapath::parts::PathParts;
use crate::comm::datapath::path::DataPath;
use crate::comm::datapath::peer::Peer;
use crate::comm::datapath::try_cell::TryCell;
use crate::comm::endpoint::Endpoint;
use crate::comm::process::Process;
use crate::comm::rail::Rail;
use crate::comm::recovery::attempt::ManagedRail;
use crate::comm::recovery::driver::Driver;
use crate::comm::recovery::redial::Standing;
use crate::comm::recovery::tcp::Redialling;
use crate::counters::layout::Direction;
use crate::counters::{CountedConnection, CountedLane};
use crate::error::Result;
use crate::flow::paths::End;
use crate::verbs::Region;
use crate::wire::MAX_RAILS;
use crate::wire::ids::{LaneId, RailId};
use std::sync::Arc;

/// What the two sides have agreed on.
pub struct Agreed {
    /// This side.
    pub role: Role,
    /// The other, for messages.
    pub peer: String,
    /// NCCL's traffic class, where the connecting side was given one.
    pub traffic_class: Option<u8>,
    /// The largest write.
    pub chunk_bytes: u32,
    /// This side's memory that the peer writes into.
    pub region: Arc<Region>,
    /// Where the peer's is.
    pub peer_addr: u64,
    /// The pairs of rails, in the order of both sides: those that carry, and those that are to.
    pub pairs: Vec<AgreedPair>,
    /// This host's rails that are not used, each with the reason.
    pub left_out: Vec<(RailId, String)>,
}

/// A pair of rails.
pub struct AgreedPair {
    /// This host's rail.
    pub rail: Arc<Rail>,
    /// Both ends, this side's first.
    pub ends: [End; 2],
    /// The peer's rail, for messages.
    pub peer_rail: String,
    /// Queue pairs of the connection on it.
    pub queue_count: u8,
    /// Its connected queue pairs, with the keys of both sides' regions; or why it does not carry yet.
    pub lane: std::result::Result<Lane, String>,
}

impl AgreedPair {
    /// Those that do not carry, beside what is left out.
    pub fn not_yet(pairs: &[Self], mut left_out: Vec<(RailId, String)>) -> Vec<(RailId, String)> {
        let why = |pair: &Self| Some((pair.rail.id, pair.lane.as_ref().err()?.clone()));
        left_out.extend(pairs.iter().filter_map(why));
        left_out
    }
}

/// Takes a connection into use. `first` says to the peer what it waits for, if anything; then the peer may use the connection. It knows
/// how the connection gets another TCP connection.
///
/// # Errors
/// [`Error::Network`](crate::error::Error::Network) when no rail carries; [`Error::Os`](crate::error::Error::Os) when the service thread cannot be started; what `first` says.
pub fn finish<P: DataPath + 'static>(
    setup: &Setup,
    channel: Channel,
    agreed: Agreed,
    path: impl FnOnce(PathParts) -> P,
    first: impl FnOnce(&mut Channel, &mut Standing) -> Result<Redialling>,
) -> Result<Endpoint<P>> {
    let Agreed { role, peer, traffic_class, chunk_bytes, region, peer_addr, pairs, left_out } = agreed;
    let process = Arc::clone(&setup.process);
    let left_out = AgreedPair::not_yet(&pairs, left_out);
    if pairs.iter().all(|pair| pair.lane.is_err()) || pairs.len() > MAX_RAILS {
        return Err(negotiate::no_usable_rail(&process, &peer, &left_out));
    }
    let paths: Vec<[End; 2]> = pairs.iter().map(|pair| pair.ends).collect();
    let mut striping = negotiate::striping(&process, &paths);
    let (mut lanes, mut rails) = (Vec::new(), Vec::new());
    let counted = counted(&process, role, &peer, &pairs);
    for (id, AgreedPair { rail, peer_rail, queue_count, lane, .. }) in LaneId::all(pairs.len()).zip(pairs) {
        let mut lane = lane.unwrap_or_else(|_| {
            striping.lose(id);
            Lane::not_yet(&rail, peer_rail)
        });
        lane.record = counted.record(id.index());
        rails.push(ManagedRail::of(&lane, usize::from(queue_count)));
        lanes.push(lane);
    }
    negotiate::report(&process, &peer, role, &lanes, &paths, &left_out);
    let context = Arc::new(PathContext {
        peer: Arc::new(Peer::new(peer)),
        registrations: Arc::clone(&process.registrations),
        stall_warn: process.config.stall_warn,
        log: Arc::clone(&process.log),
        waker: setup.service.clone(),
    });
    let bound = process.bound.clone();
    let parts = PathParts { lanes, region: Arc::clone(&region), peer_addr, chunk_bytes, striping, bound };
    let path = Arc::new(TryCell::new(path(parts)));
    let mailboxes = Mailboxes { region, peer_addr };
    let driver =
        Driver::new(Arc::clone(&process), Arc::clone(&context), path.clone(), role, traffic_class, mailboxes, rails);
    let watch = setup.service.watch(channel, driver, first)?;
    process.opened(&context.peer.name);
    Ok(Endpoint { context, process, service: Arc::clone(&setup.service), watch, path, counted })
}

/// The records of a connection's lanes.
fn counted(process: &Process, role: Role, peer: &str, pairs: &[AgreedPair]) -> CountedConnection {
    let lane = |pair: &AgreedPair| CountedLane {
        rail: pair.rail.name(),
        peer_rail: pair.peer_rail.clone(),
        bits_per_s: u64::from(pair.rail.info.speed_mbps) * 1_000_000,
        carries: pair.lane.is_ok(),
    };
    let direction = match role {
        Role::Sender => Direction::Send,
        Role::Receiver => Direction::Receive,
    };
    // Its name is its host's with a process number behind.
    let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host);
    process.counting.connection(direction, host, &pairs.iter().map(lane).collect::<Vec<_>>())
}
