//! Results over one or more networks: a table, JSON, a chart.

use super::options::Plan;
use super::printed_table::Row;
use crate::output::numbers::{median, number, range, significant, size, spread};
use crate::output::plot::{self, Chart, Dot, Line};
use crate::output::table::{Table, left, right};
use crate::scene::network::Network;
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

pub struct Outcome {
    pub network: Network,
    /// True if these runs repeat another outcome's runs over the same network, to show the noise.
    pub is_control: bool,
    pub rounds: Vec<Vec<Row>>,
    /// Network that NCCL used, according to NCCL's log.
    pub used: Option<String>,
    pub channels: Option<BTreeMap<String, u32>>,
    pub version: Option<String>,
    /// Error that ended this network's rounds.
    pub failure: Option<String>,
}

/// Minimum number of rounds of each network for comparing the ranges of two networks.
const COMPARABLE_ROUNDS: usize = 3;

impl Outcome {
    pub fn new(network: Network) -> Self {
        let rounds = Vec::new();
        let used = None;
        let channels = None;
        let version = None;
        let failure = None;
        Self {
            network,
            is_control: false,
            rounds,
            used,
            channels,
            version,
            failure,
        }
    }

    /// Makes the control: the outcome of the plugin without its tuner, measured a second time.
    pub fn control() -> Self {
        Self {
            is_control: true,
            ..Self::new(Network::SparkUntuned)
        }
    }

    pub fn name(&self) -> &'static str {
        if self.is_control {
            "control"
        } else {
            self.network.name()
        }
    }

    /// Returns the number of wrong elements in all rounds; `None` if nothing was checked.
    pub fn wrong(&self) -> Option<f64> {
        let halves = self
            .rounds
            .iter()
            .flatten()
            .flat_map(|row| [row.out_of_place.wrong, row.in_place.wrong]);
        halves.flatten().reduce(|sum, wrong| sum + wrong)
    }

    fn values(&self, bytes: u64, of: impl Fn(&Row) -> f64) -> Vec<f64> {
        let rows = self
            .rounds
            .iter()
            .flat_map(|rows| rows.iter().find(|row| row.bytes == bytes));
        rows.map(of).collect()
    }

    fn busbw(&self, bytes: u64) -> Vec<f64> {
        self.values(bytes, |row| row.out_of_place.busbw_gb_s)
    }

    fn time(&self, bytes: u64) -> Vec<f64> {
        self.values(bytes, |row| row.out_of_place.time_us)
    }
}

fn sizes(outcomes: &[Outcome]) -> Vec<u64> {
    let mut sizes: Vec<u64> = outcomes
        .iter()
        .flat_map(|o| o.rounds.iter().flatten().map(|row| row.bytes))
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

struct Ratio<'a> {
    first: &'a Outcome,
    second: &'a Outcome,
}

impl Ratio<'_> {
    fn name(&self) -> String {
        format!("{}/{}", self.first.name(), self.second.name())
    }

    /// Formats the ratio. A `~` before it means no difference: the ranges of the two networks'
    /// times overlap.
    fn words(&self, bytes: u64) -> String {
        let ratio = self.at(bytes);
        let first = self.first.time(bytes);
        let second = self.second.time(bytes);
        let is_comparable = first.len().min(second.len()) >= COMPARABLE_ROUNDS;
        let first = spread(&first);
        let second = spread(&second);
        let is_same = is_comparable && first.0 <= second.1 && second.0 <= first.1;
        match ratio.is_finite() {
            true => format!("{}{ratio:.3}", if is_same { "~" } else { "" }),
            false => "-".to_owned(),
        }
    }

    /// Returns the second network's median time divided by the first network's. The ratio does not
    /// use busbw, because nccl-tests prints a small busbw as 0.00.
    fn at(&self, bytes: u64) -> f64 {
        median(&self.second.time(bytes)) / median(&self.first.time(bytes))
    }
}

/// Pairs the first network with each other network, and the control with the network that it
/// repeats.
fn ratios<'a>(outcomes: &'a [Outcome]) -> Vec<Ratio<'a>> {
    let [first, others @ ..] = outcomes else {
        return Vec::new();
    };
    let repeated = |control: &Outcome| {
        outcomes
            .iter()
            .find(|other| other.network == control.network && !other.is_control)
            .unwrap_or(first)
    };
    let ratio = |second: &'a Outcome| match second.is_control {
        true => Ratio {
            first: repeated(second),
            second,
        },
        false => Ratio { first, second },
    };
    others.iter().map(ratio).collect()
}

