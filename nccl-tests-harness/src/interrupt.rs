//! Ctrl-C and other signals that ask the program to end. The program reports the signal, ends its
//! child processes, and removes its files.
//!
//! A thread ends the child processes. The main thread then fails, as it does whenever a rank dies,
//! and cleans up. If the main thread does not end in time, the other thread cleans up and exits. A
//! command that still has something to write asks for more time
//! ([`leave_the_end_to_the_main_thread`]).
//!
//! `signal-hook` sets the handlers, because setting them here would need `unsafe`. Blocking the
//! signals in place of handling them is no solution, because every child would inherit the mask.

use crate::{output, proc_stat};
use anyhow::{Context, Result};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::collections::HashSet;
use std::fs;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Time for a child process to end before it is killed.
const GRACE: Duration = Duration::from_secs(3);
/// Time for the main thread to clean up once no child process is left.
const CLEAN_UP: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Number of the received signal, or 0. The handler sets it before a thread sees a rank die by the
/// same Ctrl-C.
static RECEIVED: OnceLock<Arc<AtomicUsize>> = OnceLock::new();
/// Seconds that the main thread asked for ([`leave_the_end_to_the_main_thread`]). 0 if it did not
/// ask.
static WANTED_S: AtomicU64 = AtomicU64::new(0);
/// Additional time for child processes if the main thread asked for time: a child may run this
/// program too, and give its own children [`GRACE`].
const NESTED_GRACE: Duration = Duration::from_secs(5);
/// True if signals are only noted ([`note`]).
static IS_QUIET: AtomicBool = AtomicBool::new(false);
static FOLDERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Makes SIGINT, SIGTERM and SIGHUP end the program in order. Signals that the program was started
/// to ignore stay ignored.
pub fn watch() -> Result<()> {
    let wanted = wanted();
    let received = RECEIVED.get_or_init(Arc::default);
    let install = || -> std::io::Result<Signals> {
        for number in &wanted {
            flag::register_usize(*number, Arc::clone(received), *number as usize)?;
        }
        Signals::new(&wanted)
    };
    let mut signals = install().context("install signal handlers")?;
    std::thread::spawn(move || {
        if let Some(number) = signals.forever().next() {
            end(number);
        }
    });
    Ok(())
}

/// Only notes SIGINT, SIGTERM and SIGHUP, for a command that starts no process and often reads
/// [`status`]. A second signal ends the program immediately, because the command may wait for a
/// reader of its output.
pub fn note() -> Result<()> {
    let received = RECEIVED.get_or_init(Arc::default);
    IS_QUIET.store(true, Ordering::Release);
    let is_second = Arc::new(AtomicBool::new(false));
    let install = || -> std::io::Result<()> {
        for number in wanted() {
            flag::register_conditional_shutdown(number, 128 + number, Arc::clone(&is_second))?;
            flag::register(number, Arc::clone(&is_second))?;
            flag::register_usize(number, Arc::clone(received), number as usize)?;
        }
        Ok(())
    };
    install().context("install signal handlers")
}

/// Returns the exit status after a signal as shells show it: 128 plus the signal's number. Prints
/// one message, unless the signals are only noted. Returns `None` before a signal.
pub fn status() -> Option<u8> {
    let number = RECEIVED.get()?.load(Ordering::Acquire) as i32;
    (number != 0).then(|| {
        if !IS_QUIET.load(Ordering::Acquire) {
            announce(number);
        }
        128 + number as u8
    })
}

/// Gives the main thread up to `limit` (in whole seconds) to end after the child processes have
/// ended.
pub fn leave_the_end_to_the_main_thread(limit: Duration) {
    WANTED_S.store(limit.as_secs(), Ordering::Release);
}

/// Returns the signals to handle: all three, except those that this program was started to ignore.
fn wanted() -> Vec<i32> {
    let ignored = fs::read_to_string("/proc/self/status").map_or(0, |status| ignored(&status));
    [SIGINT, SIGTERM, SIGHUP]
        .into_iter()
        .filter(|number| ignored >> (number - 1) & 1 == 0)
        .collect()
}

/// Makes a signal delete this folder if the main thread does not do it in time.
pub fn remove_at_exit(folder: &Path) {
    folders(|all| all.push(folder.to_owned()));
}

/// Removes a deleted folder from the list of [`remove_at_exit`].
pub fn keep_at_exit(folder: &Path) {
    folders(|all| all.retain(|other| other != folder));
}

fn folders<T>(use_them: impl FnOnce(&mut Vec<PathBuf>) -> T) -> T {
    use_them(&mut FOLDERS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn announce(number: i32) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let name = Signal::try_from(number).map_or("a signal", Signal::as_str);
        // A progress bar may be on the terminal's line.
        let clear = if std::io::stderr().is_terminal() {
            "\r\x1b[2K"
        } else {
            ""
        };
        // There is nowhere to report this error.
        let _ = writeln!(
            output::error(),
            "{clear}nccl-spark: interrupted by {name}: stopping the ranks"
        );
    });
}

fn end(number: i32) {
    announce(number);
    let start = Instant::now();
    let (grace, clean_up) = match WANTED_S.load(Ordering::Acquire) {
        0 => (GRACE, CLEAN_UP),
        wanted_s => (GRACE + NESTED_GRACE, Duration::from_secs(wanted_s)),
    };
    let mut asked = HashSet::new();
    let mut alone_since = start;
    while alone_since.elapsed() < clean_up && start.elapsed() < grace + clean_up {
        // Also ends processes that start only now: a command may retry after a rank died.
        for child in children() {
            alone_since = Instant::now();
            // The process may have ended meanwhile, so errors are ignored.
            if start.elapsed() > grace {
                let _ = signal::kill(child, Signal::SIGKILL);
            } else if asked.insert(child) {
                let _ = signal::kill(child, Signal::SIGTERM);
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    for folder in folders(std::mem::take) {
        // There is nowhere to report this error.
        let _ = fs::remove_dir_all(folder);
    }
    std::process::exit(128 + number);
}

fn children() -> Vec<Pid> {
    let own = std::process::id();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_child = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| running_parent(&stat) == Some(own))
    };
    pids.filter(is_child).map(Pid::from_raw).collect()
}

/// Returns the parent's PID from the text of a process's `stat`, or `None` if the process has
/// ended.
fn running_parent(stat: &str) -> Option<u32> {
    let mut fields = proc_stat::fields(stat);
    if fields.next()? == "Z" {
        None
    } else {
        fields.next()?.parse().ok()
    }
}

/// Returns a bit mask of the ignored signals from the text of a process's `status`. The lowest bit
/// is signal 1. Shells and nohup start jobs with some signals ignored.
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_childs_parent_and_the_ignored_signals_are_read() {
        assert_eq!(running_parent("7 (a) b) S 42 7 7 0"), Some(42));
        assert_eq!(running_parent("7 (a) Z 42 7 7 0"), None);
        let ignored = ignored("Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001006\n");
        assert_eq!(
            (ignored >> (SIGINT - 1) & 1, ignored >> (SIGTERM - 1) & 1),
            (1, 0)
        );
        assert_eq!(super::ignored("Name:\tx\n"), 0);
    }

    #[test]
    fn children_are_found_until_they_end() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(child.id() as i32);
        assert!(children().contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!children().contains(&pid));
    }
}
