//! A stream during which one rail is slowed and then restored.

use super::figures::{Metric, Place, Point};
use super::options::Plan;
use super::scenario::{self, Tell};
use crate::pair::messages::Flowed;
use crate::pair::side::Side;
use anyhow::{Result, ensure};
use nccl_tests_harness::fabric::limit::Limit;
use serde::Serialize;
use std::time::Duration;

/// Length of each of a run's three parts, in multiples of `--seconds`: all rails at full rate, one
/// rail slowed, all at full rate again.
const PART: f64 = 3.0;
/// Number of windows in the time of `--seconds`. The receiver counts the bytes of each window.
const WINDOWS: f64 = 10.0;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Course {
    /// `ours` or `theirs`.
    pub side: &'static str,
    /// Number of the round, from 0.
    pub round: u32,
    pub window_ms: u64,
    /// Bandwidth at the receiver, for each window.
    pub bandwidth_gb_s: Vec<f64>,
    /// Seconds from the start until the slowing of the rail began.
    pub fall_s: f64,
    /// Seconds from the start until the restoring of the rail began.
    pub return_s: f64,
}

/// Runs the scenario with each library, round by round. The first of `limits` is with the rail at
/// full rate, the second with the rail slowed. `slow(true)` slows the rail, `slow(false)` restores
/// it.
pub fn run(
    plan: &Plan,
    sides: &mut [Side<'_>],
    limits: [Limit; 2],
    slow: &mut dyn FnMut(bool) -> Result<()>,
    tell: &mut Tell<'_>,
) -> Result<Vec<Course>> {
    let settings = &plan.settings;
    let layout = settings.layout(settings.slowdown_bytes);
    for side in sides.iter_mut() {
        side.open(settings.channels(), 0, layout.bytes * layout.in_flight)?;
    }
    let mut wrong = Some(scenario::check(sides, layout)?);
    let window_ms = ((settings.seconds * 1e3 / WINDOWS) as u64).max(1);
    let part = Duration::from_secs_f64(settings.seconds * PART);
    let mut courses = Vec::new();
    let names = phase_names(settings.seconds);
    let measured = scenario::rounds(plan, sides, &[Metric::Bandwidth; 5], |side, _, round| {
        let flowed = side.flow(layout, part, window_ms, slow)?;
        courses.push(course(side.about.name, round, window_ms, &flowed));
        Ok(phases(&flowed, window_ms, settings.seconds)?.to_vec())
    })?;
    sides.iter_mut().try_for_each(Side::close)?;
    for (at, phase) in names.into_iter().enumerate() {
        let limit = limits[usize::from(at == 1 || at == 2)].gb_s();
        let sides = measured.iter().map(|series| vec![series[at].clone()]).collect();
        tell(Point { place: Place::Phase(phase), limit, sides, wrong: wrong.take() })?;
    }
    Ok(courses)
}

fn course(side: &'static str, round: u32, window_ms: u64, flowed: &Flowed) -> Course {
    let gb_s = |bytes: &u64| *bytes as f64 / window_ms as f64 / 1e6;
    let mark = |at: usize| flowed.marks_s.get(at).copied().unwrap_or_default();
    let bandwidth_gb_s = flowed.windows_bytes.iter().map(gb_s).collect();
    Course { side, round, window_ms, bandwidth_gb_s, fall_s: mark(0), return_s: mark(2) }
}

/// Names the phases of a run, in order. The second and the fourth phase, which begin when the rail
/// has been slowed or restored, are `moment_s` long.
fn phase_names(moment_s: f64) -> [String; 5] {
    let moment = if moment_s == 1.0 { "second".to_owned() } else { format!("{moment_s} s") };
    let [slow, back] = ["slow", "back"].map(|state| format!("first {moment} {state}"));
    ["before".to_owned(), slow, "slow".to_owned(), back, "back".to_owned()]
}

/// Returns the mean bandwidth of each phase in GB/s. The first phase does not include the start of
/// the run (half of `moment_s`).
fn phases(flowed: &Flowed, window_ms: u64, moment_s: f64) -> Result<[f64; 5]> {
    let [fall, fallen, back, returned] = flowed.marks_s[..] else {
        anyhow::bail!("{} marks instead of 4", flowed.marks_s.len());
    };
    // The last window is incomplete.
    let end = flowed.windows_bytes.len().saturating_sub(1) as f64 * window_ms as f64 / 1e3;
    let spans = [
        (moment_s / 2.0, fall),
        (fallen, fallen + moment_s),
        (fallen + moment_s, back),
        (returned, returned + moment_s),
        (returned + moment_s, end),
    ];
    let mut means = [0.0; 5];
    for (mean, (from, to)) in means.iter_mut().zip(spans) {
        *mean = mean_gb_s(&flowed.windows_bytes, window_ms, from, to)?;
    }
    Ok(means)
}

/// Returns the mean over the windows that are entirely between two times.
fn mean_gb_s(windows_bytes: &[u64], window_ms: u64, from_s: f64, to_s: f64) -> Result<f64> {
    let window_s = window_ms as f64 / 1e3;
    let whole = |at: usize| at as f64 * window_s >= from_s && (at + 1) as f64 * window_s <= to_s;
    let inside = windows_bytes.iter().enumerate().filter(|(at, _)| whole(*at));
    let (count, bytes) = inside.fold((0_u32, 0_u64), |(count, sum), (_, bytes)| (count + 1, sum + bytes));
    ensure!(
        count > 0,
        "no whole window of {window_ms} ms between {from_s:.3} s and {to_s:.3} s: use a larger --seconds"
    );
    Ok(bytes as f64 / f64::from(count) / window_s / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: windows of 100 ms with 100 MB each are 1 GB/s.
    #[test]
    fn phases_are_the_windows_between_the_marks() {
        let mut windows_bytes = vec![100_000_000; 30];
        windows_bytes.extend([10_000_000; 10]);
        windows_bytes.extend([50_000_000; 20]);
        windows_bytes.extend([20_000_000; 10]);
        windows_bytes.extend([100_000_000; 20]);
        // The start and the end do not count.
        windows_bytes[0] = 0;
        windows_bytes.push(1);
        let flowed = Flowed { windows_bytes, marks_s: vec![3.0, 3.0, 6.0, 6.0] };
        let means = phases(&flowed, 100, 1.0).unwrap();
        let expected = [1.0, 0.1, 0.5, 0.2, 1.0];
        assert!(means.iter().zip(expected).all(|(mean, expected)| (mean - expected).abs() < 1e-9), "{means:?}");
        let course = course("ours", 2, 100, &flowed);
        assert_eq!((course.bandwidth_gb_s[1], course.fall_s, course.return_s), (1.0, 3.0, 6.0));
    }

    #[test]
    fn phases_are_named_by_their_length() {
        assert_eq!(phase_names(1.0), ["before", "first second slow", "slow", "first second back", "back"]);
        assert_eq!(phase_names(0.3)[1], "first 0.3 s slow");
    }

    #[test]
    fn a_run_that_is_too_short_is_an_error() {
        let flowed = Flowed { windows_bytes: vec![1; 3], marks_s: vec![0.01, 0.02, 0.03, 0.04] };
        assert!(phases(&flowed, 100, 1.0).unwrap_err().to_string().contains("--seconds"));
        assert!(phases(&Flowed::default(), 100, 1.0).unwrap_err().to_string().contains("marks"));
    }
}
