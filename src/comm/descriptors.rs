//! Temporary shortage of file descriptors or memory. Work that can wait is retried.

use host::error::Error;
use nix::sys::resource::{Resource, getrlimit};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Warning about a shortage, logged once in a process.
#[derive(Debug, Default)]
pub struct DescriptorWarning(AtomicBool);

impl DescriptorWarning {
    /// Logs a failed operation and the reason. The first call logs a warning. Later calls, from all
    /// listeners and retries, log at DEBUG level.
    #[cold]
    pub fn tell(&self, cannot: &str, why: &str) {
        // Relaxed: a duplicated warning is harmless.
        if self.0.swap(true, Ordering::Relaxed) {
            tracing::debug!("{cannot}: {why}");
        } else {
            tracing::warn!("{cannot}: {why}; retrying");
        }
    }
}

/// Returns text for a shortage that made `accept` fail; `None` for other errors.
pub fn shortage_text(error: &io::Error) -> Option<String> {
    match error.raw_os_error()? {
        libc::EMFILE => Some(format!(
            "the process is out of file descriptors ({}); raise the limit",
            limit_text()
        )),
        libc::ENFILE => {
            Some("the machine is out of file descriptors; raise fs.file-max".to_owned())
        }
        libc::ENOMEM | libc::ENOBUFS => Some(error.to_string()),
        _ => None,
    }
}

/// Returns text for a shortage of descriptors, which is worth a retry, because other code may free
/// descriptors. Returns `None` for other errors, including a shortage of memory.
pub fn waits_for_descriptors(error: &Error) -> Option<String> {
    let Error::Os { call, errno } = error else {
        return None;
    };
    let why =
        shortage_text(&io::Error::from_raw_os_error(*errno)).filter(|_| error.is_shortage())?;
    Some(format!("{call}: {why}"))
}

fn limit_text() -> String {
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((soft, _)) => format!("ulimit -n is {soft}"),
        Err(_) => "ulimit -n".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::error::Call;

    #[test]
    fn short_resources_are_named_and_other_errors_are_not() {
        let of = |errno| shortage_text(&io::Error::from_raw_os_error(errno));
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert!(
            of(libc::EMFILE)
                .unwrap()
                .contains(&format!("ulimit -n is {soft}"))
        );
        assert!(of(libc::ENFILE).unwrap().contains("fs.file-max"));
        assert!(
            of(libc::ENOBUFS).is_some()
                && of(libc::ECONNABORTED).is_none()
                && of(libc::EAGAIN).is_none()
        );
        let failed = |errno| Error::Os {
            call: Call::ListInterfaces,
            errno,
        };
        assert!(
            waits_for_descriptors(&failed(libc::EMFILE))
                .unwrap()
                .contains("(getifaddrs): the process")
        );
        // A shortage of memory has no retry: a device that has no memory for a queue pair now will
        // have none later.
        assert!(waits_for_descriptors(&failed(libc::ENOMEM)).is_none());
    }
}
