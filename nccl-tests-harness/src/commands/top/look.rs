//! Finds processes with counters files by the links in `/proc/PID/fd`, and reads the files. In its
//! counters file (a memory file), the plugin counts the work of each lane of a process. The data of
//! the processes is not trusted.
//!
//! Before a file is opened, it must be found to be a regular file of the right size, because the
//! process may have replaced it since the link was read. The file is read, not mapped: if a process
//! truncates it, a read gives fewer bytes, but a mapping would end this program with SIGBUS. A
//! process can start or end between any two of these steps.

mod process;

pub use process::is_there;

use host::config::Config;
use host::counters::layout::{Counters, FILE_BYTES, FILE_NAME, HEADER_WORDS};
use host::counters::nic::{self, PortCounters};
use nix::fcntl::OFlag;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Maximum number of counters files of one process. A well-behaved process has one.
const MAX_FILES_PER_PROCESS: usize = 4;
/// Maximum number of counters files in one reading.
const MAX_FILES: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct FileId {
    device: u64,
    inode: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Process number in this program's namespace.
    pub pid: u32,
    pub command: String,
    /// Rank number that the launcher assigned.
    pub rank: Option<u32>,
    pub file: FileId,
    /// Time of reading, in ns since the first reading.
    pub at_ns: u64,
    pub counters: Counters,
    /// Memory that the process has pinned for devices.
    pub pinned_bytes: Option<u64>,
    /// True while the process holds a request for a CPU wake-up latency.
    pub holds_cpu_latency: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SkippedProcess {
    pub pid: u32,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reading {
    pub jobs: Vec<Job>,
    /// Number of processes whose open files this user may not see.
    pub hidden: usize,
    /// Processes that cannot be shown, with the reasons: for example a counters file of another
    /// layout, or a requested process that does not exist.
    pub passed_over: Vec<SkippedProcess>,
    /// Rails whose ports have no counters in this network namespace.
    pub uncounted: Vec<String>,
    /// Counters of ports, by rail name.
    pub ports: BTreeMap<String, PortCounters>,
    /// Time of reading the ports, in ns since the first reading.
    pub ports_at_ns: u64,
}

#[derive(Debug)]
pub struct Reader {
    start: Instant,
    /// The processes to show. Empty means all.
    only: Vec<u32>,
    sysfs: PathBuf,
    /// Ranks found in earlier readings. They come from the processes' initial environments, which
    /// do not change.
    ranks: BTreeMap<(u32, FileId), Option<u32>>,
}

/// A counters file and the processes that have it open, including forked children of its owner.
struct Found {
    at_ns: u64,
    counters: Counters,
    holders: Vec<u32>,
}

impl Reader {
    pub fn new(only: &[u32]) -> Self {
        let only: BTreeSet<u32> = only.iter().copied().collect();
        // The plugin reports a wrong setting, so top ignores the error.
        let sysfs = Config::from_environment()
            .map_or_else(|_| PathBuf::from("/sys"), |config| config.rails.sysfs);
        Self {
            start: Instant::now(),
            only: only.into_iter().collect(),
            sysfs,
            ranks: BTreeMap::new(),
        }
    }

    /// Reads the counters of all processes that are to be shown.
    ///
    /// # Errors
    /// /proc itself cannot be read.
    pub fn read_all(&mut self) -> io::Result<Reading> {
        let pids = if self.only.is_empty() {
            process::all()?
        } else {
            self.only.clone()
        };
        let mut reading = Reading::default();
        let mut found = BTreeMap::new();
        for pid in pids {
            if let Err(reason) = self.read_process(pid, &mut reading, &mut found) {
                reading.passed_over.push(SkippedProcess { pid, reason });
            }
        }
        let mut ranks = BTreeMap::new();
        for (
            file,
            Found {
                at_ns,
                counters,
                holders,
            },
        ) in found
        {
            let pid = owner(&holders, counters.process_id);
            let known = self.ranks.get(&(pid, file)).copied();
            let rank = known.unwrap_or_else(|| process::rank(pid));
            ranks.insert((pid, file), rank);
            let command = process::command(pid);
            let pinned_bytes = process::pinned_bytes(pid);
            reading.jobs.push(Job {
                pid,
                command,
                rank,
                file,
                at_ns,
                counters,
                pinned_bytes,
                holds_cpu_latency: process::holds_cpu_latency(pid),
            });
        }
        self.ranks = ranks;
        // A forked process also has its parent's file open. If it has its own file, show that one.
        reading.jobs.sort_by_key(|job| {
            (
                job.pid,
                process::own_number(job.pid) != Some(job.counters.process_id),
                job.file,
            )
        });
        reading.jobs.dedup_by_key(|job| job.pid);
        (reading.ports, reading.uncounted) = self.ports(&reading.jobs);
        reading.ports_at_ns = self.now_ns();
        Ok(reading)
    }

    /// Reads the counters of the ports that the jobs use. Also returns the rails whose ports have
    /// no counters. The processes choose the names of the rails, so only names that exist in sysfs
    /// are read.
    fn ports(&self, jobs: &[Job]) -> (BTreeMap<String, PortCounters>, Vec<String>) {
        let rails: BTreeSet<&str> = jobs
            .iter()
            .flat_map(|job| &job.counters.records)
            .map(|record| record.rail.as_str())
            .collect();
        let names = |folder: PathBuf| {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.file_name().into_string().ok())
        };
        let class = self.sysfs.join("class/infiniband");
        let devices = names(class.clone())
            .filter(|device| rails.iter().any(|rail| rail.starts_with(device.as_str())));
        let ports = devices.flat_map(|device| {
            let numbers = names(class.join(&device).join("ports"));
            numbers.filter_map(move |number| Some((device.clone(), number.parse::<u8>().ok()?)))
        });
        let named = ports.map(|(device, port)| (format!("{device}:{port}"), device, port));
        let of_jobs = named.filter(|(rail, ..)| rails.contains(rail.as_str()));
        let mut read = BTreeMap::new();
        let mut uncounted = Vec::new();
        for (rail, device, port) in of_jobs {
            let counters = nic::read(&self.sysfs, &device, port, nic::is_known);
            if !counters.is_empty() {
                read.insert(rail, counters);
            } else if nic::has_none(&self.sysfs, &device, port) {
                uncounted.push(rail);
            }
        }
        (read, uncounted)
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Finds the counters files of a process. The error is the reason why the process is not shown.
    fn read_process(
        &self,
        pid: u32,
        reading: &mut Reading,
        found: &mut BTreeMap<FileId, Found>,
    ) -> Result<(), String> {
        let is_asked_for = !self.only.is_empty();
        let links = match process::links(pid, is_counters) {
            Ok(links) => links,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                reading.hidden += usize::from(process::has_files(pid));
                return Ok(());
            }
            Err(error) if process::is_gone(&error) => {
                return if is_asked_for {
                    Err("there is no such process".to_owned())
                } else {
                    Ok(())
                };
            }
            Err(error) => return Err(format!("its open files cannot be listed: {error}")),
        };
        if links.is_empty() && is_asked_for {
            return Err("it has no counters file".to_owned());
        }
        let mut files = BTreeSet::new();
        for link in links {
            match open(&link) {
                Ok((file, _)) if files.contains(&file) => {}
                Ok(_) if files.len() == MAX_FILES_PER_PROCESS => {
                    return Err(format!(
                        "it has more than {MAX_FILES_PER_PROCESS} counters files"
                    ));
                }
                Ok((file, open)) => {
                    files.insert(file);
                    self.read(pid, file, &open, found)?;
                }
                Err(error) if error.raw_os_error().is_some() && process::is_gone(&error) => {}
                Err(error) => return Err(format!("its counters: {error}")),
            }
        }
        Ok(())
    }

    fn read(
        &self,
        pid: u32,
        id: FileId,
        file: &File,
        found: &mut BTreeMap<FileId, Found>,
    ) -> Result<(), String> {
        if let Some(found) = found.get_mut(&id) {
            found.holders.push(pid);
            return Ok(());
        }
        if found.len() == MAX_FILES {
            return Err(format!("more than {MAX_FILES} counters files: not read"));
        }
        let counters = read_twice(file)?;
        let at_ns = self.now_ns();
        found.insert(
            id,
            Found {
                at_ns,
                counters,
                holders: vec![pid],
            },
        );
        Ok(())
    }
}

/// Returns the owner of a counters file: the holder whose number in its own PID namespace is
/// `process_id`, or else the first holder.
fn owner(holders: &[u32], process_id: u64) -> u32 {
    let is_owner = |pid: &&u32| process::own_number(**pid) == Some(process_id);
    holders
        .iter()
        .find(is_owner)
        .or(holders.first())
        .copied()
        .unwrap_or(0)
}

/// Returns true if a link in `/proc/PID/fd` leads to a memory file with the counters' name.
fn is_counters(target: &Path) -> bool {
    let name = target.as_os_str().as_encoded_bytes();
    let name = name
        .strip_prefix(b"/memfd:")
        .and_then(|name| name.strip_suffix(b" (deleted)"));
    name == Some(OsStr::new(FILE_NAME).as_encoded_bytes())
}

/// Opens a regular file of the counters' size. Other files are not opened, because opening a pipe
/// or a device can have side effects.
fn open(path: &Path) -> io::Result<(FileId, File)> {
    let place = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_PATH.bits())
        .open(path)?;
    let metadata = place.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidData, "not a regular file"));
    }
    if metadata.len() != FILE_BYTES as u64 {
        let text = format!("{} bytes instead of {FILE_BYTES}", metadata.len());
        return Err(io::Error::new(ErrorKind::InvalidData, text));
    }
    // The link may lead to another file by now, but this path leads to the checked file. std adds
    // O_CLOEXEC.
    let same = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()));
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(same)?;
    Ok((
        FileId {
            device: metadata.dev(),
            inode: metadata.ino(),
        },
        file,
    ))
}

