//! A rail: a port of an RDMA function that this host uses, with the state that connections share.

pub mod backoff;
pub mod calls;
pub mod device;
pub mod interfaces;
pub mod neighbours;
pub mod path_quality;
pub mod registration;

use self::device::RailDevice;
use self::path_quality::PathQualities;
use crate::comm::threads::lock;
use host::config::{RailConfig, RelaxedOrdering};
use host::error::{Error, Missing, Network, Result};
use host::interfaces::{GidOwner, Interface, TableEntry, gid_owner, routes};
use host::port::{GidEntry, GidKind, LinkLayer, PortInfo, PortState};
use proto::flow::pairing;
use proto::flow::paths::End;
use proto::wire::fields::{Address, Attachment, RailAdvert, preference_rank};
use proto::wire::ids::RailId;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use verbs::{Access, Pd, Region};

/// Properties of a rail that do not change while the process runs.
#[derive(Debug, Clone)]
pub struct RailInfo {
    /// Name of the RDMA device.
    pub device: String,
    /// Port of the device, from 1.
    pub port: u8,
    /// Name of the port's network interface, if the interface is visible.
    pub netdev: Option<String>,
    /// The kernel's `phys_port_name` of the interface, if the kernel reports it.
    pub phys_port: Option<String>,
    /// PCIe link and cable of the rail.
    pub attachment: Attachment,
    /// Bandwidth in Mb/s while the other rails on the same PCIe link are equally busy.
    pub speed_mbps: u32,
}

/// An open rail.
pub struct Rail {
    /// Number of the rail on this host.
    pub id: RailId,
    /// Properties of the rail.
    pub info: RailInfo,
    /// The rail's device, which may be removed.
    pub device: Arc<RailDevice>,
    /// True if bulk data may use relaxed PCIe ordering ([`registration`]).
    pub relaxed_ordering: bool,
    sysfs: PathBuf,
    /// Value of `NCCL_IB_GID_INDEX`.
    chosen_gid_index: Option<u16>,
    /// Measurements of the paths from this rail.
    pub path_qualities: PathQualities,
    last_snapshot: Mutex<Option<RailSnapshot>>,
    /// True once memory for sends was registered with local write access, because the device
    /// refused the registration without this access.
    needed_local_write: AtomicBool,
    /// True once a WARN was logged because `NCCL_IB_GID_INDEX` selects no address of this rail.
    was_warned_of_index: AtomicBool,
    /// True once a WARN was logged because the rail's device, never used before, refused memory.
    was_warned_of_refusal: AtomicBool,
    backlog_bytes: AtomicU64,
    busy_bytes: AtomicU64,
}

impl Rail {
    /// Creates a rail on a device's protection domain.
    ///
    /// # Errors
    /// [`Error::Os`] if the device was removed, or if it refuses relaxed ordering and the settings
    /// require it.
    pub fn new(id: RailId, info: RailInfo, pd: Arc<Pd>, config: &RailConfig) -> Result<Self> {
        let relaxed_ordering = match config.relaxed_ordering {
            RelaxedOrdering::Off => false,
            RelaxedOrdering::On => takes_relaxed_ordering(&pd).map(|()| true)?,
            // A removed device refuses everything, so its refusal proves nothing.
            RelaxedOrdering::Auto => match takes_relaxed_ordering(&pd) {
                Ok(()) => true,
                Err(_) => pd.context().port(info.port).map(|_| false)?,
            },
        };
        let entry = config.sysfs.join("class/infiniband").join(&info.device);
        let device = Arc::new(RailDevice::new(pd, entry));
        let (path_qualities, last_snapshot, needed_local_write, was_warned_of_index) =
            Default::default();
        let (was_warned_of_refusal, backlog_bytes, busy_bytes) = Default::default();
        Ok(Self {
            id,
            info,
            device,
            relaxed_ordering,
            sysfs: config.sysfs.clone(),
            chosen_gid_index: config.gid_index,
            path_qualities,
            last_snapshot,
            needed_local_write,
            was_warned_of_index,
            was_warned_of_refusal,
            backlog_bytes,
            busy_bytes,
        })
    }

