//! Copies bytes between another process's memory and this process's memory. [`place`] stores bytes
//! in this process in the order in which a NIC stores them. So a flag that comes after its data
//! never becomes visible before the data.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

/// Maximum number of bytes that are moved at once. So few bytes stay in the processor's cache
/// between the copy into the [`Bounce`] and the copy out of it.
pub const BOUNCE_BYTES: usize = 64 * 1024;

/// Buffer between the read from one process and the store in the other.
#[derive(Debug)]
pub struct Bounce(Box<[u64]>);

impl Default for Bounce {
    fn default() -> Self {
        Self(vec![0; BOUNCE_BYTES / 8].into_boxed_slice())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The other process has ended.
    Gone,
    /// The other process's address is not mapped.
    Memory,
    /// The kernel denies access to the other process's memory.
    Forbidden,
}

/// A piece of a process's memory: its address, and its length in bytes.
pub type Piece = (u64, u64);

/// Reads `bytes` bytes of process `pid`, from byte `offset` of its `pieces` on, and stores them at
/// `to` in this process, as [`place`] does. More than [`BOUNCE_BYTES`] bytes are an error. After an
/// error, some of the bytes may have been stored.
///
/// # Safety
/// `to` must be valid for writes of `bytes` bytes, in a region that stays registered until this
/// function returns.
pub unsafe fn pull(
    bounce: &mut Bounce,
    pid: u32,
    pieces: &[Piece],
    offset: u64,
    bytes: usize,
    to: u64,
) -> Result<(), Fault> {
    let (remote, count) = window(pieces, offset, bytes);
    let local = libc::iovec {
        iov_base: bounce.0.as_mut_ptr().cast(),
        iov_len: bytes.min(BOUNCE_BYTES),
    };
    // SAFETY: `local` is the bounce buffer; the kernel checks the remote side.
    let moved =
        unsafe { libc::process_vm_readv(pid as i32, &local, 1, remote.as_ptr(), count as u64, 0) };
    whole(moved, bytes)?;
    // SAFETY: the caller's promise.
    unsafe { place(&bounce.0, 0, bytes, to) };
    Ok(())
}

/// Answers an RDMA read: copies the `bytes` bytes at `from` in this process to process `pid`, from
/// byte `offset` of its `pieces` on. After an error, some of the bytes may have been written.
///
/// # Safety
/// `from` must be valid for reads of `bytes` bytes.
pub unsafe fn push(
    pid: u32,
    from: u64,
    bytes: usize,
    pieces: &[Piece],
    offset: u64,
) -> Result<(), Fault> {
    let (remote, count) = window(pieces, offset, bytes);
    let local = libc::iovec {
        iov_base: from as *mut libc::c_void,
        iov_len: bytes,
    };
    // SAFETY: the caller's promise for the local side; the kernel checks the remote side.
    let moved =
        unsafe { libc::process_vm_writev(pid as i32, &local, 1, remote.as_ptr(), count as u64, 0) };
    whole(moved, bytes)
}

/// Stores `bytes` bytes of `words`, from byte `offset` on, at `to`. Stops at the end of `words`.
/// Aligned 8-byte words of the target are stored whole, and the last word of each aligned 128 bytes
/// becomes visible after the others.
///
/// # Safety
/// The same as for [`pull`].
pub unsafe fn place(words: &[u64], offset: usize, bytes: usize, to: u64) {
    let bytes = bytes.min((words.len() * 8).saturating_sub(offset));
    let from = words.as_ptr().cast::<u8>().wrapping_add(offset);
    let head = (to.wrapping_neg() % 8).min(bytes as u64) as usize;
    let body = (bytes - head) / 8;
    // Earlier stores, of this request or of a request before it, become visible before the stores
    // below: a flag must not overtake its data.
    fence(Ordering::Release);
    // SAFETY: all reads are within `words`, and all stores within the `bytes` bytes at `to`, which
    // the caller promises to be valid. The stores are atomic because the process's threads, and a
    // GPU, read this memory while it is written. After the first `head` bytes, the target is
    // aligned to 8 bytes.
    unsafe {
        for at in 0..head {
            AtomicU8::from_ptr((to as *mut u8).add(at)).store(*from.add(at), Ordering::Relaxed);
        }
        let target = (to as *mut u8).add(head);
        for word in 0..body {
            let value = from.add(head + word * 8).cast::<u64>().read_unaligned();
            let cell = AtomicU64::from_ptr(target.add(word * 8).cast());
            // A release store becomes visible after all stores before it, here the other words of
            // the aligned 128 bytes. (x86-64 keeps all stores in order, so there the ordering only
            // restrains the compiler.)
            let last_of_line = (target as usize + word * 8) % 128 == 120;
            cell.store(
                value,
                if last_of_line {
                    Ordering::Release
                } else {
                    Ordering::Relaxed
                },
            );
        }
        for at in head + body * 8..bytes {
            AtomicU8::from_ptr((to as *mut u8).add(at)).store(*from.add(at), Ordering::Release);
        }
    }
}

/// Calls [`pull`] for memory that the caller has just found to be registered. The caller holds the
/// engine's lock from that check until this function returns. Deregistration takes the same lock,
/// so the memory stays registered.
pub(crate) fn store_from(
    bounce: &mut Bounce,
    pid: u32,
    pieces: &[Piece],
    offset: u64,
    bytes: usize,
    to: u64,
) -> Result<(), Fault> {
    // SAFETY: registered for writing, so mapped and writable until the registration ends.
    unsafe { pull(bounce, pid, pieces, offset, bytes, to) }
}

/// Calls [`place`] under the conditions of [`store_from`]. Fails if `words` has too few bytes.
pub(crate) fn store_carried(
    words: &[u64],
    offset: usize,
    bytes: usize,
    to: u64,
) -> Result<(), Fault> {
    if offset + bytes > words.len() * 8 {
        return Err(Fault::Memory);
    }
    // SAFETY: as in `store_from`.
    unsafe { place(words, offset, bytes, to) };
    Ok(())
}

/// Calls [`push`] under the conditions of [`store_from`].
pub(crate) fn answer_read(
    pid: u32,
    from: u64,
    bytes: usize,
    pieces: &[Piece],
    offset: u64,
) -> Result<(), Fault> {
    // SAFETY: registered for reading, as in `store_from`.
    unsafe { push(pid, from, bytes, pieces, offset) }
}

/// Copies registered memory into `into`, for a work request that carries the bytes itself. The
/// caller has just checked the memory's key.
pub(crate) fn take_registered(from: u64, into: &mut [u8]) {
    // SAFETY: the memory is registered, so it is mapped. Ending the registration meanwhile is an
    // error of the program, as with a NIC. The two ranges do not overlap: `into` is on this
    // library's stack.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, into.as_mut_ptr(), into.len()) };
}

/// Returns the parts of `pieces` that hold the `bytes` bytes from byte `offset` on, and the number
/// of these parts. The rest of the array is empty.
fn window(
    pieces: &[Piece],
    mut offset: u64,
    bytes: usize,
) -> ([libc::iovec; super::shm::MAX_SGES], usize) {
    let mut all = [libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    }; super::shm::MAX_SGES];
    let mut count = 0;
    let mut left = bytes as u64;
    for &(addr, len) in pieces.iter().take(all.len()) {
        if offset >= len {
            offset -= len;
            continue;
        }
        let here = (len - offset).min(left);
        if here > 0 {
            all[count] = libc::iovec {
                iov_base: (addr + offset) as *mut libc::c_void,
                iov_len: here as usize,
            };
            count += 1;
        }
        (left, offset) = (left - here, 0);
    }
    (all, count)
}

