//! In place of the plugin's `comm/recovery/driver.rs`: one that notes what it is told.

use crate::comm::datapath::peer::Peer;
use crate::comm::rail::{Process, Rail};
use crate::error::Error;
use crate::wire::control::ControlFrame;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// What was told to a driver.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// To close.
    pub closed: bool,
    /// How often to look because of news.
    pub news: u32,
    /// That the service thread has a fault.
    pub failed: bool,
    /// Its connection is watched no more.
    pub gone: bool,
}

/// Where a driver notes what it is told, for the model to see.
#[derive(Default)]
pub struct Notes {
    told: Mutex<Told>,
    more: Condvar,
}

impl Notes {
    /// Something was told.
    pub fn note(&self, change: impl FnOnce(&mut Told)) {
        change(&mut self.told.lock().unwrap());
        self.more.notify_all();
    }

    /// What was told, once `enough` says so.
    pub fn once(&self, enough: impl Fn(&Told) -> bool) -> Told {
        let mut told = self.told.lock().unwrap();
        while !enough(&told) {
            told = self.more.wait(told).unwrap();
        }
        *told
    }
}

/// What becomes of a port; no model has one.
#[derive(Clone, Copy)]
pub enum PortChange {
    /// It came up.
    Up,
    /// It went down.
    Down,
    /// Its device was removed.
    Removed,
}

/// A driver whose peer closes as soon as it does.
pub struct Driver {
    process: Arc<Process>,
    peer: Arc<Peer>,
    notes: Arc<Notes>,
}

impl Driver {
    /// One that notes what it is told.
    pub fn new(notes: &Arc<Notes>) -> Self {
        let peer = Arc::new(Peer::new("peer".to_owned()));
        Self { process: Arc::new(Process), peer, notes: Arc::clone(notes) }
    }

    /// The other end.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// The process.
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Nothing is under way.
    pub fn is_busy(&self) -> bool {
        false
    }

    /// All is said.
    pub fn is_waiting(&self) -> bool {
        false
    }

    /// To be closed.
    pub fn close(&mut self) {
        self.peer.said_bye(0);
        self.notes.note(|told| told.closed = true);
    }

    /// No rail returns.
    pub fn begin_round(&self) {}

    /// To look.
    pub fn tend(&mut self, _: Instant, has_news: bool, _: &mut dyn FnMut(ControlFrame) -> bool) {
        if has_news {
            self.notes.note(|told| told.news += 1);
        }
    }

    /// No port changes.
    pub fn port_changed(&mut self, _: &Rail, _: PortChange, _: Instant) {}

    /// No completion queue fails.
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
