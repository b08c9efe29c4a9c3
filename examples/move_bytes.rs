//! Moves a mebibyte from one end of a connection to the other through the plugin's library file, as
//! NCCL's proxy thread does:
//!
//!     cargo build --workspace
//!     NCCL_IBVERBS_LIB=target/debug/softverbs-ibverbs \
//!       cargo run --example move_bytes -- target/debug/libnccl_net_spark.so
//!
//! Both ends are in this process. No call blocks. If a call succeeds but leaves the comm or request
//! NULL, that means "not yet, call again".

#![allow(unsafe_code)]

use nccl_net_spark::abi::types::{HANDLE_BYTES, NcclResult, NetV8, PTR_HOST};
use std::ffi::{CString, c_int, c_void};
use std::ptr::null_mut;

const BYTES: usize = 1 << 20;
const TAG: c_int = 7;

fn main() {
    let path = std::env::args()
        .nth(1)
        .expect("usage: move_bytes PATH_OF_THE_LIBRARY");
    let path = CString::new(path).expect("a path without NUL");
    // SAFETY: the name is a C string. The constructors that `dlopen` runs are the plugin's own.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!library.is_null(), "cannot load {path:?}");
    // SAFETY: the library stays open to the end, and the symbol is a table of this type.
    let net = unsafe {
        libc::dlsym(library, c"ncclNetPlugin_v8".as_ptr())
            .cast::<NetV8>()
            .as_ref()
    };
    let net = net.expect("the library has no ncclNetPlugin_v8");
    // SAFETY: pointers below are to live variables of the types that the table's functions declare.
    // Each comm, registration and request is used only between the call that returned it and the
    // call that ends it.
    unsafe { move_bytes(net) }
}

/// # Safety
/// `net` is the table of the plugin's library.
unsafe fn move_bytes(net: &NetV8) {
    let mut handle = [0_u8; HANDLE_BYTES];
    let [mut listener, mut sender, mut receiver] = [null_mut::<c_void>(); 3];
    let mut from = vec![0_u8; BYTES];
    let mut to = vec![0_u8; BYTES];
    from.iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = (at % 251) as u8);
    // SAFETY: as in `main`.
    unsafe {
        check("init", net.init.unwrap()(None));
        check(
            "listen",
            net.listen.unwrap()(0, handle.as_mut_ptr().cast(), &mut listener),
        );
        // `connect` and `accept` take turns, because each needs the other's progress.
        while sender.is_null() || receiver.is_null() {
            if sender.is_null() {
                check(
                    "connect",
                    net.connect.unwrap()(
                        0,
                        handle.as_mut_ptr().cast(),
                        &mut sender,
                        &mut null_mut(),
                    ),
                );
            }
            if receiver.is_null() {
                check(
                    "accept",
                    net.accept.unwrap()(listener, &mut receiver, &mut null_mut()),
                );
            }
        }
        let mut out = null_mut();
        let mut into = null_mut();
        check(
            "regMr",
            net.reg_mr.unwrap()(sender, from.as_mut_ptr().cast(), BYTES, PTR_HOST, &mut out),
        );
        check(
            "regMr",
            net.reg_mr.unwrap()(receiver, to.as_mut_ptr().cast(), BYTES, PTR_HOST, &mut into),
        );

        let mut data = to.as_mut_ptr().cast::<c_void>();
        let mut size = BYTES as c_int;
        let mut tag = TAG;
        let [mut received, mut sent] = [null_mut::<c_void>(); 2];
        while received.is_null() {
            check(
                "irecv",
                net.irecv.unwrap()(
                    receiver,
                    1,
                    &mut data,
                    &mut size,
                    &mut tag,
                    &mut into,
                    &mut received,
                ),
            );
        }
        // `isend` returns no request before the receiver's clear-to-send has arrived.
        while sent.is_null() {
            check(
                "isend",
                net.isend.unwrap()(sender, from.as_mut_ptr().cast(), size, TAG, out, &mut sent),
            );
        }
        let mut is_sent = 0;
        let mut is_received = 0;
        let mut arrived = 0;
        while is_sent == 0 || is_received == 0 {
            if is_sent == 0 {
                check("test", net.test.unwrap()(sent, &mut is_sent, null_mut()));
            }
            if is_received == 0 {
                check(
                    "test",
                    net.test.unwrap()(received, &mut is_received, &mut arrived),
                );
            }
        }
        assert!(
            arrived as usize == BYTES && from == to,
            "{arrived} bytes arrived, or wrong ones"
        );
        println!("{arrived} bytes arrived, all correct");

        check("deregMr", net.dereg_mr.unwrap()(sender, out));
        check("deregMr", net.dereg_mr.unwrap()(receiver, into));
        check("closeSend", net.close_send.unwrap()(sender));
        check("closeRecv", net.close_recv.unwrap()(receiver));
        check("closeListen", net.close_listen.unwrap()(listener));
    }
}

fn check(call: &str, result: NcclResult) {
    assert!(
        result == NcclResult::SUCCESS,
        "{call} failed; NCCL_DEBUG=INFO says why: {result}"
    );
}
