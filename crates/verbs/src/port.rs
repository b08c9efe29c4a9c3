//! Properties of a port: state, MTU, speed, and its GID table.

use std::mem::size_of;

use super::context::{Context, extended_operation};
use host::error::{Call, Error, Missing, Result};
use host::port::{GidEntry, GidKind, LinkLayer, PortInfo, PortState};
use verbs_sys::*;

/// `ibv_port_attr` as in newer libraries. A query passes the struct's size to the library. An older
/// library fills in only the members that it knows, so the others stay zero.
#[repr(C)]
struct PortAttributes {
    base: ibv_port_attr,
    /// The speed if it needs more than `active_speed`'s 8 bits (XDR and later), else 0.
    active_speed_ex: u32,
    room_to_grow: [u32; 15],
}

impl Context {
    /// Queries port `port` (from 1).
    ///
    /// # Errors
    /// [`Error::Os`] if the query fails, for example because the device has no such port.
    pub fn port(&self, port: u8) -> Result<PortInfo> {
        let attributes = self.port_attributes(port)?;
        let base = &attributes.base;
        let speed = match attributes.active_speed_ex {
            0 => u32::from(base.active_speed),
            extended => extended,
        };
        Ok(PortInfo {
            state: state(base.state),
            link_layer: match base.link_layer {
                LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                _ => LinkLayer::Unspecified,
            },
            active_mtu_bytes: mtu_bytes(base.active_mtu),
            max_message_bytes: base.max_msg_sz,
            speed_mbps: lanes(base.active_width) * lane_mbps(speed),
        })
    }

    /// Returns the entries in use in the GID table of port `port` (from 1), in the table's order.
    ///
    /// # Errors
    /// [`Error::Os`] if the query fails, [`Error::Missing`] if the library cannot report GID types.
    pub fn gid_table(&self, port: u8) -> Result<Vec<GidEntry>> {
        let entries = match (self.library.query_gid_table, self.library.query_gid_ex) {
            (Some(query_table), _) => self.whole_gid_table(query_table)?,
            (None, Some(query_entry)) => self.gid_entries_of(port, query_entry)?,
            (None, None) => {
                return Err(Missing::GidTypes(self.name().to_owned()).into());
            }
        };
        Ok(entries
            .iter()
            .filter(|entry| entry.port_num == u32::from(port))
            .filter_map(gid_entry)
            .collect())
    }

    /// Queries the port like verbs.h's inline `ibv_query_port`. The exported function of that name
    /// fills only an old, shorter struct.
    fn port_attributes(&self, port: u8) -> Result<PortAttributes> {
        // SAFETY: a struct of integers; all zero is a valid value.
        let mut attributes: PortAttributes = unsafe { std::mem::zeroed() };
        let status = match extended_operation!(self, query_port) {
            Some(query_port) => {
                let bytes = size_of::<PortAttributes>();
                // SAFETY: the context is open, and the library writes at most `bytes`.
                unsafe { query_port(self.raw.as_ptr(), port, (&raw mut attributes).cast(), bytes) }
            }
            // SAFETY: the old struct is a prefix of `PortAttributes`.
            None => unsafe {
                (self.library.query_port)(self.raw.as_ptr(), port, (&raw mut attributes).cast())
            },
        };
        match status {
            0 => Ok(attributes),
            errno => Err(Error::Os {
                call: Call::QueryPort {
                    device: self.name().to_owned(),
                    port,
                },
                errno,
            }),
        }
    }

    /// Reads the entries of all ports. The kernel has no query for the table of one port, and
    /// refuses a buffer that is too small for all entries. So the buffer has room for full tables.
    fn whole_gid_table(&self, query_table: QueryGidTable) -> Result<Vec<ibv_gid_entry>> {
        let mut room = 0;
        for port in 1..=self.ports() {
            room += usize::try_from(self.port_attributes(port)?.base.gid_tbl_len).unwrap_or(0);
        }
        if room == 0 {
            return Ok(Vec::new());
        }
        let mut entries: Vec<ibv_gid_entry> = Vec::with_capacity(room);
        // SAFETY: the context is open, and there is room for `room` entries of the given size.
        let written = unsafe {
            query_table(
                self.raw.as_ptr(),
                entries.as_mut_ptr(),
                room,
                0,
                size_of::<ibv_gid_entry>(),
            )
        };
        if written < 0 {
            let errno = i32::try_from(-written).unwrap_or(0);
            return Err(Error::Os {
                call: Call::GidTable {
                    device: self.name().to_owned(),
                },
                errno,
            });
        }
        // SAFETY: the library has written `written` entries, and at most `room`.
        unsafe { entries.set_len(written.unsigned_abs().min(room)) };
        Ok(entries)
    }

