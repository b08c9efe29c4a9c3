//! The thread that watches over the connections: their peers' channels, their rails, and those that were closed until their
//! peers have closed too; of connections over streams, those that were closed.
//!
//! It runs while there is anything to watch, and borrows a data path for moments only ([`crate::comm::datapath::path`]). A closed connection's
//! queue pairs linger: the peer may still wait for the acknowledgement of its last write, or write a clear-to-send that nobody
//! needs.

use super::devices::{Devices, News};
use super::driver::Driver;
use super::redial::{RedialListener, Standing};
use super::tcp::{Redialling, Tcp};
use crate::comm::channel::Channel;
use crate::comm::datapath::peer;
use crate::comm::datapath::waker::Waker;
use crate::comm::process::Process;
use crate::comm::streams::farewell::Farewell;
use crate::comm::threads;
use crate::error::{Error, Result, panic_text};
use crate::wire::message::Redial;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
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
/// The same for a connection with something under way.
const BUSY: Duration = Duration::from_millis(5);
/// Shortest pause before a deadline.
const SHORTEST: Duration = Duration::from_millis(1);

/// Names a watched connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchId(u64);

/// The service thread of a process, and the orders for it.
pub struct Service {
    process: Arc<Process>,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    orders: Vec<Order>,
    next_id: u64,
    waker: Option<UnixStream>,
    /// Where peers dial again.
    standing: Standing,
}

enum Order {
    Watch(Box<Watched>),
    Close(WatchId),
    /// A connection over streams was closed.
    Part(Farewell),
    /// A data path has news.
    Look,
}

struct Watched {
    id: WatchId,
    tcp: Tcp,
    driver: Driver,
    closing: Option<Instant>,
}

impl Service {
    /// A service without connections. Its thread starts with the first one.
    pub fn new(process: Arc<Process>) -> Self {
        Self { process, shared: Arc::default() }
    }

