//! Connections whose set-up is not finished, from one call of NCCL to the next.
//!
//! NCCL calls `connect` or `accept` in a loop until it gets the connection. After an abort it calls
//! no more, and it cannot close a connection that it never got. So the service thread gives up a
//! set-up after [`ABANDONED`] without a call: its sockets, queue pairs and memory are freed, and
//! its peer sees the connection close.
//!
//! The state is kept here, under a ticket, and not in NCCL's memory, which may be gone by then.
//! Each call takes its state out and puts it back, so no lock is held while a set-up works.

use crate::clock;
use crate::comm::recovery::service::Service;
use crate::comm::threads::lock;
use host::error::{Network, Result};
use proto::time::Instant;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time without a call after which a set-up counts as abandoned.
pub const ABANDONED: Duration = Duration::from_secs(60);

/// Unfinished set-ups of one kind.
pub struct Pending<T> {
    table: Arc<Mutex<Table<T>>>,
    /// Returns the peer's name, for the log line.
    peer: fn(&T) -> String,
}

struct Table<T> {
    set_ups: HashMap<u64, SetUp<T>>,
    last_ticket: u64,
    /// True while the service thread looks for abandoned set-ups.
    is_watched: bool,
}

struct SetUp<T> {
    state: T,
    asked: Instant,
}

impl<T: Send + 'static> Pending<T> {
    /// Creates an empty table.
    pub fn new(peer: fn(&T) -> String) -> Self {
        let table = Table {
            set_ups: HashMap::new(),
            last_ticket: 0,
            is_watched: false,
        };
        Self {
            table: Arc::new(Mutex::new(table)),
            peer,
        }
    }

    /// Returns a new ticket. Tickets are counted from 1.
    pub fn ticket(&self) -> u64 {
        let mut table = lock(&self.table);
        table.last_ticket += 1;
        table.last_ticket
    }

    /// Takes out the state of a set-up, so that a call of NCCL continues it.
    ///
    /// # Errors
    /// [`Error::Network`](host::error::Error::Network) if the set-up has failed or was given up.
    pub fn take(&self, ticket: u64) -> Result<T> {
        let taken = lock(&self.table).set_ups.remove(&ticket);
        taken
            .map(|set_up| set_up.state)
            .ok_or_else(|| Network::SetupEnded.into())
    }

    /// Keeps the state of a set-up until NCCL's next call.
    pub fn keep(&self, service: &Service, ticket: u64, state: T) {
        let mut table = lock(&self.table);
        table.set_ups.insert(
            ticket,
            SetUp {
                state,
                asked: clock::now(),
            },
        );
        if std::mem::replace(&mut table.is_watched, true) {
            return;
        }
        drop(table);
        // The service thread does not keep the table alive: without an owner, no call will come.
        let weak = Arc::downgrade(&self.table);
        let peer = self.peer;
        let chore = move |now| {
            weak.upgrade()
                .is_none_or(|table| give_up_abandoned(&table, peer, now))
        };
        if let Err(error) = service.repeat(chore) {
            // The next call tries again.
            tracing::debug!("abandoned set-ups are not given up: {error}");
            lock(&self.table).is_watched = false;
        }
    }

    /// Gives up the set-ups that are abandoned at time `now`. The service thread does the same in
    /// each round.
    pub fn give_up_abandoned(&self, now: Instant) {
        give_up_abandoned(&self.table, self.peer, now);
    }
}

/// Gives up abandoned set-ups. Returns true if no set-up remains. Then this table is no longer
/// watched.
fn give_up_abandoned<T>(table: &Mutex<Table<T>>, peer: fn(&T) -> String, now: Instant) -> bool {
    let mut table = lock(table);
    let is_abandoned = |set_up: &SetUp<T>| now.saturating_duration_since(set_up.asked) >= ABANDONED;
    let abandoned: Vec<SetUp<T>> = table
        .set_ups
        .extract_if(|_, set_up| is_abandoned(set_up))
        .map(|(_, set_up)| set_up)
        .collect();
    table.is_watched = !table.set_ups.is_empty();
    let is_empty = !table.is_watched;
    // Destroying queue pairs may take long, so the lock is released first.
    drop(table);
    let seconds = ABANDONED.as_secs();
    for (at, SetUp { state, .. }) in abandoned.into_iter().enumerate() {
        let peer = peer(&state);
        match at {
            0 => tracing::info!(
                "set-up of the connection with {peer} abandoned: NCCL has not asked for it for {seconds} s"
            ),
            _ => tracing::debug!("set-up of the connection with {peer} abandoned too"),
        }
    }
    is_empty
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::process::{Process, TunerIdentity};
    use host::config::Config;

    fn service() -> Service {
        let config = Config::from_variables(&[]).unwrap();
        Service::new(Arc::new(Process::new(
            config,
            Vec::new(),
            TunerIdentity::default(),
        )))
    }

    /// Makes a set-up as old as an abandoned one.
    fn age(pending: &Pending<Arc<()>>, ticket: u64) {
        let mut table = lock(&pending.table);
        let set_up = table.set_ups.get_mut(&ticket).unwrap();
        set_up.asked = set_up.asked - ABANDONED;
    }

    #[test]
    fn the_service_thread_gives_up_only_what_is_abandoned() {
        let service = service();
        let state = Arc::new(());
        let pending = Pending::new(|_: &Arc<()>| "spark-2".to_owned());
        // In the second round, the service thread of the first round may have ended.
        for _ in 0..2 {
            let [abandoned, asked_for] = [0, 1].map(|_| {
                let ticket = pending.ticket();
                pending.keep(&service, ticket, Arc::clone(&state));
                ticket
            });
            age(&pending, abandoned);
            let limit = clock::now() + Duration::from_secs(30);
            while lock(&pending.table).set_ups.len() > 1 {
                assert!(clock::now() < limit, "not given up");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(pending.take(abandoned).is_err() && pending.take(asked_for).is_ok());
            while lock(&pending.table).is_watched {
                assert!(clock::now() < limit, "still watched");
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(Arc::strong_count(&state), 1);
        }
    }
}
