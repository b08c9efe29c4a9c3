//! Memory, descriptors and threads that a process uses.

use crate::proc_status::field;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Resident anonymous and shared memory. Mapped files do not count.
    pub memory_kib: u64,
    pub descriptors: u64,
    pub threads: u64,
}

impl Health {
    pub fn now() -> Result<Self> {
        let entries = fs::read_dir("/proc/self/fd").context("list /proc/self/fd")?;
        // Does not count the descriptor that lists the others.
        let descriptors = (entries.count() as u64).saturating_sub(1);
        Ok(Self {
            memory_kib: field("RssAnon")? + field("RssShmem")?,
            descriptors,
            threads: field("Threads")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opened_descriptors_and_started_threads_are_counted() {
        let before = Health::now().unwrap();
        let file = fs::File::open("/dev/null").unwrap();
        // Other tests of this process open files too, so only lower bounds are checked.
        let memory = vec![1u8; 32 << 20];
        let after = Health::now().unwrap();
        assert!(
            after.memory_kib >= before.memory_kib + 16 * 1024,
            "{before:?} {after:?}"
        );
        assert!(after.descriptors > 3 && after.threads >= 1);
        drop((file, memory));
    }
}
