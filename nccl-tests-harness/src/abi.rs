//! The functions of a plugin's network table, for all versions of NCCL's interface. A function
//! whose type differs between versions is an enum.

use nccl_abi::net::functions::{
    Accept, Close, ConnectV8, ConnectV10, ConnectV11, DeregMr, Devices, Finalize,
    GetProperties as GetPropertiesFn, InitV8, InitV10, InitV11, IrecvV8, IrecvV9, IrecvV10,
    IsendV8, IsendV9, IsendV10, ListenV8, ListenV11, RegMr, Test,
};
use nccl_abi::net::{NET_VERSIONS, Net, PropertiesV8, PropertiesV9, PropertiesV11};
use std::ffi::c_char;

/// Returns a parser for an option whose value is one of [`NET_VERSIONS`].
pub fn version_parser() -> clap::builder::RangedI64ValueParser<u32> {
    let (oldest, newest) = (*NET_VERSIONS.start(), *NET_VERSIONS.end());
    clap::value_parser!(u32).range(i64::from(oldest)..=i64::from(newest))
}

#[derive(Clone, Copy)]
pub(crate) struct Functions {
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
    /// Exists since version 11 of the interface.
    pub finalize: Option<Finalize>,
}

/// Defines an enum for a function. Each variant has one type of the function and is named after the
/// first version with this type.
macro_rules! versioned_functions {
    ($($function:ident: $($version:ident($type:ty))*;)*) => {$(
        #[derive(Clone, Copy)]
        pub(crate) enum $function {
            $($version($type),)*
        }

        $(impl From<$type> for $function {
            fn from(function: $type) -> Self {
                Self::$version(function)
            }
        })*
    )*};
}

versioned_functions! {
    Init: V8(InitV8) V10(InitV10) V11(InitV11);
    GetProperties: V8(GetPropertiesFn<PropertiesV8>) V9(GetPropertiesFn<PropertiesV9>)
        V11(GetPropertiesFn<PropertiesV11>);
    Listen: V8(ListenV8) V11(ListenV11);
    Connect: V8(ConnectV8) V10(ConnectV10) V11(ConnectV11);
    Isend: V8(IsendV8) V9(IsendV9) V10(IsendV10);
    Irecv: V8(IrecvV8) V9(IrecvV9) V10(IrecvV10);
}

impl Functions {
    pub(crate) fn of<I, P, L, C, S, R, M>(
        version: u32,
        net: &Net<I, P, L, C, S, R, M>,
        finalize: Option<Finalize>,
    ) -> Self
    where
        I: Into<Init> + Copy,
        GetPropertiesFn<P>: Into<GetProperties>,
        L: Into<Listen> + Copy,
        C: Into<Connect> + Copy,
        S: Into<Isend> + Copy,
        R: Into<Irecv> + Copy,
    {
        Self {
            version,
            name: net.name,
            init: net.init.map(Into::into),
            devices: net.devices,
            get_properties: net.get_properties.map(Into::into),
            listen: net.listen.map(Into::into),
            connect: net.connect.map(Into::into),
            accept: net.accept,
            reg_mr: net.reg_mr,
            dereg_mr: net.dereg_mr,
            isend: net.isend.map(Into::into),
            irecv: net.irecv.map(Into::into),
            test: net.test,
            close_send: net.close_send,
            close_recv: net.close_recv,
            close_listen: net.close_listen,
            finalize,
        }
    }
}
