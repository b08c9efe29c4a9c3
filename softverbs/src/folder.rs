//! A fabric's folder: its files, and the test for processes that use them.
//!
//! Each user of a fabric (a process in it, or the program that prepared it) holds a shared lock on
//! the fabric's file while it runs. The kernel releases the lock however the process ends. PIDs
//! would not do, because a PID means nothing in another PID namespace, whereas every container that
//! sees the file also sees the lock. A child that was forked without an exec shares the lock until
//! the child ends.

use crate::os::process::lock_file;
use crate::os::shm::{self, FabricMemory, LAYOUT};
use crate::profile::{MAX_NODES, Profile};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Names of the files and folders that a fabric's folder may have: those of the fabric, and those
/// of programs that use the fabric.
const OWN_FILES: [&str; 7] = [
    "fabric",
    "lib",
    "lock",
    "membership",
    "profile",
    "sys",
    "wanted",
];

#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    pub fn new(dir: &Path, name: &str) -> Self {
        Self {
            path: dir.join(name),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the folder and takes the membership lock. Waits while another process holds the
    /// lock. Only the process that holds the lock may set the fabric up, join it or check for
    /// users. It holds the lock until it drops the returned file.
    pub fn lock_membership(&self) -> Result<File, String> {
        loop {
            fs::create_dir_all(&self.path).map_err(|e| format!("{}: {e}", self.path.display()))?;
            let membership = self.path.join("membership");
            let lock = match lock_file(&membership) {
                // Another process has removed the folder since it was created.
                Err(_) if !self.path.exists() => continue,
                lock => lock?,
            };
            let inode = |metadata: std::io::Result<fs::Metadata>| {
                metadata.ok().map(|metadata| metadata.ino())
            };
            if inode(lock.metadata()) == inode(fs::metadata(&membership)) {
                return Ok(lock);
            }
        }
    }

    /// True if a process uses the fabric. The caller must not hold the membership lock, because
    /// this function waits for that lock.
    pub fn is_used(&self) -> bool {
        // Does not create the file, because another process may be deleting the folder.
        let membership = OpenOptions::new()
            .append(true)
            .open(self.path.join("membership"));
        let Ok(membership) = membership else {
            return false;
        };
        self.has_fabric() && membership.lock().is_ok() && self.has_users()
    }

    /// The same as [`Folder::is_used`], for a caller that holds the membership lock.
    pub fn has_users(&self) -> bool {
        let Ok(file) = OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path.join("fabric"))
        else {
            return false;
        };
        match file.try_lock() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            // On a file system without locks, every fabric counts as in use, so that none in use is
            // deleted.
            Err(TryLockError::Error(_)) => true,
        }
    }

    /// Makes this process count as a user of the fabric until the returned file is dropped. The
    /// caller must hold the membership lock.
    pub fn lock_as_user(&self) -> Result<File, String> {
        let path = self.path.join("fabric");
        let locked = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .and_then(|file| {
                file.lock_shared()?;
                Ok(file)
            });
        locked.map_err(|e| format!("locking {}: {e}", path.display()))
    }

    pub fn has_fabric(&self) -> bool {
        let bytes = size_of::<FabricMemory>() as u64;
        fs::metadata(self.path.join("fabric"))
            .is_ok_and(|file| file.is_file() && file.len() == bytes)
    }

    pub fn foreign_file(&self) -> Option<PathBuf> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let mut foreign =
            entries.filter(|entry| !OWN_FILES.iter().any(|own| entry.file_name() == *own));
        foreign.next().map(|entry| entry.path())
    }

    /// Opens the fabric's file, and sets it up with `profile` if it is new. Returns the profile
    /// with which the file was set up. Fails if the file is new and there is no `profile`.
    pub fn open(
        &self,
        profile: Option<&Profile>,
    ) -> Result<(&'static FabricMemory, Profile), String> {
        fs::create_dir_all(&self.path).map_err(|e| format!("{}: {e}", self.path.display()))?;
        let _lock = lock_file(&self.path.join("lock"))?;
        let path = self.path.join("fabric");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let memory = shm::map(&file.map_err(|e| format!("{}: {e}", path.display()))?)?;
        let fresh = memory.layout.load(Ordering::Acquire) != LAYOUT;
        let text = self.path.join("profile");
        match profile {
            Some(profile) if fresh => {
                set_up(memory, profile);
                fs::write(&text, profile.to_text())
                    .map_err(|e| format!("{}: {e}", text.display()))?;
                profile.write_sysfs(&self.path.join("sys"))?;
                memory.layout.store(LAYOUT, Ordering::Release);
                Ok((memory, profile.clone()))
            }
            _ if fresh => Err(format!(
                "{}: the fabric file is missing or has another version",
                self.path.display()
            )),
            _ => Ok((memory, Profile::load(&text.display().to_string(), 1.0)?)),
        }
    }

    /// Deletes an earlier fabric's files before a new set-up. The caller must hold the membership
    /// lock.
    pub fn clear(&self) -> Result<(), String> {
        for name in ["fabric", "profile"] {
            match fs::remove_file(self.path.join(name)) {
                Err(e) if e.kind() != ErrorKind::NotFound => {
                    return Err(format!("{}/{name}: {e}", self.path.display()));
                }
                _ => {}
            }
        }
        // If files remain in `sys`, the new set-up overwrites them.
        let _ = fs::remove_dir_all(self.path.join("sys"));
        Ok(())
    }

    /// Deletes the folder. Processes that are still in the fabric keep the memory mapped.
    pub fn remove(&self) {
        // Files that remain do no harm: the next fabric of this name starts from scratch.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn set_up(memory: &FabricMemory, profile: &Profile) {
    for node in 0..MAX_NODES {
        for (rail, (place, spec)) in memory.rails[node].iter().zip(&profile.rails).enumerate() {
            place
                .down
                .store(u32::from(!profile.is_cabled(node, rail)), Ordering::Relaxed);
            place.set_path(spec.path);
            place
                .silence_ns
                .store(spec.silence_ms * 1_000_000, Ordering::Relaxed);
            place.line.tx.set_rate(spec.line_mbps);
            place.line.rx.set_rate(spec.line_mbps);
        }
        let shared = profile
            .links
            .iter()
            .map(|l| l.payload_mbps)
            .chain(profile.cables.iter().map(|c| c.payload_mbps));
        for (place, rate) in memory.shared[node].iter().zip(shared) {
            place.tx.set_rate(rate);
            place.rx.set_rate(rate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> Folder {
        let dir = Path::new("/tmp/softverbs-tests");
        let folder = Folder::new(dir, &format!("folder-{name}-{}", std::process::id()));
        folder.remove();
        folder
    }

    #[test]
    fn a_fabric_is_used_while_a_user_has_its_lock() {
        let folder = folder("lock");
        assert!(
            !folder.is_used() && !folder.path().exists(),
            "looking makes nothing"
        );
        let membership = folder.lock_membership().unwrap();
        folder
            .open(Some(&Profile::load("unpaced", 1.0).unwrap()))
            .unwrap();
        let one = folder.lock_as_user().unwrap();
        let two = folder.lock_as_user().unwrap();
        drop(membership);
        assert!(folder.is_used());
        drop(one);
        assert!(folder.is_used());
        drop(two);
        assert!(!folder.is_used() && folder.has_fabric());
        folder.remove();
    }

    #[test]
    fn foreign_files_are_recognised() {
        let folder = folder("foreign");
        drop(folder.lock_membership().unwrap());
        assert_eq!(folder.foreign_file(), None);
        std::fs::write(folder.path().join("letter.txt"), "").unwrap();
        assert_eq!(
            folder.foreign_file(),
            Some(folder.path().join("letter.txt"))
        );
        assert!(!folder.has_fabric());
        folder.remove();
    }
}
