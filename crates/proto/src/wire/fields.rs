//! Fields shared by handshake and control messages. Each field is checked when it is read.

use super::codec::{Malformed, Reader, Writer};
use std::net::{IpAddr, Ipv6Addr};

/// Maximum number of queue pairs of a connection on one rail.
pub(super) const MAX_QPS: usize = 16;
/// Longest name (of a host, rail, port or GPU), in bytes.
pub(super) const NAME_BYTES: usize = 64;
pub(super) const MAX_ADDRESSES: usize = 16;
/// Upper bound for speeds, in Mb/s: 10 Tb/s, faster than any port.
const MAX_MBPS: u64 = 10_000_000;

/// Properties of a rail that the peer needs to pair it with its own rails.
#[derive(Debug, Clone, PartialEq, Hash)]
pub struct RailAdvert {
    /// Names of the RDMA device and port, for log lines.
    pub name: String,
    /// The port's `phys_port_name` in sysfs; empty if the kernel reports none.
    pub phys_port: String,
    /// The rail's PCIe link and cable.
    pub attachment: Attachment,
    /// Bandwidth in Mb/s while the other rails on its PCIe link are equally busy.
    pub speed_mbps: u32,
    /// Path MTU in bytes.
    pub mtu_bytes: u32,
    /// The rail's RoCE v2 addresses.
    pub addresses: Vec<Address>,
    /// True if the rail can be used now. Otherwise the other fields are the last known ones.
    pub is_usable: bool,
}

/// PCIe link and cable of a rail. Several rails of a host may share a link or a cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Attachment {
    /// Number of the PCIe link. Rails with the same number share the link.
    pub link: u8,
    /// Payload bandwidth of the PCIe link, in Mb/s; 0 if unknown.
    pub link_mbps: u32,
    /// Number of the cable. Rails with the same number share the cable.
    pub cable: u8,
    /// Line rate of the port, in Mb/s.
    pub port_mbps: u32,
}

/// A GID, with the length of its subnet prefix if known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address {
    /// The GID; IPv4 addresses are mapped into IPv6.
    pub gid: [u8; 16],
    /// Prefix length in the 128 bits of the GID (an IPv4 /24 is 120).
    pub prefix: Option<u8>,
}

impl Address {
    /// Creates an address. `prefix` is the prefix length of the IP address. The caller ensures that
    /// it is at most 32 for IPv4.
    pub fn new(gid: [u8; 16], prefix: Option<u8>) -> Self {
        let prefix = match Ipv6Addr::from(gid).to_ipv4_mapped() {
            Some(_) => prefix.and_then(|bits| bits.checked_add(96)),
            None => prefix,
        };
        Self { gid, prefix }
    }

    /// Returns true for an IPv6 link-local address.
    pub fn is_link_local(&self) -> bool {
        Ipv6Addr::from(self.gid).is_unicast_link_local()
    }
}

/// Returns the rank of an address in the order of preference: IPv4, then routable IPv6, then
/// link-local. A message that has no room for all addresses of a port has the first ones in this
/// order.
pub fn preference_rank(gid: &[u8; 16]) -> u8 {
    let gid = Ipv6Addr::from(*gid);
    match gid {
        _ if gid.to_ipv4_mapped().is_some() => 0,
        _ if gid.is_unicast_link_local() => 2,
        _ => 1,
    }
}

/// Priority of a connection's packets. It selects the packets' queues in switches and NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Priority {
    /// Traffic class of the IP header: DSCP and ECN bits.
    pub traffic_class: u8,
    /// Service level, 0 to 15.
    pub service_level: u8,
}

impl Priority {
    pub(super) fn write(self, w: &mut Writer) {
        w.u8(self.traffic_class).u8(self.service_level);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            traffic_class: r.u8()?,
            service_level: ranged("priority", u64::from(r.u8()?), 0, 15)? as u8,
        })
    }
}

