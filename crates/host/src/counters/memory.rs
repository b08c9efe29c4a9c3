//! Memory for counters: a memory file that other processes may open, or private memory.
//!
//! A process that may inspect this process (as by ptrace) can open the memory file in
//! `/proc/PID/fd`, and can also write to it. So the file's words are only loaded and stored as
//! atomics, and no index, length or decision depends on a loaded value. The file cannot shrink, and
//! its memory is allocated from the start: access to a page that the kernel cannot allocate would
//! raise SIGBUS (`shmem_acct_blocks` in Linux's mm/shmem.c).

#![allow(unsafe_code)]

use super::layout::{FILE_BYTES, FILE_NAME, RECORD_WORDS, RECORDS};
use super::layout::{HEADER_WORDS, HeaderWord, MAGIC, VERSION};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use std::ffi::CString;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const FILE_WORDS: usize = FILE_BYTES / size_of::<AtomicU64>();

pub type RecordWords = [AtomicU64; RECORD_WORDS];

/// Words for lanes that have no record yet. What these lanes count is never read.
static DISCARDED: RecordWords = [const { AtomicU64::new(0) }; RECORD_WORDS];

/// The mapped memory file of a process. It exists until its `Counting` and all records are dropped.
pub struct MemoryFile {
    start: NonNull<AtomicU64>,
    /// Kept open, because readers find the file by the link of this descriptor in `/proc`.
    fd: OwnedFd,
}

// SAFETY: the memory is accessed only as atomics, and unmapped once.
unsafe impl Send for MemoryFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for MemoryFile {}

impl MemoryFile {
    /// Creates the file, with a header and no record in use.
    pub fn new() -> io::Result<Arc<Self>> {
        // A file above the limit would make the kernel send SIGXFSZ, which ends the process.
        let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
        if limit != RLIM_INFINITY && limit < FILE_BYTES as u64 {
            return Err(io::Error::other(format!(
                "files may have {limit} bytes (ulimit -f)"
            )));
        }
        let fd = create()?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses, of a file that has this size
        // and keeps it.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                FILE_BYTES,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A forked child has no connections and must not write to its parent's counters.
        // SAFETY: the mapping was just made, and the advice changes only what a child inherits.
        unsafe { libc::madvise(start, FILE_BYTES, libc::MADV_DONTFORK) };
        let start =
            NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        let file = Self { start, fd };
        let sizes = [HEADER_WORDS, RECORD_WORDS, RECORDS].map(|size| size as u64);
        file.set(HeaderWord::Version, VERSION);
        file.set(HeaderWord::HeaderWords, sizes[0]);
        file.set(HeaderWord::RecordWords, sizes[1]);
        file.set(HeaderWord::Records, sizes[2]);
        file.set(HeaderWord::ProcessId, u64::from(std::process::id()));
        file.set(HeaderWord::Magic, MAGIC);
        Ok(Arc::new(file))
    }

    /// Writes a word of the header, ordered after all earlier writes.
    pub fn set(&self, word: HeaderWord, value: u64) {
        self.words()[word as usize].store(value, Ordering::Release);
    }

    /// Returns the path under which other processes find the file.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())
    }

    fn words(&self) -> &[AtomicU64; FILE_WORDS] {
        // SAFETY: the memory is mapped until `self` is dropped, was zeroed, is aligned and has this
        // many words. It is accessed only as atomics.
        unsafe { self.start.cast().as_ref() }
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        // SAFETY: this type mapped the memory with this length. Each address in it is kept together
        // with an `Arc` of this file, so no address outlives the mapping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), FILE_BYTES) };
    }
}

/// Location of a record's words, with a value attached. The words' address is stored, so that
/// counting is the same for words in the memory file and in private memory.
pub struct Place<T> {
    words: NonNull<RecordWords>,
    /// `None` for [`DISCARDED`].
    held: Option<Arc<OwnedWords<T>>>,
}

/// The attached value, and the owner of the words. Both are in one allocation, so that a [`Place`]
/// stays small: it has one pointer for both, and every lane has a place.
struct OwnedWords<T> {
    attached: T,
    _owner: Owner,
}

enum Owner {
    File { _file: Arc<MemoryFile> },
    Own { _words: Arc<RecordWords> },
}

