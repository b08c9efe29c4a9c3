//! The thread that watches the peers' channels and keeps closed connections until their peers have closed too.
//!
//! It runs while there is anything to watch, and never touches a data path. A closed connection's queue pairs linger:
//! the peer may still wait for the acknowledgement of its last write, or write a clear-to-send that nobody needs.

use super::channel::{Channel, Received};
use super::peer::{Peer, Presence};
use crate::error::{Error, Result};
use crate::wire::message::{Bye, Message};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use std::any::Any;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a closed connection waits for its peer to close: beyond one retransmission at NCCL's default timeout.
const LINGER: Duration = Duration::from_secs(10);

/// Names a watched channel.
#[derive(Debug, PartialEq, Eq)]
pub struct WatchId(u64);

/// The thread, and what it is told.
#[derive(Debug, Default)]
pub struct Service {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    orders: Vec<Order>,
    next_id: u64,
    waker: Option<UnixStream>,
}

#[derive(Debug)]
enum Order {
    Watch(Watched),
    Close { id: u64, bye: Bye, keep: Kept },
}

#[derive(Debug)]
struct Watched {
    id: u64,
    channel: Channel,
    peer: Arc<Peer>,
    closing: Option<(Instant, Kept)>,
}

type Kept = Box<dyn Any + Send>;

impl Service {
    /// Watches a peer's channel: a BYE or a broken channel is noted in `peer`.
    ///
    /// # Errors
    /// [`Error::Os`] when the thread cannot be started.
    pub fn watch(&self, channel: Channel, peer: Arc<Peer>) -> Result<WatchId> {
        let mut shared = lock(&self.shared);
        shared.next_id += 1;
        let id = shared.next_id;
        shared.orders.push(Order::Watch(Watched { id, channel, peer, closing: None }));
        self.wake(shared)?;
        Ok(WatchId(id))
    }

    /// Says BYE, and keeps what the peer may still reach until it has closed too.
    pub fn close(&self, id: WatchId, bye: Bye, keep: Kept) {
        let mut shared = lock(&self.shared);
        shared.orders.push(Order::Close { id: id.0, bye, keep });
        if let Err(error) = self.wake(shared) {
            tracing::warn!("a connection is closed without saying so to its peer: {error}");
        }
    }

    fn wake(&self, mut shared: MutexGuard<'_, Shared>) -> Result<()> {
        if let Some(waker) = &mut shared.waker {
            // A full pipe is as good: the thread has not yet looked.
            return match waker.write(&[1]) {
                Err(e) if e.kind() != std::io::ErrorKind::WouldBlock => Err(Error::os("waking the service thread", &e)),
                _ => Ok(()),
            };
        }
        let trouble = |e: std::io::Error| Error::os("starting the service thread", &e);
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

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    // A panic in a holder leaves a list of orders, whole.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve(shared: &Mutex<Shared>, mut wakened: UnixStream) {
    // The application's signals are for the application's threads.
    if let Err(error) = SigSet::all().thread_block() {
        tracing::debug!("the service thread takes signals: {error}");
    }
    let mut watched = Vec::new();
    loop {
        let orders = std::mem::take(&mut lock(shared).orders);
        for order in orders {
            obey(order, &mut watched);
        }
        let now = Instant::now();
        watched.retain(|each: &Watched| match &each.closing {
            Some((until, _)) => each.peer.presence() == Presence::Here && now < *until,
            None => true,
        });
        if watched.is_empty() {
            let mut shared = lock(shared);
            if shared.orders.is_empty() {
                // Whoever comes next starts a new thread; nobody can have written to this one's pipe meanwhile.
                shared.waker = None;
                return;
            }
            continue;
        }
        for index in wait(&watched, &wakened) {
            look(&mut watched[index]);
        }
        drain(&mut wakened);
    }
}

fn obey(order: Order, watched: &mut Vec<Watched>) {
    match order {
        Order::Watch(mut new) => {
            // A BYE right behind the handshake's last message was read with it: no poll tells of it.
            look(&mut new);
            watched.push(new);
        }
        Order::Close { id, bye, keep } => {
            if let Some(each) = watched.iter_mut().find(|each| each.id == id) {
                if let Err(error) = each.channel.send(&Message::Bye(bye)) {
                    tracing::debug!("no BYE for {}: {error}", each.peer.name);
                    each.peer.vanished();
                }
                each.closing = Some((Instant::now() + LINGER, keep));
            }
        }
    }
}

/// Waits for something to happen; which of the watched channels have news.
fn wait(watched: &[Watched], wakened: &UnixStream) -> Vec<usize> {
    let deadline = watched.iter().filter_map(|each| each.closing.as_ref().map(|(until, _)| *until)).min();
    // Half a minute at most, so that whatever could go unnoticed does not for long.
    let patience = deadline.map_or(Duration::from_secs(30), |until| until.saturating_duration_since(Instant::now()));
    let timeout = PollTimeout::try_from(patience + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
    // A channel whose peer has closed stays readable for ever, and there is nothing more to hear from it.
    let open: Vec<usize> = (0..watched.len()).filter(|&at| watched[at].peer.presence() == Presence::Here).collect();
    let mut fds = vec![PollFd::new(wakened.as_fd(), PollFlags::POLLIN)];
    fds.extend(open.iter().map(|&at| PollFd::new(watched[at].channel.as_fd(), PollFlags::POLLIN)));
    match poll(&mut fds, timeout) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => {}
        Err(error) => {
            tracing::warn!("the service thread cannot wait for its peers: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    let news = |at: usize| fds.get(at + 1).is_some_and(|fd| fd.any().unwrap_or(true));
    (0..open.len()).filter(|&at| news(at)).map(|at| open[at]).collect()
}

fn drain(wakened: &mut UnixStream) {
    let mut bytes = [0; 64];
    while matches!(wakened.read(&mut bytes), Ok(1..)) {}
}

fn look(each: &mut Watched) {
    match each.channel.receive() {
        Ok(Received::Message(Message::Bye(bye))) => each.peer.said_bye(bye.delivered),
        Ok(Received::Message(other)) => tracing::warn!("{} sent an unexpected {}", each.peer.name, other.kind()),
        Ok(Received::Nothing) => {}
        Ok(Received::Closed) => each.peer.vanished(),
        Err(error) => {
            tracing::debug!("{}: {error}", each.peer.name);
            each.peer.vanished();
        }
    }
}
