//! Safe owners of the loaded plugin's objects. A comm is a listening port, or one direction of a
//! connection.
//!
//! All owners live on one thread (`Rc`), as a comm's data path does in NCCL. Each owner holds the
//! object that it was made from. So memory and comm outlive the registration, the context outlives
//! the comm, and the library outlives the context. A failed call of the plugin becomes an error
//! that has the function's name, its result and, if there is one, the plugin's last warning.

mod buffer;
mod logger;

pub use buffer::Buffer;
pub(crate) use buffer::{Heap, Memory, Words};

use crate::abi::{Connect, Functions, GetProperties, Init, Irecv, Isend, Listen};
use crate::ranks::{activity, log};
use anyhow::{Context as _, Result, bail, ensure};
use buffer::Stretch;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use logger::{logger, text};
use nccl_abi::NcclResult;
use nccl_abi::net::{
    self as types, CommConfig, HANDLE_BYTES, NET_VERSIONS, NetV8, NetV9, NetV10, NetV11,
    NewestProperties, functions,
};
use nccl_abi::net::{OPTIONAL_RECV_COMPLETION, PTR_CUDA, PTR_HOST, UNDEFINED};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// The communicator's configuration, with the values that NCCL passes by default.
const CONFIG: CommConfig = CommConfig {
    traffic_class: UNDEFINED,
};

/// The handle that `listen` fills and `connect` takes.
pub(crate) type Handle = [u8; HANDLE_BYTES];

/// A loaded library that exports a table of one of [`NET_VERSIONS`].
pub struct Plugin {
    /// Functions in the library, valid while the library is loaded.
    table: Functions,
    _library: Library,
}

/// A plugin that has been initialised ([`Plugin::init`]).
pub struct Context {
    plugin: Rc<Plugin>,
    raw: *mut c_void,
}

#[derive(Debug, Clone)]
pub(crate) struct Properties {
    pub name: String,
    pub speed_mbps: i32,
    /// True if the device accepts host memory.
    pub host_memory: bool,
}

/// A listening comm.
pub struct Listener {
    context: Rc<Context>,
    raw: NonNull<c_void>,
}

/// A connection to send on.
pub type SendComm = Direction<true>;

/// A connection to receive on.
pub type RecvComm = Direction<false>;

/// A connection, to send or to receive on.
pub struct Direction<const SENDS: bool>(Rc<Comm>);

struct Comm {
    context: Rc<Context>,
    raw: NonNull<c_void>,
    sends: bool,
}

/// The kind of memory at an address. regMr takes both the address and the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pointer {
    Host,
    Cuda,
}

/// Memory registered with a comm.
pub struct Registration {
    comm: Rc<Comm>,
    raw: *mut c_void,
    buffer: Rc<Buffer>,
}

/// A send or a receive in flight.
pub struct Request {
    /// The plugin's request. `None` once the request is done: NCCL never passes a request that is
    /// done to the plugin again, so this program must not either.
    raw: Option<NonNull<c_void>>,
    registration: Rc<Registration>,
    stretch: Stretch,
}

/// Returns the elements of `versions` (versions of the network interface) that `library` exports.
///
/// # Errors
/// Fails when the library cannot be loaded.
pub fn exported_versions(library: &Path, versions: impl Iterator<Item = u32>) -> Result<Vec<u32>> {
    let library = open(library)?;
    Ok(versions
        .filter(|version| symbol(&library, *version).is_some())
        .collect())
}

fn open(path: &Path) -> Result<Library> {
    // SAFETY: loading runs the library's initialisers, as NCCL would: the user named the library as
    // an NCCL plugin. This project's plugin has no initialisers.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .with_context(|| format!("load {}", path.display()))
}

fn symbol(library: &Library, version: u32) -> Option<NonNull<c_void>> {
    // SAFETY: only the symbol's address is taken, nothing is read or called through it here.
    let symbol =
        unsafe { library.get::<*mut c_void>(format!("ncclNetPlugin_v{version}\0").as_bytes()) };
    symbol.ok().and_then(|symbol| NonNull::new(*symbol))
}

