//! The C header has NCCL's function types, and the Rust tables have the C header's function types.
//!
//! A test that compiles against NCCL's headers is skipped if no variable names their folder:
//! `NCCL_NET_HEADERS` names the folder of plugins' `net.h` (`plugins/net/example/nccl`),
//! `NCCL_TUNER_HEADERS` names the folder of `tuner_v7.h` (`src/include/plugin/tuner`). A C file
//! cannot have two structs of one name, so our structs are compiled under other names. In our
//! renamed structs, a field whose type is another struct still has NCCL's struct as its type.

mod common;

use nccl_abi::net::*;
use nccl_abi::tuner::*;
use nccl_abi::{DebugLogger, NcclResult};
use nccl_net_spark::abi::*;
use std::ffi::{c_int, c_void};
use std::fmt::Write;

#[test]
fn the_rust_tables_have_the_headers_function_types() {
    let header = std::fs::read_to_string(common::repository("include/nccl_net_spark.h")).unwrap();
    let structs = structs_of(&header);
    let of_c = |name: &str, field: &str| {
        let found = structs.iter().find(|one| one.name == name);
        parameters_in(
            &found
                .unwrap_or_else(|| panic!("the header has no {name}"))
                .text,
            field,
        )
    };
    macro_rules! compare {
        ($table:expr, $c:literal: $($field:ident)*) => {
            $(assert_eq!(parameters_of(&$table.$field), of_c($c, stringify!($field)), "{}.{}", $c, stringify!($field));)*
        };
    }
    macro_rules! compare_net {
        ($table:ident, $c:literal: $($more:ident)*) => {
            compare!($table, $c: init devices get_properties listen connect accept reg_mr reg_mr_dma_buf dereg_mr isend irecv
                iflush test close_send close_recv close_listen get_device_mr irecv_consumed);
            compare!($table.more, $c: $($more)*);
        };
    }
    compare_net!(ncclNetPlugin_v8, "ncclNet_v8_t":);
    compare_net!(ncclNetPlugin_v9, "ncclNet_v9_t": make_v_device);
    compare_net!(ncclNetPlugin_v10, "ncclNet_v10_t": make_v_device);
    compare_net!(ncclNetPlugin_v11, "ncclNet_v11_t": make_v_device finalize set_net_attr);
    compare_net!(ncclNetPlugin_v12, "ncclNet_v12_t": make_v_device finalize set_net_attr);
    compare!(ncclTunerPlugin_v4, "ncclTuner_v4_t": init get_coll_info);
    assert_eq!(
        parameters_of(&ncclTunerPlugin_v4.finalize),
        of_c("ncclTuner_v4_t", "destroy")
    );
    compare!(ncclTunerPlugin_v5, "ncclTuner_v5_t": init get_coll_info finalize);
    compare!(ncclTunerPlugin_v6, "ncclTuner_v6_t": init get_coll_info finalize);
    compare!(ncclTunerPlugin_v6.more, "ncclTuner_v6_t": get_chunk_size);
    compare!(ncclTunerPlugin_v7, "ncclTuner_v7_t": init get_coll_info finalize);
    compare!(ncclTunerPlugin_v7.more, "ncclTuner_v7_t": get_chunk_size);
}

#[test]
fn every_member_has_nccls_type() {
    let Ok(folder) = std::env::var("NCCL_NET_HEADERS") else {
        return common::skip::skip("NCCL_NET_HEADERS does not name the folder of NCCL's headers");
    };
    let header = std::fs::read_to_string(common::repository("include/nccl_net_spark.h")).unwrap();
    let mut structs = structs_of(&header);
    structs.retain(|one| one.name.starts_with("ncclNet"));
    assert_eq!(
        structs.len(),
        22,
        "structs in the header: v8 to v12, and the device handle"
    );
    let check = |structs: &[Struct]| check("#include \"net.h\"\n", &folder, structs);
    check(&structs).unwrap();

    // The comparison must find each planted error, such as v8's int sizes where v9 has size_t.
    for (table, right, wrong) in [
        ("ncclNet_v9_t", "size_t* sizes", "int* sizes"),
        ("ncclNet_v9_t", "size_t size, int tag", "int size, int tag"),
        (
            "ncclNet_v11_t",
            "void* ctx, int dev, void* handle, void** listenComm",
            "int dev, void* handle, void** listenComm",
        ),
        (
            "ncclNetProperties_v12_t",
            "int16_t railId",
            "uint16_t railId",
        ),
        (
            "ncclNetProperties_v8_t",
            "ncclNetDeviceType netDeviceType",
            "int netDeviceType",
        ),
    ] {
        let broken: Vec<Struct> = structs
            .iter()
            .filter(|one| one.name == table)
            .map(|one| Struct {
                text: one.text.replacen(right, wrong, 1),
                ..one.clone()
            })
            .collect();
        assert_ne!(
            broken[0].text,
            structs.iter().find(|one| one.name == table).unwrap().text,
            "{right}"
        );
        let complaint = check(&broken).expect_err("a wrong type must not compile");
        assert!(
            complaint.contains(&format!("type of {table}.")),
            "{table} with {wrong:?}: {complaint}"
        );
    }
}

