//! What `comm/recovery/service.rs` asks of the crate of this name: waiting, on `loom_std`'s pipes.

/// Waiting for descriptors.
pub mod poll {
    use crate::errno::Errno;
    use core::time::Duration;
    use loom_std::os::fd::BorrowedFd;

    /// What is waited for.
    pub struct PollFlags;

    impl PollFlags {
        /// Something to read.
        pub const POLLIN: Self = Self;
    }

    /// How long.
    pub struct PollTimeout;

    impl PollTimeout {
        /// Not at all.
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
        /// It.
        pub fn new(fd: BorrowedFd<'a>, _: PollFlags) -> Self {
            Self(fd)
        }
    }

    /// Waits for the first of them that is a pipe, without end: whatever a time-out would have to save is lost here, and loom says
    /// so ("deadlock").
    pub fn poll(fds: &mut [PollFd<'_>], _: PollTimeout) -> Result<i32, Errno> {
        let pipe = fds.iter().find_map(|fd| fd.0.0).ok_or(Errno::EINVAL)?;
        pipe.wait();
        Ok(1)
    }
}

/// Error numbers.
pub mod errno {
    /// One.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Errno {
        /// A signal came.
        EINTR,
        /// Nothing to wait for.
        EINVAL,
    }

    impl core::fmt::Display for Errno {
        fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
            write!(f, "{self:?}")
        }
    }
}