/// Prints a line for each size and network, within 80 columns: the out-of-place medians, and the
/// time as a multiple of the first network's time. The control's time is a multiple of the time of
/// the network that it repeats.
pub fn table(out: &mut impl Write, outcomes: &[Outcome]) -> Result<()> {
    let ratios = ratios(outcomes);
    let mut table = Table::new(
        out,
        "  ",
        [
            right(12),
            left(13),
            right(8),
            right(7),
            right(16),
            right(10),
        ],
    );
    let names = [
        "size (B)",
        "network",
        "time us",
        "GB/s",
        "min..max",
        "time ratio",
    ];
    table.head(if ratios.is_empty() {
        &names[..5]
    } else {
        &names
    })?;
    for bytes in sizes(outcomes) {
        for (number, outcome) in outcomes.iter().enumerate() {
            let time = outcome.time(bytes);
            let busbw = outcome.busbw(bytes);
            let size = if number == 0 {
                bytes.to_string()
            } else {
                String::new()
            };
            let range = if busbw.is_empty() {
                "-".to_owned()
            } else {
                range(&busbw)
            };
            let [time, busbw] = [time, busbw].map(|values| significant(median(&values)));
            let ratio = ratios
                .iter()
                .find(|ratio| std::ptr::eq(ratio.second, outcome));
            let mut cells = vec![size, outcome.name().to_owned(), time, busbw, range];
            cells.extend(ratio.map(|ratio| ratio.words(bytes)));
            table.row(&cells)?;
        }
    }
    Ok(())
}

/// Compares the first network with each other network. Prints the size at which the first network
/// is slowest in comparison and, if there are several programs, the program.
pub fn slowest(out: &mut impl Write, all: &[(&Path, &[Outcome])]) -> Result<()> {
    let mut worst = BTreeMap::new();
    for (program, outcomes) in all {
        for (network, least, bytes) in least_ratios(outcomes) {
            let held = worst.entry(network).or_insert((least, bytes, program));
            if least < held.0 {
                *held = (least, bytes, program);
            }
        }
    }
    for (network, (least, bytes, program)) in worst {
        let of_program = if all.len() > 1 {
            format!(" of {}", name_of(program))
        } else {
            String::new()
        };
        writeln!(
            out,
            "# slowest against {network}: {least:.2} at {}{of_program}",
            size(bytes as usize)
        )?;
    }
    Ok(())
}

/// For each network that the first network is compared with, returns its name, the least time
/// ratio, and the size in bytes that has this ratio.
fn least_ratios(outcomes: &[Outcome]) -> Vec<(&'static str, f64, u64)> {
    let sizes = sizes(outcomes);
    let least = |ratio: &Ratio<'_>| {
        let known = sizes
            .iter()
            .map(|bytes| (ratio.at(*bytes), *bytes))
            .filter(|(ratio, _)| ratio.is_finite());
        let (least, bytes) = known.min_by(|a, b| a.0.total_cmp(&b.0))?;
        Some((ratio.second.name(), least, bytes))
    };
    ratios(outcomes)
        .iter()
        .filter(|ratio| !ratio.second.is_control)
        .filter_map(least)
        .collect()
}

