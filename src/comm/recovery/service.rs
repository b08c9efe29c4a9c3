//! The thread that watches over the connections: their peers' channels, their rails, and those that were closed until their
//! peers have closed too.
//!
//! It runs while there is anything to watch, and borrows a data path for moments only ([`crate::comm::datapath::path`]). A closed connection's
//! queue pairs linger: the peer may still wait for the acknowledgement of its last write, or write a clear-to-send that nobody
//! needs.

use super::driver::{Driver, PortChange};
use crate::comm::channel::{Channel, Received};
use crate::comm::datapath::peer;
use crate::comm::datapath::waker::Waker;
use crate::comm::rail::Rail;
use crate::comm::rail::device::Presence;
use crate::error::{Error, Result, panic_text};
use crate::verbs::AsyncEvent;
use crate::wire::message::Message;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a closed connection waits for its peer to close: beyond a few retransmissions of its last write.
const LINGER: Duration = Duration::from_secs(10);
/// How often a connection is looked after whose rails all carry: it bounds how late a silent loss is detected, and a control frame that came
/// by a rail.
const CALM: Duration = Duration::from_millis(50);
/// And one with something under way.
const BUSY: Duration = Duration::from_millis(5);
/// Messages of one peer that are taken in at a time.
const MESSAGES: usize = 16;

/// Names a watched connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchId(u64);

/// The thread, and what it is told.
#[derive(Default)]
pub struct Service {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    orders: Vec<Order>,
    next_id: u64,
    waker: Option<UnixStream>,
}

enum Order {
    Watch(Box<Watched>),
    Close(WatchId),
    /// A data path has news.
    Look,
}

struct Watched {
    id: WatchId,
    /// None when the network under it, or the peer's end of it, is gone.
    channel: Option<Channel>,
    driver: Driver,
    closing: Option<Instant>,
}

impl Service {
    /// Watches a connection, after `first` has said to the peer what comes before that: that the connection is there, which is
    /// said only where somebody looks after it.
    ///
    /// # Errors
    /// [`Error::Os`] when the thread cannot be started, and what `first` says. Nothing is watched then.
    pub fn watch(
        &self,
        mut channel: Channel,
        driver: Driver,
        first: impl FnOnce(&mut Channel) -> Result<()>,
    ) -> Result<WatchId> {
        let mut shared = lock(&self.shared);
        // The order comes last: left behind by a failure it would be obeyed later, and the connection, which nobody has, never closed.
        // The thread sees it, because it takes its orders under the lock.
        self.start_or_wake(&mut shared)?;
        first(&mut channel)?;
        shared.next_id += 1;
        let id = WatchId(shared.next_id);
        shared.orders.push(Order::Watch(Box::new(Watched { id, channel: Some(channel), driver, closing: None })));
        Ok(id)
    }

    /// Says BYE, and keeps what the peer may still reach until it has closed too.
    pub fn close(&self, id: WatchId) {
        let mut shared = lock(&self.shared);
        shared.orders.push(Order::Close(id));
        if let Err(error) = self.start_or_wake(&mut shared) {
            tracing::warn!("could not notify peer of closed connection: {error}");
        }
    }

    /// Wakes the thread, or starts one where none runs.
    fn start_or_wake(&self, shared: &mut Shared) -> Result<()> {
        if let Some(waker) = &mut shared.waker {
            // A full pipe is as good: the thread has not yet looked.
            return match waker.write(&[1]) {
                Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => {
                    Err(Error::os("cannot wake the service thread", &e))
                }
                _ => Ok(()),
            };
        }
        let trouble = |e: std::io::Error| Error::os("cannot start the service thread", &e);
        let (waker, wakened) = UnixStream::pair().map_err(trouble)?;
        waker.set_nonblocking(true).map_err(trouble)?;
        wakened.set_nonblocking(true).map_err(trouble)?;
        let theirs = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("spark-service".to_owned());
        thread.spawn(move || serve(&theirs, wakened)).map_err(trouble)?;
        shared.waker = Some(waker);
        Ok(())
    }
}

