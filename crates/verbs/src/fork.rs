//! A child that was forked from a process that uses the network, for example by PyTorch's
//! DataLoader.
//!
//! An RDMA connection does not survive fork: the child shares the parent's queue memory and
//! doorbells, but has none of the parent's threads. So the plugin refuses every call in the child.
//! A fork handler sets the flag that [`forked`] reads, and a call costs one load. Comparing process
//! ids would cost a system call. A child of a raw `clone` is not detected. No program that loads
//! NCCL is known to make one.
//!
//! The child also inherits the parent's TCP sockets. While a copy is open, TCP does not end with
//! the parent, so peers do not notice that the parent was killed. Each socket of the plugin is
//! therefore an [`OwnSocket`], and the fork handler replaces the child's copies. A number is not
//! closed but replaced by an unconnected socket, so that no other file of the child can get it.
//! Descriptors of others, and the plugin's other files, stay as they are.
//!
//! One gap is accepted, because a lock in a fork handler could block the program: if another thread
//! opens or drops a socket during the fork, the child may keep its copy of that socket.

use host::error::{Call, Error, Result};
use once_cell::sync::OnceCell;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);
static OPEN: Table<MOST_SOCKETS> = Table::new();
/// Descriptor of the unconnected socket; -1 before [`watch_for_fork`].
static REPLACEMENT: AtomicI32 = AtomicI32::new(FREE);

/// Sockets of this process that a child does not keep: 16 KiB of memory. NCCL's largest jobs on
/// Sparks have some hundred connections in a process, each with one or two sockets.
const MOST_SOCKETS: usize = 4096;
const FREE: RawFd = -1;

/// Starts to watch for forks. Later calls do nothing.
///
/// # Errors
/// [`Error::Os`] if the process has no descriptor or no memory for the handler.
pub fn watch_for_fork() -> Result<()> {
    static DONE: OnceCell<()> = OnceCell::new();
    DONE.get_or_try_init(install_handler).copied()
}

fn install_handler() -> Result<()> {
    let replacement = UnixDatagram::unbound().map_err(|e| Error::os(Call::WatchFork, &e))?;
    // SAFETY: the handler only uses atomics and `dup3`, which are allowed in a child of a threaded
    // process. It stays mapped until the process ends: the library is linked with `-z nodelete`.
    let errno = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if errno != 0 {
        return Err(Error::Os {
            call: Call::WatchFork,
            errno,
        });
    }
    // The descriptor stays open until the process ends.
    REPLACEMENT.store(replacement.into_raw_fd(), Ordering::Relaxed);
    Ok(())
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
    OPEN.replace_all(REPLACEMENT.load(Ordering::Relaxed));
}

/// Returns true in a child that was forked after [`watch_for_fork`].
#[inline]
pub fn forked() -> bool {
    // Relaxed: the child begins with one thread, which stores the flag before it starts any other.
    FORKED.load(Ordering::Relaxed)
}

/// A socket of this process alone: a forked child gets no copy of it.
#[derive(Debug)]
pub struct OwnSocket<S> {
    // Before `socket`: a struct's fields are dropped in order, and a closed number, which another
    // file may have got meanwhile, must not be in the table.
    _entry: Option<Entry>,
    socket: S,
}

impl<S: AsFd> OwnSocket<S> {
    /// Takes over a socket. If the process has too many, a child keeps its copy of this one; the
    /// first time, a line in the log says so.
    pub fn new(socket: S) -> Self {
        static WARNED: AtomicBool = AtomicBool::new(false);
        let entry = OPEN.enter(socket.as_fd().as_raw_fd());
        if entry.is_none() && !WARNED.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "more than {MOST_SOCKETS} TCP connections: if this process is killed while a forked child lives, some peers notice it late"
            );
        }
        Self {
            _entry: entry,
            socket,
        }
    }
}

impl<S> Deref for OwnSocket<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.socket
    }
}

/// Descriptors of open sockets. The fork handler reads it, so it has no lock and a fixed size.
struct Table<const N: usize>([AtomicI32; N]);

