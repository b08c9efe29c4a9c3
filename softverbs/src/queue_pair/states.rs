//! States of a queue pair, and the parameters of each change.

/// `ibv_qp_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// `IBV_QPS_RESET`
    Reset = 0,
    /// `IBV_QPS_INIT`
    Init = 1,
    /// `IBV_QPS_RTR`
    ReadyToReceive = 2,
    /// `IBV_QPS_RTS`
    ReadyToSend = 3,
    /// `IBV_QPS_ERR`
    Error = 6,
}

/// A change of state.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    /// To reset, from any state.
    Reset,
    /// To init, from reset or init.
    Init {
        /// `ibv_access_flags`: the kinds of access that the peer may use.
        access: u32,
        /// The port's number, which must be 1.
        port: u8,
    },
    /// To ready-to-receive, from init.
    ReadyToReceive(PathToPeer),
    /// To ready-to-send, from ready-to-receive. In ready-to-send, it succeeds without effect.
    ReadyToSend {
        /// Code of the time between two tries: 4.096 us x 2^timeout; 0: no limit.
        timeout: u8,
        /// Number of tries after the first one.
        retry_count: u8,
        /// Number of tries after the first one while the peer has no receive; 7: no limit.
        rnr_retry: u8,
        /// This side's first packet sequence number.
        send_psn: u32,
    },
    /// To error, from any state but reset.
    Error,
}

/// The peer's queue pair, and the path to it.
#[derive(Debug, Clone, Copy)]
pub struct PathToPeer {
    /// Path MTU.
    pub mtu_bytes: u32,
    /// Number of the peer's queue pair.
    pub remote_qp: u32,
    /// The peer's first packet sequence number.
    pub receive_psn: u32,
    /// The peer's GID.
    pub remote_gid: [u8; 16],
    /// Index of this side's GID.
    pub own_gid_index: u8,
    /// Code of the time for which the peer waits if there is no receive.
    pub min_rnr_timer: u8,
}
