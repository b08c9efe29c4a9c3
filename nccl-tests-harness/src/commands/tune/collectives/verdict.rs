//! Finds the best choice (algorithm, protocol and number of channels) for each size, and compares
//! this choice with NCCL's. Pure arithmetic on times.

use super::measure::Times;
use crate::output::numbers::median;
use proto::tuner::table::Choice;
use serde::{Serialize, Serializer};
use serde_json::json;
use std::cmp::Ordering;
use std::fmt::Display;

/// A candidate that takes more than this many times the best time at every size is not measured
/// again.
const HOPELESS: f64 = 1.3;
/// Groups of collectives count as slower only below this fraction of their speed with NCCL's
/// choice. Smaller differences may be noise.
const LEAST_IN_GROUPS: f64 = 0.98;
/// One round in this many counts as an outlier.
const OUTLIERS: usize = 5;
/// Candidates whose times are within this factor of the best time count as equally good. Among such
/// candidates, the choices for neighbouring sizes decide.
const AS_GOOD: f64 = 1.03;

/// The measurements of one candidate, of NCCL's choice, or of the learned table with all its rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Record {
    /// The candidate's choice. `None` for NCCL's choice and for the whole table.
    #[serde(serialize_with = "text_or_null")]
    pub choice: Option<Choice>,
    #[serde(rename = "rounds_time_us_by_bytes")]
    pub rounds: Vec<Times>,
    /// The reason why the candidate is no longer measured.
    pub dropped: Option<Dropped>,
}

/// Measurements of NCCL's choice and of the candidates, for single collectives or for groups. Sizes
/// and times are those of one collective in the group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// Number of collectives in a group; 1 for single collectives.
    pub members: u32,
    pub nccl: Record,
    pub candidates: Vec<Record>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dropped {
    Failed(String),
    /// The candidate was slow at every size in the first round.
    Slow,
}

impl Serialize for Dropped {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            Self::Failed(reason) => reason,
            Self::Slow => "slow at every size",
        })
    }
}

pub fn text<S: Serializer>(value: &impl Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn text_or_null<S: Serializer>(
    value: &Option<impl Display>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value
        .as_ref()
        .map(ToString::to_string)
        .serialize(serializer)
}

#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    pub bytes: u64,
    pub nccl_us: f64,
    /// The winning candidate with its median time in microseconds. If no candidate wins, the
    /// fastest one with its median time.
    pub best: Option<(Choice, f64)>,
    pub finding: Finding,
}

impl Serialize for Judged {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        json!({
            "bytes": self.bytes,
            "nccl_us": self.nccl_us,
            "choice": self.best.map(|(choice, _)| choice.to_string()),
            "choice_us": self.best.map(|(_, us)| us),
            "finding": self.finding.words(),
        })
        .serialize(serializer)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// The choice is clearly better than NCCL's, and wins.
    Better,
    /// The choice's gain in the median time is too small.
    SmallGain,
    /// Apart from outliers, the choice's slowest round is not faster than the fastest round of
    /// NCCL's choice.
    RoundsOverlap,
    /// The choice is clearly better than NCCL's, but makes a group of collectives slower.
    SlowInGroups,
    /// There are no times to compare.
    NoCandidate,
}

impl Finding {
    pub fn words(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::SmallGain => "gain too small",
            Self::RoundsOverlap => "rounds overlap",
            Self::SlowInGroups => "slower in groups",
            Self::NoCandidate => "no candidate",
        }
    }
}

impl Record {
    pub fn new(choice: Option<Choice>) -> Self {
        Self {
            choice,
            rounds: Vec::new(),
            dropped: None,
        }
    }

    pub fn times(&self, bytes: u64) -> Vec<f64> {
        self.rounds
            .iter()
            .filter_map(|round| round.get(&bytes).copied())
            .collect()
    }

    /// Returns the median time for one size, or NaN if the size was not measured.
    pub fn median(&self, bytes: u64) -> f64 {
        median(&self.times(bytes))
    }
}

impl Measured {
    /// Makes empty records for NCCL's choice and for each of `choices`, for single collectives.
    pub fn new(choices: impl IntoIterator<Item = Option<Choice>>) -> Self {
        Self {
            members: 1,
            nccl: Record::new(None),
            candidates: choices.into_iter().map(Record::new).collect(),
        }
    }

    pub fn winners(&self, gain: f64) -> Vec<Choice> {
        let is_better = |record: &&Record| {
            let better = |&bytes: &u64| {
                compare(&self.nccl.times(bytes), &record.times(bytes), gain) == Finding::Better
            };
            record.dropped.is_none() && sizes(&self.nccl).iter().any(better)
        };
        self.candidates
            .iter()
            .filter(is_better)
            .filter_map(|record| record.choice)
            .collect()
    }

