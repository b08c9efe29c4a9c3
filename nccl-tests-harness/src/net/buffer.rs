//! Memory that the plugin is given, and who has a hand in it: the network, or this process, never both.

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::alloc::{self, Layout};
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

/// An owner of memory.
///
/// # Safety
/// From `start` on, `bytes` bytes of this process's address space are this owner's alone until it is dropped, at the same
/// place all the time, and nothing else refers to them. Where `is_host` says so, they are mapped and initialised, and the
/// processor may read and write them.
pub unsafe trait Memory {
    /// Where it begins.
    fn start(&self) -> NonNull<c_void>;

    /// How long it is.
    fn bytes(&self) -> usize;

    /// Whether the processor may read and write it.
    fn is_host(&self) -> bool {
        true
    }
}

/// Memory that the plugin may read and write while requests are under way.
pub struct Buffer {
    memory: Box<dyn Memory>,
    /// Where requests are under way.
    active: RefCell<Vec<Stretch>>,
    /// While [`Buffer::alone`] runs, and once there are [`Words`] of it.
    borrowed: Cell<bool>,
    /// There are [`Words`] of it.
    shared: Cell<bool>,
}

/// A buffer that the processor, GPUs and the network use at the same time, from when this is made until the buffer ends. The
/// processor has its 8-byte words as atomics, and nothing else.
pub(crate) struct Words(Rc<Buffer>);

/// A stretch of a buffer that the network reads, or writes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) written: bool,
}

impl Buffer {
    /// Zeroed, page-aligned memory of `bytes` (1 or more).
    ///
    /// # Errors
    /// When the system has none.
    pub fn new(bytes: usize) -> Result<Rc<Self>> {
        Ok(Self::of(Mapping::new(bytes)?))
    }

    /// A buffer of such memory.
    pub fn of(memory: impl Memory + 'static) -> Rc<Self> {
        Rc::new(Self {
            memory: Box::new(memory),
            active: RefCell::default(),
            borrowed: Cell::default(),
            shared: Cell::default(),
        })
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Whether there are [`Words`] of it.
    pub(super) fn is_shared(&self) -> bool {
        self.shared.get()
    }

    /// Where it begins, for the plugin.
    pub(super) fn start(&self) -> NonNull<c_void> {
        self.memory.start()
    }

    /// Where a request over `bytes` bytes from `offset` on begins.
    pub(super) fn place(&self, offset: usize, bytes: usize) -> Result<*mut c_void> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes());
        ensure!(inside, "{bytes} bytes at {offset} lie outside of a buffer of {} bytes", self.bytes());
        ensure!(!self.borrowed.get() || self.shared.get(), "the buffer is being filled or checked");
        Ok(self.start().as_ptr().wrapping_byte_add(offset))
    }

    /// A request is under way there.
    pub(super) fn begin(&self, stretch: Stretch) {
        self.active.borrow_mut().push(stretch);
    }

    /// It is done.
    pub(super) fn end(&self, stretch: Stretch) {
        let mut active = self.active.borrow_mut();
        if let Some(at) = active.iter().position(|other| *other == stretch) {
            active.swap_remove(at);
        }
    }

    /// Lets `work` use the memory by its address, alone until it returns.
    ///
    /// # Errors
    /// While requests are under way in it, or what `work` returns.
    pub fn alone<T>(&self, work: impl FnOnce(NonNull<c_void>) -> Result<T>) -> Result<T> {
        let users = self.active.borrow().len();
        ensure!(users == 0, "the buffer is in use by {users} requests");
        ensure!(!self.borrowed.replace(true), "the buffer is being filled or checked, or is shared for good");
        let result = work(self.start());
        self.borrowed.set(false);
        result
    }

    /// Lets the processor fill or read the memory.
    ///
    /// # Errors
    /// While requests are under way in it, and where the processor cannot reach it.
    pub fn with_bytes<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
        ensure!(self.memory.is_host(), "the processor cannot reach this memory");
        self.alone(|start| {
            // SAFETY: `Memory` promises as many initialised bytes for as long as it lives, which `self` sees to; no request
            // is under way in them, and none starts and no second call gets to them before `alone` returns, so this is the
            // only access.
            Ok(work(unsafe { std::slice::from_raw_parts_mut(start.as_ptr().cast(), self.bytes()) }))
        })
    }

    /// Lets `work` change a stretch of this buffer by the same stretch of another one.
    ///
    /// # Errors
    /// When it lies outside of either, or the network has a hand in it.
    pub(crate) fn combine(&self, other: &Self, range: Range<usize>, work: impl FnOnce(&mut [u8], &[u8])) -> Result<()> {
        ensure!(!ptr::eq(self, other), "a buffer cannot be combined with itself");
        ensure!(self.memory.is_host() && other.memory.is_host(), "the processor cannot reach this memory");
        ensure!(range.start <= range.end, "a stretch that ends before it begins");
        ensure!(
            range.end <= self.bytes().min(other.bytes()),
            "the stretch to {} lies outside of the buffers",
            range.end
        );
        ensure!(!self.borrowed.get() && !other.borrowed.get(), "the buffer is being filled or checked");
        let touched = |stretch: &Stretch| stretch.start < range.end && range.start < stretch.end;
        let free = !self.active.borrow().iter().any(touched);
        ensure!(free && !other.active.borrow().iter().any(|stretch| stretch.written && touched(stretch)), "in use");
        self.borrowed.set(true);
        other.borrowed.set(true);
        // SAFETY: both stretches are mapped and initialised, of two owners. No request is under way in the first and
        // none writes to the second; none starts, and no other call gets at either, before the flags are reset.
        let (into, from) = unsafe {
            let into = self.start().as_ptr().cast::<u8>().add(range.start);
            let from = other.start().as_ptr().cast::<u8>().add(range.start);
            (std::slice::from_raw_parts_mut(into, range.len()), std::slice::from_raw_parts(from, range.len()))
        };
        work(into, from);
        self.borrowed.set(false);
        other.borrowed.set(false);
        Ok(())
    }
}

