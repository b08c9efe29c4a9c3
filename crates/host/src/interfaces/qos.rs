//! The priorities of an interface's packets, and the priorities with priority flow control (PFC).
//!
//! Any user may ask the kernel by netlink: `RTM_GETDCB` with `DCB_CMD_IEEE_GET`
//! (include/uapi/linux/dcbnl.h). mlx5 lists DSCP entries only while the port trusts DSCP
//! (`mlx5e_dcbnl_dscp_app` in en_dcbnl.c); mlnx_qos relies on this, too. A port that trusts PCP
//! uses the QP's service level (`mlx5_set_path` in qp.c: `eth_prio`).

use super::netlink;
use netlink_packet_core::NlasIterator;
use std::io;

/// The kernel's settings of a port that concern priorities.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortQos {
    /// Priority of each DSCP, if the port trusts DSCP. `None` if it trusts PCP.
    pub dscp: Option<[u8; 64]>,
    /// Priorities with PFC, one bit each.
    pub pfc: u8,
}

impl PortQos {
    /// Returns the priority that this port gives to RoCE packets with this traffic class and
    /// service level.
    pub fn priority(&self, traffic_class: u8, service_level: u8) -> u8 {
        match &self.dscp {
            Some(map) => map[usize::from(traffic_class >> 2)],
            None => service_level & 7,
        }
    }

    /// Returns true if a priority has PFC.
    pub fn has_pfc(&self, priority: u8) -> bool {
        self.pfc & (1 << priority) != 0
    }

    /// Lists the priorities with PFC.
    pub fn pfc_text(&self) -> String {
        let with: Vec<String> = (0..8)
            .filter(|priority| self.has_pfc(*priority))
            .map(|one| one.to_string())
            .collect();
        if with.is_empty() {
            "none".to_owned()
        } else {
            with.join(",")
        }
    }

    fn parse(attributes: &[u8]) -> Option<Self> {
        // In dcbnl.h: DCB_ATTR_IEEE, DCB_ATTR_IEEE_PFC, DCB_ATTR_IEEE_APP_TABLE and
        // IEEE_8021QAZ_APP_SEL_DSCP.
        const IEEE: u16 = 13;
        const IEEE_PFC: u16 = 2;
        const IEEE_APP_TABLE: u16 = 3;
        const SELECTOR_DSCP: u8 = 5;
        let ieee = attribute(attributes, IEEE)?;
        // struct ieee_pfc: pfc_cap, pfc_en.
        let pfc = attribute(&ieee, IEEE_PFC)
            .and_then(|pfc| pfc.get(1).copied())
            .unwrap_or(0);
        let mut dscp = None;
        for app in
            NlasIterator::new(&attribute(&ieee, IEEE_APP_TABLE).unwrap_or_default()[..]).flatten()
        {
            // struct dcb_app: selector, priority, protocol.
            let [SELECTOR_DSCP, priority @ 0..8, one, other] = *app.value() else {
                continue;
            };
            let map = dscp.get_or_insert_with(default_map);
            if let Some(slot) = map.get_mut(usize::from(u16::from_ne_bytes([one, other]))) {
                *slot = priority;
            }
        }
        Some(Self { dscp, pfc })
    }
}

/// Returns the priority of each DSCP without an entry: the upper three bits of the DSCP, as in mlx5
/// (`mlx5e_trust_initialize` and the firmware's default map).
pub fn default_map() -> [u8; 64] {
    std::array::from_fn(|dscp| (dscp >> 3) as u8)
}

fn attribute(attributes: &[u8], kind: u16) -> Option<Vec<u8>> {
    let found = NlasIterator::new(attributes)
        .flatten()
        .find(|one| one.kind() == kind);
    found.map(|one| one.value().to_vec())
}