impl Waker for Service {
    #[cold]
    fn wake(&self) {
        let mut shared = lock(&self.shared);
        if shared.waker.is_none() {
            // Nothing is watched, so there is nobody to wake.
            return;
        }
        shared.orders.push(Order::Look);
        if let Err(error) = self.start_or_wake(&mut shared) {
            tracing::warn!("could not notify peer of lost rail: {error}");
        }
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic in a holder leaves a list of orders, whole.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(shared: &Mutex<Shared>, mut wakened: UnixStream) {
    // The application's signals are for the application's threads.
    if let Err(error) = SigSet::all().thread_block() {
        tracing::debug!("cannot block signals on the service thread: {error}");
    }
    let mut watched: Vec<Watched> = Vec::new();
    loop {
        let orders = std::mem::take(&mut lock(shared).orders);
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| look_after(orders, &mut watched))) {
            abandon(&mut watched, panic_text(&*payload));
        }
        if watched.is_empty() {
            let mut shared = lock(shared);
            if shared.orders.is_empty() {
                // Whoever comes next starts a new thread; nobody can have written to this one's pipe meanwhile.
                shared.waker = None;
                return;
            }
            continue;
        }
        wait(&watched, &wakened);
        drain(&mut wakened);
    }
}

fn look_after(orders: Vec<Order>, watched: &mut Vec<Watched>) {
    let (mut closed, mut has_news) = (Vec::new(), false);
    // All that is to be watched comes first, before anything that can have a fault: `abandon` tells those in `watched`.
    for order in orders {
        match order {
            Order::Watch(new) => watched.push(*new),
            Order::Close(id) => closed.push(id),
            Order::Look => has_news = true,
        }
    }
    for each in watched.iter_mut().filter(|each| closed.contains(&each.id)) {
        each.driver.close();
        each.closing = Some(Instant::now() + LINGER);
    }
    hear_devices(watched);
    look_at_devices(watched);
    // They share what they know of unreachable paths, so any of them will do.
    watched.first().inspect(|each| each.driver.begin_round());
    watched.iter_mut().for_each(|each| each.tend(has_news));
    watched.retain(|each| !each.is_over());
}

/// A fault of this thread: nobody looks after the connections any more, so each of them says so and fails, rather than hang when
/// a rail is lost.
#[cold]
fn abandon(watched: &mut Vec<Watched>, fault: &str) {
    tracing::warn!("internal error in the service thread, all connections fail; please report it: {fault}");
    for mut each in watched.drain(..) {
        let error = Error::Internal(format!("internal error in the service thread: {fault}"));
        // What failed once may fail again, and the others are to hear of it too.
        if catch_unwind(AssertUnwindSafe(|| each.driver.give_up(error))).is_err() {
            tracing::warn!("could not fail the connection with {}: it may hang", each.driver.peer().name);
        }
    }
}

/// Takes in what the devices say of their ports.
fn hear_devices(watched: &mut [Watched]) {
    for rail in rails(watched) {
        let Some(pd) = rail.device.source_of_events() else { continue };
        loop {
            match pd.context().async_event() {
                Ok(Some(event)) => handle(watched, &rail, &event),
                Ok(None) => break,
                Err(error) => {
                    tracing::debug!("{error}");
                    break;
                }
            }
        }
    }
}

/// One rail of each device in use.
fn rails(watched: &[Watched]) -> Vec<Arc<Rail>> {
    let Some(first) = watched.first() else { return Vec::new() };
    let mut rails: Vec<Arc<Rail>> = Vec::new();
    for rail in first.driver.host_rails() {
        if !rails.iter().any(|known| known.info.device == rail.info.device) {
            rails.push(Arc::clone(rail));
        }
    }
    rails
}

