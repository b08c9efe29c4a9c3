//! This host's devices, as seen by the service thread: events, queries, and returning devices.
//!
//! A round of the service thread never waits for a device: it processes the answers that have
//! arrived. [`crate::comm::rail::device`] handles a device that never answers. An event does not
//! show the port's current state, so a query sent after the event decides. A short-lived thread
//! opens a returning device and registers all memory in use with it.

use super::driver::PortChange;
use crate::comm::process::Process;
use crate::comm::rail::Rail;
use crate::comm::rail::device::DevicePresence;
use crate::comm::threads;
use host::error::Result;
use host::port::{PortInfo, PortState};
use proto::time::Instant;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use verbs::{AsyncEvent, Pd};

/// The devices of all rails. Empty until the first round.
#[derive(Default)]
pub struct Devices(Vec<Watch>);

/// A change of a device, for all connections.
pub enum DeviceChange {
    /// A port of this host went down or came back, or its device was removed.
    Port(Arc<Rail>, PortChange),
    /// The completion queue with this number is in error.
    CompletionsLost(usize),
}

struct Watch {
    rail: Arc<Rail>,
    was_there: bool,
    events: Events,
    /// The pending query of the port, and the events that its answer will settle.
    pending_query: Option<(Events, Receiver<Result<PortInfo>>)>,
    returning: Option<Receiver<bool>>,
}

/// Events of a port since its last query. The state that they report may be out of date.
#[derive(Clone, Copy, Default)]
struct Events {
    port_error: bool,
    device_fatal: bool,
}

impl Devices {
    /// Processes events and answers, and sends the queries that are due.
    pub fn round(&mut self, process: &Arc<Process>, now: Instant) -> Vec<DeviceChange> {
        if self.0.is_empty() {
            self.0 = process.rails.iter().map(Watch::new).collect();
        }
        let mut changes = Vec::new();
        self.read_events(&mut changes);
        for watch in &mut self.0 {
            let change = watch
                .poll_device(now)
                .or_else(|| watch.poll_reopen(process, now));
            changes
                .extend(change.map(|change| DeviceChange::Port(Arc::clone(&watch.rail), change)));
        }
        changes
    }

    /// Returns true while a query to a present device is unanswered: the answer should arrive soon.
    pub fn is_busy(&self) -> bool {
        self.0
            .iter()
            .any(|watch| watch.pending_query.is_some() && watch.was_there)
    }

    /// Returns the event sources to poll. Leaves out devices that were cut off: their sources are
    /// always readable, and each round reads their events anyway.
    pub fn event_sources(&self) -> Vec<Arc<Pd>> {
        let here = self
            .one_of_each()
            .filter(|rail| rail.device.presence() == DevicePresence::Here);
        here.filter_map(|rail| rail.device.source_of_events())
            .collect()
    }

    fn one_of_each(&self) -> impl Iterator<Item = &Arc<Rail>> {
        let is_first = |at: &usize| {
            let device = &self.0[*at].rail.info.device;
            self.0[..*at]
                .iter()
                .all(|other| other.rail.info.device != *device)
        };
        (0..self.0.len())
            .filter(is_first)
            .map(|at| &self.0[at].rail)
    }

    fn read_events(&mut self, changes: &mut Vec<DeviceChange>) {
        let sources: Vec<Arc<Rail>> = self.one_of_each().cloned().collect();
        for rail in sources {
            let Some(pd) = rail.device.source_of_events() else {
                continue;
            };
            loop {
                match pd.context().async_event() {
                    Ok(Some(event)) => self.record_event(&rail.info.device, &event, changes),
                    Ok(None) => break,
                    Err(error) => {
                        tracing::debug!("{error}");
                        break;
                    }
                }
            }
        }
    }

