//! Texts of enum values: `ibv_wc_status_str` and others.

use std::ffi::{CStr, c_char};
use verbs_sys::*;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_node_type_str(kind: ibv_node_type) -> *const c_char {
    let text = match kind {
        IBV_NODE_CA => c"InfiniBand channel adapter",
        IBV_NODE_SWITCH => c"InfiniBand switch",
        IBV_NODE_ROUTER => c"InfiniBand router",
        IBV_NODE_RNIC => c"iWARP NIC",
        _ => c"unknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_port_state_str(state: ibv_port_state) -> *const c_char {
    let text = match state {
        IBV_PORT_NOP => c"no state change (NOP)",
        IBV_PORT_DOWN => c"down",
        IBV_PORT_INIT => c"init",
        IBV_PORT_ARMED => c"armed",
        IBV_PORT_ACTIVE => c"active",
        IBV_PORT_ACTIVE_DEFER => c"active defer",
        _ => c"unknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_event_type_str(kind: ibv_event_type) -> *const c_char {
    event_text(kind).as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_wc_status_str(status: ibv_wc_status) -> *const c_char {
    status_text(status).as_ptr()
}

fn event_text(kind: ibv_event_type) -> &'static CStr {
    match kind {
        IBV_EVENT_CQ_ERR => c"CQ error",
        IBV_EVENT_QP_FATAL => c"QP fatal error",
        IBV_EVENT_QP_REQ_ERR => c"QP request error",
        IBV_EVENT_QP_ACCESS_ERR => c"QP access violation",
        IBV_EVENT_COMM_EST => c"communication established",
        IBV_EVENT_SQ_DRAINED => c"send queue drained",
        IBV_EVENT_PATH_MIG => c"path migrated",
        IBV_EVENT_PATH_MIG_ERR => c"path migration failed",
        IBV_EVENT_DEVICE_FATAL => c"device fatal error",
        IBV_EVENT_PORT_ACTIVE => c"port active",
        IBV_EVENT_PORT_ERR => c"port down",
        IBV_EVENT_LID_CHANGE => c"LID changed",
        IBV_EVENT_PKEY_CHANGE => c"partition keys changed",
        IBV_EVENT_SM_CHANGE => c"subnet manager changed",
        IBV_EVENT_SRQ_ERR => c"SRQ error",
        IBV_EVENT_SRQ_LIMIT_REACHED => c"SRQ limit reached",
        IBV_EVENT_QP_LAST_WQE_REACHED => c"last work request reached",
        IBV_EVENT_CLIENT_REREGISTER => c"client should register again",
        IBV_EVENT_GID_CHANGE => c"GID table changed",
        _ => c"unknown",
    }
}

fn status_text(status: ibv_wc_status) -> &'static CStr {
    match status {
        IBV_WC_SUCCESS => c"success",
        IBV_WC_LOC_LEN_ERR => c"local length error",
        IBV_WC_LOC_QP_OP_ERR => c"local QP operation error",
        IBV_WC_LOC_EEC_OP_ERR => c"local EE context operation error",
        IBV_WC_LOC_PROT_ERR => c"local protection error",
        IBV_WC_WR_FLUSH_ERR => c"flushed: the QP is in the error state",
        IBV_WC_MW_BIND_ERR => c"memory window bind error",
        IBV_WC_BAD_RESP_ERR => c"bad response",
        IBV_WC_LOC_ACCESS_ERR => c"local access error",
        IBV_WC_REM_INV_REQ_ERR => c"the peer refused an invalid request",
        IBV_WC_REM_ACCESS_ERR => c"the peer refused access to its memory",
        IBV_WC_REM_OP_ERR => c"the peer could not execute the operation",
        IBV_WC_RETRY_EXC_ERR => c"no acknowledgement from the peer after all retries",
        IBV_WC_RNR_RETRY_EXC_ERR => c"the peer had no receive posted after all retries",
        IBV_WC_LOC_RDD_VIOL_ERR => c"local RDD violation",
        IBV_WC_REM_INV_RD_REQ_ERR => c"invalid RD request",
        IBV_WC_REM_ABORT_ERR => c"aborted by the peer",
        IBV_WC_INV_EECN_ERR => c"invalid EE context number",
        IBV_WC_INV_EEC_STATE_ERR => c"invalid EE context state",
        IBV_WC_FATAL_ERR => c"fatal error",
        IBV_WC_RESP_TIMEOUT_ERR => c"response timed out",
        IBV_WC_GENERAL_ERR => c"general error",
        IBV_WC_TM_ERR => c"tag matching error",
        IBV_WC_TM_RNDV_INCOMPLETE => c"tag matching rendezvous incomplete",
        _ => c"unknown",
    }
}
