//! The scenario in which devices leave the bus while a communicator is in use, and return.
//!
//! The ranks run all-reduces until a mark says that the devices are back, and then make another
//! communicator. [`Director`] runs in the process that started the ranks: it removes the devices of
//! rank 0 and returns them. Both sides communicate by files in the run's folder ([`Mark`]), because
//! the ranks' standard output is NCCL's log.

use anyhow::{Context, Result, bail, ensure};
use nccl_tests_harness::fabric::Fabric;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for a mark of the other side, and for the queue pairs to return.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between reads of a mark, or of the number of queue pairs.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Time that devices are away. The plugin checks its devices twice a second, so it notices.
const AWAY: Duration = Duration::from_secs(1);
const NODE: usize = 0;

/// A message between rank 0 and the director.
#[derive(Debug, Clone, Copy)]
pub enum Mark {
    /// From rank 0: the first communicator has carried an all-reduce.
    InUse,
    /// From the director: the devices and the rails are back.
    Returned,
    /// From rank 0: the second communicator has carried an all-reduce; the first is still open.
    SecondInUse,
    /// From the director: the queue pairs have been counted.
    Counted,
    /// From the director: there was a fault, and the ranks have to end.
    GaveUp,
}

impl Mark {
    fn file(self, folder: &Path) -> PathBuf {
        folder.join(format!("returns-{self:?}"))
    }

    pub fn set(self, folder: &Path) -> Result<()> {
        let file = self.file(folder);
        fs::write(&file, "").with_context(|| format!("write {}", file.display()))
    }

    pub fn is_set(self, folder: &Path) -> bool {
        self.file(folder).exists()
    }

    /// Waits for the mark. Returns false if `is_over` comes first, and fails after [`PATIENCE`].
    pub fn wait(self, folder: &Path, is_over: impl Fn() -> bool) -> Result<bool> {
        let start = Instant::now();
        while !self.is_set(folder) {
            if is_over() {
                return Ok(false);
            }
            ensure!(
                start.elapsed() < PATIENCE,
                "no {self:?} within {} s",
                PATIENCE.as_secs()
            );
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(true)
    }
}

pub struct Director<'a> {
    pub fabric: &'a Fabric,
    pub folder: &'a Path,
    /// Set once the ranks have ended.
    pub is_over: &'a AtomicBool,
}

impl Director<'_> {
    /// Lets one device of rank 0, then all of them, leave and return. Returns the result in words,
    /// or `None` if the ranks end first: their errors have the reason.
    ///
    /// # Errors
    /// Fails if no queue pair is lost with a device, if a rail does not return, or if the next
    /// communicator does not use all rails. The ranks are then told to end.
    pub fn direct(&self, ranks: usize) -> Result<Option<String>> {
        let directed = self.take_away_and_compare(ranks);
        if directed.is_err() {
            Mark::GaveUp.set(self.folder)?;
        }
        directed
    }

    fn take_away_and_compare(&self, ranks: usize) -> Result<Option<String>> {
        if !Mark::InUse.wait(self.folder, || self.is_over())? {
            return Ok(None);
        }
        let before = self.queue_pairs(ranks)?;
        let rails: Vec<&str> = self.fabric.rails().collect();
        let mut words = Vec::new();
        for leaving in [&rails[..1], &rails[..]] {
            let Some(back) = self.away(leaving, &before)? else {
                return Ok(None);
            };
            words.push(format!(
                "{} of {} devices of rank {NODE} away for {:.1} s, all rails back {:.1} s later",
                leaving.len(),
                rails.len(),
                AWAY.as_secs_f64(),
                back.as_secs_f64()
            ));
        }
        Mark::Returned.set(self.folder)?;
        if !Mark::SecondInUse.wait(self.folder, || self.is_over())? {
            return Ok(None);
        }
        let after = self.queue_pairs(ranks)?;
        let twice = before.iter().map(|count| 2 * count).collect::<Vec<_>>();
        ensure!(
            after == twice,
            "a second communicator should have as many queue pairs as the first ({before:?} by rank), but both together \
             have {after:?}"
        );
        Mark::Counted.set(self.folder)?;
        words.push(format!(
            "a new communicator has as many queue pairs as the first: {before:?} by rank"
        ));
        Ok(Some(words.join("; ")))
    }

    /// Lets devices leave and return. Returns the time until each rank has the queue pairs of
    /// `before` again, or `None` if the ranks end first.
    fn away(&self, leaving: &[&str], before: &[usize]) -> Result<Option<Duration>> {
        for rail in leaving {
            self.fabric.plug(NODE, rail, false)?;
        }
        std::thread::sleep(AWAY);
        let without = self.queue_pairs(before.len())?;
        ensure!(
            without != before,
            "no queue pair was lost with {}",
            leaving.join(", ")
        );
        for rail in leaving {
            self.fabric.plug(NODE, rail, true)?;
        }
        let start = Instant::now();
        loop {
            let now = self.queue_pairs(before.len())?;
            if now == before {
                return Ok(Some(start.elapsed()));
            }
            if self.is_over() {
                return Ok(None);
            }
            if start.elapsed() > PATIENCE {
                bail!(
                    "{} s after the devices returned the queue pairs are {now:?}, before {before:?}",
                    PATIENCE.as_secs()
                );
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    fn queue_pairs(&self, ranks: usize) -> Result<Vec<usize>> {
        (0..ranks)
            .map(|node| self.fabric.queue_pairs(node))
            .collect()
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_tests_harness::fabric::{self, FabricRequest, Kind, UNPACED};

    /// No process uses the fabric, so no queue pair is lost with a device.
    #[test]
    fn ranks_end_when_removed_devices_have_no_effect() {
        let folder = tempfile::tempdir().unwrap();
        let library = tempfile::NamedTempFile::new().unwrap();
        let request = FabricRequest {
            kind: Some(Kind::Soft),
            profile: UNPACED.to_owned(),
            scale: 1.0,
            slow_rails: Vec::new(),
            path_faults: Vec::new(),
            library: library.path().to_owned(),
            name: None,
        };
        let fabric = fabric::set_up(&request, 2, None).unwrap();
        let is_over = AtomicBool::new(false);
        let director = |folder| Director {
            fabric: &fabric,
            folder,
            is_over: &is_over,
        };
        Mark::InUse.set(folder.path()).unwrap();
        let error = director(folder.path()).direct(2).unwrap_err().to_string();
        assert!(error.starts_with("no queue pair was lost with "), "{error}");
        assert!(Mark::GaveUp.is_set(folder.path()));
        is_over.store(true, Ordering::Relaxed);
        let another = tempfile::tempdir().unwrap();
        assert_eq!(director(another.path()).direct(2).unwrap(), None);
        assert!(!Mark::GaveUp.is_set(another.path()));
    }

    #[test]
    fn a_mark_reaches_the_other_side_and_waiting_ends_with_the_ranks() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!Mark::InUse.is_set(folder.path()));
        assert!(!Mark::InUse.wait(folder.path(), || true).unwrap());
        Mark::InUse.set(folder.path()).unwrap();
        assert!(Mark::InUse.wait(folder.path(), || false).unwrap());
        assert!(Mark::InUse.is_set(folder.path()) && !Mark::Returned.is_set(folder.path()));
    }
}
