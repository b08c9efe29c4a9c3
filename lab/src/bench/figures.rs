//! Metrics, and how the rounds of a measurement are summed up and compared.
//!
//! A figure is the median of its rounds, shown with the rounds' range (min..max). Two libraries
//! differ where their ranges do not overlap, if there are enough rounds ([`COMPARABLE_ROUNDS`]).
//! Where the ranges overlap, the ratio of the medians is marked as no difference.

use crate::pair::side::WrongBytes;
use nccl_tests_harness::output::numbers::{median, spread};
use serde::Serialize;

/// A measured quantity. Its name in JSON has the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Metric {
    /// Payload in 10^9 bytes per second.
    #[serde(rename = "bandwidth_gb_s")]
    Bandwidth,
    #[serde(rename = "messages_per_s")]
    Rate,
    /// Half a round trip, median of the messages.
    #[serde(rename = "latency_p50_us")]
    P50,
    /// Half a round trip, 99th percentile of the messages.
    #[serde(rename = "latency_p99_us")]
    P99,
    /// Shortest half round trip.
    #[serde(rename = "latency_min_us")]
    Least,
    #[serde(rename = "connect_ms")]
    Connect,
    /// Resident memory of one connection in the rank that sends.
    #[serde(rename = "sender_rss_kib")]
    SenderMemory,
    /// Resident memory of one connection in the rank that receives.
    #[serde(rename = "receiver_rss_kib")]
    ReceiverMemory,
}

/// Number of rounds that each library needs for a proof that the two differ. Ranges that do not
/// overlap also occur by chance: once in ten cases with three rounds each, once in 126 with five.
const COMPARABLE_ROUNDS: usize = 5;

/// One value per round.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Series {
    pub metric: Metric,
    /// The values, in the order of the rounds. There is at least one.
    pub rounds: Vec<f64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    SizeBytes(usize),
    Connections(usize),
    /// The name of a part of a run of scenario slowdown.
    Phase(String),
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Point {
    #[serde(flatten)]
    pub place: Place,
    /// The limit that the links set for the first metric, in the metric's unit, if known.
    pub limit: Option<f64>,
    /// Series of each library, ours first. All libraries have the same metrics.
    pub sides: Vec<Vec<Series>>,
    /// Wrong bytes of each library; `None` if this place was not checked.
    pub wrong: Option<Vec<WrongBytes>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Our median divided by the other library's.
    pub ratio: f64,
    /// True if the ranges of the rounds overlap. `None` if they do not, but the rounds are too few
    /// to tell.
    pub no_difference: Option<bool>,
}

impl Metric {
    /// Returns name and unit, the two lines above a column. The name is empty where the unit
    /// suffices.
    pub fn head(self) -> [&'static str; 2] {
        match self {
            Self::Bandwidth => ["", "GB/s"],
            Self::Rate => ["", "msg/s"],
            Self::P50 => ["p50", "us"],
            Self::P99 => ["p99", "us"],
            Self::Least => ["min", "us"],
            Self::Connect => ["connect", "ms each"],
            Self::SenderMemory => ["sender", "KiB each"],
            Self::ReceiverMemory => ["receiver", "KiB each"],
        }
    }

    /// Returns true if the metric is a time. The limit of such a metric is the shortest possible
    /// time.
    pub fn is_time(self) -> bool {
        matches!(self, Self::P50 | Self::P99 | Self::Least | Self::Connect)
    }
}

impl Series {
    pub fn median(&self) -> f64 {
        median(&self.rounds)
    }
}

impl Point {
    pub fn compare(&self, metric: usize) -> Option<Comparison> {
        let [ours, theirs] = self.sides.as_slice() else { return None };
        let (ours, theirs) = (ours.get(metric)?, theirs.get(metric)?);
        let ratio = ours.median() / theirs.median();
        let is_enough = [ours, theirs].iter().all(|series| series.rounds.len() >= COMPARABLE_ROUNDS);
        let (ours, theirs) = (spread(&ours.rounds), spread(&theirs.rounds));
        let overlaps = ours.0 <= theirs.1 && theirs.0 <= ours.1;
        ratio.is_finite().then_some(Comparison { ratio, no_difference: (overlaps || is_enough).then_some(overlaps) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn series(rounds: &[f64]) -> Series {
        Series { metric: Metric::Bandwidth, rounds: rounds.to_vec() }
    }

    #[test]
    fn json_has_units_and_rounds() {
        let wrong = [0, 7].map(|bytes| WrongBytes { bytes, first: Vec::new() }).to_vec();
        let point = Point {
            place: Place::SizeBytes(4096),
            limit: Some(24.0),
            sides: vec![vec![series(&[1.0, 3.0])], vec![series(&[4.0, 5.0])]],
            wrong: Some(wrong),
        };
        let expected = json!({
            "size_bytes": 4096,
            "limit": 24.0,
            "sides": [[{ "metric": "bandwidth_gb_s", "rounds": [1.0, 3.0] }], [{ "metric": "bandwidth_gb_s", "rounds": [4.0, 5.0] }]],
            "wrong": [{ "bytes": 0, "first": [] }, { "bytes": 7, "first": [] }],
        });
        assert_eq!(serde_json::to_value(point).unwrap(), expected);
    }

    #[test]
    fn ranges_that_overlap_are_no_difference() {
        let compare = |ours: &[f64], theirs: &[f64]| {
            let sides = vec![vec![series(ours)], vec![series(theirs)]];
            Point { place: Place::SizeBytes(8), limit: None, sides, wrong: None }.compare(0)
        };
        let differs = |ours: &[f64], theirs: &[f64]| compare(ours, theirs).unwrap().no_difference;
        assert_eq!(differs(&[1.0, 2.0, 3.0], &[3.0, 4.0, 5.0]), Some(true));
        assert_eq!(differs(&[3.0, 4.0, 9.0], &[1.0, 3.5, 3.6]), Some(true));
        assert_eq!(differs(&[1.0, 2.0, 2.9, 2.9, 2.0], &[3.0, 4.0, 5.0, 4.0, 4.0]), Some(false));
        assert_eq!(differs(&[6.0, 7.0, 8.0, 7.0, 7.0], &[3.0, 4.0, 5.0, 4.0, 4.0]), Some(false));
        // With four rounds each, ranges that do not overlap are too often chance.
        assert_eq!(differs(&[1.0, 2.0, 2.9, 2.9], &[3.0, 4.0, 5.0, 4.0]), None);
        assert_eq!(compare(&[1.0, 1.0, 1.0], &[2.0, 2.0, 2.0]).unwrap().ratio, 0.5);
        assert_eq!(compare(&[1.0], &[]), None);
        assert_eq!(compare(&[1.0], &[0.0]), None);
    }
}
