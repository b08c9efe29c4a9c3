//! A rail of this host: what all connections over it share.
//!
//! - `device`: the rail's device, which can be removed and return.
//! - `registration`: memory that is registered on every rail.
//! - `path_quality`: the measured quality of its paths; `backoff`: pauses for dead paths.
//! - `interfaces`: where the bootstrap listens; `neighbours`: the peer's hardware address, for
//!   messages.

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
use crate::wire::fields::{Address, Attachment, RailAdvert, remoteness};
use crate::wire::ids::RailId;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    pub device: Arc<RailDevice>,
    /// Whether bulk data is registered a second time, with relaxed ordering.
    pub relaxed_ordering: bool,
    /// What connections measured of the paths from here.
    pub path_qualities: PathQualities,
    /// As it was when it could last be used.
    last_look: Mutex<Option<Look>>,
    /// True once a send was registered here with local write access, because the device refused it without.
    needed_local_write: AtomicBool,
    /// Whether a WARN has said that `NCCL_IB_GID_INDEX` chooses nothing here.
    was_warned_of_index: AtomicBool,
    /// Bytes of large writes posted and not confirmed, of all connections.
    backlog_bytes: AtomicU64,
    /// Bytes of large writes that were posted since that was 0.
    busy_bytes: AtomicU64,
}

impl Rail {
    /// Takes a device's protection domain into use.
    ///
    /// # Errors
    /// [`Error::Os`] when relaxed ordering was asked for and the device refuses it, or when the device has left.
    pub fn new(id: RailId, info: RailInfo, pd: Arc<Pd>, config: &Config) -> Result<Self> {
        let relaxed_ordering = match config.relaxed_ordering {
            RelaxedOrdering::Off => false,
            RelaxedOrdering::On => takes_relaxed_ordering(&pd).map(|()| true)?,
            // A device that is not there refuses everything, which says nothing of its return.
            RelaxedOrdering::Auto => match takes_relaxed_ordering(&pd) {
                Ok(()) => true,
                Err(_) => pd.context().port(info.port).map(|_| false)?,
            },
        };
        let entry = Path::new(&config.sysfs).join("class/infiniband").join(&info.device);
        let device = Arc::new(RailDevice::new(pd, entry));
        let (path_qualities, last_look, needed_local_write, was_warned_of_index) = Default::default();
        let (backlog_bytes, busy_bytes) = Default::default();
        Ok(Self {
            id,
            info,
            device,
            relaxed_ordering,
            path_qualities,
            last_look,
            needed_local_write,
            was_warned_of_index,
            backlog_bytes,
            busy_bytes,
        })
    }

    /// Device and port, as `NCCL_IB_HCA` would name it.
    pub fn name(&self) -> String {
        format!("{}:{}", self.info.device, self.info.port)
    }

    /// Its port, asked afresh.
    fn port(&self) -> Result<PortInfo> {
        let port = self.info.port;
        self.device.query(move |context| context.port(port))
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
        let (mut found, mut unheld): (Vec<(Address, u16)>, _) = (Vec::new(), None);
        let number = self.info.port;
        for entry in self.device.query(move |context| context.gid_table(number))? {
            if entry.kind != GidKind::RoceV2 || found.iter().any(|(known, _)| known.gid == entry.gid) {
                continue;
            }
            let prefix = match self.holder(config, &entry, interfaces) {
                Holder::Nobody(interface) => {
                    unheld = Some(&interface.name);
                    continue;
                }
                Holder::Found { prefix, .. } => prefix,
                Holder::Unseen => None,
            };
            found.push((Address::new(entry.gid, prefix), entry.index));
        }
        if let Some(index) = config.gid_index {
            self.keep_chosen(index, &mut found);
        }
        if !found.is_empty() {
            found.sort_by_key(|(address, index)| (remoteness(&address.gid), *index));
            let (addresses, gid_indices) = found.into_iter().unzip();
            let look = Look { port, addresses, gid_indices };
            *self.last_look.lock().unwrap_or_else(PoisonError::into_inner) = Some(look.clone());
            return Ok(look);
        }
        Err(Error::Missing(match unheld {
            Some(netdev) => no_address(netdev),
            None => "no RoCE v2 GID: give its interface an IP address".to_owned(),
        }))
    }

    /// Leaves the address that `NCCL_IB_GID_INDEX` chooses. Where it chooses none that can be used (indices differ between functions and hosts, and
    /// drift when addresses change) all stay, and a WARN says so once.
    fn keep_chosen(&self, index: u16, found: &mut Vec<(Address, u16)>) {
        if found.iter().any(|(_, known)| *known == index) {
            found.retain(|(_, known)| *known == index);
        } else if !found.is_empty() && !self.was_warned_of_index.swap(true, Ordering::Relaxed) {
            let usable: Vec<String> = found.iter().map(|(_, known)| known.to_string()).collect();
            tracing::warn!(
                "NCCL_IB_GID_INDEX={index} is no usable RoCE v2 GID of {}: using index {}; unset it",
                self.name(),
                usable.join(" or ")
            );
        }
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

    /// Bytes of large writes that were posted since none was under way.
    #[inline]
    pub fn busy_bytes(&self) -> u64 {
        // Relaxed: as above.
        self.busy_bytes.load(Ordering::Relaxed)
    }

    /// A large write was posted.
    #[inline]
    pub fn posted(&self, bytes: u64) {
        let before = self.backlog_bytes.fetch_add(bytes, Ordering::Relaxed);
        let busy = if before == 0 { 0 } else { self.busy_bytes() };
        // Two threads may lose one of their writes here. It is a hint, and a locked instruction less.
        self.busy_bytes.store(busy + bytes, Ordering::Relaxed);
    }

    /// A large write was confirmed, or never will be because its connection ends.
    #[inline]
    pub fn settled(&self, bytes: u64) {
        self.backlog_bytes.fetch_sub(bytes, Ordering::Relaxed);
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

/// Tries a small registration: whether a device takes the flag is nowhere to be asked.
fn takes_relaxed_ordering(pd: &Arc<Pd>) -> Result<()> {
    let region = Region::new(4096)?;
    region.register(pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING).map(|_| ())
}