impl Words {
    /// Shares a buffer.
    ///
    /// # Errors
    /// While requests are under way in it, and where it is no host memory or not whole words.
    pub fn share(buffer: &Rc<Buffer>) -> Result<Rc<Self>> {
        ensure!(buffer.memory.is_host(), "the processor cannot reach this memory");
        let whole = buffer.start().cast::<AtomicU64>().is_aligned() && buffer.bytes().is_multiple_of(size_of::<u64>());
        ensure!(whole, "a buffer of {} bytes is not made of whole words", buffer.bytes());
        buffer.alone(|_| Ok(()))?;
        // From now on no reference into it is handed out but by `all`.
        buffer.borrowed.set(true);
        buffer.shared.set(true);
        Ok(Rc::new(Self(Rc::clone(buffer))))
    }

    /// Whether these are the words of `buffer`.
    pub(crate) fn are_of(&self, buffer: &Rc<Buffer>) -> bool {
        Rc::ptr_eq(&self.0, buffer)
    }

    /// Where they begin.
    pub fn start(&self) -> NonNull<c_void> {
        self.0.start()
    }

    /// How many bytes they are.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// All of them.
    pub fn all(&self) -> &[AtomicU64] {
        let count = self.bytes() / size_of::<u64>();
        // SAFETY: `Memory` promises as many initialised bytes for as long as it lives, which `self` sees to; `share` has looked at
        // the alignment. Plain references are handed out by `alone`, `with_bytes` and `combine` only, which fail for good
        // since `share`. Whoever else writes there is no code of this program's (a GPU, a NIC), or does so by atomics (the software
        // fabric).
        unsafe { std::slice::from_raw_parts(self.start().as_ptr().cast(), count) }
    }
}

/// Pages of the kernel's.
struct Mapping {
    start: NonNull<c_void>,
    bytes: usize,
}

impl Mapping {
    fn new(bytes: usize) -> Result<Self> {
        let length = NonZeroUsize::new(bytes).context("a buffer of no bytes")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new private mapping at a place of the kernel's choice touches no memory in use.
        let start = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) };
        let start = start.map_err(|errno| anyhow!("allocate {bytes} bytes: {}", errno.desc()))?;
        Ok(Self { start, bytes })
    }
}

// SAFETY: a mapping of its own, zeroed, for reading and writing, which nobody else knows and which ends on drop.
unsafe impl Memory for Mapping {
    fn start(&self) -> NonNull<c_void> {
        self.start
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, whole; registrations and requests held the buffer and are gone.
        let _ = unsafe { munmap(self.start, self.bytes) };
    }
}

/// Memory of the allocator, as a program has it by `malloc`: zeroed, and alone on its pages, because who pins memory pins
/// pages, and two pins of CUDA's on one page are an error.
pub(crate) struct Heap {
    start: NonNull<c_void>,
    bytes: usize,
    layout: Layout,
}

/// No page of the machines that this runs on is larger (Arm has kernels with pages of 64 KiB).
const PAGE_BYTES: usize = 64 << 10;

