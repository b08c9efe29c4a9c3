//! The standard library with loom's atomics, cells, locks and threads in place of its own, and with
//! a pipe that loom knows. If a crate names this library `std`, loom models its sources unchanged.

#[doc(no_inline)]
pub use ::std::*;

pub mod sync {
    pub use ::std::sync::*;
    pub use loom::sync::{Condvar, Mutex, MutexGuard};

    pub mod atomic {
        pub use loom::sync::atomic::*;

        /// Loom's atomic, except that `store` is a swap with an unused result.
        ///
        /// In a word's modification order, a swap comes directly after the value that it has read.
        /// So a later store by that value's writer comes after the swap. Loom 0.7 does not know
        /// this (its issue 254). In the ownership word of a data path (`try_cell.rs`), it may order
        /// a swap that has read `TAKEN` after the owner's store of `USED`, and then the word stays
        /// taken. Loom gives a swap the right place in the modification order, so here the owner's
        /// store is a swap, too. Apart from its place, this swap orders no more than a store does.
        #[derive(Debug)]
        pub struct AtomicU8(loom::sync::atomic::AtomicU8);

        impl AtomicU8 {
            pub fn new(value: u8) -> Self {
                Self(loom::sync::atomic::AtomicU8::new(value))
            }

            pub fn store(&self, value: u8, order: Ordering) {
                self.0.swap(value, order);
            }

            pub fn load(&self, order: Ordering) -> u8 {
                self.0.load(order)
            }

            pub fn swap(&self, value: u8, order: Ordering) -> u8 {
                self.0.swap(value, order)
            }

            pub fn compare_exchange(
                &self,
                from: u8,
                to: u8,
                then: Ordering,
                other: Ordering,
            ) -> Result<u8, u8> {
                self.0.compare_exchange(from, to, then, other)
            }
        }
    }
}

pub mod thread {
    use ::std::cell::Cell;
    pub use loom::thread::*;

    loom::thread_local! {
        static PRETENDS: Cell<bool> = Cell::new(false);
    }

    /// True if this thread panics, or pretends to. A model cannot really panic: loom's threads
    /// share one system thread, so all would panic together.
    pub fn panicking() -> bool {
        ::std::thread::panicking() || PRETENDS.with(Cell::get)
    }

    pub fn as_if_panicking(act: impl FnOnce()) {
        PRETENDS.with(|pretends| pretends.set(true));
        act();
        PRETENDS.with(|pretends| pretends.set(false));
    }

    /// Lets other threads run: time does not pass in a model.
    pub fn sleep(_: ::std::time::Duration) {
        yield_now();
    }
}

pub mod hint {
    pub use ::std::hint::*;
    pub use loom::hint::spin_loop;
}

pub mod cell {
    pub use ::std::cell::*;

    /// Loom's cell, which checks that synchronisation orders all accesses.
    #[derive(Debug)]
    pub struct UnsafeCell<T>(loom::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub fn new(value: T) -> Self {
            Self(loom::cell::UnsafeCell::new(value))
        }

        /// Pointer to the value. Loom counts each call as a write.
        pub fn get(&self) -> *mut T {
            self.0.with_mut(|place| place)
        }
    }
}

pub mod os {
    pub use ::std::os::*;

    pub mod fd {
        use super::unix::net::Pipe;

        pub struct BorrowedFd<'a>(pub Option<&'a Pipe>);

        pub trait AsFd {
            fn as_fd(&self) -> BorrowedFd<'_>;
        }
    }

    pub mod unix {
        pub use ::std::os::unix::*;

        pub mod net {
            use super::super::fd::{AsFd, BorrowedFd};
            use crate::sync::{Arc, Condvar, Mutex};
            use ::std::io::{self, ErrorKind, Read, Write};

            #[derive(Default)]
            pub struct Pipe {
                state: Mutex<State>,
                news: Condvar,
            }

            #[derive(Default)]
            struct State {
                bytes: usize,
                is_closed: bool,
            }

            impl Pipe {
                /// Waits for a byte. Nothing else ends the wait: time does not pass in a model.
                pub fn wait(&self) {
                    let mut state = self.state.lock().unwrap();
                    while state.bytes == 0 {
                        state = self.news.wait(state).unwrap();
                    }
                }
            }

            pub struct UnixStream {
                to_me: Arc<Pipe>,
                to_other: Arc<Pipe>,
            }

            impl UnixStream {
                pub fn pair() -> io::Result<(Self, Self)> {
                    let one = Arc::new(Pipe::default());
                    let other = Arc::new(Pipe::default());
                    let first = Self {
                        to_me: Arc::clone(&one),
                        to_other: Arc::clone(&other),
                    };
                    Ok((
                        first,
                        Self {
                            to_me: other,
                            to_other: one,
                        },
                    ))
                }

                pub fn set_nonblocking(&self, _: bool) -> io::Result<()> {
                    Ok(())
                }
            }

            impl Drop for UnixStream {
                fn drop(&mut self) {
                    if !::std::thread::panicking() {
                        self.to_me.state.lock().unwrap().is_closed = true;
                    }
                }
            }

            impl Write for UnixStream {
                fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                    let mut state = self.to_other.state.lock().unwrap();
                    if state.is_closed {
                        return Err(ErrorKind::BrokenPipe.into());
                    }
                    state.bytes += bytes.len();
                    self.to_other.news.notify_all();
                    Ok(bytes.len())
                }

                fn flush(&mut self) -> io::Result<()> {
                    Ok(())
                }
            }

            impl Read for UnixStream {
                fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                    let mut state = self.to_me.state.lock().unwrap();
                    let taken = state.bytes.min(bytes.len());
                    state.bytes -= taken;
                    if taken == 0 {
                        Err(ErrorKind::WouldBlock.into())
                    } else {
                        Ok(taken)
                    }
                }
            }

            impl AsFd for UnixStream {
                fn as_fd(&self) -> BorrowedFd<'_> {
                    BorrowedFd(Some(&self.to_me))
                }
            }
        }
    }
}
