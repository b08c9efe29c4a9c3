//! The doctor's results for two hosts together: the findings, and the measured paths between their
//! rails.

use crate::commands::doctor::finding::{Finding, Verdict};
use crate::output::numbers::significant;
use crate::output::plain;
use serde::Serialize;

#[derive(Debug, Clone, Default, Serialize)]
pub struct PeerResult {
    pub host: String,
    pub verdict: Verdict,
    pub findings: Vec<Finding>,
    pub paths: Vec<Path>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Path {
    /// Rails of this host: a single rail, or every rail that pairs with a rail of the peer.
    pub here: Vec<String>,
    pub there: Vec<String>,
    /// Expected payload rate in each direction in Mb/s, computed from the PCIe links and the ports.
    /// Null if unknown.
    pub expected_mbps: Option<f64>,
    /// Smallest path MTU of the ports at both ends, in bytes.
    pub port_mtu_bytes: Option<u32>,
    #[serde(flatten)]
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Measured(Figures),
    Failed(String),
    NotMeasured(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    pub to_peer: Rate,
    pub from_peer: Rate,
    /// Half a round trip of 8 bytes, in microseconds: the average of the two directions' medians.
    pub latency_us: f64,
    pub wrong_bytes: u64,
    /// Smallest path MTU of the connections, in bytes. Null if the plugin keeps no counters.
    pub path_mtu_bytes: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Rate {
    pub mbps: f64,
    /// Null if the expected rate is unknown.
    pub grade: Option<Grade>,
}

/// Grade of a measured rate, by the percentage of the expected rate that it reaches.
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
    pub fn word(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Fair => "fair",
            Self::Bad => "BAD",
        }
    }
}

impl Rate {
    pub fn of(mbps: f64, expected_mbps: Option<f64>) -> Self {
        let part = expected_mbps
            .filter(|expected| *expected > 0.0)
            .map(|expected| mbps / expected);
        let grade = part.map(|part| match part {
            _ if part > 0.9 => Grade::Good,
            _ if part >= 0.8 => Grade::Fair,
            _ => Grade::Bad,
        });
        Self { mbps, grade }
    }
}

impl Path {
    pub fn summary(&self) -> String {
        let rate = |rate: Rate| {
            let grade = rate.grade.zip(self.expected_mbps).map(|(grade, expected)| {
                format!(" ({:.0} %, {})", rate.mbps / expected * 100.0, grade.word())
            });
            format!(
                "{} Gb/s{}",
                significant(rate.mbps / 1e3),
                grade.unwrap_or_default()
            )
        };
        let result = match &self.outcome {
            Outcome::Measured(Figures {
                to_peer,
                from_peer,
                latency_us,
                ..
            }) => {
                let there = rate(*to_peer);
                let back = rate(*from_peer);
                format!(
                    "{there} there, {back} back, {} us",
                    significant(*latency_us)
                )
            }
            Outcome::Failed(why) => format!("carries no data: {why}"),
            Outcome::NotMeasured(why) => format!("not measured: {why}"),
        };
        plain(&format!("{}: {result}", self.name()))
    }

    pub fn name(&self) -> String {
        match (&self.here[..], &self.there[..]) {
            ([here], [there]) => format!("{here} to {there}"),
            _ => "all rails together".to_owned(),
        }
    }

    /// If the path MTU of the connections is smaller than that of the ports, returns both, the
    /// connections' first. A switch between the ports then drops larger packets.
    pub fn narrowed(&self) -> Option<(u32, u32)> {
        let both = (self.figures()?.path_mtu_bytes?, self.port_mtu_bytes?);
        Some(both).filter(|(path, port)| path < port)
    }

    pub fn figures(&self) -> Option<&Figures> {
        match &self.outcome {
            Outcome::Measured(figures) => Some(figures),
            Outcome::Failed(_) | Outcome::NotMeasured(_) => None,
        }
    }
}
