//! Captures the log lines of the code under test, on the thread that drives it, or prints them.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex, Once};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

#[derive(Clone, Default)]
pub struct CapturedLog(Arc<Mutex<Vec<(Level, String)>>>);

impl CapturedLog {
    pub fn capture<T>(&self, act: impl FnOnce() -> T) -> T {
        let kept = self.clone();
        tracing::subscriber::with_default(
            Listener(move |level, words| kept.0.lock().unwrap().push((level, words))),
            act,
        )
    }

    pub fn take(&self) -> Vec<(Level, String)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// Captures all later lines of every thread, except DEBUG and TRACE.
pub fn everywhere() -> CapturedLog {
    let log = CapturedLog::default();
    let kept = log.clone();
    let keep = move |level, words| {
        if level <= Level::INFO {
            kept.0.lock().unwrap().push((level, words));
        }
    };
    tracing::subscriber::set_global_default(Listener(keep)).expect("the first");
    log
}

/// Prints all later lines of every thread. Further calls change nothing.
pub fn show() {
    static SHOWN: Once = Once::new();
    SHOWN.call_once(|| see(|words| eprintln!("{words}")));
}

/// Passes all later lines of every thread to `see`.
pub fn see(see: impl Fn(&str) + Send + Sync + 'static) {
    tracing::subscriber::set_global_default(Listener(move |_, words: String| see(&words)))
        .expect("the first");
}

struct Listener<F>(F);

struct Words(String);

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").expect("a string takes words");
        }
    }
}

impl<F: Fn(Level, String) + 'static> Subscriber for Listener<F> {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut words = Words(String::new());
        event.record(&mut words);
        (self.0)(*event.metadata().level(), words.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
