//! NCCL's logger as a `tracing` subscriber. Until NCCL has passed its logger, warnings go to
//! standard error and other events are dropped. In a forked child, the plugin refuses all calls,
//! and only the first refusal is written, to standard error (`warn_once_after_fork`).

use super::nccl_version;
use crate::comm::log::ATTENTION;
use host::error::Error;
use nccl_abi::DebugLogger;
use std::ffi::{c_int, c_ulong};
use std::fmt::{self, Write};
use std::mem;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// Sends all later events to NCCL's logger. If a process has loaded several copies of NCCL, all
/// events go to the logger installed last.
pub(super) fn install(logger: Option<DebugLogger>) {
    if let Some(logger) = logger {
        let last = LOGGER.swap(logger as *mut (), Ordering::AcqRel);
        // NCCL calls `init` for each communicator, with the same logger.
        if last != logger as *mut () {
            look_for_attention(logger);
        }
    }
    subscribe();
}

/// As [`install`], but keeps a logger that is already installed. The tuner calls this function,
/// because NCCL may load the tuner without this plugin's network.
pub(super) fn install_unless_given(logger: Option<DebugLogger>) {
    if let Some(logger) = logger {
        // Fails only if a logger is already installed; that logger stays in use.
        let installed = LOGGER.compare_exchange(
            ptr::null_mut(),
            logger as *mut (),
            Ordering::Release,
            Ordering::Relaxed,
        );
        if installed.is_ok() {
            look_for_attention(logger);
        }
    }
    subscribe();
}

fn subscribe() {
    INSTALL.call_once(|| {
        // Fails only if a program that uses this crate as a library has its own subscriber.
        let _ = tracing::subscriber::set_global_default(ToNccl);
    });
}

/// Notes whether the NCCL of this logger has the level ATTN. Until then, its lines are warnings.
fn look_for_attention(logger: DebugLogger) {
    let version = nccl_version::code_of(Some(logger));
    HAS_ATTENTION.store(has_attention(version), Ordering::Relaxed);
}

/// Enables or disables events of level DEBUG and TRACE. NCCL shows them under `NCCL_DEBUG=TRACE`.
pub fn set_trace(on: bool) {
    if TRACE.swap(on, Ordering::AcqRel) != on {
        tracing::callsite::rebuild_interest_cache();
    }
}

/// Writes the first warning of a forked child to standard error. NCCL's logger cannot be used: a
/// thread of the parent may have held the logger's lock at the fork.
pub(super) fn warn_once_after_fork(name: &str, error: &Error) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Ordering::AcqRel) {
        write_to_stderr(&line_for(format_args!("{name}: {error}")));
    }
}

/// NCCL's [`DebugLogger`]; NULL before the first `init`.
static LOGGER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
/// True if NCCL has the level ATTN.
static HAS_ATTENTION: AtomicBool = AtomicBool::new(false);
static INSTALL: Once = Once::new();
static TRACE: AtomicBool = AtomicBool::new(false);

const PREFIX: &str = "NET/Spark: ";

/// First version of NCCL with the level ATTN, 6. NCCL 2.32.3 shows it after `NCCL_DEBUG=ATTN`,
/// INFO and TRACE, but not after WARN, and `ncclGetLastError` does not return it (seen with its
/// library). Older versions never show a level above TRACE.
const WITH_ATTENTION: c_int = 23_200;

struct ToNccl;

impl Subscriber for ToNccl {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) {
            Interest::always()
        } else {
            Interest::never()
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && (*metadata.level() <= Level::INFO || TRACE.load(Ordering::Acquire))
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(if TRACE.load(Ordering::Acquire) {
            LevelFilter::TRACE
        } else {
            LevelFilter::INFO
        })
    }

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(PREFIX.to_owned());
        event.record(&mut text);
        deliver(event.metadata(), &text.0);
    }

    // NCCL's log has no place for spans.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The text of an event: the message, then the fields as `name=value`.
