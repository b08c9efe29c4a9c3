//! The plugin's log, shown as NCCL would show it.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// NCCL's log levels (`ncclDebugLogLevel`). Levels that have the same effect here are one variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    None,
    Warn,
    Info,
    Trace,
}

static SHOWN: OnceLock<(usize, Level)> = OnceLock::new();
static KEPT: Mutex<Kept> = Mutex::new(Kept {
    last_warning: None,
    information: Vec::new(),
    is_holding: false,
    held: None,
});

struct Kept {
    last_warning: Option<String>,
    information: Vec<String>,
    /// True during `init`.
    is_holding: bool,
    held: Option<(String, Instant)>,
}

/// Maximum number of kept lines of level Info. This plugin logs few lines, but a faulty plugin must
/// not fill the memory.
const KEPT_LINES: usize = 256;
/// Time for which a warning is held back. If `init` has not returned by then, the warning is shown,
/// because it says why `init` takes so long.
const HOLD: Duration = Duration::from_secs(1);

impl Level {
    /// Returns the level for a value of `NCCL_DEBUG`. Without a value, or with an unknown one, the
    /// level is `Warn`.
    pub(crate) fn of_nccl_debug(value: Option<&str>) -> Self {
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

/// Sets the rank and the shown level. Only the first call has an effect.
pub(crate) fn start(rank: usize, level: Level) {
    let _ = SHOWN.set((rank, level));
}

/// Records one line of the plugin, and shows the line if the level that [`start`] set includes it.
/// `code` is NCCL's code for the line's level.
pub(crate) fn record(code: i32, text: &str) {
    let level = Level::of_code(code);
    let mut kept = kept();
    match level {
        Level::Warn => kept.last_warning = Some(text.to_owned()),
        Level::Info if kept.information.len() < KEPT_LINES => {
            kept.information.push(text.to_owned())
        }
        _ => {}
    }
    let Some(&(rank, shown)) = SHOWN.get() else {
        return;
    };
    if level > shown {
        return;
    }
    let name = match level {
        Level::None | Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Trace => "TRACE",
    };
    let line = format!("rank {rank}: NCCL {name} {text}\n");
    kept.show_held();
    if kept.is_holding && level == Level::Warn {
        kept.held = Some((line, Instant::now()));
    } else {
        show(&line);
    }
}

/// From now on holds back each warning until the next shown line, or for [`HOLD`]. If `init` fails,
/// a warning that is still held is not shown, because the error has its text.
pub(crate) fn hold_warnings() {
    kept().is_holding = true;
}

pub(crate) fn release_warnings() {
    let mut kept = kept();
    kept.is_holding = false;
    kept.show_held();
}

pub(crate) fn show_old_warning() {
    let mut kept = kept();
    if kept
        .held
        .as_ref()
        .is_some_and(|(_, since)| since.elapsed() >= HOLD)
    {
        kept.show_held();
    }
}

/// Takes the last warning, which becomes part of an error's text. A warning that is still held back
/// is dropped, because the error shows it.
pub(crate) fn take_last_warning() -> Option<String> {
    let mut kept = kept();
    kept.held = None;
    kept.last_warning.take()
}

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    fn show_held(&mut self) {
        if let Some((line, _)) = self.held.take() {
            show(&line);
        }
    }
}

/// Writes a line with one call, so that lines of several ranks do not mix.
fn show(line: &str) {
    // A rank also works without standard error, so an error is ignored.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns the kept lines that name the merged and the connected rails, and forgets all kept lines
/// of level Info. Lines that differ only in "(send)" or "(receive)" at their end are returned once,
/// without that ending.
pub fn take_rail_lines() -> Vec<String> {
    let lines = std::mem::take(&mut kept().information);
    let mut kept: Vec<String> = Vec::new();
    for line in lines
        .iter()
        .filter(|line| is_merged(line) || line.contains("connected with "))
    {
        let line = [" (send)", " (receive)"]
            .iter()
            .find_map(|end| line.strip_suffix(end))
            .unwrap_or(line);
        if !kept.iter().any(|other| other == line) {
            kept.push(line.to_owned());
        }
    }
    kept
}

/// Returns true for a line with "merged N rails" or "merged 1 rail".
fn is_merged(line: &str) -> bool {
    let Some((_, rest)) = line.split_once("merged ") else {
        return false;
    };
    rest.split_once(" rail")
        .is_some_and(|(number, _)| number.parse::<u32>().is_ok())
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
        record(
            3,
            "NET/Spark: merged 4 rails into one device of 200000 Mb/s",
        );
        record(3, "NET/Spark: rail a:1 not used with b:7");
        record(
            3,
            "NET/Spark: connected with b:7 over 4 rails: a:1 to b:1 (send)",
        );
        record(
            3,
            "NET/Spark: connected with b:7 over 4 rails: a:1 to b:1 (receive)",
        );
        record(2, "first");
        record(2, "second");
        let expected = [
            "merged 4 rails into one device of 200000 Mb/s",
            "connected with b:7 over 4 rails: a:1 to b:1",
        ];
        assert_eq!(
            take_rail_lines(),
            expected.map(|line| format!("NET/Spark: {line}"))
        );
        assert_eq!(take_last_warning().as_deref(), Some("second"));
        assert_eq!((take_rail_lines().len(), take_last_warning()), (0, None));
    }
}
