//! The tables of a measurement, written line by line as it goes, within 80 columns.
//!
//! Each place (a size, a number of connections, a phase) takes one line if one library is measured.
//! With two libraries it takes three: one for each library, and one for their ratios. The libraries
//! do not fit side by side.

use super::figures::{Comparison, Metric, Place, Point};
use super::options::Scenario;
use nccl_tests_harness::output::numbers::{range, significant, size};
use nccl_tests_harness::output::table::{Table, right};
use std::io::{self, Write};

pub struct PointTable<'a, W> {
    table: Table<&'a mut W>,
    metrics: &'static [Metric],
    names: &'a [&'static str],
}

const PLUGIN: usize = 6;
const VALUE: usize = 7;
const SPREAD: usize = 16;
const LIMIT: usize = 7;
const PART: usize = 6;

impl<'a, W: Write> PointTable<'a, W> {
    pub fn start(out: &'a mut W, title: &str, scenario: Scenario, names: &'a [&'static str]) -> io::Result<Self> {
        let (place, place_width) = match scenario {
            Scenario::Connections => ("count", 5),
            Scenario::Slowdown => ("phase", 17),
            _ => ("size", 8),
        };
        let metrics = scenario.metrics();
        let (mut upper, mut lower, mut columns) = (vec![""], vec![place], vec![right(place_width + 1)]);
        let mut column = |[above, below]: [&'static str; 2], width: usize| {
            upper.push(above);
            lower.push(below);
            columns.push(right(width));
        };
        if names.len() > 1 {
            column(["", "plugin"], PLUGIN);
        }
        for (at, metric) in metrics.iter().enumerate() {
            column(metric.head(), width(*metric));
            if at == 0 {
                column(["", "min..max"], SPREAD);
            }
        }
        column(["payload", "limit"], LIMIT);
        let is_time = metrics.first().is_some_and(|metric| metric.is_time());
        column(if is_time { ["times", "limit"] } else { ["% of", "limit"] }, PART);
        let mut table = Table::new(out, " ", columns);
        table.remark("")?;
        table.remark(title)?;
        table.head(&upper)?;
        table.head(&lower)?;
        Ok(Self { table, metrics, names })
    }

    pub fn row(&mut self, point: &Point) -> io::Result<()> {
        let place = match &point.place {
            Place::SizeBytes(bytes) => size(*bytes),
            Place::Connections(count) => count.to_string(),
            Place::Phase(name) => name.clone(),
        };
        for (number, name) in self.names.iter().enumerate() {
            let place = if number == 0 { place.clone() } else { String::new() };
            let mut cells = self.begin(place, name);
            for at in 0..self.metrics.len() {
                cells.extend(figures(at, point, number));
            }
            // The limit is compared with our library only.
            if number == 0 {
                cells.extend(limit(point));
            }
            self.table.row(&cells)?;
        }
        if self.names.len() > 1 {
            let mut cells = self.begin(String::new(), "ratio");
            for at in 0..self.metrics.len() {
                cells.extend(ratio(at, point.compare(at)));
            }
            while cells.last().is_some_and(String::is_empty) {
                cells.pop();
            }
            self.table.row(&cells)?;
        }
        for (name, wrong) in self.names.iter().zip(point.wrong.iter().flatten()).filter(|(_, wrong)| wrong.bytes > 0) {
            self.table.remark(&format!("{} WRONG bytes from {name}: its figures above do not count", wrong.bytes))?;
            wrong.first.iter().try_for_each(|line| self.table.remark(line))?;
        }
        Ok(())
    }

    fn begin(&self, place: String, name: &str) -> Vec<String> {
        let plugin = (self.names.len() > 1).then(|| name.to_owned());
        std::iter::once(place).chain(plugin).collect()
    }
}

/// Returns the median of a library, and for the first metric its range.
fn figures(at: usize, point: &Point, number: usize) -> Vec<String> {
    let series = point.sides.get(number).and_then(|side| side.get(at));
    let median = series.map_or_else(|| "-".to_owned(), |series| significant(series.median()));
    let range = (at == 0).then(|| series.map(|series| range(&series.rounds)).unwrap_or_default());
    std::iter::once(median).chain(range).collect()
}

/// Returns the ratio of the two libraries in a metric, and for the first metric a judgement.
fn ratio(at: usize, comparison: Option<Comparison>) -> Vec<String> {
    let found = comparison.map(|one| one.no_difference);
    let mark = if found == Some(Some(true)) { "~" } else { "" };
    let text = comparison.map_or_else(|| "-".to_owned(), |one| format!("{mark}{:.3}", one.ratio));
    let words = match found {
        Some(Some(true)) => "no difference",
        Some(None) => "too few rounds",
        _ => "",
    };
    std::iter::once(text).chain((at == 0).then(|| words.to_owned())).collect()
}

fn width(metric: Metric) -> usize {
    metric.head().iter().map(|text| text.len()).fold(VALUE, usize::max)
}

/// Returns the limit, and our library's figure relative to the limit: a rate in percent, a time as
/// a multiple.
fn limit(point: &Point) -> [String; 2] {
    let first = point.sides.first().and_then(|ours| ours.first());
    let part = point.limit.zip(first).map(|(limit, series)| match series.metric.is_time() {
        true => significant(series.median() / limit),
        false => format!("{:.1}", series.median() / limit * 100.0),
    });
    let limit = point.limit.map_or_else(|| "-".to_owned(), significant);
    [limit, part.unwrap_or_else(|| "-".to_owned())]
}

#[cfg(test)]
mod tests {
    use super::super::figures::Series;
    use super::*;
    use crate::pair::side::WrongBytes;
    use clap::ValueEnum;

