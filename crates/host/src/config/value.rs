//! Parsers for values, each used by several settings.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Reason why a value is not usable. `None` if the list of allowed values explains the refusal.
#[derive(Debug, Default)]
pub(super) struct Refusal(pub(super) Option<String>);

impl Refusal {
    pub(super) fn because(reason: impl Into<String>) -> Self {
        Self(Some(reason.into()))
    }
}

pub(super) type Parsed<T> = std::result::Result<T, Refusal>;

/// Quotes a text, cut to 60 characters, because NCCL cuts a log line at 1024.
pub(super) fn quoted(text: &str) -> String {
    const MOST: usize = 60;
    let start: String = text.chars().take(MOST).collect();
    if start.len() == text.len() {
        format!("{text:?}")
    } else {
        format!("{start:?}...")
    }
}

pub(super) fn text(value: &str) -> Parsed<String> {
    Ok(value.to_owned())
}

pub(super) fn optional_text(value: &str) -> Parsed<Option<String>> {
    Ok(Some(value.to_owned()).filter(|text| !text.is_empty()))
}

pub(super) fn path(value: &str) -> Parsed<PathBuf> {
    Ok(value.into())
}

pub(super) fn number<T: FromStr + TryInto<u64> + Copy, const LOW: u64, const HIGH: u64>(
    value: &str,
) -> Parsed<T> {
    let parsed: T = value.parse().map_err(|_| Refusal::default())?;
    let wide: u64 = parsed.try_into().map_err(|_| Refusal::default())?;
    if (LOW..=HIGH).contains(&wide) {
        Ok(parsed)
    } else {
        Err(Refusal::default())
    }
}

pub(super) fn optional<T: FromStr + TryInto<u64> + Copy, const LOW: u64, const HIGH: u64>(
    value: &str,
) -> Parsed<Option<T>> {
    if value.is_empty() {
        Ok(None)
    } else {
        number::<T, LOW, HIGH>(value).map(Some)
    }
}

pub(super) fn seconds<const LOW: u64, const HIGH: u64>(value: &str) -> Parsed<Duration> {
    number::<u64, LOW, HIGH>(value).map(Duration::from_secs)
}

pub(super) fn millis<const LOW: u64, const HIGH: u64>(value: &str) -> Parsed<Duration> {
    number::<u64, LOW, HIGH>(value).map(Duration::from_millis)
}

pub(super) fn switch(value: &str) -> Parsed<bool> {
    choice(value, &[("0", false), ("1", true)])
}

/// Returns the choice with this text.
pub(super) fn choice<T: Copy>(value: &str, choices: &[(&str, T)]) -> Parsed<T> {
    let found = choices.iter().find(|(text, _)| *text == value);
    found
        .map(|(_, choice)| *choice)
        .ok_or_else(Refusal::default)
}
