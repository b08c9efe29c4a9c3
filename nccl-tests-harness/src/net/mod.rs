//! The loaded plugin as safe owners.
//!
//! Everything here lives on one thread (`Rc`), as a comm's data path does in NCCL. Every owner holds what it came from,
//! so memory outlives its registration, that its comm, that the context, and that the library.

mod buffer;
mod logger;

pub use buffer::Buffer;
pub(crate) use buffer::{Heap, Memory, Words};

use crate::abi::{self, Connect, Functions, GetProperties, Init, Irecv, Isend, Listen};
use crate::ranks::{activity, log};
use anyhow::{Context as _, Result, bail, ensure};
use buffer::Stretch;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use logger::{logger, text};
use nccl_net_spark::abi::types::{
    self, CommConfig, HANDLE_BYTES, NcclResult, NetV8, NetV9, NetV10, NetV11, NetV12, functions,
};
use nccl_net_spark::abi::types::{OPTIONAL_RECV_COMPLETION, PTR_CUDA, PTR_HOST, UNDEFINED};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::rc::Rc;

/// NCCL's defaults.
const CONFIG: CommConfig = CommConfig { traffic_class: UNDEFINED };

/// What `listen` fills and `connect` is given.
pub(crate) type Handle = [u8; HANDLE_BYTES];

/// A library that exports a table of one of [`abi::VERSIONS`].
pub struct Plugin {
    /// Inside the library, so valid as long as that is loaded.
    table: Functions,
    _library: Library,
}

/// A plugin after `init`.
pub struct Context {
    plugin: Rc<Plugin>,
    raw: *mut c_void,
}

/// The properties of a device.
#[derive(Debug, Clone)]
pub(crate) struct Properties {
    /// The device's name.
    pub name: String,
    /// Its speed in Mb/s.
    pub speed_mbps: i32,
    /// Whether it takes host memory.
    pub host_memory: bool,
}

/// Something that listens.
pub struct Listener {
    context: Rc<Context>,
    raw: NonNull<c_void>,
}

/// A connection to send on.
pub struct SendComm(Rc<Comm>);

/// A connection to receive on.
pub struct RecvComm(Rc<Comm>);

struct Comm {
    context: Rc<Context>,
    raw: NonNull<c_void>,
    sends: bool,
}

/// What the plugin is told that a pointer points into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pointer {
    /// Memory that the processor's address reaches.
    Host,
    /// A GPU's memory.
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
    /// None once it is done: NCCL never tests a request again after that.
    raw: Option<NonNull<c_void>>,
    registration: Rc<Registration>,
    stretch: Stretch,
}

/// The versions of the interface that `library` exports, of those asked for.
///
/// # Errors
/// When it cannot be loaded.
pub(crate) fn exported_versions(library: &Path, versions: impl Iterator<Item = u32>) -> Result<Vec<u32>> {
    let library = open(library)?;
    Ok(versions.filter(|version| symbol(&library, *version).is_some()).collect())
}

fn open(path: &Path) -> Result<Library> {
    // SAFETY: loading runs the initialisers of a library that the user named as an NCCL plugin, as NCCL would run them;
    // our own has none.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.with_context(|| format!("load {}", path.display()))
}

fn symbol(library: &Library, version: u32) -> Option<NonNull<c_void>> {
    // SAFETY: the symbol's address alone is taken, nothing is read or called through it here.
    let symbol = unsafe { library.get::<*mut c_void>(format!("ncclNetPlugin_v{version}\0").as_bytes()) };
    symbol.ok().and_then(|symbol| NonNull::new(*symbol))
}

