//! Today's date and time in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns the date, as in 2026-11-22. Returns 1970-01-01 if the clock shows an earlier date.
pub fn today() -> String {
    date(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs() / 86_400),
    )
}

/// Returns the time, as in 2026-11-22 14:03:07 UTC.
pub fn moment() -> String {
    moment_at(
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    )
}

fn moment_at(seconds: u64) -> String {
    let hours = seconds / 3600 % 24;
    let minutes = seconds / 60 % 60;
    format!(
        "{} {hours:02}:{minutes:02}:{:02} UTC",
        date(seconds / 86_400),
        seconds % 60
    )
}

/// Returns the date that is `days` after 1970-01-01, by the Gregorian calendar.
fn date(days: u64) -> String {
    let is_leap =
        |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let mut year = 1970;
    let mut day = days;
    while day >= 365 + u64::from(is_leap(year)) {
        day -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + u64::from(is_leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while month < 11 && day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (20_088, "2024-12-31"),
            (20_089, "2025-01-01"),
        ] {
            assert_eq!(date(days), expected);
        }
        assert!(today().starts_with("20") && today().len() == 10);
        assert_eq!(moment_at(1_735_689_599), "2024-12-31 23:59:59 UTC");
    }
}
