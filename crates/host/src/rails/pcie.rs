//! PCI Express functions, their links, and the payload rate of a link.

use crate::nic::PCIE_PAYLOAD_NINTHS;
use std::fmt;
use std::path::PathBuf;

/// PCI function of an RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciFunction {
    /// `domain:bus:device.function`, in hexadecimal as sysfs writes it.
    pub address: String,
    /// PCIe domain (segment); on a Spark the two functions of one cable are in different domains.
    pub domain: u32,
    /// The function's folder in sysfs; its parents are the bridges above.
    pub path: PathBuf,
    /// `domain:bus:device` of the physical function. Functions of one slot share a PCIe link.
    pub slot: String,
    /// Function number of the physical function.
    pub function: u8,
    /// True for a virtual function (SR-IOV), which uses the link of its physical function.
    pub is_virtual: bool,
    /// Present rate of the link; `None` if unknown to sysfs.
    pub current: Option<LinkRate>,
    /// Highest rate that the function supports.
    pub max: Option<LinkRate>,
    /// Maximum payload size (MPS) in bytes, for `doctor` only. Only root can read it; otherwise it
    /// is `None`. So the rates are calculated without it.
    pub max_payload_bytes: Option<u32>,
    /// Largest read request in bytes, for `doctor` only; `None` without root.
    pub max_read_request_bytes: Option<u32>,
}

impl PciFunction {
    /// Returns the link's payload rate in Mb/s, one direction; `None` if unknown to sysfs.
    pub fn payload_mbps(&self) -> Option<u32> {
        self.current.map(LinkRate::payload_mbps)
    }
}

/// Width and signalling rate of a PCIe link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkRate {
    /// Number of PCIe lanes.
    pub width: u16,
    /// Mega-transfers per second on each lane: 32000 for "32.0 GT/s".
    pub speed_mts: u32,
}

impl LinkRate {
    /// Returns the PCIe generation of this signalling rate, if it is a standard rate.
    pub fn generation(self) -> Option<u8> {
        GENERATIONS
            .iter()
            .find(|row| row.speed_mts == self.speed_mts)
            .map(|row| row.generation)
    }

    /// Returns the payload rate in Mb/s, one direction: signalling rate x lanes x line code x
    /// `PCIE_PAYLOAD_NINTHS`/9.
    ///
    /// The maximum payload size (MPS) is not an argument: only root can read it, and all ranks must
    /// announce the same rate.
    pub fn payload_mbps(self) -> u32 {
        let code = GENERATIONS
            .iter()
            .rfind(|row| row.speed_mts <= self.speed_mts)
            .unwrap_or(&GENERATIONS[0]);
        let lanes_mbps = u64::from(self.speed_mts) * u64::from(self.width);
        // Divides only once, at the end. Before that, a standard rate gives at most
        // 128000 x 32 x 236 x 8, which is far below 2^64.
        let payload_mbps =
            lanes_mbps * code.useful_bits * PCIE_PAYLOAD_NINTHS / (code.line_bits * 9);
        u32::try_from(payload_mbps).unwrap_or(u32::MAX)
    }

    /// Returns true if this link is narrower or slower than `other`.
    pub fn is_below(self, other: LinkRate) -> bool {
        self.width < other.width || self.speed_mts < other.speed_mts
    }
}

impl fmt::Display for LinkRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.generation() {
            Some(generation) => write!(f, "Gen{generation} x{}", self.width),
            None => write!(f, "{} MT/s x{}", self.speed_mts, self.width),
        }
    }
}

struct Generation {
    generation: u8,
    speed_mts: u32,
    useful_bits: u64,
    line_bits: u64,
}

