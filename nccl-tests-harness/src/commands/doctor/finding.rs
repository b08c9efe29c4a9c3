//! The parts of the doctor's answer: findings, facts, and facts that could not be read.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Severity of a finding. A worse severity compares smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The plugin does not work, or is not used.
    Broken,
    /// The plugin works, but is slower than the machine allows.
    Slow,
    /// The plugin works, but an ordinary event will stop it, or has stopped it on other machines.
    Fragile,
    /// A remark that does not change the exit status.
    Note,
}

impl Severity {
    pub fn word(self) -> &'static str {
        match self {
            Self::Broken => "BROKEN",
            Self::Slow => "SLOW",
            Self::Fragile => "FRAGILE",
            Self::Note => "note",
        }
    }
}

/// A kind of findings. Scripts rely on the id, so an id never changes its meaning.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    pub id: &'static str,
    /// The usual severity.
    pub severity: Severity,
    /// The meaning, and the help in words, as in the guide's table (docs/guide/troubleshooting.md).
    pub meaning: &'static str,
    pub help: &'static str,
}

impl Kind {
    /// Makes a finding of the usual severity, without a cure.
    pub fn finding(&self, text: impl Into<String>) -> Finding {
        Finding {
            severity: self.severity,
            id: Cow::Borrowed(self.id),
            text: text.into(),
            cure: None,
            now: None,
        }
    }
}

/// Defines the kinds of findings that a file makes: `NAME = Severity "id": "meaning", "help";`.
/// `KINDS` lists them; `doctor::kinds` collects these lists.
macro_rules! kinds {
    ($($name:ident = $severity:ident $id:literal: $meaning:literal, $help:literal;)*) => {
        $(#[doc = $meaning]
        pub const $name: &$crate::commands::doctor::finding::Kind = &$crate::commands::doctor::finding::Kind {
            id: $id,
            severity: $crate::commands::doctor::finding::Severity::$severity,
            meaning: $meaning,
            help: $help,
        };)*

        /// The kinds of findings that this file makes.
        pub const KINDS: &[&$crate::commands::doctor::finding::Kind] = &[$($name),*];
    };
}
pub(super) use kinds;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub severity: Severity,
    /// The [`Kind`]'s id, whose meaning scripts rely on.
    pub id: Cow<'static, str>,
    pub text: String,
    /// Commands that remove the fault for good, or else advice.
    pub cure: Option<String>,
    /// Commands that remove the fault until the next boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub now: Option<String>,
}

impl Finding {
    pub fn cured_by(self, cure: impl Into<String>) -> Self {
        Self {
            cure: Some(cure.into()),
            ..self
        }
    }

    /// Adds commands that help at once, but only until the next boot.
    pub fn until_boot_by(self, now: impl Into<String>) -> Self {
        Self {
            now: Some(now.into()),
            ..self
        }
    }

    pub fn at(self, severity: Severity) -> Self {
        Self { severity, ..self }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NotSeen {
    pub what: String,
    pub why: String,
}

impl NotSeen {
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            why: why.into(),
        }
    }
}

/// A fact about the machine, for `-v` and `--json`. It need not be a fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fact {
    pub name: String,
    pub value: String,
}

impl Fact {
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            value: value.into(),
        }
    }
}

/// The exit status of the doctor. A worse verdict compares greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Exit status 0: no fault.
    #[default]
    Good,
    /// Exit status 1: slow or fragile.
    Impaired,
    /// Exit status 3: the plugin does not work.
    Broken,
}

impl Verdict {
    pub fn of(findings: &[Finding]) -> Self {
        match findings.iter().map(|finding| finding.severity).min() {
            Some(Severity::Broken) => Self::Broken,
            Some(Severity::Slow | Severity::Fragile) => Self::Impaired,
            Some(Severity::Note) | None => Self::Good,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::findings::rails::NO_RAIL;

    #[test]
    fn the_worst_finding_decides() {
        let find = |severity| NO_RAIL.finding("x").at(severity);
        let all = [
            Severity::Note,
            Severity::Fragile,
            Severity::Broken,
            Severity::Slow,
        ]
        .map(find);
        assert_eq!(Verdict::of(&all), Verdict::Broken);
        assert_eq!(Verdict::of(&all[..2]), Verdict::Impaired);
        assert_eq!(Verdict::of(&all[3..]), Verdict::Impaired);
        assert_eq!(Verdict::of(&all[..1]), Verdict::Good);
        assert_eq!(Verdict::of(&[]), Verdict::Good);
    }
}
