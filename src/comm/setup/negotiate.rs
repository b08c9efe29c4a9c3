//! What both sides of the handshake do alike: looking at the rails, and telling what was left out.

use crate::comm::channel::{Channel, Received};
use crate::comm::datapath::lane::{Lane, Role};
use crate::comm::log::once::Subject;
use crate::comm::process::Process;
use crate::comm::rail::backoff::PathId;
use crate::comm::rail::device::Presence;
use crate::comm::rail::{Look, Rail};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::flow::pairing;
use crate::flow::paths::{End, Paths, is_cable_full};
use crate::flow::striping::Striping;
use crate::interfaces;
use crate::wire::fields::{Attachment, RailAdvert};
use crate::wire::ids::RailId;
use crate::wire::message::{ByTcp, Hello, Message, NotYet};
use crate::wire::{MAX_OFFERED_RAILS, MAX_RAILS};
use std::sync::Arc;
use std::time::Instant;

/// What one queue pair is sure to carry, in Mb/s (published for a Spark's functions: 92 to 102 Gb/s with one, 111.7 with
/// four). A rail that is to carry more gets more of them.
const QP_MBPS: f64 = 92_000.0;
/// Queue pairs of a connection on one rail when nothing is set: channels bring parallelism too.
const MOST_QPS: u8 = 4;
/// A chunk is no larger than this, so that a 32-bit completion holds its size.
const MOST_CHUNK_BYTES: u32 = 1 << 30;

/// Refuses a peer whose tuner decides by other rules: sooner or later the two would wait for each other in a collective.
///
/// # Errors
/// [`Error::Usage`].
pub fn check_tuner(process: &Process, hello: &Hello) -> Result<()> {
    let (ours, peer) = (&process.tuner, &hello.name);
    if hello.tuner_hash == ours.hash {
        return Ok(());
    }
    let word = |hash: u64, gpu: &str| match hash {
        0 => format!("off, GPU {gpu}"),
        _ => format!("hash {hash:016x}, GPU {gpu}"),
    };
    Err(Error::Usage(format!(
        "the tuners of {peer} ({}) and {} ({}) differ, so collectives would hang: use the same GPU, NCCL version, NCCL_SPARK_TUNER, \
         NCCL_SPARK_TUNER_TABLE and NCCL_SPARK_LL128 on every node (nccl-spark tune collectives writes the table to all), \
         or set NCCL_SPARK_TUNER=off on every node",
        word(hello.tuner_hash, &hello.gpu),
        process.name,
        word(ours.hash, &ours.gpu)
    )))
}

/// Refuses a peer that has `NCCL_SPARK_RING_TCP` otherwise: the tuners decide by it, whatever rails this connection has.
///
/// # Errors
/// [`Error::Usage`].
pub fn check_ring_tcp(process: &Process, hello: &Hello) -> Result<()> {
    let (ours, theirs) = (process.config.ring_tcp, hello.by_tcp != ByTcp::Off);
    if ours == theirs {
        return Ok(());
    }
    let (with, without) = if ours { (&process.name, &hello.name) } else { (&hello.name, &process.name) };
    Err(Error::Usage(format!(
        "NCCL_SPARK_RING_TCP=1 is set on {with} and not on {without}: set it on every node or on none"
    )))
}

/// The rails of this host, those that can be used just now and those that are lost.
pub struct Rails {
    /// The rails whose addresses are known, in the order of the adverts.
    pub known: Vec<KnownRail>,
    /// What the peer is told of them.
    pub adverts: Vec<RailAdvert>,
    /// The others, each with its reason.
    pub unknown: Vec<(Arc<Rail>, String)>,
}

/// A rail whose addresses are known.
pub struct KnownRail {
    /// The rail.
    pub rail: Arc<Rail>,
    /// As it is now, or was when it could last be used.
    pub look: Look,
    /// Why it cannot be used now.
    pub problem: Option<String>,
}