/// Signalling rates and line codes (PCI Express Base Specification 6.0, 1.2 and 4.2): 8b/10b,
/// 128b/130b, and from generation 6 flits with 236 bytes of transactions in 256.
const GENERATIONS: [Generation; 7] = [
    Generation {
        generation: 1,
        speed_mts: 2_500,
        useful_bits: 8,
        line_bits: 10,
    },
    Generation {
        generation: 2,
        speed_mts: 5_000,
        useful_bits: 8,
        line_bits: 10,
    },
    Generation {
        generation: 3,
        speed_mts: 8_000,
        useful_bits: 128,
        line_bits: 130,
    },
    Generation {
        generation: 4,
        speed_mts: 16_000,
        useful_bits: 128,
        line_bits: 130,
    },
    Generation {
        generation: 5,
        speed_mts: 32_000,
        useful_bits: 128,
        line_bits: 130,
    },
    Generation {
        generation: 6,
        speed_mts: 64_000,
        useful_bits: 236,
        line_bits: 256,
    },
    Generation {
        generation: 7,
        speed_mts: 128_000,
        useful_bits: 236,
        line_bits: 256,
    },
];

/// Parses sysfs's `*_link_width` ("4") and `*_link_speed` ("32.0 GT/s PCIe", "8 GT/s" in older
/// kernels). Returns `None` for width 0, 63 or 255, or "Unknown". Sysfs shows these values for a
/// virtual function, or for a function that is off the bus.
pub(super) fn parse_link_rate(width: &str, speed: &str) -> Option<LinkRate> {
    let width: u16 = width
        .trim()
        .parse()
        .ok()
        .filter(|lanes| (1..=32).contains(lanes))?;
    let (whole, rest) = speed
        .trim()
        .split_once(" GT/s")
        .map(|(number, _)| number.split_once('.').unwrap_or((number, "0")))?;
    let tenths: u32 = rest.get(..1)?.parse().ok()?;
    let whole: u32 = whole.parse().ok().filter(|n| *n < 1_000)?;
    let speed_mts = whole * 1_000 + tenths * 100;
    (speed_mts > 0).then_some(LinkRate { width, speed_mts })
}

