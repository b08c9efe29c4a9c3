//! Message sizes as nccl-tests takes them: `8`, `64K`, `1.5M`, `2G`, and sweeps over sizes. As in
//! nccl-tests, a sweep ends at the last size that its steps reach: `-b 8 -e 64M -f 4` ends at 32M,
//! `-b 1K -e 64M -f 4` at 64M.

/// Parses a size in bytes; the suffixes K, M and G (either case) are powers of 1024.
///
/// # Errors
/// The text is not a size. The error describes the allowed forms.
pub fn parse(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 1_u64 << 10),
        Some((at, 'M' | 'm')) => (&text[..at], 1 << 20),
        Some((at, 'G' | 'g')) => (&text[..at], 1 << 30),
        _ => (text, 1),
    };
    let plain = !number.is_empty()
        && number
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.');
    let bytes = number
        .parse::<f64>()
        .ok()
        .filter(|_| plain)
        .map(|value| value * unit as f64);
    // Above 2^53 a double cannot distinguish neighbouring sizes.
    match bytes {
        Some(bytes) if bytes < (1_u64 << 53) as f64 => Ok(bytes as usize),
        _ => Err(
            "must be a number of bytes below 2^53, with or without K, M or G (powers of 1024)"
                .to_owned(),
        ),
    }
}

/// The step from one size of a sweep to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The factor (2 or more) that gives the next size.
    Factor(usize),
    /// The number of bytes (1 or more) to add for the next size.
    Bytes(usize),
}

/// Returns the sizes from `min_bytes` to at most `max_bytes`.
pub fn sweep(min_bytes: usize, max_bytes: usize, step: Step) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(min_bytes), move |&size| match step {
        Step::Factor(factor) => size.checked_mul(factor),
        Step::Bytes(bytes) => size.checked_add(bytes),
    })
    .take_while(move |&size| size <= max_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_and_fractions_match_nccl_tests() {
        let cases = [
            ("8", 8),
            ("1K", 1024),
            ("64k", 65536),
            ("1.5M", 1_572_864),
            ("2g", 2_147_483_648),
            ("0", 0),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn other_text_is_no_size() {
        for text in [
            "",
            "K",
            "x",
            "1T",
            "1KB",
            "-1",
            "+1",
            "1e3",
            "inf",
            "nan",
            "1.2.3",
            "9007199254740992",
            "99999999999G",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_sweep_goes_by_factor_or_by_bytes() {
        assert_eq!(
            sweep(8, 128, Step::Factor(4)).collect::<Vec<_>>(),
            [8, 32, 128]
        );
        assert_eq!(sweep(8, 100, Step::Factor(4)).collect::<Vec<_>>(), [8, 32]);
        let last = |min_bytes| sweep(min_bytes, 64 << 20, Step::Factor(4)).last();
        assert_eq!((last(8), last(1024)), (Some(32 << 20), Some(64 << 20)));
        assert_eq!(
            sweep(10, 30, Step::Bytes(10)).collect::<Vec<_>>(),
            [10, 20, 30]
        );
        assert_eq!(sweep(7, 7, Step::Bytes(1)).collect::<Vec<_>>(), [7]);
        assert_eq!(
            sweep(usize::MAX / 2, usize::MAX, Step::Factor(3)).count(),
            1
        );
    }
}