struct Text(String);

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String fails only if a value's own formatting fails; the line ends there.
        let _ = if field.name() == "message" {
            write!(self.0, "{value:?}")
        } else {
            write!(self.0, " {}={value:?}", field.name())
        };
    }
}

fn deliver(metadata: &Metadata<'_>, text: &str) {
    let logger = LOGGER.load(Ordering::Acquire);
    if logger.is_null() {
        if *metadata.level() <= Level::WARN {
            write_to_stderr(&line_for(format_args!(
                "{}",
                text.strip_prefix(PREFIX).unwrap_or(text)
            )));
        }
        return;
    }
    // SAFETY: every non-NULL value stored in `LOGGER` was made from a function of this type.
    let logger = unsafe { mem::transmute::<*mut (), DebugLogger>(logger) };
    let is_attention = metadata.target() == ATTENTION && HAS_ATTENTION.load(Ordering::Relaxed);
    let (level, subsystems) = nccl_level(*metadata.level(), is_attention);
    let file = terminated(metadata.file().unwrap_or("nccl-net-spark"));
    let line = metadata
        .line()
        .and_then(|n| c_int::try_from(n).ok())
        .unwrap_or(0);
    let text = terminated(text);
    // SAFETY: the file, the format and its one string argument end in NUL and outlive the call. Any
    // thread may call NCCL's logger.
    unsafe {
        logger(
            level,
            subsystems,
            file.as_ptr().cast(),
            line,
            c"%s".as_ptr(),
            text.as_ptr(),
        );
    }
}

/// Returns true if the NCCL of this `NCCL_VERSION_CODE` has the level ATTN.
fn has_attention(version: Option<c_int>) -> bool {
    version.is_some_and(|version| version >= WITH_ATTENTION)
}

/// Returns NCCL's level (`ncclDebugLogLevel`) and subsystems (`ncclDebugLogSubSys`) for an event.
/// Warnings belong to every subsystem. By default NCCL shows the subsystem INIT but not NET
/// (`ncclDebugInit`), so other events belong to both. If they belonged to NET alone, a user would
/// have to set `NCCL_DEBUG_SUBSYS` in addition to `NCCL_DEBUG`.
fn nccl_level(level: Level, is_attention: bool) -> (c_int, c_ulong) {
    const INIT: c_ulong = 0x1;
    const NET: c_ulong = 0x10;
    match level {
        _ if is_attention => (6, c_ulong::MAX),
        Level::ERROR | Level::WARN => (2, c_ulong::MAX),
        Level::INFO => (3, INIT | NET),
        _ => (5, INIT | NET),
    }
}

/// Appends a NUL. Replaces each NUL in the text by `?`.
fn terminated(text: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> = text
        .bytes()
        .map(|byte| if byte == 0 { b'?' } else { byte })
        .collect();
    bytes.push(0);
    bytes
}

fn line_for(text: fmt::Arguments<'_>) -> String {
    format!("{PREFIX}WARN {text}\n")
}

fn write_to_stderr(line: &str) {
    // One plain system call: after a fork, the standard library's lock of stderr may stay locked.
    // SAFETY: the pointer and the length are those of a live string.
    unsafe {
        libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_match_nccls() {
        assert_eq!(nccl_level(Level::ERROR, false).0, 2);
        assert_eq!(nccl_level(Level::WARN, false), (2, c_ulong::MAX));
        assert_eq!(nccl_level(Level::WARN, true), (6, c_ulong::MAX));
        assert_eq!(nccl_level(Level::INFO, false), (3, 0x11));
        assert_eq!(nccl_level(Level::DEBUG, false), (5, 0x11));
        assert_eq!(nccl_level(Level::TRACE, false), (5, 0x11));
    }

    #[test]
    fn only_a_newer_nccl_has_the_level_attn() {
        assert!(has_attention(Some(23_203)) && !has_attention(Some(23_102)));
        assert!(!has_attention(None), "not NCCL's logger");
    }

    #[test]
    fn a_c_string_has_one_nul_at_its_end() {
        assert_eq!(terminated("a\0b"), b"a?b\0");
        assert_eq!(terminated(""), b"\0");
    }
}