/// Parses the name of a PCI function in sysfs. Returns its domain, its slot (`domain:bus:device`)
/// and its function number.
pub(super) fn parse_address(name: &str) -> Option<(u32, &str, u8)> {
    let (slot, function) = name.split_once('.')?;
    let mut parts = slot.split(':');
    let domain = parts.next()?;
    let bus = parts.next()?;
    let device = parts.next()?;
    let hexadecimal =
        |text: &str, digits| text.len() == digits && text.chars().all(|c| c.is_ascii_hexdigit());
    if parts.next().is_some()
        || !hexadecimal(bus, 2)
        || !hexadecimal(device, 2)
        || !(4..=8).contains(&domain.len())
    {
        return None;
    }
    Some((
        u32::from_str_radix(domain, 16).ok()?,
        slot,
        u8::from_str_radix(function, 16).ok()?,
    ))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TransactionSizes {
    pub(super) payload_bytes: Option<u32>,
    pub(super) read_request_bytes: Option<u32>,
}

/// Reads the transaction sizes from Device Control in the PCI Express capability (id 0x10): payload
/// in bits 5 to 7, read request in bits 12 to 14, each as 128 << n. `None` for an unprivileged
/// reader, who gets only the first 64 bytes of the configuration space.
pub(super) fn transaction_sizes(configuration: &[u8]) -> Option<TransactionSizes> {
    const STATUS: usize = 0x06;
    const HAS_CAPABILITIES: u8 = 1 << 4;
    const FIRST_CAPABILITY: usize = 0x34;
    const PCI_EXPRESS: u8 = 0x10;
    const DEVICE_CONTROL: usize = 8;
    if configuration.get(STATUS)? & HAS_CAPABILITIES == 0 {
        return None;
    }
    let mut at = usize::from(*configuration.get(FIRST_CAPABILITY)? & !3);
    // At most 48 capabilities fit into 256 bytes, so a longer list is a loop.
    for _ in 0..48 {
        if at < 0x40 {
            return None;
        }
        if *configuration.get(at)? == PCI_EXPRESS {
            let low = configuration.get(at + DEVICE_CONTROL)?;
            let high = configuration.get(at + DEVICE_CONTROL + 1)?;
            let bytes = |exponent: u8| (exponent <= 5).then_some(128 << exponent);
            return Some(TransactionSizes {
                payload_bytes: bytes((low >> 5) & 7),
                read_request_bytes: bytes((high >> 4) & 7),
            });
        }
        at = usize::from(*configuration.get(at + 1)? & !3);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEN5_X4: LinkRate = LinkRate {
        width: 4,
        speed_mts: 32_000,
    };

    #[test]
    fn a_sparks_link_carries_what_was_measured_over_it() {
        assert_eq!(GEN5_X4.payload_mbps(), 112_027);
        let measured_mbps = 111_700_f64;
        assert!((f64::from(GEN5_X4.payload_mbps()) / measured_mbps - 1.0).abs() < 0.01);
        assert_eq!(
            GEN5_X4.payload_mbps() / 2,
            LinkRate {
                width: 2,
                ..GEN5_X4
            }
            .payload_mbps()
        );
        // 8b/10b: 2.5 GT/s x1 is 2 Gb/s before any overhead.
        assert_eq!(
            LinkRate {
                width: 1,
                speed_mts: 2_500
            }
            .payload_mbps(),
            2_000 * 8 / 9
        );
    }

    #[test]
    fn sysfs_rates_parse_and_unknown_ones_are_none() {
        assert_eq!(parse_link_rate("4\n", "32.0 GT/s PCIe\n"), Some(GEN5_X4));
        assert_eq!(
            parse_link_rate("16", "8 GT/s"),
            Some(LinkRate {
                width: 16,
                speed_mts: 8_000
            })
        );
        assert_eq!(
            parse_link_rate("1", "2.5 GT/s PCIe"),
            Some(LinkRate {
                width: 1,
                speed_mts: 2_500
            })
        );
        for (width, speed) in [
            ("0", "32.0 GT/s"),
            ("255", "32.0 GT/s"),
            ("63", "Unknown"),
            ("4", "Unknown speed"),
            ("", ""),
        ] {
            assert_eq!(parse_link_rate(width, speed), None, "{width} {speed}");
        }
        assert_eq!(GEN5_X4.to_string(), "Gen5 x4");
    }

    #[test]
    fn addresses_parse_with_any_domain() {
        assert_eq!(parse_address("0002:01:00.1"), Some((2, "0002:01:00", 1)));
        assert_eq!(
            parse_address("10000:e1:00.0"),
            Some((0x10000, "10000:e1:00", 0))
        );
        for name in [
            "pci0000:00",
            "mlx5_core.sf.4",
            "0000:01:00",
            "virtual",
            "0000:1:00.0",
            "enp1s0f0np0.100",
        ] {
            assert_eq!(parse_address(name), None, "{name}");
        }
    }

    #[test]
    fn the_payload_size_is_read_through_the_capability_list() {
        let mut space = [0_u8; 256];
        space[0x06] = 0x10;
        space[0x34] = 0x40;
        (space[0x40], space[0x41]) = (0x01, 0x60);
        (space[0x60], space[0x61]) = (0x10, 0);
        let sizes = |space: &[u8]| {
            transaction_sizes(space).map(|sizes| (sizes.payload_bytes, sizes.read_request_bytes))
        };
        (space[0x68], space[0x69]) = (0b0011_1111, 0b0101_1111);
        assert_eq!(sizes(&space), Some((Some(256), Some(4096))));
        (space[0x68], space[0x69]) = (0b0101_0000, 0b0010_1000);
        assert_eq!(sizes(&space), Some((Some(512), Some(512))));
        space[0x69] = 0b0110_0000;
        assert_eq!(
            sizes(&space),
            Some((Some(512), None)),
            "a size that the specification reserves"
        );
        assert_eq!(sizes(&space[..64]), None, "an unprivileged reader");
        (space[0x60], space[0x61]) = (0x05, 0x40);
        assert_eq!(sizes(&space), None, "a list that runs in a circle");
        space[0x06] = 0;
        assert_eq!(sizes(&space), None);
    }
}
