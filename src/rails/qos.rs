//! Quality of service of the rails' ports: the priority of RoCE packets, and the priorities with
//! priority flow control (PFC).
//!
//! Any user may ask the kernel by netlink: `RTM_GETDCB` with `DCB_CMD_IEEE_GET`
//! (include/uapi/linux/dcbnl.h). mlx5 lists DSCP entries only while the port trusts DSCP
//! (`mlx5e_dcbnl_dscp_app` in en_dcbnl.c); mlnx_qos relies on this, too. A port that trusts PCP
//! uses the QP's service level (`mlx5_set_path` in qp.c: `eth_prio`).

use super::model::{Survey, Warning, WarningKind};
use super::text::list;
use crate::interfaces::netlink;
use crate::wire::fields::Priority;
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

/// The [`PortQos`] of a rail's port, with the rail's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailQos {
    /// RDMA device.
    pub device: String,
    /// Network interface.
    pub netdev: String,
    /// The port's settings.
    pub port: PortQos,
}

/// Conventional DSCP of RoCE (MikroTik's and NVIDIA's documents).
const ROCE_DSCP: u8 = 26;
/// Conventional priority of RoCE (same sources).
const ROCE_PRIORITY: u8 = 3;

impl PortQos {
    /// Returns the priority that this port gives to packets with the traffic class and service
    /// level of `roce`.
    pub fn priority(&self, roce: Priority) -> u8 {
        match &self.dscp {
            Some(map) => map[usize::from(roce.traffic_class >> 2)],
            None => roce.service_level & 7,
        }
    }

    /// Returns true if a priority has PFC.
    pub fn has_pfc(&self, priority: u8) -> bool {
        self.pfc & (1 << priority) != 0
    }

    /// Returns true if PFC is on for some priority, but not for the priority of RoCE packets.
    pub fn is_unprotected(&self, roce: Priority) -> bool {
        self.pfc != 0 && !self.has_pfc(self.priority(roce))
    }

    /// Returns the priority to recommend for RoCE: the lowest one with PFC, or the conventional one
    /// if none has PFC.
    pub fn lossless(&self) -> u8 {
        if self.pfc == 0 { ROCE_PRIORITY } else { self.pfc.trailing_zeros() as u8 }
    }

    /// Returns a DSCP for priority [`Self::lossless`]. This is the conventional DSCP of RoCE if the
    /// port maps it to that priority, or maps no DSCP to it. Otherwise it is the lowest DSCP that
    /// the port maps to that priority.
    pub fn lossless_dscp(&self) -> u8 {
        let has_it = |dscp: &u8| self.dscp.is_some_and(|map| map[usize::from(*dscp)] == self.lossless());
        std::iter::once(ROCE_DSCP).chain(0..64).find(has_it).unwrap_or(ROCE_DSCP)
    }

    /// Returns `NCCL_IB_TC` for [`Self::lossless_dscp`], with senders' ECN bits (ECT(0)).
    pub fn lossless_traffic_class(&self) -> u8 {
        self.lossless_dscp() << 2 | 2
    }

    /// Describes the port for a line of text.
    pub fn text(&self, roce: Priority) -> String {
        let Priority { traffic_class, service_level } = roce;
        let priority = self.priority(roce);
        let with = if self.has_pfc(priority) { "with" } else { "without" };
        let (trust, chosen) = match self.dscp {
            Some(_) => ("DSCP", format!("traffic class {traffic_class}")),
            None => ("PCP", format!("service level {service_level}")),
        };
        format!("RoCE has priority {priority} {with} PFC ({chosen}; trust {trust}, PFC on {})", self.pfc_text())
    }

