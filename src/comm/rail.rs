//! A rail of this host: what all connections over it share.

pub mod backoff;
pub mod device;
pub mod interfaces;
pub mod neighbours;
pub mod path_quality;
pub mod registration;

use self::device::RailDevice;
use self::path_quality::PathQualities;
use crate::config::{Config, RelaxedOrdering};
use crate::error::{Error, Result};
use crate::interfaces::{Holder, Interface, TableEntry, holder, no_address};
use crate::verbs::{Access, GidEntry, GidKind, LinkLayer, Pd, PortInfo, PortState, Region};
use crate::wire::fields::{Address, Attachment, RailAdvert};
use crate::wire::ids::RailId;
use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What does not change about a rail while the process runs.
#[derive(Debug, Clone)]
pub struct RailInfo {
    /// RDMA device.
    pub device: String,
    /// Port of it, from 1.
    pub port: u8,
    /// The network interface, where one is visible.
    pub netdev: Option<String>,
    /// `phys_port_name`, where the kernel tells.
    pub phys_port: Option<String>,
    /// What it hangs on.
    pub attachment: Attachment,
    /// What it can carry when the others on its PCIe link are busy too, in Mb/s.
    pub speed_mbps: u32,
}

/// A rail, open.
pub struct Rail {
    /// Its number on this host.
    pub id: RailId,
    /// What it is.
    pub info: RailInfo,
    /// Its device, which may be taken away.
    pub device: RailDevice,
    /// Whether bulk data is registered a second time, with relaxed ordering.
    pub relaxed_ordering: bool,
    /// What connections measured of the paths from here.
    pub path_qualities: PathQualities,
    /// As it was when it could last be used.
    last_look: Mutex<Option<Look>>,
    /// Bytes of large writes posted and not confirmed, of all connections.
    backlog_bytes: AtomicU64,
    /// Payload bytes confirmed since the process began.
    sent_bytes: AtomicU64,
    /// Messages and shares of messages confirmed.
    sent_shares: AtomicU64,
}

impl Rail {
    /// Takes a device's protection domain into use.
    ///
    /// # Errors
    /// [`Error::Os`] when relaxed ordering was asked for and the device refuses it.
    pub fn new(id: RailId, info: RailInfo, pd: Arc<Pd>, config: &Config) -> Result<Self> {
        let relaxed_ordering = match config.relaxed_ordering {
            RelaxedOrdering::Off => false,
            RelaxedOrdering::On => takes_relaxed_ordering(&pd).map(|()| true)?,
            RelaxedOrdering::Auto => takes_relaxed_ordering(&pd).is_ok(),
        };
        let device = RailDevice::new(pd, Path::new(&config.sysfs).join("class/infiniband").join(&info.device));
        let (path_qualities, last_look, backlog_bytes, sent_bytes, sent_shares) = Default::default();
        Ok(Self {
            id,
            info,
            device,
            relaxed_ordering,
            path_qualities,
            last_look,
            backlog_bytes,
            sent_bytes,
            sent_shares,
        })
    }

    /// Device and port, as `NCCL_IB_HCA` would name it.
    pub fn name(&self) -> String {
        format!("{}:{}", self.info.device, self.info.port)
    }

    /// Whether its port is up.
    pub fn is_up(&self) -> bool {
        self.port().is_ok_and(|port| port.state == PortState::Active)
    }

    /// Its port, asked afresh.
    fn port(&self) -> Result<PortInfo> {
        let (pd, opening) = self.device.opened()?;
        let port = pd.context().port(self.info.port);
        port.inspect_err(|error| _ = self.device.heard(error, opening))
    }