impl Heap {
    /// `bytes` of it (1 or more).
    ///
    /// # Errors
    /// When the allocator has none.
    pub fn new(bytes: usize) -> Result<Self> {
        ensure!(bytes > 0, "a buffer of no bytes");
        let whole = bytes.checked_next_multiple_of(PAGE_BYTES).context("a buffer larger than the address space")?;
        let layout = Layout::from_size_align(whole, PAGE_BYTES)?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start.cast()).with_context(|| format!("allocate {bytes} bytes: out of memory"))?;
        Ok(Self { start, bytes, layout })
    }
}

// SAFETY: an allocation of its own, zeroed, at least that long, which nobody else knows and which ends on drop.
unsafe impl Memory for Heap {
    fn start(&self) -> NonNull<c_void> {
        self.start
    }

    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout; registrations and requests held the buffer and are gone.
        unsafe { alloc::dealloc(self.start.as_ptr().cast(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    /// Memory that only something else than the processor can reach.
    struct Far(Mapping);

    // SAFETY: as `Mapping`.
    unsafe impl Memory for Far {
        fn start(&self) -> NonNull<c_void> {
            self.0.start()
        }

        fn bytes(&self) -> usize {
            self.0.bytes()
        }

        fn is_host(&self) -> bool {
            false
        }
    }

    #[test]
    fn memory_of_the_heap_is_zeroed_and_alone_on_its_pages() {
        let (one, other) = (Heap::new(8).unwrap(), Heap::new(PAGE_BYTES + 1).unwrap());
        let page = |heap: &Heap| heap.start.as_ptr().addr() / PAGE_BYTES;
        assert!(!(page(&other)..page(&other) + 2).contains(&page(&one)));
        let buffer = Buffer::of(other);
        assert_eq!(buffer.bytes(), PAGE_BYTES + 1);
        assert!(
            buffer.with_bytes(|bytes| bytes.len() == PAGE_BYTES + 1 && bytes.iter().all(|byte| *byte == 0)).unwrap()
        );
        assert!(Heap::new(0).is_err());
    }

    #[test]
    fn a_shared_buffer_has_requests_and_atomic_words_and_nothing_else() {
        let buffer = Buffer::new(64).unwrap();
        buffer.with_bytes(|bytes| bytes[8] = 5).unwrap();
        let stretch = Stretch { start: 0, end: 8, written: true };
        buffer.begin(stretch);
        assert!(Words::share(&buffer).is_err());
        buffer.end(stretch);
        let words = Words::share(&buffer).unwrap();
        assert_eq!((words.all().len(), words.all()[1].load(Relaxed)), (8, 5));
        assert!(words.are_of(&buffer) && !words.are_of(&Buffer::new(64).unwrap()));
        assert!(buffer.place(8, 56).is_ok() && buffer.place(8, 57).is_err());
        let other = Buffer::new(64).unwrap();
        assert!(buffer.with_bytes(|_| ()).unwrap_err().to_string().contains("shared"));
        assert!(buffer.combine(&other, 0..8, |_, _| ()).is_err() && other.combine(&buffer, 0..8, |_, _| ()).is_err());
        assert!(Words::share(&buffer).is_err() && buffer.place(0, 8).is_ok());
        assert!(Words::share(&Buffer::new(12).unwrap()).map(|_| ()).unwrap_err().to_string().contains("whole words"));
        assert!(Words::share(&Buffer::of(Far(Mapping::new(64).unwrap()))).is_err());
    }

    #[test]
    fn memory_in_use_is_not_touched_and_memory_out_of_reach_never() {
        let buffer = Buffer::new(64).unwrap();
        let stretch = Stretch { start: 0, end: 8, written: true };
        buffer.begin(stretch);
        assert!(buffer.with_bytes(|_| ()).unwrap_err().to_string().contains("in use by 1 request"));
        assert!(buffer.combine(&Buffer::new(64).unwrap(), 4..9, |_, _| ()).is_err());
        buffer.combine(&Buffer::new(64).unwrap(), 8..64, |into, from| into.copy_from_slice(from)).unwrap();
        buffer.end(stretch);
        buffer.with_bytes(|bytes| bytes.fill(1)).unwrap();
        assert!(buffer.alone(|_| buffer.place(0, 8)).unwrap_err().to_string().contains("being filled"));
        assert!(buffer.place(60, 5).is_err() && buffer.place(usize::MAX, 2).is_err() && buffer.place(60, 4).is_ok());
        let far = Buffer::of(Far(Mapping::new(64).unwrap()));
        assert!(far.with_bytes(|_| ()).unwrap_err().to_string().contains("cannot reach"));
        assert!(buffer.combine(&far, 0..8, |_, _| ()).is_err() && far.combine(&buffer, 0..8, |_, _| ()).is_err());
    }
}
