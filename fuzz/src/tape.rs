//! An input read as a tape of decisions. Numbers behind the input's end are 0, so every input is a
//! valid tape.

use proto::wire::MAX_RAILS;
use proto::wire::ids::LaneId;

/// Maximum number of events of one input. More events show nothing new, and cost time.
const MOST_STEPS: usize = 256;

/// Takes decisions from the front of an input. The seeds write them with the plugin's `Writer`.
#[derive(Debug)]
pub struct Tape<'a> {
    left: &'a [u8],
    steps: usize,
}

impl<'a> Tape<'a> {
    /// Starts at the front of `input`.
    pub fn new(input: &'a [u8]) -> Self {
        Self {
            left: input,
            steps: MOST_STEPS,
        }
    }

    /// The next byte, which selects the next event. `None` at the input's end, or after the tape's
    /// maximum number of events.
    pub fn step(&mut self) -> Option<u8> {
        self.steps = self.steps.checked_sub(1)?;
        let (first, rest) = self.left.split_first()?;
        self.left = rest;
        Some(*first)
    }

    /// A tape with fewer events, for targets whose events are expensive.
    pub fn short(input: &'a [u8]) -> Self {
        Self {
            left: input,
            steps: MOST_STEPS / 8,
        }
    }

    /// At most the next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (head, tail) = self.left.split_at(count.min(self.left.len()));
        self.left = tail;
        head
    }

    /// All remaining bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// The next 16-bit number.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// The next 32-bit number.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// The next 64-bit number.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number below `count`, or 0 if `count` is 0. Takes one byte, so the number is never above
    /// 255.
    pub fn below(&mut self, count: usize) -> usize {
        usize::from(self.u8()) % count.max(1)
    }

    /// A lane of a connection that has `count` lanes.
    pub fn lane(&mut self, count: usize) -> LaneId {
        lane(self.below(count))
    }
}

/// The lane whose number is `number` modulo [`MAX_RAILS`].
pub fn lane(number: usize) -> LaneId {
    LaneId::new(number % MAX_RAILS).expect("it is below MAX_RAILS")
}
