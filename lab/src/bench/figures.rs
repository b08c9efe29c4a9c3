//! What is measured, in which unit, and how the rounds are summed up and compared.
//!
//! A figure is the median of its rounds, shown with their min..max. Two libraries differ where those ranges do not overlap;
//! where they do, the ratio of the medians says nothing and is marked as no difference.

use nccl_tests_harness::output::numbers::{median, number, spread};
use serde_json::{Map, Value, json};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Payload a second in GB/s (10^9 bytes).
    Bandwidth,
    /// Messages a second.
    Rate,
    /// Half a round trip, median of the messages, in microseconds.
    P50,
    /// Half a round trip, 99th percentile of the messages, in microseconds.
    P99,
    /// The shortest half round trip, in microseconds.
    Least,
    /// Time to connect one connection, in milliseconds.
    Connect,
    /// Resident memory of one connection in the rank that sends, in KiB.
    SenderMemory,
    /// The same in the rank that receives.
    ReceiverMemory,
}

/// With fewer rounds ranges that do not overlap prove nothing: with five each it happens by chance once in 126 times, with three
/// once in ten.
const COMPARABLE_ROUNDS: usize = 5;

/// One value per round.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// What was measured.
    pub metric: Metric,
    /// In the order of the rounds; one or more.
    pub rounds: Vec<f64>,
}

/// Where in a scenario.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Message size in bytes.
    Size(usize),
    /// Number of connections.
    Connections(usize),
    /// A part of a run during which a rail is slowed.
    Phase(String),
}

/// What was measured at one place.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Where.
    pub place: Place,
    /// What the links allow of the first metric, in its unit, where that is known.
    pub limit: Option<f64>,
    /// The figures of each library: all have the same metrics.
    pub sides: Vec<Vec<Series>>,
    /// Wrong bytes of each library; none where this place was not checked.
    pub wrong: Option<Vec<u64>>,
}

/// One metric of two libraries.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Comparison {
    /// Our median over the other library's.
    pub ratio: f64,
    /// Whether the ranges of the rounds overlap; none where they do not, but there are too few rounds to call that a difference.
    pub no_difference: Option<bool>,
}

impl Metric {
    /// Its name in JSON, with the unit.
    pub fn key(self) -> &'static str {
        match self {
            Self::Bandwidth => "bandwidth_gb_s",
            Self::Rate => "messages_per_s",
            Self::P50 => "latency_p50_us",
            Self::P99 => "latency_p99_us",
            Self::Least => "latency_min_us",
            Self::Connect => "connect_ms",
            Self::SenderMemory => "sender_rss_kib",
            Self::ReceiverMemory => "receiver_rss_kib",
        }
    }

    /// Its name and its unit, the two lines above a column; no name where the unit says it.
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

    /// Whether it is a time, of which the limit is the shortest possible.
    pub fn is_time(self) -> bool {
        matches!(self, Self::P50 | Self::P99 | Self::Least | Self::Connect)
    }
}

impl Series {
    /// A series without values yet.
    pub fn new(metric: Metric) -> Self {
        Self { metric, rounds: Vec::new() }
    }

    /// The middle value, or the mean of the two in the middle.
    pub fn median(&self) -> f64 {
        median(&self.rounds)
    }

    /// The least and the greatest value.
    pub fn spread(&self) -> (f64, f64) {
        spread(&self.rounds)
    }

    fn to_json(&self) -> Value {
        let (min, max) = self.spread();
        json!({ "median": number(self.median()), "min": number(min), "max": number(max), "rounds": self.rounds })
    }
}

impl Point {
    /// How the two libraries compare in one metric.
    pub fn compare(&self, metric: usize) -> Option<Comparison> {
        let [ours, theirs] = self.sides.as_slice() else { return None };
        let (ours, theirs) = (ours.get(metric)?, theirs.get(metric)?);
        let ratio = ours.median() / theirs.median();
        let is_enough = [ours, theirs].iter().all(|series| series.rounds.len() >= COMPARABLE_ROUNDS);
        let (ours, theirs) = (ours.spread(), theirs.spread());
        let overlaps = ours.0 <= theirs.1 && theirs.0 <= ours.1;
        ratio.is_finite().then_some(Comparison { ratio, no_difference: (overlaps || is_enough).then_some(overlaps) })
    }

