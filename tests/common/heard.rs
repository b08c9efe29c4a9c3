//! What the code under test says, on the thread that drives it.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// What was said, each with its level.
#[derive(Clone, Default)]
pub struct Heard(Arc<Mutex<Vec<(Level, String)>>>);

impl Heard {
    /// Listens to what this thread says while it does something.
    pub fn by<T>(&self, act: impl FnOnce() -> T) -> T {
        tracing::subscriber::with_default(Listener(self.clone()), act)
    }

    /// What was said since this was last asked.
    pub fn take(&self) -> Vec<(Level, String)> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

struct Listener(Heard);

struct Words(String);

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == "message" {
            write!(self.0, "{value:?}").expect("a string takes words");
        }
    }
}

impl Subscriber for Listener {
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
        self.0.0.lock().unwrap().push((*event.metadata().level(), words.0));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
