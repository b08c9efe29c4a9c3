//! Regenerates the bindings; for developers only.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "regenerate-bindings")]
    bindings::regenerate();
}

#[cfg(feature = "regenerate-bindings")]
mod bindings {
    /// Environment variable with a path to write to instead of `src/bindings.rs`. A test compares
    /// the file at this path with the checked-in one.
    const OUTPUT: &str = "VERBS_BINDINGS_OUTPUT";

    const HEAD: &str = "\
// Made by bindgen from bindings.h and the headers of rdma-core 44: see lib.rs. The text is the same
// for x86-64 and aarch64: what differs (`c_char`, pthread types) is named, not spelled out.
";

    /// Types that are generated with their fields, as regular expressions. With `.*` they include
    /// their anonymous unions and structs.
    const TYPES: &[&str] = &[
        "__be16",
        "__be32",
        "__be64",
        "__u16",
        "__u32",
        "__u64",
        "ib_uverbs_advise_mr_advice",
        "ibv_gid",
        "ibv_gid__.*",
        "ibv_gid_entry",
        "ibv_gid_type",
        "ibv_node_type",
        "ibv_transport_type",
        "ibv_atomic_cap",
        "ibv_device_attr",
        "ibv_mtu",
        "ibv_port_state",
        "ibv_port_attr",
        "ibv_port_cap_flags",
        "ibv_event_type",
        "ibv_async_event.*",
        "ibv_wc_status",
        "ibv_wc_opcode",
        "ibv_wc_flags",
        "ibv_wc",
        "ibv_wc__.*",
        "ibv_access_flags",
        "ibv_mw_bind_info",
        "ibv_mw_type",
        "ibv_pd",
        "ibv_td_init_attr",
        "ibv_td",
        "ibv_mr",
        "ibv_ece",
        "ibv_fork_status",
        "ibv_global_route",
        "ibv_ah_attr",
        "ibv_qp_type",
        "ibv_qp_cap",
        "ibv_qp_init_attr",
        "ibv_qp_attr_mask",
        "ibv_qp_state",
        "ibv_mig_state",
        "ibv_qp_attr",
        "ibv_wr_opcode",
        "ibv_send_flags",
        "ibv_sge",
        "ibv_send_wr.*",
        "ibv_recv_wr",
        "ibv_qp",
        "ibv_cq",
        "ibv_comp_channel",
        "_ibv_device_ops",
        "ibv_device",
        "ibv_context_ops",
        "ibv_context",
        "ibv_parent_domain_init_attr",
        "verbs_context",
        "fn__?ibv_.*",
    ];

    /// Constants outside the enums of `TYPES`.
    const CONSTANTS: &[&str] = &["LINK_LAYER_.*", "ACCESS_.*"];

    /// Opaque types: used only through pointers.
    const POINTED_AT: &[&str] = &[
        "_compat_ibv_port_attr",
        "ibv_ah",
        "ibv_alloc_dm_attr",
        "ibv_counter_attach_attr",
        "ibv_counters",
        "ibv_counters_init_attr",
        "ibv_cq_ex",
        "ibv_cq_init_attr_ex",
        "ibv_device_attr_ex",
        "ibv_dm",
        "ibv_flow",
        "ibv_flow_action",
        "ibv_flow_action_esp_attr",
        "ibv_flow_attr",
        "ibv_grh",
        "ibv_modify_cq_attr",
        "ibv_mw",
        "ibv_mw_bind",
        "ibv_ops_wr",
        "ibv_qp_ex",
        "ibv_qp_init_attr_ex",
        "ibv_qp_open_attr",
        "ibv_qp_rate_limit_attr",
        "ibv_query_device_ex_input",
        "ibv_rwq_ind_table",
        "ibv_rwq_ind_table_init_attr",
        "ibv_srq",
        "ibv_srq_attr",
        "ibv_srq_init_attr",
        "ibv_srq_init_attr_ex",
        "ibv_values_ex",
        "ibv_wq",
        "ibv_wq_attr",
        "ibv_wq_init_attr",
        "ibv_xrcd",
        "ibv_xrcd_init_attr",
        "verbs_ex_private",
    ];

    pub fn regenerate() {
        println!("cargo:rerun-if-changed=src/bindings.h");
        println!("cargo:rerun-if-env-changed={OUTPUT}");
        println!("cargo:rerun-if-env-changed=BINDGEN_EXTRA_CLANG_ARGS");
        let output = std::env::var(OUTPUT).unwrap_or_else(|_| "src/bindings.rs".to_owned());
        let mut builder = bindgen::builder()
            .header("src/bindings.h")
            .disable_header_comment()
            .raw_line(HEAD)
            .raw_line("use libc::{pthread_cond_t, pthread_mutex_t};\n")
            .rust_target(bindgen::RustTarget::stable(88, 0).expect("Rust 1.88 is known to bindgen"))
            .rust_edition(bindgen::RustEdition::Edition2024)
            .use_core()
            .ctypes_prefix("core::ffi")
            .allowlist_recursively(false)
            .default_enum_style(bindgen::EnumVariation::Consts)
            .prepend_enum_name(false)
            .derive_debug(false)
            .generate_comments(false)
            .layout_tests(false)
            .formatter(bindgen::Formatter::Rustfmt)
            .rustfmt_configuration_file(std::fs::canonicalize("../rustfmt.toml").ok());
        for name in TYPES {
            builder = builder.allowlist_type(name);
        }
        for name in CONSTANTS {
            builder = builder.allowlist_var(name);
        }
        for name in POINTED_AT {
            builder = builder.raw_line(format!(
                "#[repr(C)]\npub struct {name} {{\n    _opaque: [u8; 0],\n}}"
            ));
        }
        let bindings = builder.generate().expect("bindgen reads src/bindings.h");
        bindings
            .write_to_file(&output)
            .unwrap_or_else(|error| panic!("{output} cannot be written: {error}"));
    }
}
