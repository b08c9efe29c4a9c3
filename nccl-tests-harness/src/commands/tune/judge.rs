//! Finds the best settings, and compares them with the defaults. Pure arithmetic on bandwidths.
//!
//! A round's score is the geometric mean, over the sizes, of its bandwidth relative to the
//! defaults' median. The best settings of the first measurement are only a proposal, because the
//! best of many noisy figures looks better than it is. The proposed settings are measured again,
//! alternately with the defaults. They win ([`Verdict::holds`]) if their lowest score is above the
//! highest score of the defaults, and their gain is at least `MIN_GAIN`.

use crate::output::numbers::{median, spread};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Queue pairs of a connection on each rail (`NCCL_IB_QPS_PER_CONNECTION`).
    pub qps: u8,
    /// Smallest part of a message that gets its own rail (`NCCL_SPARK_MIN_SHARE_BYTES`).
    pub min_share_bytes: u64,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct Record {
    /// The settings. `None` means the defaults.
    pub candidate: Option<Candidate>,
    /// Bus bandwidth in GB/s, by round and size.
    pub rounds: Vec<Vec<f64>>,
    pub failed: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Median score of the proposed settings minus 1: 0.1 means 10 % more bandwidth.
    pub gain: f64,
    /// Gain at each size: median bandwidth divided by the defaults' median bandwidth, minus 1.
    pub gains: Vec<f64>,
    /// Lowest score of the proposed settings.
    pub lowest: f64,
    /// Highest score of the defaults.
    pub highest_default: f64,
    /// True if the proposed settings are clearly better than the defaults.
    pub holds: bool,
}

/// Candidates whose score is at most this fraction below the best score count as equally good. The
/// cheapest of them is proposed ([`propose`]).
const EQUAL_WITHIN: f64 = 0.02;
/// Settings with a smaller gain are not written to the settings file.
const MIN_GAIN: f64 = 0.02;

impl Record {
    pub fn medians(&self) -> Vec<f64> {
        let sizes = self.rounds.first().map_or(0, Vec::len);
        (0..sizes)
            .map(|size| {
                median(
                    &self
                        .rounds
                        .iter()
                        .map(|round| round[size])
                        .collect::<Vec<_>>(),
                )
            })
            .collect()
    }

    /// Returns one score for each round, relative to the bandwidths of `reference`, by size.
    pub fn scores(&self, reference: &[f64]) -> Vec<f64> {
        let score = |round: &Vec<f64>| {
            let logarithms = round
                .iter()
                .zip(reference)
                .map(|(bandwidth, reference)| (bandwidth / reference).ln());
            (logarithms.sum::<f64>() / reference.len() as f64).exp()
        };
        self.rounds.iter().map(score).collect()
    }
}

/// Returns the record of `tried` to measure again, or `None` if all failed. Of the records within
/// `EQUAL_WITHIN` of the best, this is the one with the fewest queue pairs. Of several such
/// records, it is the one whose minimum share is nearest to the default share, compared as a ratio.
pub fn propose<'a>(
    default: &Record,
    tried: &'a [Record],
    default_share_bytes: u64,
) -> Option<&'a Record> {
    let reference = default.medians();
    let scored = tried
        .iter()
        .filter(|record| record.failed.is_none() && !record.rounds.is_empty());
    let scored: Vec<_> = scored
        .map(|record| (median(&record.scores(&reference)), record))
        .collect();
    let best = scored
        .iter()
        .map(|(score, _)| *score)
        .fold(f64::NEG_INFINITY, f64::max);
    let cost = |record: &Record| {
        let share_ratio = |share: u64| (share as f64 / default_share_bytes as f64).ln().abs();
        record
            .candidate
            .map_or((0, 0.0), |one| (one.qps, share_ratio(one.min_share_bytes)))
    };
    let good = scored
        .into_iter()
        .filter(|(score, _)| *score >= best * (1.0 - EQUAL_WITHIN))
        .map(|(_, record)| record);
    good.min_by(|a, b| {
        cost(a)
            .0
            .cmp(&cost(b).0)
            .then(cost(a).1.total_cmp(&cost(b).1))
    })
}

