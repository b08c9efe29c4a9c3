//! The Rust declarations of `crates/nccl` have the layouts of NCCL's structs, and the function
//! types of our C header.

mod abi;
mod common;

use abi::{Header, nccls_structs};
use nccl_abi::net::*;
use nccl_abi::tuner::*;
use nccl_abi::{DebugLogger, NcclResult};
use nccl_net_spark::abi::*;
use std::any::type_name;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;

/// A Rust struct. Numbers are in bytes.
struct Declaration {
    type_name: &'static str,
    size: usize,
    /// For each field: its name in snake case, its offset and its size.
    fields: Vec<(&'static str, usize, usize)>,
    /// For each field that is a function: its name in snake case and its type.
    functions: Vec<(&'static str, &'static str)>,
}

macro_rules! layout {
    ($type:ty: $($field:ident)* $(; more: $($more:ident)*)?) => {
        Declaration {
            type_name: type_name::<$type>(),
            size: size_of::<$type>(),
            fields: vec![
                $((stringify!($field), offset_of!($type, $field), size_of_field(|fields: &$type| &fields.$field)),)*
                $($((stringify!($more), offset_of!($type, more.$more), size_of_field(|fields: &$type| &fields.more.$more)),)*)?
            ],
            functions: Vec::new(),
        }
    };
}

macro_rules! table {
    ($type:ty: $($function:ident)*; more: $($more:ident)*) => {
        Declaration {
            functions: vec![
                $((stringify!($function), function_type(|table: &$type| &table.$function)),)*
                $((stringify!($more), function_type(|table: &$type| &table.more.$more)),)*
            ],
            ..layout!($type: name $($function)*; more: $($more)*)
        }
    };
}

macro_rules! net {
    ($type:ty: $($more:ident)*) => {
        table!($type: init devices get_properties listen connect accept reg_mr reg_mr_dma_buf dereg_mr isend irecv iflush
            test close_send close_recv close_listen get_device_mr irecv_consumed; more: $($more)*)
    };
}

macro_rules! properties {
    ($type:ty: $($more:ident)*) => {
        layout!($type: name pci_path guid ptr_support reg_is_global force_flush speed port latency max_comms max_recvs
            net_device_type net_device_version; more: $($more)*)
    };
}

fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

fn function_type<T, F>(_: fn(&T) -> &Option<F>) -> &'static str {
    type_name::<F>()
}

