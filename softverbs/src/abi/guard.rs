//! Wrappers for exported functions: no panic crosses into C, and each function reports an error in
//! its own form.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of a function that returns 0 or an `errno`.
pub(super) fn status(body: impl FnOnce() -> Result<(), i32>) -> c_int {
    match caught(body) {
        Ok(()) => 0,
        Err(errno) => errno,
    }
}

/// Runs the body of a function that returns 0, or -1 and sets `errno`.
pub(super) fn zero_or_minus_one(body: impl FnOnce() -> Result<(), i32>) -> c_int {
    match caught(body) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Runs the body of a function that returns a pointer, or NULL and sets `errno`.
pub(super) fn pointer<T>(body: impl FnOnce() -> Result<*mut T, i32>) -> *mut T {
    caught(body).unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

/// Turns a panic into `EIO`. A panic leaves no struct of C half-written, because nothing can panic
/// between the writes to one struct. The core's state is behind locks, which can still be taken
/// after a panic (`fabric::lock`).
pub(super) fn caught<T>(body: impl FnOnce() -> Result<T, i32>) -> Result<T, i32> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(libc::EIO))
}

pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
}

fn set_errno(value: i32) {
    // SAFETY: the calling thread's own word, which lives as long as the thread.
    unsafe { *libc::__errno_location() = value };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_function_reports_errors_its_own_way() {
        assert_eq!(status(|| Err(libc::EBUSY)), libc::EBUSY);
        assert_eq!(status(|| Ok(())), 0);
        assert_eq!(zero_or_minus_one(|| Err(libc::EAGAIN)), -1);
        assert_eq!(errno(), libc::EAGAIN);
        assert!(pointer::<u8>(|| Err(libc::ENOMEM)).is_null());
        assert_eq!(errno(), libc::ENOMEM);
    }

    #[test]
    fn a_panic_ends_at_the_boundary() {
        assert_eq!(status(|| panic!("on purpose")), libc::EIO);
        assert!(pointer::<u8>(|| panic!("on purpose")).is_null());
    }
}
