//! An RDMA port's properties as plain data. `crates/verbs` reads them from libibverbs, and
//! `rails::ports_from_sysfs` from sysfs.

/// Present properties of a port.
#[derive(Clone, Debug)]
pub struct PortInfo {
    /// State of the port.
    pub state: PortState,
    /// Link layer of the port.
    pub link_layer: LinkLayer,
    /// Active path MTU, in bytes of RDMA payload (256 to 4096).
    pub active_mtu_bytes: u32,
    /// Largest message, in bytes.
    pub max_message_bytes: u32,
    /// Width times speed in Mb/s, like the port's `rate` in sysfs; 0 if unknown.
    pub speed_mbps: u32,
}

/// A port's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// Carries traffic.
    Active,
    /// No link.
    Down,
    /// The link is up, but the port is not configured yet.
    Init,
    /// Configured, but not yet active.
    Armed,
    /// Another value of `enum ibv_port_state`.
    Other(u32),
}

/// Link layer of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// Ethernet: RoCE.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
    /// Not reported by the device.
    Unspecified,
}

/// An entry of a port's GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Index in the table; changes when addresses of the network device change.
    pub index: u16,
    /// The address, in network byte order.
    pub gid: [u8; 16],
    /// Packet format of the address.
    pub kind: GidKind,
    /// Index of the address's network device; 0 for none.
    pub ifindex: u32,
}

/// Packet format of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet without IP.
    RoceV1,
    /// UDP over IPv4 or IPv6.
    RoceV2,
}