#[test]
fn every_member_of_the_tuner_has_nccls_type() {
    let Ok(folder) = std::env::var("NCCL_TUNER_HEADERS") else {
        return common::skip::skip("NCCL_TUNER_HEADERS does not name the folder of NCCL's headers");
    };
    let header = std::fs::read_to_string(common::repository("include/nccl_net_spark.h")).unwrap();
    let mut structs = structs_of(&header);
    structs.retain(|one| !one.name.starts_with("ncclNet"));
    assert_eq!(
        structs.len(),
        7,
        "structs in the header: the tuner's v4 to v7, two that v5 refers to, one that v7 does"
    );
    // These types are in nccl.h and nccl_common.h, which need CUDA's headers. The tuner headers use
    // the types, but include nothing.
    let head = "typedef enum { ncclSuccess } ncclResult_t;\ntypedef enum { ncclFuncBroadcast } ncclFunc_t;\n\
                typedef enum { NCCL_LOG_NONE } ncclDebugLogLevel;\n\
                typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel, unsigned long, const char*, int, const char*, ...);\n\
                #include \"tuner_v4.h\"\n#include \"tuner_v7.h\"\n";
    check(head, &folder, &structs).unwrap();

    let broken = |one: &Struct| Struct {
        text: one.text.replacen("uint64_t commId, ", "", 1),
        ..one.clone()
    };
    let broken: Vec<Struct> = structs
        .iter()
        .filter(|one| one.name == "ncclTuner_v5_t")
        .map(broken)
        .collect();
    let complaint = check(head, &folder, &broken).expect_err("a wrong type must not compile");
    assert!(
        complaint.contains("type of ncclTuner_v5_t.init"),
        "{complaint}"
    );
}

#[test]
fn the_header_compiles_beside_nccls() {
    let Ok(folder) = std::env::var("NCCL_NET_HEADERS") else {
        return common::skip::skip("NCCL_NET_HEADERS does not name the folder of NCCL's headers");
    };
    let text = "#include \"net.h\"\n#define NCCL_NET_SPARK_HAVE_NCCL\n#include \"nccl_net_spark.h\"\n\
                const ncclNet_v12_t* newest(void) { return &ncclNetPlugin_v12; }\nconst ncclNet_v12_t* newest(void);\n";
    common::compiles(text, &["-I", &folder]).unwrap();
}

#[derive(Clone)]
struct Struct {
    name: String,
    text: String,
    members: Vec<String>,
}

/// Compiles C code that compares our structs with NCCL's structs of the same names. `head` is the C
/// code that declares or includes NCCL's types. The error has the compiler's messages.
fn check(head: &str, folder: &str, structs: &[Struct]) -> Result<(), String> {
    let mut c = format!("#include <stddef.h>\n#include <stdint.h>\n{head}");
    for Struct {
        name,
        text,
        members,
    } in structs
    {
        writeln!(c, "typedef struct {text} ours_{name};").unwrap();
        for member in members {
            writeln!(
                c,
                "_Static_assert(__builtin_types_compatible_p(__typeof__(((ours_{name}*)0)->{member}), \
                 __typeof__((({name}*)0)->{member})), \"type of {name}.{member}\");"
            )
            .unwrap();
        }
        writeln!(
            c,
            "_Static_assert(sizeof(ours_{name}) == sizeof({name}), \"size of {name}\");"
        )
        .unwrap();
        writeln!(c, "void to_{name}({name}* theirs, ours_{name}* ours);").unwrap();
        writeln!(c, "void to_{name}({name}* theirs, ours_{name}* ours) {{").unwrap();
        for member in members
            .iter()
            .filter(|member| !text.contains(&format!(" {member}[")))
        {
            writeln!(
                c,
                "  theirs->{member} = ours->{member}; ours->{member} = theirs->{member};"
            )
            .unwrap();
        }
        writeln!(c, "}}").unwrap();
    }
    common::compiles(
        &c,
        &[
            "-Werror=incompatible-pointer-types",
            "-Wno-unused-parameter",
            "-I",
            folder,
        ],
    )
}

/// Finds structs of the form `typedef struct {`, one member per line, `} name;`.
fn structs_of(header: &str) -> Vec<Struct> {
    let blocks = header.split("typedef struct ").skip(1);
    blocks
        .map(|block| {
            let (body, rest) = block
                .split_once("\n}")
                .expect("a closing brace at the start of a line");
            let name = rest.split(';').next().expect("a name").trim().to_owned();
            let members = body
                .trim_start_matches('{')
                .split(';')
                .filter_map(member)
                .collect();
            Struct {
                name,
                text: format!("{body}\n}}"),
                members,
            }
        })
        .collect()
}

