//! Which choice is best at which size, and whether it is clearly better than NCCL's. Pure arithmetic on times.

use super::measure::Times;
use crate::tune::judge::median;
use nccl_net_spark::tuner::table::Choice;
use std::cmp::Ordering;

/// A candidate that takes this many times the best time at every size is not measured again.
const HOPELESS: f64 = 1.3;
/// A group may run at this fraction of NCCL's speed, for noise.
const LEAST_IN_GROUPS: f64 = 0.98;
/// One round in so many may be an outlier.
const OUTLIERS: usize = 5;
/// Candidates within this factor of the best are equally good; which one gets the row depends on the neighbouring sizes.
const AS_GOOD: f64 = 1.03;

/// The measurements of one candidate, or of NCCL's choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// None: NCCL's choice.
    pub choice: Option<Choice>,
    /// Times by round.
    pub rounds: Vec<Times>,
    /// Why it is no longer measured.
    pub dropped: Option<Dropped>,
}

/// Why a candidate is dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dropped {
    /// A run failed; the reason.
    Failed(String),
    /// It was slow at every size in the first round.
    Slow,
}

/// The result for one size.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    /// The size.
    pub bytes: u64,
    /// The median of NCCL's choice.
    pub nccl_us: f64,
    /// The candidate that wins, or else the fastest, with its median.
    pub best: Option<(Choice, f64)>,
    /// Whether it wins.
    pub finding: Finding,
}

/// Whether a choice is clearly better than NCCL's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// It is clearly better.
    Better,
    /// Its median is not enough times as fast.
    SmallGain,
    /// Its slowest round is not faster than the fastest of NCCL's choice.
    RoundsOverlap,
    /// It is clearly better, but it makes a group slower.
    SlowInGroups,
    /// No candidate was measured.
    NoCandidate,
}

impl Record {
    /// Nothing yet.
    pub fn new(choice: Option<Choice>) -> Self {
        Self { choice, rounds: Vec::new(), dropped: None }
    }

    /// The times of one size, by round.
    pub fn times(&self, bytes: u64) -> Vec<f64> {
        self.rounds.iter().filter_map(|round| round.get(&bytes).copied()).collect()
    }

    /// Not a number where nothing was measured.
    pub fn median(&self, bytes: u64) -> f64 {
        median(self.times(bytes))
    }
}

/// The sizes of NCCL's choice, in order.
pub fn sizes(nccl: &Record) -> Vec<u64> {
    nccl.rounds.first().into_iter().flat_map(|round| round.keys().copied()).collect()
}

/// Drops the candidates that are hopeless after the first round.
pub fn prune(nccl: &Record, candidates: &mut [Record]) {
    let sizes = sizes(nccl);
    let of_all = |bytes: u64, candidates: &[Record]| {
        let running = candidates.iter().filter(|record| record.dropped.is_none());
        running.chain([nccl]).map(|record| record.median(bytes)).fold(f64::INFINITY, f64::min)
    };
    let best: Vec<(u64, f64)> = sizes.iter().map(|&bytes| (bytes, of_all(bytes, candidates))).collect();
    for record in candidates.iter_mut().filter(|record| record.dropped.is_none()) {
        if best.iter().all(|&(bytes, best_us)| record.median(bytes) > best_us * HOPELESS) {
            record.dropped = Some(Dropped::Slow);
        }
    }
}

/// Whether times `with` are clearly better than times `without`: by the factor `gain` in the median, and without overlap. Of five rounds
/// or more, one in five of each side, the slowest `with` and the fastest `without`, may be an outlier.
pub fn compare(without: &[f64], with: &[f64], gain: f64) -> Finding {
    if with.is_empty() || without.is_empty() {
        return Finding::NoCandidate;
    }
    if median(without.to_vec()) < median(with.to_vec()) * gain {
        return Finding::SmallGain;
    }
    let sorted = |times: &[f64]| {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        times
    };
    let slowest = sorted(with)[with.len() - 1 - with.len() / OUTLIERS];
    let fastest = sorted(without)[without.len() / OUTLIERS];
    if slowest < fastest { Finding::Better } else { Finding::RoundsOverlap }
}

/// Whether times `with` a table are below what a group may lose, by the medians.
pub fn is_slower(without: &[f64], with: &[f64]) -> bool {
    median(without.to_vec()) < median(with.to_vec()) * LEAST_IN_GROUPS
}

/// Whether one of the two is clearly better than the other.
pub fn differ(some: &[f64], others: &[f64], gain: f64) -> bool {
    [compare(some, others, gain), compare(others, some, gain)].contains(&Finding::Better)
}

