/* What src/verbs/bindings.rs is made from: build.rs gives this file to bindgen (feature `regenerate-bindings`). */
#include <infiniband/verbs.h>

/* Inline wrappers in verbs.h hide the exported functions of these names. */
#undef ibv_query_port
#undef ibv_reg_mr

/* Their enum has no name, and bindgen would number it. */
static const uint8_t LINK_LAYER_INFINIBAND = IBV_LINK_LAYER_INFINIBAND;
static const uint8_t LINK_LAYER_ETHERNET = IBV_LINK_LAYER_ETHERNET;

/* A type for each function that library.rs looks up, so that no signature is written by hand. */
#define FUNCTION(name) typedef __typeof__(name) fn_##name
FUNCTION(ibv_get_device_list);
FUNCTION(ibv_free_device_list);
FUNCTION(ibv_get_device_name);
FUNCTION(ibv_get_device_guid);
FUNCTION(ibv_open_device);
FUNCTION(ibv_close_device);
FUNCTION(ibv_query_device);
FUNCTION(ibv_query_port);
FUNCTION(_ibv_query_gid_ex);
FUNCTION(_ibv_query_gid_table);
FUNCTION(ibv_get_async_event);
FUNCTION(ibv_ack_async_event);
FUNCTION(ibv_alloc_pd);
FUNCTION(ibv_dealloc_pd);
FUNCTION(ibv_reg_mr);
FUNCTION(ibv_reg_mr_iova2);
FUNCTION(ibv_dereg_mr);
FUNCTION(ibv_create_cq);
FUNCTION(ibv_destroy_cq);
FUNCTION(ibv_create_qp);
FUNCTION(ibv_modify_qp);
FUNCTION(ibv_destroy_qp);
