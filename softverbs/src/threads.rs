//! The threads that drive a process's engines while it does not poll.

use crate::engine::{ASLEEP, NAPPING};
use crate::fabric::Node;
use crate::os::process::{block_signals, sleep_while};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Time after its last poll for which a process counts as polling, because another poll is likely.
const RECENTLY_NS: u64 = 2_000_000;
/// Longest sleep while the process polls.
const SHORT_NAP: Duration = Duration::from_micros(50);
/// Longest sleep while there are queue pairs and the process does not poll. It bounds how late a
/// missed doorbell is noticed.
const NAP: Duration = Duration::from_millis(1);
/// Longest sleep while there are no queue pairs.
const REST: Duration = Duration::from_millis(100);
/// Work that is due within this time is awaited without sleeping.
const SPIN_NS: u64 = 20_000;

/// Starts the threads, unless they run already or time is virtual. They run as long as `node`
/// exists.
pub(crate) fn start(node: &Arc<Node>) {
    if !node.claim_threads() {
        return;
    }
    for index in 0..node.threads() {
        let weak = Arc::downgrade(node);
        let thread = std::thread::Builder::new().name(format!("softverbs-{index}"));
        if let Err(error) = thread.spawn(move || run(&weak, index)) {
            // Polling still drives the engines. Without the thread, only requests to a process that
            // does not poll have to wait.
            eprintln!("softverbs: no engine thread: {error}");
        }
    }
}

fn run(node: &Weak<Node>, index: usize) {
    block_signals();
    while let Some(node) = node.upgrade() {
        let now = node.memory.now_ns();
        let mut soonest: Option<u64> = None;
        for device in (index..node.devices().len()).step_by(node.threads()) {
            let due = node.run_engine(device, now);
            soonest = [soonest, due].into_iter().flatten().min();
        }
        if index == 0 {
            node.watch_ports();
            for qp in node.all_qps() {
                qp.collect_sends(now);
            }
        }
        rest(&node, index, soonest);
    }
}

fn rest(node: &Node, index: usize, soonest: Option<u64>) {
    let now = node.memory.now_ns();
    let ahead = soonest.map(|due| due.saturating_sub(now));
    let process = node.process();
    let polls = now.saturating_sub(process.polled_ns.load(Ordering::Relaxed)) < RECENTLY_NS;
    if ahead.is_some_and(|ns| ns <= SPIN_NS) || (polls && node.has_processors_to_spare()) {
        std::thread::yield_now();
        return;
    }
    let (depth, longest) = match (polls, node.has_qps()) {
        // Peers do not wake a process that polls. The sleep is short in case the process stops
        // polling.
        (true, _) => (NAPPING, SHORT_NAP),
        (false, true) => (ASLEEP, NAP),
        (false, false) => (ASLEEP, REST),
    };
    // This thread does not reset the mark when it wakes up, because another thread of this process
    // may still sleep with that mark. Only `engine::ring`, which wakes the threads, resets the
    // mark.
    let mark = process
        .sleeping
        .fetch_max(depth, Ordering::SeqCst)
        .max(depth);
    let mut mine = (index..node.devices().len()).step_by(node.threads());
    if mine.any(|device| process.rung[device].load(Ordering::SeqCst) != 0) {
        return;
    }
    sleep_while(
        &process.sleeping,
        mark,
        ahead.map_or(longest, |ns| longest.min(Duration::from_nanos(ns))),
    );
}
