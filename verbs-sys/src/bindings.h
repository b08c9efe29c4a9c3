/* Input of bindgen for bindings.rs: build.rs runs it with the feature `regenerate-bindings`. */
#include <infiniband/verbs.h>

/* Inline wrappers in verbs.h hide the exported functions with these names. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

/* The enum of these constants has no name, so bindgen would give it a numbered one. */
static const uint8_t LINK_LAYER_INFINIBAND = IBV_LINK_LAYER_INFINIBAND;
static const uint8_t LINK_LAYER_ETHERNET = IBV_LINK_LAYER_ETHERNET;

/* Mask of the access flags that a device may ignore. */
static const uint32_t ACCESS_OPTIONAL_RANGE = IBV_ACCESS_OPTIONAL_RANGE;

/* Functions that only newer or private headers declare. */
int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);
int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *port_speed);
int ibv_query_gid_type(struct ibv_context *context, uint8_t port_num, unsigned int index, int *type);

/* A type for each function that the plugin looks up or softverbs exports: no signature is written
 * by hand. */
#define FUNCTION(name) typedef __typeof__(name) fn_##name
FUNCTION(ibv_get_device_list);
FUNCTION(ibv_free_device_list);
FUNCTION(ibv_get_device_name);
FUNCTION(ibv_get_device_guid);
FUNCTION(ibv_get_device_index);
FUNCTION(ibv_open_device);
FUNCTION(ibv_close_device);
FUNCTION(ibv_import_device);
FUNCTION(ibv_query_device);
FUNCTION(ibv_query_port);
FUNCTION(ibv_query_port_speed);
FUNCTION(ibv_query_gid);
FUNCTION(ibv_query_gid_type);
FUNCTION(_ibv_query_gid_ex);
FUNCTION(_ibv_query_gid_table);
FUNCTION(ibv_query_pkey);
FUNCTION(ibv_get_pkey_index);
FUNCTION(ibv_get_async_event);
FUNCTION(ibv_ack_async_event);
FUNCTION(ibv_alloc_pd);
FUNCTION(ibv_dealloc_pd);
FUNCTION(ibv_import_pd);
FUNCTION(ibv_unimport_pd);
FUNCTION(ibv_reg_mr);
FUNCTION(ibv_reg_mr_iova);
FUNCTION(ibv_reg_mr_iova2);
FUNCTION(ibv_reg_dmabuf_mr);
FUNCTION(ibv_rereg_mr);
FUNCTION(ibv_dereg_mr);
FUNCTION(ibv_import_mr);
FUNCTION(ibv_unimport_mr);
FUNCTION(ibv_import_dm);
FUNCTION(ibv_unimport_dm);
FUNCTION(ibv_create_comp_channel);
FUNCTION(ibv_destroy_comp_channel);
FUNCTION(ibv_create_cq);
FUNCTION(ibv_resize_cq);
FUNCTION(ibv_destroy_cq);
FUNCTION(ibv_get_cq_event);
FUNCTION(ibv_ack_cq_events);
FUNCTION(ibv_create_srq);
FUNCTION(ibv_modify_srq);
FUNCTION(ibv_query_srq);
FUNCTION(ibv_destroy_srq);
FUNCTION(ibv_create_qp);
FUNCTION(ibv_modify_qp);
FUNCTION(ibv_query_qp);
FUNCTION(ibv_query_qp_data_in_order);
FUNCTION(ibv_qp_to_qp_ex);
FUNCTION(ibv_destroy_qp);
FUNCTION(ibv_query_ece);
FUNCTION(ibv_set_ece);
FUNCTION(ibv_create_ah);
FUNCTION(ibv_create_ah_from_wc);
FUNCTION(ibv_init_ah_from_wc);
FUNCTION(ibv_destroy_ah);
FUNCTION(ibv_attach_mcast);
FUNCTION(ibv_detach_mcast);
FUNCTION(ibv_resolve_eth_l2_from_gid);
FUNCTION(ibv_fork_init);
FUNCTION(ibv_is_fork_initialized);
FUNCTION(ibv_dontfork_range);
FUNCTION(ibv_dofork_range);
FUNCTION(ibv_node_type_str);
FUNCTION(ibv_port_state_str);
FUNCTION(ibv_event_type_str);
FUNCTION(ibv_wc_status_str);