fn name_of(program: &Path) -> String {
    program
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Returns all results as JSON. If a number has a unit, the field's name has it too.
pub fn json(plan: &Plan, program: &Path, fabric: &str, outcomes: &[Outcome]) -> Value {
    let network = |outcome: &Outcome| {
        let points = sizes(std::slice::from_ref(outcome))
            .into_iter()
            .map(|bytes| {
                let time = median(&outcome.time(bytes));
                let busbw = median(&outcome.busbw(bytes));
                json!({ "bytes": bytes, "time_us": number(time), "busbw_gb_s": number(busbw) })
            });
        json!({
            "name": outcome.name(),
            "network": outcome.network.name(),
            "nccl_version": outcome.version,
            "used": outcome.used,
            "channels": outcome.channels,
            "failure": outcome.failure,
            "wrong": outcome.wrong(),
            "medians": points.collect::<Vec<_>>(),
            "rounds": outcome.rounds,
        })
    };
    let ratio_json = |ratio: &Ratio| {
        let points = sizes(outcomes).into_iter();
        let points =
            points.map(|bytes| json!({ "bytes": bytes, "time_ratio": number(ratio.at(bytes)) }));
        json!({ "name": ratio.name(), "points": points.collect::<Vec<_>>() })
    };
    json!({
        "command": "nccl-tests",
        "version": env!("CARGO_PKG_VERSION"),
        "program": program,
        "arguments": plan.arguments.concat(),
        "fabric_text": fabric,
        "networks": outcomes.iter().map(network).collect::<Vec<_>>(),
        "ratios": ratios(outcomes).iter().map(ratio_json).collect::<Vec<_>>(),
    })
}

pub fn picture(plan: &Plan, program: &Path, fabric: &str, outcomes: &[Outcome]) -> Result<()> {
    let Some(folder) = &plan.plot else {
        return Ok(());
    };
    let name = name_of(program);
    let line = |outcome: &Outcome| {
        let dots = sizes(std::slice::from_ref(outcome))
            .into_iter()
            .filter(|bytes| *bytes > 0)
            .map(|bytes| {
                let busbw = outcome.busbw(bytes);
                Dot {
                    bytes,
                    y: median(&busbw),
                    spread: spread(&busbw),
                }
            });
        Line {
            name: outcome.name(),
            points: dots.filter(|dot| dot.y.is_finite()).collect(),
        }
    };
    let largest = sizes(outcomes)
        .last()
        .map(|bytes| format!(" up to {}", size(*bytes as usize)))
        .unwrap_or_default();
    let chart = Chart {
        title: format!("{name}{largest}"),
        fabric: fabric.to_owned(),
        points: "points: median of the rounds; bars: slowest to fastest round",
        quantity: "busbw, GB/s",
        lines: outcomes.iter().map(line).collect(),
    };
    plot::save(folder, &name, &chart)
}

#[cfg(test)]
mod tests {
    use super::super::printed_table::Half;
    use super::*;

    fn outcome(network: Network, rounds: &[f64]) -> Outcome {
        let half = |gb_s: f64| Half {
            time_us: 100.0 / gb_s,
            algbw_gb_s: gb_s,
            busbw_gb_s: gb_s,
            wrong: Some(0.0),
        };
        let row = |gb_s: f64| {
            vec![Row {
                bytes: 4096,
                out_of_place: half(gb_s),
                in_place: half(gb_s),
            }]
        };
        Outcome {
            rounds: rounds.iter().map(|gb_s| row(*gb_s)).collect(),
            ..Outcome::new(network)
        }
    }

    fn shown(outcomes: &[Outcome]) -> String {
        let mut out = Vec::new();
        table(&mut out, outcomes).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn each_network_has_a_line_with_medians_and_its_ratio_to_the_first() {
        let text = shown(&[
            outcome(Network::Spark, &[4.0, 2.0, 3.0]),
            outcome(Network::Socket, &[1.5, 1.5, 9.0]),
        ]);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows[1],
            ["4096", "spark", "33.3", "3.00", "2.00..4.00"],
            "{text}"
        );
        assert_eq!(
            rows[2],
            ["socket", "66.7", "1.50", "1.50..9.00", "~2.000"],
            "{text}"
        );
        let apart = shown(&[
            outcome(Network::Spark, &[4.0, 2.0, 3.0]),
            outcome(Network::Socket, &[1.5, 1.5, 1.9]),
        ]);
        assert!(apart.ends_with("  2.000\n"), "{apart}");
    }

    #[test]
    fn the_control_is_compared_with_what_it_repeats() {
        let control = Outcome {
            is_control: true,
            ..outcome(Network::SparkUntuned, &[2.5])
        };
        let outcomes = [
            outcome(Network::Spark, &[4.0]),
            outcome(Network::SparkUntuned, &[2.0]),
            outcome(Network::Ib, &[1.0]),
            control,
        ];
        let names: Vec<String> = ratios(&outcomes).iter().map(Ratio::name).collect();
        assert_eq!(
            names,
            ["spark/spark-untuned", "spark/ib", "spark-untuned/control"]
        );
        let text = shown(&outcomes);
        let ratios: Vec<&str> = text
            .lines()
            .skip(2)
            .filter_map(|line| line.split_whitespace().last())
            .collect();
        assert_eq!(ratios, ["2.000", "4.000", "0.800"], "{text}");
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
        let ends: Vec<usize> = text.lines().map(str::len).collect();
        assert_eq!(
            (ends[0], ends[1]),
            (ends[2], ends[2] - 12),
            "columns end below their names:\n{text}"
        );
    }

    #[test]
    fn the_slowest_size_is_reported_for_each_other_network_with_results() {
        let mut spark = outcome(Network::Spark, &[4.0]);
        let mut ib = outcome(Network::Ib, &[2.0]);
        for (outcome, time_us) in [(&mut spark, 10.0), (&mut ib, 9.7)] {
            let half = Half {
                time_us,
                algbw_gb_s: 1.0,
                busbw_gb_s: 1.0,
                wrong: None,
            };
            outcome.rounds[0].push(Row {
                bytes: 3 << 20,
                out_of_place: half,
                in_place: half,
            });
        }
        let mut out = Vec::new();
        slowest(
            &mut out,
            &[(Path::new("p"), &[spark, ib, outcome(Network::Socket, &[])])],
        )
        .unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "# slowest against ib: 0.97 at 3M\n"
        );
    }

    #[test]
    fn a_network_without_rounds_leaves_a_gap() {
        let text = shown(&[outcome(Network::Spark, &[4.0]), outcome(Network::Ib, &[])]);
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(row, ["ib", "-", "-", "-", "-"], "{text}");
    }

    #[test]
    fn wrong_elements_of_all_rounds_count() {
        let mut outcome = outcome(Network::Spark, &[1.0, 2.0]);
        assert_eq!(outcome.wrong(), Some(0.0));
        outcome.rounds[1][0].in_place.wrong = Some(3.0);
        outcome.rounds[0][0].out_of_place.wrong = None;
        assert_eq!(outcome.wrong(), Some(3.0));
        assert_eq!(Outcome::new(Network::Ib).wrong(), None);
    }
}
