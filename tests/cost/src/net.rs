//! A plugin library with one connection from this process to itself. This module has the crate's
//! only `unsafe` code.
#![allow(unsafe_code)]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nccl_abi::net::functions::Close;
use nccl_abi::net::{CommConfig, HANDLE_BYTES, NetV11, PTR_HOST, UNDEFINED};
use nccl_abi::{DebugLogger, NcclResult};
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::hint::black_box;
use std::path::Path;
use std::ptr;
use std::time::{Duration, Instant};

const CONNECT_LIMIT: Duration = Duration::from_secs(60);

type Raw = *mut c_void;

pub struct Pair {
    /// Table of version 11 or 12. The functions used here are the same in both.
    table: *const NetV11,
    listener: Raw,
    send: Raw,
    recv: Raw,
    source: Memory,
    target: Memory,
    /// Unloaded last.
    _library: Library,
}

struct Memory {
    bytes: Vec<u8>,
    handle: Raw,
}

#[derive(Clone, Copy)]
pub struct Request(Raw);

/// Calls `call`. valgrind counts only while this function runs, in its thread (`--toggle-collect`).
#[unsafe(no_mangle)]
#[inline(never)]
fn cost_counted(call: &mut dyn FnMut()) {
    call();
    // Without this, the compiler could turn the call into a jump that never returns here.
    black_box(());
}

/// Ends a phase: when this function is entered, valgrind writes its counts to a file and resets
/// them (`--dump-before`).
#[unsafe(no_mangle)]
#[inline(never)]
pub fn cost_phase_ends() {
    black_box(());
}

fn counted<T>(counts: bool, mut call: impl FnMut() -> T) -> T {
    if !counts {
        return call();
    }
    let mut result = None;
    cost_counted(&mut || result = Some(call()));
    result.expect("the closure ran")
}

