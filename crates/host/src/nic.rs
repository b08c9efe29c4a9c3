//! The NICs of a DGX Spark: facts of each model, and facts that all models have in common, because
//! one driver (mlx5) serves them.
//!
//! softverbs does not read this file: a simulated NIC with the same table would have the same
//! mistakes.

/// A model of NIC in a Spark. A number that is unknown is 0, and an unknown list is empty: nothing
/// is judged by them.
pub struct Nic {
    /// Name of the model.
    pub name: &'static str,
    /// `board_id` in sysfs.
    pub board_id: &'static str,
    /// Number of PCI functions with a cable in each port.
    pub functions: usize,
    /// Highest speed of a port in Mb/s.
    pub port_mbps: u32,
    /// Maximum PCIe payload and maximum read request in bytes: both have the same size.
    pub transaction_bytes: u32,
    /// PCIe root ports above the NIC.
    pub root_ports: &'static [&'static str],
}

/// All models. The first is the NIC of a Spark whose board id is unknown.
pub const NICS: &[Nic] = &[
    // Published by owners: the board id (`ibstat`), the port's speed (two lanes of NDR), and the
    // transactions of 16 machines of four makers.
    Nic {
        name: "ConnectX-7",
        board_id: "NVD0000000087",
        functions: 4,
        port_mbps: 200_000,
        transaction_bytes: 512,
        root_ports: &["0000:00:00.0", "0002:00:00.0"],
    },
];

/// PCI vendor id in sysfs.
pub const PCI_VENDOR: &str = "0x15b3";
/// Forms of board ids, where `#` is a number: of NVIDIA's boards, and of Mellanox's.
pub const BOARD_ID_FORMS: [&str; 2] = ["NVD00000000#", "MT_00000#"];
/// Kernel module for the PCI functions.
pub const CORE_MODULE: &str = "mlx5_core";
/// Kernel module for the RDMA devices.
pub const RDMA_MODULE: &str = "mlx5_ib";
/// Start of the file name of libibverbs' provider, the driver in user space.
pub const PROVIDER: &str = "libmlx5-rdmav";

/// Parts of the kernel log's lines about uncorrected PCIe errors (drivers/net/ethernet/mellanox/
/// mlx5/core/main.c). The kernel's PCIe code has others.
pub const PCIE_ERROR_MARKS: [&str; 2] = ["mlx5_pci_err_detected", "mlx5_pci_slot_reset"];
/// Part of the kernel log's lines about a faulty module or cable (`mlx5_port_module_event` in
/// drivers/net/ethernet/mellanox/mlx5/core/events.c). Plugging and unplugging are `[info]`.
pub const MODULE_ERROR_MARK: &str = "Port module event[error]";
/// Part of such a line about a module that is too hot.
pub const HOT_MODULE_MARK: &str = "High Temperature";

/// Payload in ninths of a PCIe link's rate after its line code.
///
/// The value comes from measurements. On 16 Sparks, owners read a maximum payload size (MPS) of
/// 512, and published 111.7 Gb/s for `ib_write_bw` over one function (eugr/spark-vllm-docker). The
/// link carries 126.0 Gb/s after its line code; 8/9 of 126.0 are 112.0. Headers alone (24 bytes for
/// each 512: PCI Express Base Specification 5.0, 2.2 and 4.2.2) would leave 120.4.
/// Acknowledgements, flow control and read requests also use the link, but their amount is not
/// published.
pub(crate) const PCIE_PAYLOAD_NINTHS: u64 = 8;

/// A counter of a port.
pub struct Counter {
    /// The kernel's name.
    pub name: &'static str,
    /// The events that it counts.
    pub meaning: Meaning,
    /// True if `top` and the plugin's log read the counter.
    pub(crate) is_watched: bool,
}

/// The events that a counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// Packets that the port sent.
    PacketsSent,
    /// Packets that the port received.
    PacketsReceived,
    /// Lost packets of this port. The peer noticed the loss when a later packet arrived.
    LostSent,
    /// Lost packets of the peer. This port noticed the loss when a later packet arrived.
    LostReceived,
    /// Requests without an acknowledgement in time. A pulled cable, which is no packet loss, also
    /// raises these counters.
    Unacknowledged,
    /// Congestion notifications, sent or taken.
    Congestion,
    /// Errors on the wire.
    LinkError,
    /// Losses of the link.
    LinkDown,
    /// Messages for which the receiver had no receive posted.
    NotReady,
    /// Packets dropped before they were sent.
    Discarded,
    /// Any other event.
    Other,
}

