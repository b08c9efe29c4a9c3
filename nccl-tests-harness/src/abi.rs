//! The interface as whoever loads a plugin has to see it, versions 8 to 12.
//!
//! The shapes are those of [`nccl_net_spark::abi`], and a test compares the two. But results are integers here: what
//! a library returns is not known to be one of the values that our own one returns, and no other value may become a Rust
//! enum.
//!
//! From version to version the tables have the same functions in the same order, and only five of them change their
//! arguments; what a later version has more comes at the end. So one table with those five open makes them all.

use nccl_net_spark::abi::types::{CommConfig, DebugLogger, NetDeviceHandle, PropertiesV8, PropertiesV12};
use std::ffi::{c_char, c_int, c_void};
use std::ops::RangeInclusive;

/// The versions that can be driven: NCCL 2.20 (8) to 2.30 (12).
pub const VERSIONS: RangeInclusive<u32> = 8..=12;

/// `ncclResult_t`.
pub type Code = c_int;
type Pointer = *mut c_void;

/// The functions of one plugin's table, whatever its version.
#[derive(Clone, Copy)]
pub struct Functions {
    pub version: u32,
    pub name: *const c_char,
    pub init: Option<Init>,
    pub devices: Option<Devices>,
    pub get_properties: Option<GetProperties>,
    pub listen: Option<Listen>,
    pub connect: Option<Connect>,
    pub accept: Option<Accept>,
    pub reg_mr: Option<RegMr>,
    pub dereg_mr: Option<DeregMr>,
    pub isend: Option<Isend>,
    pub irecv: Option<Irecv>,
    pub test: Option<Test>,
    pub close_send: Option<Close>,
    pub close_recv: Option<Close>,
    pub close_listen: Option<Close>,
    /// Since version 11.
    pub finalize: Option<Close>,
}

pub type InitV8 = unsafe extern "C" fn(Option<DebugLogger>) -> Code;
pub type InitV10 = unsafe extern "C" fn(Option<DebugLogger>, Pointer) -> Code;
pub type InitV11 = unsafe extern "C" fn(*mut Pointer, u64, *const CommConfig, Option<DebugLogger>, Pointer) -> Code;
pub type ListenV8 = unsafe extern "C" fn(c_int, Pointer, *mut Pointer) -> Code;
pub type ListenV11 = unsafe extern "C" fn(Pointer, c_int, Pointer, *mut Pointer) -> Code;
pub type ConnectV8 = unsafe extern "C" fn(c_int, Pointer, *mut Pointer, *mut *mut NetDeviceHandle) -> Code;
pub type ConnectV10 =
    unsafe extern "C" fn(c_int, *const CommConfig, Pointer, *mut Pointer, *mut *mut NetDeviceHandle) -> Code;
pub type ConnectV11 = unsafe extern "C" fn(Pointer, c_int, Pointer, *mut Pointer, *mut *mut NetDeviceHandle) -> Code;
pub type IsendV8 = unsafe extern "C" fn(Pointer, Pointer, c_int, c_int, Pointer, *mut Pointer) -> Code;
pub type IsendV9 = unsafe extern "C" fn(Pointer, Pointer, usize, c_int, Pointer, *mut Pointer) -> Code;
pub type IsendV10 = unsafe extern "C" fn(Pointer, Pointer, usize, c_int, Pointer, Pointer, *mut Pointer) -> Code;

/// `init`, by the first version that has it so.
#[derive(Clone, Copy)]
pub enum Init {
    V8(InitV8),
    V10(InitV10),
    V11(InitV11),
}

/// `listen`, by the first version that has it so.
#[derive(Clone, Copy)]
pub enum Listen {
    V8(ListenV8),
    V11(ListenV11),
}

/// `connect`, by the first version that has it so.
#[derive(Clone, Copy)]
pub enum Connect {
    V8(ConnectV8),
    V10(ConnectV10),
    V11(ConnectV11),
}

/// `isend`, by the first version that has it so.
#[derive(Clone, Copy)]
pub enum Isend {
    V8(IsendV8),
    V9(IsendV9),
    V10(IsendV10),
}

