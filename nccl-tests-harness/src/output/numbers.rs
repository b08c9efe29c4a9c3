//! Formats the numbers that commands show. Computes the median, the least and the greatest of the
//! values that several rounds gave.

use serde_json::Value;

/// Returns the middle value, or the mean of the two middle values. Returns NaN if there is no
/// value.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// Returns the least and the greatest value.
pub fn spread(values: &[f64]) -> (f64, f64) {
    values.iter().fold(
        (f64::INFINITY, f64::NEG_INFINITY),
        |(smallest, largest), value| (smallest.min(*value), largest.max(*value)),
    )
}

/// Formats a value with three significant digits and never with an exponent. A value that rounds up
/// to a power of ten, such as 9.999, may get four digits. A value below 1e-7 gets fewer, because no
/// number has more than nine decimals. NaN and infinity are shown as `-`.
pub fn significant(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits = value.abs().log10().floor() as i32;
    let rounded = match digits {
        3.. => (value / 10_f64.powi(digits - 2)).round() * 10_f64.powi(digits - 2),
        _ => value,
    };
    format!("{rounded:.*}", (2 - digits).clamp(0, 9) as usize)
}

/// Formats a size as the command line takes it, with the largest of the suffixes K, M and G (powers
/// of 1024) that gives a whole number.
pub fn size(bytes: usize) -> String {
    for (unit, shift) in [("G", 30), ("M", 20), ("K", 10)] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// Formats the least and the greatest value, as in 1.50..2.00.
pub fn range(values: &[f64]) -> String {
    let (smallest, largest) = spread(values);
    format!("{}..{}", significant(smallest), significant(largest))
}

/// Formats a number of things, as in "1 rail" and "2 rails".
pub fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Returns a number in JSON; null for NaN and infinity, which JSON does not have.
pub fn number(value: f64) -> Value {
    Some(value).filter(|value| value.is_finite()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_of_the_sorted_values() {
        assert_eq!(
            (
                median(&[5.0, 1.0, 3.0]),
                median(&[5.0, 1.0, 3.0, 4.0]),
                median(&[2.0])
            ),
            (3.0, 3.5, 2.0)
        );
        assert!(median(&[]).is_nan());
        assert_eq!(
            (spread(&[5.0, 1.0, 3.0]), range(&[5.0, 1.0, 3.0])),
            ((1.0, 5.0), "1.00..5.00".to_owned())
        );
    }

    #[test]
    fn three_digits_and_no_exponent() {
        for (value, text) in [
            (0.0, "0"),
            (12.345, "12.3"),
            (0.012345, "0.0123"),
            (123.45, "123"),
            (1234567.0, "1230000"),
            (9.999, "10.00"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(significant(value), text);
        }
        assert_eq!(
            (
                size(8),
                size(4096),
                size(3 << 20),
                size(1000),
                size(1 << 30)
            ),
            (
                "8".into(),
                "4K".into(),
                "3M".into(),
                "1000".into(),
                "1G".into()
            )
        );
    }
}
