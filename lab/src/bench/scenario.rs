//! The scenarios: what is measured at each place, library by library, round by round.
//!
//! How a figure comes about: every byte of some messages is checked. Pilot runs, which also warm up, find how many messages fill
//! the time of a run ([`calibrate`]); they are made longer, and with them the runs, until two in a row agree, up to four times
//! the time asked for. Then the libraries take turns, round by round, and each round is one run in new processes
//! ([`Side::renew`]); the median of the rounds counts, shown with their min..max.

use super::figures::{Metric, Place, Point, Series};
use super::plan::{Plan, Scenario};
use crate::pair::messages::Layout;
use crate::pair::side::{Side, Wrong};
use anyhow::Result;
use nccl_tests_harness::fabric::limit::Limit;

/// Memory of one rank for the messages of all its connections, unless one message per connection needs more.
const BUFFER_BYTES: usize = 128 << 20;
/// The smallest buffer.
const BUFFER_MIN_BYTES: usize = 64 << 10;
/// One in so many messages of a run is sent before it, because its processes are new.
const WARM_UP: u64 = 10;
/// The fewest messages of a run.
const MIN_MESSAGES: u64 = 3;
/// The shortest pilot run that counts, as a part of the time of a run.
const ENOUGH: f64 = 0.2;
/// Two pilot runs whose rates are within this part of each other agree.
const STEADY: f64 = 0.05;
/// How many times as long as asked for a run becomes at most, where pilot runs do not agree.
const MAX_STRETCH: f64 = 4.0;
/// A run is not made longer than this in seconds, unless the user asked for it.
const LONG_S: f64 = 2.0;

/// Receives the points as they come, and a description of wrong bytes.
pub type Tell<'a> = dyn FnMut(Point, Vec<String>) -> Result<()> + 'a;

/// Bandwidth by size over connections that are opened for it.
pub fn bandwidth(plan: &Plan, sides: &mut [Side], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let sizes = plan.sizes(Scenario::Bandwidth);
    streams(plan, sides, &sizes, Metric::Bandwidth, &|_| limit.gb_s(), tell)
}

/// Messages a second by size.
pub fn rate(plan: &Plan, sides: &mut [Side], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let sizes = plan.sizes(Scenario::Rate);
    streams(plan, sides, &sizes, Metric::Rate, &|bytes| limit.messages_per_s(bytes), tell)
}

fn streams(
    plan: &Plan,
    sides: &mut [Side],
    sizes: &[usize],
    metric: Metric,
    limit: &dyn Fn(usize) -> Option<f64>,
    tell: &mut Tell<'_>,
) -> Result<()> {
    let channels = plan.settings.channels;
    for side in sides.iter_mut() {
        side.open(channels, 0, buffer_bytes(sizes, plan.settings.in_flight, channels))?;
    }
    for &bytes in sizes {
        let layout = plan.settings.layout(bytes);
        let wrong = check(sides, layout)?;
        let mut messages = Vec::new();
        for side in sides.iter_mut() {
            messages.push(calibrate(plan, |messages| side.stream(layout, messages))?);
        }
        let measured = rounds(plan, sides, &[metric], |side, number| {
            side.stream(layout, messages[number].div_ceil(WARM_UP))?;
            let seconds = side.stream(layout, messages[number])?;
            Ok(vec![of_stream(metric, messages[number] * channels as u64, bytes, seconds)])
        })?;
        point(Place::Size(bytes), limit(bytes), measured, wrong, tell)?;
    }
    sides.iter_mut().try_for_each(Side::close)
}

fn of_stream(metric: Metric, messages: u64, bytes: usize, seconds: f64) -> f64 {
    match metric {
        Metric::Rate => messages as f64 / seconds,
        _ => messages as f64 * bytes as f64 / seconds / 1e9,
    }
}

/// Half a round trip by size.
pub fn latency(plan: &Plan, sides: &mut [Side], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let sizes = plan.sizes(Scenario::Latency);
    for side in sides.iter_mut() {
        side.open(1, 1, buffer_bytes(&sizes, plan.settings.in_flight, 2))?;
    }
    for bytes in sizes {
        let layout = plan.settings.layout(bytes);
        let wrong = check(sides, layout)?;
        let mut messages = Vec::new();
        for side in sides.iter_mut() {
            messages.push(calibrate(plan, |messages| Ok(side.ping_pong(layout, messages)?.0))?);
        }
        let metrics = [Metric::P50, Metric::P99, Metric::Least];
        let measured = rounds(plan, sides, &metrics, |side, number| {
            side.ping_pong(layout, messages[number].div_ceil(WARM_UP))?;
            let (_, half) = side.ping_pong(layout, messages[number])?;
            Ok(vec![half.p50_us, half.p99_us, half.min_us])
        })?;
        point(Place::Size(bytes), limit.one_way_us(bytes), measured, wrong, tell)?;
    }
    sides.iter_mut().try_for_each(Side::close)
}