    /// Returns device and port, in the form of `NCCL_IB_HCA`.
    pub fn name(&self) -> String {
        format!("{}:{}", self.info.device, self.info.port)
    }

    /// Returns this rail's end of a path.
    pub fn end(&self) -> End {
        End {
            rail: self.id,
            attachment: self.info.attachment,
        }
    }

    fn port(&self) -> Result<PortInfo> {
        let port = self.info.port;
        self.device.query(move |context| context.port(port))
    }

    /// Queries the rail's present state and addresses. Reads the GID indices each time, because
    /// they change with the interface's addresses. Leaves out a link-local GID if its interface is
    /// visible and does not have the address. If a late rail lacks only its memory, requests it,
    /// and returns an error.
    ///
    /// # Errors
    /// [`Error::Missing`] with the reason why the rail cannot be used now, or the error of a query.
    pub fn snapshot(&self, interfaces: &[Interface]) -> Result<RailSnapshot> {
        let port = self.port()?;
        if port.state != PortState::Active {
            return Err(Missing::PortState(format!("{:?}", port.state)).into());
        }
        if port.link_layer != LinkLayer::Ethernet {
            return Err(Missing::LinkLayer(format!("{:?}", port.link_layer)).into());
        }
        let (mut found, mut unheld): (Vec<(Address, Held)>, _) = (Vec::new(), None);
        for entry in self.device.gid_table(self.info.port)? {
            if entry.kind != GidKind::RoceV2
                || found.iter().any(|(known, _)| known.gid == entry.gid)
            {
                continue;
            }
            let (prefix, interface) = match self.gid_owner(&entry, interfaces) {
                GidOwner::Missing(interface) => {
                    unheld = Some(&interface.name);
                    continue;
                }
                GidOwner::Found { prefix, interface } => (prefix, Some(interface.index)),
                GidOwner::Elsewhere => (None, None),
            };
            found.push((
                Address::new(entry.gid, prefix),
                Held {
                    gid_index: entry.index,
                    interface,
                },
            ));
        }
        if let Some(index) = self.chosen_gid_index {
            self.keep_chosen(index, &mut found);
        }
        if !found.is_empty() {
            self.device.require_memory()?;
            found.sort_by_key(|(address, held)| (preference_rank(&address.gid), held.gid_index));
            let (addresses, held) = found.into_iter().unzip();
            let snapshot = RailSnapshot {
                port,
                addresses,
                held,
            };
            *lock(&self.last_snapshot) = Some(snapshot.clone());
            return Ok(snapshot);
        }
        Err(unheld
            .map_or(Missing::Gid, |netdev| Missing::Address(netdev.clone()))
            .into())
    }

    /// Checks that the kernel has a route from an address of this rail to a peer's address, if they
    /// are in different subnets. Does not check what the kernel does not tell.
    ///
    /// # Errors
    /// [`Error::Network`] with the command that adds the route.
    pub fn check_route(
        &self,
        snapshot: &RailSnapshot,
        own_gid: [u8; 16],
        peer_gid: [u8; 16],
    ) -> Result<()> {
        let own = snapshot
            .addresses
            .iter()
            .find(|address| address.gid == own_gid);
        let needs_route = own.is_some_and(|own| pairing::needs_route(own, peer_gid));
        if !needs_route || snapshot.has_route(own_gid, peer_gid) != Some(false) {
            return Ok(());
        }
        let [own, peer] = [own_gid, peer_gid].map(|gid| Ipv6Addr::from(gid).to_canonical());
        let netdev = self
            .info
            .netdev
            .clone()
            .unwrap_or_else(|| "its interface".to_owned());
        Err(Network::NoRoute { own, peer, netdev }.into())
    }

