//! The C surface: the functions of `libibverbs.so.1` over the core.
//!
//! `handles.rs` converts between C's pointers and the objects behind them, `guard.rs` keeps panics
//! out of C. A context is a `verbs_context` that has few of the extended functions. Where such a
//! function is null, the code in `verbs.h` calls an older function instead, or fails. A function
//! without a `# Safety` section accepts any arguments.
#![allow(unsafe_code)]

mod attributes;
mod completions;
mod devices;
mod events;
mod guard;
mod handles;
mod memory;
mod names;
mod posting;
mod queue_pairs;
mod rounding;
mod transition;
mod unsupported;

/// Addresses of the exported functions. `main.rs` refers to them, so that the linker keeps them.
pub struct Exports(#[allow(dead_code)] [*const (); COUNT]);

// SAFETY: the pointers are only there for the linker. Nothing calls or reads through them.
unsafe impl Sync for Exports {}

/// Lists the exported functions. The compiler compares each with its type in the header.
macro_rules! exports {
    ($($module:ident::$name:ident: $type:ident;)*) => {
        const COUNT: usize = [$(stringify!($name)),*].len();
        /// The exported functions.
        pub static EXPORTS: Exports = Exports([$($module::$name as *const ()),*]);
        $(const _: verbs_sys::$type = Some($module::$name);)*
        #[cfg(test)]
        const NAMES: [&str; COUNT] = [$(stringify!($name)),*];
    };
}

exports! {
    devices::ibv_get_device_list: fn_ibv_get_device_list;
    devices::ibv_free_device_list: fn_ibv_free_device_list;
    devices::ibv_get_device_name: fn_ibv_get_device_name;
    devices::ibv_get_device_guid: fn_ibv_get_device_guid;
    devices::ibv_get_device_index: fn_ibv_get_device_index;
    devices::ibv_open_device: fn_ibv_open_device;
    devices::ibv_close_device: fn_ibv_close_device;
    attributes::ibv_query_device: fn_ibv_query_device;
    attributes::ibv_query_port: fn_ibv_query_port;
    attributes::ibv_query_port_speed: fn_ibv_query_port_speed;
    attributes::ibv_query_gid: fn_ibv_query_gid;
    attributes::ibv_query_gid_type: fn_ibv_query_gid_type;
    attributes::_ibv_query_gid_ex: fn__ibv_query_gid_ex;
    attributes::_ibv_query_gid_table: fn__ibv_query_gid_table;
    attributes::ibv_query_pkey: fn_ibv_query_pkey;
    attributes::ibv_get_pkey_index: fn_ibv_get_pkey_index;
    events::ibv_get_async_event: fn_ibv_get_async_event;
    events::ibv_ack_async_event: fn_ibv_ack_async_event;
    memory::ibv_alloc_pd: fn_ibv_alloc_pd;
    memory::ibv_dealloc_pd: fn_ibv_dealloc_pd;
    memory::ibv_reg_mr: fn_ibv_reg_mr;
    memory::ibv_reg_mr_iova: fn_ibv_reg_mr_iova;
    memory::ibv_reg_mr_iova2: fn_ibv_reg_mr_iova2;
    memory::ibv_reg_dmabuf_mr: fn_ibv_reg_dmabuf_mr;
    memory::ibv_rereg_mr: fn_ibv_rereg_mr;
    memory::ibv_dereg_mr: fn_ibv_dereg_mr;
    memory::ibv_fork_init: fn_ibv_fork_init;
    memory::ibv_is_fork_initialized: fn_ibv_is_fork_initialized;
    memory::ibv_dontfork_range: fn_ibv_dontfork_range;
    memory::ibv_dofork_range: fn_ibv_dofork_range;
    completions::ibv_create_comp_channel: fn_ibv_create_comp_channel;
    completions::ibv_destroy_comp_channel: fn_ibv_destroy_comp_channel;
    completions::ibv_create_cq: fn_ibv_create_cq;
    completions::ibv_destroy_cq: fn_ibv_destroy_cq;
    completions::ibv_get_cq_event: fn_ibv_get_cq_event;
    completions::ibv_ack_cq_events: fn_ibv_ack_cq_events;
    completions::ibv_resize_cq: fn_ibv_resize_cq;
    queue_pairs::ibv_create_qp: fn_ibv_create_qp;
    queue_pairs::ibv_modify_qp: fn_ibv_modify_qp;
    queue_pairs::ibv_query_qp: fn_ibv_query_qp;
    queue_pairs::ibv_query_qp_data_in_order: fn_ibv_query_qp_data_in_order;
    queue_pairs::ibv_destroy_qp: fn_ibv_destroy_qp;
    names::ibv_node_type_str: fn_ibv_node_type_str;
    names::ibv_port_state_str: fn_ibv_port_state_str;
    names::ibv_event_type_str: fn_ibv_event_type_str;
    names::ibv_wc_status_str: fn_ibv_wc_status_str;
    unsupported::ibv_import_device: fn_ibv_import_device;
    unsupported::ibv_import_pd: fn_ibv_import_pd;
    unsupported::ibv_import_mr: fn_ibv_import_mr;
    unsupported::ibv_import_dm: fn_ibv_import_dm;
    unsupported::ibv_unimport_pd: fn_ibv_unimport_pd;
    unsupported::ibv_unimport_mr: fn_ibv_unimport_mr;
    unsupported::ibv_unimport_dm: fn_ibv_unimport_dm;
    unsupported::ibv_create_srq: fn_ibv_create_srq;
    unsupported::ibv_modify_srq: fn_ibv_modify_srq;
    unsupported::ibv_query_srq: fn_ibv_query_srq;
    unsupported::ibv_destroy_srq: fn_ibv_destroy_srq;
    unsupported::ibv_qp_to_qp_ex: fn_ibv_qp_to_qp_ex;
    unsupported::ibv_query_ece: fn_ibv_query_ece;
    unsupported::ibv_set_ece: fn_ibv_set_ece;
    unsupported::ibv_create_ah: fn_ibv_create_ah;
    unsupported::ibv_create_ah_from_wc: fn_ibv_create_ah_from_wc;
    unsupported::ibv_init_ah_from_wc: fn_ibv_init_ah_from_wc;
    unsupported::ibv_destroy_ah: fn_ibv_destroy_ah;
    unsupported::ibv_attach_mcast: fn_ibv_attach_mcast;
    unsupported::ibv_detach_mcast: fn_ibv_detach_mcast;
    unsupported::ibv_resolve_eth_l2_from_gid: fn_ibv_resolve_eth_l2_from_gid;
}

#[cfg(test)]
mod tests {
    use super::NAMES;

    #[test]
    fn the_linkers_list_has_each_exported_function_once() {
        let map = include_str!("../../ibverbs.map");
        let mut listed: Vec<&str> = map
            .lines()
            .filter_map(|line| line.trim().strip_suffix(';'))
            .collect();
        listed.retain(|entry| entry.starts_with("ibv_") || entry.starts_with("_ibv_"));
        listed.sort_unstable();
        let mut exported = NAMES;
        exported.sort_unstable();
        assert_eq!(listed, exported);
    }
}
