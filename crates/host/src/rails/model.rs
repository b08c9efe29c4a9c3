//! A host's ports, rails and PCIe links as plain data.

use super::pcie::{LinkRate, PciFunction};
use crate::error::Missing;
use crate::port::{GidEntry, LinkLayer, PortInfo, PortState};
use std::fmt;

/// Attributes of one port, from verbs.
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
    /// Entries of the port's GID table that are in use.
    pub gids: Vec<GidEntry>,
}

/// Rails of a host, and its other ports.
#[derive(Debug, Clone)]
pub struct Survey {
    /// Usable ports. Twins are next to each other. So the first two rails of a Spark are on
    /// different PCIe links, if both functions of the first cable are usable.
    pub rails: Vec<Rail>,
    /// Other ports, each with the reason why it is not a rail.
    pub refused: Vec<Refused>,
    /// Ports of `refused` that only lack a link or an address, as the rails that they will be.
    /// Their address is a placeholder. They do not count in `speed_mbps`.
    pub late: Vec<Rail>,
    /// PCIe links that `rails` and `late` use.
    pub links: Vec<PcieLink>,
    /// Faults: the costliest first, but a warning of ARP answers last.
    pub warnings: Vec<Warning>,
    /// Rate of all rails in one direction, in Mb/s: PCIe payload, capped by the cables' line rate.
    pub speed_mbps: u32,
    /// Lowest system image GUID of the rails (node GUID if sysfs has none); 0 without rails.
    pub guid: u64,
}

/// Fault of a host's ports or settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Kind of the fault.
    pub kind: WarningKind,
    /// Names of the RDMA devices that the warning is about.
    pub devices: Vec<String>,
    /// Full sentence, with the cure.
    pub text: String,
}

/// Kind of a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WarningKind {
    /// `NCCL_IB_HCA` matches no device.
    FilterAdmitsNothing,
    /// `NCCL_IB_HCA` selects several functions of one PCIe link. [`Warning::devices`] has an
    /// excluded device on another link.
    FilterWithinOneLink,
    /// `NCCL_IB_HCA` names a port that is not usable.
    NamedButUnusable,
    /// A port is faster than its PCIe link, and its twin is unused. [`Warning::devices`] has the
    /// port's device, and the twin's device if it is visible.
    HalfUsedCable,
    /// A PCIe link runs below the rate that it supports.
    SlowLink,
    /// sysfs does not list a device.
    UnknownWiring,
    /// A port reports no speed.
    UnknownSpeed,
    /// A rail's path MTU is below 4096 bytes.
    SmallMtu,
    /// A rail is a bond of several ports (RoCE LAG).
    Bond,
    /// Several rails are in one subnet.
    SharedSubnet,
    /// An ARP request for a rail's address may be answered by another rail, or not at all.
    Arp {
        /// True if `rp_filter` is strict on one of the rails.
        is_strict: bool,
    },
    /// PFC is on, but not for the priority of RoCE.
    UnprotectedPriority,
}

impl Warning {
    pub(super) fn new<'a>(
        kind: WarningKind,
        devices: impl IntoIterator<Item = &'a str>,
        text: String,
    ) -> Self {
        Self {
            kind,
            devices: devices.into_iter().map(str::to_owned).collect(),
            text,
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A port that the plugin uses.
#[derive(Debug, Clone)]
pub struct Rail {
    /// The RDMA device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// Network interface; a container may hide it.
    pub netdev: Option<String>,
    /// Name of the physical port ("p0"), if its interface has one.
    pub phys_port: Option<String>,
    /// PCI function; soft-RoCE has none.
    pub pci: Option<PciFunction>,
    /// Index of the PCIe link in [`Survey::links`]. Rails on one link share it.
    pub link: usize,
    /// Number of the cable, from 0. Rails on one cable share it.
    pub cable: usize,
    /// Index in [`Survey::rails`] of the rail on the same cable and another PCIe link.
    pub twin: Option<usize>,
    /// Line rate of the port in Mb/s.
    pub speed_mbps: u32,
    /// Path MTU of the port in bytes, 256 to 4096.
    pub path_mtu_bytes: u32,
    /// MTU of the network interface in bytes, if visible.
    pub netdev_mtu_bytes: Option<u32>,
    /// Largest message of the port in bytes.
    pub max_message_bytes: u32,
    /// RoCE v2 addresses, never empty: IPv4 first, then routable IPv6, then link-local.
    pub addresses: Vec<RailAddress>,
}

/// A RoCE v2 address of a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailAddress {
    /// The GID: an IPv6 address, or an IPv4 address mapped into one.
    pub gid: [u8; 16],
    /// Index in the GID table. It can change when the port's addresses change.
    pub gid_index: u16,
    /// Length of the subnet's prefix in bits (IPv4 bits if the GID maps an IPv4 address). `None` if
    /// no visible interface has the address.
    pub prefix: Option<u8>,
}

/// A port that is not a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The RDMA device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// Network interface, if one is visible.
    pub netdev: Option<String>,
    /// Name of the physical port, if its interface has one.
    pub phys_port: Option<String>,
    /// PCI function, if there is one.
    pub pci: Option<PciFunction>,
    /// Line rate in Mb/s, if known.
    pub speed_mbps: Option<u32>,
    /// The reason.
    pub obstacle: Obstacle,
    /// True if the port probably becomes a rail within seconds: its twin is a rail, and its
    /// interface has a carrier or its link is coming up.
    pub is_late: bool,
}

