//! The service thread. It watches the process's connections: their TCP connections and their rails.
//! It watches a closed connection until its peer has closed too. It also repeats chores: the close
//! of TCP streams, and the search for connections whose set-up NCCL has abandoned.
//!
//! The thread runs while there is something to watch, and borrows a data path for short times only
//! ([`crate::comm::datapath::path`]). A call into a device may hang, so other threads make these
//! calls. The service thread keeps the queue pairs of a closed connection for a while, because the
//! peer may still wait for the acknowledgement of its last write, or write a CTS entry that this
//! end no longer uses.
//!
//! # Closing
//!
//! A process may end directly after it has closed its connections. So the closing thread itself
//! sends BYE: when [`Service::close`] returns, the kernel has BYE, and delivers it even if the
//! process has ended. For this, the service thread locks each connection only while it works on
//! that connection, never while it waits. Two cases leave BYE to the service thread:
//! - Another thread uses the connection or its data path for longer than the closing thread waits
//!   (50 ms).
//! - TCP accepts no more bytes, or has failed. Then the closing thread writes BYE over the rails,
//!   and the service thread repeats it.

use super::devices::{DeviceChange, Devices};
use super::driver::Driver;
use super::redial::{RedialHandle, RedialListener};
use super::tcp::{Redialling, Tcp};
use crate::clock;
use crate::comm::channel::Channel;
use crate::comm::datapath::peer;
use crate::comm::datapath::waker::Waker;
use crate::comm::process::Process;
use crate::comm::threads;
use host::error::{Call, Error, Internal, Result, panic_text};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use proto::time::Instant;
use proto::wire::message::Redial;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

/// Longest time that a closed connection waits for its peer to close. Meanwhile the NIC
/// acknowledges the peer's retransmissions. Some come after seconds (docs/mlx5.md). BYE confirms
/// the sends that remain unacknowledged.
const LINGER: Duration = Duration::from_secs(10);
/// Longest time that BYE waits for the arrivals of rails that are being stopped. That usually takes
/// microseconds, unless the device hangs.
const FENCES: Duration = Duration::from_millis(500);
/// Longest interval between rounds while no work is in progress. Limits the delay until a silent
/// loss is noticed, and until a control frame from a rail is read.
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between rounds while work is in progress.
const BUSY_INTERVAL: Duration = Duration::from_millis(5);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(1);
/// Number of times that a closing thread tries to close its connection, with pauses of
/// [`TRY_PAUSE`]. A round of the service thread usually takes microseconds.
const TRIES: usize = 50;
const TRY_PAUSE: Duration = Duration::from_millis(1);

/// A watched connection, from the view of its owner.
#[derive(Debug)]
pub struct Watch(Weak<Mutex<Watched>>);

/// Work that the service thread repeats in each round until the work returns true.
type Chore = Box<dyn FnMut(Instant) -> bool + Send>;

/// The service thread of a process, and its queue of commands.
pub struct Service {
    process: Arc<Process>,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    commands: Vec<Command>,
    waker: Option<UnixStream>,
    redial_handle: RedialHandle,
}

enum Command {
    Watch(Arc<Mutex<Watched>>),
    /// NCCL has closed this connection. The closing thread has sent BYE, unless the connection or
    /// its data path was in use for long.
    Close(Arc<Mutex<Watched>>),
    Repeat(Chore),
    /// A data path has lost a rail.
    Poll,
}

struct Watched {
    tcp: Tcp,
    driver: Driver,
    /// True while BYE waits because the data path was busy when NCCL closed the connection.
    must_close: bool,
    /// Time after which a closed connection no longer waits for its peer.
    closing: Option<Instant>,
}

impl Service {
    /// Creates a service without connections. Its thread starts with the first one.
    pub fn new(process: Arc<Process>) -> Self {
        Self {
            process,
            shared: Arc::default(),
        }
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
    ) -> Result<Watch> {
        let mut shared = lock(&self.shared);
        // The command is added after the call of `send_last_message`. If the command came before
        // and the call failed, the thread would watch a connection that has no owner and is never
        // closed. The thread cannot miss the command, because it takes its commands under the lock.
        self.start_or_wake(&mut shared)?;
        let redialling = send_last_message(&mut channel, &mut shared.redial_handle)?;
        let tcp = Tcp::new(channel, redialling);
        let watched = Arc::new(Mutex::new(Watched {
            tcp,
            driver,
            must_close: false,
            closing: None,
        }));
        let watch = Watch(Arc::downgrade(&watched));
        shared.commands.push(Command::Watch(watched));
        Ok(watch)
    }

    /// Sends BYE without waiting for the peer. Then the service thread keeps the connection's queue
    /// pairs until the peer has closed too, but at most for ten seconds.
    pub fn close(&self, watch: &Watch) {
        // After a panic of the service thread, the connection is no longer watched.
        let Some(watched) = watch.0.upgrade() else {
            return;
        };
        close_soon(&watched);
        if let Err(error) = self.tell(Command::Close(watched)) {
            tracing::warn!("could not notify peer of closed connection: {error}");
        }
    }

