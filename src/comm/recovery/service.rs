//! The service thread. It watches the process's connections: their TCP connections and their rails.
//! It watches a closed connection until its peer has closed too. For connections over TCP streams
//! it handles only the close.
//!
//! The thread runs while there is something to watch, and borrows a data path for short times only
//! ([`crate::comm::datapath::path`]). It calls no device, because a call may hang: other threads do.
//! It keeps the queue pairs of a closed connection for a while,
//! because the peer may still wait for the acknowledgement of its last write, or write a CTS entry
//! that this end no longer uses.

use super::devices::{DeviceChange, Devices};
use super::driver::Driver;
use super::redial::{RedialHandle, RedialListener};
use super::tcp::{Redialling, Tcp};
use crate::comm::channel::Channel;
use crate::comm::datapath::peer;
use crate::comm::datapath::waker::Waker;
use crate::comm::process::Process;
use crate::comm::streams::farewell::StreamClose;
use crate::comm::threads;
use crate::error::{Call, Error, Internal, Result, panic_text};
use crate::wire::message::Redial;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that a closed connection waits for its peer to close. A few retransmissions take
/// less time.
const LINGER: Duration = Duration::from_secs(10);
/// Longest interval between rounds while no work is in progress. Limits the delay until a silent
/// loss is noticed, and until a control frame from a rail is read.
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between rounds while work is in progress.
const BUSY_INTERVAL: Duration = Duration::from_millis(5);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(1);

/// Identifier of a watched connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WatchId(u64);

/// The service thread of a process, and its queue of commands.
pub struct Service {
    process: Arc<Process>,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    commands: Vec<Command>,
    next_id: u64,
    waker: Option<UnixStream>,
    redial_handle: RedialHandle,
}

enum Command {
    Watch(Box<Watched>),
    Close(WatchId),
    CloseStreams(StreamClose),
    /// A data path has lost a rail.
    Poll,
}

struct Watched {
    id: WatchId,
    tcp: Tcp,
    driver: Driver,
    /// True from NCCL's close until the driver has closed the connection.
    must_close: bool,
    closing: Option<Instant>,
}

impl Service {
    /// Creates a service without connections. Its thread starts with the first one.
    pub fn new(process: Arc<Process>) -> Self {
        Self { process, shared: Arc::default() }
    }

    /// Watches a connection. Calls `send_last_message` once the service thread is known to run. On
    /// the accepting side, that function sends the last message of the handshake. It returns the
    /// means to get another TCP connection.
    ///
    /// # Errors
    /// [`Error::Os`] if no thread can be started; the errors of `send_last_message`. After an error
    /// the connection is not watched.
    pub fn watch(
        &self,
        mut channel: Channel,
        driver: Driver,
        send_last_message: impl FnOnce(&mut Channel, &mut RedialHandle) -> Result<Redialling>,
    ) -> Result<WatchId> {
        let mut shared = lock(&self.shared);
        // The command is added after the call of `send_last_message`. If the command came before
        // and the call failed, the thread would watch a connection that has no owner and is never
        // closed. The thread cannot miss the command, because it takes its commands under the lock.
        self.start_or_wake(&mut shared)?;
        let redialling = send_last_message(&mut channel, &mut shared.redial_handle)?;
        shared.next_id += 1;
        let id = WatchId(shared.next_id);
        let tcp = Tcp::new(channel, redialling);
        shared.commands.push(Command::Watch(Box::new(Watched { id, tcp, driver, must_close: false, closing: None })));
        Ok(id)
    }

    /// Sends BYE, and keeps the connection's queue pairs until the peer has closed too, but at most
    /// for ten seconds.
    pub fn close(&self, id: WatchId) {
        let mut shared = lock(&self.shared);
        shared.commands.push(Command::Close(id));
        if let Err(error) = self.start_or_wake(&mut shared) {
            tracing::warn!("could not notify peer of closed connection: {error}");
        }
    }

    /// Keeps the streams of a closed connection until the peer has closed them too.
    pub fn close_streams(&self, mut farewell: StreamClose) {
        // Most closes finish in this first call. Because it is made here, the unread bytes are read
        // even if this process ends before the service thread runs.
        if farewell.poll(Instant::now()) {
            return;
        }
        let mut shared = lock(&self.shared);
        shared.commands.push(Command::CloseStreams(farewell));
        if let Err(error) = self.start_or_wake(&mut shared) {
            tracing::warn!("could not notify peer of closed connection: {error}");
        }
    }

