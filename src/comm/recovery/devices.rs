//! This host's devices, as seen by the service thread: their events, and the steps of their state
//! machines ([`proto::device`]).
//!
//! A round of the service thread never waits for a device. A short-lived thread opens a returning
//! device and registers all memory in use with it.

use crate::comm::process::Process;
use crate::comm::rail::Rail;
use crate::comm::threads;
use proto::device::{Event, PortChange, Presence};
use proto::time::Instant;
use std::sync::Arc;
use verbs::{AsyncEvent, Pd};

/// The devices of all rails. Empty until the first round.
#[derive(Default)]
pub struct Devices(Vec<Arc<Rail>>);

/// A change of a device, for all connections.
pub enum DeviceChange {
    /// A port of this host went down or came back, or its device was removed.
    Port(Arc<Rail>, PortChange),
    /// The completion queue with this number is in error.
    CompletionsLost(usize),
}

impl Devices {
    /// Processes events and answers, and sends the queries that are due.
    pub fn round(&mut self, process: &Arc<Process>, now: Instant) -> Vec<DeviceChange> {
        if self.0.is_empty() {
            self.0.clone_from(&process.rails);
            self.0.iter().for_each(|rail| rail.device.watch_anew());
        }
        let mut changes = Vec::new();
        self.read_events(&mut changes);
        for rail in &self.0 {
            let tell = |change| changes.push(DeviceChange::Port(Arc::clone(rail), change));
            let bring_back = |how| {
                let process = Arc::clone(process);
                let rail = Arc::clone(rail);
                threads::detach("spark-device", move || {
                    // The device's machine has the result too.
                    process.bring_back(&rail, how, now);
                });
            };
            rail.device.round(rail.info.port, now, tell, bring_back);
        }
        changes
    }

    /// Returns true while a query to a present device is unanswered: the answer should arrive soon.
    pub fn is_busy(&self) -> bool {
        self.0.iter().any(|rail| rail.device.is_asked())
    }

    /// Returns the event sources to poll. Leaves out devices that were cut off: their sources are
    /// always readable, and each round reads their events anyway.
    pub fn event_sources(&self) -> Vec<Arc<Pd>> {
        let here = self
            .one_of_each()
            .filter(|rail| rail.device.presence() == Presence::Here);
        here.filter_map(|rail| rail.device.source_of_events())
            .collect()
    }

    fn one_of_each(&self) -> impl Iterator<Item = &Arc<Rail>> {
        let is_first = |at: &usize| {
            let device = &self.0[*at].info.device;
            self.0[..*at]
                .iter()
                .all(|other| other.info.device != *device)
        };
        (0..self.0.len()).filter(is_first).map(|at| &self.0[at])
    }

    fn read_events(&self, changes: &mut Vec<DeviceChange>) {
        for rail in self.one_of_each() {
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

    fn record_event(&self, device: &str, event: &AsyncEvent, changes: &mut Vec<DeviceChange>) {
        tracing::debug!("{device}: {}", event.text());
        changes.extend(event.cq.map(DeviceChange::CompletionsLost));
        let kind = match event.kind {
            AsyncEvent::PORT_ACTIVE => Event::PortActive,
            AsyncEvent::GID_CHANGE => Event::GidChange,
            AsyncEvent::PORT_ERROR => Event::PortError,
            AsyncEvent::DEVICE_FATAL => Event::DeviceFatal,
            _ => return,
        };
        let is_about = |rail: &&Arc<Rail>| {
            rail.info.device == device && event.port.is_none_or(|port| port == rail.info.port)
        };
        for rail in self.0.iter().filter(is_about) {
            rail.device.event(kind);
        }
    }
}
