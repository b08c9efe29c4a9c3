//! Argument checks and conversions of data-path calls, for comms over rails and over TCP streams.

use super::handles;
use crate::comm::RecvPart;
use host::error::{Argument, Error, Quick};
use nccl_abi::net::MAX_RECVS;
use std::ffi::{c_int, c_void};

/// A length argument: `int` in v8, `size_t` since v9.
pub(super) trait Length: Copy {
    fn bytes(self) -> Quick<usize>;
}

impl Length for usize {
    #[inline(always)]
    fn bytes(self) -> Quick<usize> {
        Ok(self)
    }
}

impl Length for c_int {
    #[inline(always)]
    fn bytes(self) -> Quick<usize> {
        usize::try_from(self).map_err(|_| negative(self))
    }
}

#[inline(always)]
pub(super) fn check_data(data: *mut c_void, bytes: usize) -> Quick<()> {
    if data.is_null() && bytes > 0 {
        Err(no_data(bytes))
    } else {
        Ok(())
    }
}

#[cold]
#[inline(never)]
fn no_data(bytes: usize) -> Box<Error> {
    Box::new(Argument::NullData(bytes).into())
}

#[cold]
#[inline(never)]
fn negative(size: c_int) -> Box<Error> {
    Box::new(Argument::NegativeSize(size).into())
}

/// Parts of a grouped receive, as NCCL passes them: each array has `n` elements.
pub(super) struct Parts<L> {
    pub n: c_int,
    pub data: *mut *mut c_void,
    pub sizes: *mut L,
    pub tags: *mut c_int,
    pub mhandles: *mut *mut c_void,
}

/// # Safety
/// `count` is 1 to [`MAX_RECVS`]. The arrays are NULL or have `count` elements. Each mhandle is
/// NULL or registered with the comm.
#[inline(never)]
pub(super) unsafe fn irecv_group<L: Length>(
    parts: Parts<L>,
    count: usize,
    irecv: impl FnOnce(&[RecvPart<'_>]) -> Quick<Option<u16>>,
) -> Quick<Option<u16>> {
    // SAFETY: the caller guarantees that each array has `count` elements.
    let (data, sizes, tags, mhandles) = unsafe { parts.first(count) }?;
    // A fixed array, so that nothing is allocated. Its unused entries repeat the last part, and the
    // slice below leaves them out.
    let at = |i: usize| {
        let i = i.min(count - 1);
        // SAFETY: guaranteed by the caller.
        unsafe { part(data[i], sizes[i], tags[i], mhandles[i]) }
    };
    let group = [
        at(0)?,
        at(1)?,
        at(2)?,
        at(3)?,
        at(4)?,
        at(5)?,
        at(6)?,
        at(7)?,
    ];
    irecv(&group[..count])
}

/// # Safety
/// `mhandle` is NULL or was registered with the comm and is not deregistered during `'a`.
#[inline(always)]
pub(super) unsafe fn part<'a, L: Length>(
    data: *mut c_void,
    size: L,
    tag: c_int,
    mhandle: *mut c_void,
) -> Quick<RecvPart<'a>> {
    let bytes = size.bytes()?;
    check_data(data, bytes)?;
    // SAFETY: guaranteed by the caller.
    let memory = unsafe { handles::memory(mhandle, "mhandle") }?;
    Ok(RecvPart {
        addr: data.addr() as u64,
        bytes,
        tag,
        memory,
    })
}

type Arrays<'a, L> = (&'a [*mut c_void], &'a [L], &'a [c_int], &'a [*mut c_void]);

impl<L> Parts<L> {
    /// # Safety
    /// The arrays are NULL or have `count` elements that are not written during `'a`.
    #[inline(always)]
    pub(super) unsafe fn first<'a>(self, count: usize) -> Quick<Arrays<'a, L>> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            Ok((
                handles::array(self.data, count, "data")?,
                handles::array(self.sizes, count, "sizes")?,
                handles::array(self.tags, count, "tags")?,
                handles::array(self.mhandles, count, "mhandles")?,
            ))
        }
    }
}

#[inline(always)]
pub(super) fn count_of(n: c_int) -> Quick<usize> {
    match usize::try_from(n) {
        Ok(count @ 1..=MAX_RECVS) => Ok(count),
        _ => Err(not_a_group(n)),
    }
}

#[cold]
#[inline(never)]
fn not_a_group(n: c_int) -> Box<Error> {
    Box::new(
        Argument::Buffers {
            count: n,
            most: MAX_RECVS,
        }
        .into(),
    )
}

/// Writes the size of one part of a finished request, if NCCL passed an array for sizes.
///
/// # Safety
/// `sizes` is NULL or writable. It has one element for a send, and one for each part of a receive.
#[inline(always)]
pub(super) unsafe fn write_size(sizes: *mut c_int, part: usize, bytes: u64) {
    if !sizes.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            sizes
                .add(part)
                .write(c_int::try_from(bytes).unwrap_or(c_int::MAX))
        };
    }
}
