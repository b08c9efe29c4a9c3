//! Faults of the network between two ports. Both ports are up, so their states do not show the
//! fault.
//!
//! A rail has a set of faults ([`PathFaults`]), and a path has the faults of the rails at both
//! ends. `QueuePair::change` resolves the peer's address, and records whether the queue pair's
//! packets are misdirected ([`PathFault::CrossedArp`]). `RailMemory::carries` decides whether a
//! path carries packets, `QueuePair::is_lost` (in `serve.rs`) whether a request is lost, and
//! `QueuePair::transmit` whether a packet is lost. A queue pair whose packets are misdirected still
//! receives: the peer's bytes arrive, but the acknowledgements for them get lost. `tests/paths.rs`
//! shows each fault.

use std::fmt;
use std::time::Duration;

/// Payload, in bytes, of the largest packet that passes a switch with [`PathFault::SwitchMtu`].
pub(crate) const SMALL_PACKET_BYTES: u32 = 1024;

/// A fault of a rail's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathFault {
    /// Every packet is lost. Addresses resolve.
    Silent,
    /// The rail's twin, another function on the same cable, answers ARP requests for the rail's
    /// IPv4 address. Linux answers on any interface for any address of the host while `arp_ignore`
    /// is 0 (`arp_process` in net/ipv4/arp.c). The kernel resolves the address once, in the change
    /// to ready-to-receive, and hands the hardware address to the device
    /// (`ib_resolve_unicast_gid_dmac` in drivers/infiniband/core/verbs.c). So a queue pair that is
    /// connected by the IPv4 GID sends to the twin until it is connected again, and the twin has no
    /// such queue pair. Link-local GIDs are not affected: an interface answers neighbour
    /// solicitations for its own addresses alone (`ndisc_recv_ns` in net/ipv6/ndisc.c).
    CrossedArp,
    /// A switch drops frames that need an interface MTU above 1500. A packet of path MTU 1024 has
    /// 1084 bytes (IPv4 20, UDP 8, BTH 12, RETH 16, payload 1024, ICRC 4) and passes; a packet of
    /// the next path MTU, 2048, does not. The simulation drops every packet with a payload above
    /// 1024 bytes, although a real switch would pass up to about 1440.
    SwitchMtu,
    /// A switch port drops all frames, both ways, for this time after the link came up. An IEEE
    /// 802.1D bridge port passes no frames while it listens and learns, for 30 s by default.
    SpanningTree(Duration),
    /// One packet in this many (at least 2) is lost, counted over all packets that the sending rail
    /// has sent. Only packets that carry data are lost, never acknowledgements.
    Loss(u32),
}

/// The set of a rail's path faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PathFaults(u64);

/// Default of [`PathFault::SpanningTree`].
const BLOCKING: Duration = Duration::from_secs(5);
const MAX_BLOCKING: Duration = Duration::from_secs(3600);
/// Default of [`PathFault::Loss`].
const LOSS: u32 = 1000;
/// Lowest bit in [`PathFaults`] of the time of [`PathFault::SpanningTree`], in milliseconds. The
/// bits below it are the flags of the faults without a value.
const BLOCKING_SHIFT: u32 = 8;
/// Lowest bit in [`PathFaults`] of the number of [`PathFault::Loss`].
const LOSS_SHIFT: u32 = 32;

impl PathFault {
    /// One fault of each kind, with the default values.
    pub const ALL: [Self; 5] = [
        Self::Silent,
        Self::CrossedArp,
        Self::SwitchMtu,
        Self::SpanningTree(BLOCKING),
        Self::Loss(LOSS),
    ];

    /// Reads the text that [`fmt::Display`] writes. `spanning-tree` and `loss` may also stand
    /// without a value, for the default.
    pub fn parse(text: &str) -> Result<Self, String> {
        if let Some(fault) = Self::ALL.into_iter().find(|fault| fault.name() == text) {
            return Ok(fault);
        }
        if let Some(packets @ 2..) = text
            .strip_prefix("loss:")
            .and_then(|packets| packets.parse().ok())
        {
            return Ok(Self::Loss(packets));
        }
        let seconds = text
            .strip_prefix("spanning-tree:")
            .and_then(|seconds| seconds.parse::<f64>().ok());
        let blocking = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        match blocking.filter(|time| (Duration::from_millis(1)..=MAX_BLOCKING).contains(time)) {
            Some(time) => Ok(Self::SpanningTree(time)),
            None => Err(format!(
                "{text:?} must be {}, spanning-tree:SECONDS, 0.001 to {}, or loss:PACKETS, 2 or more",
                Self::ALL.map(Self::name).join(", "),
                MAX_BLOCKING.as_secs()
            )),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::CrossedArp => "crossed-arp",
            Self::SwitchMtu => "switch-mtu",
            Self::SpanningTree(_) => "spanning-tree",
            Self::Loss(_) => "loss",
        }
    }

