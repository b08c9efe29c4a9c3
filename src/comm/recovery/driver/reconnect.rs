//! New queue pairs for a rail that returns: the sending side makes its own and asks, the receiving side connects its own to them, and
//! the sending side connects and tries them.

use super::Driver;
use crate::comm::datapath::lane::{Lane, Route};
use crate::comm::datapath::test_write::{LaneTest, Tested};
use crate::comm::process::Process;
use crate::comm::rail::Look;
use crate::comm::rail::backoff::{PathId, SEARCH};
use crate::comm::recovery::attempt::{Asked, Attempt, Stage, Way};
use crate::error::{Error, Result};
use crate::flow::pairing;
use crate::flow::recovery::Answer;
use crate::interfaces;
use crate::verbs::CompletionBuffer;
use crate::wire::cts::Epoch;
use crate::wire::fields::{LaneEnd, RailAdvert};
use crate::wire::ids::LaneId;
use std::time::Instant;

impl Driver {
    /// The rail as it is now.
    fn look(&self, lane: LaneId) -> Result<(Look, RailAdvert)> {
        let managed = &self.rails[lane.index()];
        let rail = &managed.rail;
        if !rail.is_up() {
            return Err(Error::Missing("local port down".to_owned()));
        }
        let look = rail.look(&self.process.config, &interfaces::all()?)?;
        let mut advert = rail.advert(&look);
        // The accepting side chooses the address, and takes the smaller path MTU of the two sides.
        let known = managed.ways.iter().flatten().filter_map(|way| self.largest_mtu(lane, *way)).min();
        advert.mtu_bytes = known.map_or(advert.mtu_bytes, |largest| largest.min(advert.mtu_bytes));
        Ok((look, advert))
    }

    fn largest_mtu(&self, lane: LaneId, way: Way) -> Option<u32> {
        self.process.backoff.largest_mtu(self.rails[lane.index()].path(way))
    }

    fn open(&self, lane: LaneId) -> Result<Lane> {
        let managed = &self.rails[lane.index()];
        let mut new = Lane::open(&managed.rail, self.role, managed.queue_count)?;
        new.peer_rail.clone_from(&managed.peer_rail);
        new.register_mailbox(&self.mailboxes.region)?;
        Ok(new)
    }

    /// Whether one of the paths that the rail's attempts go by may be tried now; else why the newest may not. Of one path alone nothing is
    /// concluded: the next attempt may go by another address, which the accepting side chooses.
    fn is_due(&self, lane: LaneId, now: Instant) -> Result<()> {
        let managed = &self.rails[lane.index()];
        let [Some(newest), Some(before)] = managed.ways else { return Ok(()) };
        let is_due = |way| self.process.backoff.is_due(managed.path(way), now);
        is_due(newest).or_else(|why| is_due(before).map_err(|_| why))
    }

    /// Connecting side: makes new queue pairs; what the peer is to know of them.
    pub(super) fn open_qps(
        &mut self,
        lane: LaneId,
        now: Instant,
    ) -> std::result::Result<(RailAdvert, LaneEnd), String> {
        self.rails[lane.index()].begins_attempt();
        // Before queue pairs are made on either side that have nowhere to go.
        if let Err(error) = self.is_due(lane, now) {
            self.rails[lane.index()].stage = Stage::PutOff;
            return Err(error.to_string());
        }
        let opened = self.look(lane).and_then(|(look, rail)| Ok((look, rail, self.open(lane)?)));
        let (look, rail, new) = opened.map_err(|error| error.to_string())?;
        let end = new.end();
        self.rails[lane.index()].attempt = Some(Attempt::Asked(Box::new(Asked { lane: new, look })));
        Ok((rail, end))
    }

    /// Accepting side: makes new queue pairs for those of the peer's, connects them, and gives them to the data path to keep.
    pub(super) fn answer_qps(
        &mut self,
        lane: LaneId,
        theirs: &RailAdvert,
        end: &LaneEnd,
        now: Instant,
    ) -> std::result::Result<Answer, String> {
        self.rails[lane.index()].answers += 1;
        self.rails[lane.index()].begins_attempt();
        let (new, mut answer) = self.answer(lane, theirs, end, now).map_err(|error| error.to_string())?;
        let has_failed = || "the connection has failed".to_owned();
        let mut path = self.path.borrow().ok_or_else(has_failed)?;
        let opening = new.opening();
        if self.rails[lane.index()].granted.replace(opening) != Some(opening) {
            let renewed = path.renew(&self.context, lane);
            if let Err(error) = renewed {
                drop(path);
                self.give_up(error);
                return Err(has_failed());
            }
        }
        answer.epoch = path.epoch(lane);
        let is_kept = path.status().keep(lane, new);
        drop(path);
        if is_kept { Ok(answer) } else { Err(has_failed()) }
    }

