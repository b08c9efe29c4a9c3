//! A plugin library, and one connection of it from this process to itself. The only file of this crate with `unsafe` in it.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::hint::black_box;
use std::path::Path;
use std::ptr;
use std::time::{Duration, Instant};

/// Bytes of what `listen` fills in.
const HANDLE_BYTES: usize = 128;
const PTR_HOST: c_int = 1;
/// No traffic class is asked for.
const UNDEFINED: c_int = -1;
const CONNECT_LIMIT: Duration = Duration::from_secs(60);

type Logger = extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
type Raw = *mut c_void;

/// What versions 11 and 12 of the interface have in common: their tables begin with the same functions.
#[repr(C)]
struct Table {
    name: *const c_char,
    init: extern "C" fn(*mut Raw, u64, *const c_int, Logger, Raw) -> c_int,
    devices: extern "C" fn(*mut c_int) -> c_int,
    get_properties: Raw,
    listen: extern "C" fn(Raw, c_int, *mut u8, *mut Raw) -> c_int,
    connect: extern "C" fn(Raw, c_int, *mut u8, *mut Raw, *mut Raw) -> c_int,
    accept: extern "C" fn(Raw, *mut Raw, *mut Raw) -> c_int,
    reg_mr: extern "C" fn(Raw, *mut u8, usize, c_int, *mut Raw) -> c_int,
    reg_mr_dma_buf: Raw,
    dereg_mr: extern "C" fn(Raw, Raw) -> c_int,
    isend: extern "C" fn(Raw, *mut u8, usize, c_int, Raw, Raw, *mut Raw) -> c_int,
    irecv: extern "C" fn(Raw, c_int, *mut Raw, *mut usize, *mut c_int, *mut Raw, Raw, *mut Raw) -> c_int,
    iflush: Raw,
    test: extern "C" fn(Raw, *mut c_int, *mut c_int) -> c_int,
    close_send: extern "C" fn(Raw) -> c_int,
    close_recv: extern "C" fn(Raw) -> c_int,
    close_listen: extern "C" fn(Raw) -> c_int,
}