/// Returns the name that a C declaration declares.
fn member(declaration: &str) -> Option<String> {
    let code = declaration.rsplit("*/").next()?.trim();
    let name = match code.split_once("(*") {
        Some((_, function)) => function.split(')').next()?,
        None => code.rsplit([' ', '*']).next()?.split('[').next()?,
    };
    (!name.is_empty()).then(|| name.to_owned())
}

/// Returns the parameter types of the function pointer `field` of a C struct, in order.
fn parameters_in(text: &str, field: &str) -> String {
    let wanted = field.replace('_', "").to_lowercase();
    let function = text.split(";\n").find_map(|declaration| {
        let (name, parameters) = declaration.split_once("(*")?.1.split_once(")(")?;
        (name.to_lowercase() == wanted)
            .then(|| parameters.trim_end().trim_end_matches(')').to_owned())
    });
    let parameters = function.unwrap_or_else(|| panic!("{field} in {text}"));
    let types = parameters
        .split(',')
        .map(|one| plain(one.trim().rsplit_once(' ').expect("a type and a name").0));
    types.collect::<Vec<_>>().join(", ")
}

/// Returns the name that `c_types` has for a C type. Versions of a struct that share one Rust type
/// get one name.
fn plain(c: &str) -> String {
    let merged = |from: &str, to: &str, text: String| text.replace(from, to);
    let mut text = merged("Properties_v10_t", "Properties_v9_t", c.to_owned());
    // C passes an enum without negative values, such as this one, like an int. The plugin declares
    // an int, because a Rust enum must not hold a number that none of its variants has.
    text = merged("ncclFunc_t", "int", text);
    for version in ["v6", "v7"] {
        text = merged(
            &format!("NvlDomainInfo_{version}_t"),
            "NvlDomainInfo_v5_t",
            text,
        );
    }
    text = merged("TunerConstants_v6_t", "TunerConstants_v5_t", text);
    for version in ["v9", "v10", "v11"] {
        text = merged(&format!("VDeviceProps_{version}_t"), "VDeviceProps_4", text);
    }
    text = merged("VDeviceProps_v12_t", "VDeviceProps_8", text);
    for (name, version) in ["DeviceHandle", "CommConfig", "Attr"]
        .into_iter()
        .flat_map(|n| (8..=12).map(move |v| (n, v)))
    {
        text = merged(
            &format!("ncclNet{name}_v{version}_t"),
            &format!("ncclNet{name}_t"),
            text,
        );
    }
    text
}

fn parameters_of<F: Function>(_: &Option<F>) -> String {
    F::parameters().join(", ")
}

trait Function {
    fn parameters() -> Vec<String>;
}

macro_rules! functions {
    ($(($($parameter:ident)*))*) => {$(
        impl<$($parameter: C),*> Function for unsafe extern "C" fn($($parameter),*) -> NcclResult {
            fn parameters() -> Vec<String> {
                vec![$($parameter::name()),*]
            }
        }
    )*};
}

functions! { (A) (A B) (A B D) (A B D E) (A B D E F) (A B D E F G) (A B D E F G H) (A B D E F G H I) (A B D E F G H I J) }

/// A type with its name in C.
trait C {
    fn name() -> String;
}

macro_rules! c_types {
    ($($type:ty = $name:literal;)*) => {$(
        impl C for $type {
            fn name() -> String {
                $name.into()
            }
        }
    )*};
}

c_types! {
    c_int = "int";
    f32 = "float";
    usize = "size_t";
    u64 = "uint64_t";
    c_void = "void";
    Option<DebugLogger> = "ncclDebugLogger_t";
    Option<ProfilerCallback> = "ncclProfilerCallback_t";
    NetDeviceHandle = "ncclNetDeviceHandle_t";
    CommConfig = "ncclNetCommConfig_t";
    NetAttr = "ncclNetAttr_t";
    NvlDomainInfo = "ncclNvlDomainInfo_v5_t";
    TunerConstants<4> = "ncclTunerConstants_v5_t";
    TunerConstants<5> = "ncclTunerConstants_v7_t";
    VDeviceProps<4> = "ncclNetVDeviceProps_4";
    VDeviceProps<8> = "ncclNetVDeviceProps_8";
    PropertiesV8 = "ncclNetProperties_v8_t";
    PropertiesV9 = "ncclNetProperties_v9_t";
    PropertiesV11 = "ncclNetProperties_v11_t";
    PropertiesV12 = "ncclNetProperties_v12_t";
}

impl<T: C> C for *mut T {
    fn name() -> String {
        T::name() + "*"
    }
}

impl<T: C> C for *const T {
    fn name() -> String {
        T::name() + "*"
    }
}
