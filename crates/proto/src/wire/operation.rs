//! NCCL's operation on a communicator, as `setNetAttr` announces it: a collective, its algorithm
//! and its protocol.
//!
//! Only messages to a person use it. NCCL runs several operations at a time, so it is the one that
//! last moved, and no decision may follow from it.

use super::codec::{Malformed, Reader, Writer};
use std::fmt;

/// `ncclFunc_t` (src/include/nccl_common.h), NCCL 2.28 to 2.30. Later versions append.
const FUNCTIONS: [&str; 15] = [
    "Broadcast",
    "Reduce",
    "AllGather",
    "ReduceScatter",
    "AllReduce",
    "SendRecv",
    "Send",
    "Recv",
    "AlltoAll",
    "Scatter",
    "Gather",
    "AllGatherV",
    "PutSignal",
    "Signal",
    "WaitSignal",
];
/// The first of [`FUNCTIONS`] that have an algorithm and a protocol.
const COLLECTIVES: u8 = 5;
/// `NCCL_ALGO_*` and `NCCL_PROTO_*` (src/include/nccl_common.h).
const ALGORITHMS: [&str; 7] = [
    "Tree",
    "Ring",
    "CollnetDirect",
    "CollnetChain",
    "NVLS",
    "NVLSTree",
    "PAT",
];
const PROTOCOLS: [&str; 3] = ["LL", "LL128", "Simple"];

/// An operation. Each field is NCCL's number, or 255 if it is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operation {
    function: u8,
    algorithm: u8,
    protocol: u8,
}

impl Operation {
    const UNKNOWN: u8 = u8::MAX;
    const NONE: Self = Self {
        function: Self::UNKNOWN,
        algorithm: Self::UNKNOWN,
        protocol: Self::UNKNOWN,
    };

    /// Returns the operation of NCCL's bit masks (`setXferNetAttrs` in src/transport/net.cc), or
    /// `None` if `functions` does not name exactly one: before a connection NCCL names all that may
    /// use it.
    pub fn of_bits(functions: u32, algorithms: u32, protocols: u32) -> Option<Self> {
        let number = |bits: u32| match bits.count_ones() {
            1 => bits.trailing_zeros() as u8,
            _ => Self::UNKNOWN,
        };
        let function = number(functions);
        // Point-to-point operations leave the other two masks as they were.
        let [algorithm, protocol] = [algorithms, protocols].map(|bits| match function {
            0..COLLECTIVES => number(bits),
            _ => Self::UNKNOWN,
        });
        (function != Self::UNKNOWN).then_some(Self {
            function,
            algorithm,
            protocol,
        })
    }

    /// Packs an operation, or none, into a word that is never 0.
    pub fn to_word(of: Option<Self>) -> u32 {
        let Self {
            function,
            algorithm,
            protocol,
        } = of.unwrap_or(Self::NONE);
        u32::from_le_bytes([1, function, algorithm, protocol])
    }

    /// Unpacks a word of [`Operation::to_word`]. 0 stands for none.
    pub fn of_word(word: u32) -> Option<Self> {
        let [is_set, function, algorithm, protocol] = word.to_le_bytes();
        (is_set == 1 && function != Self::UNKNOWN).then_some(Self {
            function,
            algorithm,
            protocol,
        })
    }

    pub(super) fn write(of: Option<Self>, w: &mut Writer) {
        w.u32(Self::to_word(of));
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Option<Self>, Malformed> {
        r.u32().map(Self::of_word)
    }
}

/// As in "AllGather (Ring, Simple)", "SendRecv", or "operation 17" of a later NCCL.
impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match FUNCTIONS.get(usize::from(self.function)) {
            Some(name) => f.write_str(name)?,
            None => write!(f, "operation {}", self.function)?,
        }
        let algorithm = ALGORITHMS.get(usize::from(self.algorithm));
        let protocol = PROTOCOLS.get(usize::from(self.protocol));
        match (algorithm, protocol) {
            (Some(algorithm), Some(protocol)) => write!(f, " ({algorithm}, {protocol})"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_named_if_nccl_announces_exactly_one() {
        let text = |functions, algorithms, protocols| {
            Operation::of_bits(functions, algorithms, protocols).map(|of| of.to_string())
        };
        let named = |name: &str| Some(name.to_owned());
        assert_eq!(
            text(1 << 2, 1 << 1, 1 << 2),
            named("AllGather (Ring, Simple)")
        );
        assert_eq!(text(1 << 4, 1 << 0, 1 << 0), named("AllReduce (Tree, LL)"));
        assert_eq!(text(1 << 4, !0, 1 << 0), named("AllReduce"));
        assert_eq!(
            text(1 << 6, 1 << 1, 1 << 2),
            named("Send"),
            "left from before"
        );
        assert_eq!(text(1 << 20, 1, 1), named("operation 20"));
        assert_eq!(text(0, 1, 1), None);
        assert_eq!(text(!0, !0, !0), None, "what may use a new connection");
    }

    #[test]
    fn a_word_holds_an_operation_or_none() {
        let of = Operation::of_bits(1 << 3, 1 << 1, 1 << 1);
        assert_eq!(Operation::of_word(Operation::to_word(of)), of);
        assert_eq!(Operation::of_word(Operation::to_word(None)), None);
        assert_eq!(Operation::of_word(0), None);
        assert_ne!(Operation::to_word(None), 0);
    }
}
