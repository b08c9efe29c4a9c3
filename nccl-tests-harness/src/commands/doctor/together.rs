//! The results for two hosts together, as text and JSON have them.

use crate::commands::doctor::finding::{Finding, Severity, Verdict};
use crate::output::numbers::significant;
use crate::output::plain;
use serde::{Deserialize, Serialize};

/// What the doctor says of a peer.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Together {
    /// The peer's name.
    pub host: String,
    /// What its own doctor says of it.
    pub verdict: Verdict,
    /// What is wrong there.
    pub findings: Vec<Remote>,
    /// Each pair of rails by itself, then all of them together.
    pub paths: Vec<Path>,
}

/// A finding of the peer's own doctor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of finding it is.
    pub id: String,
    /// The sentence.
    pub text: String,
    /// The command that cures it, on the peer.
    pub cure: Option<String>,
}

/// One way between the hosts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Path {
    /// The rails of this host; one, or all that have a pair.
    pub here: Vec<String>,
    /// The rails of the peer.
    pub there: Vec<String>,
    /// What their links and ports promise in payload each way, in Mb/s; null where nothing is known.
    pub expected_mbps: Option<f64>,
    /// The smallest path MTU of the ports at both ends, in bytes.
    pub port_mtu_bytes: Option<u32>,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What came of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Bytes went both ways.
    Measured(Figures),
    /// It does not carry; why.
    Failed(String),
    /// It was not tried; why.
    NotMeasured(String),
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// From here to the peer.
    pub to_peer: Rate,
    /// From the peer to here.
    pub from_peer: Rate,
    /// Half a round trip of 8 bytes, the median, in microseconds.
    pub latency_us: f64,
    /// Bytes that arrived wrong, of those that were checked.
    pub wrong_bytes: u64,
    /// The smallest path MTU of its connections, in bytes; null where the plugin keeps no counters.
    pub path_mtu_bytes: Option<u32>,
}

/// A rate, and what people would say of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rate {
    /// Payload in Mb/s.
    pub mbps: f64,
    /// Null where nothing is expected.
    pub grade: Option<Grade>,
}

/// How good a rate is, of what is expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// More than 90 %.
    Good,
    /// 80 to 90 %.
    Fair,
    /// Less than 80 %.
    Bad,
}

impl Grade {
    /// The word that the text has for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Fair => "fair",
            Self::Bad => "BAD",
        }
    }
}

impl Rate {
    /// A rate beside what is expected, in Mb/s.
    pub fn of(mbps: f64, expected_mbps: Option<f64>) -> Self {
        let part = expected_mbps.filter(|expected| *expected > 0.0).map(|expected| mbps / expected);
        let grade = part.map(|part| match part {
            _ if part > 0.9 => Grade::Good,
            _ if part >= 0.8 => Grade::Fair,
            _ => Grade::Bad,
        });
        Self { mbps, grade }
    }
}

impl From<&Finding> for Remote {
    fn from(finding: &Finding) -> Self {
        let Finding { severity, id, text, cure } = finding.clone();
        Self { severity, id: id.to_owned(), text, cure }
    }
}

impl Path {
    /// The path and its result, in a line.
    pub fn summary(&self) -> String {
        let rate = |rate: Rate| {
            let grade = rate
                .grade
                .zip(self.expected_mbps)
                .map(|(grade, expected)| format!(" ({:.0} %, {})", rate.mbps / expected * 100.0, grade.word()));
            format!("{} Gb/s{}", significant(rate.mbps / 1e3), grade.unwrap_or_default())
        };
        let result = match &self.outcome {
            Outcome::Measured(Figures { to_peer, from_peer, latency_us, .. }) => {
                let (there, back) = (rate(*to_peer), rate(*from_peer));
                format!("{there} there, {back} back, {} us", significant(*latency_us))
            }
            Outcome::Failed(why) => format!("does not carry: {why}"),
            Outcome::NotMeasured(why) => format!("not measured: {why}"),
        };
        plain(&format!("{}: {result}", self.name()))
    }

    /// The rails of both sides, for a sentence.
    pub fn name(&self) -> String {
        match (&self.here[..], &self.there[..]) {
            ([here], [there]) => format!("{here} to {there}"),
            _ => "all rails together".to_owned(),
        }
    }

    /// The path MTUs of its connections and of its ports, where the first is smaller: a switch
    /// between the ports drops larger packets.
    pub fn narrowed(&self) -> Option<(u32, u32)> {
        let both = (self.figures()?.path_mtu_bytes?, self.port_mtu_bytes?);
        Some(both).filter(|(path, port)| path < port)
    }

    /// What was measured, if anything was.
    pub fn figures(&self) -> Option<&Figures> {
        match &self.outcome {
            Outcome::Measured(figures) => Some(figures),
            Outcome::Failed(_) | Outcome::NotMeasured(_) => None,
        }
    }
}