fn whole(moved: isize, bytes: usize) -> Result<(), Fault> {
    if moved == bytes as isize {
        return Ok(());
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ESRCH) if moved < 0 => Err(Fault::Gone),
        Some(libc::EPERM) if moved < 0 => Err(Fault::Forbidden),
        _ => Err(Fault::Memory),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_land_whole_at_any_alignment_and_touch_nothing_else() {
        let words: Vec<u64> = (1..60u64)
            .map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15))
            .collect();
        let expected: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        for (shift, offset) in (0..9).flat_map(|shift| [0, 3, 8].map(|offset| (shift, offset))) {
            for asked in [0, 1, 7, 8, 9, 127, 128, 300, 900] {
                let mut to = vec![0xaau8; 1000];
                // SAFETY: the target has room.
                unsafe { place(&words, offset, asked, to.as_mut_ptr() as u64 + shift) };
                let shift = shift as usize;
                let bytes = asked.min(expected.len() - offset);
                assert_eq!(&to[shift..shift + bytes], &expected[offset..offset + bytes]);
                assert!(
                    to[..shift]
                        .iter()
                        .chain(&to[shift + bytes..])
                        .all(|b| *b == 0xaa)
                );
            }
        }
    }

    #[test]
    fn reading_another_process_takes_the_pieces_from_an_offset_on() {
        let from: Vec<u8> = (0..1000u32).map(|n| (n * 7 + 1) as u8).collect();
        let pieces = [
            (from.as_ptr() as u64, 100),
            (from.as_ptr() as u64 + 500, 400),
        ];
        let expected: Vec<u8> = from[50..100]
            .iter()
            .chain(&from[500..900])
            .copied()
            .collect();
        for bytes in [1, 49, 50, 51, 450] {
            let mut to = vec![0xaau8; 450];
            let target = to.as_mut_ptr() as u64;
            // SAFETY: the target has room.
            unsafe {
                pull(
                    &mut Bounce::default(),
                    std::process::id(),
                    &pieces,
                    50,
                    bytes,
                    target,
                )
            }
            .unwrap();
            assert_eq!(&to[..bytes], &expected[..bytes]);
            assert!(to[bytes..].iter().all(|b| *b == 0xaa));
        }
    }

    #[test]
    fn reading_unmapped_memory_of_another_process_is_an_error() {
        let mut to = [0u64; 2];
        let target = to.as_mut_ptr() as u64;
        // SAFETY: the target has room; the source is refused by the kernel.
        let fault = unsafe {
            pull(
                &mut Bounce::default(),
                std::process::id(),
                &[(8, 16)],
                0,
                16,
                target,
            )
        };
        assert_eq!(fault, Err(Fault::Memory));
    }
}
