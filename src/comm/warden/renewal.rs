//! New queue pairs for a rail that returns: the sending side makes its own and asks, the receiving side connects its own to them, and
//! the sending side connects and tries them.

use super::Warden;
use crate::comm::Host;
use crate::comm::lane::{Lane, Route};
use crate::comm::network;
use crate::comm::pairing;
use crate::comm::rail::Look;
use crate::comm::ward::{Asked, Phase};
use crate::error::{Error, Result};
use crate::wire::control::Notice;
use crate::wire::message::{QpEnd, RailAdvert};
use std::time::Instant;

impl Warden {
    /// The rail as it is now.
    fn look(&self, lane: usize) -> Result<(Look, RailAdvert)> {
        let rail = &self.wards[lane].rail;
        if !rail.is_up() {
            return Err(Error::Missing("local port down".to_owned()));
        }
        let look = rail.look(&self.ends.host.config, &network::prefixes(&network::addresses()?))?;
        let advert = rail.advert(&look);
        Ok((look, advert))
    }

    fn open(&self, lane: usize) -> Result<Lane> {
        let ward = &self.wards[lane];
        let mut new = Lane::open(&ward.rail, self.role, ward.queue_count)?;
        new.peer_rail.clone_from(&ward.peer_rail);
        Ok(new)
    }

    /// Sending side: makes new queue pairs, and asks the peer for its own.
    pub(super) fn ask(&mut self, at: usize) -> Result<Asked> {
        let (look, rail) = self.look(at)?;
        let lane = self.open(at)?;
        self.dialogue.say(Notice::Join { lane: at as u8, rail, qps: lane.ends() });
        Ok(Asked { lane, look })
    }

    /// Receiving side: makes new queue pairs for those of the peer's, connects them, and says so.
    pub(super) fn answer(&mut self, lane: usize, theirs: &RailAdvert, qps: &[QpEnd], now: Instant) {
        match self.connect(lane, theirs, qps, now) {
            Ok((new, joined)) => {
                let (mut new, mut is_kept) = (Some(new), false);
                self.half.borrow(&mut |half| is_kept = new.take().is_some_and(|new| half.health().keep(lane, new)));
                if !is_kept {
                    return self.not_now(lane, "the connection has failed");
                }
                self.wards[lane].phase = Phase::Answered;
                self.dialogue.say(joined);
            }
            Err(error) => self.not_now(lane, &error.to_string()),
        }
    }

    /// The queue pairs that the data path keeps for a trial that is over.
    pub(super) fn on_trial(&self, lane: usize) -> Option<Lane> {
        let mut new = None;
        self.half.borrow(&mut |half| new = half.health().take(lane));
        new
    }

    fn connect(&self, lane: usize, theirs: &RailAdvert, qps: &[QpEnd], now: Instant) -> Result<(Lane, Notice)> {
        let (look, ours) = self.look(lane)?;
        let pair = pairing::pair_again(theirs, &ours).ok_or_else(|| {
            let (theirs, ours) = (pairing::describe(std::slice::from_ref(theirs)), pairing::describe(&[ours]));
            Error::Missing(format!("no shared subnet: this host has {ours}, the peer has {theirs}"))
        })?;
        // Before queue pairs are made, which may not be needed.
        self.ends.host.unreached.check(&self.wards[lane].rail, pair.connector_gid, now)?;
        let mut new = self.open(lane)?;
        let route = Route {
            look: &look,
            gid: pair.acceptor_gid,
            peer_gid: pair.connector_gid,
            mtu_bytes: pair.mtu_bytes,
            ends: qps,
            traffic_class: None,
        };
        self.join(&mut new, &route, now)?;
        let joined = Notice::Joined {
            lane: lane as u8,
            connector_gid: pair.connector_gid,
            acceptor_gid: pair.acceptor_gid,
            mtu_bytes: pair.mtu_bytes,
            qps: new.ends(),
        };
        Ok((new, joined))
    }

    /// Sending side: connects the new queue pairs and writes a packet over each.
    pub(super) fn try_out(&self, lane: usize, mut new: Lane, route: &Route<'_>, now: Instant) -> Result<Lane> {
        self.ends.host.unreached.check(&new.rail, route.peer_gid, now)?;
        self.join(&mut new, route, now)?;
        let probe = self.board.probe_write(lane, route.mtu_bytes);
        new.write_on_each(&probe)?;
        Ok(new)
    }

    /// Connects new queue pairs: the one thing here that the kernel may take long for.
    fn join(&self, new: &mut Lane, route: &Route<'_>, now: Instant) -> Result<()> {
        let Host { config, unreached, .. } = &*self.ends.host;
        let outcome = new.connect(self.role, config, route);
        unreached.note(&new.rail, route.peer_gid, &outcome, now);
        outcome
    }

    /// The service thread looks after all its connections once more.
    pub fn begin_round(&self) {
        let host = &self.ends.host;
        host.unreached.begin_round();
        host.outages.tick(Instant::now());
    }
}