    /// Looks up the present index of an address in the GID table. The kernel may have given the
    /// address another index since the snapshot.
    ///
    /// # Errors
    /// [`Error::Network`] if the table no longer has the address, or the error of the query.
    pub fn gid_index(&self, snapshot: &RailSnapshot, gid: &[u8; 16]) -> Result<u16> {
        let table = self.device.gid_table(self.info.port)?;
        let known = snapshot.held(gid).map(|held| held.gid_index);
        present_index(&table, gid, known)
            .ok_or_else(|| Network::AddressGone { rail: self.name() }.into())
    }

    /// Keeps only the address that `NCCL_IB_GID_INDEX` selects. If the setting selects no usable
    /// address, keeps all addresses and logs one WARN. Indices differ between functions and hosts,
    /// and change over time.
    fn keep_chosen(&self, index: u16, found: &mut Vec<(Address, Held)>) {
        if found.iter().any(|(_, known)| known.gid_index == index) {
            found.retain(|(_, known)| known.gid_index == index);
        } else if !found.is_empty() && !self.was_warned_of_index.swap(true, Ordering::Relaxed) {
            let usable: Vec<String> = found
                .iter()
                .map(|(_, known)| known.gid_index.to_string())
                .collect();
            tracing::warn!(
                "NCCL_IB_GID_INDEX={index} selects no usable RoCE v2 GID of {}: using index {}; unset it",
                self.name(),
                usable.join(" or ")
            );
        }
    }

