//! The memory that counters stand in: a memory file that other processes may open, or memory of this process alone.
//!
//! Whoever may look at this process may also write into the file. So its words are only ever loaded and stored, as atomics, and nothing that is
//! read from them is used as an index, a length or a condition. It cannot be made shorter, and has its memory from the start: an access to a page
//! for which none is left would be a SIGBUS (`shmem_acct_blocks` in Linux's mm/shmem.c).

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

/// The words of a record.
pub type RecordWords = [AtomicU64; RECORD_WORDS];

/// Where lanes count that no record was made for: those that are not in use yet.
static NOWHERE: RecordWords = [const { AtomicU64::new(0) }; RECORD_WORDS];

/// The memory file of a process, mapped. It lasts as long as a record of it is held.
pub struct MemoryFile {
    start: NonNull<AtomicU64>,
    /// Readers find the file by it.
    fd: OwnedFd,
}

// SAFETY: the memory is only reached as atomics, and unmapped once.
unsafe impl Send for MemoryFile {}
// SAFETY: as above.
unsafe impl Sync for MemoryFile {}

impl MemoryFile {
    /// Makes the file, with a header and no record in use.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn new() -> io::Result<Arc<Self>> {
        // Beyond the limit the kernel would not only refuse the size: it would send SIGXFSZ, which ends the process.
        let (limit, _) = getrlimit(Resource::RLIMIT_FSIZE)?;
        if limit != RLIM_INFINITY && limit < FILE_BYTES as u64 {
            return Err(io::Error::other(format!("files may have {limit} bytes (ulimit -f)")));
        }
        let fd = create()?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that has this size and keeps it.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), FILE_BYTES, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A forked child has no connections, and must not count for its parent.
        // SAFETY: the mapping was just made, and the advice changes only what a child inherits.
        unsafe { libc::madvise(start, FILE_BYTES, libc::MADV_DONTFORK) };
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
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

    /// Writes a word of the header, after all that was written before.
    pub fn set(&self, word: HeaderWord, value: u64) {
        self.words()[word as usize].store(value, Ordering::Release);
    }

    /// Where this process's other programs, and its tests, find it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.fd.as_raw_fd())
    }

    fn words(&self) -> &[AtomicU64; FILE_WORDS] {
        // SAFETY: mapped, zeroed, aligned, of this many words for good, and only ever reached as atomics.
        unsafe { self.start.cast().as_ref() }
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length; whoever has an address in it holds an `Arc` of this.
        unsafe { libc::munmap(self.start.as_ptr().cast(), FILE_BYTES) };
    }
}

/// Where one record's words are, and what comes with them. The address is held, so that counting takes no look at whose memory it is.
pub struct Place<T> {
    words: NonNull<RecordWords>,
    /// None for [`NOWHERE`].
    held: Option<Arc<Held<T>>>,
}

/// What keeps the words where they are, and what its user wants beside it. In one piece, because every lane has a place.
struct Held<T> {
    with: T,
    _owner: Owner,
}

enum Owner {
    File { _file: Arc<MemoryFile> },
    Own { _words: Arc<RecordWords> },
}

// SAFETY: the words are atomics, which any thread may use, and their owner may be dropped by any thread.
unsafe impl<T: Send + Sync> Send for Place<T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Place<T> {}

impl<T> Place<T> {
    /// A record of the file; in memory of this process alone where there is none of this number.
    pub fn in_file(file: &Arc<MemoryFile>, index: usize, with: T) -> Self {
        let words = file.words()[HEADER_WORDS..].chunks_exact(RECORD_WORDS).nth(index);
        let Some(Ok(words)) = words.map(<&RecordWords>::try_from) else { return Self::private(with) };
        Self::held(NonNull::from(words), Owner::File { _file: Arc::clone(file) }, with)
    }

    /// Memory of this process alone.
    pub fn private(with: T) -> Self {
        let words: Arc<RecordWords> = Arc::new([const { AtomicU64::new(0) }; RECORD_WORDS]);
        Self::held(NonNull::from(&*words), Owner::Own { _words: words }, with)
    }

    /// What nobody looks at.
    pub fn nowhere() -> Self {
        Self { words: NonNull::from(&NOWHERE), held: None }
    }

    /// What came with it.
    pub fn with(&self) -> Option<&T> {
        self.held.as_ref().map(|held| &held.with)
    }

    fn held(words: NonNull<RecordWords>, owner: Owner, with: T) -> Self {
        Self { words, held: Some(Arc::new(Held { with, _owner: owner })) }
    }
}

impl<T> Clone for Place<T> {
    fn clone(&self) -> Self {
        Self { words: self.words, held: self.held.clone() }
    }
}

impl<T> Deref for Place<T> {
    type Target = RecordWords;

    #[inline(always)]
    fn deref(&self) -> &RecordWords {
        // SAFETY: what is held keeps the words where they are as long as this is there, and they are only ever reached as atomics.
        unsafe { self.words.as_ref() }
    }
}

/// A memory file of its final size, sealed against any other and against further seals.
fn create() -> io::Result<OwnedFd> {
    let name = CString::new(FILE_NAME)?;
    let make = |flags| {
        // SAFETY: the name ends with a zero, and is copied.
        let fd = checked(unsafe { libc::memfd_create(name.as_ptr(), flags) })?;
        // SAFETY: the descriptor was made a moment ago, and nobody else has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // Kernels from 6.3 on may ask for the second one (vm.memfd_noexec); earlier ones do not know it.
    let fd: OwnedFd = make(flags | libc::MFD_NOEXEC_SEAL).or_else(|error: io::Error| match error.raw_os_error() {
        Some(libc::EINVAL) => make(flags),
        _ => Err(error),
    })?;
    // SAFETY: a call on a descriptor of ours, without pointers.
    checked(unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, FILE_BYTES as libc::off_t) })?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: as above.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
    Ok(fd)
}

fn checked(result: libc::c_int) -> io::Result<RawFd> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn the_file_keeps_its_size_and_shows_what_is_counted() {
        let file = MemoryFile::new().unwrap();
        let path = format!("/proc/self/fd/{}", file.fd.as_raw_fd());
        let link = std::fs::read_link(&path).unwrap();
        assert_eq!(link.to_str(), Some(format!("/memfd:{FILE_NAME} (deleted)").as_str()));
        let foreign = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let known = foreign.metadata().unwrap();
        assert!(known.len() == FILE_BYTES as u64 && known.blocks() * 512 >= known.len(), "{known:?}");
        for length in [0, FILE_BYTES as u64 - 1, FILE_BYTES as u64 + 1] {
            assert_eq!(foreign.set_len(length).unwrap_err().raw_os_error(), Some(libc::EPERM), "{length} bytes");
        }
        let (last, beyond) = (Place::in_file(&file, RECORDS - 1, ()), Place::in_file(&file, RECORDS, ()));
        beyond[RECORD_WORDS - 1].store(78, Ordering::Relaxed);
        last[RECORD_WORDS - 1].store(77, Ordering::Relaxed);
        drop(file);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes[FILE_BYTES - 8..], 77_u64.to_ne_bytes(), "a record keeps its file");
    }
}
