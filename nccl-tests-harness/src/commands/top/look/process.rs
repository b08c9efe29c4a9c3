//! Reads facts about a process from /proc. The process can end at any moment, and can forge all of
//! these facts.

use crate::output::plain;
use crate::proc_stat;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Variables with the rank number: of torchrun and vLLM, Open MPI, Slurm, and MPICH. The first one
/// with a valid number counts. Other variables are not read, because they may be secrets.
const RANKS: [&str; 4] = ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"];
/// Maximum number of bytes to read of an environment. Linux limits arguments and environment
/// together to a quarter of the stack's limit (execve(2)). The stack's limit is usually 8 MiB.
const MAX_ENVIRONMENT_BYTES: u64 = 4 << 20;
/// `PF_KTHREAD` of the kernel's include/linux/sched.h.
const KERNEL_THREAD: u64 = 0x0020_0000;

pub fn all() -> io::Result<Vec<u32>> {
    let names = fs::read_dir("/proc")?
        .flatten()
        .map(|entry| entry.file_name());
    let mut pids: Vec<u32> = names
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    Ok(pids)
}

pub fn is_there(pid: u32) -> bool {
    file(pid, "").exists()
}

/// Lists the links to a process's open files for whose target `wanted` returns true.
pub fn links(pid: u32, wanted: impl Fn(&Path) -> bool) -> io::Result<Vec<PathBuf>> {
    let mut links = Vec::new();
    for entry in fs::read_dir(file(pid, "fd"))? {
        let link = entry?.path();
        match fs::read_link(&link) {
            Ok(target) if wanted(&target) => links.push(link),
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    links.sort();
    Ok(links)
}

/// Returns true if the error means that a process or file has disappeared.
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH)
}

/// Returns false for a kernel thread and for a process that has ended, because they have no files.
pub fn has_files(pid: u32) -> bool {
    fs::read(file(pid, "stat")).is_ok_and(|stat| may_have_files(&String::from_utf8_lossy(&stat)))
}

pub fn command(pid: u32) -> String {
    let name = fs::read(file(pid, "comm")).unwrap_or_default();
    let name = plain(&String::from_utf8_lossy(name.trim_ascii_end()));
    if name.is_empty() {
        "?".to_owned()
    } else {
        name
    }
}

/// Returns the rank number from the process's initial environment, if this user may read it.
pub fn rank(pid: u32) -> Option<u32> {
    let mut bytes = Vec::new();
    File::open(file(pid, "environ"))
        .ok()?
        .take(MAX_ENVIRONMENT_BYTES)
        .read_to_end(&mut bytes)
        .ok()?;
    rank_of(&bytes)
}

/// Returns the memory that the process has pinned for devices.
pub fn pinned_bytes(pid: u32) -> Option<u64> {
    proc_stat::pinned_bytes(&fs::read_to_string(file(pid, "status")).ok()?)
}

/// Returns true if the process holds a request for a CPU wake-up latency. Returns `None` if this
/// user may not see its open files.
pub fn holds_cpu_latency(pid: u32) -> Option<bool> {
    let is_request = |target: &Path| target == Path::new("/dev/cpu_dma_latency");
    links(pid, is_request).ok().map(|links| !links.is_empty())
}

/// Returns the process's number in its own PID namespace, such as that of a container.
pub fn own_number(pid: u32) -> Option<u64> {
    innermost(&fs::read_to_string(file(pid, "status")).ok()?)
}

fn file(pid: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{name}"))
}

/// Checks the process's state and flags, the first and the seventh field after the command's name.
fn may_have_files(stat: &str) -> bool {
    let mut fields = proc_stat::fields(stat);
    let state = fields.next();
    let flags = fields.nth(5).and_then(|flags| flags.parse::<u64>().ok());
    !matches!(state, None | Some("Z" | "X"))
        && flags.is_some_and(|flags| flags & KERNEL_THREAD == 0)
}

fn rank_of(environment: &[u8]) -> Option<u32> {
    let value = |name: &str| {
        let value = |entry: &[u8]| {
            let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
            std::str::from_utf8(value).ok()?.parse().ok()
        };
        environment.split(|byte| *byte == 0).find_map(value)
    };
    RANKS.into_iter().find_map(value)
}

/// Returns the last number of the line `NSpid:` (proc_pid_status(5)).
fn innermost(status: &str) -> Option<u64> {
    status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?
        .split_whitespace()
        .last()?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_numbers_are_read_only_from_the_four_known_variables() {
        assert_eq!(rank_of(b"A=1\0RANK=3\0B=2"), Some(3));
        assert_eq!(
            rank_of(b"PMI_RANK=1\0SLURM_PROCID=2\0OMPI_COMM_WORLD_RANK=5"),
            Some(5)
        );
        assert_eq!(
            rank_of(b"LOCAL_RANK=1\0RANKS=2\0NODE_RANK=7\0XRANK=4"),
            None
        );
        assert_eq!(
            rank_of(b"RANK=secret\0RANK\0SLURM_PROCID=-1\0PMI_RANK=9"),
            Some(9)
        );
        assert_eq!(rank_of(b""), None);
    }

    #[test]
    fn threads_of_the_kernel_and_the_dead_have_no_files() {
        assert!(may_have_files("7 (a b) c) S 1 7 7 0 -1 4194560 1 2"));
        assert!(!may_have_files("2 (kthreadd) S 0 0 0 0 -1 2129984 0 0"));
        assert!(!may_have_files("9 (gone) Z 1 9 9 0 -1 4194560 0 0"));
        assert!(!may_have_files(""));
    }

    #[test]
    fn a_process_in_a_container_has_its_number_there() {
        assert_eq!(
            innermost("Name:\tx\nNSpid:\t4711\t12\nNSpgid:\t1"),
            Some(12)
        );
        assert_eq!(
            (innermost("NSpid:\t4711\n"), innermost("Name:\tx")),
            (Some(4711), None)
        );
        assert_eq!(
            own_number(std::process::id()),
            Some(u64::from(std::process::id()))
        );
    }

    #[test]
    fn a_missing_file_is_no_error() {
        let error = links(u32::MAX, |_| true).unwrap_err();
        assert!(is_gone(&error), "{error}");
        assert_eq!(
            (command(u32::MAX), rank(u32::MAX), own_number(u32::MAX)),
            ("?".to_owned(), None, None)
        );
        assert!(links(std::process::id(), |_| true).unwrap().len() > 2);
    }
}