/// `irecv` with sizes of type `S`, to version 9.
pub type IrecvBare<S> =
    unsafe extern "C" fn(Pointer, c_int, *mut Pointer, *mut S, *mut c_int, *mut Pointer, *mut Pointer) -> Code;
/// `irecv` with room for a profiler.
pub type IrecvProfiled = unsafe extern "C" fn(
    Pointer,
    c_int,
    *mut Pointer,
    *mut usize,
    *mut c_int,
    *mut Pointer,
    *mut Pointer,
    *mut Pointer,
) -> Code;

/// `irecv`, by the first version that has it so.
#[derive(Clone, Copy)]
pub enum Irecv {
    V8(IrecvBare<c_int>),
    V9(IrecvBare<usize>),
    V10(IrecvProfiled),
}

pub type Devices = unsafe extern "C" fn(*mut c_int) -> Code;
/// The second argument is one of [`Properties`].
pub type GetProperties = unsafe extern "C" fn(c_int, *mut Properties) -> Code;
pub type Accept = unsafe extern "C" fn(Pointer, *mut Pointer, *mut *mut NetDeviceHandle) -> Code;
pub type RegMr = unsafe extern "C" fn(Pointer, Pointer, usize, c_int, *mut Pointer) -> Code;
pub type DeregMr = unsafe extern "C" fn(Pointer, Pointer) -> Code;
pub type Test = unsafe extern "C" fn(Pointer, *mut c_int, *mut c_int) -> Code;
pub type Close = unsafe extern "C" fn(Pointer) -> Code;

/// `ncclNetProperties` of any version: versions 9 to 12 begin alike, and the last is the longest.
#[repr(C)]
pub union Properties {
    pub v8: std::mem::ManuallyDrop<PropertiesV8>,
    pub v9: std::mem::ManuallyDrop<PropertiesV12>,
}

/// `ncclNet_v8_t`, with the field names of NCCL's header, and what all later versions begin with.
#[repr(C)]
#[allow(non_snake_case)]
pub struct Net<I, L, C, S, R> {
    pub name: *const c_char,
    pub init: Option<I>,
    pub devices: Option<Devices>,
    pub getProperties: Option<GetProperties>,
    pub listen: Option<L>,
    pub connect: Option<C>,
    pub accept: Option<Accept>,
    pub regMr: Option<RegMr>,
    pub regMrDmaBuf: Pointer,
    pub deregMr: Option<DeregMr>,
    pub isend: Option<S>,
    pub irecv: Option<R>,
    pub iflush: Pointer,
    pub test: Option<Test>,
    pub closeSend: Option<Close>,
    pub closeRecv: Option<Close>,
    pub closeListen: Option<Close>,
    pub getDeviceMr: Pointer,
    pub irecvConsumed: Pointer,
}

/// What follows from version 11 on.
#[repr(C)]
#[allow(non_snake_case)]
pub struct NetFinal<T> {
    pub net: T,
    pub makeVDevice: Pointer,
    pub finalize: Option<Close>,
}

/// `ncclNet_v8_t`.
pub type NetV8 = Net<InitV8, ListenV8, ConnectV8, IsendV8, IrecvBare<c_int>>;
/// `ncclNet_v9_t`, without its end.
pub type NetV9 = Net<InitV8, ListenV8, ConnectV8, IsendV9, IrecvBare<usize>>;
/// `ncclNet_v10_t`, without its end.
pub type NetV10 = Net<InitV10, ListenV8, ConnectV10, IsendV10, IrecvProfiled>;
/// `ncclNet_v11_t` and `ncclNet_v12_t`, without their end: they differ in the properties alone.
pub type NetV11 = NetFinal<Net<InitV11, ListenV11, ConnectV11, IsendV10, IrecvProfiled>>;

impl NetV8 {
    pub fn functions(&self) -> Functions {
        self.common(8, Init::V8, Listen::V8, Connect::V8, Isend::V8, Irecv::V8)
    }
}