/// The counters of the driver mlx5. Those of packets and of the link are in the sysfs folder
/// `counters` (drivers/infiniband/core/sysfs.c), the others in `hw_counters`
/// (drivers/infiniband/hw/mlx5/counters.c).
pub const MLX5_COUNTERS: &[Counter] = &[
    watched("port_xmit_packets", Meaning::PacketsSent),
    watched("port_rcv_packets", Meaning::PacketsReceived),
    watched("local_ack_timeout_err", Meaning::Unacknowledged),
    watched("packet_seq_err", Meaning::LostSent),
    unwatched("req_transport_retries_exceeded", Meaning::Unacknowledged),
    watched("out_of_sequence", Meaning::LostReceived),
    watched("np_cnp_sent", Meaning::Congestion),
    watched("rp_cnp_handled", Meaning::Congestion),
    unwatched("symbol_error", Meaning::LinkError),
    watched("port_rcv_errors", Meaning::LinkError),
    unwatched("local_link_integrity_errors", Meaning::LinkError),
    unwatched("excessive_buffer_overrun_errors", Meaning::LinkError),
    unwatched("link_error_recovery", Meaning::LinkError),
    watched("rx_icrc_encapsulated", Meaning::LinkError),
    unwatched("link_downed", Meaning::LinkDown),
    watched("rnr_nak_retry_err", Meaning::NotReady),
    unwatched("out_of_buffer", Meaning::NotReady),
    watched("port_xmit_discards", Meaning::Discarded),
    watched("implied_nak_seq_err", Meaning::Other),
    unwatched("port_xmit_wait", Meaning::Other),
    unwatched("port_xmit_data", Meaning::Other),
    unwatched("port_rcv_data", Meaning::Other),
    unwatched("duplicate_request", Meaning::Other),
    unwatched("np_ecn_marked_roce_packets", Meaning::Other),
    unwatched("rp_cnp_ignored", Meaning::Other),
    unwatched("roce_adp_retrans", Meaning::Other),
    unwatched("roce_slow_restart", Meaning::Other),
    unwatched("req_cqe_error", Meaning::Other),
    unwatched("resp_cqe_error", Meaning::Other),
    unwatched("req_remote_access_errors", Meaning::Other),
    unwatched("resp_local_length_error", Meaning::Other),
    unwatched("rx_write_requests", Meaning::Other),
];

/// The counters of soft-RoCE (drivers/infiniband/sw/rxe/rxe_hw_counters.c).
const RXE_COUNTERS: &[Counter] = &[
    watched("sent_pkts", Meaning::PacketsSent),
    watched("rcvd_pkts", Meaning::PacketsReceived),
    watched("rcvd_seq_err", Meaning::LostSent),
    watched("out_of_seq_request", Meaning::LostReceived),
    watched("completer_retry_err", Meaning::Unacknowledged),
    watched("rcvd_rnr_err", Meaning::NotReady),
];

/// Counters of `ethtool -S` that sysfs lacks, where `#` is a number.
const ETHTOOL_COUNTERS: [&str; 9] = [
    "rx_discards_phy",
    "tx_discards_phy",
    "rx_prio#_discards",
    "rx_pause_ctrl_phy",
    "tx_pause_ctrl_phy",
    "rx_global_pause",
    "tx_global_pause",
    "rx_prio#_pause",
    "tx_prio#_pause",
];

const fn watched(name: &'static str, meaning: Meaning) -> Counter {
    Counter {
        name,
        meaning,
        is_watched: true,
    }
}

const fn unwatched(name: &'static str, meaning: Meaning) -> Counter {
    Counter {
        name,
        meaning,
        is_watched: false,
    }
}

/// Returns the counters of all drivers that `top` and the plugin's log read.
pub(crate) fn watched_counters() -> impl Iterator<Item = &'static Counter> {
    MLX5_COUNTERS
        .iter()
        .chain(RXE_COUNTERS)
        .filter(|counter| counter.is_watched)
}

/// Returns the forms of all counters' names, where `#` is a number.
pub fn counter_forms() -> impl Iterator<Item = &'static str> {
    let in_sysfs = MLX5_COUNTERS.iter().chain(RXE_COUNTERS);
    in_sysfs.map(|counter| counter.name).chain(ETHTOOL_COUNTERS)
}
