//! What the plugin logs, shown as NCCL would show it.

use std::io::Write;
use std::sync::{Mutex, OnceLock, PoisonError};

/// NCCL's log levels (`ncclDebugLogLevel`), as far as they are told apart here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing is shown.
    None,
    /// What the user must see.
    Warn,
    /// What helps to understand a job.
    Info,
    /// All of it.
    Trace,
}

static SHOWN: OnceLock<(usize, Level)> = OnceLock::new();
static KEPT: Mutex<Kept> = Mutex::new(Kept { last_warning: None, information: Vec::new() });

struct Kept {
    last_warning: Option<String>,
    information: Vec<String>,
}

/// The plugin says little at this level; more is a fault that must not eat the memory.
const KEPT_LINES: usize = 256;

impl Level {
    /// The level that a value of `NCCL_DEBUG` asks for: warnings unless it says otherwise.
    pub fn of_nccl_debug(value: Option<&str>) -> Self {
        match value.map(str::to_ascii_uppercase).as_deref() {
            Some("NONE" | "VERSION") => Self::None,
            Some("INFO") => Self::Info,
            Some("TRACE" | "ABORT") => Self::Trace,
            _ => Self::Warn,
        }
    }

    fn of_code(code: i32) -> Self {
        match code {
            2 => Self::Warn,
            3 => Self::Info,
            _ => Self::Trace,
        }
    }
}

/// Says whose log this is and how much of it is shown. The first call counts.
pub fn start(rank: usize, level: Level) {
    let _ = SHOWN.set((rank, level));
}

/// One line of the plugin, with NCCL's code for its level.
pub fn record(code: i32, text: &str) {
    let level = Level::of_code(code);
    {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        match level {
            Level::Warn => kept.last_warning = Some(text.to_owned()),
            Level::Info if kept.information.len() < KEPT_LINES => kept.information.push(text.to_owned()),
            _ => {}
        }
    }
    let Some(&(rank, shown)) = SHOWN.get() else { return };
    if level > shown {
        return;
    }
    let name = match level {
        Level::None | Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Trace => "TRACE",
    };
    // One write, so that lines of several ranks do not mix. There is nobody left to tell when it fails.
    let _ = std::io::stderr().write_all(format!("rank {rank}: NCCL {name} {text}\n").as_bytes());
}

/// The warning that came last, and forgets it.
pub fn take_last_warning() -> Option<String> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).last_warning.take()
}

/// The lines so far that prove which rails were merged and what is connected with what, each once for both directions, and
/// forgets all information.
pub fn take_rail_lines() -> Vec<String> {
    let lines = std::mem::take(&mut KEPT.lock().unwrap_or_else(PoisonError::into_inner).information);
    let mut kept: Vec<String> = Vec::new();
    for line in lines.iter().filter(|line| is_merged(line) || line.contains("connected with ")) {
        let line = [" (send)", " (receive)"].iter().find_map(|end| line.strip_suffix(end)).unwrap_or(line);
        if !kept.iter().any(|other| other == line) {
            kept.push(line.to_owned());
        }
    }
    kept
}

/// "merged N rails", "merged 1 rail".
fn is_merged(line: &str) -> bool {
    let Some((_, rest)) = line.split_once("merged ") else { return false };
    rest.split_once(" rail").is_some_and(|(number, _)| number.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_debug_chooses_what_is_shown() {
        assert_eq!(Level::of_nccl_debug(None), Level::Warn);
        assert_eq!(Level::of_nccl_debug(Some("warn")), Level::Warn);
        assert_eq!(Level::of_nccl_debug(Some("info")), Level::Info);
        assert_eq!(Level::of_nccl_debug(Some("TRACE")), Level::Trace);
        assert_eq!(Level::of_nccl_debug(Some("VERSION")), Level::None);
    }

    #[test]
    fn warnings_and_lines_about_rails_are_kept_until_taken() {
        record(3, "NET/Spark: merged 4 rails into one device of 200000 Mb/s");
        record(3, "NET/Spark: rail a:1 not used with b:7");
        record(3, "NET/Spark: connected with b:7 over 4 rails: a:1 to b:1 (send)");
        record(3, "NET/Spark: connected with b:7 over 4 rails: a:1 to b:1 (receive)");
        record(2, "first");
        record(2, "second");
        let expected = ["merged 4 rails into one device of 200000 Mb/s", "connected with b:7 over 4 rails: a:1 to b:1"];
        assert_eq!(take_rail_lines(), expected.map(|line| format!("NET/Spark: {line}")));
        assert_eq!(take_last_warning().as_deref(), Some("second"));
        assert_eq!((take_rail_lines().len(), take_last_warning()), (0, None));
    }
}