impl Plugin {
    /// Loads a plugin as NCCL would: by the newest interface that it has, or by `version` of it.
    ///
    /// # Errors
    /// When it cannot be loaded, or has no such interface.
    pub fn load(path: &Path, version: Option<u32>) -> Result<Rc<Self>> {
        let library = open(path)?;
        let (newest, oldest) = (version.unwrap_or(*abi::VERSIONS.end()), version.unwrap_or(*abi::VERSIONS.start()));
        let found = (oldest..=newest).rev().find_map(|version| Some((version, symbol(&library, version)?)));
        let (version, table) = found.with_context(|| {
            let symbols = if oldest == newest { format!("_v{newest}") } else { format!("_v{oldest} to _v{newest}") };
            format!("{} is not a usable NCCL plugin: no symbol ncclNetPlugin{symbols}", path.display())
        })?;
        // SAFETY: the symbol of this name is by NCCL's plugin interface a table of that version's type, constant while
        // the library is loaded, which `self` sees to.
        let table = unsafe {
            match version {
                8 => Functions::of(version, table.cast::<NetV8>().as_ref()),
                9 => Functions::of(version, table.cast::<NetV9>().as_ref()),
                10 => Functions::of(version, table.cast::<NetV10>().as_ref()),
                11 => Functions::of(version, table.cast::<NetV11>().as_ref()),
                _ => Functions::of(version, table.cast::<NetV12>().as_ref()),
            }
        };
        Ok(Rc::new(Self { table, _library: library }))
    }

