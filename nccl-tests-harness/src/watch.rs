//! A progress bar on standard error, while a person is watching that.

use crate::output;
use indicatif::{ProgressBar, ProgressStyle};

/// The bar; nothing where nobody watches.
#[derive(Clone)]
pub struct Watch(Option<ProgressBar>);

impl Watch {
    /// A bar for so many steps, counted only when somebody watches.
    pub fn start(steps: impl FnOnce() -> u64) -> Self {
        Self::count("sizes", steps)
    }

    /// The same for steps of another name.
    pub fn count(unit: &str, steps: impl FnOnce() -> u64) -> Self {
        if !output::shows_progress() {
            return Self(None);
        }
        let bar = ProgressBar::new(steps());
        let style =
            ProgressStyle::with_template(&format!("[{{elapsed}}] {{bar:24}} {{pos}}/{{len}} {unit}: {{wide_msg}}"));
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Self(Some(bar))
    }

    /// No bar, for what is told as it comes.
    pub fn none() -> Self {
        Self(None)
    }

    /// What is going on.
    pub fn doing(&self, text: &str) {
        if let Some(bar) = &self.0 {
            bar.set_message(text.to_owned());
        }
    }

    /// A step is done.
    pub fn step(&self) {
        if let Some(bar) = &self.0 {
            bar.inc(1);
        }
    }

    /// Takes the bar away while `print` writes to the same terminal.
    pub fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Takes the bar away for good.
    pub fn end(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
