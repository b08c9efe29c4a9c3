//! What is measured, in which unit, and what becomes of the rounds.

use serde_json::{Map, Value, json};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Payload a second in GB/s (10^9 bytes).
    Bandwidth,
    /// Messages a second.
    Rate,
    /// Half a round trip that half of the messages kept to, in microseconds.
    P50,
    /// Half a round trip that 99 of 100 messages kept to, in microseconds.
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

/// One value of each round.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// Of what.
    pub metric: Metric,
    /// In the order of the rounds; one or more.
    pub rounds: Vec<f64>,
}

/// Where in a scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Messages of so many bytes.
    Size(usize),
    /// So many connections.
    Connections(usize),
    /// A part of a run in which a rail slows.
    Phase(&'static str),
}

/// What was measured at one place.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Where.
    pub place: Place,
    /// The physical limit of the first metric, in its unit, where it is known.
    pub limit: Option<f64>,
    /// What each side did: all have the same metrics.
    pub sides: Vec<Vec<Series>>,
    /// Wrong bytes of each side; none where this place was not checked.
    pub wrong: Option<Vec<u64>>,
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

    /// Its name and unit over a column.
    pub fn head(self) -> &'static str {
        match self {
            Self::Bandwidth => "GB/s",
            Self::Rate => "messages/s",
            Self::P50 => "p50 us",
            Self::P99 => "p99 us",
            Self::Least => "min us",
            Self::Connect => "connect one, ms",
            Self::SenderMemory => "sender KiB each",
            Self::ReceiverMemory => "receiver KiB each",
        }
    }
}

impl Series {
    /// A series without values yet.
    pub fn new(metric: Metric) -> Self {
        Self { metric, rounds: Vec::new() }
    }

    /// The middle value, or the mean of the two in the middle.
    pub fn median(&self) -> f64 {
        let mut sorted = self.rounds.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            count if count % 2 == 1 => sorted[count / 2],
            count => (sorted[count / 2 - 1] + sorted[count / 2]) / 2.0,
        }
    }

    /// The least and the greatest value.
    pub fn spread(&self) -> (f64, f64) {
        let all = self.rounds.iter();
        (all.clone().copied().fold(f64::INFINITY, f64::min), all.copied().fold(f64::NEG_INFINITY, f64::max))
    }

    fn to_json(&self) -> Value {
        let (min, max) = self.spread();
        json!({ "median": number(self.median()), "min": number(min), "max": number(max), "rounds": self.rounds })
    }
}

impl Point {
    /// The median of ours over that of the other side.
    pub fn ratio(&self, metric: usize) -> Option<f64> {
        let [ours, theirs] = self.sides.as_slice() else { return None };
        Some(ours.get(metric)?.median() / theirs.get(metric)?.median()).filter(|ratio| ratio.is_finite())
    }

    /// For programs; `names` are those of the sides.
    pub fn to_json(&self, names: &[&str]) -> Value {
        let mut point = Map::new();
        match self.place {
            Place::Size(bytes) => point.insert("size_bytes".to_owned(), bytes.into()),
            Place::Connections(count) => point.insert("connections".to_owned(), count.into()),
            Place::Phase(name) => point.insert("phase".to_owned(), name.into()),
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
            let ratios = metrics.iter().enumerate();
            let ratios = ratios.map(|(at, series)| (series.metric.key().to_owned(), self.ratio(at).into()));
            point.insert("ratio_ours_to_theirs".to_owned(), ratios.collect::<Map<_, _>>().into());
        }
        point.into()
    }
}

/// JSON has no infinity.
fn number(value: f64) -> Value {
    Some(value).filter(|value| value.is_finite()).into()
}

/// Three significant digits, never an exponent.
pub fn significant(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    let digits = value.abs().log10().floor() as i32;
    let rounded = match digits {
        3.. => (value / 10_f64.powi(digits - 2)).round() * 10_f64.powi(digits - 2),
        _ => value,
    };
    format!("{rounded:.*}", (2 - digits).clamp(0, 9) as usize)
}

/// A size as the command line takes it where it is whole in one of the units.
pub fn size(bytes: usize) -> String {
    for (unit, shift) in [("G", 30), ("M", 20), ("K", 10)] {
        if bytes >= 1 << shift && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(rounds: &[f64]) -> Series {
        Series { metric: Metric::Bandwidth, rounds: rounds.to_vec() }
    }

    #[test]
    fn the_median_is_the_middle_of_the_sorted_rounds() {
        assert_eq!(series(&[5.0, 1.0, 3.0]).median(), 3.0);
        assert_eq!(series(&[5.0, 1.0, 3.0, 4.0]).median(), 3.5);
        assert_eq!(series(&[2.0]).median(), 2.0);
        assert_eq!(series(&[5.0, 1.0, 3.0]).spread(), (1.0, 5.0));
        assert!(series(&[]).median().is_nan());
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
        });
        assert_eq!(told, expected);
        let alone = Point { sides: vec![vec![series(&[1.0])]], limit: None, wrong: None, ..point }.to_json(&["ours"]);
        assert_eq!((&alone["limit_bandwidth_gb_s"], alone.get("ratio_ours_to_theirs")), (&Value::Null, None));
        assert_eq!(alone["ours"]["wrong_bytes"], Value::Null);
    }

    #[test]
    fn three_digits_and_no_exponent() {
        for (value, text) in [
            (0.0, "0"),
            (12.345, "12.3"),
            (0.012345, "0.0123"),
            (123.45, "123"),
            (1234567.0, "1230000"),
            (9.999, "10.00"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(significant(value), text);
        }
        assert_eq!(
            (size(8), size(4096), size(3 << 20), size(1000), size(1 << 30)),
            ("8".into(), "4K".into(), "3M".into(), "1000".into(), "1G".into())
        );
    }
}