/// One side's queue pair, as the other side must know it to connect its own queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QpEnd {
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// First packet sequence number that this queue pair sends, 24 bits.
    pub psn: u32,
}

/// One side's queue pairs and mailbox key on a lane, for the other side.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct LaneEnd {
    /// The queue pairs.
    pub qps: Vec<QpEnd>,
    /// Key of this side's mailbox on the lane.
    pub mailbox_rkey: u32,
}

impl LaneEnd {
    pub(super) fn write(&self, w: &mut Writer) {
        w.list(&self.qps, write_qp).u32(self.mailbox_rkey);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            qps: read_qps(r)?,
            mailbox_rkey: r.u32()?,
        })
    }
}

pub(super) fn write_qp(w: &mut Writer, qp: &QpEnd) {
    w.u32(qp.number).u32(qp.psn);
}

/// Reads one side's queue pairs on a rail. An empty list is refused: without queue pairs, no write
/// could fail and show the loss of the rail.
pub(super) fn read_qps(r: &mut Reader<'_>) -> Result<Vec<QpEnd>, Malformed> {
    let qps = r.list("queue pairs", MAX_QPS, read_qp)?;
    if qps.is_empty() {
        Err(Malformed::Value {
            what: "queue pairs",
            value: 0,
        })
    } else {
        Ok(qps)
    }
}

/// Reads the number of queue pairs that a pair of rails will have.
pub(super) fn read_qp_count(r: &mut Reader<'_>) -> Result<u8, Malformed> {
    ranged("queue pairs", u64::from(r.u8()?), 1, MAX_QPS as u64).map(|count| count as u8)
}

/// Reads a port's address. Unspecified, multicast and broadcast addresses are refused.
pub(super) fn read_gid(r: &mut Reader<'_>) -> Result<[u8; 16], Malformed> {
    let gid: [u8; 16] = r.array()?;
    let of_one = match Ipv6Addr::from(gid).to_canonical() {
        IpAddr::V4(v4) => !(v4.is_unspecified() || v4.is_multicast() || v4.is_broadcast()),
        IpAddr::V6(v6) => !(v6.is_unspecified() || v6.is_multicast()),
    };
    let [high, ..] = gid;
    if of_one {
        Ok(gid)
    } else {
        Err(Malformed::Value {
            what: "GID with first byte",
            value: u64::from(high),
        })
    }
}

fn read_qp(r: &mut Reader<'_>) -> Result<QpEnd, Malformed> {
    const BITS_24: u64 = (1 << 24) - 1;
    let number = ranged("queue pair", u64::from(r.u32()?), 0, BITS_24)? as u32;
    let psn = ranged("sequence number", u64::from(r.u32()?), 0, BITS_24)? as u32;
    Ok(QpEnd { number, psn })
}

pub(super) fn mtu_bytes(r: &mut Reader<'_>) -> Result<u32, Malformed> {
    match r.u32()? {
        mtu @ (256 | 512 | 1024 | 2048 | 4096) => Ok(mtu),
        other => Err(Malformed::PathMtu(other)),
    }
}

pub(super) fn chunk_bytes(r: &mut Reader<'_>) -> Result<u32, Malformed> {
    // At least 4 KiB, so that a peer cannot make this side split a message into millions of writes.
    // At most 2^30, because a completion's byte count has 32 bits.
    let bytes = ranged("chunk size", u64::from(r.u32()?), 4096, 1 << 30)?;
    if bytes % 128 == 0 {
        Ok(bytes as u32)
    } else {
        Err(Malformed::Value {
            what: "chunk size",
            value: bytes,
        })
    }
}

pub(super) fn ranged(
    what: &'static str,
    value: u64,
    low: u64,
    high: u64,
) -> Result<u64, Malformed> {
    if (low..=high).contains(&value) {
        Ok(value)
    } else {
        Err(Malformed::Value { what, value })
    }
}

