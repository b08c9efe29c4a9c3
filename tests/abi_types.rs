//! Our C header has the layouts of NCCL's structs, and NCCL's types.
//!
//! A test that compiles against NCCL's headers is skipped if no variable names their folder:
//! `NCCL_NET_HEADERS` names the folder of plugins' `net.h` (`plugins/net/example/nccl`),
//! `NCCL_TUNER_HEADERS` names the folder of `tuner_v7.h` (`src/include/plugin/tuner`). A C file
//! cannot have two structs of one name, so our structs are compiled under other names. In our
//! renamed structs, a field whose type is another struct still has NCCL's struct as its type.

mod abi;
mod common;

use abi::{Field, Header, Struct, nccls_structs};
use std::fmt::Write;

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
fn every_member_has_nccls_type() {
    let Ok(folder) = std::env::var("NCCL_NET_HEADERS") else {
        return common::skip::skip("NCCL_NET_HEADERS does not name the folder of NCCL's headers");
    };
    let structs = structs_of(true);
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
    let structs = structs_of(false);
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

/// Returns the header's structs of the network's interface, or those of the tuner's.
fn structs_of(is_net: bool) -> Vec<Struct> {
    let structs = Header::read().structs.into_iter();
    let ours: Vec<_> = structs
        .filter(|one| one.name.starts_with("ncclNet") == is_net)
        .collect();
    for (name, _) in nccls_structs() {
        let is_here = ours.iter().any(|one| one.name == name);
        assert_eq!(is_here, name.starts_with("ncclNet") == is_net, "{name}");
    }
    ours
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