/// Asks the kernel for an interface's priorities. Returns `None` if the interface's driver reports
/// none.
///
/// # Errors
/// The interface does not exist here, or the kernel does not answer.
pub fn read(netdev: &str) -> io::Result<Option<PortQos>> {
    match netlink::ask(&request(netdev)) {
        Ok((_, reply)) => {
            let attributes = reply
                .get(DCBMSG_BYTES..)
                .ok_or(io::ErrorKind::UnexpectedEof)?;
            Ok(PortQos::parse(attributes))
        }
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Size of `struct dcbmsg`: family, command, padding.
const DCBMSG_BYTES: usize = 4;

fn request(netdev: &str) -> Vec<u8> {
    // The message type is in rtnetlink.h; the command and the attribute are in dcbnl.h.
    const RTM_GETDCB: u16 = 78;
    const DCB_CMD_IEEE_GET: u8 = 21;
    const DCB_ATTR_IFNAME: u16 = 1;
    let name = [netdev.as_bytes(), &[0]].concat();
    netlink::request(
        RTM_GETDCB,
        &[0, DCB_CMD_IEEE_GET, 0, 0],
        &[(DCB_ATTR_IFNAME, &name)],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::{DefaultNla, Emitable};

    fn attribute_bytes(kind: u16, value: &[u8]) -> Vec<u8> {
        let attribute = DefaultNla::new(kind, value.to_vec());
        let mut bytes = vec![0; attribute.buffer_len()];
        attribute.emit(&mut bytes);
        bytes
    }

    /// Returns attributes in the kernel's order: name, IEEE, DCBX. The attribute IEEE contains ETS,
    /// PFC and the APP table.
    fn reply(pfc: u8, apps: &[(u8, u8, u16)]) -> Vec<u8> {
        let mut ieee_pfc = [0; 136];
        (ieee_pfc[0], ieee_pfc[1]) = (8, pfc);
        let app = |(selector, priority, protocol): &(u8, u8, u16)| {
            let [one, other] = protocol.to_ne_bytes();
            attribute_bytes(1, &[*selector, *priority, one, other])
        };
        let apps: Vec<u8> = apps.iter().flat_map(app).collect();
        let ieee = [
            attribute_bytes(1, &[0; 59]),
            attribute_bytes(2, &ieee_pfc),
            attribute_bytes(3 | 0x8000, &apps),
        ];
        [
            attribute_bytes(1, b"eth0\0"),
            attribute_bytes(13 | 0x8000, &ieee.concat()),
            attribute_bytes(14, &[5]),
        ]
        .concat()
    }

    #[test]
    fn a_port_trusts_dscp_where_the_table_has_one() {
        let port =
            PortQos::parse(&reply(0b1000, &[(1, 3, 0x8915), (5, 3, 26), (5, 6, 48)])).unwrap();
        let of = |traffic_class| port.priority(traffic_class, 5);
        assert_eq!(
            [of(106), of(104), of(192), of(0)],
            [3, 3, 6, 0],
            "the service level does not count"
        );
        assert_eq!(
            [of(40 << 2), of(63 << 2)],
            [5, 7],
            "a DSCP without an entry"
        );
        let port = PortQos::parse(&reply(0b1000, &[(1, 3, 0x8915)])).unwrap();
        assert_eq!(
            port,
            PortQos {
                dscp: None,
                pfc: 0b1000
            }
        );
        assert_eq!([port.priority(106, 0), port.priority(106, 3)], [0, 3]);
    }

    #[test]
    fn a_reply_that_ends_early_or_lies_is_no_panic() {
        let whole = reply(0b1000, &[(5, 9, 26), (5, 3, 64), (5, 3, 65535)]);
        let port = PortQos::parse(&whole).unwrap();
        assert_eq!(
            port,
            PortQos {
                dscp: Some(default_map()),
                pfc: 0b1000
            },
            "priorities and DSCPs out of range"
        );
        for end in 0..whole.len() {
            PortQos::parse(&whole[..end]);
        }
        for at in 0..whole.len() {
            for bits in [0, 1, 0x7f, 0xff] {
                let mut wrong = whole.clone();
                wrong[at] = bits;
                PortQos::parse(&wrong);
            }
        }
    }

    /// The request of iproute2's `dcb app show dev lo` (by strace), without NLM_F_ACK.
    #[test]
    fn the_request_is_that_of_dcb() {
        let header = [28, 0, 0, 0, 78, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(
            request("lo"),
            [&header[..], &[0, 21, 0, 0, 7, 0, 1, 0, b'l', b'o', 0, 0]].concat()
        );
    }

    #[test]
    fn the_kernel_answers_for_a_driver_without_priorities_and_for_no_interface() {
        assert!(read("lo").unwrap().is_none());
        assert_eq!(
            read("no-such-netdev").unwrap_err().raw_os_error(),
            Some(libc::ENODEV)
        );
    }
}