    fn gid_entries_of(&self, port: u8, query_entry: QueryGidEntry) -> Result<Vec<ibv_gid_entry>> {
        let mut entries = Vec::new();
        let length = u32::try_from(self.port_attributes(port)?.base.gid_tbl_len).unwrap_or(0);
        for index in 0..length {
            // SAFETY: a struct of integers; all zero is a valid value.
            let mut entry: ibv_gid_entry = unsafe { std::mem::zeroed() };
            let bytes = size_of::<ibv_gid_entry>();
            // SAFETY: the context is open, and the entry is a local of the given size.
            let status = unsafe {
                query_entry(
                    self.raw.as_ptr(),
                    u32::from(port),
                    index,
                    &raw mut entry,
                    0,
                    bytes,
                )
            };
            match status {
                0 => entries.push(entry),
                // An empty entry of the table.
                libc::ENODATA => {}
                errno => {
                    return Err(Error::Os {
                        call: Call::Gid {
                            device: self.name().to_owned(),
                            port,
                            index,
                        },
                        errno,
                    });
                }
            }
        }
        Ok(entries)
    }
}

type QueryGidTable = super::library::Pointer<fn__ibv_query_gid_table>;
type QueryGidEntry = super::library::Pointer<fn__ibv_query_gid_ex>;

/// Converts an entry. `None` if it is empty or of an unknown kind.
fn gid_entry(entry: &ibv_gid_entry) -> Option<GidEntry> {
    let kind = match entry.gid_type {
        IBV_GID_TYPE_IB => GidKind::InfiniBand,
        IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
        IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
        _ => return None,
    };
    // SAFETY: every member of the union is 16 bytes without invalid values.
    let gid = unsafe { entry.gid.raw };
    let index = u16::try_from(entry.gid_index).ok()?;
    (gid != [0; 16]).then_some(GidEntry {
        index,
        gid,
        kind,
        ifindex: entry.ndev_ifindex,
    })
}

fn state(state: ibv_port_state) -> PortState {
    match state {
        IBV_PORT_ACTIVE => PortState::Active,
        IBV_PORT_DOWN => PortState::Down,
        IBV_PORT_INIT => PortState::Init,
        IBV_PORT_ARMED => PortState::Armed,
        other => PortState::Other(other),
    }
}

/// Converts an MTU to bytes; 0 if the value is invalid.
fn mtu_bytes(mtu: ibv_mtu) -> u32 {
    match mtu {
        IBV_MTU_256..=IBV_MTU_4096 => 128 << mtu,
        _ => 0,
    }
}

/// Converts the kernel's `IB_WIDTH_*` (ib_verbs.h) to a number of lanes; 0 if unknown.
fn lanes(width: u8) -> u32 {
    match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    }
}

/// Converts the kernel's `IB_SPEED_*` (ib_verbs.h) to Mb/s as in the `rate` file: SDR, DDR, QDR,
/// FDR10, FDR, EDR, HDR, NDR, XDR; 0 if unknown.
fn lane_mbps(speed: u32) -> u32 {
    match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        256 => 200_000,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_match_the_rate_file() {
        let four_lanes = 2;
        assert_eq!(lanes(four_lanes) * lane_mbps(64), 200_000, "4 lanes of HDR");
        assert_eq!(
            lanes(16) * lane_mbps(128),
            200_000,
            "2 lanes of NDR, as an owner's Spark reports its port"
        );
        assert_eq!(lanes(four_lanes) * lane_mbps(32), 100_000, "EDR");
        assert_eq!(
            lanes(1) * lane_mbps(1),
            2_500,
            "soft-RoCE without a link speed"
        );
        assert_eq!(lanes(3), 0);
        assert_eq!(lane_mbps(3), 0);
    }

    #[test]
    fn mtus_are_bytes() {
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6].map(mtu_bytes),
            [0, 256, 512, 1024, 2048, 4096, 0]
        );
    }

    #[test]
    fn a_newer_librarys_speed_is_read_behind_the_old_struct() {
        assert_eq!(std::mem::offset_of!(PortAttributes, active_speed_ex), 52);
    }

    #[test]
    fn empty_and_unknown_addresses_are_left_out() {
        let entry = |raw: [u8; 16], gid_type| ibv_gid_entry {
            gid: ibv_gid { raw },
            gid_index: 3,
            port_num: 1,
            gid_type,
            ndev_ifindex: 9,
        };
        let address = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 100, 1];
        let expected = GidEntry {
            index: 3,
            gid: address,
            kind: GidKind::RoceV2,
            ifindex: 9,
        };
        assert_eq!(
            gid_entry(&entry(address, IBV_GID_TYPE_ROCE_V2)),
            Some(expected)
        );
        assert_eq!(gid_entry(&entry([0; 16], IBV_GID_TYPE_ROCE_V2)), None);
        assert_eq!(gid_entry(&entry(address, 7)), None);
    }
}
