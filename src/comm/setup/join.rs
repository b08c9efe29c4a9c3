//! Connects the queue pairs of a new connection by paths that may be dead, without a wait.
//!
//! What this process knows of a path ([`crate::comm::rail::backoff`]) decides: a path known as dead is left out at once; one that worked
//! a moment ago is connected here; one of which nothing is known is tried by one connection, whose queue pairs a thread of its own connects,
//! because the kernel may look for the peer's address for a second; the others wait for what comes of it. Each wait has a limit, and a
//! connection that is dropped takes its claim on the path with it. The thread ends with the kernel's answer, whether anybody waits for that
//! or not.

use crate::comm::datapath::lane::{Lane, Role, Route};
use crate::comm::process::Process;
use crate::comm::rail::Look;
use crate::comm::rail::backoff::{Advice, Need, PathId, SEARCH, Trial};
use crate::error::Result;
use crate::wire::fields::QpEnd;
use nix::sys::signal::SigSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

/// How the two ends of a new lane find each other: a [`Route`] that lasts.
pub struct NewRoute {
    /// This side's rail, as it was just looked at.
    pub look: Look,
    /// This side's address.
    pub gid: [u8; 16],
    /// The peer's address.
    pub peer_gid: [u8; 16],
    /// Path MTU.
    pub mtu_bytes: u32,
    /// The peer's queue pairs.
    pub ends: Vec<QpEnd>,
    /// NCCL's traffic class for this connection, if the job set one.
    pub traffic_class: Option<u8>,
}

/// A lane whose queue pairs are being connected.
pub struct Joining {
    path: PathId,
    role: Role,
    /// It is given up then.
    until: Instant,
    stage: Stage,
}

enum Stage {
    /// It has to ask whether it may. One that has no other path left is not put off by what was found before it came; what comes of a
    /// trial that it has waited for is news, and counts.
    Asking { new: Box<New>, is_last: bool, has_waited: bool },
    /// A thread connects it.
    Connecting(Receiver<Connected>),
}

/// A lane, not connected.
struct New {
    lane: Lane,
    route: NewRoute,
}

struct Connected {
    lane: Lane,
    trial: Option<Trial>,
    outcome: Result<()>,
}

/// How far it has come.
pub enum Step {
    /// Call again.
    Waiting(Joining),
    /// The queue pairs are connected. An accepting side that has the right to try the path keeps it until its test writes are over.
    Joined(Lane, Option<Trial>),
    /// The rail is not used, for this reason.
    LeftOut(String),
}

/// The path of a new lane.
pub fn path(lane: &Lane, peer_gid: [u8; 16]) -> PathId {
    PathId { rail: lane.rail.id, peer_gid }
}

impl Joining {
    /// Begins with a lane. `is_last`: every other path of the connection is known as dead, and so is this one.
    pub fn new(process: &Process, role: Role, lane: Lane, route: NewRoute, is_last: bool) -> Self {
        let path = path(&lane, route.peer_gid);
        let until = Instant::now() + limit(process);
        Self {
            path,
            role,
            until,
            stage: Stage::Asking { new: Box::new(New { lane, route }), is_last, has_waited: false },
        }
    }

    /// Goes as far as it can.
    pub fn step(mut self, process: &Arc<Process>) -> Step {
        let now = Instant::now();
        let (new, is_last, has_waited) = match self.stage {
            Stage::Asking { new, is_last, has_waited } => (new, is_last, has_waited),
            Stage::Connecting(answer) => {
                return match answer.try_recv() {
                    Ok(connected) => connected.step(),
                    Err(TryRecvError::Empty) if now < self.until => {
                        self.stage = Stage::Connecting(answer);
                        Step::Waiting(self)
                    }
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => {
                        Step::LeftOut("the kernel does not connect its queue pairs".to_owned())
                    }
                };
            }
        };
        let need = match self.role {
            Role::Sender => Need::Address,
            Role::Receiver => Need::Acknowledgement,
        };
        let is_put_off = !is_last || has_waited && !process.backoff.is_tried(self.path, now);
        match process.backoff.ask(self.path, need, !is_put_off, limit(process), now) {
            Advice::Use => new.connect(process, self.role, self.path, None).step(),
            Advice::Try(trial) => {
                // It may have waited for another one's.
                self.until = now + limit(process);
                self.stage = Stage::Connecting(new.start(process, self.role, self.path, trial));
                Step::Waiting(self)
            }
            Advice::Wait if now < self.until => {
                self.stage = Stage::Asking { new, is_last, has_waited: true };
                Step::Waiting(self)
            }
            Advice::Wait => Step::LeftOut("the test of this path by another connection takes too long".to_owned()),
            Advice::LeaveOut(why) => Step::LeftOut(why),
        }
    }
}

impl New {
    /// Connects it on a thread of its own.
    fn start(self: Box<Self>, process: &Arc<Process>, role: Role, path: PathId, trial: Trial) -> Receiver<Connected> {
        let (answer, answers) = sync_channel(1);
        let (work, task) = sync_channel::<(Box<Self>, Trial)>(1);
        let (theirs, sender) = (Arc::clone(process), answer.clone());
        let connect = move || {
            // The application's signals are for the application's threads.
            if let Err(error) = SigSet::all().thread_block() {
                tracing::debug!("cannot block signals on a thread that connects queue pairs: {error}");
            }
            if let Ok((new, trial)) = task.recv() {
                // If nobody waits any more, all of it goes here.
                drop(sender.send(new.connect(&theirs, role, path, Some(trial))));
            }
        };
        // The work is handed over only to a thread that is there.
        if let Err(error) = std::thread::Builder::new().name("spark-connect".to_owned()).spawn(connect) {
            tracing::debug!("no thread for connecting queue pairs, which may block for a second now: {error}");
            drop(answer.send(self.connect(process, role, path, Some(trial))));
        } else {
            drop(work.send((self, trial)));
        }
        answers
    }

    fn connect(mut self: Box<Self>, process: &Process, role: Role, path: PathId, trial: Option<Trial>) -> Connected {
        let NewRoute { look, gid, peer_gid, mtu_bytes, ends, traffic_class } = &self.route;
        let route =
            Route { look, gid: *gid, peer_gid: *peer_gid, mtu_bytes: *mtu_bytes, ends, traffic_class: *traffic_class };
        let outcome = self.lane.connect(role, &process.config, &route);
        match &trial {
            Some(trial) => trial.connected(&outcome, Instant::now()),
            None => process.backoff.connected(path, &outcome, Instant::now()),
        }
        // The connecting side wanted to know no more.
        let trial = trial.filter(|_| role == Role::Receiver && outcome.is_ok());
        Connected { lane: self.lane, trial, outcome }
    }
}

impl Connected {
    fn step(self) -> Step {
        match self.outcome {
            Ok(()) => Step::Joined(self.lane, self.trial),
            Err(error) => Step::LeftOut(error.to_string()),
        }
    }
}

/// How long a trial of a path may take, and a connection wait for one: the kernel's search for the address, with room for a busy machine,
/// and the test writes.
fn limit(process: &Process) -> Duration {
    3 * SEARCH + process.config.probe_timeout
}
