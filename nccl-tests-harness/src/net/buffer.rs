//! Memory that the plugin uses. While the network writes some bytes, this process does not access
//! them, and while the network reads some bytes, this process does not write them. The exception is
//! a buffer that is shared as [`Words`].

use anyhow::{Context as _, Result, ensure};
use std::alloc::{self, Layout};
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

/// An owner of memory.
///
/// # Safety
/// The `bytes` bytes of this process's address space from `start` on belong to this owner until it
/// is dropped. They keep their address, and nothing else refers to them. If `is_host` returns true,
/// they are mapped and initialised, and the processor may read and write them.
pub unsafe trait Memory {
    fn start(&self) -> NonNull<c_void>;

    fn bytes(&self) -> usize;

    fn is_host(&self) -> bool {
        true
    }
}

/// Memory that the plugin may read and write while requests are in flight.
pub struct Buffer {
    memory: Box<dyn Memory>,
    /// The stretches of the requests in flight.
    active: RefCell<Vec<Stretch>>,
    /// True while [`Buffer::alone`] or [`Buffer::combine`] runs, and after `Words::share`.
    borrowed: Cell<bool>,
    /// True after `Words::share`.
    shared: Cell<bool>,
}

/// A buffer that the CPU, GPUs and the network use at the same time, until the buffer is dropped.
/// The CPU accesses it only by 8-byte atomics.
pub(crate) struct Words(Rc<Buffer>);

/// The bytes of a buffer that one request reads or writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) start: usize,
    pub(super) end: usize,
    /// True if the network writes these bytes. False if it reads them.
    pub(super) written: bool,
}

impl Buffer {
    /// Allocates `bytes` (1 or more) of zeroed, page-aligned memory.
    ///
    /// # Errors
    /// Fails when the system has no memory left.
    pub fn new(bytes: usize) -> Result<Rc<Self>> {
        Ok(Self::of(Heap::new(bytes)?))
    }

    /// Makes a buffer of `memory`.
    pub fn of(memory: impl Memory + 'static) -> Rc<Self> {
        Rc::new(Self {
            memory: Box::new(memory),
            active: RefCell::default(),
            borrowed: Cell::default(),
            shared: Cell::default(),
        })
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared.get()
    }

    pub(super) fn start(&self) -> NonNull<c_void> {
        self.memory.start()
    }

    /// Checks the range of a request, and returns its address.
    pub(super) fn place(&self, offset: usize, bytes: usize) -> Result<*mut c_void> {
        let inside = offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.bytes());
        ensure!(
            inside,
            "{bytes} bytes at {offset} lie outside of a buffer of {} bytes",
            self.bytes()
        );
        ensure!(
            !self.borrowed.get() || self.shared.get(),
            "the buffer is being filled or checked"
        );
        Ok(self.start().as_ptr().wrapping_byte_add(offset))
    }

    pub(super) fn begin(&self, stretch: Stretch) {
        self.active.borrow_mut().push(stretch);
    }

    pub(super) fn end(&self, stretch: Stretch) {
        let mut active = self.active.borrow_mut();
        if let Some(at) = active.iter().position(|other| *other == stretch) {
            active.swap_remove(at);
        }
    }

    /// Lets `work` use the memory by its address. Nothing else uses the memory until `work`
    /// returns.
    ///
    /// # Errors
    /// Fails while requests use the memory, after `Words::share`, and when `work` fails.
    pub fn alone<T>(&self, work: impl FnOnce(NonNull<c_void>) -> Result<T>) -> Result<T> {
        let users = self.active.borrow().len();
        ensure!(users == 0, "the buffer is in use by {users} requests");
        ensure!(
            !self.borrowed.replace(true),
            "the buffer is being filled or checked, or is shared"
        );
        let result = work(self.start());
        self.borrowed.set(false);
        result
    }

    /// Lets the processor fill or read the memory.
    ///
    /// # Errors
    /// Fails while requests use the memory, after `Words::share`, and if the processor cannot
    /// reach the memory.
    pub fn with_bytes<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
        ensure!(
            self.memory.is_host(),
            "the processor cannot reach this memory"
        );
        self.alone(|start| {
            // SAFETY: `Memory` promises this many initialised bytes while it lives, and `self`
            // owns it. No request is in flight in these bytes. Until `alone` returns, no request
            // starts and no second call reaches the bytes, so this is the only access.
            Ok(work(unsafe {
                std::slice::from_raw_parts_mut(start.as_ptr().cast(), self.bytes())
            }))
        })
    }

    /// Lets `work` change a range of this buffer with the bytes of the same range of `other`. Fails
    /// when the range lies outside of either buffer, when a request uses the range of this buffer,
    /// and when a request writes the range of `other`. Requests may still read the range of
    /// `other`.
    pub(crate) fn combine(
        &self,
        other: &Self,
        range: Range<usize>,
        work: impl FnOnce(&mut [u8], &[u8]),
    ) -> Result<()> {
        ensure!(
            !ptr::eq(self, other),
            "a buffer cannot be combined with itself"
        );
        ensure!(
            self.memory.is_host() && other.memory.is_host(),
            "the processor cannot reach this memory"
        );
        ensure!(
            range.start <= range.end,
            "a stretch that ends before it begins"
        );
        ensure!(
            range.end <= self.bytes().min(other.bytes()),
            "the stretch to {} lies outside of the buffers",
            range.end
        );
        ensure!(
            !self.borrowed.get() && !other.borrowed.get(),
            "the buffer is being filled or checked"
        );
        let touched = |stretch: &Stretch| stretch.start < range.end && range.start < stretch.end;
        let free = !self.active.borrow().iter().any(touched);
        ensure!(
            free && !other
                .active
                .borrow()
                .iter()
                .any(|stretch| stretch.written && touched(stretch)),
            "in use"
        );
        self.borrowed.set(true);
        other.borrowed.set(true);
        // SAFETY: both ranges are mapped and initialised and have different owners. No request is
        // in flight in the first, and none writes to the second. Until the flags are reset, no
        // request starts, and no other call reaches either range.
        let (into, from) = unsafe {
            let into = self.start().as_ptr().cast::<u8>().add(range.start);
            let from = other.start().as_ptr().cast::<u8>().add(range.start);
            (
                std::slice::from_raw_parts_mut(into, range.len()),
                std::slice::from_raw_parts(from, range.len()),
            )
        };
        work(into, from);
        self.borrowed.set(false);
        other.borrowed.set(false);
        Ok(())
    }
}