/// One connection with both of its ends in this thread, and registered memory at each.
pub struct Pair {
    table: *const Table,
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

/// A send or a receive under way.
#[derive(Clone, Copy)]
pub struct Request(Raw);

/// valgrind collects while this function runs, in the thread that runs it (`--toggle-collect`).
#[unsafe(no_mangle)]
#[inline(never)]
fn cost_counted(call: &mut dyn FnMut()) {
    call();
    // Something to do after the call: as a jump it would not end here.
    black_box(());
}

/// valgrind writes down what it has collected, and begins anew, where this function is entered (`--dump-before`).
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
    /// Loads a plugin, and connects its first device with itself; `bytes` of memory at each end.
    ///
    /// # Errors
    /// Names the call that failed.
    pub fn connect(library: &Path, bytes: usize) -> Result<Self, String> {
        // SAFETY: loading runs the initialisers of a library that the user named as a plugin, as NCCL would run them.
        let library = unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| e.to_string())?;
        let table = [c"ncclNetPlugin_v11", c"ncclNetPlugin_v12"].into_iter().find_map(|name| {
            // SAFETY: the symbol's address alone is taken; in either version a table lies there that begins as `Table` does.
            let symbol = unsafe { library.get::<*const Table>(name.to_bytes_with_nul()) };
            symbol.ok().map(|symbol| *symbol)
        });
        let table = table.ok_or("the library exports neither ncclNetPlugin_v11 nor ncclNetPlugin_v12")?;
        let memory = || Memory { bytes: vec![0; bytes], handle: ptr::null_mut() };
        let (source, target) = (memory(), memory());
        let null = ptr::null_mut();
        let mut pair = Self { table, listener: null, send: null, recv: null, source, target, _library: library };
        pair.start()?;
        Ok(pair)
    }

    fn table(&self) -> &Table {
        // SAFETY: `table` is inside the library, which this owns; a plugin fills it in before it exports it.
        unsafe { &*self.table }
    }

    fn start(&mut self) -> Result<(), String> {
        let (mut context, mut devices) = (ptr::null_mut(), 0);
        check("init", (self.table().init)(&mut context, 1, &UNDEFINED, log, ptr::null_mut()))?;
        check("devices", (self.table().devices)(&mut devices))?;
        if devices < 1 {
            return Err("the plugin has no device".to_owned());
        }
        let mut handle = [0u8; HANDLE_BYTES];
        let mut listener = ptr::null_mut();
        check("listen", (self.table().listen)(context, 0, handle.as_mut_ptr(), &mut listener))?;
        self.listener = listener;
        let begun = Instant::now();
        while self.send.is_null() || self.recv.is_null() {
            if begun.elapsed() > CONNECT_LIMIT {
                return Err("no connection after a minute".to_owned());
            }
            let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
            if self.send.is_null() {
                let call = self.table().connect;
                check("connect", call(context, 0, handle.as_mut_ptr(), &mut comm, &mut device))?;
                self.send = comm;
            }
            let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
            if self.recv.is_null() {
                check("accept", (self.table().accept)(listener, &mut comm, &mut device))?;
                self.recv = comm;
            }
        }
        let register = self.table().reg_mr;
        for (comm, memory) in [(self.send, &mut self.source), (self.recv, &mut self.target)] {
            let (start, length) = (memory.bytes.as_mut_ptr(), memory.bytes.len());
            check("regMr", register(comm, start, length, PTR_HOST, &mut memory.handle))?;
        }
        Ok(())
    }

    /// What is sent.
    pub fn source(&mut self) -> &mut [u8] {
        &mut self.source.bytes
    }

    /// Whether `range` of what is received has this value in each 64 bytes, and in its last, by now.
    pub fn has_come(&self, range: std::ops::Range<usize>, value: u8) -> bool {
        let bytes = &self.target.bytes[range];
        // SAFETY: `byte` is one of the buffer's; another thread may store to it, so it is read as what may change.
        bytes.iter().step_by(64).chain(bytes.last()).all(|byte| unsafe { ptr::read_volatile(byte) } == value)
    }

    /// Posts a receive of `bytes` at `offset`. None: not now.
    ///
    /// # Errors
    /// As the plugin says.
    pub fn irecv(&mut self, offset: usize, bytes: usize, counts: bool) -> Result<Option<Request>, String> {
        let call = self.table().irecv;
        let (comm, mut handle) = (self.recv, self.target.handle);
        let (mut size, mut tag, mut request) = (bytes, 0, ptr::null_mut());
        let mut place: Raw = self.target.bytes[offset..offset + bytes].as_mut_ptr().cast();
        let code = counted(counts, || {
            call(comm, 1, &mut place, &mut size, &mut tag, &mut handle, ptr::null_mut(), &mut request)
        });
        check("irecv", code)?;
        Ok((!request.is_null()).then_some(Request(request)))
    }

    /// Sends `bytes` from `offset`. None: not now.
    ///
    /// # Errors
    /// As the plugin says.
    pub fn isend(&mut self, offset: usize, bytes: usize, counts: bool) -> Result<Option<Request>, String> {
        let call = self.table().isend;
        let (comm, handle, mut request) = (self.send, self.source.handle, ptr::null_mut());
        let place = self.source.bytes[offset..offset + bytes].as_mut_ptr();
        let code = counted(counts, || call(comm, place, bytes, 0, handle, ptr::null_mut(), &mut request));
        check("isend", code)?;
        Ok((!request.is_null()).then_some(Request(request)))
    }

    /// Whether a request is done; after that it is gone.
    ///
    /// # Errors
    /// As the plugin says.
    pub fn test(&mut self, request: Request, counts: bool) -> Result<bool, String> {
        let call = self.table().test;
        let (mut done, mut size) = (0, 0);
        check("test", counted(counts, || call(request.0, &mut done, &mut size)))?;
        Ok(done != 0)
    }

    /// Closes both ends.
    ///
    /// # Errors
    /// As the plugin says.
    pub fn close(self) -> Result<(), String> {
        let table = self.table();
        check("deregMr", (table.dereg_mr)(self.send, self.source.handle))?;
        check("deregMr", (table.dereg_mr)(self.recv, self.target.handle))?;
        check("closeSend", (table.close_send)(self.send))?;
        check("closeRecv", (table.close_recv)(self.recv))?;
        check("closeListen", (table.close_listen)(self.listener))
    }
}

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{call} returned {code}")) }
}

/// Shows warnings. The interface's logger takes any number of arguments; plugins pass "%s" and one string, and of all else the
/// format is shown as it is.
extern "C" fn log(level: c_int, _: c_ulong, _: *const c_char, _: c_int, format: *const c_char, first: *const c_char) {
    const WARN: c_int = 2;
    if level != WARN || format.is_null() {
        return;
    }
    // SAFETY: a format is a C string.
    let format = unsafe { CStr::from_ptr(format) };
    if format == c"%s" && !first.is_null() {
        // SAFETY: the format says that the first argument is a C string.
        eprintln!("cost: WARN {}", unsafe { CStr::from_ptr(first) }.to_string_lossy());
    } else {
        eprintln!("cost: WARN {}", format.to_string_lossy());
    }
}
