//! What is known of a host's ports, as plain data.

use super::pcie::{LinkRate, PciFunction};
use crate::error::Missing;
use crate::verbs::{GidEntry, LinkLayer, PortInfo, PortState};
use std::fmt;

/// What verbs says of one port.
#[derive(Debug, Clone)]
pub struct PortFacts {
    /// The RDMA device's name.
    pub device: String,
    /// The device's node GUID.
    pub guid: u64,
    /// The port's number, from 1.
    pub port: u8,
    /// State, speed and sizes.
    pub info: PortInfo,
    /// The entries of the port's GID table that are in use.
    pub gids: Vec<GidEntry>,
}

/// What a host's ports amount to.
#[derive(Debug, Clone)]
pub struct Survey {
    /// The usable ports, twins side by side: the first n use as many PCIe links as n rails can.
    pub rails: Vec<Rail>,
    /// The other ports, each with the reason.
    pub refused: Vec<Refused>,
    /// The PCIe links under the rails.
    pub links: Vec<PcieLink>,
    /// What a person should know or change.
    pub warnings: Vec<Warning>,
    /// What all rails carry at once in one direction, in Mb/s: PCIe payload, capped by the cables' line rate.
    pub speed_mbps: u32,
    /// The lowest system image GUID (or node GUID, where sysfs has none) of the rails; 0 without rails.
    pub guid: u64,
}

/// What a person should know or change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// What it is about.
    pub kind: WarningKind,
    /// The RDMA devices that it is about.
    pub devices: Vec<String>,
    /// A full sentence, with what to do.
    pub text: String,
}

/// What a warning of the survey is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WarningKind {
    /// `NCCL_IB_HCA` matches no device.
    FilterAdmitsNothing,
    /// `NCCL_IB_HCA` selects two functions of one PCIe link; the devices are the pair to select.
    FilterWithinOneLink,
    /// `NCCL_IB_HCA` names a port that is not usable.
    NamedButUnusable,
    /// A port is faster than its PCIe link, and its twin is not used; the devices are the rail and, where there is one, its twin.
    HalfUsedCable,
    /// A PCIe link runs below what it could.
    SlowLink,
    /// sysfs does not list a device.
    UnknownWiring,
    /// A port reports no speed.
    UnknownSpeed,
    /// A path MTU below 4096 bytes.
    SmallMtu,
    /// Path MTUs differ.
    UnequalMtus,
    /// Rails are in one subnet.
    SharedSubnet,
    /// ARP requests for one rail may be answered by another.
    Arp {
        /// True where `rp_filter` is strict on one of the rails.
        is_strict: bool,
    },
}

impl Warning {
    pub(super) fn new<'a>(kind: WarningKind, devices: impl IntoIterator<Item = &'a str>, text: String) -> Self {
        Self { kind, devices: devices.into_iter().map(str::to_owned).collect(), text }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A port that carries traffic.
#[derive(Debug, Clone)]
pub struct Rail {
    /// The RDMA device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// Its network interface; a container may not show it.
    pub netdev: Option<String>,
    /// The physical port's name ("p0"), if its interface has one.
    pub phys_port: Option<String>,
    /// The PCI function; soft-RoCE has none.
    pub pci: Option<PciFunction>,
    /// Its PCIe link: an index in [`Survey::links`]. Rails on one link share it.
    pub link: usize,
    /// Its cable, counted from 0. Rails on one cable share it.
    pub cable: usize,
    /// A rail on the same cable by another PCIe link: an index in [`Survey::rails`].
    pub twin: Option<usize>,
    /// Line rate of the port in Mb/s.
    pub speed_mbps: u32,
    /// Path MTU of the port in bytes, 256 to 4096.
    pub path_mtu_bytes: u32,
    /// MTU of the network interface in bytes, where it can be seen.
    pub netdev_mtu_bytes: Option<u32>,
    /// The largest message of the port in bytes.
    pub max_message_bytes: u32,
    /// Its RoCE v2 addresses, never empty: IPv4 first, then routable IPv6, then link-local.
    pub addresses: Vec<RailAddress>,
}

/// A RoCE v2 address of a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailAddress {
    /// The GID: an IPv6 address, or an IPv4 address mapped into one.
    pub gid: [u8; 16],
    /// Where the GID table had it; it moves when addresses change.
    pub gid_index: u16,
    /// Length of the subnet's prefix in bits, of the IPv4 address where the GID maps one; `None` if no visible interface
    /// has the address.
    pub prefix: Option<u8>,
}

/// A port that is not a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The RDMA device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// Its network interface, if there is one to be seen.
    pub netdev: Option<String>,
    /// The physical port's name, if its interface has one.
    pub phys_port: Option<String>,
    /// The PCI function, if there is one.
    pub pci: Option<PciFunction>,
    /// Line rate of the port in Mb/s, where it is known.
    pub speed_mbps: Option<u32>,
    /// The reason.
    pub obstacle: Obstacle,
}

/// Reason why a port is no rail. `Display` gives it in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// `NCCL_IB_HCA` excludes the port.
    Excluded,
    /// Its link layer is not Ethernet.
    LinkLayer(LinkLayer),
    /// It has no link, or its link is not up yet.
    State(PortState),
    /// It has no RoCE v2 GID.
    NoGid,
    /// It has link-local GIDs alone, and this interface has none of their addresses.
    NoAddress(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excluded => f.write_str("NCCL_IB_HCA excludes it"),
            Self::LinkLayer(LinkLayer::InfiniBand) => f.write_str("its link layer is InfiniBand, not Ethernet"),
            Self::LinkLayer(_) => f.write_str("its link layer is not Ethernet"),
            Self::State(PortState::Down) => f.write_str("the port is down: no cable, or its interface is not up"),
            Self::State(PortState::Init) => f.write_str("the port is not active yet (state INIT)"),
            Self::State(PortState::Armed) => f.write_str("the port is not active yet (state ARMED)"),
            Self::State(state) => write!(f, "the port is not active (state {state:?})"),
            Self::NoAddress(netdev) => Missing::Address(netdev.clone()).fmt(f),
            Self::NoGid => f.write_str("it has no RoCE v2 GID: its interface has neither an IPv4 nor an IPv6 address"),
        }
    }
}

/// A PCIe link, and who is on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcieLink {
    /// `domain:bus:device`; `None` under a device without PCI.
    pub slot: Option<String>,
    /// All surveyed devices on it, rails or not.
    pub devices: Vec<String>,
    /// What it runs at, where sysfs knows.
    pub rate: Option<LinkRate>,
    /// What it carries in payload in Mb/s, one direction; `None`: not known, the ports' speeds alone count.
    pub payload_mbps: Option<u32>,
}
