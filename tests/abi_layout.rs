//! Every struct of the C interface has NCCL's sizes and offsets, both in Rust and in the C header.
//!
//! `abi/nccl_net_abi.json` and `abi/nccl_tuner_abi.json` are the output of a C compiler for NCCL's
//! own headers, on x86-64 and on aarch64.

mod common;

use nccl_abi::net::*;
use nccl_abi::tuner::*;
use nccl_net_spark::abi::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::mem::offset_of;

/// For each field: its name in snake case, its offset and its size. Both numbers are in bytes.
type Fields = Vec<(&'static str, usize, usize)>;

macro_rules! layout {
    ($type:ty: $($field:ident)* $(; more: $($more:ident)*)?) => {
        (size_of::<$type>(), vec![
            $((stringify!($field), offset_of!($type, $field), size_of_field(|fields: &$type| &fields.$field)),)*
            $($((stringify!($more), offset_of!($type, more.$more), size_of_field(|fields: &$type| &fields.more.$more)),)*)?
        ])
    };
}

macro_rules! table {
    ($type:ty: $($more:ident)*) => {
        layout!($type: name init devices get_properties listen connect accept reg_mr reg_mr_dma_buf dereg_mr isend irecv iflush
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

fn layout_of(name: &str) -> Option<(usize, Fields)> {
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
        "_v8_t" => table!(NetV8:),
        "_v9_t" => table!(NetV9: make_v_device),
        "_v10_t" => table!(NetV10: make_v_device),
        "_v11_t" => table!(NetV11: make_v_device finalize set_net_attr),
        "_v12_t" => table!(NetV12: make_v_device finalize set_net_attr),
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
        "ncclTuner_v4_t" => {
            let (size, mut fields) = layout!(TunerV4: name init get_coll_info finalize);
            fields[3].0 = "destroy";
            (size, fields)
        }
        "ncclTuner_v5_t" => layout!(TunerV5: name init get_coll_info finalize),
        "ncclTuner_v6_t" => {
            layout!(TunerV6: name init get_coll_info finalize; more: get_chunk_size)
        }
        "ncclTuner_v7_t" => {
            layout!(TunerV7: name init get_coll_info finalize; more: get_chunk_size)
        }
        _ => return None,
    })
}

#[test]
fn the_rust_types_are_laid_out_as_nccls() {
    for (name, expected) in nccls_structs() {
        let (size, fields) =
            layout_of(&name).unwrap_or_else(|| panic!("{name} has no Rust type to compare with"));
        assert_eq!(size, expected.size, "size of {name}");
        let ours: Vec<_> = fields
            .iter()
            .map(|(field, offset, size)| (plain(field), *offset, *size))
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
fn the_c_header_is_laid_out_as_nccls() {
    let mut text = String::from("#include \"nccl_net_spark.h\"\n");
    for (name, expected) in nccls_structs() {
        writeln!(
            text,
            "_Static_assert(sizeof({name}) == {}, \"size of {name}\");",
            expected.size
        )
        .unwrap();
        for Field {
            name: field,
            offset,
            size,
        } in expected.fields
        {
            let what = format!("{name}.{field}");
            writeln!(
                text,
                "_Static_assert(offsetof({name}, {field}) == {offset}, \"offset of {what}\");"
            )
            .unwrap();
            writeln!(
                text,
                "_Static_assert(sizeof((({name}*)0)->{field}) == {size}, \"size of {what}\");"
            )
            .unwrap();
        }
    }
    common::compiles(&text, &["-pedantic"]).unwrap();
    let wrong = text.replace(
        "offsetof(ncclNetProperties_v9_t, speed) == 36",
        "offsetof(ncclNetProperties_v9_t, speed) == 32",
    );
    assert_ne!(wrong, text);
    assert!(
        common::compiles(&wrong, &[])
            .unwrap_err()
            .contains("offset of ncclNetProperties_v9_t.speed")
    );
}

#[test]
fn the_tables_name_the_network_and_have_null_for_missing_functions() {
    assert!(ncclNetPlugin_v8.reg_mr_dma_buf.is_none() && ncclNetPlugin_v8.iflush.is_some());
    assert!(
        ncclNetPlugin_v12.more.make_v_device.is_none()
            && ncclNetPlugin_v12.more.set_net_attr.is_none()
    );
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

struct Struct {
    size: usize,
    fields: Vec<Field>,
}

struct Field {
    name: String,
    offset: usize,
    size: usize,
}

fn nccls_structs() -> BTreeMap<String, Struct> {
    let read = |file: &str| -> BTreeMap<String, Value> {
        let text = std::fs::read_to_string(common::repository("tests/abi").join(file)).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let net = read("nccl_net_abi.json");
    let tuner = read("nccl_tuner_abi.json");
    assert_eq!(
        (net.len(), tuner.len()),
        (21, 7),
        "structs of v8 to v12, and of the tuner's v4 to v7"
    );
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let field = |value: &Value| Field {
        name: value["name"].as_str().unwrap().to_owned(),
        offset: number(&value["offset"]),
        size: number(&value["size"]),
    };
    let all = net.into_iter().chain(tuner);
    all.map(|(name, value)| {
        let fields = value["fields"]
            .as_array()
            .unwrap()
            .iter()
            .map(field)
            .collect();
        (
            name,
            Struct {
                size: number(&value["size"]),
                fields,
            },
        )
    })
    .collect()
}

/// Reduces a field's Rust name and C name to the same text: `reg_mr_dma_buf` and `regMrDmaBuf` both
/// become `regmrdmabuf`. This also works for names like `perChMaxNVLSTreeBws`.
fn plain(name: &str) -> String {
    name.replace('_', "").to_lowercase()
}