impl Words {
    /// Shares a buffer. Fails while requests use the buffer, if it is already shared, and if it is
    /// not host memory or not made of whole words.
    pub fn share(buffer: &Rc<Buffer>) -> Result<Rc<Self>> {
        ensure!(
            buffer.memory.is_host(),
            "the processor cannot reach this memory"
        );
        let whole = buffer.start().cast::<AtomicU64>().is_aligned()
            && buffer.bytes().is_multiple_of(size_of::<u64>());
        ensure!(
            whole,
            "a buffer of {} bytes is not made of whole words",
            buffer.bytes()
        );
        buffer.alone(|_| Ok(()))?;
        // From now on only `all` hands out references into the buffer.
        buffer.borrowed.set(true);
        buffer.shared.set(true);
        Ok(Rc::new(Self(Rc::clone(buffer))))
    }

    pub(crate) fn are_of(&self, buffer: &Rc<Buffer>) -> bool {
        Rc::ptr_eq(&self.0, buffer)
    }

    pub fn start(&self) -> NonNull<c_void> {
        self.0.start()
    }

    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    pub fn all(&self) -> &[AtomicU64] {
        let count = self.bytes() / size_of::<u64>();
        // SAFETY: `Memory` promises this many initialised bytes while it lives, and `self` holds
        // it; `share` has checked the alignment. Only `alone`, `with_bytes` and `combine` hand out
        // plain references, and they always fail after `share`. Other writers are not code of this
        // program (a GPU, a NIC), or use atomics (the software fabric).
        unsafe { std::slice::from_raw_parts(self.start().as_ptr().cast(), count) }
    }
}

/// Zeroed memory of the allocator, as from `malloc`. The memory has its pages to itself, because
/// CUDA pins whole pages and fails to pin a page twice.
pub(crate) struct Heap {
    start: NonNull<c_void>,
    bytes: usize,
    layout: Layout,
}

/// Largest page size of the supported machines: some Arm kernels have pages of 64 KiB.
const PAGE_BYTES: usize = 64 << 10;

impl Heap {
    /// Allocates `bytes` (1 or more). Fails when the allocator has no memory left.
    pub fn new(bytes: usize) -> Result<Self> {
        ensure!(bytes > 0, "a buffer of no bytes");
        let whole = bytes
            .checked_next_multiple_of(PAGE_BYTES)
            .context("a buffer larger than the address space")?;
        let layout = Layout::from_size_align(whole, PAGE_BYTES)?;
        // SAFETY: the layout has a size above 0.
        let start = unsafe { alloc::alloc_zeroed(layout) };
        let start = NonNull::new(start.cast())
            .with_context(|| format!("allocate {bytes} bytes: out of memory"))?;
        Ok(Self {
            start,
            bytes,
            layout,
        })
    }
}

