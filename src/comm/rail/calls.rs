//! Calls into a device that may not return. Three kinds are watched: calls of attempts, calls that
//! destroy objects, and calls for which NCCL waits.

use crate::clock;
use crate::comm::threads::{self, lock};
#[cfg(doc)]
use host::error::Error;
use host::error::{Missing, Result};
use proto::device::PATIENCE;
use proto::time::Instant;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Calls into one device that may hang.
pub struct DeviceCalls {
    /// Name of the device.
    name: String,
    given_up: Mutex<GivenUpCalls>,
    discarded: Mutex<Discarded>,
    slow: Mutex<SlowCalls>,
}

/// Calls of attempts that were given up. The thread that makes a call keeps the [`Call`] alive.
#[derive(Default)]
struct GivenUpCalls {
    calls: Vec<Weak<Call>>,
    was_reported: bool,
}

/// A call that creates or connects queue pairs for an attempt. Dropped when the call has returned.
#[derive(Debug)]
pub struct Call {
    began: Instant,
}

impl DeviceCalls {
    /// Returns the calls of a device: none yet.
    pub fn new(name: &str) -> Arc<Self> {
        let (given_up, discarded, slow) = Default::default();
        Arc::new(Self {
            name: name.to_owned(),
            given_up,
            discarded,
            slow,
        })
    }

    /// Begins a call that creates or connects queue pairs for an attempt. Logs one WARN if an
    /// earlier attempt's call hangs.
    ///
    /// # Errors
    /// [`Error::Missing`] while a call of a given-up attempt or a destruction hangs: another call
    /// would likely hang too.
    pub fn begin(&self, now: Instant) -> Result<Arc<Call>> {
        let mut given_up = self.given_up();
        let first = given_up
            .calls
            .iter()
            .find_map(Weak::upgrade)
            .map(|call| call.began);
        let Some(began) = first.or_else(|| self.hanging_destruction(now)) else {
            given_up.was_reported = false;
            return Ok(Arc::new(Call { began: now }));
        };
        let waited = now.saturating_duration_since(began);
        let is_news = waited >= PATIENCE && !std::mem::replace(&mut given_up.was_reported, true);
        drop(given_up);
        if is_news {
            tracing::warn!(
                "device {} has not finished a call for {:.0} s: its lost rails are not retried until the call returns; see dmesg",
                self.name,
                waited.as_secs_f64()
            );
        }
        Err(Missing::Silent(self.name.clone()).into())
    }

    /// Records that the attempt of a call was given up. Ignores a call that has returned.
    pub fn give_up(&self, call: &Weak<Call>) {
        if call.strong_count() > 0 {
            self.given_up().calls.push(Weak::clone(call));
        }
    }

    /// Returns the calls of given-up attempts that have not returned.
    fn given_up(&self) -> MutexGuard<'_, GivenUpCalls> {
        // A panic of a holder leaves the list complete.
        let mut given_up = lock(&self.given_up);
        given_up.calls.retain(|call| call.strong_count() > 0);
        given_up
    }
}

/// Objects of the device, such as queue pairs, that a thread destroys one after another.
#[derive(Default)]
struct Discarded {
    objects: VecDeque<Box<dyn Send>>,
    /// Time since which the thread destroys the present object. `None` while there is no thread.
    since: Option<Instant>,
}

impl DeviceCalls {
    /// Drops an object on a thread of the device, because the call that destroys it may not return.
    /// A device has at most one such thread.
    pub fn discard(self: &Arc<Self>, object: impl Send + 'static) {
        let mut discarded = lock(&self.discarded);
        discarded.objects.push_back(Box::new(object));
        if discarded.since.is_some() {
            return;
        }
        discarded.since = Some(clock::now());
        drop(discarded);
        let calls = Arc::clone(self);
        threads::detach("spark-device", move || {
            while let Some(object) = calls.next_discarded() {
                drop(object);
            }
        });
    }

    fn next_discarded(&self) -> Option<Box<dyn Send>> {
        // A panic of a holder leaves the list complete.
        let mut discarded = lock(&self.discarded);
        let next = discarded.objects.pop_front();
        discarded.since = next.is_some().then(clock::now);
        next
    }

    /// Returns the time since which an object is being destroyed, if that takes too long.
    fn hanging_destruction(&self, now: Instant) -> Option<Instant> {
        lock(&self.discarded)
            .since
            .filter(|since| now.saturating_duration_since(*since) >= PATIENCE)
    }
}

/// Calls for which NCCL waits.
#[derive(Default)]
struct SlowCalls {
    calls: Vec<RunningCall>,
    made: u64,
}

struct RunningCall {
    number: u64,
    began: Instant,
    /// Name and purpose of the call, for a message.
    what: &'static str,
    was_reported: bool,
}

/// A call for which NCCL waits. Dropped when the call has returned.
pub struct SlowCall {
    calls: Arc<DeviceCalls>,
    number: u64,
}

impl DeviceCalls {
    /// Begins a call that NCCL must wait for. `what` names the call. If it takes 3 s, the service
    /// thread logs a WARN.
    pub fn begin_slow(self: &Arc<Self>, what: &'static str) -> SlowCall {
        let mut slow = lock(&self.slow);
        slow.made += 1;
        let number = slow.made;
        slow.calls.push(RunningCall {
            number,
            began: clock::now(),
            what,
            was_reported: false,
        });
        SlowCall {
            calls: Arc::clone(self),
            number,
        }
    }

    /// Logs a WARN about each call of [`DeviceCalls::begin_slow`] that hangs.
    pub fn warn_of_slow(&self, now: Instant) {
        for call in &mut lock(&self.slow).calls {
            let waited = now.saturating_duration_since(call.began);
            if waited >= PATIENCE && !std::mem::replace(&mut call.was_reported, true) {
                tracing::warn!(
                    "device {} has not finished {} for {:.0} s: NCCL waits until its firmware answers; see dmesg",
                    self.name,
                    call.what,
                    waited.as_secs_f64()
                );
            }
        }
    }
}

impl Drop for SlowCall {
    fn drop(&mut self) {
        lock(&self.calls.slow)
            .calls
            .retain(|call| call.number != self.number);
    }
}
