//! Fields that the handshake's messages and the notices of a running connection have in common. Each is checked as it is read.

use super::codec::{Malformed, Reader, Writer};
use super::message::QpEnd;
use std::net::{IpAddr, Ipv6Addr};

/// Queue pairs of a connection on one rail.
pub(super) const MAX_QPS: usize = 16;

pub(super) fn write_qp(w: &mut Writer, qp: &QpEnd) {
    w.u32(qp.number).u32(qp.psn);
}

/// One end's queue pairs of a rail. One at least: a rail without any would carry nothing, and never be lost either.
pub(super) fn read_qps(r: &mut Reader<'_>) -> Result<Vec<QpEnd>, Malformed> {
    let qps = r.list("queue pairs", MAX_QPS, read_qp)?;
    if qps.is_empty() { Err(Malformed::Value { what: "queue pairs", value: 0 }) } else { Ok(qps) }
}

/// An address of one port: a queue pair is connected with it.
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
        Err(Malformed::Value { what: "port address, beginning with", value: u64::from(high) })
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
    // At least a page, so that a peer cannot make this side split a message into millions of writes; at most 2^30,
    // so that a completion's 32-bit byte count holds it.
    let bytes = ranged("chunk size", u64::from(r.u32()?), 4096, 1 << 30)?;
    if bytes % 128 == 0 { Ok(bytes as u32) } else { Err(Malformed::Value { what: "chunk size", value: bytes }) }
}

pub(super) fn ranged(what: &'static str, value: u64, low: u64, high: u64) -> Result<u64, Malformed> {
    if (low..=high).contains(&value) { Ok(value) } else { Err(Malformed::Value { what, value }) }
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
            read(&[QpEnd { number: 1 << 24, psn: 0 }]).is_err() && read(&[QpEnd { number: 0, psn: 1 << 24 }]).is_err()
        );
    }

    #[test]
    fn an_address_of_no_port_is_refused() {
        let mapped = |ip: [u8; 4]| std::net::Ipv4Addr::from(ip).to_ipv6_mapped().octets();
        let read = |gid: [u8; 16]| read_gid(&mut Reader::new(&gid));
        for gid in [[0; 16], [0xff; 16], mapped([0; 4]), mapped([224, 0, 0, 1]), mapped([255; 4])] {
            assert!(read(gid).is_err(), "{gid:?}");
        }
        for gid in [[0xfe; 16], mapped([192, 168, 100, 1]), mapped([127, 0, 0, 1])] {
            assert_eq!(read(gid), Ok(gid));
        }
    }
}