    fn start_or_wake(&self, shared: &mut Shared) -> Result<()> {
        if let Some(waker) = &mut shared.waker {
            // If the socket's buffer is full, its unread bytes wake the thread.
            return match waker.write(&[1]) {
                Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => Err(Error::os(Call::WakeService, &e)),
                _ => Ok(()),
            };
        }
        let trouble = |e: std::io::Error| Error::os(Call::StartService, &e);
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
            // Nothing is watched, so no thread runs.
            return;
        }
        shared.commands.push(Command::Poll);
        if let Err(error) = self.start_or_wake(&mut shared) {
            tracing::warn!("could not report the loss of a rail to the service thread: {error}");
        }
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic while the lock is held leaves the list of commands intact.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(process: &Arc<Process>, shared: &Mutex<Shared>, mut wakened: UnixStream) {
    let (mut watched, mut listener): (Vec<Watched>, Option<RedialListener>) = Default::default();
    let (mut closing_streams, mut devices): (Vec<StreamClose>, Devices) = Default::default();
    loop {
        let (commands, opened) = {
            let mut shared = lock(shared);
            (std::mem::take(&mut shared.commands), shared.redial_handle.take_opened())
        };
        listener = opened.or(listener);
        let round = AssertUnwindSafe(|| {
            do_round(process, commands, &mut watched, &mut closing_streams, &mut listener, &mut devices)
        });
        if let Err(payload) = catch_unwind(round) {
            closing_streams.clear();
            abandon(&mut watched, panic_text(&*payload));
        }
        let is_awaited = watched.iter().any(|each| each.tcp.is_awaited());
        let is_idle = watched.is_empty() && closing_streams.is_empty();
        if is_idle || listener.is_some() && !is_awaited {
            let mut shared = lock(shared);
            let has_commands = !shared.commands.is_empty();
            if !has_commands {
                shared.redial_handle.close();
                listener = None;
            }
            if is_idle && !has_commands {
                // The next command starts a new thread. No command was added since the check,
                // because the lock is held.
                shared.waker = None;
                return;
            }
            if has_commands {
                continue;
            }
        }
        wait(&watched, &devices, &wakened);
        drain(&mut wakened);
    }
}

fn do_round(
    process: &Arc<Process>,
    commands: Vec<Command>,
    watched: &mut Vec<Watched>,
    closing_streams: &mut Vec<StreamClose>,
    listener: &mut Option<RedialListener>,
    devices: &mut Devices,
) {
    let (mut closed, mut is_woken) = (Vec::new(), false);
    // Adds new connections to `watched` before all other work. If that work panics, `abandon` fails
    // the connections in `watched`, and so the new ones too.
    for command in commands {
        match command {
            Command::Watch(new) => watched.push(*new),
            Command::Close(id) => closed.push(id),
            Command::CloseStreams(farewell) => closing_streams.push(farewell),
            Command::Poll => is_woken = true,
        }
    }
    for each in watched.iter_mut() {
        each.must_close |= closed.contains(&each.id);
        if each.must_close && each.driver.close() {
            (each.must_close, each.closing) = (false, Some(Instant::now() + LINGER));
        }
    }
    let now = Instant::now();
    closing_streams.retain_mut(|farewell| !farewell.poll(now));
    if !watched.is_empty() {
        for change in devices.round(process, now) {
            watched.iter_mut().for_each(|each| each.apply(&change, now));
        }
        process.tick(now);
    }
    if let Some(listener) = listener {
        take_redialled(listener, watched);
    }
    watched.iter_mut().for_each(|each| each.poll(is_woken));
    watched.retain(|each| !each.is_over());
}

fn take_redialled(listener: &mut RedialListener, watched: &mut [Watched]) {
    let expects = |redial: &Redial| watched.iter().any(|each| each.tcp.expects(redial, &each.driver));
    for (channel, redial) in listener.poll(expects, Instant::now()) {
        // If a peer has dialled twice, the later attempt stays.
        if let Some(each) = watched.iter_mut().find(|each| each.tcp.expects(&redial, &each.driver)) {
            each.tcp.replace(channel, &redial, &mut each.driver);
        }
    }
}

/// Handles a panic of the service thread: fails all connections. Otherwise a connection would hang
/// after the loss of a rail, because nothing would recover the rail.
#[cold]
fn abandon(watched: &mut Vec<Watched>, fault: &str) {
    tracing::warn!("internal error in the service thread, all connections fail; please report it: {fault}");
    let mut ending = Vec::new();
    for mut each in watched.drain(..) {
        let error = Internal::ServicePanic(fault.to_owned()).into();
        // A second panic must not keep the other connections from failing.
        if catch_unwind(AssertUnwindSafe(|| each.driver.give_up(error))).is_err() {
            tracing::warn!("could not fail the connection with {}: it may hang", each.driver.peer().name);
        } else {
            ending.push(each);
        }
    }
    // NCCL gets the errors once the queue pairs have stopped. No round is due for any connection,
    // so this thread may wait. The drivers limit the wait.
    loop {
        let now = Instant::now();
        ending.retain_mut(|each| {
            let step = AssertUnwindSafe(|| each.driver.end_when_stopped(now));
            catch_unwind(step).is_ok() && each.driver.is_ending()
        });
        if ending.is_empty() {
            return;
        }
        std::thread::sleep(SHORTEST_INTERVAL);
    }
}

fn wait(watched: &[Watched], devices: &Devices, wakened: &UnixStream) {
    let is_busy = devices.is_busy() || watched.iter().any(|each| each.must_close || each.driver.is_busy());
    let due = watched.iter().filter_map(|each| each.driver.next_due()).min();
    let until_due =
        due.map_or(IDLE_INTERVAL, |due| due.saturating_duration_since(Instant::now()).max(SHORTEST_INTERVAL));
    let pause = if is_busy { BUSY_INTERVAL } else { IDLE_INTERVAL.min(until_due) };
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
    /// Returns true if the connection was closed and the peer has closed too, or took too long.
    fn is_over(&self) -> bool {
        let Some(until) = self.closing.filter(|_| !self.driver.is_ending()) else { return false };
        let peer_has_closed = self.driver.peer().presence() != peer::PeerState::Here;
        Instant::now() >= until || peer_has_closed && (!self.tcp.is_open() || !self.driver.is_waiting())
    }

    fn apply(&mut self, change: &DeviceChange, now: Instant) {
        match change {
            DeviceChange::Port(rail, port) => self.driver.port_changed(rail, *port, now),
            DeviceChange::CompletionsLost(cq) => self.driver.completions_lost(*cq, now),
        }
    }

    fn poll(&mut self, is_woken: bool) {
        let now = Instant::now();
        let Self { tcp, driver, .. } = self;
        tcp.poll(driver, now);
        driver.poll(now, is_woken, &mut |frame| tcp.send(frame));
    }
}
