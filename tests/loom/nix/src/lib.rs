//! The part of the `nix` crate that `comm/recovery/service.rs` uses: waiting, on `loom_std`'s
//! pipes.

/// Waiting for descriptors.
pub mod poll {
    use crate::errno::Errno;
    use core::time::Duration;
    use loom_std::os::fd::BorrowedFd;

    /// Events to wait for.
    pub struct PollFlags;

    impl PollFlags {
        /// Readable.
        pub const POLLIN: Self = Self;
    }

    /// Time limit of a wait, which is ignored.
    pub struct PollTimeout;

    impl PollTimeout {
        /// No wait.
        pub const ZERO: Self = Self;
    }

    impl TryFrom<Duration> for PollTimeout {
        type Error = Errno;
        fn try_from(_: Duration) -> Result<Self, Errno> {
            Ok(Self)
        }
    }

    /// A descriptor to wait for.
    pub struct PollFd<'a>(BorrowedFd<'a>);

    impl<'a> PollFd<'a> {
        /// Creates an entry for `fd`.
        pub fn new(fd: BorrowedFd<'a>, _: PollFlags) -> Self {
            Self(fd)
        }
    }

    /// Waits without a limit for the first of them that is a pipe. A wake-up that only a time-out
    /// would replace is lost here, and loom reports it ("deadlock").
    pub fn poll(fds: &mut [PollFd<'_>], _: PollTimeout) -> Result<i32, Errno> {
        let pipe = fds.iter().find_map(|fd| fd.0.0).ok_or(Errno::EINVAL)?;
        pipe.wait();
        Ok(1)
    }
}

/// Error numbers.
pub mod errno {
    /// The error numbers in use.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Errno {
        /// A signal interrupted the call.
        EINTR,
        /// There is no descriptor to wait for.
        EINVAL,
    }

    impl core::fmt::Display for Errno {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            write!(f, "{self:?}")
        }
    }
}
