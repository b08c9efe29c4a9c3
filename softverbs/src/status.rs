//! Numbers of verbs.h.

/// `IBV_WC_LOC_LEN_ERR`
pub const LOCAL_LENGTH: u32 = 1;
/// `IBV_WC_LOC_PROT_ERR`
pub const LOCAL_PROTECTION: u32 = 4;
/// `IBV_WC_WR_FLUSH_ERR`
pub const FLUSHED: u32 = 5;
/// `IBV_WC_REM_INV_REQ_ERR`
pub const REMOTE_INVALID: u32 = 9;
/// `IBV_WC_REM_ACCESS_ERR`
pub const REMOTE_ACCESS: u32 = 10;
/// `IBV_WC_REM_OP_ERR`
pub const REMOTE_OPERATION: u32 = 11;
/// `IBV_WC_RETRY_EXC_ERR`
pub const RETRY_EXCEEDED: u32 = 12;
/// `IBV_WC_RNR_RETRY_EXC_ERR`
pub const RNR_RETRY_EXCEEDED: u32 = 13;

/// `IBV_WC_RECV`
pub const RECEIVED: u32 = 128;
/// `IBV_WC_RECV_RDMA_WITH_IMM`
pub const RECEIVED_IMMEDIATE: u32 = 129;
/// `IBV_WC_WITH_IMM`, a flag.
pub const WITH_IMMEDIATE: u32 = 2;

/// `IBV_ACCESS_LOCAL_WRITE`
pub const LOCAL_WRITE: u32 = 1;
/// `IBV_ACCESS_REMOTE_WRITE`
pub const REMOTE_WRITE: u32 = 2;
/// `IBV_ACCESS_REMOTE_READ`
pub const REMOTE_READ: u32 = 4;
