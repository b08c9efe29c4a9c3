//! Standard output and standard error. Either may be a pipe that is closed early (`nccl-spark ... |
//! head`). The command line sets the amount of output: --quiet leaves out remarks, which are lines
//! that begin with `#` and report no failure.

pub mod numbers;
pub(crate) mod plot;
pub(crate) mod replacement;
pub mod report;
pub mod table;
pub mod watch;

use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Verbosity {
    /// Results and errors.
    Quiet,
    /// Results, errors, remarks and progress.
    #[default]
    Normal,
    /// Also the plugin's log at level INFO, and everything that a command read.
    Verbose,
    /// Like [`Self::Verbose`], but with the log at level TRACE.
    Trace,
}

static VERBOSITY: OnceLock<Verbosity> = OnceLock::new();
static COLUMNS: OnceLock<usize> = OnceLock::new();

/// Sets the verbosity. Only the first call has an effect.
pub(crate) fn set_verbosity(verbosity: Verbosity) {
    let _ = VERBOSITY.set(verbosity);
}

/// Returns text from outside (another process, a file, another host) with `?` for characters that a
/// terminal would act on: control characters, and characters that change the writing direction.
pub fn plain(text: &str) -> String {
    let turns = |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars()
        .map(|c| if c.is_control() || turns(c) { '?' } else { c })
        .collect()
}

pub(crate) fn verbosity() -> Verbosity {
    VERBOSITY.get().copied().unwrap_or_default()
}

pub(crate) fn nccl_debug() -> Option<&'static str> {
    match verbosity() {
        Verbosity::Quiet | Verbosity::Normal => None,
        Verbosity::Verbose => Some("INFO"),
        Verbosity::Trace => Some("TRACE"),
    }
}

/// Returns true if progress is shown: if standard error is a terminal and --quiet is not given.
pub(crate) fn shows_progress() -> bool {
    verbosity() != Verbosity::Quiet && io::stderr().is_terminal()
}

/// Sets the width from the variable `COLUMNS`. Only the first valid value has an effect.
pub(crate) fn set_columns(variable: Option<&str>) {
    if let Some(columns) = variable
        .and_then(|text| text.parse().ok())
        .filter(|columns| *columns > 0)
    {
        let _ = COLUMNS.set(columns);
    }
}

pub(crate) const STANDARD_OUTPUT: &str = "standard output";

/// Returns the width of wrapped text: the variable `COLUMNS`, else the terminal's width, else 100.
pub fn columns() -> usize {
    const WITHOUT_TERMINAL: usize = 100;
    let terminal = || terminal_size::terminal_size().map(|(columns, _)| columns.0.into());
    COLUMNS
        .get()
        .copied()
        .or_else(terminal)
        .unwrap_or(WITHOUT_TERMINAL)
}

/// Returns a writer to standard output. With --quiet it leaves out remarks.
pub fn standard() -> impl Write {
    Output::new(io::stdout(), STANDARD_OUTPUT, verbosity())
}

/// Returns a writer to standard error. With --quiet it leaves out remarks.
pub fn error() -> impl Write {
    Output::new(io::stderr(), "standard error", verbosity())
}

/// Returns true if `error` was caused by a reader of this program's output that has closed its end.
/// Returns false for other broken pipes, such as a rank's control connection.
pub fn is_output_closed(error: &anyhow::Error) -> bool {
    let unread = |cause: &(dyn Error + 'static)| {
        let inner = cause
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        inner.is_some_and(|inner| inner.is::<Unread>())
    };
    error.chain().any(unread)
}

struct Output<W: Write> {
    to: W,
    name: &'static str,
    /// The line that has no newline yet. It is kept until its end shows whether it is a remark.
    /// `None` if remarks are shown, because then all output is written immediately.
    line: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Unread;

impl Display for Unread {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("the reader of the output has closed it")
    }
}

impl Error for Unread {}

impl<W: Write> Output<W> {
    fn new(to: W, name: &'static str, verbosity: Verbosity) -> Self {
        Self {
            to,
            name,
            line: (verbosity == Verbosity::Quiet).then(Vec::new),
        }
    }

    fn named(name: &'static str) -> impl Fn(io::Error) -> io::Error {
        move |error| match error.kind() {
            ErrorKind::BrokenPipe => io::Error::new(ErrorKind::BrokenPipe, Unread),
            // The caller repeats an interrupted call.
            ErrorKind::Interrupted => error,
            kind => io::Error::new(kind, format!("{name}: {error}")),
        }
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let named = Self::named(self.name);
        let Some(line) = &mut self.line else {
            return self.to.write(bytes).map_err(named);
        };
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            line.extend_from_slice(part);
            if line.ends_with(b"\n") {
                let whole = std::mem::take(line);
                if !is_remark(&whole) {
                    self.to.write_all(&whole).map_err(&named)?;
                }
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush().map_err(Self::named(self.name))
    }
}

impl<W: Write> Drop for Output<W> {
    fn drop(&mut self) {
        if let Some(line) = self
            .line
            .take()
            .filter(|line| !line.is_empty() && !is_remark(line))
        {
            let _ = self.to.write_all(&line);
        }
    }
}

/// Returns true for a line that starts with `#`, unless it reports a failure, which is a result.
fn is_remark(line: &[u8]) -> bool {
    let tells_failure = |word: &[u8]| line.windows(word.len()).any(|part| part == word);
    line.starts_with(b"#") && !tells_failure(b"FAILED") && !tells_failure(b"WRONG")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn foreign_text_cannot_move_the_cursor_or_break_lines() {
        assert_eq!(
            plain("a\u{1b}[2J\r\nb\u{9b}1m\u{202e}c\u{2067}d é"),
            "a?[2J??b?1m?c?d é"
        );
    }

    #[test]
    fn a_closed_pipe_is_distinguished_from_other_errors() {
        for verbosity in [Verbosity::Normal, Verbosity::Quiet] {
            let unread = writeln!(Output::new(Closed, "it", verbosity), "text")
                .context("write the table")
                .unwrap_err();
            assert!(is_output_closed(&unread));
        }
        let other: anyhow::Error = io::Error::from(ErrorKind::BrokenPipe).into();
        assert!(!is_output_closed(
            &other.context("write to the control socket")
        ));
    }

    #[test]
    fn quiet_leaves_out_remarks_however_they_are_written() {
        let shown = |verbosity| {
            let mut bytes = Vec::new();
            let mut out = Output::new(&mut bytes, "it", verbosity);
            let number = 1;
            write!(out, "# {number}").unwrap();
            write!(out, " # more\n  8 #2\n# Out of bounds values : 1 ").unwrap();
            write!(out, "FAILED\n# end").unwrap();
            drop(out);
            String::from_utf8(bytes).unwrap()
        };
        assert_eq!(
            shown(Verbosity::Quiet),
            "  8 #2\n# Out of bounds values : 1 FAILED\n"
        );
        assert_eq!(
            shown(Verbosity::Normal),
            "# 1 # more\n  8 #2\n# Out of bounds values : 1 FAILED\n# end"
        );
    }
}
