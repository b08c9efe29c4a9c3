//! Out of descriptors or memory: others may give some back, so what can wait does, and the user is told once what the limit is.

use crate::error::Error;
use nix::sys::resource::{Resource, getrlimit};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the user has been told of it.
#[derive(Debug, Default)]
pub struct DescriptorWarning(AtomicBool);

impl DescriptorWarning {
    /// Says what cannot be done and why: to the user once in the life of a process, however many listeners it has and however often
    /// they try; then only to who debugs.
    #[cold]
    pub fn tell(&self, cannot: &str, why: &str) {
        // Relaxed: two that say it at the same moment do no harm.
        if self.0.swap(true, Ordering::Relaxed) {
            tracing::debug!("{cannot}: {why}");
        } else {
            tracing::warn!("{cannot}: {why}; retrying");
        }
    }
}

/// Whether a connection could not be taken in for want of something, and why; else the trouble is another.
pub fn shortage_text(error: &io::Error) -> Option<String> {
    match error.raw_os_error()? {
        libc::EMFILE => Some(format!("the process is out of file descriptors ({}); raise the limit", limit_text())),
        libc::ENFILE => Some("the machine is out of file descriptors; raise fs.file-max".to_owned()),
        libc::ENOMEM | libc::ENOBUFS => Some(error.to_string()),
        _ => None,
    }
}

/// As [`shortage_text`], of an error that others may end by giving descriptors back.
pub fn waits_for_descriptors(error: &Error) -> Option<String> {
    let Error::Os { what, errno } = error else { return None };
    let why = shortage_text(&io::Error::from_raw_os_error(*errno)).filter(|_| error.is_shortage())?;
    Some(format!("{what}: {why}"))
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

    #[test]
    fn what_is_short_is_named_and_other_troubles_are_none() {
        let of = |errno| shortage_text(&io::Error::from_raw_os_error(errno));
        let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        assert!(of(libc::EMFILE).unwrap().contains(&format!("ulimit -n is {soft}")));
        assert!(of(libc::ENFILE).unwrap().contains("fs.file-max"));
        assert!(of(libc::ENOBUFS).is_some() && of(libc::ECONNABORTED).is_none() && of(libc::EAGAIN).is_none());
        let failed = |errno| Error::Os { what: "getifaddrs".to_owned(), errno };
        assert!(waits_for_descriptors(&failed(libc::EMFILE)).unwrap().starts_with("getifaddrs: the process"));
        // A device that has no memory for a queue pair has none later either: it is told as what it is.
        assert!(waits_for_descriptors(&failed(libc::ENOMEM)).is_none());
    }
}