    /// For programs; `names` are those of the sides.
    pub fn to_json(&self, names: &[&str]) -> Value {
        let mut point = Map::new();
        match &self.place {
            Place::Size(bytes) => point.insert("size_bytes".to_owned(), (*bytes).into()),
            Place::Connections(count) => point.insert("connections".to_owned(), (*count).into()),
            Place::Phase(name) => point.insert("phase".to_owned(), name.as_str().into()),
        };
        let metrics = self.sides.first().map(Vec::as_slice).unwrap_or_default();
        if let Some(first) = metrics.first() {
            point.insert(format!("limit_{}", first.metric.key()), self.limit.into());
        }
        for (side, name) in names.iter().enumerate().take(self.sides.len()) {
            let mut figures = Map::new();
            for series in &self.sides[side] {
                figures.insert(series.metric.key().to_owned(), series.to_json());
            }
            figures.insert("wrong_bytes".to_owned(), self.wrong.as_ref().map(|wrong| wrong[side]).into());
            point.insert((*name).to_owned(), figures.into());
        }
        if self.sides.len() == 2 {
            let by_metric = |value: &dyn Fn(Comparison) -> Value| {
                let metrics = metrics.iter().enumerate();
                let of = |at| self.compare(at).map_or(Value::Null, value);
                metrics.map(|(at, series)| (series.metric.key().to_owned(), of(at))).collect::<Map<_, _>>()
            };
            point.insert("ratio_ours_to_theirs".to_owned(), by_metric(&|one| one.ratio.into()).into());
            point.insert("no_difference".to_owned(), by_metric(&|one| one.no_difference.into()).into());
        }
        point.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(rounds: &[f64]) -> Series {
        Series { metric: Metric::Bandwidth, rounds: rounds.to_vec() }
    }

    #[test]
    fn json_has_units_rounds_and_ratios() {
        let point = Point {
            place: Place::Size(4096),
            limit: Some(24.0),
            sides: vec![vec![series(&[1.0, 3.0, 2.0])], vec![series(&[4.0, 5.0, 3.0])]],
            wrong: Some(vec![0, 7]),
        };
        let told = point.to_json(&["ours", "theirs"]);
        let expected = json!({
            "size_bytes": 4096,
            "limit_bandwidth_gb_s": 24.0,
            "ours": { "bandwidth_gb_s": { "median": 2.0, "min": 1.0, "max": 3.0, "rounds": [1.0, 3.0, 2.0] }, "wrong_bytes": 0 },
            "theirs": { "bandwidth_gb_s": { "median": 4.0, "min": 3.0, "max": 5.0, "rounds": [4.0, 5.0, 3.0] }, "wrong_bytes": 7 },
            "ratio_ours_to_theirs": { "bandwidth_gb_s": 0.5 },
            "no_difference": { "bandwidth_gb_s": true },
        });
        assert_eq!(told, expected);
        let alone = Point { sides: vec![vec![series(&[1.0])]], limit: None, wrong: None, ..point }.to_json(&["ours"]);
        assert_eq!((&alone["limit_bandwidth_gb_s"], alone.get("ratio_ours_to_theirs")), (&Value::Null, None));
        assert_eq!(alone["ours"]["wrong_bytes"], Value::Null);
    }

    #[test]
    fn ranges_that_overlap_are_no_difference() {
        let compare = |ours: &[f64], theirs: &[f64]| {
            let sides = vec![vec![series(ours)], vec![series(theirs)]];
            Point { place: Place::Size(8), limit: None, sides, wrong: None }.compare(0)
        };
        let differs = |ours: &[f64], theirs: &[f64]| compare(ours, theirs).unwrap().no_difference;
        assert_eq!(differs(&[1.0, 2.0, 3.0], &[3.0, 4.0, 5.0]), Some(true));
        assert_eq!(differs(&[3.0, 4.0, 9.0], &[1.0, 3.5, 3.6]), Some(true));
        assert_eq!(differs(&[1.0, 2.0, 2.9, 2.9, 2.0], &[3.0, 4.0, 5.0, 4.0, 4.0]), Some(false));
        assert_eq!(differs(&[6.0, 7.0, 8.0, 7.0, 7.0], &[3.0, 4.0, 5.0, 4.0, 4.0]), Some(false));
        // Four rounds that do not overlap come about by chance too often.
        assert_eq!(differs(&[1.0, 2.0, 2.9, 2.9], &[3.0, 4.0, 5.0, 4.0]), None);
        assert_eq!(compare(&[1.0, 1.0, 1.0], &[2.0, 2.0, 2.0]).unwrap().ratio, 0.5);
        assert_eq!(compare(&[1.0], &[]), None);
        assert_eq!(compare(&[1.0], &[0.0]), None);
    }
}