    /// Returns the mask of the bits that [`PathFaults`] has for this kind of fault, and the value
    /// of these bits for this fault.
    fn bits(self) -> (u64, u64) {
        match self {
            Self::Silent => (1, 1),
            Self::CrossedArp => (2, 2),
            Self::SwitchMtu => (4, 4),
            Self::SpanningTree(time) => {
                let blocking_ms = time.min(MAX_BLOCKING).as_millis() as u64;
                (
                    (1 << LOSS_SHIFT) - (1 << BLOCKING_SHIFT),
                    blocking_ms << BLOCKING_SHIFT,
                )
            }
            Self::Loss(packets) => (u64::MAX << LOSS_SHIFT, u64::from(packets) << LOSS_SHIFT),
        }
    }
}

impl fmt::Display for PathFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SpanningTree(time) => write!(f, "{}:{}", self.name(), time.as_secs_f64()),
            Self::Loss(packets) => write!(f, "{}:{packets}", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}

impl PathFaults {
    pub(crate) fn from_word(word: u64) -> Self {
        Self(word)
    }

    pub(crate) fn word(self) -> u64 {
        self.0
    }

    /// Returns the set with this fault, in place of any fault of its kind, if `is_on`; otherwise
    /// the set without any fault of its kind.
    #[must_use]
    pub fn with(self, fault: PathFault, is_on: bool) -> Self {
        let (kind, value) = fault.bits();
        Self(self.0 & !kind | if is_on { value } else { 0 })
    }

    /// True if the set has a fault of this kind.
    pub fn has(self, fault: PathFault) -> bool {
        self.0 & fault.bits().0 != 0
    }

    /// Time after the link came up in which all frames are dropped; 0: none is dropped.
    pub(crate) fn blocking_ns(self) -> u64 {
        (self.0 as u32 >> BLOCKING_SHIFT) as u64 * 1_000_000
    }

    /// The number in [`PathFault::Loss`]; 0: no packet is lost.
    pub(crate) fn loss(self) -> u64 {
        self.0 >> LOSS_SHIFT
    }

    /// Iterates over the faults.
    pub fn iter(self) -> impl Iterator<Item = PathFault> {
        PathFault::ALL
            .into_iter()
            .filter(move |kind| self.has(*kind))
            .map(move |kind| match kind {
                PathFault::SpanningTree(_) => {
                    PathFault::SpanningTree(Duration::from_nanos(self.blocking_ns()))
                }
                PathFault::Loss(_) => PathFault::Loss(self.loss() as u32),
                other => other,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_survives_printing_and_parsing_and_other_text_is_refused() {
        let others = [
            PathFault::SpanningTree(Duration::from_millis(1500)),
            PathFault::Loss(2),
            PathFault::Loss(u32::MAX),
        ];
        for fault in PathFault::ALL.into_iter().chain(others) {
            assert_eq!(PathFault::parse(&fault.to_string()), Ok(fault));
        }
        assert_eq!(
            PathFault::parse("spanning-tree"),
            Ok(PathFault::SpanningTree(BLOCKING))
        );
        assert_eq!(PathFault::parse("loss"), Ok(PathFault::Loss(1000)));
        for wrong in [
            "",
            "Silent",
            "silent:1",
            "spanning-tree:",
            "spanning-tree:0",
            "spanning-tree:-1",
        ]
        .into_iter()
        .chain([
            "spanning-tree:3601",
            "loss:",
            "loss:1",
            "loss:0.5",
            "loss:4294967296",
        ]) {
            let error = PathFault::parse(wrong).unwrap_err();
            let expected =
                "silent, crossed-arp, switch-mtu, spanning-tree, loss, spanning-tree:SECONDS";
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_set_has_each_kind_once() {
        let short = PathFault::SpanningTree(Duration::from_secs(1));
        let all = PathFault::ALL
            .into_iter()
            .fold(PathFaults::default(), |all, fault| all.with(fault, true));
        assert!(all.iter().eq(PathFault::ALL));
        let others = all
            .with(short, true)
            .with(PathFault::Silent, false)
            .with(PathFault::SwitchMtu, false);
        assert!(
            others
                .iter()
                .eq([PathFault::CrossedArp, short, PathFault::Loss(LOSS)]),
            "{others:?}"
        );
        assert_eq!(
            (
                others.blocking_ns(),
                others.with(PathFault::ALL[3], false).blocking_ns()
            ),
            (1_000_000_000, 0)
        );
        assert_eq!(
            (others.loss(), others.with(PathFault::Loss(7), true).loss()),
            (1000, 7)
        );
        assert_eq!(others.with(PathFault::Loss(7), false).loss(), 0);
        assert_eq!(PathFaults::from_word(all.word()), all);
    }
}