// SAFETY: a zeroed allocation of at least this length, which is freed on drop. No other owner has a
// pointer to it.
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
        // SAFETY: allocated by `new` with this layout. Registrations and requests held the buffer
        // and have ended.
        unsafe { alloc::dealloc(self.start.as_ptr().cast(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    /// Memory that the processor cannot reach.
    struct Far(Heap);

    // SAFETY: as `Heap`.
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
        let one = Heap::new(8).unwrap();
        let other = Heap::new(PAGE_BYTES + 1).unwrap();
        let page = |heap: &Heap| heap.start.as_ptr().addr() / PAGE_BYTES;
        assert!(!(page(&other)..page(&other) + 2).contains(&page(&one)));
        let buffer = Buffer::of(other);
        assert_eq!(buffer.bytes(), PAGE_BYTES + 1);
        assert!(
            buffer
                .with_bytes(
                    |bytes| bytes.len() == PAGE_BYTES + 1 && bytes.iter().all(|byte| *byte == 0)
                )
                .unwrap()
        );
        assert!(Heap::new(0).is_err());
    }

    #[test]
    fn a_shared_buffer_has_requests_and_atomic_words_and_nothing_else() {
        let buffer = Buffer::new(64).unwrap();
        buffer.with_bytes(|bytes| bytes[8] = 5).unwrap();
        let stretch = Stretch {
            start: 0,
            end: 8,
            written: true,
        };
        buffer.begin(stretch);
        assert!(Words::share(&buffer).is_err());
        buffer.end(stretch);
        let words = Words::share(&buffer).unwrap();
        assert_eq!((words.all().len(), words.all()[1].load(Relaxed)), (8, 5));
        assert!(words.are_of(&buffer) && !words.are_of(&Buffer::new(64).unwrap()));
        assert!(buffer.place(8, 56).is_ok() && buffer.place(8, 57).is_err());
        let other = Buffer::new(64).unwrap();
        assert!(
            buffer
                .with_bytes(|_| ())
                .unwrap_err()
                .to_string()
                .contains("shared")
        );
        assert!(
            buffer.combine(&other, 0..8, |_, _| ()).is_err()
                && other.combine(&buffer, 0..8, |_, _| ()).is_err()
        );
        assert!(Words::share(&buffer).is_err() && buffer.place(0, 8).is_ok());
        assert!(
            Words::share(&Buffer::new(12).unwrap())
                .map(|_| ())
                .unwrap_err()
                .to_string()
                .contains("whole words")
        );
        assert!(Words::share(&Buffer::of(Far(Heap::new(64).unwrap()))).is_err());
    }

    #[test]
    fn memory_in_use_or_out_of_reach_is_not_touched() {
        let buffer = Buffer::new(64).unwrap();
        let stretch = Stretch {
            start: 0,
            end: 8,
            written: true,
        };
        buffer.begin(stretch);
        assert!(
            buffer
                .with_bytes(|_| ())
                .unwrap_err()
                .to_string()
                .contains("in use by 1 request")
        );
        assert!(
            buffer
                .combine(&Buffer::new(64).unwrap(), 4..9, |_, _| ())
                .is_err()
        );
        buffer
            .combine(&Buffer::new(64).unwrap(), 8..64, |into, from| {
                into.copy_from_slice(from)
            })
            .unwrap();
        buffer.end(stretch);
        buffer.with_bytes(|bytes| bytes.fill(1)).unwrap();
        assert!(
            buffer
                .alone(|_| buffer.place(0, 8))
                .unwrap_err()
                .to_string()
                .contains("being filled")
        );
        assert!(
            buffer.place(60, 5).is_err()
                && buffer.place(usize::MAX, 2).is_err()
                && buffer.place(60, 4).is_ok()
        );
        let far = Buffer::of(Far(Heap::new(64).unwrap()));
        assert!(
            far.with_bytes(|_| ())
                .unwrap_err()
                .to_string()
                .contains("cannot reach")
        );
        assert!(
            buffer.combine(&far, 0..8, |_, _| ()).is_err()
                && far.combine(&buffer, 0..8, |_, _| ()).is_err()
        );
    }
}
