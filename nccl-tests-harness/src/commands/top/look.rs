//! Processes that keep counters: found by the links of `/proc/PID/fd`, and read without believing anything that they say.
//!
//! A counters file is opened only once it is known to be a regular file of the right size, so that nothing else is opened in its place, and
//! is read with `pread`: a file that is cut meanwhile gives fewer bytes, where a mapping would end this program with SIGBUS. Processes come
//! and go between any two of these steps.

mod process;

pub use process::is_there;

use nccl_net_spark::counters::layout::{Counters, FILE_BYTES, FILE_NAME, HEADER_WORDS};
use nix::fcntl::OFlag;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Counters files of one process that are read. A process has one; whatever has more does not do it in good faith.
const MOST_OF_A_PROCESS: usize = 4;
/// Counters files that are read in one look.
const MOST: usize = 256;

/// Which memory file: its device and inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct FileId {
    device: u64,
    inode: u64,
}

/// A process that keeps counters, as it was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Its number here.
    pub pid: u32,
    /// The command's name, without what a terminal would act on.
    pub command: String,
    /// What its launcher calls it.
    pub rank: Option<u32>,
    /// Its counters file.
    pub file: FileId,
    /// When the file was read, in ns since the first look.
    pub at_ns: u64,
    /// What the file said.
    pub counters: Counters,
}

/// A process that is not shown, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PassedOver {
    /// Its number.
    pub pid: u32,
    /// Why.
    pub reason: String,
}

/// All that was seen at one time.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Look {
    /// By their numbers.
    pub jobs: Vec<Job>,
    /// Processes whose open files this user may not see.
    pub hidden: usize,
    /// Files that are no counters of this layout, and processes that were asked for and are not shown.
    pub passed_over: Vec<PassedOver>,
}

/// Looks again and again.
#[derive(Debug)]
pub struct Looker {
    start: Instant,
    /// The processes that were asked for; none: all.
    only: Vec<u32>,
    /// Read once for each process: its environment does not change.
    ranks: BTreeMap<(u32, FileId), Option<u32>>,
}

/// A counters file that was found, and the processes that have it open: a process that was forked has its parent's.
struct Found {
    at_ns: u64,
    counters: Counters,
    holders: Vec<u32>,
}

impl Looker {
    /// Looks at these processes, or at all if there are none.
    pub fn new(only: &[u32]) -> Self {
        let only: BTreeSet<u32> = only.iter().copied().collect();
        Self { start: Instant::now(), only: only.into_iter().collect(), ranks: BTreeMap::new() }
    }

    /// Looks once.
    ///
    /// # Errors
    /// When /proc itself cannot be read.
    pub fn look(&mut self) -> io::Result<Look> {
        let pids = if self.only.is_empty() { process::all()? } else { self.only.clone() };
        let (mut look, mut found) = (Look::default(), BTreeMap::new());
        for pid in pids {
            if let Err(reason) = self.look_into(pid, &mut look, &mut found) {
                look.passed_over.push(PassedOver { pid, reason });
            }
        }
        let mut ranks = BTreeMap::new();
        for (file, Found { at_ns, counters, holders }) in found {
            let pid = owner(&holders, counters.process_id);
            let known = self.ranks.get(&(pid, file)).copied();
            let rank = known.unwrap_or_else(|| process::rank(pid));
            ranks.insert((pid, file), rank);
            look.jobs.push(Job { pid, command: process::command(pid), rank, file, at_ns, counters });
        }
        self.ranks = ranks;
        // A process that was forked has its parent's too. Shown are its own, and each number once.
        look.jobs.sort_by_key(|job| (job.pid, process::own_number(job.pid) != Some(job.counters.process_id), job.file));
        look.jobs.dedup_by_key(|job| job.pid);
        Ok(look)
    }