impl Plugin {
    /// Loads a plugin with this version of the interface or, if `None`, with the newest version
    /// that the library exports, as NCCL does.
    ///
    /// # Errors
    /// Fails when the library cannot be loaded, or has no such interface.
    pub fn load(path: &Path, version: Option<u32>) -> Result<Rc<Self>> {
        let library = open(path)?;
        let newest = version.unwrap_or(*NET_VERSIONS.end());
        let oldest = version.unwrap_or(*NET_VERSIONS.start());
        let found = (oldest..=newest)
            .rev()
            .find_map(|version| Some((version, symbol(&library, version)?)));
        let (version, table) = found.with_context(|| {
            let symbols = if oldest == newest {
                format!("_v{newest}")
            } else {
                format!("_v{oldest} to _v{newest}")
            };
            format!(
                "{} is not a usable NCCL plugin: no symbol ncclNetPlugin{symbols}",
                path.display()
            )
        })?;
        // SAFETY: by NCCL's plugin interface, the symbol of this name is a table of that version's
        // type. Later tables may be read as version 11's ([`NetV11`]). The table is constant while
        // the library is loaded, and `self` holds the library.
        let table = unsafe {
            match version {
                8 => Functions::of(version, table.cast::<NetV8>().as_ref(), None),
                9 => Functions::of(version, table.cast::<NetV9>().as_ref(), None),
                10 => Functions::of(version, table.cast::<NetV10>().as_ref(), None),
                _ => {
                    let table = table.cast::<NetV11>().as_ref();
                    Functions::of(version, table, table.more.finalize)
                }
            }
        };
        Ok(Rc::new(Self {
            table,
            _library: library,
        }))
    }

    /// Starts the plugin for the communicator `job`.
    pub fn init(self: &Rc<Self>, job: u64) -> Result<Rc<Context>> {
        log::hold_warnings();
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for writes and the configuration for reads during the call. The
        // logger is a function of the program, which outlives the library. The argument for a
        // profiler may be NULL.
        let outcome = self.call("init", self.table.init, |init| unsafe {
            match init {
                Init::V8(init) => init(Some(logger())),
                Init::V10(init) => init(Some(logger()), None),
                Init::V11(init) => init(&mut raw, job, &CONFIG, Some(logger()), None),
            }
        });
        log::release_warnings();
        outcome?;
        Ok(Rc::new(Context {
            plugin: Rc::clone(self),
            raw,
        }))
    }

    /// Returns `bytes` as the 32-bit size that version 8 of the interface takes. For later versions
    /// the result is 0, and no call uses it.
    fn short(&self, bytes: usize) -> Result<c_int> {
        match self.table.version {
            8 => c_int::try_from(bytes).with_context(|| {
                format!("version 8 of the interface has no message of {bytes} bytes")
            }),
            _ => Ok(0),
        }
    }

    /// Calls the function `name`. The error of a failed call has the plugin's last warning.
    fn call<F>(
        &self,
        name: &'static str,
        function: Option<F>,
        call: impl FnOnce(F) -> NcclResult,
    ) -> Result<()> {
        let function = function.with_context(|| format!("the plugin has no function {name}"))?;
        activity::enter(name);
        let result = call(function);
        activity::leave();
        if result == NcclResult::SUCCESS {
            return Ok(());
        }
        match log::take_last_warning() {
            Some(warning) => bail!("{name} returned {result}: {warning}"),
            None => bail!("{name} returned {result}"),
        }
    }

    /// Calls the function `name` from `drop`, if the plugin has it. An error is only logged.
    fn close<F>(
        &self,
        name: &'static str,
        function: Option<F>,
        call: impl FnOnce(F) -> NcclResult,
    ) {
        let Some(function) = function else { return };
        if let Err(error) = self.call(name, Some(function), call) {
            log::record(2, &error.to_string());
        }
    }
}

impl Context {
    /// Returns the version of the interface that is used.
    pub fn version(&self) -> u32 {
        self.plugin.table.version
    }

    /// Returns the network's name.
    pub fn network(&self) -> String {
        text(self.plugin.table.name)
    }

    /// Returns the number of the plugin's devices.
    pub fn devices(&self) -> Result<i32> {
        let mut count = 0;
        self.plugin
            .call("devices", self.plugin.table.devices, |devices| {
                // SAFETY: `count` is valid for writes for the length of the call.
                unsafe { devices(&mut count) }
            })?;
        Ok(count)
    }