/// More and more connections at once, all driven by one thread: their bandwidth together, how long one takes to connect, and
/// the resident memory of each (without that of messages).
pub fn connections(plan: &Plan, sides: &mut [Side], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let layout = plan.settings.layout(plan.settings.connection_bytes);
    let counts: Vec<usize> = std::iter::successors(Some(1), |count| Some(count * 2))
        .take_while(|count| *count <= plan.max_connections)
        .collect();
    let metrics = [Metric::Bandwidth, Metric::Connect, Metric::SenderMemory, Metric::ReceiverMemory];
    let blank = || metrics.iter().map(|metric| Series::new(*metric)).collect::<Vec<_>>();
    let mut measured = vec![vec![blank(); sides.len()]; counts.len()];
    let mut wrong = vec![vec![Wrong::default(); sides.len()]; counts.len()];
    for round in 0..plan.settings.rounds {
        for number in order(round, sides.len()) {
            let side = &mut sides[number];
            if round > 0 {
                side.renew()?;
            }
            let (mut open, mut kept_bytes) = (0, [0.0; 2]);
            for (at, &count) in counts.iter().enumerate() {
                let opened = side.open(count - open, 0, buffer_bytes(&[layout.bytes], layout.in_flight, count))?;
                let more = (count - open) as f64;
                open = count;
                if round == 0 {
                    wrong[at][number] = side.check(layout)?;
                }
                let messages = calibrate(plan, |messages| side.stream(layout, messages))?;
                let seconds = side.stream(layout, messages)?;
                let series = &mut measured[at][number];
                let moved = messages * count as u64;
                series[0].rounds.push(of_stream(Metric::Bandwidth, moved, layout.bytes, seconds));
                let slowest = opened.iter().map(|one| one.seconds).fold(0.0, f64::max);
                series[1].rounds.push(slowest * 1e3 / more);
                for (rank, one) in opened.iter().enumerate() {
                    kept_bytes[rank] += one.rss_after_bytes as f64 - one.rss_before_bytes as f64;
                    // Ranks that a launcher started keep memory of the first round for the later ones.
                    if round == 0 {
                        series[2 + rank].rounds.push(kept_bytes[rank] / 1024.0 / count as f64);
                    }
                }
            }
            side.close()?;
        }
    }
    for ((&count, measured), wrong) in counts.iter().zip(measured).zip(wrong) {
        point(Place::Connections(count), limit.gb_s(), measured, wrong, tell)?;
    }
    Ok(())
}

/// The order of the libraries in a round: they take turns at being first.
pub fn order(round: u32, sides: usize) -> Vec<usize> {
    match round % 2 {
        0 => (0..sides).collect(),
        _ => (0..sides).rev().collect(),
    }
}

/// All rounds of one place: for each library a series for each metric.
fn rounds(
    plan: &Plan,
    sides: &mut [Side],
    metrics: &[Metric],
    mut once: impl FnMut(&mut Side, usize) -> Result<Vec<f64>>,
) -> Result<Vec<Vec<Series>>> {
    let blank = || metrics.iter().map(|metric| Series::new(*metric)).collect::<Vec<_>>();
    let mut measured = vec![blank(); sides.len()];
    for round in 0..plan.settings.rounds {
        for number in order(round, sides.len()) {
            sides[number].renew()?;
            let values = once(&mut sides[number], number)?;
            measured[number].iter_mut().zip(values).for_each(|(series, value)| series.rounds.push(value));
        }
    }
    Ok(measured)
}

/// Sends every message buffer once over each library and checks every byte, outside of what is timed: a library that delivers
/// wrong data is not fast.
pub fn check(sides: &mut [Side], layout: Layout) -> Result<Vec<Wrong>> {
    sides.iter_mut().map(|side| side.check(layout)).collect()
}

/// Passes a point on, with the number of wrong bytes there and their description.
pub fn point(
    place: Place,
    limit: Option<f64>,
    sides: Vec<Vec<Series>>,
    wrong: Vec<Wrong>,
    tell: &mut Tell<'_>,
) -> Result<()> {
    let bytes = wrong.iter().map(|wrong| wrong.bytes).collect();
    let words = wrong.into_iter().flat_map(|wrong| wrong.first).collect();
    tell(Point { place, limit, sides, wrong: Some(bytes) }, words)
}

/// How many messages make a run, found by pilot runs, which are also the warm-up.
fn calibrate(plan: &Plan, mut seconds_of: impl FnMut(u64) -> Result<f64>) -> Result<u64> {
    let mut pilot = Pilot { messages: MIN_MESSAGES.max(plan.settings.in_flight as u64), earlier_rate: None };
    loop {
        let seconds = seconds_of(pilot.messages)?;
        if let Some(messages) = pilot.next(seconds, plan.settings.seconds) {
            return Ok(messages);
        }
    }
}