fn read_twice(file: &File) -> Result<Counters, String> {
    let read = |length| {
        read_at_most(file, length).map_err(|error| format!("its counters cannot be read: {error}"))
    };
    let shown = |reason| format!("its counters: {reason}");
    let length = Counters::bytes_in_use(&read(HEADER_WORDS * 8)?).map_err(shown)?;
    let first = read(length)?;
    Counters::parse(&first, &read(length)?).map_err(shown)
}

fn read_at_most(mut file: &File, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length);
    file.rewind()?;
    file.take(length as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;

    #[test]
    fn links_are_matched_by_their_whole_name() {
        assert!(is_counters(Path::new(
            "/memfd:nccl-net-spark-counters (deleted)"
        )));
        for other in [
            "/memfd:nccl-net-spark-counters",
            "/memfd:nccl-net-spark-counters2 (deleted)",
            "socket:[1]",
            "/x",
        ] {
            assert!(!is_counters(Path::new(other)), "{other}");
        }
    }

    #[test]
    fn only_a_regular_file_of_the_right_size_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |path: &Path| open(path).unwrap_err().to_string();
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, Mode::S_IRUSR).unwrap();
        // Opening the pipe would wait for a writer, or let a waiting writer continue.
        assert_eq!(refusal(&pipe), "not a regular file");
        assert_eq!(refusal(Path::new("/dev/zero")), "not a regular file");
        assert_eq!(refusal(folder.path()), "not a regular file");
        let file = folder.path().join("file");
        std::fs::write(&file, [0; 100]).unwrap();
        assert_eq!(refusal(&file), format!("100 bytes instead of {FILE_BYTES}"));
        File::options()
            .write(true)
            .open(&file)
            .unwrap()
            .set_len(FILE_BYTES as u64)
            .unwrap();
        let (_, opened) = open(&file).unwrap();
        assert_eq!(
            read_twice(&opened),
            Err("its counters: the file has no valid header".to_owned())
        );
        // If the file is truncated after it was opened, a read gives fewer bytes and causes no
        // signal.
        File::options()
            .write(true)
            .open(&file)
            .unwrap()
            .set_len(0)
            .unwrap();
        assert_eq!(
            read_twice(&opened),
            Err("its counters: 0 bytes, fewer than a header's".to_owned())
        );
    }

    #[test]
    fn a_process_that_was_forked_does_not_own_its_parents_counters() {
        let own = std::process::id();
        assert_eq!(owner(&[1, own], u64::from(own)), own);
        assert_eq!(
            owner(&[7, own], u64::MAX),
            7,
            "nobody is known by that number"
        );
    }
}