    pub(crate) fn properties(&self, dev: i32) -> Result<Properties> {
        match self.plugin.table.get_properties {
            Some(GetProperties::V8(function)) => self.properties_by(Some(function), dev),
            Some(GetProperties::V9(function)) => self.properties_by(Some(function), dev),
            Some(GetProperties::V11(function)) => self.properties_by(Some(function), dev),
            None => bail!("the plugin has no function getProperties"),
        }
    }

    fn properties_by<Flush, More>(
        &self,
        function: Option<functions::GetProperties<types::Properties<Flush, More>>>,
        dev: i32,
    ) -> Result<Properties> {
        let mut room = MaybeUninit::<NewestProperties>::zeroed();
        let raw = room.as_mut_ptr().cast::<types::Properties<Flush, More>>();
        self.plugin.call("getProperties", function, |function| {
            // SAFETY: `raw` is valid for writes for the length of the call, and has room for the
            // properties of each version.
            unsafe { function(dev, raw) }
        })?;
        // SAFETY: reads a pointer and two integers. `room` was zeroed, so they are initialised even
        // if the plugin did not fill them in.
        let (name, speed_mbps, kinds) = unsafe { ((*raw).name, (*raw).speed, (*raw).ptr_support) };
        Ok(Properties {
            name: text(name),
            speed_mbps,
            host_memory: kinds & PTR_HOST != 0,
        })
    }

    /// Listens on device `dev`. Returns the listening comm, and the handle for its peer.
    pub fn listen(self: &Rc<Self>, dev: i32) -> Result<(Listener, Handle)> {
        let mut handle = [0; HANDLE_BYTES];
        let mut raw = ptr::null_mut();
        let place = handle.as_mut_ptr().cast();
        self.plugin
            .call("listen", self.plugin.table.listen, |listen| {
                // SAFETY: the context is from `init`. `handle` has the length that the interface
                // promises. `handle` and `raw` are valid for writes during the call.
                unsafe {
                    match listen {
                        Listen::V8(listen) => listen(dev, place, &mut raw),
                        Listen::V11(listen) => listen(self.raw, dev, place, &mut raw),
                    }
                }
            })?;
        let raw = NonNull::new(raw).context("listen succeeded without a comm")?;
        Ok((
            Listener {
                context: Rc::clone(self),
                raw,
            },
            handle,
        ))
    }

    /// Starts or continues to connect to `handle`. All calls for one connection must pass the same
    /// memory, because the plugin may keep its state of the connection in `handle`. Returns `None`
    /// until connected.
    pub fn connect(self: &Rc<Self>, dev: i32, handle: &mut Handle) -> Result<Option<SendComm>> {
        let mut raw = ptr::null_mut();
        let mut device_handle = ptr::null_mut();
        let handle = handle.as_mut_ptr().cast();
        self.plugin
            .call("connect", self.plugin.table.connect, |connect| {
                // SAFETY: as in `listen`; a NULL device handle asks for no offload.
                unsafe {
                    match connect {
                        Connect::V8(connect) => connect(dev, handle, &mut raw, &mut device_handle),
                        Connect::V10(connect) => {
                            connect(dev, &CONFIG, handle, &mut raw, &mut device_handle)
                        }
                        Connect::V11(connect) => {
                            connect(self.raw, dev, handle, &mut raw, &mut device_handle)
                        }
                    }
                }
            })?;
        Ok(self.comm(raw))
    }