    fn gid_owner<'i>(&self, entry: &GidEntry, interfaces: &'i [Interface]) -> GidOwner<'i> {
        let GidEntry {
            index,
            gid,
            ifindex,
            ..
        } = *entry;
        let RailInfo { device, port, .. } = &self.info;
        gid_owner(
            &self.sysfs,
            TableEntry {
                device,
                port: *port,
                index,
                gid,
                ifindex,
            },
            interfaces,
        )
    }

    /// Makes connections pair a rail that is not usable yet: `gid` takes the place of its address
    /// until it has one. Its device gets no memory before its first use.
    ///
    /// # Errors
    /// The error of a query.
    pub fn announce(&self, gid: [u8; 16]) -> Result<()> {
        self.device.keep_idle();
        let (gid_index, interface) = Default::default();
        let snapshot = RailSnapshot {
            port: self.port()?,
            addresses: vec![Address::new(gid, None)],
            held: vec![Held {
                gid_index,
                interface,
            }],
        };
        *lock(&self.last_snapshot) = Some(snapshot);
        Ok(())
    }

    /// Logs one WARN that the device of a late rail has refused memory.
    pub fn warn_once_of_refusal(&self, error: &Error) {
        let name = self.name();
        if self.was_warned_of_refusal.swap(true, Ordering::Relaxed) {
            tracing::debug!("rail {name} still cannot be used: {error}");
        } else {
            tracing::warn!(
                "rail {name} has a link and an address, but its device refused memory, retrying: {error}"
            );
        }
    }

    /// Returns the latest snapshot in which the rail was usable, or the one of
    /// [`Rail::announce`].
    pub fn last_snapshot(&self) -> Option<RailSnapshot> {
        lock(&self.last_snapshot).clone()
    }

    /// Returns the description of the rail for a peer.
    pub fn advert(&self, snapshot: &RailSnapshot) -> RailAdvert {
        RailAdvert {
            name: self.name(),
            phys_port: self.info.phys_port.clone().unwrap_or_default(),
            attachment: self.info.attachment,
            speed_mbps: self.info.speed_mbps.max(1),
            mtu_bytes: snapshot.port.active_mtu_bytes,
            addresses: snapshot.addresses.clone(),
            is_usable: true,
        }
    }

    /// Returns the bytes of the large writes of all connections that are posted on this rail and
    /// not confirmed yet.
    #[inline]
    pub fn backlog_bytes(&self) -> u64 {
        // Relaxed: a hint for the planner; no other memory depends on it.
        self.backlog_bytes.load(Ordering::Relaxed)
    }

    /// Returns the bytes of large writes posted since [`Self::backlog_bytes`] was last 0.
    #[inline]
    pub fn busy_bytes(&self) -> u64 {
        // Relaxed: a hint for the planner; no other memory depends on it.
        self.busy_bytes.load(Ordering::Relaxed)
    }

    /// Records that a large write was posted.
    #[inline]
    pub fn posted(&self, bytes: u64) {
        let before = self.backlog_bytes.fetch_add(bytes, Ordering::Relaxed);
        let busy = if before == 0 { 0 } else { self.busy_bytes() };
        // A race with another thread may lose bytes. The sum is only a hint, and a plain store
        // saves a locked instruction.
        self.busy_bytes.store(busy + bytes, Ordering::Relaxed);
    }

    /// Records that a large write was confirmed, or that its lane was closed before that.
    #[inline]
    pub fn settled(&self, bytes: u64) {
        self.backlog_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// State of a rail at one moment.
#[derive(Debug, Clone)]
pub struct RailSnapshot {
    /// State of the port.
    pub port: PortInfo,
    /// The rail's addresses, the preferred one first.
    pub addresses: Vec<Address>,
    /// For each of `addresses`, in the same order: where this host has the address.
    held: Vec<Held>,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    gid_index: u16,
    /// Index of the network interface that has the address, if it is visible.
    interface: Option<u32>,
}

impl RailSnapshot {
    /// Returns true if the kernel has a route from this rail's address `own_gid`, through the
    /// interface that has this address, to the peer's address. `None` if the interface is not
    /// visible or the query fails.
    pub fn has_route(&self, own_gid: [u8; 16], peer_gid: [u8; 16]) -> Option<bool> {
        let interface = self.held(&own_gid)?.interface?;
        routes::has_route(interface, own_gid, peer_gid)
            .inspect_err(|error| {
                tracing::debug!("route from {own_gid:?} to {peer_gid:?} not known: {error}")
            })
            .ok()
    }

    fn held(&self, gid: &[u8; 16]) -> Option<Held> {
        let at = self
            .addresses
            .iter()
            .position(|address| address.gid == *gid)?;
        self.held.get(at).copied()
    }
}

/// Returns the index of an address in a GID table. This is the index `known` if it still has the
/// address.
fn present_index(table: &[GidEntry], gid: &[u8; 16], known: Option<u16>) -> Option<u16> {
    let places = || {
        let of_gid = table
            .iter()
            .filter(|entry| entry.kind == GidKind::RoceV2 && entry.gid == *gid);
        of_gid.map(|entry| entry.index)
    };
    places()
        .find(|index| Some(*index) == known)
        .or_else(|| places().next())
}

/// Tries a small registration with relaxed ordering, because no query tells whether a device
/// supports this flag. Returns the error of a device that refuses.
fn takes_relaxed_ordering(pd: &Arc<Pd>) -> Result<()> {
    let region = Region::new(4096)?;
    region
        .register(
            pd,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::RELAXED_ORDERING,
        )
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_found_at_its_present_index() {
        let entry = |index, last, kind| GidEntry {
            index,
            gid: [last; 16],
            kind,
            ifindex: 2,
        };
        let v1 = GidKind::RoceV1;
        let table = [
            entry(0, 7, v1),
            entry(4, 7, GidKind::RoceV2),
            entry(5, 8, GidKind::RoceV2),
        ];
        let twice = [entry(4, 7, GidKind::RoceV2), entry(6, 7, GidKind::RoceV2)];
        let index = |table: &[GidEntry], known| present_index(table, &[7; 16], known);
        assert_eq!(index(&table, Some(4)), Some(4));
        assert_eq!(
            index(&table, Some(5)),
            Some(4),
            "the old index has another address"
        );
        assert_eq!(
            index(&table, Some(0)),
            Some(4),
            "the old index has another packet format"
        );
        assert_eq!(
            [index(&table, None), index(&table[2..], Some(4))],
            [Some(4), None]
        );
        assert_eq!(index(&twice, Some(6)), Some(6), "the chosen one of two");
    }
}