    /// Connecting side: connects the new queue pairs and writes a packet over each.
    pub(super) fn connect_qps(
        &mut self,
        lane: LaneId,
        answer: &Answer,
        now: Instant,
    ) -> std::result::Result<(), String> {
        let Some(Attempt::Asked(asked)) = self.rails[lane.index()].attempt.take() else {
            return Err("there are no new queue pairs".to_owned());
        };
        let Asked { lane: new, look } = *asked;
        let route = Route {
            look: &look,
            gid: answer.connector_gid,
            peer_gid: answer.acceptor_gid,
            mtu_bytes: answer.mtu_bytes,
            ends: &answer.end.qps,
            priority: self.priority,
        };
        let rkey = answer.end.mailbox_rkey;
        if let Some(mut path) = self.path.borrow() {
            path.take_epoch(lane, answer.epoch);
        }
        self.rails[lane.index()].goes_by(Way { peer_gid: route.peer_gid, mtu_bytes: route.mtu_bytes });
        let new = self.try_out(new, &route, rkey, now).map_err(|error| error.to_string())?;
        self.rails[lane.index()].attempt = Some(Attempt::Testing(Box::new(new)));
        Ok(())
    }

    /// Whether the tests of new queue pairs are over.
    pub(super) fn look_at_trials(&mut self, now: Instant, at: u64) {
        let mut buffer = CompletionBuffer::new();
        let (process, peer) = (&self.process, &self.context.peer.name);
        for (lane, managed) in self.lanes().zip(&mut self.rails) {
            let Some(Attempt::Testing(test)) = &mut managed.attempt else { continue };
            let outcome = match test.look(&self.mailboxes, &process.backoff, &mut buffer, now) {
                Tested::UnderWay => continue,
                Tested::Carries => Ok(()),
                Tested::Narrow(why) => {
                    let rail = (managed.rail.id, managed.rail.name());
                    process.log.warn_of_small_packets(peer, (rail.0, &rail.1), &managed.peer_rail, &why);
                    Err(why)
                }
                Tested::Silent(why) | Tested::Failed(why) => Err(why),
            };
            self.recovery.probed(lane, outcome, at);
        }
    }

    /// The new queue pairs of a rail, which this or the data path keeps.
    pub(super) fn take_new(&mut self, lane: LaneId) -> Option<Lane> {
        match self.rails[lane.index()].attempt.take() {
            Some(Attempt::Asked(asked)) => Some(asked.lane),
            Some(Attempt::Testing(test)) => Some(test.lane),
            None => self.path.borrow()?.status().take(lane),
        }
    }

    fn answer(&mut self, lane: LaneId, theirs: &RailAdvert, end: &LaneEnd, now: Instant) -> Result<(Lane, Answer)> {
        let (look, ours) = self.look(lane)?;
        let pair = pairing::pair_again(theirs, &ours, self.rails[lane.index()].answers).ok_or_else(|| {
            let (theirs, ours) = (pairing::describe(std::slice::from_ref(theirs)), pairing::describe(&[ours]));
            Error::Missing(format!("no shared subnet: this host has {ours}, the peer has {theirs}"))
        })?;
        let mut way = Way { peer_gid: pair.connector_gid, mtu_bytes: pair.mtu_bytes };
        way.mtu_bytes = self.largest_mtu(lane, way).map_or(way.mtu_bytes, |largest| largest.min(way.mtu_bytes));
        self.rails[lane.index()].goes_by(way);
        // Before queue pairs are made, which may not be needed.
        let managed = &mut self.rails[lane.index()];
        self.process.backoff.check(managed.path(way), now).inspect_err(|_| managed.stage = Stage::PutOff)?;
        let mut new = self.open(lane)?;
        let route = Route {
            look: &look,
            gid: pair.acceptor_gid,
            peer_gid: way.peer_gid,
            mtu_bytes: way.mtu_bytes,
            ends: &end.qps,
            priority: self.priority,
        };
        new.peer_mailbox_rkey = end.mailbox_rkey;
        self.join(&mut new, &route, now)?;
        let answer = Answer {
            connector_gid: pair.connector_gid,
            acceptor_gid: pair.acceptor_gid,
            mtu_bytes: way.mtu_bytes,
            end: new.end(),
            epoch: Epoch::default(),
        };
        Ok((new, answer))
    }

    fn try_out(&self, mut lane: Lane, route: &Route<'_>, peer_rkey: u32, now: Instant) -> Result<LaneTest> {
        let Process { config, backoff, .. } = &*self.process;
        let path = PathId { rail: lane.rail.id, peer_gid: route.peer_gid };
        let trial = backoff.retry(path, SEARCH + config.probe_timeout, now)?;
        self.join(&mut lane, route, now)?;
        lane.peer_mailbox_rkey = peer_rkey;
        LaneTest::start(lane, path, &self.mailboxes, route.mtu_bytes, config.probe_timeout, trial, now)
    }

    /// Connects new queue pairs: the one thing here that the kernel may take long for.
    fn join(&self, new: &mut Lane, route: &Route<'_>, now: Instant) -> Result<()> {
        let Process { config, backoff, .. } = &*self.process;
        let outcome = new.connect(self.role, config, route);
        backoff.spend(PathId { rail: new.rail.id, peer_gid: route.peer_gid }, &outcome, now);
        outcome
    }

    /// The service thread looks after all its connections once more.
    pub fn begin_round(&self) {
        self.process.backoff.begin_round();
        let now = Instant::now();
        self.process.outages.tick(now);
        self.process.tcp_outages.tick(now);
    }
}
