//! The scenarios: what is done at each place, side by side, round by round.

use super::figures::{Metric, Place, Point, Series};
use super::limit::Limit;
use super::side::{Side, Wrong};
use super::words::Layout;
use super::{Plan, Scenario};
use anyhow::Result;

/// Memory of one rank for messages of all its connections, where the messages under way do not need more.
const BUFFER_BYTES: usize = 128 << 20;
/// A buffer has room for at least this much.
const BUFFER_MIN_BYTES: usize = 64 << 10;
/// Fewer messages tell nothing.
const MIN_MESSAGES: u64 = 3;
/// A pass to find out how fast messages go is long enough at this part of the time that the real one shall take.
const ENOUGH: f64 = 0.2;

/// Gets the points as they come, and the wrong bytes in words.
pub type Tell<'a> = dyn FnMut(Point, Vec<String>) -> Result<()> + 'a;

/// Bandwidth by size over connections that are opened for it.
///
/// # Errors
/// The ranks', or those of `tell`.
pub fn bandwidth(plan: &Plan, sides: &mut [Side], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let sizes = plan.sizes(Scenario::Bandwidth);
    streams(plan, sides, &sizes, Metric::Bandwidth, &|_| limit.gb_s(), tell)
}

/// Messages a second by size.
///
/// # Errors
/// The ranks', or those of `tell`.
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
    let channels = plan.channels;
    for side in sides.iter_mut() {
        side.open(channels, 0, buffer_bytes(sizes, plan.in_flight, channels))?;
    }
    for &bytes in sizes {
        let layout = Layout { bytes, in_flight: plan.in_flight, rest_us: plan.rest_us };
        let wrong = check(sides, layout)?;
        let mut messages = Vec::new();
        for side in sides.iter_mut() {
            messages.push(calibrate(plan, |messages| side.stream(layout, messages))?);
        }
        let measured = rounds(plan, sides, &[metric], |side, number| {
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
///
/// # Errors
/// The ranks', or those of `tell`.
pub fn latency(plan: &Plan, sides: &mut [Side], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let sizes = plan.sizes(Scenario::Latency);
    for side in sides.iter_mut() {
        side.open(1, 1, buffer_bytes(&sizes, plan.in_flight, 2))?;
    }
    for bytes in sizes {
        let layout = Layout { bytes, in_flight: plan.in_flight, rest_us: plan.rest_us };
        let wrong = check(sides, layout)?;
        let mut messages = Vec::new();
        for side in sides.iter_mut() {
            messages.push(calibrate(plan, |messages| Ok(side.ping_pong(layout, messages)?.0))?);
        }
        let metrics = [Metric::P50, Metric::P99, Metric::Least];
        let measured = rounds(plan, sides, &metrics, |side, number| {
            let (_, half) = side.ping_pong(layout, messages[number])?;
            Ok(vec![half.p50_us, half.p99_us, half.min_us])
        })?;
        point(Place::Size(bytes), limit.one_way_us(bytes), measured, wrong, tell)?;
    }
    sides.iter_mut().try_for_each(Side::close)
}

/// More and more connections at once, all driven by one thread: what they carry together, how long one takes to come up,
/// and what all have taken in memory for each (resident, without messages).
///
/// # Errors
/// The ranks', or those of `tell`.
pub fn connections(plan: &Plan, sides: &mut [Side], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let layout = Layout { bytes: plan.connection_bytes, in_flight: plan.in_flight, rest_us: plan.rest_us };
    let counts: Vec<usize> = std::iter::successors(Some(1), |count| Some(count * 2))
        .take_while(|count| *count <= plan.max_connections)
        .collect();
    let metrics = [Metric::Bandwidth, Metric::Connect, Metric::SenderMemory, Metric::ReceiverMemory];
    let blank = || metrics.iter().map(|metric| Series::new(*metric)).collect::<Vec<_>>();
    let mut measured = vec![vec![blank(); sides.len()]; counts.len()];
    let mut wrong = vec![vec![Wrong::default(); sides.len()]; counts.len()];
    for round in 0..plan.rounds {
        for number in order(round, sides.len()) {
            let side = &mut sides[number];
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
                    // Later rounds find memory that the first one left.
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

/// Which side comes when in a round: turn and turn about, so that no side is always the first.
pub fn order(round: u32, sides: usize) -> Vec<usize> {
    match round % 2 {
        0 => (0..sides).collect(),
        _ => (0..sides).rev().collect(),
    }
}

/// All rounds of one place: of each side a series for each metric.
fn rounds(
    plan: &Plan,
    sides: &mut [Side],
    metrics: &[Metric],
    mut once: impl FnMut(&mut Side, usize) -> Result<Vec<f64>>,
) -> Result<Vec<Vec<Series>>> {
    let blank = || metrics.iter().map(|metric| Series::new(*metric)).collect::<Vec<_>>();
    let mut measured = vec![blank(); sides.len()];
    for round in 0..plan.rounds {
        for number in order(round, sides.len()) {
            let values = once(&mut sides[number], number)?;
            measured[number].iter_mut().zip(values).for_each(|(series, value)| series.rounds.push(value));
        }
    }
    Ok(measured)
}

/// Sends what lies in memory once on each side, and checks every byte, outside of what is timed: a library that delivers
/// something else is not quick.
pub fn check(sides: &mut [Side], layout: Layout) -> Result<Vec<Wrong>> {
    sides.iter_mut().map(|side| side.check(layout)).collect()
}

/// Tells a point and what is wrong there.
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

/// How many messages take about as long as asked for. The passes that find it out are the warm-up.
fn calibrate(plan: &Plan, mut seconds_of: impl FnMut(u64) -> Result<f64>) -> Result<u64> {
    let mut messages = MIN_MESSAGES.max(plan.in_flight as u64);
    loop {
        let seconds = seconds_of(messages)?;
        match next_count(messages, seconds, plan.seconds) {
            Count::Enough(messages) => return Ok(messages),
            Count::More(more) => messages = more,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Count {
    Enough(u64),
    More(u64),
}

/// What `messages` in `seconds` say of how many go into `wanted` seconds.
fn next_count(messages: u64, seconds: f64, wanted: f64) -> Count {
    let fit = messages as f64 * wanted / seconds.max(1e-9);
    match seconds >= wanted * ENOUGH {
        true => Count::Enough((fit as u64).max(MIN_MESSAGES)),
        // A short pass may have been unlucky or lucky: at most 64 times as many at a time.
        false => Count::More(((fit * ENOUGH * 1.5) as u64).clamp(messages * 2, messages * 64)),
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

    #[test]
    fn the_count_of_messages_fills_the_time() {
        // 100 in half a second: 200 in one.
        assert_eq!(next_count(100, 0.5, 1.0), Count::Enough(200));
        assert_eq!(next_count(8, 0.01, 1.0), Count::More(240));
        assert_eq!(next_count(8, 1e-6, 1.0), Count::More(512));
        assert_eq!(next_count(8, 0.19, 1.0), Count::More(16));
        // Slow messages: never fewer than tell something.
        assert_eq!(next_count(8, 80.0, 1.0), Count::Enough(3));
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
