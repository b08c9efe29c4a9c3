//! The one error type.

use std::any::Any;

/// What a call of the plugin failed with. The text is for a person: it names the thing at fault and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A setting of the environment is unknown or malformed.
    #[error("{name}={} is not usable: {allowed}", shortened(value))]
    Setting {
        /// The variable.
        name: String,
        /// What it was set to.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// The machine lacks something the plugin needs (a library, a device, a privilege).
    #[error("{0}")]
    Missing(String),
    /// A system or verbs call failed.
    #[error("{what}: {}", os_text(*.errno))]
    Os {
        /// The call and what it was asked for.
        what: String,
        /// Its `errno`.
        errno: i32,
    },
    /// The caller passed something that the interface does not allow.
    #[error("{0}")]
    Argument(String),
    /// The two ends cannot work together, or the job was set up wrongly.
    #[error("{0}")]
    Usage(String),
    /// Bytes do not get through: no rail carries, the devices refuse a request on every rail, an address is gone, or the bootstrap's TCP
    /// has failed.
    #[error("{0}")]
    Network(String),
    /// The peer closed the connection, or its process is gone.
    #[error("{0}")]
    PeerGone(String),
    /// The peer broke the protocol.
    #[error("{0}")]
    Protocol(String),
    /// The peer did not do its part within the limit.
    #[error("{0}")]
    TimedOut(String),
    /// A fault in this library.
    #[error("{0}")]
    Internal(String),
}

/// The plugin's result.
pub type Result<T> = std::result::Result<T, Error>;

/// The result of a call that is made for every message: as small as its value, so that success
/// travels in registers. An unboxed [`Error`] would take twice the instructions.
pub type Quick<T> = std::result::Result<T, Box<Error>>;

impl From<Box<Error>> for Error {
    fn from(error: Box<Error>) -> Self {
        *error
    }
}

impl Error {
    /// An [`Error::Os`] with the calling thread's `errno`.
    pub fn last_os(what: impl Into<String>) -> Self {
        Self::os(what, &std::io::Error::last_os_error())
    }

    /// An [`Error::Os`] from a standard I/O error.
    pub fn os(what: impl Into<String>, error: &std::io::Error) -> Self {
        Self::Os { what: what.into(), errno: error.raw_os_error().unwrap_or(0) }
    }

    /// Whether it is how the kernel answers calls about a device that was taken away (`EIO` of a disassociated context: `uverbs_ioctl.c`,
    /// `uverbs_main.c`).
    pub fn is_removal(&self) -> bool {
        matches!(self, Self::Os { errno: libc::EIO, .. })
    }

    /// Whether the kernel has answered for a device whose firmware has failed: mlx5's driver says so since Linux 5.18
    /// (`mlx5_internal_err_ret_value` in drivers/net/ethernet/mellanox/mlx5/core/cmd.c).
    pub fn is_failed_device(&self) -> bool {
        matches!(self, Self::Os { errno: libc::ENOLINK, .. })
    }

    /// True where the same call may succeed later: the peer's address does not resolve or has no route
    /// yet (`rdma_resolve_ip` in drivers/infiniband/core/addr.c), the port has other addresses than
    /// were agreed, or the device is away. NCCL too repeats `ibv_modify_qp` after a time-out alone.
    pub fn may_pass(&self) -> bool {
        let is_path = matches!(self, Self::Os { errno: libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH, .. });
        is_path || matches!(self, Self::Network(_)) || self.is_removal() || self.is_failed_device()
    }

    /// Whether the process or the machine is out of descriptors, which others may give back.
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::Os { errno: libc::EMFILE | libc::ENFILE, .. })
    }
}

/// What a panic said.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text.as_str(),
        _ => "no reason given",
    }
}

/// A value in a message, cut where it is long: NCCL cuts a line of its log at 1024 characters, and the reason follows the value.
fn shortened(value: &str) -> String {
    const MOST: usize = 100;
    let start: String = value.chars().take(MOST).collect();
    if start.len() == value.len() { format!("{value:?}") } else { format!("{start:?}... ({} bytes)", value.len()) }
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
    fn an_error_names_its_cause_and_what_is_allowed() {
        let setting = Error::Setting { name: "NCCL_IB_TC".into(), value: "300".into(), allowed: "0 to 255".into() };
        assert_eq!(setting.to_string(), "NCCL_IB_TC=\"300\" is not usable: 0 to 255");
        let long = Error::Setting { name: "A".into(), value: "x".repeat(4000), allowed: "0 to 255".into() };
        let expected = format!("A=\"{}\"... (4000 bytes) is not usable: 0 to 255", "x".repeat(100));
        assert_eq!(long.to_string(), expected);
        let os = Error::Os { what: "ibv_reg_mr of 4096 bytes".into(), errno: libc::ENOMEM };
        assert!(os.to_string().starts_with("ibv_reg_mr of 4096 bytes: Cannot allocate memory"), "{os}");
        let full = Error::Os { what: "getifaddrs".into(), errno: libc::EMFILE };
        assert!(full.is_shortage() && full.to_string().contains("raise ulimit -n"), "{full}");
        assert!(!os.is_shortage());
    }
}
