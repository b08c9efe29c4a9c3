//! The error type of the plugin and its crates.

use std::any::Any;

mod causes;

pub use causes::*;

/// Error of a plugin call. The variant determines the result code that NCCL gets. The variant's
/// fields have the cause. `Display` makes the text, for NCCL's logger or the command line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Unknown or malformed setting, or unreadable settings file.
    #[error("{name}={} is not usable: {fault}", shortened(value))]
    Setting {
        /// Variable, or line of a settings file.
        name: String,
        /// The value as given.
        value: String,
        /// Reason, with the allowed values.
        fault: SettingFault,
    },
    /// The machine lacks something that the plugin needs (a library, a device, a privilege).
    #[error(transparent)]
    Missing(#[from] Missing),
    /// Failed system or verbs call.
    #[error("{call}: {}", os_text(*.errno))]
    Os {
        /// The call and its arguments.
        call: Call,
        /// `errno` of the call; 0 if the system gave none.
        errno: i32,
    },
    /// The caller passed something that the interface does not allow.
    #[error(transparent)]
    Argument(#[from] Argument),
    /// The two ends cannot work together, or the job is set up wrongly.
    #[error(transparent)]
    Usage(#[from] Usage),
    /// No bytes get through: no rail works, devices refuse a request on every rail, an address is
    /// gone, or a TCP connection failed (the bootstrap's, or a stream).
    #[error(transparent)]
    Network(#[from] Network),
    /// The peer closed the connection, or its process is gone.
    #[error(transparent)]
    PeerGone(#[from] PeerGone),
    /// The peer broke the protocol.
    #[error(transparent)]
    Protocol(#[from] Violation),
    /// The peer, NCCL or a device of this host did not do something within its time limit.
    #[error(transparent)]
    TimedOut(#[from] TimedOut),
    /// Fault in this library.
    #[error(transparent)]
    Internal(#[from] Internal),
}

/// Result of the plugin's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Result of a function that runs for every message. The box keeps the result small enough to be
/// returned in registers. With an unboxed [`Error`], a call would take twice the instructions.
pub type Quick<T> = std::result::Result<T, Box<Error>>;

impl From<Box<Error>> for Error {
    fn from(error: Box<Error>) -> Self {
        *error
    }
}

impl From<getrandom::Error> for Error {
    fn from(error: getrandom::Error) -> Self {
        Missing::Random(error).into()
    }
}

impl Error {
    /// Returns [`Error::Os`] with the calling thread's `errno`.
    pub fn last_os(call: Call) -> Self {
        Self::os(call, &std::io::Error::last_os_error())
    }

    /// Returns [`Error::Os`] for a standard I/O error.
    pub fn os(call: Call, error: &std::io::Error) -> Self {
        Self::Os {
            call,
            errno: error.raw_os_error().unwrap_or(0),
        }
    }

    /// Returns true if the kernel reports that the device was removed (`EIO` of a disassociated
    /// context: `uverbs_ioctl.c`, `uverbs_main.c`).
    pub fn is_removal(&self) -> bool {
        matches!(
            self,
            Self::Os {
                errno: libc::EIO,
                ..
            }
        )
    }

    /// Returns true if mlx5, since Linux 5.18, reports that the device's firmware has failed
    /// (`mlx5_internal_err_ret_value` in drivers/net/ethernet/mellanox/mlx5/core/cmd.c).
    pub fn is_failed_device(&self) -> bool {
        matches!(
            self,
            Self::Os {
                errno: libc::ENOLINK,
                ..
            }
        )
    }

    /// Returns true if the same call may succeed later. This is so if the peer's address does not
    /// resolve or has no route yet (`rdma_resolve_ip` in drivers/infiniband/core/addr.c), if this
    /// end's GID has just gone (`ENODATA` of `rdma_get_gid_attr`, `ENODEV` of
    /// `rdma_read_gid_attr_ndev_rcu`, both in cache.c), if the device is away, and after every
    /// [`Error::Network`]: for example the port's address is not the agreed one, or another
    /// connection tests the path. NCCL's own transport repeats `ibv_modify_qp` by default only
    /// after ETIMEDOUT.
    pub fn is_temporary(&self) -> bool {
        let path = [
            libc::ETIMEDOUT,
            libc::EHOSTUNREACH,
            libc::ENETUNREACH,
            libc::ENODATA,
            libc::ENODEV,
        ];
        let is_path = matches!(self, Self::Os { errno, .. } if path.contains(errno));
        let is_away = matches!(
            self,
            Self::Missing(Missing::Silent(_) | Missing::Removed(_) | Missing::Idle(_))
        );
        is_path
            || is_away
            || matches!(self, Self::Network(_))
            || self.is_removal()
            || self.is_failed_device()
    }

    /// Returns true if the process or the host has no file descriptor left. The call may succeed
    /// later, when descriptors become free.
    pub fn is_shortage(&self) -> bool {
        matches!(
            self,
            Self::Os {
                errno: libc::EMFILE | libc::ENFILE,
                ..
            }
        )
    }
}

/// Returns the text of a panic's payload.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    match (
        payload.downcast_ref::<&str>(),
        payload.downcast_ref::<String>(),
    ) {
        (Some(text), _) => text,
        (_, Some(text)) => text.as_str(),
        _ => "no reason given",
    }
}

/// Cuts a value to 100 characters: NCCL cuts a log line at 1024, and the reason follows the value.
fn shortened(value: &str) -> String {
    const MOST: usize = 100;
    let start: String = value.chars().take(MOST).collect();
    if start.len() == value.len() {
        format!("{value:?}")
    } else {
        format!("{start:?}... ({} bytes)", value.len())
    }
}

fn os_text(errno: i32) -> String {
    match errno {
        0 => "unknown error".to_owned(),
        n @ libc::EMFILE => format!("{} (raise ulimit -n)", std::io::Error::from_raw_os_error(n)),
        n => std::io::Error::from_raw_os_error(n).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_that_went_and_an_address_that_does_not_resolve_are_temporary() {
        let is_temporary = |errno| {
            Error::Os {
                call: Call::Map(1),
                errno,
            }
            .is_temporary()
        };
        for errno in [
            libc::ENODATA,
            libc::ENODEV,
            libc::ETIMEDOUT,
            libc::EHOSTUNREACH,
            libc::EIO,
            libc::ENOLINK,
        ] {
            assert!(is_temporary(errno), "{errno}");
        }
        assert!(!is_temporary(libc::EINVAL) && !is_temporary(libc::ENOMEM));
    }

    #[test]
    fn an_error_names_its_cause_and_what_is_allowed() {
        let of = |name: &str, value: &str| {
            let fault = SettingFault::Value {
                reason: None,
                allowed: "0 to 255",
            };
            Error::Setting {
                name: name.to_owned(),
                value: value.to_owned(),
                fault,
            }
        };
        assert_eq!(
            of("NCCL_IB_TC", "300").to_string(),
            "NCCL_IB_TC=\"300\" is not usable: 0 to 255"
        );
        let expected = format!(
            "A=\"{}\"... (4000 bytes) is not usable: 0 to 255",
            "x".repeat(100)
        );
        assert_eq!(of("A", &"x".repeat(4000)).to_string(), expected);
        let os = Error::Os {
            call: Call::Map(4096),
            errno: libc::ENOMEM,
        };
        assert!(
            os.to_string()
                .starts_with("cannot map 4096 bytes: Cannot allocate memory"),
            "{os}"
        );
        let full = Error::Os {
            call: Call::ListInterfaces,
            errno: libc::EMFILE,
        };
        assert!(
            full.is_shortage() && full.to_string().contains("raise ulimit -n"),
            "{full}"
        );
        assert!(!os.is_shortage());
    }

    #[test]
    fn an_error_is_small_enough_to_return() {
        assert!(size_of::<Error>() <= 128, "{}", size_of::<Error>());
    }
}
