//! Tests TCP streams over the C interface. The test starts a process of its own, which loads two
//! copies of the library. Each copy acts as a host. The hosts' rails do not reach each other.

use crate::bed::{FAR, NEAR};
use crate::common::{self, fill, is_filled, until};
use nccl_abi::NcclResult;
use nccl_abi::net::{
    CommConfig, HANDLE_BYTES, NetV11, OPTIONAL_RECV_COMPLETION, PTR_CUDA, PTR_HOST, UNDEFINED,
};
use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::process::Command;
use std::ptr;

const IN_CHILD: &str = "SPARK_TEST_TWO_COPIES";

#[test]
fn bytes_move_over_the_c_interface() {
    if std::env::var_os(IN_CHILD).is_none() {
        run_in_child("abi::bytes_move_over_the_c_interface");
        return;
    }
    let copies = tempfile::tempdir().unwrap();
    let [a, b] = [NEAR, FAR].map(|device| {
        let copy = copies.path().join(format!("{device}.so"));
        std::fs::copy(common::plugin_library(), &copy).unwrap();
        Library::load(&copy, device)
    });
    let (send, recv) = a.connect(&b);
    let connection = Connection { a, b, send, recv };
    for bytes in [0, 1, 4096, 1_000_000] {
        connection.check_transfer(bytes);
    }
    connection.check_refusals();
    let Connection { a, b, send, recv } = connection;
    a.close(send, true);
    b.close(recv, false);
}

/// Runs a test of this program in a process of its own. `Library::load` changes the environment,
/// and each copy of the library reads it. No other thread may read it meanwhile.
fn run_in_child(test: &str) {
    let (_, settings) = common::test_rails();
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .envs(settings)
        .envs([
            (IN_CHILD, "1"),
            ("NCCL_SPARK_RING_TCP", "1"),
            ("NCCL_SOCKET_IFNAME", "lo"),
        ])
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{stdout}\n{stderr}"
    );
}

/// A connection on which the library `a` sends and the library `b` receives.
struct Connection {
    a: Library,
    b: Library,
    send: Raw,
    recv: Raw,
}

impl Connection {
    /// Moves a message twice: to a receive that NCCL waits for, and to an optional one.
    fn check_transfer(&self, bytes: usize) {
        let Self { a, b, send, recv } = self;
        let mut from = vec![0_u8; bytes + 1];
        let mut to = vec![0xee_u8; bytes + 1];
        fill(&mut from[..bytes], bytes as u64);
        let out = a.register(*send, &mut from, PTR_HOST).unwrap();
        let into = b.register(*recv, &mut to, PTR_HOST).unwrap();
        let receive = until(|| b.irecv(*recv, &mut to, bytes, into, false));
        let request = until(|| a.isend(*send, &mut from, bytes, out));
        self.wait(request, receive, bytes);
        assert!(is_filled(&to[..bytes], bytes as u64) && to[bytes] == 0xee);
        // Even an optional receive is done only when its bytes have arrived. If it were done
        // earlier, no later call would read the sockets.
        let optional = until(|| b.irecv(*recv, &mut to, bytes, into, true));
        assert_eq!(b.test(optional), None);
        let request = until(|| a.isend(*send, &mut from, bytes, out));
        self.wait(request, optional, bytes);
        a.deregister(*send, out);
        b.deregister(*recv, into);
    }

    /// Waits until a send and its receive are done, and checks that both report `bytes`.
    fn wait(&self, request: Raw, receive: Raw, bytes: usize) {
        let mut sent = None;
        let mut received = None;
        until(|| {
            sent = sent.or_else(|| self.a.test(request));
            received = received.or_else(|| self.b.test(receive));
            sent.and(received)
        });
        assert_eq!(sent, Some(bytes as c_int));
        assert_eq!(received, Some(bytes as c_int));
    }

    fn check_refusals(&self) {
        let Self { a, b, send, recv } = self;
        let mut memory = vec![0_u8; 8];
        assert_eq!(
            a.register(*send, &mut memory, PTR_CUDA),
            Err(NcclResult::INVALID_USAGE),
            "GPU memory"
        );
        let into = b.register(*recv, &mut memory, PTR_HOST).unwrap();
        assert_eq!(
            a.isend_result(*recv, &mut memory, into),
            NcclResult::INVALID_ARGUMENT,
            "isend on a receive comm"
        );
        assert_eq!(b.flush(*recv), NcclResult::SUCCESS);
        b.deregister(*recv, into);
    }
}

struct Library {
    table: &'static NetV11,
    context: *mut c_void,
}

type Raw = *mut c_void;

