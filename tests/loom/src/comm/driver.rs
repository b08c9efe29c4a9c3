//! Replaces the plugin's `comm/recovery/driver.rs`: a driver that records the calls it gets.

use crate::comm::datapath::peer::Peer;
use crate::comm::rail::Rail;
use crate::error::Error;
use crate::wire::control::ControlFrame;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// Calls that a driver got.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// True once the driver was closed.
    pub closed: bool,
    /// Number of runs because of news.
    pub news: u32,
    /// True once the service thread has reported a fault.
    pub failed: bool,
    /// True once the connection is no longer watched.
    pub gone: bool,
}

/// Record of a driver's calls, which the model reads.
#[derive(Default)]
pub struct Notes {
    told: Mutex<Told>,
    more: Condvar,
}

impl Notes {
    /// Records a call.
    pub fn note(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told.lock().unwrap());
        self.more.notify_all();
    }

    /// Waits until `enough` holds, and returns the calls so far.
    pub fn once(&self, enough: impl Fn(&Told) -> bool) -> Told {
        let mut told = self.told.lock().unwrap();
        while !enough(&told) {
            told = self.more.wait(told).unwrap();
        }
        *told
    }
}

/// A change of a port; no model has one.
#[derive(Clone, Copy)]
pub enum PortChange {
    /// The port came up.
    Up,
    /// The port went down.
    Down,
    /// The port's device was removed.
    Removed,
}

/// A driver whose peer closes as soon as it does.
pub struct Driver {
    peer: Arc<Peer>,
    notes: Arc<Notes>,
}

impl Driver {
    /// Creates a driver that records its calls in `notes`.
    pub fn new(notes: &Arc<Notes>) -> Self {
        let peer = Arc::new(Peer::new("peer".to_owned()));
        Self { peer, notes: Arc::clone(notes) }
    }

    /// The connection's peer.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Returns false, because no work is under way.
    pub fn is_busy(&self) -> bool {
        false
    }

    /// Returns false, because all messages were sent.
    pub fn is_waiting(&self) -> bool {
        false
    }

    /// Closes the connection.
    pub fn close(&mut self) {
        self.peer.said_bye(0);
        self.notes.note(|told| told.closed = true);
    }

    /// Returns `None`, because there is no deadline.
    pub fn next_due(&self) -> Option<Instant> {
        None
    }

    /// Runs the driver.
    pub fn poll(&mut self, _: Instant, has_news: bool, _: &mut dyn FnMut(ControlFrame) -> bool) {
        if has_news {
            self.notes.note(|told| told.news += 1);
        }
    }

    /// Does nothing, because no port changes.
    pub fn port_changed(&mut self, _: &Rail, _: PortChange, _: Instant) {}

    /// Does nothing, because no completion queue fails.
    pub fn completions_lost(&mut self, _: usize, _: Instant) {}

    /// A fault of the service thread, which no model has.
    pub fn give_up(&mut self, _: Error) {
        self.notes.note(|told| told.failed = true);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.notes.note(|told| told.gone = true);
        }
    }
}