impl RailAdvert {
    pub(super) fn write(&self, w: &mut Writer) {
        w.text(&self.name, NAME_BYTES)
            .text(&self.phys_port, NAME_BYTES);
        self.attachment.write(w);
        w.u32(self.speed_mbps).u32(self.mtu_bytes);
        w.list(
            &self.addresses[..self.addresses.len().min(MAX_ADDRESSES)],
            |w, address| {
                w.bytes(&address.gid).u8(address.prefix.unwrap_or(u8::MAX));
            },
        );
        w.u8(u8::from(self.is_usable));
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            name: r.text("rail name", NAME_BYTES)?,
            phys_port: r.text("port name", NAME_BYTES)?,
            attachment: Attachment::read(r)?,
            speed_mbps: ranged("rail speed", u64::from(r.u32()?), 1, MAX_MBPS)? as u32,
            mtu_bytes: mtu_bytes(r)?,
            addresses: r.list("addresses", MAX_ADDRESSES, |r| {
                let gid = read_gid(r)?;
                let prefix = Some(r.u8()?).filter(|p| *p != u8::MAX);
                match prefix {
                    Some(p) if p > 128 => Err(Malformed::Value {
                        what: "prefix",
                        value: u64::from(p),
                    }),
                    _ => Ok(Address { gid, prefix }),
                }
            })?,
            is_usable: ranged("rail state", u64::from(r.u8()?), 0, 1)? == 1,
        })
    }
}

impl Attachment {
    pub(super) fn write(&self, w: &mut Writer) {
        w.u8(self.link)
            .u32(self.link_mbps)
            .u8(self.cable)
            .u32(self.port_mbps);
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            link: r.u8()?,
            link_mbps: ranged("link speed", u64::from(r.u32()?), 0, MAX_MBPS)? as u32,
            cable: r.u8()?,
            port_mbps: ranged("port speed", u64::from(r.u32()?), 1, MAX_MBPS)? as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rail_without_queue_pairs_is_refused() {
        let end = QpEnd { number: 1, psn: 2 };
        let read = |qps: &[QpEnd]| {
            let mut w = Writer::default();
            w.list(qps, write_qp);
            read_qps(&mut Reader::new(&w.into_bytes()))
        };
        assert_eq!(read(&[end; MAX_QPS]), Ok(vec![end; MAX_QPS]));
        assert!(read(&[]).is_err() && read(&[end; MAX_QPS + 1]).is_err());
        assert!(
            read(&[QpEnd {
                number: 1 << 24,
                psn: 0
            }])
            .is_err()
                && read(&[QpEnd {
                    number: 0,
                    psn: 1 << 24
                }])
                .is_err()
        );
    }

    #[test]
    fn a_prefix_counts_the_bits_of_the_gid() {
        let mapped = std::net::Ipv4Addr::new(10, 0, 0, 1)
            .to_ipv6_mapped()
            .octets();
        assert_eq!(Address::new(mapped, Some(24)).prefix, Some(120));
        assert_eq!(Address::new(mapped, None).prefix, None);
        assert_eq!(Address::new([0xfd; 16], Some(64)).prefix, Some(64));
    }

    #[test]
    fn an_address_without_a_port_is_refused() {
        let mapped = |ip: [u8; 4]| std::net::Ipv4Addr::from(ip).to_ipv6_mapped().octets();
        let read = |gid: [u8; 16]| read_gid(&mut Reader::new(&gid));
        for gid in [
            [0; 16],
            [0xff; 16],
            mapped([0; 4]),
            mapped([224, 0, 0, 1]),
            mapped([255; 4]),
        ] {
            assert!(read(gid).is_err(), "{gid:?}");
        }
        for gid in [
            [0xfe; 16],
            mapped([192, 168, 100, 1]),
            mapped([127, 0, 0, 1]),
        ] {
            assert_eq!(read(gid), Ok(gid));
        }
    }
}