/// Returns the Rust struct for a struct of NCCL's.
fn declaration_of(name: &str) -> Option<Declaration> {
    let short = name.strip_prefix("ncclNet").unwrap_or(name);
    Some(match short {
        "Properties_v8_t" => {
            layout!(PropertiesV8: name pci_path guid ptr_support reg_is_global speed port latency
            max_comms max_recvs net_device_type net_device_version)
        }
        "Properties_v9_t" | "Properties_v10_t" => {
            properties!(PropertiesV9: v_props max_p2p_bytes max_coll_bytes)
        }
        "Properties_v11_t" => properties!(PropertiesV11: v_props max_p2p_bytes max_coll_bytes
            max_multi_request_size),
        "Properties_v12_t" => properties!(PropertiesV12: v_props max_p2p_bytes max_coll_bytes
            max_multi_request_size rail_id plane_id),
        "VDeviceProps_v9_t" | "VDeviceProps_v10_t" | "VDeviceProps_v11_t" => {
            layout!(VDeviceProps<4>: ndevs devs)
        }
        "VDeviceProps_v12_t" => layout!(VDeviceProps<8>: ndevs devs),
        "CommConfig_v10_t" | "CommConfig_v11_t" | "CommConfig_v12_t" => {
            layout!(CommConfig: traffic_class)
        }
        "CommAttr_v11_t" | "CommAttr_v12_t" => {
            layout!(CommAttr: max_concurrent_peers min_concurrent_peers
            max_flows_per_peer min_flows_per_peer)
        }
        "Attr_v11_t" | "Attr_v12_t" => {
            layout!(NetAttr: send_comm_attr recv_comm_attr op algo proto)
        }
        "DeviceHandle_v8_t" => {
            layout!(NetDeviceHandle: net_device_type net_device_version handle size
            needs_proxy_progress)
        }
        "_v8_t" => net!(NetV8:),
        "_v9_t" => net!(NetV9: make_v_device),
        "_v10_t" => net!(NetV10: make_v_device),
        "_v11_t" => net!(NetV11: make_v_device finalize set_net_attr),
        "_v12_t" => net!(NetV12: make_v_device finalize set_net_attr),
        "ncclNvlDomainInfo_v5_t" => {
            layout!(NvlDomainInfo: n_nvl_domains min_ranks_per_nvl_domain max_ranks_per_nvl_domain)
        }
        "ncclTunerConstants_v5_t" => {
            layout!(TunerConstants<4>: base_latencies hw_latencies ll_max_bws per_ch_max_ring_ll128_bws
            per_ch_max_tree_ll128_bws per_ch_max_tree_bws per_ch_max_nvls_tree_bws)
        }
        "ncclTunerConstants_v7_t" => {
            layout!(TunerConstants<5>: base_latencies hw_latencies ll_max_bws per_ch_max_ring_ll128_bws
            per_ch_max_tree_ll128_bws per_ch_max_tree_bws per_ch_max_nvls_tree_bws)
        }
        "ncclTuner_v4_t" => table!(TunerV4: init get_coll_info finalize; more:),
        "ncclTuner_v5_t" => table!(TunerV5: init get_coll_info finalize; more:),
        "ncclTuner_v6_t" => table!(TunerV6: init get_coll_info finalize; more: get_chunk_size),
        "ncclTuner_v7_t" => table!(TunerV7: init get_coll_info finalize; more: get_chunk_size),
        _ => return None,
    })
}

/// Returns the name that a field of our Rust struct has in C, in the form of [`plain`].
fn c_name(of: &str, field: &str) -> String {
    match (of, field) {
        ("ncclTuner_v4_t", "finalize") => "destroy".to_owned(),
        _ => plain(field),
    }
}

#[test]
fn the_rust_types_are_laid_out_as_nccls() {
    let structs = nccls_structs();
    for version in NET_VERSIONS {
        for name in ["ncclNet", "ncclNetProperties"] {
            let name = format!("{name}_v{version}_t");
            assert!(structs.contains_key(&name), "no layout of NCCL's {name}");
        }
    }
    for (name, expected) in structs {
        let ours = declaration_of(&name)
            .unwrap_or_else(|| panic!("{name} has no Rust type to compare with"));
        assert_eq!(ours.size, expected.size, "size of {name}");
        let ours: Vec<_> = ours
            .fields
            .iter()
            .map(|(field, offset, size)| (c_name(&name, field), *offset, *size))
            .collect();
        let theirs: Vec<_> = expected
            .fields
            .iter()
            .map(|field| (plain(&field.name), field.offset, field.size))
            .collect();
        assert_eq!(ours, theirs, "fields of {name}");
    }
}

#[test]
fn the_rust_tables_have_the_headers_function_types() {
    let header = Header::read();
    for symbol in header.tables() {
        let name = symbol.replace("Plugin", "") + "_t";
        let c = &header.find(&name).text;
        let functions = declaration_of(&name)
            .unwrap_or_else(|| panic!("{name} has no Rust type to compare with"))
            .functions;
        assert!(functions.len() > 2, "{name}: {functions:?}");
        for (field, ours) in functions {
            let parameters = parameters_in(c, &c_name(&name, field));
            let types: Vec<_> = parameters.iter().map(|c| rust_type(&header, c)).collect();
            let result = type_name::<NcclResult>();
            let theirs = format!("unsafe extern \"C\" fn({}) -> {result}", types.join(", "));
            assert_eq!(pointers(ours), theirs, "{name}.{field}");
        }
    }
}

