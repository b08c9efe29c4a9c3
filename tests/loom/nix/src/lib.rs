//! The part of the `nix` crate that `comm/recovery/service.rs` uses: waiting on `loom_std`'s pipes.

pub mod poll {
    use crate::errno::Errno;
    use core::time::Duration;
    use loom_std::os::fd::BorrowedFd;

    pub struct PollFlags;

    impl PollFlags {
        pub const POLLIN: Self = Self;
    }

    /// A time limit. [`poll`] ignores it.
    pub struct PollTimeout;

    impl PollTimeout {
        pub const ZERO: Self = Self;
    }

    impl TryFrom<Duration> for PollTimeout {
        type Error = Errno;
        fn try_from(_: Duration) -> Result<Self, Errno> {
            Ok(Self)
        }
    }

    pub struct PollFd<'a>(BorrowedFd<'a>);

    impl<'a> PollFd<'a> {
        pub fn new(fd: BorrowedFd<'a>, _: PollFlags) -> Self {
            Self(fd)
        }
    }

    /// Waits for the first pipe without a time limit. If a wake-up is lost and only a time-out
    /// would end the wait, loom reports a deadlock.
    pub fn poll(fds: &mut [PollFd<'_>], _: PollTimeout) -> Result<i32, Errno> {
        let pipe = fds.iter().find_map(|fd| fd.0.0).ok_or(Errno::EINVAL)?;
        pipe.wait();
        Ok(1)
    }
}

pub mod errno {
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Errno {
        EINTR,
        EINVAL,
    }

    impl core::fmt::Display for Errno {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            write!(f, "{self:?}")
        }
    }
}