    /// An error is why the process is not shown.
    fn look_into(&self, pid: u32, look: &mut Look, found: &mut BTreeMap<FileId, Found>) -> Result<(), String> {
        let is_asked_for = !self.only.is_empty();
        let links = match process::links(pid, is_counters) {
            Ok(links) => links,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                look.hidden += usize::from(process::has_files(pid));
                return Ok(());
            }
            Err(error) if process::is_gone(&error) => {
                return if is_asked_for { Err("there is no such process".to_owned()) } else { Ok(()) };
            }
            Err(error) => return Err(format!("its open files cannot be listed: {error}")),
        };
        if links.is_empty() && is_asked_for {
            return Err("it keeps no counters".to_owned());
        }
        let mut files = BTreeSet::new();
        for link in links {
            match open(&link) {
                Ok((file, _)) if files.contains(&file) => {}
                Ok(_) if files.len() == MOST_OF_A_PROCESS => {
                    return Err(format!("it has more than {MOST_OF_A_PROCESS} counters files"));
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

    fn read(&self, pid: u32, id: FileId, file: &File, found: &mut BTreeMap<FileId, Found>) -> Result<(), String> {
        if let Some(found) = found.get_mut(&id) {
            found.holders.push(pid);
            return Ok(());
        }
        if found.len() == MOST {
            return Err(format!("more than {MOST} counters files: not read"));
        }
        let counters = read_twice(file)?;
        let at_ns = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        found.insert(id, Found { at_ns, counters, holders: vec![pid] });
        Ok(())
    }
}

/// Whose counters these are among the processes that have them open: the one that knows itself by this number, else the first.
fn owner(holders: &[u32], process_id: u64) -> u32 {
    let is_owner = |pid: &&u32| process::own_number(**pid) == Some(process_id);
    holders.iter().find(is_owner).or(holders.first()).copied().unwrap_or(0)
}

/// Whether a link of `/proc/PID/fd` leads to a memory file of the counters' name.
fn is_counters(target: &Path) -> bool {
    let name = target.as_os_str().as_encoded_bytes();
    let name = name.strip_prefix(b"/memfd:").and_then(|name| name.strip_suffix(b" (deleted)"));
    name == Some(OsStr::new(FILE_NAME).as_encoded_bytes())
}

/// Opens a file for reading if it is a regular one of the counters' size. Anything else is not opened: opening a pipe or a device can do
/// something to it.
fn open(path: &Path) -> io::Result<(FileId, File)> {
    let place = OpenOptions::new().read(true).custom_flags(OFlag::O_PATH.bits()).open(path)?;
    let metadata = place.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidData, "not a regular file"));
    }
    if metadata.len() != FILE_BYTES as u64 {
        let text = format!("{} bytes; counters have {FILE_BYTES}", metadata.len());
        return Err(io::Error::new(ErrorKind::InvalidData, text));
    }
    // The same file, whatever the link leads to by now. The standard library adds O_CLOEXEC.
    let same = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()));
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(same)?;
    Ok((FileId { device: metadata.dev(), inode: metadata.ino() }, file))
}

/// Reads what is in use of a counters file, twice: see [`Counters::parse`].
fn read_twice(file: &File) -> Result<Counters, String> {
    let read = |length| read_at_most(file, length).map_err(|error| format!("its counters cannot be read: {error}"));
    let shown = |reason| format!("its counters: {reason}");
    let length = Counters::bytes_in_use(&read(HEADER_WORDS * 8)?).map_err(shown)?;
    let first = read(length)?;
    Counters::parse(&first, &read(length)?).map_err(shown)
}

/// The first `length` bytes, or what there is of them.
fn read_at_most(file: &File, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length.min(FILE_BYTES)];
    let mut read = 0;
    while read < bytes.len() {
        match file.read_at(&mut bytes[read..], read as u64) {
            Ok(0) => break,
            Ok(count) => read += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(read);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;

    #[test]
    fn links_are_known_by_their_whole_name() {
        assert!(is_counters(Path::new("/memfd:nccl-net-spark-counters (deleted)")));
        for other in ["/memfd:nccl-net-spark-counters", "/memfd:nccl-net-spark-counters2 (deleted)", "socket:[1]", "/x"]
        {
            assert!(!is_counters(Path::new(other)), "{other}");
        }
    }

    #[test]
    fn only_a_regular_file_of_the_right_size_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |path: &Path| open(path).unwrap_err().to_string();
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, Mode::S_IRUSR).unwrap();
        // Opened for reading, it would wait for a writer, or let one go on.
        assert_eq!(refusal(&pipe), "not a regular file");
        assert_eq!(refusal(Path::new("/dev/zero")), "not a regular file");
        assert_eq!(refusal(folder.path()), "not a regular file");
        let file = folder.path().join("file");
        std::fs::write(&file, [0; 100]).unwrap();
        assert_eq!(refusal(&file), format!("100 bytes; counters have {FILE_BYTES}"));
        File::options().write(true).open(&file).unwrap().set_len(FILE_BYTES as u64).unwrap();
        let (_, opened) = open(&file).unwrap();
        assert_eq!(read_twice(&opened), Err("its counters: it does not begin as counters do".to_owned()));
        // Cut after it was opened: fewer bytes, and no signal.
        File::options().write(true).open(&file).unwrap().set_len(0).unwrap();
        assert_eq!(read_twice(&opened), Err("its counters: 0 bytes, fewer than a header's".to_owned()));
    }

    #[test]
    fn a_process_that_was_forked_does_not_own_its_parents_counters() {
        let own = std::process::id();
        assert_eq!(owner(&[1, own], u64::from(own)), own);
        assert_eq!(owner(&[7, own], u64::MAX), 7, "nobody is known by that number");
    }
}