fn handle(watched: &mut [Watched], one_of_device: &Rail, event: &AsyncEvent) {
    tracing::debug!("{}: {}", one_of_device.info.device, event.text());
    let Some(first) = watched.first() else { return };
    let rails = first.driver.host_rails().to_vec();
    let of_device = rails.iter().filter(|rail| rail.info.device == one_of_device.info.device);
    let now = Instant::now();
    if let Some(cq) = event.cq {
        watched.iter_mut().for_each(|each| each.driver.completions_lost(cq, now));
    }
    for rail in of_device.filter(|rail| event.port.is_none_or(|port| port == rail.info.port)) {
        let change = match event.kind {
            AsyncEvent::PORT_ACTIVE | AsyncEvent::GID_CHANGE => PortChange::Up,
            // What was so when the event was made may be over.
            AsyncEvent::PORT_ERROR if !rail.is_up() => PortChange::Down,
            AsyncEvent::DEVICE_FATAL if rail.device.fatal(rail.info.port) != Presence::Here => PortChange::Removed,
            AsyncEvent::DEVICE_FATAL => PortChange::Down,
            _ => continue,
        };
        watched.iter_mut().for_each(|each| each.driver.port_changed(rail, change, now));
    }
}

/// Notices devices that were removed and that are gone, for an event may be missing, and those that are back.
fn look_at_devices(watched: &mut [Watched]) {
    let Some(first) = watched.first() else { return };
    let rails = first.driver.host_rails().to_vec();
    let now = Instant::now();
    for rail in rails {
        let was_there = rail.device.presence() == Presence::Here;
        if rail.device.glance(rail.info.port, now) != Presence::Here && was_there {
            watched.iter_mut().for_each(|each| each.driver.port_changed(&rail, PortChange::Removed, now));
        }
    }
    let Some(first) = watched.first() else { return };
    for rail in first.driver.look_for_returned(now) {
        watched.iter_mut().for_each(|each| each.driver.port_changed(&rail, PortChange::Up, now));
    }
}

/// Waits for something to happen.
fn wait(watched: &[Watched], wakened: &UnixStream) {
    let pause = if watched.iter().any(|each| each.driver.is_busy()) { BUSY } else { CALM };
    let mut fds = vec![PollFd::new(wakened.as_fd(), PollFlags::POLLIN)];
    let channels = watched.iter().filter_map(|each| each.channel.as_ref());
    fds.extend(channels.map(|channel| PollFd::new(channel.as_fd(), PollFlags::POLLIN)));
    let rails = rails(watched);
    let sources: Vec<_> = rails.iter().filter_map(|rail| rail.device.source_of_events()).collect();
    let events = sources.iter().filter_map(|pd| pd.context().event_fd());
    fds.extend(events.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
    match poll(&mut fds, PollTimeout::try_from(pause).unwrap_or(PollTimeout::ZERO)) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => {}
        Err(error) => {
            tracing::warn!("service thread: poll failed, retrying: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn drain(wakened: &mut UnixStream) {
    let mut bytes = [0; 64];
    while matches!(wakened.read(&mut bytes), Ok(1..)) {}
}

impl Watched {
    /// Whether it was closed, and the peer has closed too, or took too long.
    fn is_over(&self) -> bool {
        let Some(until) = self.closing else { return false };
        let peer_has_closed = self.driver.peer().presence() != peer::Presence::Here;
        Instant::now() >= until || peer_has_closed && (self.channel.is_none() || !self.driver.is_waiting())
    }

    fn tend(&mut self, has_news: bool) {
        let now = Instant::now();
        self.listen(now);
        let Self { channel, driver, .. } = self;
        driver.tend(now, has_news, &mut |frame| match channel {
            Some(open) => match open.offer(&Message::Control(frame)) {
                Ok(taken) => taken,
                Err(error) => {
                    tracing::debug!("{error}");
                    false
                }
            },
            None => false,
        });
    }

    /// Hears what came over the channel.
    fn listen(&mut self, now: Instant) {
        let peer = Arc::clone(self.driver.peer());
        for _ in 0..MESSAGES {
            let Some(channel) = &mut self.channel else { return };
            match channel.receive() {
                Ok(Received::Message(Message::Control(frame))) => self.driver.hear(&frame, now),
                Ok(Received::Message(other)) => {
                    tracing::warn!("{} sent an unexpected {} message: ignored", peer.name, other.kind())
                }
                Ok(Received::Nothing) => return,
                Ok(Received::Closed) => {
                    self.driver.suspect(now);
                    self.channel = None;
                }
                Ok(Received::Unreachable(why)) => {
                    self.driver.lost_channel(&why);
                    self.channel = None;
                }
                Err(error) => {
                    self.driver.broken_channel(&error, now);
                    self.channel = None;
                }
            }
        }
    }
}
