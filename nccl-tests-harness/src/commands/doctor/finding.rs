//! The parts of the doctor's answer: findings, unread facts, and facts for the reader.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The severity of a finding. The worst one compares smallest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The plugin does not work, or is not used.
    Broken,
    /// The plugin works, but is slower than the machine allows.
    Slow,
    /// The plugin works, but an ordinary event will stop it, or has stopped it elsewhere.
    Fragile,
    /// A remark that does not change the exit status.
    Note,
}

impl Severity {
    /// Returns the word in the text.
    pub fn word(self) -> &'static str {
        match self {
            Self::Broken => "BROKEN",
            Self::Slow => "SLOW",
            Self::Fragile => "FRAGILE",
            Self::Note => "note",
        }
    }
}

/// A fault, or a remark on something that a person can change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub severity: Severity,
    /// The kind of finding. An id keeps its meaning, because scripts rely on it.
    pub id: Cow<'static, str>,
    /// A sentence that names the faulty part.
    pub text: String,
    /// A shell command that cures the fault, if one does.
    pub cure: Option<String>,
}

impl Finding {
    /// Adds the command that cures the fault.
    pub fn cured_by(self, cure: impl Into<String>) -> Self {
        Self { cure: Some(cure.into()), ..self }
    }

    /// Sets a severity other than the usual one of the id.
    pub fn at(self, severity: Severity) -> Self {
        Self { severity, ..self }
    }
}

/// A fact that the doctor could not read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NotSeen {
    pub what: String,
    pub why: String,
}

impl NotSeen {
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }
}

/// A fact that was read, for reports and comparisons. It may be in order, or beyond judgement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fact {
    pub name: String,
    pub value: String,
}

impl Fact {
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), value: value.into() }
    }
}

/// The exit status of the doctor. A worse verdict compares greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// No fault: 0.
    #[default]
    Good,
    /// Slow or fragile: 1.
    Impaired,
    /// The plugin does not work: 3.
    Broken,
}

impl Verdict {
    /// Returns the verdict on some findings.
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
    use crate::commands::doctor::id::Id;

    #[test]
    fn the_worst_finding_decides() {
        let find = |severity| Id::NoRail.finding("x").at(severity);
        let all = [Severity::Note, Severity::Fragile, Severity::Broken, Severity::Slow].map(find);
        assert_eq!(Verdict::of(&all), Verdict::Broken);
        assert_eq!(Verdict::of(&all[..2]), Verdict::Impaired);
        assert_eq!(Verdict::of(&all[3..]), Verdict::Impaired);
        assert_eq!(Verdict::of(&all[..1]), Verdict::Good);
        assert_eq!(Verdict::of(&[]), Verdict::Good);
    }
}
