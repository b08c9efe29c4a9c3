//! Runs one part within its limit, and says how it ended.

use crate::{interrupt, lines, proc_stat};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How a part ended, and what it printed.
pub(super) struct Done {
    pub(super) fate: Fate,
    pub(super) took: Duration,
    /// Standard output and error, as they came.
    pub(super) output: String,
}

/// How a part ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    Good,
    /// It ended with another exit status than 0, or by a signal.
    Failed(String),
    /// It did not end in time.
    TimedOut(Duration),
    Interrupted,
    NotRun(String),
}

/// How long a part may take to end after Ctrl-C: longer than `interrupt` gives it.
const GRACE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);
/// More of a part's output is left out.
const MOST_BYTES: usize = 512 << 10;

impl Done {
    pub(super) fn not_run(why: String) -> Self {
        Self { fate: Fate::NotRun(why), took: Duration::ZERO, output: String::new() }
    }

    /// How it ended, in one word or two.
    pub(super) fn result(&self) -> String {
        match &self.fate {
            Fate::Good => "exit status 0".to_owned(),
            Fate::Failed(how) => how.clone(),
            Fate::TimedOut(_) => "out of time".to_owned(),
            Fate::Interrupted => "interrupted".to_owned(),
            Fate::NotRun(_) => "not run".to_owned(),
        }
    }

    /// Why it is not as it should be; nothing where it is.
    pub(super) fn reason(&self) -> String {
        match &self.fate {
            Fate::Good => String::new(),
            Fate::NotRun(why) => why.clone(),
            Fate::TimedOut(limit) => format!("not done within {} s: ended", limit.as_secs()),
            Fate::Interrupted => "ended by the signal that interrupted the report".to_owned(),
            Fate::Failed(_) => {
                let own = self.output.lines().rev().find(|line| line.starts_with("nccl-spark: "));
                own.map_or("see below".to_owned(), |line| line.trim_start_matches("nccl-spark: ").to_owned())
            }
        }
    }
}

/// What is only read.
pub(super) fn versions(read: impl FnOnce() -> String) -> Done {
    let start = Instant::now();
    let output = read();
    Done { fate: Fate::Good, took: start.elapsed(), output }
}

/// Runs a program until it ends, the limit is over or the report is interrupted. Nothing that it started outlives this, unless it has
/// left the process group.
pub(super) fn run(program: &Path, arguments: &[String], limit: Duration) -> Done {
    let start = Instant::now();
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // A group of its own: what it leaves behind is found by it, and Ctrl-C comes once, from here.
    let child = match command.process_group(0).spawn() {
        Ok(child) => child,
        Err(error) => return Done::not_run(format!("{} cannot be started: {error}", program.display())),
    };
    let group = child.id();
    let mut children = [child];
    let (mut output, mut left_out) = (String::new(), 0);
    let is_done = AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| end_group_when_interrupted(group, &is_done));
        let ended = lines::follow(&mut children, Vec::new(), limit, |_, line| {
            if output.len() + line.len() < MOST_BYTES {
                output.push_str(line);
                output.push('\n');
            } else {
                left_out += line.len() + 1;
            }
            Ok(())
        });
        is_done.store(true, Ordering::Release);
        ended
    });
    end_group(group);
    if left_out > 0 {
        output.push_str(&format!("... {left_out} more bytes are left out\n"));
    }
    let fate = match ended {
        Ok(Some(statuses)) if statuses.iter().all(ExitStatus::success) => Fate::Good,
        _ if interrupt::status().is_some() => Fate::Interrupted,
        Ok(None) => Fate::TimedOut(limit),
        Ok(Some(statuses)) => statuses.first().map_or(Fate::Good, |status| failed(*status)),
        Err(error) => Fate::Failed(format!("{error:#}")),
    };
    Done { fate, took: start.elapsed(), output }
}

fn failed(status: ExitStatus) -> Fate {
    match (status.code(), status.signal()) {
        (Some(code), _) => Fate::Failed(format!("exit status {code}")),
        (None, Some(number)) => Fate::Failed(format!("ended by signal {number}")),
        (None, None) => Fate::Failed(status.to_string()),
    }
}

/// After Ctrl-C: `interrupt` asks the part to end, and what the part has started may hold its output open after that.
fn end_group_when_interrupted(group: u32, is_done: &AtomicBool) {
    let mut ends_at = None;
    while !is_done.load(Ordering::Acquire) {
        if interrupt::status().is_some() {
            let until = *ends_at.get_or_insert_with(|| Instant::now() + GRACE);
            if Instant::now() > until || !runs(group) {
                return end_group(group);
            }
        }
        std::thread::sleep(LOOK);
    }
}

/// A process that has ended and that nobody has waited for does not run.
fn runs(pid: u32) -> bool {
    stat(pid, 0).is_some_and(|state| state != "Z")
}

/// A field of a process's `stat`, as [`proc_stat::fields`] counts them: 0 is the state, 2 the group.
fn stat(pid: u32, field: usize) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    proc_stat::fields(&text).nth(field).map(str::to_owned)
}

/// Kills what is left of a process group. While one of its processes is there, its number is no one else's.
fn end_group(group: u32) {
    if has_member(group) {
        // They may have ended since, which is what is wanted.
        let _ = signal::killpg(Pid::from_raw(group as i32), Signal::SIGKILL);
    }
}

fn has_member(group: u32) -> bool {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.any(|pid| stat(pid, 2).and_then(|number| number.parse().ok()) == Some(group))
}