    fn series(metric: Metric, rounds: &[f64]) -> Series {
        Series { metric, rounds: rounds.to_vec() }
    }

    fn wrong<const N: usize>(bytes: [u64; N]) -> Option<Vec<WrongBytes>> {
        Some(bytes.map(|bytes| WrongBytes { bytes, first: vec!["the first".to_owned()] }).to_vec())
    }

    fn shown(scenario: Scenario, names: &[&'static str], point: &Point) -> String {
        let mut out = Vec::new();
        PointTable::start(&mut out, "title", scenario, names).unwrap().row(point).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_are_below_their_heads_and_overlapping_ranges_are_marked() {
        let bandwidth = |rounds: &[f64]| vec![series(Metric::Bandwidth, rounds)];
        let sides = vec![bandwidth(&[1.0, 2.0, 3.0]), bandwidth(&[2.0, 2.5, 5.0])];
        let point = Point { place: Place::SizeBytes(65536), limit: Some(2.5), sides, wrong: wrong([0, 3]) };
        let text = shown(Scenario::Bandwidth, &["ours", "theirs"], &point);
        let expected = [
            "#",
            "# title",
            "#                                         payload   % of",
            "#    size plugin    GB/s         min..max   limit  limit",
            "      64K   ours    2.00       1.00..3.00    2.50   80.0",
            "          theirs    2.50       2.00..5.00",
            "           ratio  ~0.800    no difference",
            "# 3 WRONG bytes from theirs: its figures above do not count",
            "# the first",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected, "{text}");
        let sides = vec![bandwidth(&[1.0, 1.1, 1.2, 1.0, 1.2]), bandwidth(&[2.0, 2.2, 5.0, 2.2, 3.0])];
        let text = shown(Scenario::Bandwidth, &["ours", "theirs"], &Point { sides, ..point.clone() });
        assert!(text.contains("\n           ratio   0.500\n"), "{text}");
        let sides = vec![bandwidth(&[1.0]), bandwidth(&[2.0])];
        let text = shown(Scenario::Bandwidth, &["ours", "theirs"], &Point { sides, ..point.clone() });
        assert!(text.contains("0.500   too few rounds\n"), "{text}");
        let sides = vec![bandwidth(&[1.0])];
        let point = Point { sides, wrong: wrong([0]), ..point };
        let text = shown(Scenario::Bandwidth, &["ours"], &point);
        assert!(text.ends_with("\n      64K    1.00       1.00..1.00    2.50   40.0\n"), "{text}");
    }

    #[test]
    fn every_table_fits_80_columns() {
        for scenario in Scenario::value_variants() {
            let place = match scenario {
                Scenario::Connections => Place::Connections(256),
                Scenario::Slowdown => Place::Phase("first second back".into()),
                _ => Place::SizeBytes(1_048_577),
            };
            let side = |factor: f64| {
                let rounds = [0.001_23, 0.001_24, 0.001_25].map(|value| value * factor);
                scenario.metrics().iter().map(|metric| series(*metric, &rounds)).collect::<Vec<_>>()
            };
            for factor in [1.0, 1e9] {
                let point = Point {
                    place: place.clone(),
                    limit: Some(0.001_26 * factor),
                    sides: vec![side(factor), side(factor)],
                    wrong: None,
                };
                let text = shown(*scenario, &["ours", "theirs"], &point);
                let longest = text.lines().map(str::len).max().unwrap();
                assert!(longest <= 80, "{longest}:\n{text}");
                let ends = text.lines().skip(3).take(2).map(str::len).collect::<Vec<_>>();
                assert_eq!(ends[0], ends[1], "columns end below their heads:\n{text}");
            }
        }
    }
}
