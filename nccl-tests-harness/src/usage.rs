//! Mistakes on the command line: the error that a command returns, and its text.

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Command, Error};
use std::ffi::OsStr;

/// Accepts any text. Shell completions offer the known values.
#[derive(Debug, Clone)]
pub(crate) struct Suggesting(Vec<PossibleValue>);

impl Suggesting {
    pub(crate) fn new(known: impl IntoIterator<Item = impl Into<PossibleValue>>) -> Self {
        Self(known.into_iter().map(Into::into).collect())
    }
}

impl TypedValueParser for Suggesting {
    type Value = String;

    fn parse_ref(
        &self,
        command: &Command,
        option: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, Error> {
        StringValueParser::new().parse_ref(command, option, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().cloned()))
    }
}

/// Returns the error for a mistake on the command line, with the usage line of clap's own errors.
pub fn wrong(text: impl std::fmt::Display) -> clap::Error {
    Command::new("nccl-spark")
        .override_usage("nccl-spark [OPTIONS] <COMMAND>")
        .error(ErrorKind::ValueValidation, text)
}

/// Formats a mistake on the command line as one line of text.
pub fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("For more") && !line.starts_with("Usage:"));
    let lines = lines.filter(|line| !line.is_empty()).map(plain);
    lines
        .collect::<Vec<_>>()
        .join(" ")
        .trim_start_matches("error: ")
        .to_owned()
}

/// Formats an error: a mistake on the command line in one line, any other with its causes.
pub(crate) fn text(error: &anyhow::Error) -> String {
    error
        .downcast_ref()
        .map_or_else(|| format!("{error:#}"), one_line)
}

/// Rewrites what clap says about a number. For example, "0 is not in 1..=4294967295" becomes "must
/// be at least 1".
fn plain(line: &str) -> String {
    let range = line.rsplit_once(": ").and_then(|(before, reason)| {
        let (value, range) = reason.split_once(" is not in ")?;
        let (smallest, largest) = range.split_once("..=")?;
        Some((
            before,
            value.parse::<i128>().ok()?,
            smallest.parse::<i128>().ok()?,
            largest.parse::<i128>().ok()?,
        ))
    });
    if let Some((before, value, smallest, largest)) = range {
        // An option without its own maximum has the maximum of its type.
        let is_open = largest >= i128::from(u32::MAX);
        return match () {
            () if smallest == largest => format!("{before}: must be {smallest}"),
            () if is_open && value < smallest => format!("{before}: must be at least {smallest}"),
            () if is_open => format!("{before}: must be at most {largest}"),
            () => format!("{before}: must be {smallest} to {largest}"),
        };
    }
    let too_large = "number too large to fit in target type";
    line.replace("invalid digit found in string", "must be a whole number")
        .replace(too_large, "too large a number")
}