    /// Returns true if `choice` may stand in the tuner's row for `bytes`. The condition: each
    /// measured group to which the row applies ([`is_of_size`]) is at least about as fast with
    /// `choice` as with NCCL's choice ([`is_slower`]). Returns true if the row applies to no
    /// measured group. Otherwise returns false for a candidate that was not measured in these
    /// groups, or was dropped.
    fn allows(&self, choice: Choice, bytes: u64) -> bool {
        let record = self
            .candidates
            .iter()
            .find(|record| record.choice == Some(choice) && record.dropped.is_none());
        let is_fast = |each: u64| {
            let with = record.map(|record| record.times(each)).unwrap_or_default();
            !with.is_empty() && !is_slower(&self.nccl.times(each), &with)
        };
        sizes(&self.nccl)
            .into_iter()
            .filter(|&each| is_of_size(bytes, each, self.members))
            .all(is_fast)
    }
}

/// Returns true if the row for `bytes` applies to a group of `members` collectives of `each` bytes.
/// NCCL asks the tuner with the sum of the bytes. Each measured size is twice the size before, so a
/// row applies from `bytes` / sqrt(2) to `bytes` * sqrt(2).
pub fn is_of_size(bytes: u64, each: u64, members: u32) -> bool {
    let ratio = each as f64 * f64::from(members) / bytes as f64;
    ratio * ratio > 0.5 && ratio * ratio <= 2.0
}

pub fn sizes(nccl: &Record) -> Vec<u64> {
    nccl.rounds
        .first()
        .into_iter()
        .flat_map(|round| round.keys().copied())
        .collect()
}

pub fn prune(nccl: &Record, candidates: &mut [Record]) {
    let sizes = sizes(nccl);
    let of_all = |bytes: u64, candidates: &[Record]| {
        let running = candidates.iter().filter(|record| record.dropped.is_none());
        running
            .chain([nccl])
            .map(|record| record.median(bytes))
            .fold(f64::INFINITY, f64::min)
    };
    let best: Vec<(u64, f64)> = sizes
        .iter()
        .map(|&bytes| (bytes, of_all(bytes, candidates)))
        .collect();
    for record in candidates
        .iter_mut()
        .filter(|record| record.dropped.is_none())
    {
        if best
            .iter()
            .all(|&(bytes, best_us)| record.median(bytes) > best_us * HOPELESS)
        {
            record.dropped = Some(Dropped::Slow);
        }
    }
}

/// Judges whether the times `with` are clearly better than the times `without`: the median is
/// better by the factor `gain`, and the slowest of `with` is faster than the fastest of `without`.
/// One round in five on each side is left out of the second comparison as an outlier: the slowest
/// rounds of `with`, and the fastest rounds of `without`. With fewer than five rounds, all count.
pub fn compare(without: &[f64], with: &[f64], gain: f64) -> Finding {
    if with.is_empty() || without.is_empty() {
        return Finding::NoCandidate;
    }
    if median(without) < median(with) * gain {
        return Finding::SmallGain;
    }
    let sorted = |times: &[f64]| {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        times
    };
    let slowest = sorted(with)[with.len() - 1 - with.len() / OUTLIERS];
    let fastest = sorted(without)[without.len() / OUTLIERS];
    if slowest < fastest {
        Finding::Better
    } else {
        Finding::RoundsOverlap
    }
}

/// Compares the times of groups, measured `with` a choice (or the learned table) and `without` it.
/// Returns true if the median time `with` is longer than the median time `without`, by more than
/// noise explains (`LEAST_IN_GROUPS`).
pub fn is_slower(without: &[f64], with: &[f64]) -> bool {
    median(without) < median(with) * LEAST_IN_GROUPS
}

/// Returns true if groups are slower in the median and in every round, except for the outliers of
/// [`compare`].
pub fn is_clearly_slower(without: &[f64], with: &[f64]) -> bool {
    is_slower(without, with) && compare(with, without, 1.0) == Finding::Better
}

pub fn differ(some: &[f64], others: &[f64], gain: f64) -> bool {
    [compare(some, others, gain), compare(others, some, gain)].contains(&Finding::Better)
}