impl Library {
    fn load(path: &Path, device: &str) -> Self {
        let path = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: beside the test's thread, this process has one thread, which waits for the test.
        // So no other thread reads the environment.
        unsafe { std::env::set_var("NCCL_IB_HCA", device) };
        // SAFETY: the library that cargo built, loaded as NCCL loads it, and never unloaded; the
        // symbol is a table of this version.
        let table = unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!library.is_null());
            libc::dlsym(library, c"ncclNetPlugin_v11".as_ptr())
                .cast::<NetV11>()
                .as_ref()
                .unwrap()
        };
        let mut context = ptr::null_mut();
        let config = CommConfig {
            traffic_class: UNDEFINED,
        };
        // SAFETY: here and below all arguments live for the length of the call, and a comm until it
        // is closed.
        let result = unsafe { table.init.unwrap()(&mut context, 1, &config, None, None) };
        assert_eq!(result, NcclResult::SUCCESS);
        Self { table, context }
    }

    fn connect(&self, to: &Self) -> (Raw, Raw) {
        let mut handle = [0_u8; HANDLE_BYTES];
        let [mut listener, mut send, mut recv]: [Raw; 3] = [ptr::null_mut(); 3];
        // SAFETY: as in `load`.
        unsafe {
            let result =
                to.table.listen.unwrap()(to.context, 0, handle.as_mut_ptr().cast(), &mut listener);
            assert_eq!(result, NcclResult::SUCCESS);
        }
        until(|| {
            // SAFETY: as in `load`.
            unsafe {
                if send.is_null() {
                    let connect = self.table.connect.unwrap();
                    let result = connect(
                        self.context,
                        0,
                        handle.as_mut_ptr().cast(),
                        &mut send,
                        ptr::null_mut(),
                    );
                    assert_eq!(result, NcclResult::SUCCESS);
                }
                if recv.is_null() {
                    let accept = to.table.accept.unwrap();
                    let result = accept(listener, &mut recv, ptr::null_mut());
                    assert_eq!(result, NcclResult::SUCCESS);
                }
            }
            (!send.is_null() && !recv.is_null()).then_some(())
        });
        // SAFETY: as in `load`.
        let result = unsafe { to.table.close_listen.unwrap()(listener) };
        assert_eq!(result, NcclResult::SUCCESS);
        (send, recv)
    }

    fn register(&self, comm: Raw, memory: &mut [u8], kind: c_int) -> Result<Raw, NcclResult> {
        let mut handle = ptr::null_mut();
        let start = memory.as_mut_ptr().cast();
        let length = memory.len();
        // SAFETY: as in `load`.
        match unsafe { self.table.reg_mr.unwrap()(comm, start, length, kind, &mut handle) } {
            NcclResult::SUCCESS => Ok(handle),
            other => Err(other),
        }
    }

    fn deregister(&self, comm: Raw, handle: Raw) {
        // SAFETY: as in `load`.
        let result = unsafe { self.table.dereg_mr.unwrap()(comm, handle) };
        assert_eq!(result, NcclResult::SUCCESS);
    }

    fn isend(&self, comm: Raw, from: &mut [u8], bytes: usize, memory: Raw) -> Option<Raw> {
        let mut request = ptr::null_mut();
        let isend = self.table.isend.unwrap();
        // SAFETY: as in `load`; the caller keeps the bytes until the request is done.
        let result = unsafe {
            isend(
                comm,
                from.as_mut_ptr().cast(),
                bytes,
                3,
                memory,
                ptr::null_mut(),
                &mut request,
            )
        };
        assert_eq!(result, NcclResult::SUCCESS);
        (!request.is_null()).then_some(request)
    }

    fn isend_result(&self, comm: Raw, from: &mut [u8], memory: Raw) -> NcclResult {
        let mut request = ptr::null_mut();
        // SAFETY: as in `load`.
        unsafe {
            self.table.isend.unwrap()(
                comm,
                from.as_mut_ptr().cast(),
                1,
                3,
                memory,
                ptr::null_mut(),
                &mut request,
            )
        }
    }

    fn irecv(
        &self,
        comm: Raw,
        to: &mut [u8],
        mut bytes: usize,
        mut memory: Raw,
        optional: bool,
    ) -> Option<Raw> {
        let mut request: Raw = if optional {
            ptr::without_provenance_mut(OPTIONAL_RECV_COMPLETION)
        } else {
            ptr::null_mut()
        };
        let mut data = to.as_mut_ptr().cast();
        let mut tag = 3;
        let irecv = self.table.irecv.unwrap();
        // SAFETY: as in `isend`.
        let result = unsafe {
            irecv(
                comm,
                1,
                &mut data,
                &mut bytes,
                &mut tag,
                &mut memory,
                ptr::null_mut(),
                &mut request,
            )
        };
        assert_eq!(result, NcclResult::SUCCESS);
        (!request.is_null()).then_some(request)
    }

    fn test(&self, request: Raw) -> Option<c_int> {
        let mut done = 0;
        let mut size = -1;
        // SAFETY: as in `load`.
        let result = unsafe { self.table.test.unwrap()(request, &mut done, &mut size) };
        assert_eq!(result, NcclResult::SUCCESS);
        (done == 1).then_some(size)
    }

    fn flush(&self, comm: Raw) -> NcclResult {
        let mut request = ptr::null_mut();
        // SAFETY: as in `load`; the arrays are not read.
        unsafe {
            let data = ptr::null_mut();
            let sizes = ptr::null_mut();
            let memory = ptr::null_mut();
            self.table.iflush.unwrap()(comm, 1, data, sizes, memory, &mut request)
        }
    }

    fn close(&self, comm: Raw, sends: bool) {
        let close = if sends {
            self.table.close_send
        } else {
            self.table.close_recv
        };
        // SAFETY: as in `load`; the comm is not used again.
        assert_eq!(unsafe { close.unwrap()(comm) }, NcclResult::SUCCESS);
    }
}
