//! A progress line on standard error. It is shown only on a terminal, without --quiet, and for work
//! of over two seconds.
//!
//! While the line is shown, all output must go through [`Watch::over`], which removes the line,
//! prints, and draws the line again below. Standard output may be the same terminal, where the line
//! would otherwise stay inside a table.

use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, LineWriter, Write};
use std::time::Duration;

/// Work that takes less time than this has no progress line.
const SHOW_AFTER: Duration = Duration::from_secs(2);

/// The progress line. It is never shown with --quiet, or if standard error is not a terminal.
#[derive(Clone)]
pub struct Watch {
    bar: Option<ProgressBar>,
    /// True for a part of a longer command. A part counts no steps.
    is_part: bool,
}

impl Watch {
    /// Starts a line that counts steps, as in "3/7 sizes". `steps` returns their total number. It
    /// is called only if progress is shown.
    pub fn start(unit: &str, steps: impl FnOnce() -> u64) -> Self {
        if !output::shows_progress() {
            return Self::none();
        }
        let bar = ProgressBar::with_draw_target(Some(steps()), ProgressDrawTarget::hidden());
        let style = ProgressStyle::with_template(&format!(
            "[{{elapsed}}] {{bar:24}} {{pos}}/{{len}} {unit}: {{wide_msg}}"
        ));
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Self {
            bar: Some(bar),
            is_part: false,
        }
    }

    /// Returns a progress line that is never shown.
    pub fn none() -> Self {
        Self {
            bar: None,
            is_part: false,
        }
    }

    /// Returns the same line for a part of the work. On the returned line, [`Watch::step`] and
    /// [`Watch::end`] do nothing.
    pub fn part(&self) -> Self {
        Self {
            is_part: true,
            ..self.clone()
        }
    }

    /// Shows `text` as the current work. The first call later than two seconds after the start
    /// makes the line visible.
    pub fn doing(&self, text: &str) {
        let Some(bar) = &self.bar else { return };
        bar.set_message(text.to_owned());
        if bar.is_hidden() && !bar.is_finished() && bar.elapsed() >= SHOW_AFTER {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
    }

    /// Counts a step.
    pub fn step(&self) {
        if let Some(bar) = self.bar.as_ref().filter(|_| !self.is_part) {
            bar.inc(1);
        }
    }

    /// Returns a writer that prints whole lines to `out`, without the progress line between them.
    pub fn over<W: Write>(&self, out: W) -> impl Write + use<W> {
        LineWriter::new(Over {
            out,
            watch: self.clone(),
        })
    }

    /// Ends and removes the line.
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
        // Without the flush, buffered bytes would be printed later, when the progress line is on
        // the screen again.
        self.without_line(|out| out.write_all(bytes).and_then(|()| out.flush()))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