/// Judges every size. A candidate is good at a size if it makes none of the `groups` slower, is
/// clearly better than NCCL's choice, and is about as fast as the fastest candidate that makes no
/// group slower. Chooses one good candidate for each size that has any, so that the choice changes
/// as rarely as possible between sizes. Of several such series of choices, takes the one with the
/// fewest channels in sum, and then the fastest one.
pub fn judge(alone: &Measured, groups: &[Measured], gain: f64) -> Vec<Judged> {
    let Measured {
        nccl, candidates, ..
    } = alone;
    let running: Vec<(Choice, &Record)> =
        (candidates.iter().filter(|record| record.dropped.is_none()))
            .filter_map(|record| Some((record.choice?, record)))
            .collect();
    let fastest = |bytes: u64, among: &dyn Fn(Choice) -> bool| {
        let medians = running
            .iter()
            .map(|(choice, record)| (*choice, record.median(bytes)));
        medians
            .filter(|(choice, us)| us.is_finite() && among(*choice))
            .min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let finding =
        |bytes: u64, record: &Record| compare(&nccl.times(bytes), &record.times(bytes), gain);
    let good = |bytes: u64| -> Vec<(Choice, f64)> {
        let allowed = |choice| groups.iter().all(|group| group.allows(choice, bytes));
        let Some((_, best_us)) = fastest(bytes, &allowed) else {
            return Vec::new();
        };
        let clear = running.iter().filter(|(choice, record)| {
            allowed(*choice) && finding(bytes, record) == Finding::Better
        });
        let ratios = clear.map(|(choice, record)| (*choice, record.median(bytes) / best_us));
        ratios.filter(|(_, ratio)| *ratio <= AS_GOOD).collect()
    };
    let sizes = sizes(nccl);
    let settled = choose_path(&sizes.iter().map(|&bytes| good(bytes)).collect::<Vec<_>>());
    let judged = sizes.iter().zip(settled).map(|(&bytes, winner)| {
        let record_of = |wanted: Choice| {
            running
                .iter()
                .find(|(choice, _)| *choice == wanted)
                .map(|(_, record)| record)
        };
        let won = winner.and_then(|choice| Some((choice, record_of(choice)?.median(bytes))));
        let best = won.or_else(|| fastest(bytes, &|_| true));
        let found = best
            .and_then(|(choice, _)| record_of(choice))
            .map(|record| finding(bytes, record));
        let finding = match (won, found) {
            // A clearly better choice fails to win only if a group excludes it.
            (None, Some(Finding::Better)) => Finding::SlowInGroups,
            (_, found) => found.unwrap_or(Finding::NoCandidate),
        };
        Judged {
            bytes,
            nccl_us: nccl.median(bytes),
            best,
            finding,
        }
    });
    judged.collect()
}

/// A series of choices, one for each size from the smallest on, and the figures by which series are
/// compared.
#[derive(Debug, Clone, Default)]
struct ChoicePath {
    choices: Vec<Option<Choice>>,
    /// Number of neighbouring sizes with different choices.
    changes: usize,
    /// Sum of the choices' channels.
    channels: u32,
    /// Sum of the choices' times, each divided by the best time at its size.
    slowness: f64,
}

impl ChoicePath {
    fn with(&self, next: Option<(Choice, f64)>) -> Self {
        let mut path = self.clone();
        let before = self.choices.last().copied().flatten();
        path.changes += usize::from(matches!((before, next), (Some(a), Some((b, _))) if a != b));
        path.channels += next.map_or(0, |(choice, _)| choice.channels);
        path.slowness += next.map_or(0.0, |(_, ratio)| ratio);
        path.choices.push(next.map(|(choice, _)| choice));
        path
    }

    fn compare(&self, other: &Self) -> Ordering {
        let key = |path: &Self| (path.changes, path.channels);
        key(self)
            .cmp(&key(other))
            .then(self.slowness.total_cmp(&other.slowness))
    }
}

/// Takes one of the good choices for each size, or `None` for a size without one. `good` has the
/// good choices of each size. Each choice comes with its time divided by the best time at this
/// size.
fn choose_path(good: &[Vec<(Choice, f64)>]) -> Vec<Option<Choice>> {
    let mut paths = vec![ChoicePath::default()];
    for choices in good {
        let next: Vec<Option<(Choice, f64)>> = if choices.is_empty() {
            vec![None]
        } else {
            choices.iter().copied().map(Some).collect()
        };
        let best_to = |end| {
            paths
                .iter()
                .map(|path| path.with(end))
                .min_by(ChoicePath::compare)
        };
        paths = next.into_iter().filter_map(best_to).collect();
    }
    paths
        .into_iter()
        .min_by(ChoicePath::compare)
        .map(|path| path.choices)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(choice: &str, rounds: &[&[f64]]) -> Record {
        let times = |round: &&[f64]| {
            round
                .iter()
                .enumerate()
                .map(|(at, us)| (8192 << at, *us))
                .collect()
        };
        Record {
            choice: choice.parse().ok(),
            rounds: rounds.iter().map(times).collect(),
            dropped: None,
        }
    }

    fn alone(nccl: Record, candidates: Vec<Record>) -> Measured {
        Measured {
            members: 1,
            nccl,
            candidates,
        }
    }

    fn chosen(judged: &[Judged]) -> Vec<String> {
        let text = |one: &Judged| match (one.finding, one.best) {
            (Finding::Better, Some((choice, _))) => choice.to_string(),
            (finding, _) => format!("{finding:?}"),
        };
        judged.iter().map(text).collect()
    }

    #[test]
    fn a_row_needs_a_gain_and_rounds_that_do_not_overlap() {
        assert_eq!(
            compare(&[10.0, 11.0, 10.5], &[9.0, 9.9, 9.5], 1.05),
            Finding::Better
        );
        assert_eq!(
            compare(&[10.0, 11.0, 10.5], &[9.0, 10.0, 9.5], 1.05),
            Finding::RoundsOverlap
        );
        assert_eq!(
            compare(&[10.0, 10.0], &[9.6, 9.6], 1.05),
            Finding::SmallGain
        );
        assert_eq!(compare(&[10.5], &[10.0], 1.05), Finding::Better);
        let nccl = [10.0, 10.1, 10.2, 8.0, 10.3];
        let four = [9.0, 9.1, 9.2, 9.3, 12.0];
        assert_eq!(
            compare(&nccl, &four, 1.05),
            Finding::Better,
            "one outlier each"
        );
        assert_eq!(
            compare(&nccl, &[9.0, 9.1, 9.2, 11.0, 12.0], 1.05),
            Finding::RoundsOverlap,
            "two"
        );
        assert_eq!(compare(&[10.0], &[], 1.05), Finding::NoCandidate);
        assert_eq!(compare(&[], &[10.0], 1.05), Finding::NoCandidate);
        assert!(
            is_slower(&[9.7, 9.0, 9.9], &[10.0])
                && !is_slower(&[9.9], &[10.0])
                && !is_slower(&[9.9], &[])
        );
        assert!(
            differ(&[10.0], &[9.0], 1.05)
                && differ(&[9.0], &[10.0], 1.05)
                && !differ(&[10.0], &[9.6], 1.05)
        );
    }

    #[test]
    fn the_fastest_wins_unless_a_neighbours_choice_is_as_good() {
        let nccl = record("nccl", &[&[30.0, 40.0, 50.0, 60.0]]);
        let ll = record("ring/ll/4", &[&[20.0, 30.0, 31.0, 59.0]]);
        let simple = record("ring/simple/2", &[&[29.9, 29.5, 30.0, 30.0]]);
        let judged = judge(
            &alone(nccl.clone(), vec![ll.clone(), simple.clone()]),
            &[],
            1.05,
        );
        // For the second size, both choices give the same number of changes. The one with fewer
        // channels wins.
        assert_eq!(
            chosen(&judged),
            [
                "ring/ll/4",
                "ring/simple/2",
                "ring/simple/2",
                "ring/simple/2"
            ]
        );
        assert_eq!((judged[0].nccl_us, judged[0].best.unwrap().1), (30.0, 20.0));
        let other = record("ring/ll/1", &[&[99.0, 29.6, 99.0, 99.0]]);
        let judged = judge(&alone(nccl, vec![ll, simple, other]), &[], 1.05);
        assert_eq!(chosen(&judged)[1], "ring/simple/2", "one change less");
    }

    #[test]
    fn failed_and_slow_choices_get_no_row() {
        let nccl = record("nccl", &[&[30.0, 30.0]]);
        let mut failed = record("ring/ll/1", &[&[1.0, 1.0]]);
        failed.dropped = Some(Dropped::Failed("3 WRONG elements".into()));
        let judged = judge(&alone(nccl, vec![failed]), &[], 1.05);
        assert_eq!(chosen(&judged), ["NoCandidate", "NoCandidate"]);
        assert_eq!(judged[0].best, None);
    }

    #[test]
    fn a_choice_that_slows_groups_is_replaced_by_the_next_best() {
        // With members of 2, 4, 8 and 16 KiB, groups of four have sums of 8 to 64 KiB.
        let group = |choice: &str, rounds: &[&[f64]]| {
            let quarter = |times: Times| {
                times
                    .into_iter()
                    .map(|(bytes, us)| (bytes / 4, us))
                    .collect()
            };
            let record = record(choice, rounds);
            Record {
                rounds: record.rounds.into_iter().map(quarter).collect(),
                ..record
            }
        };
        let nccl = record("nccl", &[&[30.0, 30.0, 30.0, 30.0]]);
        let single = alone(
            nccl,
            vec![
                record("ring/simple/2", &[&[10.0, 10.0, 10.0, 10.0]]),
                record("ring/ll/4", &[&[29.0, 20.0, 20.0, 20.0]]),
                record("ring/ll/8", &[&[40.0, 40.0, 40.0, 40.0]]),
            ],
        );
        assert_eq!(single.winners(1.05).len(), 2);
        let fours = |simple: [f64; 4], ll: [f64; 4]| Measured {
            members: 4,
            nccl: group("nccl", &[&[5.0, 5.0, 5.0, 5.0]]),
            candidates: vec![
                group("ring/simple/2", &[&simple]),
                group("ring/ll/4", &[&ll]),
            ],
        };
        let judged = judge(
            &single,
            &[fours([9.0, 9.0, 4.0, 9.0], [5.0, 5.0, 5.0, 9.0])],
            1.05,
        );
        assert_eq!(
            chosen(&judged),
            ["SlowInGroups", "ring/ll/4", "ring/simple/2", "SlowInGroups"]
        );
        // A choice that was not measured in the group, or failed there, gets no row.
        let mut failed = fours([4.0; 4], [4.0; 4]);
        failed.candidates[0].dropped = Some(Dropped::Failed("3 WRONG elements".into()));
        failed.candidates.pop();
        assert_eq!(
            chosen(&judge(&single, &[failed], 1.05)),
            ["SlowInGroups"; 4]
        );
        // The sums of groups of three are not powers of two.
        assert!(
            is_of_size(8192, 2730, 3) && is_of_size(16384, 4096, 3) && !is_of_size(8192, 4096, 3)
        );
    }

    #[test]
    fn groups_are_clearly_slower_only_if_their_rounds_do_not_overlap() {
        assert!(is_clearly_slower(&[9.0, 9.1, 9.2], &[10.0, 10.1, 9.3]));
        assert!(
            !is_clearly_slower(&[9.0, 9.1, 9.5], &[10.0, 10.1, 9.3])
                && !is_clearly_slower(&[9.9], &[10.0])
        );
    }

    #[test]
    fn a_candidate_is_pruned_only_if_it_is_slow_at_every_size() {
        let nccl = record("nccl", &[&[30.0, 10.0]]);
        let mut candidates = [
            record("ring/ll/1", &[&[20.0, 14.0]]),
            record("ring/ll/2", &[&[26.1, 13.1]]),
            record("ring/ll/4", &[&[26.0, 99.0]]),
            record("ring/ll/8", &[&[99.0, 12.9]]),
        ];
        prune(&nccl, &mut candidates);
        assert_eq!(
            candidates.each_ref().map(|one| one.dropped.is_some()),
            [false, true, false, false]
        );
    }

    proptest! {
        /// For any times, a winner is clearly better than NCCL's choice at that size.
        #[test]
        fn nothing_wins_without_a_clear_gain(
            all in prop::collection::vec(prop::collection::vec(prop::collection::vec(1.0..2.0_f64, 5), 3), 2..7),
        ) {
            let names = ["nccl", "ring/ll/1", "ring/ll/2", "ring/ll128/4", "ring/simple/2", "ring/simple/8"];
            let records: Vec<Record> = all.iter().zip(names).map(|(rounds, name)| {
                record(name, &rounds.iter().map(Vec::as_slice).collect::<Vec<_>>())
            }).collect();
            let mut candidates = records[1..].to_vec();
            prune(&records[0], &mut candidates);
            let judged = judge(&alone(records[0].clone(), candidates.clone()), &[], 1.05);
            prop_assert_eq!(judged.len(), 5);
            for one in judged.iter().filter(|one| one.finding == Finding::Better) {
                let (choice, us) = one.best.unwrap();
                let winner = candidates.iter().find(|record| record.choice == Some(choice)).unwrap();
                prop_assert!(winner.dropped.is_none() && one.nccl_us >= us * 1.05);
                for with in winner.times(one.bytes) {
                    prop_assert!(records[0].times(one.bytes).iter().all(|without| with < *without));
                }
                for other in candidates.iter().filter(|record| record.dropped.is_none()) {
                    prop_assert!(us <= other.median(one.bytes) * 1.03 + 1e-9);
                }
            }
        }
    }
}