    fn record_event(&mut self, device: &str, event: &AsyncEvent, changes: &mut Vec<DeviceChange>) {
        tracing::debug!("{device}: {}", event.text());
        changes.extend(event.cq.map(DeviceChange::CompletionsLost));
        let is_about = |watch: &&mut Watch| {
            watch.rail.info.device == device
                && event.port.is_none_or(|port| port == watch.rail.info.port)
        };
        for watch in self.0.iter_mut().filter(is_about) {
            match event.kind {
                AsyncEvent::PORT_ACTIVE | AsyncEvent::GID_CHANGE => {
                    changes.push(DeviceChange::Port(Arc::clone(&watch.rail), PortChange::Up));
                }
                AsyncEvent::PORT_ERROR => watch.events.port_error = true,
                AsyncEvent::DEVICE_FATAL => {
                    watch.rail.device.fatal();
                    watch.events.device_fatal = true;
                }
                _ => {}
            }
        }
    }
}

impl Watch {
    fn new(rail: &Arc<Rail>) -> Self {
        let was_there = rail.device.presence() == DevicePresence::Here;
        let (events, pending_query, returning) = Default::default();
        Self {
            rail: Arc::clone(rail),
            was_there,
            events,
            pending_query,
            returning,
        }
    }

    fn poll_device(&mut self, now: Instant) -> Option<PortChange> {
        let device = &self.rail.device;
        device.check_patience(now);
        let settled =
            self.pending_query
                .as_ref()
                .and_then(|(events, answer)| match answer.try_recv() {
                    Ok(port) => Some(events.settle(port.ok().map(|port| port.state))),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => Some(events.settle(None)),
                });
        if settled.is_some() {
            self.pending_query = None;
        }
        let is_there = device.presence() == DevicePresence::Here;
        let went = !is_there && (self.was_there || self.events.device_fatal);
        self.was_there = is_there;
        if went {
            self.events = Events::default();
            return Some(PortChange::Removed);
        }
        if self.pending_query.is_none() && (self.events.any() || device.is_due(now)) {
            let answer = device.ask(self.rail.info.port, now);
            self.pending_query = answer.map(|answer| (std::mem::take(&mut self.events), answer));
        }
        settled.flatten()
    }

    /// Starts a thread that brings a removed or silent device back into use, if that is due.
    /// Returns [`PortChange::Up`] once such a thread has succeeded.
    fn poll_reopen(&mut self, process: &Arc<Process>, now: Instant) -> Option<PortChange> {
        if let Some(returning) = &self.returning {
            let is_back = match returning.try_recv() {
                Err(TryRecvError::Empty) => return None,
                back => back == Ok(true),
            };
            self.returning = None;
            return is_back.then_some(PortChange::Up);
        }
        if self.rail.device.is_return_due(now) {
            let (tell, returning) = sync_channel(1);
            let process = Arc::clone(process);
            let rail = Arc::clone(&self.rail);
            threads::detach("spark-device", move || {
                // Fails if the service thread has ended. The device's own state has the result too.
                let _ = tell.send(process.look_for_return(&rail, now));
            });
            self.returning = Some(returning);
        }
        None
    }
}

impl Events {
    fn any(self) -> bool {
        self.port_error || self.device_fatal
    }

    /// Returns the change shown by the events and by a query that was sent after them. After a
    /// refused query (`None`), the events alone decide.
    fn settle(self, port: Option<PortState>) -> Option<PortChange> {
        let is_down = match port {
            Some(state) => state != PortState::Active,
            None => self.port_error,
        };
        // A device whose firmware has failed has lost its queue pairs, even if it works again.
        (self.device_fatal || is_down).then_some(PortChange::Down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_control_message_alone_loses_no_rail() {
        let [none, port_error, device_fatal] =
            [(false, false), (true, false), (false, true)].map(|(port_error, device_fatal)| {
                Events {
                    port_error,
                    device_fatal,
                }
            });
        let down = Some(PortChange::Down);
        assert_eq!(
            [none, port_error, device_fatal].map(|events| events.settle(None)),
            [None, down, down]
        );
        let active = Some(PortState::Active);
        assert_eq!(
            [none, port_error, device_fatal].map(|events| events.settle(active)),
            [None, None, down]
        );
        assert_eq!(
            [none, port_error].map(|events| events.settle(Some(PortState::Down))),
            [down, down]
        );
    }
}
