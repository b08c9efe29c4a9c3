//! Processes, clocks, and waiting.

use std::sync::atomic::AtomicU32;
use std::time::Duration;

pub fn user() -> u32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::geteuid() }
}

/// The kernel's number of the calling thread.
pub fn thread_id() -> u32 {
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Start time of a process, in the kernel's clock ticks; `None` if the process has ended. A PID and
/// a start time together identify one process, although the kernel reuses PIDs.
pub fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may have any characters, so fields are counted from its last
    // parenthesis. The start time is field 22.
    let mut fields = stat.rsplit(')').next()?.split_whitespace();
    if fields.next()? == "Z" {
        None
    } else {
        fields.nth(18)?.parse().ok()
    }
}

/// Identifies this process's PID namespace, outside which its PIDs have no meaning; 0: unknown.
pub fn pid_namespace() -> u32 {
    use std::os::unix::fs::MetadataExt;
    // Namespace numbers have 32 bits (`ns_common.inum` in the kernel).
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino() as u32)
}

/// Reads the clock that all processes of this machine share.
#[inline]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` may be written; the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Lets any process of this user read this process's memory, where Yama would allow only a parent.
/// The processes that will join the fabric are not known, so a narrower permission is not possible.
pub fn let_peers_read() {
    // From linux/prctl.h. The value `c_ulong::MAX` below is PR_SET_PTRACER_ANY. Without Yama the
    // call fails, but then it is not needed.
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    // SAFETY: only changes who may trace this process.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}

pub fn sleep_while(word: &AtomicU32, expected: u32, limit: Duration) {
    let time = libc::timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // SAFETY: the word is in shared memory that is never unmapped; the call only reads the time.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const time,
        )
    };
}

/// Wakes all sleepers on `word`, in all processes.
pub fn wake(word: &AtomicU32) {
    // SAFETY: as in `sleep_while`.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// Opens a file and locks it. Dropping the file releases the lock.
pub fn lock_file(path: &std::path::Path) -> Result<std::fs::File, String> {
    let open = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path);
    let file = open.map_err(|e| format!("{}: {e}", path.display()))?;
    file.lock()
        .map_err(|e| format!("locking {}: {e}", path.display()))?;
    Ok(file)
}

/// Blocks all signals in the calling thread, so that the program's other threads get them.
pub fn block_signals() {
    // SAFETY: `all` is filled before it is used; only the calling thread's mask changes.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
    }
}

/// True unless the kernel reports `EFAULT` for the first or the last byte of a range. `len` must
/// not be 0. The real `ibv_reg_mr` fails for unreadable memory, when it pins the pages. It is not
/// enough that the addresses are mapped: a GPU's memory can be mapped where the processor cannot
/// read it.
pub fn readable(addr: usize, len: usize) -> bool {
    [addr, addr + len - 1].iter().all(|place| {
        let mut byte = 0u8;
        let local = libc::iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: 1,
        };
        let remote = libc::iovec {
            iov_base: *place as *mut libc::c_void,
            iov_len: 1,
        };
        // SAFETY: the kernel reads one byte into `byte` or returns EFAULT; nothing is accessed
        // here.
        let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
        read == 1 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_processor_can_read_is_readable() {
        let bytes = [7u8; 3];
        assert!(readable(bytes.as_ptr() as usize, bytes.len()) && !readable(4096, 1));
        // SAFETY: a new mapping where the kernel chooses; unmapped below, not accessed in between.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                8192,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert!(
            !readable(reserved as usize, 8192),
            "addresses alone, as a GPU's memory has"
        );
        // SAFETY: the whole mapping made above.
        unsafe { libc::munmap(reserved, 8192) };
    }
}