/// Compares the proposed settings with the defaults. Both records come from alternate runs.
pub fn judge(default: &Record, proposed: &Record) -> Verdict {
    let reference = default.medians();
    let scores = proposed.scores(&reference);
    let (lowest, _) = spread(&scores);
    let (_, highest_default) = spread(&default.scores(&reference));
    let gain = median(&scores) - 1.0;
    let gains = proposed
        .medians()
        .iter()
        .zip(&reference)
        .map(|(bandwidth, reference)| bandwidth / reference - 1.0)
        .collect();
    Verdict {
        gain,
        gains,
        lowest,
        highest_default,
        holds: lowest > highest_default && gain >= MIN_GAIN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(candidate: Option<(u8, u64)>, rounds: &[&[f64]]) -> Record {
        let candidate = candidate.map(|(qps, min_share_bytes)| Candidate {
            qps,
            min_share_bytes,
        });
        Record {
            candidate,
            rounds: rounds.iter().map(|round| round.to_vec()).collect(),
            failed: None,
        }
    }

    /// Twice the bandwidth at one size and half the bandwidth at the other give a score of 1.
    #[test]
    fn scores_are_geometric_means_against_the_defaults_medians() {
        let default = record(None, &[&[9.0, 100.0], &[11.0, 90.0], &[10.0, 120.0]]);
        assert_eq!(default.medians(), [10.0, 100.0]);
        let scores = record(None, &[&[20.0, 50.0], &[40.0, 100.0]]).scores(&default.medians());
        assert!(
            (scores[0] - 1.0).abs() < 1e-12 && (scores[1] - 2.0).abs() < 1e-12,
            "{scores:?}"
        );
    }

    #[test]
    fn the_fewest_queue_pairs_within_2_percent_of_the_best_are_proposed() {
        let default = record(None, &[&[10.0]]);
        let proposed = |tried: &[Record]| {
            propose(&default, tried, 16384).map(|record| record.candidate.unwrap())
        };
        let two = Candidate {
            qps: 2,
            min_share_bytes: 8192,
        };
        let tried = [
            record(Some((1, 16384)), &[&[10.0]]),
            record(Some((2, 131072)), &[&[14.9]]),
            record(Some((2, 8192)), &[&[14.8]]),
            record(Some((4, 16384)), &[&[15.0]]),
        ];
        assert_eq!(proposed(&tried), Some(two));
        // An outlier does not change the median.
        let lucky = record(Some((1, 16384)), &[&[10.0], &[99.0], &[10.1]]);
        assert_eq!(proposed(&[lucky, tried[2].clone()]), Some(two));
        let failed = Record {
            failed: Some("no memory".into()),
            ..record(Some((1, 16384)), &[&[99.0]])
        };
        assert_eq!(proposed(&[failed.clone(), tried[2].clone()]), Some(two));
        assert_eq!(proposed(&[failed]), None);
    }

    #[test]
    fn differences_within_the_noise_are_not_confirmed() {
        let default = record(None, &[&[10.0], &[9.0], &[11.0]]);
        let verdict = |rounds: &[&[f64]]| judge(&default, &record(Some((2, 8192)), rounds));
        // The median is better, but the defaults had an equally good round.
        let near = verdict(&[&[12.0], &[10.9], &[13.0]]);
        assert!(!near.holds && (near.gain - 0.2).abs() < 1e-12, "{near:?}");
        let clear = verdict(&[&[12.0], &[11.1], &[13.0]]);
        assert!(
            clear.holds
                && (clear.lowest - 1.11).abs() < 1e-12
                && (clear.highest_default - 1.1).abs() < 1e-12
        );
        // The first gain is clear but too small.
        let quiet = record(None, &[&[10.0], &[10.0]]);
        assert!(!judge(&quiet, &record(Some((2, 8192)), &[&[10.1], &[10.1]])).holds);
        assert!(judge(&quiet, &record(Some((2, 8192)), &[&[10.3], &[10.3]])).holds);
    }

    #[test]
    fn gains_are_reported_by_size() {
        let default = record(None, &[&[10.0, 20.0]]);
        let verdict = judge(&default, &record(Some((2, 8192)), &[&[15.0, 19.0]]));
        assert!(
            (verdict.gains[0] - 0.5).abs() < 1e-12 && (verdict.gains[1] + 0.05).abs() < 1e-12,
            "{verdict:?}"
        );
    }
}