    /// Watches a connection, after `first` has said to the peer what comes before that: that the connection is there, which is
    /// said only where somebody looks after it. `first` knows how the connection gets another TCP connection.
    ///
    /// # Errors
    /// [`Error::Os`] when the thread cannot be started, and what `first` says. Nothing is watched then.
    pub fn watch(
        &self,
        mut channel: Channel,
        driver: Driver,
        first: impl FnOnce(&mut Channel, &mut Standing) -> Result<Redialling>,
    ) -> Result<WatchId> {
        let mut shared = lock(&self.shared);
        // The order comes last: left behind by a failure it would be obeyed later, and the connection, which nobody has, never closed.
        // The thread sees it, because it takes its orders under the lock.
        self.start_or_wake(&mut shared)?;
        let redialling = first(&mut channel, &mut shared.standing)?;
        shared.next_id += 1;
        let id = WatchId(shared.next_id);
        let tcp = Tcp::new(channel, redialling);
        shared.orders.push(Order::Watch(Box::new(Watched { id, tcp, driver, closing: None })));
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

    /// Keeps a closed connection's streams until the peer has closed them too.
    pub fn part(&self, mut farewell: Farewell) {
        // Most are over soon, and what is unread of a process that ends now is read.
        if farewell.tend(Instant::now()) {
            return;
        }
        let mut shared = lock(&self.shared);
        shared.orders.push(Order::Part(farewell));
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
        let (process, theirs) = (Arc::clone(&self.process), Arc::clone(&self.shared));
        threads::spawn("spark-service", move || serve(&process, &theirs, wakened)).map_err(trouble)?;
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

fn serve(process: &Arc<Process>, shared: &Mutex<Shared>, mut wakened: UnixStream) {
    let (mut watched, mut listener): (Vec<Watched>, Option<RedialListener>) = Default::default();
    let (mut parting, mut devices): (Vec<Farewell>, Devices) = Default::default();
    loop {
        let (orders, opened) = {
            let mut shared = lock(shared);
            (std::mem::take(&mut shared.orders), shared.standing.take_opened())
        };
        listener = opened.or(listener);
        let look =
            AssertUnwindSafe(|| look_after(process, orders, &mut watched, &mut parting, &mut listener, &mut devices));
        if let Err(payload) = catch_unwind(look) {
            parting.clear();
            abandon(&mut watched, panic_text(&*payload));
        }
        let is_awaited = watched.iter().any(|each| each.tcp.is_awaited());
        let is_idle = watched.is_empty() && parting.is_empty();
        if is_idle || listener.is_some() && !is_awaited {
            let mut shared = lock(shared);
            let has_orders = !shared.orders.is_empty();
            if !has_orders {
                shared.standing.close();
                listener = None;
            }
            if is_idle && !has_orders {
                // Whoever comes next starts a new thread; nobody can have written to this one's pipe meanwhile.
                shared.waker = None;
                return;
            }
            if has_orders {
                continue;
            }
        }
        wait(&watched, &devices, &wakened);
        drain(&mut wakened);
    }
}

fn look_after(
    process: &Arc<Process>,
    orders: Vec<Order>,
    watched: &mut Vec<Watched>,
    parting: &mut Vec<Farewell>,
    listener: &mut Option<RedialListener>,
    devices: &mut Devices,
) {
    let (mut closed, mut has_news) = (Vec::new(), false);
    // All that is to be watched comes first, before anything that can have a fault: `abandon` tells those in `watched`.
    for order in orders {
        match order {
            Order::Watch(new) => watched.push(*new),
            Order::Close(id) => closed.push(id),
            Order::Part(farewell) => parting.push(farewell),
            Order::Look => has_news = true,
        }
    }
    for each in watched.iter_mut().filter(|each| closed.contains(&each.id)) {
        each.driver.close();
        each.closing = Some(Instant::now() + LINGER);
    }
    let now = Instant::now();
    parting.retain_mut(|farewell| !farewell.tend(now));
    if !watched.is_empty() {
        for news in devices.round(process, now) {
            watched.iter_mut().for_each(|each| each.tell(&news, now));
        }
        process.tick(now);
    }
    if let Some(listener) = listener {
        take_redialled(listener, watched);
    }
    watched.iter_mut().for_each(|each| each.tend(has_news));
    watched.retain(|each| !each.is_over());
}

/// Lets in peers that have dialled again.
fn take_redialled(listener: &mut RedialListener, watched: &mut [Watched]) {
    let expects = |redial: &Redial| watched.iter().any(|each| each.tcp.expects(redial, &each.driver));
    for (channel, redial) in listener.look(expects, Instant::now()) {
        // Of two that a peer has dialled the later one stays.
        if let Some(each) = watched.iter_mut().find(|each| each.tcp.expects(&redial, &each.driver)) {
            each.tcp.replace(channel, &redial, &mut each.driver);
        }
    }
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

/// Waits for something to happen.
fn wait(watched: &[Watched], devices: &Devices, wakened: &UnixStream) {
    let is_busy = devices.is_busy() || watched.iter().any(|each| each.driver.is_busy());
    let due = watched.iter().filter_map(|each| each.driver.next_due()).min();
    let until_due = due.map_or(CALM, |due| due.saturating_duration_since(Instant::now()).max(SHORTEST));
    let pause = if is_busy { BUSY } else { CALM.min(until_due) };
    let mut fds = vec![PollFd::new(wakened.as_fd(), PollFlags::POLLIN)];
    fds.extend(watched.iter().flat_map(|each| each.tcp.fds()).map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
    let sources = devices.event_sources();
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
        Instant::now() >= until || peer_has_closed && (!self.tcp.is_open() || !self.driver.is_waiting())
    }

    fn tell(&mut self, news: &News, now: Instant) {
        match news {
            News::Port(rail, change) => self.driver.port_changed(rail, *change, now),
            News::CompletionsLost(cq) => self.driver.completions_lost(*cq, now),
        }
    }

    fn tend(&mut self, has_news: bool) {
        let now = Instant::now();
        let Self { tcp, driver, .. } = self;
        tcp.tend(driver, now);
        driver.tend(now, has_news, &mut |frame| tcp.send(frame));
    }
}
