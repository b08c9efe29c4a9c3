//! Replaces the plugin's `comm/recovery/driver.rs`: a driver that records the calls it gets.

use crate::comm::datapath::peer::Peer;
use crate::comm::rail::Rail;
use host::error::Error;
use proto::time::Instant;
use proto::wire::control::ControlFrame;
use std::sync::{Arc, Condvar, Mutex};

/// Calls that a driver got.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct DriverCalls {
    /// Number of times that the driver was closed.
    pub closes: u32,
    /// Number of times that the driver ran because of a wake-up.
    pub wakes_handled: u32,
    /// True once the service thread has reported a fault.
    pub failed: bool,
    /// True once the connection is no longer watched.
    pub is_unwatched: bool,
}

/// Record of a driver's calls, which the model reads.
#[derive(Default)]
pub struct CallLog {
    calls: Mutex<DriverCalls>,
    more: Condvar,
}

impl CallLog {
    /// Records a call.
    pub fn record(&self, change: impl FnOnce(&mut DriverCalls)) {
        change(&mut self.calls.lock().unwrap());
        self.more.notify_all();
    }

    /// Waits until `enough` returns true for the recorded calls, and returns these calls.
    pub fn wait_until(&self, enough: impl Fn(&DriverCalls) -> bool) -> DriverCalls {
        let mut calls = self.calls.lock().unwrap();
        while !enough(&calls) {
            calls = self.more.wait(calls).unwrap();
        }
        *calls
    }
}

/// A change of a port. In the models no port changes.
#[derive(Clone, Copy)]
pub enum PortChange {
    /// The port came up.
    Up,
    /// The port went down.
    Down,
    /// The port's device was removed.
    Removed,
}

/// A driver whose peer closes as soon as the driver closes.
pub struct Driver {
    peer: Arc<Peer>,
    log: Arc<CallLog>,
}

impl Driver {
    /// Creates a driver that records its calls in `log`.
    pub fn new(log: &Arc<CallLog>) -> Self {
        let peer = Arc::new(Peer::new("peer".to_owned()));
        Self {
            peer,
            log: Arc::clone(log),
        }
    }

    /// The connection's peer.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Returns 0, because nothing reads it.
    pub fn work(&self) -> u64 {
        0
    }

    /// Returns false, because no work is under way.
    pub fn is_busy(&self) -> bool {
        false
    }

    /// Returns false, because all messages were sent.
    pub fn is_waiting(&self) -> bool {
        false
    }

    /// Closes the connection. Returns true, because no data path is busy.
    pub fn close(
        &mut self,
        _: Instant,
        _: Instant,
        _: &mut dyn FnMut(ControlFrame) -> bool,
    ) -> bool {
        self.peer.said_bye(0);
        self.log.record(|calls| calls.closes += 1);
        true
    }

    /// Returns false, because no connection has queue pairs.
    pub fn is_ending(&self) -> bool {
        false
    }

    /// Does nothing, because no connection has queue pairs.
    pub fn end_when_stopped(&mut self, _: Instant) {}

    /// Returns `None`, because there is no deadline.
    pub fn next_due(&self) -> Option<Instant> {
        None
    }

    /// Runs the driver.
    pub fn poll(&mut self, _: Instant, has_news: bool, _: &mut dyn FnMut(ControlFrame) -> bool) {
        if has_news {
            self.log.record(|calls| calls.wakes_handled += 1);
        }
    }

    /// Does nothing, because no port changes.
    pub fn port_changed(&mut self, _: &Rail, _: PortChange, _: Instant) {}

    /// Does nothing, because no completion queue fails.
    pub fn completions_lost(&mut self, _: usize, _: Instant) {}

    /// Records that the service thread reported a fault. No model may cause such a fault.
    pub fn give_up(&mut self, _: Error) {
        self.log.record(|calls| calls.failed = true);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.log.record(|calls| calls.is_unwatched = true);
        }
    }
}