    /// Starts the plugin for one communicator, `job`.
    ///
    /// # Errors
    /// When `init` fails.
    pub fn init(self: &Rc<Self>, job: u64) -> Result<Rc<Context>> {
        let init = self.function("init", self.table.init)?;
        log::hold_warnings();
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` and the configuration are valid for writes and reads for the length of the call; the logger is a
        // function of the program, which outlives the library; a profiler may be absent.
        let code = unsafe {
            match init {
                Init::V8(init) => init(Some(logger())),
                Init::V10(init) => init(Some(logger()), None),
                Init::V11(init) => init(&mut raw, job, &CONFIG, Some(logger()), None),
            }
        };
        let outcome = self.check("init", code);
        log::release_warnings();
        outcome?;
        Ok(Rc::new(Context { plugin: Rc::clone(self), raw }))
    }

    /// The function of that name, or an error that the plugin lacks it; the next thing is to call it.
    fn function<F>(&self, name: &'static str, function: Option<F>) -> Result<F> {
        let function = function.with_context(|| format!("the plugin has no function {name}"))?;
        activity::enter(name);
        Ok(function)
    }

    /// Turns the result of the call just made into an error with the plugin's own words.
    fn check(&self, name: &'static str, result: NcclResult) -> Result<()> {
        activity::leave();
        if result == NcclResult::SUCCESS {
            return Ok(());
        }
        match log::take_last_warning() {
            Some(warning) => bail!("{name} returned {result}: {warning}"),
            None => bail!("{name} returned {result}"),
        }
    }

    /// For `drop`, where an error can only be logged.
    fn check_on_close(&self, name: &'static str, result: NcclResult) {
        if let Err(error) = self.check(name, result) {
            log::record(2, &error.to_string());
        }
    }
}

impl Context {
    /// The version of the interface that is used.
    pub fn version(&self) -> u32 {
        self.plugin.table.version
    }

    /// The network's name.
    pub fn network(&self) -> String {
        text(self.plugin.table.name)
    }

    /// How many devices the plugin has.
    ///
    /// # Errors
    /// The plugin's.
    pub fn devices(&self) -> Result<i32> {
        let devices = self.plugin.function("devices", self.plugin.table.devices)?;
        let mut count = 0;
        // SAFETY: `count` is valid for writes for the length of the call.
        let code = unsafe { devices(&mut count) };
        self.plugin.check("devices", code)?;
        Ok(count)
    }

    /// The properties of device `dev`.
    ///
    /// # Errors
    /// The plugin's.
    pub(crate) fn properties(&self, dev: i32) -> Result<Properties> {
        match self.plugin.function("getProperties", self.plugin.table.get_properties)? {
            GetProperties::V8(get_properties) => self.properties_by(get_properties, dev),
            GetProperties::V9(get_properties) => self.properties_by(get_properties, dev),
            GetProperties::V11(get_properties) => self.properties_by(get_properties, dev),
            GetProperties::V12(get_properties) => self.properties_by(get_properties, dev),
        }
    }

    fn properties_by<Flush, More>(
        &self,
        get_properties: functions::GetProperties<types::Properties<Flush, More>>,
        dev: i32,
    ) -> Result<Properties> {
        let mut raw = MaybeUninit::zeroed();
        // SAFETY: `raw` is valid for writes for the length of the call.
        let code = unsafe { get_properties(dev, raw.as_mut_ptr()) };
        self.plugin.check("getProperties", code)?;
        let raw = raw.as_ptr();
        // SAFETY: a pointer and two integers, which are zero where the plugin did not fill them in.
        let (name, speed_mbps, kinds) = unsafe { ((*raw).name, (*raw).speed, (*raw).ptr_support) };
        Ok(Properties { name: text(name), speed_mbps, host_memory: kinds & PTR_HOST != 0 })
    }

    /// Listens on device `dev`.
    ///
    /// # Errors
    /// The plugin's.
    pub fn listen(self: &Rc<Self>, dev: i32) -> Result<(Listener, Handle)> {
        let listen = self.plugin.function("listen", self.plugin.table.listen)?;
        let (mut handle, mut raw) = ([0; HANDLE_BYTES], ptr::null_mut());
        let place = handle.as_mut_ptr().cast();
        // SAFETY: the context is the one `init` gave; `handle` has the length that the interface promises, and both are
        // valid for writes for the length of the call.
        let code = unsafe {
            match listen {
                Listen::V8(listen) => listen(dev, place, &mut raw),
                Listen::V11(listen) => listen(self.raw, dev, place, &mut raw),
            }
        };
        self.plugin.check("listen", code)?;
        let raw = NonNull::new(raw).context("listen succeeded without a comm")?;
        Ok((Listener { context: Rc::clone(self), raw }, handle))
    }

    /// Goes on connecting to `handle`, always the same memory; none while that takes longer.
    ///
    /// # Errors
    /// The plugin's.
    pub fn connect(self: &Rc<Self>, dev: i32, handle: &mut Handle) -> Result<Option<SendComm>> {
        let connect = self.plugin.function("connect", self.plugin.table.connect)?;
        let (mut raw, mut device_handle) = (ptr::null_mut(), ptr::null_mut());
        let handle = handle.as_mut_ptr().cast();
        // SAFETY: as in `listen`; a NULL device handle asks for no offload.
        let code = unsafe {
            match connect {
                Connect::V8(connect) => connect(dev, handle, &mut raw, &mut device_handle),
                Connect::V10(connect) => connect(dev, &CONFIG, handle, &mut raw, &mut device_handle),
                Connect::V11(connect) => connect(self.raw, dev, handle, &mut raw, &mut device_handle),
            }
        };
        self.plugin.check("connect", code)?;
        Ok(NonNull::new(raw).map(|raw| SendComm(Rc::new(Comm { context: Rc::clone(self), raw, sends: true }))))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let Some(finalize) = self.plugin.table.finalize else { return };
        activity::enter("finalize");
        // SAFETY: the context came from `init` and goes away here; everything made from it held it and is gone.
        let code = unsafe { finalize(self.raw) };
        self.plugin.check_on_close("finalize", code);
    }
}

impl Listener {
    /// Goes on accepting; none while nobody is connected yet.
    ///
    /// # Errors
    /// The plugin's.
    pub fn accept(&self) -> Result<Option<RecvComm>> {
        let plugin = &self.context.plugin;
        let accept = plugin.function("accept", plugin.table.accept)?;
        let (mut raw, mut device_handle) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the listen comm is open; both results are valid for writes for the length of the call.
        let code = unsafe { accept(self.raw.as_ptr(), &mut raw, &mut device_handle) };
        plugin.check("accept", code)?;
        let context = || Rc::clone(&self.context);
        Ok(NonNull::new(raw).map(|raw| RecvComm(Rc::new(Comm { context: context(), raw, sends: false }))))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let plugin = &self.context.plugin;
        let Ok(close) = plugin.function("closeListen", plugin.table.close_listen) else { return };
        // SAFETY: the listen comm is open and goes away here.
        let code = unsafe { close(self.raw.as_ptr()) };
        plugin.check_on_close("closeListen", code);
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let plugin = &self.context.plugin;
        let (name, close) = match self.sends {
            true => ("closeSend", plugin.table.close_send),
            false => ("closeRecv", plugin.table.close_recv),
        };
        let Ok(close) = plugin.function(name, close) else { return };
        // SAFETY: the comm is open, of the kind that this function closes, and goes away here; its registrations held
        // it and are gone.
        let code = unsafe { close(self.raw.as_ptr()) };
        plugin.check_on_close(name, code);
    }
}

impl SendComm {
    /// Registers memory to send from.
    ///
    /// # Errors
    /// The plugin's.
    pub fn register(&self, buffer: &Rc<Buffer>) -> Result<Rc<Registration>> {
        self.register_as(buffer, Pointer::Host)
    }

    /// Registers memory to send from, as what `pointer` says.
    ///
    /// # Errors
    /// The plugin's.
    pub(crate) fn register_as(&self, buffer: &Rc<Buffer>, pointer: Pointer) -> Result<Rc<Registration>> {
        register(&self.0, buffer, pointer)
    }

    /// Starts to send `bytes` from `offset` on; none when the plugin cannot take it yet.
    ///
    /// # Errors
    /// The plugin's, or a range outside of the memory.
    pub fn isend(&self, memory: &Rc<Registration>, offset: usize, bytes: usize, tag: i32) -> Result<Option<Request>> {
        let address = memory.address(&self.0, offset, bytes)?;
        let plugin = &self.0.context.plugin;
        let isend = plugin.function("isend", plugin.table.isend)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the range lies in memory registered with this comm; it stays mapped, and nothing of ours touches it,
        // until the request is done (`Request::start`). A profiler's handle may be NULL.
        let code = unsafe {
            let (comm, memory) = (self.0.raw.as_ptr(), memory.raw);
            match isend {
                Isend::V8(isend) => isend(comm, address, int(bytes)?, tag, memory, &mut raw),
                Isend::V9(isend) => isend(comm, address, bytes, tag, memory, &mut raw),
                Isend::V10(isend) => isend(comm, address, bytes, tag, memory, ptr::null_mut(), &mut raw),
            }
        };
        plugin.check("isend", code)?;
        let stretch = Stretch { start: offset, end: offset + bytes, written: false };
        Ok(NonNull::new(raw).map(|raw| Request::start(raw, memory, stretch)))
    }
}

impl RecvComm {
    /// Registers memory to receive into.
    ///
    /// # Errors
    /// The plugin's.
    pub fn register(&self, buffer: &Rc<Buffer>) -> Result<Rc<Registration>> {
        self.register_as(buffer, Pointer::Host)
    }

    /// Registers memory to receive into, as what `pointer` says.
    ///
    /// # Errors
    /// The plugin's.
    pub(crate) fn register_as(&self, buffer: &Rc<Buffer>, pointer: Pointer) -> Result<Rc<Registration>> {
        register(&self.0, buffer, pointer)
    }

    /// Starts to receive up to `bytes` to `offset`; none when the plugin cannot take it yet.
    ///
    /// # Errors
    /// The plugin's, or a range outside of the memory.
    pub fn irecv(&self, memory: &Rc<Registration>, offset: usize, bytes: usize, tag: i32) -> Result<Option<Request>> {
        self.post(memory, offset, bytes, tag, ptr::null_mut())
    }

    /// The same of a receive whose completion is not needed, as NCCL has it for LL and LL128: the plugin may report it done
    /// before the bytes come (version 8 has no such receives). The memory has to be shared ([`Words`]), so that the processor has
    /// atomics alone there.
    ///
    /// # Errors
    /// As [`RecvComm::irecv`].
    pub(crate) fn irecv_optional(
        &self,
        memory: &Rc<Registration>,
        offset: usize,
        bytes: usize,
        tag: i32,
    ) -> Result<Option<Request>> {
        ensure!(memory.buffer.is_shared(), "an optional receive into memory that is not shared");
        self.post(memory, offset, bytes, tag, ptr::without_provenance_mut(OPTIONAL_RECV_COMPLETION))
    }

    /// Starts a receive, with `raw` in the request's place.
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
        let irecv = plugin.function("irecv", plugin.table.irecv)?;
        let (mut size, mut tag, mut handle) = (bytes, tag, memory.raw);
        let mut profiler = ptr::null_mut();
        // SAFETY: arrays of one element each, valid for the length of the call; the memory as in `isend`.
        let code = unsafe {
            let comm = self.0.raw.as_ptr();
            match irecv {
                Irecv::V8(irecv) => {
                    raw = ptr::null_mut();
                    irecv(comm, 1, &mut address, &mut int(bytes)?, &mut tag, &mut handle, &mut raw)
                }
                Irecv::V9(irecv) => irecv(comm, 1, &mut address, &mut size, &mut tag, &mut handle, &mut raw),
                Irecv::V10(irecv) => {
                    irecv(comm, 1, &mut address, &mut size, &mut tag, &mut handle, &mut profiler, &mut raw)
                }
            }
        };
        plugin.check("irecv", code)?;
        ensure!(raw.addr() != OPTIONAL_RECV_COMPLETION, "irecv left the request as it was on entry");
        let stretch = Stretch { start: offset, end: offset + bytes, written: true };
        Ok(NonNull::new(raw).map(|raw| Request::start(raw, memory, stretch)))
    }
}

/// A size as version 8 takes it.
fn int(bytes: usize) -> Result<c_int> {
    c_int::try_from(bytes).with_context(|| format!("version 8 of the interface has no message of {bytes} bytes"))
}

fn register(comm: &Rc<Comm>, buffer: &Rc<Buffer>, pointer: Pointer) -> Result<Rc<Registration>> {
    let plugin = &comm.context.plugin;
    let reg_mr = plugin.function("regMr", plugin.table.reg_mr)?;
    let kind = match pointer {
        Pointer::Host => PTR_HOST,
        Pointer::Cuda => PTR_CUDA,
    };
    let mut raw = ptr::null_mut();
    // SAFETY: the comm is open; the buffer keeps its address and length until after deregMr, since the registration holds
    // it. What a wrong kind of pointer stands for is for the plugin and the kernel to refuse.
    let code = unsafe { reg_mr(comm.raw.as_ptr(), buffer.start().as_ptr(), buffer.bytes(), kind, &mut raw) };
    plugin.check("regMr", code)?;
    Ok(Rc::new(Registration { comm: Rc::clone(comm), raw, buffer: Rc::clone(buffer) }))
}

impl Registration {
    fn address(&self, comm: &Rc<Comm>, offset: usize, bytes: usize) -> Result<*mut c_void> {
        ensure!(Rc::ptr_eq(comm, &self.comm), "memory registered with another comm");
        self.buffer.place(offset, bytes)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let plugin = &self.comm.context.plugin;
        let Ok(dereg_mr) = plugin.function("deregMr", plugin.table.dereg_mr) else { return };
        // SAFETY: the handle came from regMr of this comm, which is still open, and goes away here; no request is under
        // way, for each holds its registration.
        let code = unsafe { dereg_mr(self.comm.raw.as_ptr(), self.raw) };
        plugin.check_on_close("deregMr", code);
    }
}

impl Request {
    fn start(raw: NonNull<c_void>, registration: &Rc<Registration>, stretch: Stretch) -> Self {
        registration.buffer.begin(stretch);
        Self { raw: Some(raw), registration: Rc::clone(registration), stretch }
    }

    /// Whether it is done: how many bytes were moved, or none.
    ///
    /// # Errors
    /// The plugin's, or a size that the request cannot have.
    pub fn test(&mut self) -> Result<Option<usize>> {
        let raw = self.raw.context("a request that is done was tested again")?;
        let plugin = &self.registration.comm.context.plugin;
        let test = plugin.function("test", plugin.table.test)?;
        let (mut done, mut size) = (0, 0);
        // SAFETY: the request is under way; `size` has room for the one size of a request with one part.
        let code = unsafe { test(raw.as_ptr(), &mut done, &mut size) };
        plugin.check("test", code)?;
        if done == 0 {
            return Ok(None);
        }
        self.raw = None;
        self.registration.buffer.end(self.stretch);
        let bytes = self.stretch.end - self.stretch.start;
        let moved = usize::try_from(size).ok().filter(|moved| *moved <= bytes);
        moved.map(Some).with_context(|| format!("test reports {size} bytes of a request of {bytes}"))
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // The network may still write there: what the request stands on is never given back.
        if self.raw.is_some() {
            std::mem::forget(Rc::clone(&self.registration));
        }
    }
}
