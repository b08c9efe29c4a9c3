//! Connects the queue pairs of a new connection on paths that may be dead, without blocking.
//!
//! [`crate::comm::rail::backoff`] knows the state of each path in this process, and decides:
//! - A path known to be dead is left out.
//! - A path that worked a moment ago is connected in this call.
//! - For an unknown path, one connection gets the right to test it (a [`Trial`]). A thread connects
//!   its queue pairs, because the kernel may search for the peer's address for a second. The other
//!   connections wait for the result.
//!
//! Each wait has a limit, and dropping a connection releases its trial. The thread ends when the
//! kernel answers, even if the thread's connection no longer waits. Recovery later tries every path
//! that is left out ([`proto::flow::recovery`]).

use super::negotiate;
use crate::clock;
use crate::comm::datapath::lane::{Lane, Role, Route};
use crate::comm::process::Process;
use crate::comm::rail::RailSnapshot;
use crate::comm::rail::backoff::{Advice, Trial};
use crate::comm::threads;
use host::error::Result;
use proto::backoff::{PathId, Requirement, SEARCH};
use proto::flow::recovery::PathChoice;
use proto::time::Instant;
use proto::wire::fields::{Priority, QpEnd};
use proto::wire::message::NotYet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

/// The route between the two ends of a new lane: a [`Route`] that owns its data.
pub struct NewRoute {
    /// State of this side's rail when the route was agreed.
    pub snapshot: RailSnapshot,
    /// This side's address.
    pub gid: [u8; 16],
    /// The peer's address, and the path MTU.
    pub choice: PathChoice,
    /// The peer's queue pairs.
    pub ends: Vec<QpEnd>,
    /// Priority of the connection's packets.
    pub priority: Priority,
}

/// A lane whose queue pairs are being connected.
pub struct Joining {
    path: PathId,
    mtu_bytes: u32,
    role: Role,
    until: Instant,
    stage: JoinStage,
}

enum JoinStage {
    Asking(Box<NewLane>),
    Connecting(Receiver<ConnectResult>),
}

struct NewLane {
    lane: Lane,
    route: NewRoute,
}

struct ConnectResult {
    lane: Lane,
    trial: Option<Trial>,
    outcome: Result<()>,
}

/// Result of a step.
pub enum JoinStep {
    /// The lane needs another call.
    Waiting(Joining),
    /// The queue pairs are connected. On the accepting side, the caller keeps the trial of the
    /// path, if there is one, until the test writes are finished.
    Joined(Lane, Option<Trial>),
    /// The rail is left out for now. Contains the reason.
    LeftOut(NotYet),
}

impl Joining {
    /// Starts with a lane that is not connected.
    pub fn new(process: &Process, role: Role, lane: Lane, route: NewRoute) -> Self {
        let path = PathId {
            rail: lane.rail.id,
            peer_gid: route.choice.peer_gid,
        };
        let mtu_bytes = route.choice.mtu_bytes;
        let until = clock::now() + limit(process);
        Self {
            path,
            mtu_bytes,
            role,
            until,
            stage: JoinStage::Asking(Box::new(NewLane { lane, route })),
        }
    }

    /// Continues without blocking.
    pub fn step(mut self, process: &Arc<Process>) -> JoinStep {
        let now = clock::now();
        let left_out = |why: String| JoinStep::LeftOut(NotYet::temporary(why));
        let new = match self.stage {
            JoinStage::Asking(new) => new,
            JoinStage::Connecting(answer) => {
                return match answer.try_recv() {
                    Ok(connected) => connected.step(),
                    Err(TryRecvError::Empty) if now < self.until => {
                        self.stage = JoinStage::Connecting(answer);
                        JoinStep::Waiting(self)
                    }
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                        left_out("the kernel does not connect its queue pairs".to_owned())
                    }
                };
            }
        };
        let need = match self.role {
            Role::Sender => Requirement::Address,
            Role::Receiver => Requirement::Acknowledgement,
        };
        match process
            .backoff
            .ask(self.path, need, self.mtu_bytes, limit(process), now)
        {
            Advice::Use => new.connect(process, self.role, self.path, None).step(),
            Advice::Try(trial) => {
                // The time limit begins again, because this connection may have used it up waiting
                // for the trial of another connection.
                self.until = now + limit(process);
                self.stage = JoinStage::Connecting(new.start(process, self.role, self.path, trial));
                JoinStep::Waiting(self)
            }
            Advice::Wait if now < self.until => {
                self.stage = JoinStage::Asking(new);
                JoinStep::Waiting(self)
            }
            Advice::Wait => {
                left_out("the test of this path by another connection takes too long".to_owned())
            }
            Advice::LeaveOut(why) => left_out(why),
        }
    }
}

impl NewLane {
    fn start(
        self: Box<Self>,
        process: &Arc<Process>,
        role: Role,
        path: PathId,
        trial: Trial,
    ) -> Receiver<ConnectResult> {
        let (answer, answers) = sync_channel(1);
        let process = Arc::clone(process);
        threads::detach("spark-connect", move || {
            // If the connection no longer waits, the lane is dropped here.
            drop(answer.send(self.connect(&process, role, path, Some(trial))));
        });
        answers
    }

    fn connect(
        mut self: Box<Self>,
        process: &Process,
        role: Role,
        path: PathId,
        trial: Option<Trial>,
    ) -> ConnectResult {
        let NewRoute {
            snapshot,
            gid,
            choice: PathChoice {
                peer_gid,
                mtu_bytes,
            },
            ends,
            priority,
        } = &self.route;
        let route = Route {
            snapshot,
            gid: *gid,
            peer_gid: *peer_gid,
            mtu_bytes: *mtu_bytes,
            ends,
            priority: *priority,
        };
        let outcome = self.lane.connect(role, process.config.qp, &route);
        match &trial {
            Some(trial) => trial.connected(outcome.as_ref().err(), clock::now()),
            None => process
                .backoff
                .connected(path, outcome.as_ref().err(), clock::now()),
        }
        // The connecting side only needs the address, so its trial ends here.
        let trial = trial.filter(|_| role == Role::Receiver && outcome.is_ok());
        ConnectResult {
            lane: self.lane,
            trial,
            outcome,
        }
    }
}

impl ConnectResult {
    fn step(self) -> JoinStep {
        match self.outcome {
            Ok(()) => JoinStep::Joined(self.lane, self.trial),
            Err(error) => JoinStep::LeftOut(negotiate::not_yet(&self.lane.rail, &error)),
        }
    }
}

/// Time limit for a trial of a path, and for the wait for another connection's trial. Covers the
/// kernel's search for the address, with time to spare on a busy machine, and the test writes.
fn limit(process: &Process) -> Duration {
    3 * SEARCH + process.config.recovery.probe_timeout
}