    fn comm<const SENDS: bool>(self: &Rc<Self>, raw: *mut c_void) -> Option<Direction<SENDS>> {
        NonNull::new(raw).map(|raw| {
            Direction(Rc::new(Comm {
                context: Rc::clone(self),
                raw,
                sends: SENDS,
            }))
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is from `init` and ends here. Every object made from it held `self`
        // and has been dropped.
        self.plugin
            .close("finalize", self.plugin.table.finalize, |finalize| unsafe {
                finalize(self.raw)
            });
    }
}

impl Listener {
    /// Starts or continues to accept a connection. Returns `None` until a peer has connected.
    pub fn accept(&self) -> Result<Option<RecvComm>> {
        let plugin = &self.context.plugin;
        let mut raw = ptr::null_mut();
        let mut device_handle = ptr::null_mut();
        // SAFETY: the listen comm is open; both results are valid for writes during the call.
        plugin.call("accept", plugin.table.accept, |accept| unsafe {
            accept(self.raw.as_ptr(), &mut raw, &mut device_handle)
        })?;
        Ok(self.context.comm(raw))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let plugin = &self.context.plugin;
        // SAFETY: the listen comm is open and ends here.
        plugin.close("closeListen", plugin.table.close_listen, |close| unsafe {
            close(self.raw.as_ptr())
        });
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let plugin = &self.context.plugin;
        let (name, close) = match self.sends {
            true => ("closeSend", plugin.table.close_send),
            false => ("closeRecv", plugin.table.close_recv),
        };
        // SAFETY: the comm is open and ends here, by the function for its kind. Its registrations
        // held it and have ended.
        plugin.close(name, close, |close| unsafe { close(self.raw.as_ptr()) });
    }
}

impl<const SENDS: bool> Direction<SENDS> {
    /// Registers host memory.
    pub fn register(&self, buffer: &Rc<Buffer>) -> Result<Rc<Registration>> {
        self.register_as(buffer, Pointer::Host)
    }

    pub(crate) fn register_as(
        &self,
        buffer: &Rc<Buffer>,
        pointer: Pointer,
    ) -> Result<Rc<Registration>> {
        let plugin = &self.0.context.plugin;
        let kind = match pointer {
            Pointer::Host => PTR_HOST,
            Pointer::Cuda => PTR_CUDA,
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the comm is open. The registration holds the buffer, so its address and length
        // stay until after deregMr. The plugin and the kernel refuse a wrong kind of pointer.
        plugin.call("regMr", plugin.table.reg_mr, |reg_mr| unsafe {
            reg_mr(
                self.0.raw.as_ptr(),
                buffer.start().as_ptr(),
                buffer.bytes(),
                kind,
                &mut raw,
            )
        })?;
        Ok(Rc::new(Registration {
            comm: Rc::clone(&self.0),
            raw,
            buffer: Rc::clone(buffer),
        }))
    }
}

impl SendComm {
    /// Starts to send the `bytes` bytes of `memory` that begin at `offset`. Returns `None` if the
    /// plugin cannot take the message yet.
    ///
    /// # Errors
    /// Fails when the range lies outside of the memory.
    pub fn isend(
        &self,
        memory: &Rc<Registration>,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Option<Request>> {
        let address = memory.address(&self.0, offset, bytes)?;
        let plugin = &self.0.context.plugin;
        let mut raw = ptr::null_mut();
        let short = plugin.short(bytes)?;
        // SAFETY: the range lies in memory registered with this comm. Until the request is done,
        // the range stays mapped, and this program does not write to it (`Request::start`), except
        // by atomics if the memory is shared (`Words`). A profiler's handle may be NULL.
        plugin.call("isend", plugin.table.isend, |isend| unsafe {
            let comm = self.0.raw.as_ptr();
            let memory = memory.raw;
            match isend {
                Isend::V8(isend) => isend(comm, address, short, tag, memory, &mut raw),
                Isend::V9(isend) => isend(comm, address, bytes, tag, memory, &mut raw),
                Isend::V10(isend) => {
                    isend(comm, address, bytes, tag, memory, ptr::null_mut(), &mut raw)
                }
            }
        })?;
        let stretch = Stretch {
            start: offset,
            end: offset + bytes,
            written: false,
        };
        Ok(NonNull::new(raw).map(|raw| Request::start(raw, memory, stretch)))
    }
}

impl RecvComm {
    /// Starts to receive at most `bytes` bytes into `memory`, from `offset` on. Returns `None` if
    /// the plugin cannot take the receive yet.
    ///
    /// # Errors
    /// Fails when the range lies outside of the memory.
    pub fn irecv(
        &self,
        memory: &Rc<Registration>,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Option<Request>> {
        self.post(memory, offset, bytes, tag, ptr::null_mut())
    }

    /// Starts a receive whose completion is not needed, as NCCL does for LL and LL128: the plugin
    /// may report it done before the bytes arrive. Version 8 of the interface has no such receives,
    /// so an ordinary one is started. The memory must be shared ([`Words`]), so that the processor
    /// accesses it only by atomics while bytes arrive.
    ///
    /// # Errors
    /// As [`RecvComm::irecv`], and for memory that is not shared.
    pub(crate) fn irecv_optional(
        &self,
        memory: &Rc<Registration>,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Option<Request>> {
        ensure!(
            memory.buffer.is_shared(),
            "an optional receive into memory that is not shared"
        );
        self.post(
            memory,
            offset,
            bytes,
            tag,
            ptr::without_provenance_mut(OPTIONAL_RECV_COMPLETION),
        )
    }

    fn post(
        &self,
        memory: &Rc<Registration>,
        offset: usize,
        bytes: usize,
        tag: i32,
        mut raw: *mut c_void,
    ) -> Result<Option<Request>> {
        let mut address = memory.address(&self.0, offset, bytes)?;
        let plugin = &self.0.context.plugin;
        let mut size = bytes;
        let mut short = plugin.short(bytes)?;
        let mut tag = tag;
        let mut handle = memory.raw;
        let mut profiler = ptr::null_mut();
        // SAFETY: each pointer is to an array of one element that is valid during the call. The
        // memory is as in `isend`, but this program does not read the range either, except by
        // atomics.
        plugin.call("irecv", plugin.table.irecv, |irecv| unsafe {
            let comm = self.0.raw.as_ptr();
            match irecv {
                Irecv::V8(irecv) => {
                    raw = ptr::null_mut();
                    irecv(
                        comm,
                        1,
                        &mut address,
                        &mut short,
                        &mut tag,
                        &mut handle,
                        &mut raw,
                    )
                }
                Irecv::V9(irecv) => irecv(
                    comm,
                    1,
                    &mut address,
                    &mut size,
                    &mut tag,
                    &mut handle,
                    &mut raw,
                ),
                Irecv::V10(irecv) => irecv(
                    comm,
                    1,
                    &mut address,
                    &mut size,
                    &mut tag,
                    &mut handle,
                    &mut profiler,
                    &mut raw,
                ),
            }
        })?;
        ensure!(
            raw.addr() != OPTIONAL_RECV_COMPLETION,
            "irecv returned without setting the request"
        );
        let stretch = Stretch {
            start: offset,
            end: offset + bytes,
            written: true,
        };
        Ok(NonNull::new(raw).map(|raw| Request::start(raw, memory, stretch)))
    }
}

impl Registration {
    fn address(&self, comm: &Rc<Comm>, offset: usize, bytes: usize) -> Result<*mut c_void> {
        ensure!(
            Rc::ptr_eq(comm, &self.comm),
            "memory registered with another comm"
        );
        self.buffer.place(offset, bytes)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let plugin = &self.comm.context.plugin;
        // SAFETY: the handle is from regMr of this comm, which is still open, and ends here. No
        // request is in flight, because each request holds its registration.
        plugin.close("deregMr", plugin.table.dereg_mr, |dereg_mr| unsafe {
            dereg_mr(self.comm.raw.as_ptr(), self.raw)
        });
    }
}

impl Request {
    fn start(raw: NonNull<c_void>, registration: &Rc<Registration>, stretch: Stretch) -> Self {
        registration.buffer.begin(stretch);
        Self {
            raw: Some(raw),
            registration: Rc::clone(registration),
            stretch,
        }
    }

    /// Tests the request. Returns the number of bytes moved, or `None` until the request is done.
    ///
    /// # Errors
    /// Fails for a request that was done before, and for a size that the request cannot have.
    pub fn test(&mut self) -> Result<Option<usize>> {
        let raw = self
            .raw
            .context("a request that is done was tested again")?;
        let plugin = &self.registration.comm.context.plugin;
        let mut done = 0;
        let mut size = 0;
        // SAFETY: the request is in flight and has one part, so `size` has room for its size.
        plugin.call("test", plugin.table.test, |test| unsafe {
            test(raw.as_ptr(), &mut done, &mut size)
        })?;
        if done == 0 {
            return Ok(None);
        }
        self.raw = None;
        self.registration.buffer.end(self.stretch);
        let bytes = self.stretch.end - self.stretch.start;
        let moved = usize::try_from(size).ok().filter(|moved| *moved <= bytes);
        moved
            .map(Some)
            .with_context(|| format!("test reports {size} bytes of a request of {bytes}"))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // The request is still in flight. The network may still write into the memory, so the
        // memory is never freed.
        if self.raw.is_some() {
            std::mem::forget(Rc::clone(&self.registration));
        }
    }
}