/// A descriptor's place in the table, until it is dropped.
#[derive(Debug)]
struct Entry(&'static AtomicI32);

impl<const N: usize> Table<N> {
    const fn new() -> Self {
        Self([const { AtomicI32::new(FREE) }; N])
    }

    /// Enters a descriptor. Returns `None` if the table is full.
    fn enter(&'static self, socket: RawFd) -> Option<Entry> {
        let is_taken = |place: &&AtomicI32| {
            place
                .compare_exchange(FREE, socket, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
        };
        self.0.iter().find(is_taken).map(Entry)
    }

    /// Replaces each entered descriptor, and empties the table: a child of this child must not
    /// replace them again.
    fn replace_all(&self, by: RawFd) {
        for place in &self.0 {
            // Most places are free. A store would copy their page for the child.
            if place.load(Ordering::Relaxed) != FREE {
                let socket = place.swap(FREE, Ordering::Relaxed);
                // SAFETY: takes no memory. The number is that of a socket of the parent. If another
                // thread of the parent opened that socket during the fork, this child has no file
                // of that number, or one that the parent has closed. This child has one thread,
                // which is in this handler.
                unsafe { libc::dup3(by, socket, libc::O_CLOEXEC) };
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Release: the number leaves the table before its owner closes it.
        self.0.store(FREE, Ordering::Release);
    }
}

#[cfg(test)]
#[path = "../../../tests/common/tcp_pair.rs"]
mod tcp_pair;

#[cfg(test)]
mod tests {
    use super::tcp_pair::tcp_pair;
    use super::*;
    use std::io::Read;
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    /// Returns true if the other end has received the end of the stream.
    fn has_ended(other: &mut TcpStream) -> bool {
        other
            .set_read_timeout(Some(Duration::from_millis(300)))
            .unwrap();
        matches!(other.read(&mut [0]), Ok(0))
    }

    /// Child process that lives until it is dropped.
    struct Child(libc::pid_t);

    impl Child {
        /// Forks, and waits until the child has run the fork handler.
        fn fork() -> Self {
            let (mut here, there) = UnixStream::pair().unwrap();
            // SAFETY: the child calls nothing but `write` and `pause`, which are allowed in a child
            // of a threaded process.
            match unsafe { libc::fork() } {
                // SAFETY: one byte of a constant is read.
                0 => unsafe {
                    libc::write(there.as_raw_fd(), b"1".as_ptr().cast(), 1);
                    loop {
                        libc::pause();
                    }
                },
                child => {
                    here.read_exact(&mut [0]).unwrap();
                    Self(child)
                }
            }
        }

        /// Returns the kernel's name of the child's file with this descriptor.
        fn file(&self, socket: RawFd) -> String {
            std::fs::read_link(format!("/proc/{}/fd/{socket}", self.0))
                .unwrap()
                .display()
                .to_string()
        }
    }

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: takes no memory. The process is this one's child, and was not awaited before.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "fork")]
    fn a_forked_child_does_not_keep_a_connection_open() {
        watch_for_fork().unwrap();
        let [one, mut other] = tcp_pair();
        let [stranger, mut strangers_peer] = tcp_pair();
        let number = one.as_raw_fd();
        let strangers_number = stranger.as_raw_fd();
        let name = |socket: RawFd| {
            std::fs::read_link(format!("/proc/self/fd/{socket}"))
                .unwrap()
                .display()
                .to_string()
        };
        let names = [name(number), name(strangers_number)];
        let one = OwnSocket::new(one);
        let child = Child::fork();
        assert!(
            !forked() && one.peer_addr().is_ok(),
            "the parent keeps its socket"
        );
        assert_ne!(child.file(number), names[0]);
        assert_eq!(
            child.file(strangers_number),
            names[1],
            "a stranger's socket stays"
        );
        assert!(!has_ended(&mut other));
        drop((one, stranger));
        assert!(has_ended(&mut other));
        assert!(
            !has_ended(&mut strangers_peer),
            "the child holds the other connection"
        );
    }

    #[test]
    fn a_full_table_takes_no_more() {
        static SMALL: Table<2> = Table::new();
        let first = SMALL.enter(100).unwrap();
        let _second = SMALL.enter(101).unwrap();
        assert!(SMALL.enter(102).is_none());
        drop(first);
        assert!(SMALL.enter(103).is_some());
    }
}