impl Pair {
    /// Connects a plugin's first device with itself, with `bytes` of memory at each end.
    pub fn connect(library: &Path, bytes: usize) -> Result<Self, String> {
        // SAFETY: loading runs the initialisers of a library that the user named as a plugin, as
        // NCCL would run them.
        let library = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|e| e.to_string())?;
        let table = [c"ncclNetPlugin_v11", c"ncclNetPlugin_v12"]
            .into_iter()
            .find_map(|name| {
                // SAFETY: only the symbol's address is taken. The symbol is a table of either
                // version.
                let symbol = unsafe { library.get::<*const NetV11>(name.to_bytes_with_nul()) };
                symbol.ok().map(|symbol| *symbol)
            });
        let table =
            table.ok_or("the library exports neither ncclNetPlugin_v11 nor ncclNetPlugin_v12")?;
        let memory = || Memory {
            bytes: vec![0; bytes],
            handle: ptr::null_mut(),
        };
        let source = memory();
        let target = memory();
        let null = ptr::null_mut();
        let mut pair = Self {
            table,
            listener: null,
            send: null,
            recv: null,
            source,
            target,
            _library: library,
        };
        pair.start()?;
        Ok(pair)
    }

    fn table(&self) -> &NetV11 {
        // SAFETY: `table` is inside the library, which `self` owns; a plugin's exported table is
        // complete.
        unsafe { &*self.table }
    }

    fn start(&mut self) -> Result<(), String> {
        let mut context = ptr::null_mut();
        let mut devices = 0;
        let config = CommConfig {
            traffic_class: UNDEFINED,
        };
        let init = has("init", self.table().init)?;
        let count = has("devices", self.table().devices)?;
        // SAFETY: here and below all arguments live for the length of the call, and a comm until it
        // is closed; the logger is a function of this program, and a profiler may be absent.
        check("init", unsafe {
            init(&mut context, 1, &config, Some(logger()), None)
        })?;
        // SAFETY: as above.
        check("devices", unsafe { count(&mut devices) })?;
        if devices < 1 {
            return Err("the plugin has no device".to_owned());
        }
        self.connect_ends(context)?;
        let register = has("regMr", self.table().reg_mr)?;
        for (comm, memory) in [(self.send, &mut self.source), (self.recv, &mut self.target)] {
            let start = memory.bytes.as_mut_ptr().cast();
            let length = memory.bytes.len();
            // SAFETY: as above; the memory stays where it is.
            check("regMr", unsafe {
                register(comm, start, length, PTR_HOST, &mut memory.handle)
            })?;
        }
        Ok(())
    }

    fn connect_ends(&mut self, context: Raw) -> Result<(), String> {
        let mut handle = [0u8; HANDLE_BYTES];
        let handle = handle.as_mut_ptr().cast();
        let listen = has("listen", self.table().listen)?;
        let connect = has("connect", self.table().connect)?;
        let accept = has("accept", self.table().accept)?;
        let mut listener = ptr::null_mut();
        // SAFETY: as in `start`; the handle has the length that the interface promises.
        check("listen", unsafe {
            listen(context, 0, handle, &mut listener)
        })?;
        self.listener = listener;
        let begun = Instant::now();
        while self.send.is_null() || self.recv.is_null() {
            if begun.elapsed() > CONNECT_LIMIT {
                return Err("no connection after a minute".to_owned());
            }
            let mut device = ptr::null_mut();
            if self.send.is_null() {
                // SAFETY: as in `start`.
                check("connect", unsafe {
                    connect(context, 0, handle, &mut self.send, &mut device)
                })?;
            }
            if self.recv.is_null() {
                // SAFETY: as in `start`.
                check("accept", unsafe {
                    accept(listener, &mut self.recv, &mut device)
                })?;
            }
        }
        Ok(())
    }

    pub fn source(&mut self) -> &mut [u8] {
        &mut self.source.bytes
    }

    /// True if every 64th byte and the last byte of `range` in the received data have this value.
    pub fn has_arrived(&self, range: std::ops::Range<usize>, value: u8) -> bool {
        let bytes = &self.target.bytes[range];
        // SAFETY: `byte` is one of the buffer's; another thread may store to it, so the read is
        // volatile.
        bytes
            .iter()
            .step_by(64)
            .chain(bytes.last())
            .all(|byte| unsafe { ptr::read_volatile(byte) } == value)
    }

    /// Posts a receive of `bytes` at `offset`. Returns `None` if the plugin refuses for now.
    pub fn irecv(
        &mut self,
        offset: usize,
        bytes: usize,
        counts: bool,
    ) -> Result<Option<Request>, String> {
        let call = has("irecv", self.table().irecv)?;
        let comm = self.recv;
        let mut handle = self.target.handle;
        let mut size = bytes;
        let mut tag = 0;
        let mut request = ptr::null_mut();
        let mut place: Raw = self.target.bytes[offset..offset + bytes]
            .as_mut_ptr()
            .cast();
        let result = counted(counts, || {
            // SAFETY: as in `start`; the bytes lie in registered memory, which lives longer than
            // the comm.
            unsafe {
                call(
                    comm,
                    1,
                    &mut place,
                    &mut size,
                    &mut tag,
                    &mut handle,
                    ptr::null_mut(),
                    &mut request,
                )
            }
        });
        check("irecv", result)?;
        Ok((!request.is_null()).then_some(Request(request)))
    }

    /// Sends `bytes` from `offset`. Returns `None` if the plugin refuses for now.
    pub fn isend(
        &mut self,
        offset: usize,
        bytes: usize,
        counts: bool,
    ) -> Result<Option<Request>, String> {
        let call = has("isend", self.table().isend)?;
        let comm = self.send;
        let handle = self.source.handle;
        let mut request = ptr::null_mut();
        let place = self.source.bytes[offset..offset + bytes]
            .as_mut_ptr()
            .cast();
        // SAFETY: as in `irecv`.
        let result = counted(counts, || unsafe {
            call(comm, place, bytes, 0, handle, ptr::null_mut(), &mut request)
        });
        check("isend", result)?;
        Ok((!request.is_null()).then_some(Request(request)))
    }

    /// Tests a request. A request that is done is invalid afterwards.
    pub fn test(&mut self, request: Request, counts: bool) -> Result<bool, String> {
        let call = has("test", self.table().test)?;
        let mut done = 0;
        let mut size = 0;
        // SAFETY: the request is under way, and has one part.
        let result = counted(counts, || unsafe { call(request.0, &mut done, &mut size) });
        check("test", result)?;
        Ok(done != 0)
    }

    pub fn close(self) -> Result<(), String> {
        let table = self.table();
        let deregister = has("deregMr", table.dereg_mr)?;
        let close = |name, function: Option<Close>, comm| {
            let function = has(name, function)?;
            // SAFETY: each comm is open, and not used again.
            check(name, unsafe { function(comm) })
        };
        // SAFETY: the comm and the registration are open, and the latter is not used again.
        let result = unsafe { deregister(self.send, self.source.handle) };
        check("deregMr", result)?;
        // SAFETY: as above.
        let result = unsafe { deregister(self.recv, self.target.handle) };
        check("deregMr", result)?;
        close("closeSend", table.close_send, self.send)?;
        close("closeRecv", table.close_recv, self.recv)?;
        close("closeListen", table.close_listen, self.listener)
    }
}

fn has<F>(name: &str, function: Option<F>) -> Result<F, String> {
    function.ok_or_else(|| format!("the plugin has no function {name}"))
}

fn check(name: &str, result: NcclResult) -> Result<(), String> {
    if result == NcclResult::SUCCESS {
        Ok(())
    } else {
        Err(format!("{name} returned {result}"))
    }
}

fn logger() -> DebugLogger {
    type Fixed = extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: on x86-64 and aarch64 a sixth argument that is a pointer travels in the same
    // register, variadic or not; `log` reads it only where the format has it.
    unsafe { std::mem::transmute::<Fixed, DebugLogger>(log) }
}

/// Prints warnings. The interface's logger takes any number of arguments, but plugins pass "%s" and
/// one string. Any other format is printed unexpanded.
extern "C" fn log(
    level: c_int,
    _: c_ulong,
    _: *const c_char,
    _: c_int,
    format: *const c_char,
    first: *const c_char,
) {
    const WARN: c_int = 2;
    if level != WARN || format.is_null() {
        return;
    }
    // SAFETY: a format is a C string.
    let format = unsafe { CStr::from_ptr(format) };
    if format == c"%s" && !first.is_null() {
        // SAFETY: the format says that the first argument is a C string.
        let text = unsafe { CStr::from_ptr(first) };
        eprintln!("cost: WARN {}", text.to_string_lossy());
    } else {
        eprintln!("cost: WARN {}", format.to_string_lossy());
    }
}