    /// Does `chore` once. If it returns false, the service thread repeats it in each round until it
    /// returns true.
    ///
    /// # Errors
    /// [`Error::Os`] if no thread can be started. Then the chore is not repeated.
    pub fn repeat(&self, mut chore: impl FnMut(Instant) -> bool + Send + 'static) -> Result<()> {
        if chore(clock::now()) {
            return Ok(());
        }
        let mut shared = lock(&self.shared);
        self.start_or_wake(&mut shared)?;
        shared.commands.push(Command::Repeat(Box::new(chore)));
        Ok(())
    }

    /// Gives a command about watched connections to the service thread. If the thread does not run,
    /// nothing is watched: a connection may end between its close and this call.
    fn tell(&self, command: Command) -> Result<()> {
        let mut shared = lock(&self.shared);
        if shared.waker.is_none() {
            return Ok(());
        }
        shared.commands.push(command);
        self.start_or_wake(&mut shared)
    }

    fn start_or_wake(&self, shared: &mut Shared) -> Result<()> {
        if let Some(waker) = &mut shared.waker {
            // If the socket's buffer is full, its unread bytes wake the thread.
            return match waker.write(&[1]) {
                Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => {
                    Err(Error::os(Call::WakeService, &e))
                }
                _ => Ok(()),
            };
        }
        let trouble = |e: std::io::Error| Error::os(Call::StartService, &e);
        let (waker, wakened) = UnixStream::pair().map_err(trouble)?;
        waker.set_nonblocking(true).map_err(trouble)?;
        wakened.set_nonblocking(true).map_err(trouble)?;
        let process = Arc::clone(&self.process);
        let theirs = Arc::clone(&self.shared);
        threads::spawn("spark-service", move || serve(&process, &theirs, wakened))
            .map_err(trouble)?;
        shared.waker = Some(waker);
        Ok(())
    }
}

