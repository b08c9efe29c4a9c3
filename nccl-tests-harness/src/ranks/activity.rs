//! The activity of this rank, for its reports to the command. The reports distinguish a slow rank
//! from a hung one, and name the plugin's function that does not return.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Names of the plugin's functions, as in NCCL. Those of the data path come first, because
/// [`enter`] searches in order.
const FUNCTIONS: [&str; 15] = [
    "test",
    "isend",
    "irecv",
    "init",
    "devices",
    "getProperties",
    "listen",
    "connect",
    "accept",
    "regMr",
    "deregMr",
    "closeSend",
    "closeRecv",
    "closeListen",
    "finalize",
];

static TICKS: AtomicU64 = AtomicU64::new(0);
/// Number of the call, shifted left by 8 bits. The low 8 bits are 1 + the index of the function, or
/// 0 between calls.
static CALL: AtomicU64 = AtomicU64::new(0);
/// Number of messages of the current collective, or 0.
static MESSAGES: AtomicU64 = AtomicU64::new(0);
/// Ticks at the start of the current collective.
static TICKS_BEFORE: AtomicU64 = AtomicU64::new(0);
static STAGE: Mutex<String> = Mutex::new(String::new());

/// Notes progress: the rank is not hung.
pub fn tick() {
    TICKS.store(TICKS.load(Relaxed).wrapping_add(1), Relaxed);
}

/// Sets the rank's stage until the next call of this function.
pub fn stage(text: impl Into<String>) {
    *STAGE.lock().unwrap_or_else(PoisonError::into_inner) = text.into();
    MESSAGES.store(0, Relaxed);
    tick();
}

/// Notes the start of a collective of `messages` messages. Each message ticks when it is done.
pub fn start_messages(messages: usize) {
    TICKS_BEFORE.store(TICKS.load(Relaxed), Relaxed);
    MESSAGES.store(messages as u64, Relaxed);
}

/// Notes that the rank's only working thread calls a function of the plugin.
pub(crate) fn enter(function: &'static str) {
    let index = FUNCTIONS.iter().position(|name| *name == function).map_or(0, |at| at as u64 + 1);
    CALL.store(((CALL.load(Relaxed) >> 8) + 1) << 8 | index, Relaxed);
}

/// Notes that the function has returned.
pub fn leave() {
    CALL.store(CALL.load(Relaxed) & !0xff, Relaxed);
}

#[derive(Debug, Default)]
pub(crate) struct Observer {
    last_call: u64,
}

impl Observer {
    /// Returns the ticks (a count of completed work) and the rank's activity. The activity names a
    /// function of the plugin only if the same call was already running at the previous look.
    pub fn look(&mut self) -> (u64, String) {
        let call = CALL.load(Relaxed);
        let stuck = call == self.last_call;
        self.last_call = call;
        let mut doing = STAGE.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (ticks, messages) = (TICKS.load(Relaxed), MESSAGES.load(Relaxed));
        if messages > 0 {
            let done = ticks.wrapping_sub(TICKS_BEFORE.load(Relaxed)).min(messages);
            doing += &format!(", {done} of {messages} messages done");
        }
        let function = (call & 0xff).checked_sub(1).and_then(|index| FUNCTIONS.get(index as usize));
        if let Some(name) = function.filter(|_| stuck) {
            doing += &format!(", inside {name}");
        }
        (ticks, doing)
    }
}