// SAFETY: the words are atomics, which any thread may use, and any thread may drop their owner.
unsafe impl<T: Send + Sync> Send for Place<T> {}
// SAFETY: as for `Send`.
unsafe impl<T: Send + Sync> Sync for Place<T> {}

impl<T> Place<T> {
    /// Returns the place of record `index` in the file, or a place in private memory if the file
    /// has no such record.
    pub fn in_file(file: &Arc<MemoryFile>, index: usize, attached: T) -> Self {
        let words = file.words()[HEADER_WORDS..]
            .chunks_exact(RECORD_WORDS)
            .nth(index);
        let Some(Ok(words)) = words.map(<&RecordWords>::try_from) else {
            return Self::private(attached);
        };
        Self::held(
            NonNull::from(words),
            Owner::File {
                _file: Arc::clone(file),
            },
            attached,
        )
    }

    pub fn private(attached: T) -> Self {
        let words: Arc<RecordWords> = Arc::new([const { AtomicU64::new(0) }; RECORD_WORDS]);
        Self::held(
            NonNull::from(&*words),
            Owner::Own { _words: words },
            attached,
        )
    }

    /// Returns a place for counts that are never read.
    pub fn detached() -> Self {
        Self {
            words: NonNull::from(&DISCARDED),
            held: None,
        }
    }

    pub fn attached(&self) -> Option<&T> {
        self.held.as_ref().map(|held| &held.attached)
    }

    fn held(words: NonNull<RecordWords>, owner: Owner, attached: T) -> Self {
        Self {
            words,
            held: Some(Arc::new(OwnedWords {
                attached,
                _owner: owner,
            })),
        }
    }
}

impl<T> Clone for Place<T> {
    fn clone(&self) -> Self {
        Self {
            words: self.words,
            held: self.held.clone(),
        }
    }
}

impl<T> Deref for Place<T> {
    type Target = RecordWords;

    #[inline(always)]
    fn deref(&self) -> &RecordWords {
        // SAFETY: the words are static, or `held` keeps them in place while `self` exists. They are
        // accessed only as atomics.
        unsafe { self.words.as_ref() }
    }
}

/// Creates a memory file of its final size. Its seals forbid a change of the size, and further
/// seals.
fn create() -> io::Result<OwnedFd> {
    let name = CString::new(FILE_NAME)?;
    let make = |flags| {
        // SAFETY: the name ends with a NUL, and is copied.
        let fd = checked(unsafe { libc::memfd_create(name.as_ptr(), flags) })?;
        // SAFETY: the descriptor was just created, and has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Kernels from 6.3 on may require MFD_NOEXEC_SEAL (vm.memfd_noexec); older ones lack it.
    let fd: OwnedFd =
        make(flags | libc::MFD_NOEXEC_SEAL).or_else(|error: io::Error| {
            match error.raw_os_error() {
                Some(libc::EINVAL) => make(flags),
                _ => Err(error),
            }
        })?;
    // SAFETY: a call without pointers, on a descriptor that `fd` owns.
    checked(unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, FILE_BYTES as libc::off_t) })?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: as above.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    Ok(fd)
}

fn checked(result: libc::c_int) -> io::Result<RawFd> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_file_keeps_its_size_and_shows_the_counts() {
        let file = MemoryFile::new().unwrap();
        let path = format!("/proc/self/fd/{}", file.fd.as_raw_fd());
        let link = std::fs::read_link(&path).unwrap();
        assert_eq!(
            link.to_str(),
            Some(format!("/memfd:{FILE_NAME} (deleted)").as_str())
        );
        let foreign = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let known = foreign.metadata().unwrap();
        assert!(
            known.len() == FILE_BYTES as u64 && known.blocks() * 512 >= known.len(),
            "{known:?}"
        );
        for length in [0, FILE_BYTES as u64 - 1, FILE_BYTES as u64 + 1] {
            assert_eq!(
                foreign.set_len(length).unwrap_err().raw_os_error(),
                Some(libc::EPERM),
                "{length} bytes"
            );
        }
        let last = Place::in_file(&file, RECORDS - 1, ());
        let beyond = Place::in_file(&file, RECORDS, ());
        beyond[RECORD_WORDS - 1].store(78, Ordering::Relaxed);
        last[RECORD_WORDS - 1].store(77, Ordering::Relaxed);
        drop(file);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(
            bytes[FILE_BYTES - 8..],
            77_u64.to_ne_bytes(),
            "a record keeps its file"
        );
    }
}