impl Waker for Service {
    #[cold]
    fn wake(&self) {
        if let Err(error) = self.tell(Command::Poll) {
            tracing::warn!("could not report the loss of a rail to the service thread: {error}");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock is held leaves the list of commands intact. A panic in a connection
    // either fails all connections (`abandon`), or happens while that connection closes. A closing
    // connection ends after `LINGER`.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends BYE if no other thread uses the connection or its data path for long. Does not enter a
/// connection in which a thread has panicked.
fn close_soon(watched: &Mutex<Watched>) {
    for _ in 0..TRIES {
        let is_over = match watched.try_lock() {
            Ok(mut watched) => watched.close(),
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Poisoned(_)) => true,
        };
        if is_over {
            return;
        }
        std::thread::sleep(TRY_PAUSE);
    }
}

fn serve(process: &Arc<Process>, shared: &Mutex<Shared>, mut wakened: UnixStream) {
    let (mut watched, mut chores): (Vec<Arc<Mutex<Watched>>>, Vec<Chore>) = Default::default();
    let (mut listener, mut devices): (Option<RedialListener>, Devices) = Default::default();
    loop {
        let (commands, opened) = {
            let mut shared = lock(shared);
            (
                std::mem::take(&mut shared.commands),
                shared.redial_handle.take_opened(),
            )
        };
        listener = opened.or(listener);
        let round = AssertUnwindSafe(|| {
            do_round(
                process,
                commands,
                &mut watched,
                &mut chores,
                &mut listener,
                &mut devices,
            )
        });
        if let Err(payload) = catch_unwind(round) {
            chores.clear();
            abandon(&mut watched, panic_text(&*payload));
        }
        let is_awaited = watched.iter().any(|each| lock(each).tcp.is_awaited());
        let is_idle = watched.is_empty() && chores.is_empty();
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
    watched: &mut Vec<Arc<Mutex<Watched>>>,
    chores: &mut Vec<Chore>,
    listener: &mut Option<RedialListener>,
    devices: &mut Devices,
) {
    let mut closed = Vec::new();
    let mut is_woken = false;
    // Adds new connections to `watched` before all other work. If that work panics, `abandon` fails
    // the connections in `watched`, and so the new ones too.
    for command in commands {
        match command {
            Command::Watch(new) => watched.push(new),
            Command::Close(one) => closed.push(one),
            Command::Repeat(chore) => chores.push(chore),
            Command::Poll => is_woken = true,
        }
    }
    closed.iter().for_each(|one| _ = lock(one).close());
    let now = clock::now();
    chores.retain_mut(|chore| !chore(now));
    if !watched.is_empty() {
        for change in devices.round(process, now) {
            watched
                .iter()
                .for_each(|each| lock(each).apply(&change, now));
        }
        process.tick(now);
        process.follow_work(now, watched.len(), || {
            watched
                .iter()
                .map(|each| lock(each).driver.work())
                .fold(0, u64::wrapping_add)
        });
    }
    if let Some(listener) = listener {
        take_redialled(listener, watched);
    }
    watched.iter().for_each(|each| lock(each).poll(is_woken));
    watched.retain(|each| !lock(each).is_over());
}

fn take_redialled(listener: &mut RedialListener, watched: &[Arc<Mutex<Watched>>]) {
    let expects = |redial: &Redial| watched.iter().any(|each| lock(each).expects(redial));
    for (channel, redial) in listener.poll(expects, clock::now()) {
        // If a peer has dialled twice, the later attempt stays.
        if let Some(mut each) = watched
            .iter()
            .map(|each| lock(each))
            .find(|each| each.expects(&redial))
        {
            let Watched { tcp, driver, .. } = &mut *each;
            tcp.replace(channel, &redial, driver);
        }
    }
}

/// Handles a panic of the service thread: fails all connections. Otherwise a connection would hang
/// after the loss of a rail, because nothing would recover the rail.
#[cold]
fn abandon(watched: &mut Vec<Arc<Mutex<Watched>>>, fault: &str) {
    tracing::warn!(
        "internal error in the service thread, all connections fail; please report it: {fault}"
    );
    let mut ending = Vec::new();
    for each in watched.drain(..) {
        let give_up = || {
            lock(&each)
                .driver
                .give_up(Internal::ServicePanic(fault.to_owned()).into())
        };
        // A second panic must not keep the other connections from failing.
        if catch_unwind(AssertUnwindSafe(give_up)).is_err() {
            tracing::warn!(
                "could not fail the connection with {}: it may hang",
                lock(&each).driver.peer().name
            );
        } else {
            ending.push(each);
        }
    }
    // NCCL gets the errors once the queue pairs have stopped. No round is due for any connection,
    // so this thread may wait. The drivers limit the wait.
    loop {
        let now = clock::now();
        ending.retain(|each| {
            let step = || {
                let mut each = lock(each);
                each.driver.end_when_stopped(now);
                each.driver.is_ending()
            };
            catch_unwind(AssertUnwindSafe(step)).unwrap_or_default()
        });
        if ending.is_empty() {
            return;
        }
        std::thread::sleep(SHORTEST_INTERVAL);
    }
}

fn wait(watched: &[Arc<Mutex<Watched>>], devices: &Devices, wakened: &UnixStream) {
    let mut is_busy = devices.is_busy();
    let mut due = None;
    let mut sockets = Vec::new();
    for each in watched {
        let each = lock(each);
        is_busy |= each.must_close || each.driver.is_busy();
        due = due.into_iter().chain(each.driver.next_due()).min();
        sockets.extend(each.tcp.sockets());
    }
    let until_due = due.map_or(IDLE_INTERVAL, |due| {
        due.saturating_duration_since(clock::now())
            .max(SHORTEST_INTERVAL)
    });
    let pause = if is_busy {
        BUSY_INTERVAL
    } else {
        IDLE_INTERVAL.min(until_due)
    };
    let mut fds = vec![PollFd::new(wakened.as_fd(), PollFlags::POLLIN)];
    fds.extend(
        sockets
            .iter()
            .map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)),
    );
    let sources = devices.event_sources();
    let events = sources.iter().filter_map(|pd| pd.context().event_fd());
    fds.extend(events.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
    match poll(
        &mut fds,
        PollTimeout::try_from(pause).unwrap_or(PollTimeout::ZERO),
    ) {
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
    /// Sends BYE, unless another call has done so. Returns false if the data path is busy.
    fn close(&mut self) -> bool {
        if self.closing.is_some() && !self.must_close {
            return true;
        }
        let now = clock::now();
        // Set first, so that the connection ends even if the next call panics.
        self.must_close = false;
        let until = *self.closing.get_or_insert(now + LINGER);
        let Self { tcp, driver, .. } = self;
        self.must_close =
            !driver.close(now, until - (LINGER - FENCES), &mut |frame| tcp.send(frame));
        !self.must_close
    }

    fn expects(&self, redial: &Redial) -> bool {
        self.tcp.expects(redial, &self.driver)
    }

    /// Returns true if the connection was closed and the peer has closed too, or took too long.
    fn is_over(&self) -> bool {
        let Some(until) = self.closing.filter(|_| !self.driver.is_ending()) else {
            return false;
        };
        let peer_has_closed =
            !self.must_close && self.driver.peer().presence() != peer::PeerState::Here;
        clock::now() >= until
            || peer_has_closed && (!self.tcp.is_open() || !self.driver.is_waiting())
    }

    fn apply(&mut self, change: &DeviceChange, now: Instant) {
        match change {
            DeviceChange::Port(rail, port) => self.driver.port_changed(rail, *port, now),
            DeviceChange::CompletionsLost(cq) => self.driver.completions_lost(*cq, now),
        }
    }

    fn poll(&mut self, is_woken: bool) {
        if self.must_close {
            self.close();
        }
        let now = clock::now();
        let Self { tcp, driver, .. } = self;
        tcp.poll(driver, now);
        driver.poll(now, is_woken, &mut |frame| tcp.send(frame));
    }
}