/// Returns the parameter types of a function pointer of a C struct, in order. `wanted` is the
/// pointer's name in the form of [`plain`].
fn parameters_in(text: &str, wanted: &str) -> Vec<String> {
    let function = text.split(";\n").find_map(|declaration| {
        let (name, parameters) = declaration.split_once("(*")?.1.split_once(")(")?;
        (plain(name) == wanted).then(|| parameters.trim_end().trim_end_matches(')').to_owned())
    });
    let parameters = function.unwrap_or_else(|| panic!("{wanted} in {text}"));
    let types = parameters.split(',');
    types
        .map(|one| one.trim().rsplit_once(' ').expect("a type and a name").0)
        .map(str::to_owned)
        .collect()
}

/// Returns the Rust type for the type of a C parameter, as `type_name` writes it, except for
/// [`pointers`].
fn rust_type(header: &Header, c: &str) -> String {
    let pointee = c.trim_end_matches('*');
    let name = match header.resolve(pointee) {
        // C passes an enum without negative values, such as ncclFunc_t, like an int. The plugin
        // declares an int, because a Rust enum must not hold a number that none of its variants
        // has.
        "int" | "ncclFunc_t" => type_name::<c_int>(),
        "float" => type_name::<f32>(),
        "size_t" => type_name::<usize>(),
        "uint64_t" => type_name::<u64>(),
        "void" => type_name::<c_void>(),
        "ncclDebugLogger_t" => type_name::<Option<DebugLogger>>(),
        "ncclProfilerCallback_t" => type_name::<Option<ProfilerCallback>>(),
        name => {
            let found = declaration_of(name);
            found
                .unwrap_or_else(|| panic!("no Rust type for {name}"))
                .type_name
        }
    };
    "*".repeat(c.len() - pointee.len()) + &pointers(name)
}

/// Writes pointers without `mut` and `const`: NCCL's header has no `const` pointers to structs.
fn pointers(rust: &str) -> String {
    rust.replace("*mut ", "*").replace("*const ", "*")
}

#[test]
fn the_tables_name_the_network_and_have_null_for_missing_functions() {
    assert!(ncclNetPlugin_v8.reg_mr_dma_buf.is_none() && ncclNetPlugin_v8.iflush.is_some());
    assert!(ncclNetPlugin_v12.more.make_v_device.is_none());
    let all_there = [
        ncclNetPlugin_v11.more.set_net_attr,
        ncclNetPlugin_v12.more.set_net_attr,
    ];
    assert!(all_there.iter().all(Option::is_some));
    assert!(ncclNetPlugin_v11.more.finalize.is_some() && ncclNetPlugin_v12.more.finalize.is_some());
    let names = [
        ncclNetPlugin_v8.name,
        ncclNetPlugin_v9.name,
        ncclNetPlugin_v10.name,
        ncclNetPlugin_v11.name,
        ncclNetPlugin_v12.name,
    ];
    assert!(names.iter().all(|name| !name.is_null()));
}

#[test]
fn the_tuners_tables_have_a_name_and_all_but_get_chunk_size() {
    let v4 = &ncclTunerPlugin_v4;
    let v5 = &ncclTunerPlugin_v5;
    let v6 = &ncclTunerPlugin_v6;
    let v7 = &ncclTunerPlugin_v7;
    assert!(
        [v4.name, v5.name, v6.name, v7.name]
            .iter()
            .all(|name| !name.is_null())
    );
    assert!(v4.init.is_some() && v4.get_coll_info.is_some() && v4.finalize.is_some());
    assert!(v5.init.is_some() && v5.get_coll_info.is_some() && v5.finalize.is_some());
    assert!(v6.init.is_some() && v6.get_coll_info.is_some() && v6.finalize.is_some());
    assert!(v7.init.is_some() && v7.get_coll_info.is_some() && v7.finalize.is_some());
    assert!(v6.more.get_chunk_size.is_none() && v7.more.get_chunk_size.is_none());
}

/// Reduces a field's Rust name and C name to the same text: `reg_mr_dma_buf` and `regMrDmaBuf` both
/// become `regmrdmabuf`. This also works for names like `perChMaxNVLSTreeBws`.
fn plain(name: &str) -> String {
    name.replace('_', "").to_lowercase()
}
