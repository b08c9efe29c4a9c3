//! What the doctor answers with: findings, what it could not see, and facts for the reader.

use super::id::Id;
use serde::{Deserialize, Serialize};

/// How bad a finding is; the worst comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The plugin does not work, or is not used.
    Broken,
    /// It works, and is slower than the machine allows.
    Slow,
    /// It works, and something ordinary will stop it or has stopped others.
    Fragile,
    /// Good to know. Does not change the exit status.
    Note,
}

impl Severity {
    /// The word that the text has for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Broken => "BROKEN",
            Self::Slow => "SLOW",
            Self::Fragile => "FRAGILE",
            Self::Note => "note",
        }
    }
}

/// Something that a person should know, and can change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of finding it is. Scripts may rely on it: an id keeps its meaning.
    pub id: &'static str,
    /// A sentence that names the thing.
    pub text: String,
    /// The command that cures it; `None` where nothing is to be done, or no command does it.
    pub cure: Option<String>,
}

impl Finding {
    /// A finding without a cure.
    pub fn new(severity: Severity, id: Id, text: impl Into<String>) -> Self {
        Self { severity, id: id.text(), text: text.into(), cure: None }
    }

    /// The same with the command that cures it.
    pub fn cured_by(self, cure: impl Into<String>) -> Self {
        Self { cure: Some(cure.into()), ..self }
    }
}

/// Something that the doctor wanted to know and could not see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NotSeen {
    /// What it is.
    pub what: String,
    /// Why it was not seen.
    pub why: String,
}

/// Something that was read and is as it should be, or that nobody can judge: for reports and comparisons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fact {
    /// What it is.
    pub name: String,
    /// What was read.
    pub value: String,
}

impl Fact {
    /// A fact.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), value: value.into() }
    }
}

/// What the exit status says; the worse is the greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// All is well: 0.
    #[default]
    Good,
    /// Slow or fragile: 1.
    Impaired,
    /// It does not work: 3.
    Broken,
}

impl Verdict {
    /// What some findings amount to.
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

    #[test]
    fn the_worst_decides() {
        let find = |severity| Finding::new(severity, Id::NoRail, "x");
        let all = [Severity::Note, Severity::Fragile, Severity::Broken, Severity::Slow].map(find);
        assert_eq!(Verdict::of(&all), Verdict::Broken);
        assert_eq!(Verdict::of(&all[..2]), Verdict::Impaired);
        assert_eq!(Verdict::of(&all[3..]), Verdict::Impaired);
        assert_eq!(Verdict::of(&all[..1]), Verdict::Good);
        assert_eq!(Verdict::of(&[]), Verdict::Good);
    }
}
