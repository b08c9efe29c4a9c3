//! Access to the buffers of the caller, NCCL: socket calls, and stores in the order that NCCL's
//! protocols LL and LL128 need.
#![allow(unsafe_code)]

use proto::wire::stream::LINE_BYTES;
use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;
use verbs::{HostMemory, order_loads, order_stores};

/// Sends `head`, then `body`, as far as a socket accepts without blocking. Returns how many bytes
/// of both together the socket has accepted.
///
/// # Errors
/// The errors of `sendmsg(2)`; `WouldBlock` if the socket accepts nothing now.
pub fn send(socket: &TcpStream, head: &[u8], body: HostMemory) -> Result<usize> {
    // NCCL has read a flag that announces these bytes. The kernel must load the bytes after that
    // read of the flag.
    order_loads();
    let mut parts = [
        libc::iovec {
            iov_base: head.as_ptr().cast_mut().cast(),
            iov_len: head.len(),
        },
        libc::iovec {
            iov_base: body.addr() as *mut libc::c_void,
            iov_len: body.len(),
        },
    ];
    let message = message(&mut parts);
    // SAFETY: the header and both parts outlive the call. The kernel reads `head`, a slice, and
    // `body`, which stays mapped (`HostMemory::from_caller`), and returns EFAULT for unmapped
    // memory.
    let count = unsafe {
        libc::sendmsg(
            socket.as_raw_fd(),
            &message,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        )
    };
    usize::try_from(count).map_err(|_| Error::last_os_error())
}

/// Receives available bytes, first into `body`, then into `tail`. Returns the number of bytes
/// received; 0 at the end of the stream.
///
/// # Errors
/// The errors of `recvmsg(2)`; `WouldBlock` if nothing is available.
pub fn receive(socket: &TcpStream, body: HostMemory, tail: &mut [u8]) -> Result<usize> {
    let mut parts = [
        libc::iovec {
            iov_base: body.addr() as *mut libc::c_void,
            iov_len: body.len(),
        },
        libc::iovec {
            iov_base: tail.as_mut_ptr().cast(),
            iov_len: tail.len(),
        },
    ];
    let mut message = message(&mut parts);
    // SAFETY: as in `send`. The kernel writes `tail` and `body`. Only this function's caller
    // accesses `tail`. No code in this process relies on the content of `body` while a peer may
    // write it (`HostMemory::from_caller`).
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
    usize::try_from(count).map_err(|_| Error::last_os_error())
}

fn message(parts: &mut [libc::iovec; 2]) -> libc::msghdr {
    // SAFETY: an all-zero `msghdr` is valid: without name, parts, control data and flags.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    message
}

/// Stores as many bytes as `to` has room for, in any order. Only for memory that nothing reads
/// before `test` reports the receive as done.
pub fn store(to: HostMemory, bytes: &[u8]) {
    let count = to.len().min(bytes.len());
    // SAFETY: the memory is mapped, and no code in this process relies on its content
    // (`HostMemory::from_caller`). `bytes` is a slice of the plugin, which NCCL's memory does not
    // overlap, and `count` is within both.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.addr() as *mut u8, count) };
}

/// Stores as many bytes as `to` has room for, while a GPU may poll this memory. Stores aligned
/// 8-byte words atomically. In each line of [`LINE_BYTES`], stores the last word after the other
/// words, as LL128 requires.
pub fn store_in_lines(to: HostMemory, bytes: &[u8]) {
    let bytes = &bytes[..to.len().min(bytes.len())];
    let start = to.addr();
    // LL and LL128 read only aligned words, so bytes in unaligned memory need no order.
    let whole = if start.is_multiple_of(8) {
        bytes.len() / 8
    } else {
        0
    };
    let (words, _) = bytes.as_chunks::<8>();
    for (at, word) in words.iter().take(whole).enumerate() {
        let address = start + at * 8;
        if (address as u64 + 8).is_multiple_of(LINE_BYTES) {
            order_stores();
        }
        // SAFETY: the word lies within `to`, which is mapped and writable
        // (`HostMemory::from_caller`), and is aligned. A GPU may read it at the same time, so the
        // store is atomic.
        unsafe { AtomicU64::from_ptr(address as *mut u64) }
            .store(u64::from_ne_bytes(*word), Ordering::Relaxed);
    }
    order_stores();
    for (at, byte) in bytes.iter().enumerate().skip(whole * 8) {
        // SAFETY: as above; a byte is always aligned.
        unsafe { AtomicU8::from_ptr((start + at) as *mut u8) }.store(*byte, Ordering::Relaxed);
    }
}

