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

use nccl_abi::NcclResult;
use nccl_abi::net::{HANDLE_BYTES, NetV8, PTR_HOST};
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
    unsafe {
        check("init", net.init.unwrap()(None));
        let comms = connect(net);
        move_bytes(net, &comms);
        close(net, comms);
    }
}

/// Both ends of a connection, and the listener that the receiver came from.
struct Comms {
    listener: *mut c_void,
    sender: *mut c_void,
    receiver: *mut c_void,
}

/// Connects the first device with itself.
///
/// # Safety
/// `net` is the table of the plugin's library, after `init`.
unsafe fn connect(net: &NetV8) -> Comms {
    let mut handle = [0_u8; HANDLE_BYTES];
    let [mut listener, mut sender, mut receiver] = [null_mut::<c_void>(); 3];
    // SAFETY: as in `main`.
    unsafe {
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
    }
    Comms {
        listener,
        sender,
        receiver,
    }
}

/// Registers a buffer at each end, and moves the bytes of one into the other.
///
/// # Safety
/// `net` is the table of the plugin's library, and has returned `comms`.
unsafe fn move_bytes(net: &NetV8, comms: &Comms) {
    let mut from: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
    let mut to = vec![0_u8; BYTES];
    let source: *mut c_void = from.as_mut_ptr().cast();
    let target: *mut c_void = to.as_mut_ptr().cast();
    let mut out = null_mut();
    let mut into = null_mut();
    // SAFETY: as in `main`.
    unsafe {
        check(
            "regMr",
            net.reg_mr.unwrap()(comms.sender, source, BYTES, PTR_HOST, &mut out),
        );
        check(
            "regMr",
            net.reg_mr.unwrap()(comms.receiver, target, BYTES, PTR_HOST, &mut into),
        );
        let received = post_receive(net, comms.receiver, target, into);
        let sent = post_send(net, comms.sender, source, out);
        let arrived = wait(net, sent, received);
        assert!(
            arrived as usize == BYTES && from == to,
            "{arrived} bytes arrived, or wrong ones"
        );
        println!("{arrived} bytes arrived, all correct");
        check("deregMr", net.dereg_mr.unwrap()(comms.sender, out));
        check("deregMr", net.dereg_mr.unwrap()(comms.receiver, into));
    }
}

/// Posts a receive of [`BYTES`], and returns its request.
///
/// # Safety
/// `receiver` is open, and has registered `data` as `registration`.
unsafe fn post_receive(
    net: &NetV8,
    receiver: *mut c_void,
    mut data: *mut c_void,
    mut registration: *mut c_void,
) -> *mut c_void {
    let mut size = BYTES as c_int;
    let mut tag = TAG;
    let mut request = null_mut::<c_void>();
    while request.is_null() {
        // SAFETY: as in `main`.
        let result = unsafe {
            net.irecv.unwrap()(
                receiver,
                1,
                &mut data,
                &mut size,
                &mut tag,
                &mut registration,
                &mut request,
            )
        };
        check("irecv", result);
    }
    request
}

/// Posts a send of [`BYTES`], and returns its request. `isend` returns no request before the
/// receiver's clear-to-send has arrived.
///
/// # Safety
/// `sender` is open, and has registered `data` as `registration`.
unsafe fn post_send(
    net: &NetV8,
    sender: *mut c_void,
    data: *mut c_void,
    registration: *mut c_void,
) -> *mut c_void {
    let size = BYTES as c_int;
    let mut request = null_mut::<c_void>();
    while request.is_null() {
        // SAFETY: as in `main`.
        let result =
            unsafe { net.isend.unwrap()(sender, data, size, TAG, registration, &mut request) };
        check("isend", result);
    }
    request
}

/// Waits for both requests. Returns the number of bytes that have arrived.
///
/// # Safety
/// Neither request was tested before.
unsafe fn wait(net: &NetV8, sent: *mut c_void, received: *mut c_void) -> c_int {
    let mut is_sent = 0;
    let mut is_received = 0;
    let mut arrived = 0;
    while is_sent == 0 || is_received == 0 {
        // SAFETY: as in `main`. A request that is done is not tested again.
        unsafe {
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
    }
    arrived
}

/// # Safety
/// `net` is the table of the plugin's library, and has returned `comms`. Their registrations have
/// ended.
unsafe fn close(net: &NetV8, comms: Comms) {
    // SAFETY: as in `main`.
    unsafe {
        check("closeSend", net.close_send.unwrap()(comms.sender));
        check("closeRecv", net.close_recv.unwrap()(comms.receiver));
        check("closeListen", net.close_listen.unwrap()(comms.listener));
    }
}

fn check(call: &str, result: NcclResult) {
    assert!(
        result == NcclResult::SUCCESS,
        "{call} failed; NCCL_DEBUG=INFO says why: {result}"
    );
}
