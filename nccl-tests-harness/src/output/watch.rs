//! A progress line on standard error: only on a terminal, unless --quiet is given, and only for
//! work of over two seconds.
//!
//! All output meanwhile is written by [`Watch::over`], which removes the line before it prints and
//! draws it again below: standard output may be the same terminal, and a line that stays would be
//! in the middle of a table.

use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, LineWriter, Write};
use std::time::Duration;

/// Shorter work has no progress line.
const SHOW_AFTER: Duration = Duration::from_secs(2);

/// The progress line; nothing where standard error is not a terminal.
#[derive(Clone)]
pub struct Watch {
    bar: Option<ProgressBar>,
    /// A part of a longer command, whose steps these are not.
    is_part: bool,
}

impl Watch {
    /// A line that counts `steps` of something, as in "3/7 sizes"; `steps` is called only where
    /// there is a terminal.
    pub fn start(unit: &str, steps: impl FnOnce() -> u64) -> Self {
        if !output::shows_progress() {
            return Self::none();
        }
        let bar = ProgressBar::with_draw_target(Some(steps()), ProgressDrawTarget::hidden());
        let style =
            ProgressStyle::with_template(&format!("[{{elapsed}}] {{bar:24}} {{pos}}/{{len}} {unit}: {{wide_msg}}"));
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Self { bar: Some(bar), is_part: false }
    }

    /// No line.
    pub fn none() -> Self {
        Self { bar: None, is_part: false }
    }

    /// The same line for a part of the work: it shows what is being done, but counts no steps and
    /// does not end the line.
    pub fn part(&self) -> Self {
        Self { is_part: true, ..self.clone() }
    }

    /// Shows the present work. The first call after two seconds makes the line visible.
    pub fn doing(&self, text: &str) {
        let Some(bar) = &self.bar else { return };
        bar.set_message(text.to_owned());
        if bar.is_hidden() && !bar.is_finished() && bar.elapsed() >= SHOW_AFTER {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// A step is done.
    pub fn step(&self) {
        if let Some(bar) = self.bar.as_ref().filter(|_| !self.is_part) {
            bar.inc(1);
        }
    }

    /// A writer that prints whole lines to `out`, with the progress line removed while it does.
    pub fn over<W: Write>(&self, out: W) -> impl Write + use<W> {
        LineWriter::new(Over { out, watch: self.clone() })
    }

    /// Ends the line and removes it.
    pub fn end(&self) {
        if let Some(bar) = self.bar.as_ref().filter(|_| !self.is_part) {
            bar.finish_and_clear();
        }
    }
}

struct Over<W> {
    out: W,
    watch: Watch,
}

impl<W: Write> Over<W> {
    fn without_line<T>(&mut self, print: impl FnOnce(&mut W) -> T) -> T {
        match &self.watch.bar {
            Some(bar) => bar.suspend(|| print(&mut self.out)),
            None => print(&mut self.out),
        }
    }
}

impl<W: Write> Write for Over<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Flushed here: bytes that a buffer keeps would come out later, behind the line.
        self.without_line(|out| out.write_all(bytes).and_then(|()| out.flush()))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