/// Returns the time since the peer's last acknowledgement. `None` if the peer has acknowledged all
/// bytes and answered all of the kernel's probes, or if the system does not report the time.
pub fn unacknowledged(socket: &TcpStream) -> Option<Duration> {
    // SAFETY: a `tcp_info` contains only numbers; all zero is a valid value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    let place = std::ptr::from_mut(&mut info).cast();
    // SAFETY: `place` has `length` bytes, and the kernel writes at most that many.
    let status = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            place,
            &mut length,
        )
    };
    let is_outstanding = status == 0 && (info.tcpi_unacked > 0 || info.tcpi_probes > 0);
    is_outstanding.then(|| Duration::from_millis(u64::from(info.tcpi_last_ack_recv)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::tcp_pair::tcp_pair;
    use std::io::{ErrorKind, Read, Write};

    fn memory(bytes: &mut [u8]) -> HostMemory {
        // SAFETY: the tests keep their bytes, and read them only when nothing writes them.
        unsafe { HostMemory::from_caller(bytes.as_mut_ptr() as usize, bytes.len()) }
    }

    #[test]
    fn head_and_body_are_sent_together_and_received_separately() {
        let [mut one, mut other] = tcp_pair();
        let mut body = *b"body";
        assert_eq!(send(&one, b"head", memory(&mut body)).unwrap(), 8);
        let mut all = [0; 8];
        other.read_exact(&mut all).unwrap();
        assert_eq!(&all, b"headbody");
        one.write_all(b"0123456789").unwrap();
        while other.peek(&mut [0; 16]).unwrap() < 10 {}
        let mut first = [0; 6];
        let mut rest = [0; 8];
        assert_eq!(receive(&other, memory(&mut first), &mut rest).unwrap(), 10);
        assert_eq!((&first, &rest), (b"012345", b"6789\0\0\0\0"));
        let would_block =
            |result: Result<usize>| result.unwrap_err().kind() == ErrorKind::WouldBlock;
        assert!(would_block(receive(&other, memory(&mut first), &mut rest)));
        drop(one);
        assert_eq!(receive(&other, memory(&mut first), &mut rest).unwrap(), 0);
    }

    #[test]
    fn unmapped_memory_is_an_error_and_no_crash() {
        let [mut one, other] = tcp_pair();
        // SAFETY: no part of a program is mapped there, so the kernel refuses the addresses.
        let page = unsafe { HostMemory::from_caller(0x1000, 0x1000) };
        assert_eq!(
            send(&one, b"", page).unwrap_err().raw_os_error(),
            Some(libc::EFAULT)
        );
        one.write_all(b"x").unwrap();
        while other.peek(&mut [0; 1]).unwrap() < 1 {}
        assert_eq!(
            receive(&other, page, &mut []).unwrap_err().raw_os_error(),
            Some(libc::EFAULT)
        );
    }

    #[test]
    fn all_bytes_are_stored_at_any_address() {
        let bytes: Vec<u8> = (0..600).map(|at| (at * 7 + at / 256) as u8).collect();
        let mut place = vec![0_u64; 100];
        let start = place.as_mut_ptr() as usize;
        for (offset, count) in [
            (0, 600),
            (0, 0),
            (0, 7),
            (8, 128),
            (3, 300),
            (120, 9),
            (16, 255),
        ] {
            place.fill(u64::from_ne_bytes([0xee; 8]));
            // SAFETY: within `place`, which is read only afterwards.
            let to = unsafe { HostMemory::from_caller(start + offset, count) };
            store_in_lines(to, &bytes);
            let stored: Vec<u8> = place.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(
                stored[offset..offset + count],
                bytes[..count],
                "{count} bytes at {offset}"
            );
            assert!(
                stored[..offset]
                    .iter()
                    .chain(&stored[offset + count..])
                    .all(|byte| *byte == 0xee)
            );
            store(to, &[0xee; 600]);
            assert!(
                place
                    .iter()
                    .all(|word| *word == u64::from_ne_bytes([0xee; 8]))
            );
        }
    }

    #[test]
    fn unacknowledged_is_some_only_while_bytes_are_in_flight() {
        let [mut one, _other] = tcp_pair();
        assert_eq!(unacknowledged(&one), None);
        one.write_all(b"x").unwrap();
        while unacknowledged(&one).is_some() {}
    }
}