/// Judges every size. Among candidates that are clearly better and as good as the best one, the table with the fewest changes from
/// one size to the next is taken, then the one with the fewest channels, then the fastest.
pub fn judge(nccl: &Record, candidates: &[Record], gain: f64) -> Vec<Judged> {
    let running: Vec<&Record> = candidates.iter().filter(|record| record.dropped.is_none()).collect();
    let fastest = |bytes: u64| {
        let medians = running.iter().filter_map(|record| Some((record.choice?, record.median(bytes))));
        medians.filter(|(_, us)| us.is_finite()).min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let good = |bytes: u64| -> Vec<(Choice, f64)> {
        let Some((_, best_us)) = fastest(bytes) else { return Vec::new() };
        let clear =
            running.iter().filter(|record| compare(&nccl.times(bytes), &record.times(bytes), gain) == Finding::Better);
        let medians = clear.filter_map(|record| Some((record.choice?, record.median(bytes) / best_us)));
        medians.filter(|(_, ratio)| *ratio <= AS_GOOD).collect()
    };
    let sizes = sizes(nccl);
    let settled = settle(&sizes.iter().map(|&bytes| good(bytes)).collect::<Vec<_>>());
    let judged = sizes.iter().zip(settled).map(|(&bytes, winner)| {
        let median_of = |choice: Choice| running.iter().find(|record| record.choice == Some(choice));
        let winner = winner.and_then(|choice| Some((choice, median_of(choice)?.median(bytes))));
        let best = winner.or_else(|| fastest(bytes));
        let times = best.and_then(|(choice, _)| Some(median_of(choice)?.times(bytes))).unwrap_or_default();
        Judged { bytes, nccl_us: nccl.median(bytes), best, finding: compare(&nccl.times(bytes), &times, gain) }
    });
    judged.collect()
}

/// Choices for the sizes up to one.
#[derive(Debug, Clone, Default)]
struct Path {
    choices: Vec<Option<Choice>>,
    changes: usize,
    channels: u32,
    slowness: f64,
}

impl Path {
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
        key(self).cmp(&key(other)).then(self.slowness.total_cmp(&other.slowness))
    }
}

/// One of the good choices for each size, given with its time against the best; none where there are none.
fn settle(good: &[Vec<(Choice, f64)>]) -> Vec<Option<Choice>> {
    let mut paths = vec![Path::default()];
    for choices in good {
        let next: Vec<Option<(Choice, f64)>> =
            if choices.is_empty() { vec![None] } else { choices.iter().copied().map(Some).collect() };
        let best_to = |end| paths.iter().map(|path| path.with(end)).min_by(Path::compare);
        paths = next.into_iter().filter_map(best_to).collect();
    }
    paths.into_iter().min_by(Path::compare).map(|path| path.choices).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(choice: &str, rounds: &[&[f64]]) -> Record {
        let times = |round: &&[f64]| round.iter().enumerate().map(|(at, us)| (8192 << at, *us)).collect();
        Record { choice: choice.parse().ok(), rounds: rounds.iter().map(times).collect(), dropped: None }
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
        assert_eq!(compare(&[10.0, 11.0, 10.5], &[9.0, 9.9, 9.5], 1.05), Finding::Better);
        assert_eq!(compare(&[10.0, 11.0, 10.5], &[9.0, 10.0, 9.5], 1.05), Finding::RoundsOverlap);
        assert_eq!(compare(&[10.0, 10.0], &[9.6, 9.6], 1.05), Finding::SmallGain);
        assert_eq!(compare(&[10.5], &[10.0], 1.05), Finding::Better);
        let (nccl, four) = ([10.0, 10.1, 10.2, 8.0, 10.3], [9.0, 9.1, 9.2, 9.3, 12.0]);
        assert_eq!(compare(&nccl, &four, 1.05), Finding::Better, "one outlier each");
        assert_eq!(compare(&nccl, &[9.0, 9.1, 9.2, 11.0, 12.0], 1.05), Finding::RoundsOverlap, "two");
        assert_eq!(compare(&[10.0], &[], 1.05), Finding::NoCandidate);
        assert_eq!(compare(&[], &[10.0], 1.05), Finding::NoCandidate);
        assert!(is_slower(&[9.7, 9.0, 9.9], &[10.0]) && !is_slower(&[9.9], &[10.0]) && !is_slower(&[9.9], &[]));
        assert!(differ(&[10.0], &[9.0], 1.05) && differ(&[9.0], &[10.0], 1.05) && !differ(&[10.0], &[9.6], 1.05));
    }

    #[test]
    fn the_fastest_wins_unless_a_neighbours_choice_is_as_good() {
        let nccl = record("nccl", &[&[30.0, 40.0, 50.0, 60.0]]);
        let ll = record("ring/ll/4", &[&[20.0, 30.0, 31.0, 59.0]]);
        let simple = record("ring/simple/2", &[&[29.9, 29.5, 30.0, 30.0]]);
        let judged = judge(&nccl, &[ll.clone(), simple.clone()], 1.05);
        // The second size could go either way: fewer changes leave both, fewer channels decide.
        assert_eq!(chosen(&judged), ["ring/ll/4", "ring/simple/2", "ring/simple/2", "ring/simple/2"]);
        assert_eq!((judged[0].nccl_us, judged[0].best.unwrap().1), (30.0, 20.0));
        let other = record("ring/ll/1", &[&[99.0, 29.6, 99.0, 99.0]]);
        assert_eq!(chosen(&super::judge(&nccl, &[ll, simple, other], 1.05))[1], "ring/simple/2", "one change less");
    }

    #[test]
    fn what_failed_or_was_slow_wins_nothing() {
        let nccl = record("nccl", &[&[30.0, 30.0]]);
        let mut failed = record("ring/ll/1", &[&[1.0, 1.0]]);
        failed.dropped = Some(Dropped::Failed("3 WRONG elements".into()));
        let judged = judge(&nccl, &[failed], 1.05);
        assert_eq!(chosen(&judged), ["NoCandidate", "NoCandidate"]);
        assert_eq!(judged[0].best, None);
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
        assert_eq!(candidates.each_ref().map(|one| one.dropped.is_some()), [false, true, false, false]);
    }

    proptest! {
        /// Whatever the times: a winner is clearly better than NCCL's choice at that size.
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
            let judged = judge(&records[0], &candidates, 1.05);
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
