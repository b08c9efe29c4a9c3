//! Runs one step within its time limit.

use super::parts::State;
use crate::{interrupt, lines, proc_stat};
use anyhow::{Context, Result, anyhow};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value as Json;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Ended {
    pub(super) state: State,
    pub(super) exit_status: Option<i32>,
    pub(super) signal: Option<i32>,
    pub(super) seconds: f64,
}

/// Time for a program to end after Ctrl-C. It is longer than the time that `interrupt` gives the
/// program.
const GRACE: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Ended {
    pub(super) fn new(state: State, took: Duration) -> Self {
        Self {
            state,
            exit_status: None,
            signal: None,
            seconds: took.as_secs_f64(),
        }
    }
}

/// Runs `work` on a thread, and abandons the thread at the time limit or at an interrupt.
pub(super) fn read(
    work: impl FnOnce() -> Result<Json> + Send + 'static,
    limit: Duration,
) -> (Ended, Result<Json>) {
    let start = Instant::now();
    let (sender, receiver) = mpsc::channel();
    // Sending fails after the limit, when the receiver is closed.
    std::thread::spawn(move || drop(sender.send(work())));
    loop {
        let state = match receiver.recv_timeout(POLL_INTERVAL) {
            Ok(json) => return (Ended::new(State::Ended, start.elapsed()), json),
            Err(_) if interrupt::status().is_some() => State::Interrupted,
            Err(RecvTimeoutError::Timeout) if start.elapsed() < limit => continue,
            Err(_) => State::OutOfTime,
        };
        return (
            Ended::new(state, start.elapsed()),
            Err(anyhow!("no answer")),
        );
    }
}

/// Runs a program until it ends, its time is up or the report is interrupted. Then ends the
/// remaining processes of its process group, and reads its JSON from the file `json`.
pub(super) fn run(
    program: &Path,
    arguments: &[String],
    json: &Path,
    limit: Duration,
) -> (Ended, Result<Json>) {
    let start = Instant::now();
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // With a process group of its own, the program's child processes can be ended too, and the
    // terminal's Ctrl-C does not reach them.
    let child = match command.process_group(0).spawn() {
        Ok(child) => child,
        Err(error) => {
            return (
                Ended::new(State::NotStarted, Duration::ZERO),
                Err(error.into()),
            );
        }
    };
    let group = child.id();
    let mut children = [child];
    let mut complaint = "no JSON was written".to_owned();
    let is_done = AtomicBool::new(false);
    let statuses = std::thread::scope(|scope| {
        scope.spawn(|| end_group_when_interrupted(group, &is_done));
        let statuses = lines::follow(&mut children, Vec::new(), limit, |_, line| {
            line.strip_prefix("nccl-spark: ")
                .into_iter()
                .for_each(|text| text.clone_into(&mut complaint));
            Ok(())
        });
        is_done.store(true, Ordering::Release);
        statuses
    });
    end_group(group);
    let status = statuses
        .as_ref()
        .ok()
        .and_then(|statuses| statuses.as_ref()?.first().copied());
    let state = match &statuses {
        _ if interrupt::status().is_some() && !status.is_some_and(|status| status.success()) => {
            State::Interrupted
        }
        Ok(None) => State::OutOfTime,
        Ok(Some(_)) | Err(_) => State::Ended,
    };
    let ended = Ended {
        exit_status: status.and_then(|status| status.code()),
        signal: status.and_then(|status| status.signal()),
        ..Ended::new(state, start.elapsed())
    };
    let text = statuses.and_then(|_| fs::read(json).context(complaint));
    (
        ended,
        text.and_then(|text| serde_json::from_slice(&text).context("invalid JSON")),
    )
}

/// Ends the process group after Ctrl-C. `interrupt` ends only the program. Its child processes may
/// keep the output open, and [`run`] waits until the output is closed.
fn end_group_when_interrupted(group: u32, is_done: &AtomicBool) {
    let mut ends_at = None;
    while !is_done.load(Ordering::Acquire) {
        if interrupt::status().is_some() {
            let until = *ends_at.get_or_insert_with(|| Instant::now() + GRACE);
            if Instant::now() > until || !runs(group) {
                return end_group(group);
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns true if the process exists and is no zombie.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    proc_stat::fields(&stat)
        .next()
        .is_some_and(|state| state != "Z")
}

fn end_group(group: u32) {
    // An error means that no process is left.
    let _ = signal::killpg(Pid::from_raw(group as i32), Signal::SIGKILL);
}