impl NetV9 {
    pub fn functions(&self) -> Functions {
        self.common(9, Init::V8, Listen::V8, Connect::V8, Isend::V9, Irecv::V9)
    }
}

impl NetV10 {
    pub fn functions(&self) -> Functions {
        self.common(10, Init::V10, Listen::V8, Connect::V10, Isend::V10, Irecv::V10)
    }
}

impl NetV11 {
    /// `version`: 11 or 12.
    pub fn functions(&self, version: u32) -> Functions {
        let begin = self.net.common(version, Init::V11, Listen::V11, Connect::V11, Isend::V10, Irecv::V10);
        Functions { finalize: self.finalize, ..begin }
    }
}

impl<I: Copy, L: Copy, C: Copy, S: Copy, R: Copy> Net<I, L, C, S, R> {
    fn common(
        &self,
        version: u32,
        init: fn(I) -> Init,
        listen: fn(L) -> Listen,
        connect: fn(C) -> Connect,
        isend: fn(S) -> Isend,
        irecv: fn(R) -> Irecv,
    ) -> Functions {
        Functions {
            version,
            name: self.name,
            init: self.init.map(init),
            devices: self.devices,
            get_properties: self.getProperties,
            listen: self.listen.map(listen),
            connect: self.connect.map(connect),
            accept: self.accept,
            reg_mr: self.regMr,
            dereg_mr: self.deregMr,
            isend: self.isend.map(isend),
            irecv: self.irecv.map(irecv),
            test: self.test,
            close_send: self.closeSend,
            close_recv: self.closeRecv,
            close_listen: self.closeListen,
            finalize: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use nccl_net_spark::abi::{self, types};
    use std::mem::{offset_of, size_of};

    macro_rules! same_place {
        ($ours:ty, $plugins:ty: $($name:ident $theirs:ident)*) => {
            $(assert_eq!(offset_of!($ours, $name), offset_of!($plugins, $theirs), stringify!($name));)*
        };
    }

    macro_rules! same_beginning {
        ($($ours:ty, $plugins:ty;)*) => {
            $(same_place! { $ours, $plugins:
                name name
                init init
                devices devices
                getProperties get_properties
                listen listen
                connect connect
                accept accept
                regMr reg_mr
                regMrDmaBuf reg_mr_dma_buf
                deregMr dereg_mr
                isend isend
                irecv irecv
                iflush iflush
                test test
                closeSend close_send
                closeRecv close_recv
                closeListen close_listen
                getDeviceMr get_device_mr
                irecvConsumed irecv_consumed
            })*
        };
    }

    type Begin11 =
        super::Net<super::InitV11, super::ListenV11, super::ConnectV11, super::IsendV10, super::IrecvProfiled>;

    #[test]
    fn the_tables_have_the_plugins_shapes() {
        same_beginning! {
            super::NetV8, abi::NetV8;
            super::NetV9, abi::NetV9;
            super::NetV10, abi::NetV10;
            Begin11, abi::NetV11;
            Begin11, abi::NetV12;
        }
        same_place! { super::NetV11, abi::NetV11: net name makeVDevice make_v_device finalize finalize }
        same_place! { super::NetV11, abi::NetV12: net name makeVDevice make_v_device finalize finalize }
        assert_eq!(size_of::<super::NetV8>(), size_of::<abi::NetV8>());
    }

    #[test]
    fn the_properties_have_room_for_every_version_and_begin_alike() {
        let room = size_of::<super::Properties>();
        for size in
            [size_of::<types::PropertiesV8>(), size_of::<types::PropertiesV9>(), size_of::<types::PropertiesV12>()]
        {
            assert!(room >= size);
        }
        macro_rules! alike {
            ($($field:ident)*) => {
                $(
                    assert_eq!(offset_of!(types::PropertiesV12, $field), offset_of!(types::PropertiesV9, $field));
                    assert_eq!(offset_of!(types::PropertiesV12, $field), offset_of!(types::PropertiesV11, $field));
                )*
            };
        }
        alike! { name guid ptr_support speed max_comms }
        assert!(room >= size_of::<types::PropertiesV11>());
    }
}