impl Rails {
    /// Looks at every rail.
    ///
    /// # Errors
    /// [`Error::Os`] when the interfaces cannot be listed.
    pub fn look(process: &Process) -> Result<Self> {
        process.look_for_returned(Instant::now());
        let interfaces = interfaces::all()?;
        let (mut known, mut adverts, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
        for rail in process.rails.iter().take(MAX_OFFERED_RAILS) {
            let (look, problem) = match rail.look(&process.config, &interfaces) {
                Ok(look) => (look, None),
                Err(error) => match rail.last_look() {
                    Some(last) => (last, Some(error.to_string())),
                    None => {
                        unknown.push((Arc::clone(rail), error.to_string()));
                        continue;
                    }
                },
            };
            adverts.push(RailAdvert { is_usable: problem.is_none(), ..rail.advert(&look) });
            known.push(KnownRail { rail: Arc::clone(rail), look, problem });
        }
        Ok(Self { known, adverts, unknown })
    }

    /// The largest chunk that every rail can write at once.
    pub fn chunk_bytes(&self) -> u32 {
        let most = self.known.iter().map(|known| known.look.port.max_message_bytes).min();
        let chunk = most.unwrap_or(MOST_CHUNK_BYTES).min(MOST_CHUNK_BYTES);
        (chunk - chunk % 128).max(4096)
    }

    /// Both ends of a pair: this side's rail first, by its place here, then the peer's, by its place in its own list.
    pub fn ends(&self, place: usize, theirs: &[RailAdvert], their_place: usize) -> [End; 2] {
        let rail = &self.known[place].rail;
        let their_ends: Vec<End> = (RailId::all(theirs.len()).zip(theirs))
            .map(|(rail, advert)| End { rail, attachment: advert.attachment })
            .collect();
        [End { rail: rail.id, attachment: rail.info.attachment }, their_ends[their_place]]
    }

    /// Why no peer that these rails do not pair with may be connected by TCP: those whose addresses are not known may be the ones that reach
    /// it.
    pub fn why_not_by_tcp(&self) -> Option<String> {
        let why = |(rail, why): &(Arc<Rail>, String)| format!("{} ({why})", rail.name());
        (!self.unknown.is_empty()).then(|| self.unknown.iter().map(why).collect::<Vec<_>>().join("; "))
    }

    /// What the peer is told of connections by TCP.
    pub fn by_tcp(&self, config: &Config) -> ByTcp {
        match self.why_not_by_tcp() {
            _ if !config.ring_tcp => ByTcp::Off,
            Some(why) => ByTcp::Withheld(why),
            None => ByTcp::Allowed,
        }
    }

    /// What to say when nothing pairs. The peer says it too: `host` is what this side is called there.
    pub fn nothing_in_common(&self, host: &str, theirs: &[RailAdvert], peer: &str) -> String {
        let unknown: Vec<String> =
            self.unknown.iter().map(|(rail, why)| format!("; {} ({why})", rail.name())).collect();
        format!(
            "no rail in common: {host} has {}{}; {peer} has {}; if a cable or switch joins them, give both its ends addresses in one \
             subnet",
            pairing::describe(&self.adverts),
            unknown.join(""),
            pairing::describe(theirs),
        )
    }
}

/// Queue pairs on each rail, as this side wants them; 0 leaves the choice to [`queue_pairs`].
pub fn qps_wanted(config: &Config) -> u8 {
    config.qps_per_rail.unwrap_or(0)
}

/// How many queue pairs each path gets: what either side wants, or as many as carry the path's part of the job.
pub fn queue_pairs(wanted: u8, paths: &Paths) -> [u8; MAX_RAILS] {
    if wanted > 0 {
        return [wanted; MAX_RAILS];
    }
    paths.even_rates().map(qps_for)
}

/// The most that a connection has on a rail of this kind.
pub fn most_queue_pairs(config: &Config, attachment: &Attachment) -> u8 {
    config.qps_per_rail.unwrap_or_else(|| {
        let link_mbps = if attachment.link_mbps == 0 { u32::MAX } else { attachment.link_mbps };
        qps_for(f64::from(attachment.port_mbps.min(link_mbps)))
    })
}

fn qps_for(mbps: f64) -> u8 {
    (mbps / QP_MBPS).ceil().clamp(1.0, f64::from(MOST_QPS)) as u8
}

/// How a direction of a new connection divides its messages.
pub fn striping(process: &Process, paths: &[[End; 2]]) -> Striping {
    Striping::new(&Paths::new(paths), process.config.min_share_bytes)
}

/// Logs the rails of a connection that has its first one, once for all connections with the peer that have the same.
pub fn report_connected(process: &Process, peer: &str, role: Role, lanes: &[Lane]) {
    let live = lanes.iter().filter(|lane| lane.is_open());
    let rails: Vec<String> = live.map(|lane| format!("{} to {}", lane.rail.name(), lane.peer_rail)).collect();
    let (count, plural) = (rails.len(), if rails.len() == 1 { "" } else { "s" });
    let direction = match role {
        Role::Sender => "send",
        Role::Receiver => "receive",
    };
    let line = format!("connected with {peer} over {count} rail{plural}: {} ({direction})", rails.join(", "));
    if process.log.is_first(peer, Subject::Connected(line.clone())) {
        tracing::info!("{line}");
    } else {
        tracing::debug!("{line}");
    }
}

/// Logs a line for each rail that a connection leaves out, or that does not carry yet, once for all connections with the peer: a warning
/// where its twin works and the two would carry more. `ends` are those of the lanes, this side's first.
pub fn report_left_out(
    process: &Process,
    peer: &str,
    lanes: &[Lane],
    ends: &[[End; 2]],
    left_out: &[(RailId, String)],
) {
    let live = || lanes.iter().filter(|lane| lane.is_open());
    let live_ends: Vec<[End; 2]> =
        lanes.iter().zip(ends).filter(|(lane, _)| lane.is_open()).map(|(_, ends)| *ends).collect();
    for (rail, why) in left_out {
        let Some(rail) = process.rails.get(rail.index()) else { continue };
        let cable = rail.info.attachment.cable;
        let is_twin_alone =
            live().any(|lane| lane.rail.info.attachment.cable == cable) && !is_cable_full(&live_ends, cable);
        let name = rail.name();
        if !process.log.is_first(peer, Subject::NotUsed(rail.id)) {
            tracing::debug!("rail {name} not used by one more connection with {peer}: {why}");
        } else if is_twin_alone {
            tracing::warn!("rail {name} not used with {peer}, which halves the bandwidth of its cable: {why}");
        } else {
            tracing::info!("rail {name} not used with {peer}: {why}");
        }
    }
}

/// The reason why a pair of rails does not carry yet, where a call has failed with `error`.
pub fn not_yet(error: &Error) -> NotYet {
    NotYet { why: error.to_string(), may_pass: error.may_pass() }
}

/// The same for a call on a rail's device, which may be away.
pub fn not_yet_on(rail: &Rail, error: &Error) -> NotYet {
    let NotYet { why, may_pass } = not_yet(error);
    NotYet { why, may_pass: may_pass || rail.device.presence() != Presence::Here }
}

/// Why a pair of rails is not used now although it was agreed: its path is known as dead.
pub fn dead(process: &Process, rail: &Rail, peer_gid: [u8; 16]) -> Option<String> {
    process.backoff.dead(PathId { rail: rail.id, peer_gid }, Instant::now())
}

/// The rails that no pair names, with the reason.
pub fn unpaired(rails: &Rails, paired: &[usize], role: Role) -> Vec<(RailId, String)> {
    let mut all: Vec<(RailId, String)> = rails.unknown.iter().map(|(rail, why)| (rail.id, why.clone())).collect();
    for (place, (KnownRail { rail, problem, .. }, advert)) in rails.known.iter().zip(&rails.adverts).enumerate() {
        if !paired.contains(&place) {
            let why = if let Some(problem) = problem {
                problem.clone()
            } else if paired.len() >= MAX_RAILS {
                format!("a connection uses at most {MAX_RAILS} rails")
            } else {
                why_alone(advert, role)
            };
            all.push((rail.id, why));
        }
    }
    all
}

/// Why no pair names a rail. The accepting side pairs, and knows; the connecting side is told only what is left of the pairs once the
/// accepting side has made its queue pairs.
fn why_alone(advert: &RailAdvert, role: Role) -> String {
    let rail = pairing::describe(std::slice::from_ref(advert));
    match role {
        Role::Receiver => format!("no rail of the peer shares a subnet with {rail}"),
        Role::Sender => {
            format!("no peer rail for {rail}: no shared subnet; see the peer's log")
        }
    }
}

/// Rails that are left out, with the reason of each, for a message.
pub fn left_out_text(process: &Process, left_out: &[(RailId, String)]) -> String {
    let name = |id: RailId| process.rails.get(id.index()).map_or_else(|| format!("rail {id}"), |rail| rail.name());
    let one = |(id, why): &(RailId, String)| format!("{} ({why})", name(*id));
    left_out.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// The error of a connection without a rail.
pub fn no_usable_rail(process: &Process, peer: &str, left_out: &[(RailId, String)]) -> Error {
    Error::Network(format!("no usable rail to {peer}: {}", left_out_text(process, left_out)))
}

/// An error when a handshake has taken too long.
///
/// # Errors
/// [`Error::TimedOut`] says what was waited for.
pub fn in_time(process: &Process, started: Instant, waiting_for: &str) -> Result<()> {
    let (waited, limit) = (started.elapsed(), process.config.connect_timeout);
    if waited < limit {
        return Ok(());
    }
    Err(Error::TimedOut(format!(
        "timed out after {waited:.0?} waiting for {waiting_for} (NCCL_SPARK_CONNECT_TIMEOUT_S={})",
        limit.as_secs()
    )))
}

/// A message from the peer, `None` while there is none.
///
/// # Errors
/// [`Error::Usage`] when the peer refuses the connection; else what the channel says.
pub fn receive(channel: &mut Channel) -> Result<Option<Message>> {
    let received = channel.receive()?;
    understood(channel, received)
}

/// A message out of what was received, `None` while there is none.
///
/// # Errors
/// As [`receive`].
pub fn understood(channel: &Channel, received: Received) -> Result<Option<Message>> {
    match received {
        Received::Message(Message::Refuse(why)) => {
            Err(Error::Usage(format!("{} refused the connection: {why}", channel.peer())))
        }
        Received::Message(message) => Ok(Some(message)),
        Received::Nothing => Ok(None),
        Received::Unreachable(why) => Err(Error::Network(why)),
        Received::Closed => {
            Err(Error::PeerGone(format!("{} closed the bootstrap connection during connection set-up", channel.peer())))
        }
    }
}

/// The error for a message that the handshake does not expect now.
pub fn out_of_turn(channel: &Channel, message: &Message) -> Error {
    Error::Protocol(format!(
        "{} sent an unexpected {} message during connection set-up",
        channel.peer(),
        message.kind()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_has_paired_the_rails_says_that_subnets_differ() {
        let attachment = Attachment { link: 0, link_mbps: 0, cable: 0, port_mbps: 1 };
        let (name, phys_port, addresses) = ("x0:1".to_owned(), String::new(), Vec::new());
        let advert =
            RailAdvert { name, phys_port, attachment, speed_mbps: 1, mtu_bytes: 4096, addresses, is_usable: true };
        assert_eq!(why_alone(&advert, Role::Receiver), "no rail of the peer shares a subnet with x0:1 ()");
        let told = why_alone(&advert, Role::Sender);
        assert!(told.starts_with("no peer rail for x0:1 ()") && told.ends_with("see the peer's log"), "{told}");
    }
}
