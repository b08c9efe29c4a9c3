//! The activity of this rank: what it does now, and a count of its completed work. The rank reports
//! both to the command that leads the run. The reports distinguish a slow rank from a hung one, and
//! name the plugin's function that does not return.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Names of the plugin's functions, as in NCCL. The functions of the data path come first: they are
/// called most often, and [`enter`] searches from the front.
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

/// Count of completed work.
static TICKS: AtomicU64 = AtomicU64::new(0);
/// The last call of the plugin. The upper 56 bits count the calls so far. The low 8 bits are 1 +
/// the index of the called function in [`FUNCTIONS`], or 0 between calls.
static CALL: AtomicU64 = AtomicU64::new(0);
/// Number of messages of the stage's last collective, or 0 if the stage has had none.
static MESSAGES: AtomicU64 = AtomicU64::new(0);
/// Value of [`TICKS`] at the start of the stage's last collective.
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

/// Notes the start of a collective of `messages` messages. The caller must call [`tick`] once for
/// each message that is done.
pub fn start_messages(messages: usize) {
    TICKS_BEFORE.store(TICKS.load(Relaxed), Relaxed);
    MESSAGES.store(messages as u64, Relaxed);
}

/// Notes that the rank calls `function` of the plugin. Only the rank's one working thread may call
/// this function, because the update is not atomic.
pub(crate) fn enter(function: &'static str) {
    let index = FUNCTIONS
        .iter()
        .position(|name| *name == function)
        .map_or(0, |at| at as u64 + 1);
    CALL.store(((CALL.load(Relaxed) >> 8) + 1) << 8 | index, Relaxed);
}

/// Notes that the plugin's function has returned.
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
        let ticks = TICKS.load(Relaxed);
        let messages = MESSAGES.load(Relaxed);
        if messages > 0 {
            let done = ticks.wrapping_sub(TICKS_BEFORE.load(Relaxed)).min(messages);
            doing += &format!(", {done} of {messages} messages done");
        }
        let function = (call & 0xff)
            .checked_sub(1)
            .and_then(|index| FUNCTIONS.get(index as usize));
        if let Some(name) = function.filter(|_| stuck) {
            doing += &format!(", inside {name}");
        }
        (ticks, doing)
    }
}