/// Reason why a port is no rail. `Display` gives the full text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// `NCCL_IB_HCA` excludes the port.
    Excluded,
    /// The port's link layer is not Ethernet.
    LinkLayer(LinkLayer),
    /// The device speaks iWARP, not RoCE.
    Iwarp,
    /// The port has no link, or the link is not up yet.
    State(PortState),
    /// The port is down, although its interface, named here, is up: there is no carrier.
    NoCarrier(String),
    /// The port has no RoCE v2 GID, and no interface with an address.
    NoGid,
    /// The port has no RoCE v2 GID, and this network namespace does not have its interface.
    NoInterface,
    /// The port has no RoCE v2 GID, although its interface, named here, has an address.
    NoRoce(String),
    /// As `NoRoce`, but the port has GIDs of RoCE v1.
    RoceV1(String),
    /// All RoCE v2 GIDs of the port are link-local, and the port's interface, named here, has none
    /// of their addresses.
    NoAddress(String),
}

impl Obstacle {
    /// Returns true if the port only lacks a link.
    pub fn is_link(&self) -> bool {
        matches!(self, Self::State(_) | Self::NoCarrier(_))
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excluded => f.write_str("NCCL_IB_HCA excludes it"),
            Self::LinkLayer(LinkLayer::InfiniBand) => {
                f.write_str("its link layer is InfiniBand, not Ethernet")
            }
            Self::LinkLayer(_) => f.write_str("its link layer is not Ethernet"),
            Self::Iwarp => f.write_str("it is an iWARP device, and the plugin needs RoCE v2"),
            Self::State(PortState::Down) => {
                f.write_str("the port is down: no cable, or its interface is not up")
            }
            Self::NoCarrier(netdev) => write!(
                f,
                "the port is down: {netdev} is up and has no carrier (no cable, a faulty cable or module, or \
                 the other end is down)"
            ),
            Self::State(PortState::Init) => f.write_str("the port is not active yet (state INIT)"),
            Self::State(PortState::Armed) => {
                f.write_str("the port is not active yet (state ARMED)")
            }
            Self::State(state) => write!(f, "the port is not active (state {state:?})"),
            Self::NoAddress(netdev) => Missing::Address(netdev.clone()).fmt(f),
            Self::NoGid => f.write_str(
                "it has no RoCE v2 GID: its interface has neither an IPv4 nor an IPv6 address",
            ),
            Self::NoInterface => {
                f.write_str("it has no RoCE v2 GID: its interface is not in this network namespace")
            }
            Self::RoceV1(netdev) => write!(
                f,
                "it has no RoCE v2 GID: its interface {netdev} has GIDs of RoCE v1 alone"
            ),
            Self::NoRoce(netdev) => write!(
                f,
                "it has no RoCE v2 GID, although its interface {netdev} has an address: RoCE is off on the device"
            ),
        }
    }
}

/// PCIe link with its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcieLink {
    /// `domain:bus:device`; `None` for a device without PCI.
    pub slot: Option<String>,
    /// All surveyed devices on the link, rails or not.
    pub devices: Vec<String>,
    /// Present rate, if sysfs has it.
    pub rate: Option<LinkRate>,
    /// Payload rate in Mb/s, one direction. If `None`, only the ports' speeds count.
    pub payload_mbps: Option<u32>,
}
