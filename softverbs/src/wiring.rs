//! Cables between ports of machines that are not all on one switch, and the rails' addresses.

use std::net::Ipv4Addr;

/// Maximum number of cables of a fabric.
pub const MAX_WIRES: usize = 64;

/// A cable from a port of one machine to a port of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wire {
    /// The cable's name in the profile.
    pub name: String,
    /// The ports at its ends, on different machines.
    pub ends: [Port; 2],
    /// The subnets of the rails on the cable.
    pub subnets: Subnets,
}

/// A port of a machine. A cable ends in the port. Several rails may share the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// The machine.
    pub node: usize,
    /// Index of the port's cable in the profile's list of cables.
    pub cable: usize,
}

/// Addressing of a wire's rails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Subnets {
    /// The first rails of both ends share one subnet, the second rails another one, and so on.
    #[default]
    Each,
    /// All rails of both ends are in one subnet.
    One,
}

impl Subnets {
    /// The name in a profile.
    pub fn name(self) -> &'static str {
        match self {
            Self::Each => "each",
            Self::One => "one",
        }
    }

    /// Finds the addressing of this name. The error lists the allowed names.
    pub fn parse(name: &str) -> Result<Self, String> {
        [Self::Each, Self::One]
            .into_iter()
            .find(|subnets| subnets.name() == name)
            .ok_or_else(|| format!("subnets={name}: must be each or one"))
    }
}

/// The cables of a fabric. Without any, a switch joins all rails of the same name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wires {
    wires: Vec<Wire>,
    /// Ports of one machine between which its NIC forwards packets.
    forwards: Vec<[Port; 2]>,
}

impl Wires {
    /// Adds a cable. Fails if one of its ports has a cable already, if both ends are on one
    /// machine, or if there are [`MAX_WIRES`] cables already.
    pub fn add(&mut self, wire: Wire) -> Result<(), String> {
        if wire.ends[0].node == wire.ends[1].node {
            return Err("both ends are on one node".to_owned());
        }
        if wire.ends.iter().any(|end| self.at(*end).is_some()) {
            return Err("an end has a wire already".to_owned());
        }
        if self.wires.len() == MAX_WIRES {
            return Err(format!("more than {MAX_WIRES} wires"));
        }
        self.wires.push(wire);
        Ok(())
    }

    /// Lets a machine's NIC forward packets between two of its ports. Fails if both are the same
    /// port.
    pub fn forward(&mut self, ports: [Port; 2]) -> Result<(), String> {
        if ports[0] == ports[1] {
            return Err("forwards must name two ports".to_owned());
        }
        self.forwards.push(ports);
        Ok(())
    }

    /// Iterates over the ports between which a machine's NIC forwards packets.
    pub fn forwards(&self) -> impl Iterator<Item = &[Port; 2]> {
        self.forwards.iter()
    }

    /// Iterates over the cables.
    pub fn iter(&self) -> impl Iterator<Item = &Wire> {
        self.wires.iter()
    }

    /// True if there are no cables.
    pub fn is_empty(&self) -> bool {
        self.wires.is_empty()
    }

    /// Number of machines that the cables are for: the highest machine with a cable, plus one,
    /// because machines count from 0. `None` without cables.
    pub fn nodes(&self) -> Option<usize> {
        self.wires
            .iter()
            .flat_map(|wire| wire.ends)
            .map(|end| end.node + 1)
            .max()
    }

    /// True if the ports are joined by a cable, or by two cables and a machine in between that
    /// forwards.
    pub fn join(&self, one: Port, other: Port) -> bool {
        let (Some(beyond), Some(before)) = (self.beyond(one), self.beyond(other)) else {
            return false;
        };
        beyond == other
            || self
                .forwards
                .iter()
                .any(|ports| ports.contains(&beyond) && ports.contains(&before) && beyond != before)
    }

    fn beyond(&self, port: Port) -> Option<Port> {
        let (_, wire) = self.at(port)?;
        wire.ends.into_iter().find(|end| *end != port)
    }

    /// True if a port has a cable.
    pub fn has(&self, port: Port) -> bool {
        self.at(port).is_some()
    }

    /// Address 10.W.K.N/24 of rail number `place` of a port; `None` if the port has no cable. W is
    /// the cable's number, and K is `place` (0 if all rails are in one subnet). N is unique in its
    /// subnet.
    pub fn address(&self, port: Port, place: usize) -> Option<Ipv4Addr> {
        let (number, wire) = self.at(port)?;
        // At most 64 cables, 8 rails and 16 machines, so every number below fits into 8 bits.
        let [number, place, node] = [number, place, port.node].map(|n| n as u8);
        Some(match wire.subnets {
            Subnets::Each => Ipv4Addr::new(10, number, place, node + 1),
            Subnets::One => Ipv4Addr::new(10, number, 0, 8 * node + place + 1),
        })
    }

    fn at(&self, port: Port) -> Option<(usize, &Wire)> {
        self.wires
            .iter()
            .enumerate()
            .find(|(_, wire)| wire.ends.contains(&port))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wire(one: (usize, usize), other: (usize, usize), subnets: Subnets) -> Wire {
        let port = |(node, cable)| Port { node, cable };
        Wire {
            name: "w".to_owned(),
            ends: [port(one), port(other)],
            subnets,
        }
    }

    #[test]
    fn a_cable_joins_its_two_ends_and_no_others() {
        let mut wires = Wires::default();
        wires.add(wire((0, 0), (1, 1), Subnets::Each)).unwrap();
        wires.add(wire((1, 0), (2, 1), Subnets::One)).unwrap();
        let port = |node, cable| Port { node, cable };
        assert!(wires.join(port(0, 0), port(1, 1)) && wires.join(port(1, 1), port(0, 0)));
        for (one, other) in [
            ((0, 0), (1, 0)),
            ((0, 0), (2, 1)),
            ((0, 0), (0, 0)),
            ((0, 1), (2, 0)),
        ] {
            assert!(
                !wires.join(port(one.0, one.1), port(other.0, other.1)),
                "{one:?} {other:?}"
            );
        }
        assert_eq!(wires.nodes(), Some(3));
        assert!(
            wires
                .add(wire((0, 0), (2, 0), Subnets::Each))
                .unwrap_err()
                .contains("already")
        );
        assert!(
            wires
                .add(wire((3, 0), (3, 1), Subnets::Each))
                .unwrap_err()
                .contains("one node")
        );
    }

    #[test]
    fn each_subnet_has_the_addresses_of_both_ends_and_each_of_them_once() {
        let mut wires = Wires::default();
        wires.add(wire((0, 0), (1, 1), Subnets::Each)).unwrap();
        wires.add(wire((1, 0), (2, 1), Subnets::One)).unwrap();
        let address = |node, cable, place| {
            wires
                .address(Port { node, cable }, place)
                .map(|ip| ip.octets())
        };
        assert_eq!(
            (address(0, 0, 0), address(1, 1, 0)),
            (Some([10, 0, 0, 1]), Some([10, 0, 0, 2]))
        );
        assert_eq!(
            (address(0, 0, 1), address(1, 1, 1)),
            (Some([10, 0, 1, 1]), Some([10, 0, 1, 2]))
        );
        let one = [
            address(1, 0, 0),
            address(1, 0, 1),
            address(2, 1, 0),
            address(2, 1, 1),
        ]
        .map(Option::unwrap);
        assert!(one.iter().all(|ip| ip[..3] == [10, 1, 0]));
        assert!((0..4).all(|at| !one[..at].contains(&one[at])), "{one:?}");
        assert_eq!(address(0, 1, 0), None);
    }
}