/// The pilot runs of one measurement.
#[derive(Debug)]
struct Pilot {
    /// Messages of the next one.
    messages: u64,
    /// Messages a second of the last one that was long enough.
    earlier_rate: Option<f64>,
}

impl Pilot {
    /// Takes the time of a pilot run. Returns how many messages a run has, where `wanted` is its time in seconds as asked for, or
    /// prepares the next pilot run.
    fn next(&mut self, seconds: f64, wanted: f64) -> Option<u64> {
        let rate = self.messages as f64 / seconds.max(1e-9);
        if seconds < wanted * ENOUGH {
            // A very short run says little about the rate: at most 64 times as many messages the next time.
            let more = (rate * wanted * ENOUGH * 1.5) as u64;
            self.messages = more.clamp(self.messages * 2, self.messages * 64);
            return None;
        }
        let longest = (wanted * MAX_STRETCH).min(LONG_S).max(wanted);
        let is_steady = self.earlier_rate.is_some_and(|earlier| (rate / earlier - 1.0).abs() <= STEADY);
        if is_steady || seconds >= longest {
            // As long as the pilot runs had to be to agree.
            return Some(((rate * seconds.clamp(wanted, longest)) as u64).max(MIN_MESSAGES));
        }
        // The second one is as long as the first; further ones are twice as long each.
        if self.earlier_rate.replace(rate).is_some() {
            self.messages *= 2;
        }
        None
    }
}

/// Memory for each connection: all messages under way side by side, as far as they find room.
fn buffer_bytes(sizes: &[usize], in_flight: usize, connections: usize) -> usize {
    let greatest = sizes.iter().copied().max().unwrap_or(1);
    let share = BUFFER_BYTES / connections.max(1);
    (greatest * in_flight).min(share.max(greatest)).max(BUFFER_MIN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_take_turns_at_being_first() {
        assert_eq!((order(0, 2), order(1, 2), order(2, 2)), (vec![0, 1], vec![1, 0], vec![0, 1]));
        assert_eq!(order(1, 1), [0]);
    }

    /// Pilot runs at these rates (messages a second), one after the other, the last of them for ever: their messages, and
    /// those of a run.
    fn pilots(rates: &[f64], wanted: f64) -> (Vec<u64>, u64) {
        let (mut pilot, mut asked) = (Pilot { messages: 8, earlier_rate: None }, Vec::new());
        loop {
            let rate = rates[asked.len().min(rates.len() - 1)];
            asked.push(pilot.messages);
            if let Some(messages) = pilot.next(pilot.messages as f64 / rate, wanted) {
                return (asked, messages);
            }
        }
    }

    #[test]
    fn the_count_of_messages_fills_the_time() {
        assert_eq!(pilots(&[1000.0], 1.0), (vec![8, 300, 300], 1000));
        // 8 messages in 8 us: no more than 64 times as many at once.
        assert_eq!(pilots(&[1e6], 0.01).0, [8, 512, 3000, 3000]);
        // Slow messages: never fewer than the minimum, and a pilot run beyond the longest run is the last.
        assert_eq!(pilots(&[0.1], 1.0), (vec![8], MIN_MESSAGES));
    }

    #[test]
    fn runs_become_longer_until_two_pilot_runs_agree() {
        // 30 % faster, then within 5 %: the run is as long as the pilots, if that is more than asked for.
        let (asked, messages) = pilots(&[1000.0, 1000.0, 1300.0, 1310.0], 1.0);
        assert_eq!((asked, messages), (vec![8, 300, 300, 600], 1310));
        let restless = [1000.0, 1000.0, 1400.0, 1000.0, 1400.0, 1000.0, 1400.0, 1000.0];
        // They never agree: four times as long.
        assert_eq!(pilots(&restless, 0.25), (vec![8, 75, 75, 150, 300, 600, 1200, 2400], 1000));
        // But no longer than two seconds.
        assert_eq!(pilots(&restless, 1.5).1, 2000);
    }

    #[test]
    fn memory_holds_the_messages_under_way_or_one_at_least() {
        assert_eq!(buffer_bytes(&[4096, 1 << 20], 8, 1), 8 << 20);
        assert_eq!(buffer_bytes(&[64 << 20], 8, 1), 128 << 20);
        assert_eq!(buffer_bytes(&[64 << 20], 8, 64), 64 << 20);
        assert_eq!(buffer_bytes(&[8], 8, 64), BUFFER_MIN_BYTES);
    }

    #[test]
    fn a_stream_in_both_words() {
        assert_eq!(of_stream(Metric::Bandwidth, 1000, 1_000_000, 0.5), 2.0);
        assert_eq!(of_stream(Metric::Rate, 1000, 8, 0.5), 2000.0);
    }
}