    /// The rail as it is now: its state, its addresses (looked up afresh, because GID indices drift), and the index
    /// of each. A link-local GID whose address its interface is seen not to have is none of them.
    ///
    /// # Errors
    /// [`Error::Missing`] says why the rail is of no use now.
    pub fn look(&self, config: &Config, interfaces: &[Interface]) -> Result<Look> {
        let port = self.port()?;
        if port.state != PortState::Active {
            return Err(Error::Missing(format!("port state is {:?}", port.state)));
        }
        if port.link_layer != LinkLayer::Ethernet {
            return Err(Error::Missing(format!("link layer is {:?}, not Ethernet", port.link_layer)));
        }
        let (mut addresses, mut gid_indices, mut unheld) = (Vec::new(), Vec::new(), None);
        for entry in self.device.pd()?.context().gid_table(self.info.port)? {
            let wanted = config.gid_index.is_none_or(|index| index == entry.index);
            if !wanted || entry.kind != GidKind::RoceV2 || addresses.iter().any(|a: &Address| a.gid == entry.gid) {
                continue;
            }
            let prefix = match self.holder(config, &entry, interfaces) {
                Holder::Nobody(interface) => {
                    unheld = Some(&interface.name);
                    continue;
                }
                Holder::Found { prefix, .. } => prefix_of_gid(&entry.gid, prefix),
                Holder::Unseen => None,
            };
            addresses.push(Address { gid: entry.gid, prefix });
            gid_indices.push(entry.index);
        }
        if !addresses.is_empty() {
            let look = Look { port, addresses, gid_indices };
            *self.last_look.lock().unwrap_or_else(PoisonError::into_inner) = Some(look.clone());
            return Ok(look);
        }
        Err(Error::Missing(match (config.gid_index, unheld) {
            (Some(index), Some(netdev)) => {
                format!(
                    "NCCL_IB_GID_INDEX={index} is a link-local GID whose address its interface {netdev} does not have"
                )
            }
            (Some(index), None) => format!("NCCL_IB_GID_INDEX={index} is not a RoCE v2 GID of this port"),
            (None, Some(netdev)) => no_address(netdev),
            (None, None) => "no RoCE v2 GID: give its interface an IP address".to_owned(),
        }))
    }

    fn holder<'i>(&self, config: &Config, entry: &GidEntry, interfaces: &'i [Interface]) -> Holder<'i> {
        let GidEntry { index, gid, ifindex, .. } = *entry;
        let RailInfo { device, port, .. } = &self.info;
        holder(Path::new(&config.sysfs), TableEntry { device, port: *port, index, gid, ifindex }, interfaces)
    }

    /// The rail as it was when it could last be used; `None` if it never was looked at.
    pub fn last_look(&self) -> Option<Look> {
        self.last_look.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What a peer must know of the rail.
    pub fn advert(&self, look: &Look) -> RailAdvert {
        RailAdvert {
            name: self.name(),
            phys_port: self.info.phys_port.clone().unwrap_or_default(),
            attachment: self.info.attachment,
            speed_mbps: self.info.speed_mbps.max(1),
            mtu_bytes: look.port.active_mtu_bytes,
            addresses: look.addresses.clone(),
            is_usable: true,
        }
    }

    /// Bytes of large writes posted and not confirmed, of all connections of this process.
    #[inline]
    pub fn backlog_bytes(&self) -> u64 {
        // Relaxed: a hint for the planner, no other memory hangs on it.
        self.backlog_bytes.load(Ordering::Relaxed)
    }

    /// A large write was posted.
    #[inline]
    pub fn posted(&self, bytes: u64) {
        self.backlog_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A large write was confirmed, or never will be because its connection ends.
    #[inline]
    pub fn settled(&self, bytes: u64) {
        self.backlog_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A connection has sent this much, in so many shares of messages.
    pub fn sent(&self, bytes: u64, shares: u64) {
        self.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.sent_shares.fetch_add(shares, Ordering::Relaxed);
    }

    /// Payload bytes and shares of messages confirmed so far.
    pub fn totals(&self) -> (u64, u64) {
        (self.sent_bytes.load(Ordering::Relaxed), self.sent_shares.load(Ordering::Relaxed))
    }
}

/// A rail as it was just now.
#[derive(Debug, Clone)]
pub struct Look {
    /// The port.
    pub port: PortInfo,
    /// Its addresses.
    pub addresses: Vec<Address>,
    gid_indices: Vec<u16>,
}

impl Look {
    /// The GID table index of one of the addresses.
    pub fn gid_index(&self, gid: &[u8; 16]) -> Option<u16> {
        let at = self.addresses.iter().position(|address| address.gid == *gid)?;
        self.gid_indices.get(at).copied()
    }
}

/// The length of a prefix in the 128 bits of a GID, which maps an IPv4 address into the last 32.
fn prefix_of_gid(gid: &[u8; 16], prefix: Option<u8>) -> Option<u8> {
    match Ipv6Addr::from(*gid).to_ipv4_mapped() {
        Some(_) => prefix?.checked_add(96),
        None => prefix,
    }
}

/// Tries a small registration: whether a device takes the flag is nowhere to be asked.
fn takes_relaxed_ordering(pd: &Arc<Pd>) -> Result<()> {
    let region = Region::new(4096)?;
    region.register(pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING).map(|_| ())
}
