//! The pattern that GPUs and the processor write and check, the same as in `kernels.ptx`.

use anyhow::{Context as _, Result, ensure};
use std::ops::Range;

/// A sequence of bytes, each of which depends on its place and on the seed. Patterns that differ
/// only in `flip` differ in every byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern {
    pub seed: u32,
    /// Bits that are inverted in each byte.
    pub flip: u8,
}

/// The bytes of a range that differ from the pattern.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wrong {
    pub count: u32,
    /// Place of the first wrong byte in the pattern.
    pub first: Option<u32>,
}

impl Pattern {
    pub fn byte(self, place: u32) -> u8 {
        let mut word = place.wrapping_mul(0x9e37_79b1) ^ self.seed;
        word ^= word >> 15;
        word = word.wrapping_mul(0x85eb_ca77);
        word ^= word >> 13;
        word as u8 ^ self.flip
    }

    pub fn fill(self, first: u32, bytes: &mut [u8]) {
        bytes
            .iter_mut()
            .zip(first..)
            .for_each(|(byte, place)| *byte = self.byte(place));
    }

    pub fn compare(self, first: u32, bytes: &[u8]) -> Wrong {
        let mut wrong = Wrong::default();
        for (_, place) in bytes
            .iter()
            .zip(first..)
            .filter(|(byte, place)| **byte != self.byte(*place))
        {
            wrong.count += 1;
            wrong.first.get_or_insert(place);
        }
        wrong
    }
}

/// Returns a range as the kernels take it: its first place in the pattern, and its length in bytes.
/// Fails if the range is outside a buffer of `bytes` bytes.
pub fn span(range: &Range<usize>, bytes: usize) -> Result<(u32, u32)> {
    ensure!(
        range.start <= range.end && range.end <= bytes,
        "{range:?} is outside a buffer of {bytes} bytes"
    );
    let count = u32::try_from(range.len()).context("more bytes than the kernels can count")?;
    Ok((
        u32::try_from(range.start).context("an offset beyond what the kernels can count")?,
        count,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATTERN: Pattern = Pattern {
        seed: 0x1234_5678,
        flip: 0,
    };

    #[test]
    fn a_range_stays_within_its_buffer() {
        assert_eq!(span(&(3..10), 10).unwrap(), (3, 7));
        assert_eq!(span(&(10..10), 10).unwrap(), (10, 0));
        assert!(
            span(&(3..11), 10)
                .unwrap_err()
                .to_string()
                .contains("outside a buffer of 10")
        );
        let backwards = Range { start: 4, end: 3 };
        assert!(span(&backwards, 10).is_err());
        let far = 5 << 32;
        assert!(span(&(0..far), far).is_err() && span(&(far - 1..far), far).is_err());
    }

    #[test]
    fn bytes_match_the_kernels_formula() {
        // These bytes were calculated without the code in this file, from the formula in
        // kernels.ptx, in exact integers.
        let known = [
            (0, 0xfd),
            (1, 0x8b),
            (255, 0xe9),
            (65_537, 0x0f),
            (67_108_863, 0xbf),
        ];
        for (place, byte) in known {
            assert_eq!(PATTERN.byte(place), byte, "{place}");
            assert_eq!(
                Pattern {
                    flip: 0xff,
                    ..PATTERN
                }
                .byte(place),
                !byte,
                "{place}"
            );
        }
    }

    #[test]
    fn changed_misplaced_and_old_bytes_are_found() {
        let mut bytes = vec![0; 4099];
        PATTERN.fill(7, &mut bytes);
        assert_eq!(PATTERN.compare(7, &bytes), Wrong::default());
        assert_eq!(PATTERN.compare(8, &bytes[1..]), Wrong::default());
        for at in [0, 1, 2048, 4098] {
            bytes[at] ^= 0x10;
            assert_eq!(
                PATTERN.compare(7, &bytes),
                Wrong {
                    count: 1,
                    first: Some(7 + at as u32)
                }
            );
            bytes[at] ^= 0x10;
        }
        for other in [
            Pattern { seed: 1, ..PATTERN },
            Pattern {
                seed: PATTERN.seed + 1,
                ..PATTERN
            },
        ] {
            assert!(other.compare(7, &bytes).count > 4000);
        }
        assert!(
            PATTERN.compare(6, &bytes).count > 4000 && PATTERN.compare(15, &bytes).count > 4000
        );
        assert_eq!(
            Pattern {
                flip: 0xff,
                ..PATTERN
            }
            .compare(7, &bytes)
            .count,
            4099
        );
    }

    #[test]
    fn bytes_are_spread_evenly() {
        let mut counts = [0; 256];
        (0..65_536).for_each(|place| counts[usize::from(PATTERN.byte(place))] += 1);
        assert!(
            counts.iter().all(|count| (150..=370).contains(count)),
            "{counts:?}"
        );
    }
}
