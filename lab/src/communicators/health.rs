//! Memory, descriptors and threads that a process uses.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs;

/// What a process uses at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Memory in use, its own and shared, without files.
    pub memory_kib: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
}

impl Health {
    /// Of this process, now.
    pub fn now() -> Result<Self> {
        let status = fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
        let entries = fs::read_dir("/proc/self/fd").context("list /proc/self/fd")?;
        // Without the one that lists them.
        let descriptors = (entries.count() as u64).saturating_sub(1);
        let field = |name| field(&status, name).with_context(|| format!("no {name} in /proc/self/status"));
        Ok(Self { memory_kib: field("RssAnon")? + field("RssShmem")?, descriptors, threads: field("Threads")? })
    }
}

fn field(status: &str, name: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let status = "Name:\tx\nRssAnonymous:\t9 kB\nRssAnon:\t  1234 kB\nThreads:\t7\n";
        assert_eq!(
            (field(status, "RssAnon"), field(status, "Threads"), field(status, "RssShmem")),
            (Some(1234), Some(7), None)
        );
    }

    #[test]
    fn what_is_opened_and_started_shows() {
        let before = Health::now().unwrap();
        let file = fs::File::open("/dev/null").unwrap();
        // Other tests of this process open files too, so only a lower bound can be told.
        let memory = vec![1u8; 32 << 20];
        let after = Health::now().unwrap();
        assert!(after.memory_kib >= before.memory_kib + 16 * 1024, "{before:?} {after:?}");
        assert!(after.descriptors > 3 && after.threads >= 1);
        drop((file, memory));
    }
}
