//! Quality of service of the rails' ports: whether RoCE has a priority with priority flow control
//! (PFC), and the settings to recommend.

use super::model::{Survey, Warning, WarningKind};
use super::text::list;
use crate::interfaces::qos::{self, PortQos};
use proto::wire::fields::Priority;
use std::io;

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
    /// Returns true if PFC is on for some priority, but not for the priority of RoCE packets.
    pub fn is_unprotected(&self, roce: Priority) -> bool {
        self.pfc != 0 && !self.has_pfc(self.priority(roce.traffic_class, roce.service_level))
    }

    /// Returns the priority to recommend for RoCE: the lowest one with PFC, or the conventional one
    /// if none has PFC.
    pub fn lossless(&self) -> u8 {
        if self.pfc == 0 {
            ROCE_PRIORITY
        } else {
            self.pfc.trailing_zeros() as u8
        }
    }

    /// Returns a DSCP for priority [`Self::lossless`]. This is the conventional DSCP of RoCE if the
    /// port maps it to that priority, or maps no DSCP to it. Otherwise it is the lowest DSCP that
    /// the port maps to that priority.
    pub fn lossless_dscp(&self) -> u8 {
        let has_it = |dscp: &u8| {
            self.dscp
                .is_some_and(|map| map[usize::from(*dscp)] == self.lossless())
        };
        std::iter::once(ROCE_DSCP)
            .chain(0..64)
            .find(has_it)
            .unwrap_or(ROCE_DSCP)
    }

    /// Returns `NCCL_IB_TC` for [`Self::lossless_dscp`], with senders' ECN bits (ECT(0)).
    pub fn lossless_traffic_class(&self) -> u8 {
        self.lossless_dscp() << 2 | 2
    }

    /// Describes the port for a line of text.
    pub fn text(&self, roce: Priority) -> String {
        let Priority {
            traffic_class,
            service_level,
        } = roce;
        let priority = self.priority(traffic_class, service_level);
        let with = if self.has_pfc(priority) {
            "with"
        } else {
            "without"
        };
        let (trust, chosen) = match self.dscp {
            Some(_) => ("DSCP", format!("traffic class {traffic_class}")),
            None => ("PCP", format!("service level {service_level}")),
        };
        format!(
            "RoCE has priority {priority} {with} PFC ({chosen}; trust {trust}, PFC on {})",
            self.pfc_text()
        )
    }
}

impl Survey {
    /// Asks the kernel for the rails' priorities. The first list has the rails for which the kernel
    /// has reported priorities. The second list has the interface and the error for each failed
    /// query. A rail without a visible interface, or whose driver has no priorities, is in neither.
    pub fn qos(&self) -> (Vec<RailQos>, Vec<(String, io::Error)>) {
        let mut found = Vec::new();
        let mut errors = Vec::new();
        for (rail, netdev) in self
            .rails
            .iter()
            .filter_map(|rail| Some((rail, rail.netdev.as_ref()?)))
        {
            match qos::read(netdev) {
                Ok(Some(port)) => found.push(RailQos {
                    device: rail.device.clone(),
                    netdev: netdev.clone(),
                    port,
                }),
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
    lines
        .into_iter()
        .map(|(text, devices)| format!("{}: {text}", list(devices.into_iter())))
        .collect()
}

/// Returns a warning if a rail's port has PFC, but not for the priority of RoCE packets.
pub fn qos_warning(rails: &[RailQos], roce: Priority) -> Option<Warning> {
    let unprotected: Vec<&RailQos> = rails
        .iter()
        .filter(|rail| rail.port.is_unprotected(roce))
        .collect();
    let first = &unprotected.first()?.port;
    let devices: Vec<String> = unprotected.iter().map(|rail| rail.device.clone()).collect();
    let traffic_class = first.lossless_traffic_class();
    let cure = match first.dscp {
        Some(_) => format!("set NCCL_IB_TC={traffic_class} on every host"),
        None => {
            format!("let the ports trust DSCP, and set NCCL_IB_TC={traffic_class} on every host")
        }
    };
    let text = format!(
        "{}: RoCE has priority {}, and PFC is on for {} alone: a switch drops these packets when its buffers are full; {cure}",
        list(devices.iter().map(String::as_str)),
        first.priority(roce.traffic_class, roce.service_level),
        first.pfc_text()
    );
    Some(Warning {
        kind: WarningKind::UnprotectedPriority,
        devices,
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roce(traffic_class: u8, service_level: u8) -> Priority {
        Priority {
            traffic_class,
            service_level,
        }
    }

    #[test]
    fn the_recommended_priority_is_the_lowest_with_pfc() {
        let port = |pfc, entries: &[(usize, u8)]| {
            let mut map = qos::default_map();
            entries
                .iter()
                .for_each(|(dscp, priority)| map[*dscp] = *priority);
            PortQos {
                dscp: Some(map),
                pfc,
            }
        };
        let usual = port(0b1000, &[(26, 3), (48, 6)]);
        assert!(!usual.is_unprotected(roce(106, 0)) && usual.is_unprotected(roce(0, 0)));
        assert_eq!(
            (
                usual.lossless(),
                usual.lossless_dscp(),
                usual.lossless_traffic_class()
            ),
            (3, 26, 106)
        );
        assert!(!port(0, &[]).is_unprotected(roce(106, 0)));
        // A user's choice of another priority stays.
        let own = port(0b10_0000, &[(40, 5), (41, 5)]);
        assert_eq!((own.lossless(), own.lossless_traffic_class()), (5, 162));
        assert_eq!(
            port(0b10_1000, &[(40, 5), (26, 3)]).lossless(),
            3,
            "the lowest priority with PFC"
        );
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
        assert!(
            warning.text.contains("trust DSCP, and set NCCL_IB_TC=106"),
            "{warning}"
        );
        let warning = qos_warning(&rails[2..], roce(0, 0)).unwrap();
        assert!(
            warning.text.ends_with("; set NCCL_IB_TC=106 on every host"),
            "{warning}"
        );
        assert_eq!(qos_warning(&rails[2..], roce(106, 0)), None);
    }
}