    /// Lists the priorities with PFC.
    pub fn pfc_text(&self) -> String {
        let with: Vec<String> = (0..8).filter(|priority| self.has_pfc(*priority)).map(|one| one.to_string()).collect();
        if with.is_empty() { "none".to_owned() } else { with.join(",") }
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
        let pfc = attribute(&ieee, IEEE_PFC).and_then(|pfc| pfc.get(1).copied()).unwrap_or(0);
        let mut dscp = None;
        for app in NlasIterator::new(&attribute(&ieee, IEEE_APP_TABLE).unwrap_or_default()[..]).flatten() {
            // struct dcb_app: selector, priority, protocol.
            let [SELECTOR_DSCP, priority @ 0..8, one, other] = *app.value() else { continue };
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
    let found = NlasIterator::new(attributes).flatten().find(|one| one.kind() == kind);
    found.map(|one| one.value().to_vec())
}

/// Asks the kernel for an interface's priorities. Returns `None` if the interface's driver reports
/// none.
///
/// # Errors
/// The interface does not exist here, or the kernel does not answer.
fn read(netdev: &str) -> io::Result<Option<PortQos>> {
    match netlink::ask(&request(netdev)) {
        Ok((_, reply)) => {
            let attributes = reply.get(DCBMSG_BYTES..).ok_or(io::ErrorKind::UnexpectedEof)?;
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
    netlink::request(RTM_GETDCB, &[0, DCB_CMD_IEEE_GET, 0, 0], &[(DCB_ATTR_IFNAME, &name)])
}

impl Survey {
    /// Asks the kernel for the rails' priorities. The first list has the rails for which the kernel
    /// has reported priorities. The second list has the interface and the error for each failed
    /// query. A rail without a visible interface, or whose driver has no priorities, is in neither.
    pub fn qos(&self) -> (Vec<RailQos>, Vec<(String, io::Error)>) {
        let (mut found, mut errors) = (Vec::new(), Vec::new());
        for (rail, netdev) in self.rails.iter().filter_map(|rail| Some((rail, rail.netdev.as_ref()?))) {
            match read(netdev) {
                Ok(Some(port)) => found.push(RailQos { device: rail.device.clone(), netdev: netdev.clone(), port }),
                Ok(None) => {}
                Err(error) => errors.push((netdev.clone(), error)),
            }
        }
        (found, errors)
    }
}

/// Describes the rails' priorities for the log. Rails with the same priorities share a line.
pub fn qos_info(rails: &[RailQos], roce: Priority) -> Vec<String> {
    let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
    for rail in rails {
        let text = rail.port.text(roce);
        match lines.iter_mut().find(|(known, _)| *known == text) {
            Some((_, devices)) => devices.push(&rail.device),
            None => lines.push((text, vec![&rail.device])),
        }
    }
    lines.into_iter().map(|(text, devices)| format!("{}: {text}", list(devices.into_iter()))).collect()
}

/// Returns a warning if a rail's port has PFC, but not for the priority of RoCE packets.
pub fn qos_warning(rails: &[RailQos], roce: Priority) -> Option<Warning> {
    let unprotected: Vec<&RailQos> = rails.iter().filter(|rail| rail.port.is_unprotected(roce)).collect();
    let first = &unprotected.first()?.port;
    let devices: Vec<String> = unprotected.iter().map(|rail| rail.device.clone()).collect();
    let traffic_class = first.lossless_traffic_class();
    let cure = match first.dscp {
        Some(_) => format!("set NCCL_IB_TC={traffic_class} on every host"),
        None => format!("let the ports trust DSCP, and set NCCL_IB_TC={traffic_class} on every host"),
    };
    let text = format!(
        "{}: RoCE has priority {}, and PFC is on for {} alone: a switch drops these packets when its buffers are full; {cure}",
        list(devices.iter().map(String::as_str)),
        first.priority(roce),
        first.pfc_text()
    );
    Some(Warning { kind: WarningKind::UnprotectedPriority, devices, text })
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
        let ieee = [attribute_bytes(1, &[0; 59]), attribute_bytes(2, &ieee_pfc), attribute_bytes(3 | 0x8000, &apps)];
        [attribute_bytes(1, b"eth0\0"), attribute_bytes(13 | 0x8000, &ieee.concat()), attribute_bytes(14, &[5])]
            .concat()
    }

    fn roce(traffic_class: u8, service_level: u8) -> Priority {
        Priority { traffic_class, service_level }
    }

    #[test]
    fn a_port_trusts_dscp_where_the_table_has_one() {
        let port = PortQos::parse(&reply(0b1000, &[(1, 3, 0x8915), (5, 3, 26), (5, 6, 48)])).unwrap();
        let of = |traffic_class| port.priority(roce(traffic_class, 5));
        assert_eq!([of(106), of(104), of(192), of(0)], [3, 3, 6, 0], "the service level does not count");
        assert_eq!([of(40 << 2), of(63 << 2)], [5, 7], "a DSCP without an entry");
        assert!(!port.is_unprotected(roce(106, 0)) && port.is_unprotected(roce(0, 0)));
        assert_eq!((port.lossless(), port.lossless_dscp(), port.lossless_traffic_class()), (3, 26, 106));
        let port = PortQos::parse(&reply(0b1000, &[(1, 3, 0x8915)])).unwrap();
        assert_eq!(port, PortQos { dscp: None, pfc: 0b1000 });
        assert_eq!([port.priority(roce(106, 0)), port.priority(roce(106, 3))], [0, 3]);
        let port = PortQos::parse(&reply(0, &[])).unwrap();
        assert!(!port.is_unprotected(roce(106, 0)));
        // A user's choice of another priority stays.
        let port = PortQos::parse(&reply(0b10_0000, &[(5, 5, 40), (5, 5, 41)])).unwrap();
        assert_eq!((port.lossless(), port.lossless_traffic_class()), (5, 162));
        let port = PortQos::parse(&reply(0b10_1000, &[(5, 5, 40), (5, 3, 26)])).unwrap();
        assert_eq!(port.lossless(), 3, "the lowest priority with PFC");
    }

    #[test]
    fn a_reply_that_ends_early_or_lies_is_no_panic() {
        let whole = reply(0b1000, &[(5, 9, 26), (5, 3, 64), (5, 3, 65535)]);
        let port = PortQos::parse(&whole).unwrap();
        assert_eq!(port, PortQos { dscp: Some(default_map()), pfc: 0b1000 }, "priorities and DSCPs out of range");
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
        assert_eq!(request("lo"), [&header[..], &[0, 21, 0, 0, 7, 0, 1, 0, b'l', b'o', 0, 0]].concat());
    }

    #[test]
    fn the_kernel_answers_for_a_driver_without_priorities_and_for_no_interface() {
        assert!(read("lo").unwrap().is_none());
        assert_eq!(read("no-such-netdev").unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }

    #[test]
    fn the_log_has_one_line_for_ports_that_are_alike_and_a_warning_with_the_cure() {
        let rail = |device: &str, dscp| RailQos {
            device: device.to_owned(),
            netdev: "eth0".to_owned(),
            port: PortQos { dscp, pfc: 0b1000 },
        };
        let map = std::array::from_fn(|dscp| dscp as u8 >> 3);
        let rails = [rail("a", None), rail("b", None), rail("c", Some(map))];
        let lines = [
            "a and b: RoCE has priority 0 without PFC (service level 0; trust PCP, PFC on 3)",
            "c: RoCE has priority 3 with PFC (traffic class 106; trust DSCP, PFC on 3)",
        ];
        assert_eq!(qos_info(&rails, roce(106, 0)), lines);
        let warning = qos_warning(&rails, roce(106, 0)).unwrap();
        assert_eq!(warning.devices, ["a", "b"]);
        assert!(warning.text.contains("trust DSCP, and set NCCL_IB_TC=106"), "{warning}");
        let warning = qos_warning(&rails[2..], roce(0, 0)).unwrap();
        assert!(warning.text.ends_with("; set NCCL_IB_TC=106 on every host"), "{warning}");
        assert_eq!(qos_warning(&rails[2..], roce(106, 0)), None);
    }
}
