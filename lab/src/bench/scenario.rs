//! The scenarios. At each place (a size, or a number of connections) the libraries take turns,
//! round by round.
//!
//! Every byte of some messages is checked first. Pilot runs, which also warm up, find the number of
//! messages that fills the time of a run ([`calibrate`]). Pilot runs become longer until two in a
//! row agree. A run is as long as the last pilot run, but not shorter than the user asked for, and
//! not longer than [`MAX_STRETCH`] and [`LONG_S`] allow. Each round is one run in new processes
//! ([`Side::renew`]). The result is the median of the rounds, shown with their min..max.

use super::figures::{Metric, Place, Point, Series};
use super::options::{CONNECTION_BYTES, Plan, Scenario};
use crate::pair::messages::Layout;
use crate::pair::side::{Side, WrongBytes};
use anyhow::Result;
use nccl_tests_harness::fabric::limit::Limit;

/// Memory of one rank for all messages, unless one message per connection needs more.
const BUFFER_BYTES: usize = 128 << 20;
const BUFFER_MIN_BYTES: usize = 64 << 10;
/// To warm up, a run's new processes first send the run's number of messages divided by this.
const WARM_UP: u64 = 10;
const MIN_MESSAGES: u64 = 3;
/// Minimum length of a pilot run that counts, as a fraction of a run's time.
const MIN_PILOT_PART: f64 = 0.2;
/// Two pilot runs agree if their rates differ by at most this fraction.
const STEADY: f64 = 0.05;
/// Maximum length of a run if pilot runs do not agree, in multiples of the time asked for.
const MAX_STRETCH: f64 = 4.0;
/// Maximum length in seconds of a run if pilot runs do not agree, unless the user asked for more.
const LONG_S: f64 = 2.0;

/// Function that is called with each [`Point`] as soon as its place is measured.
pub type Tell<'a> = dyn FnMut(Point) -> Result<()> + 'a;

/// Measures bandwidth, message rate or latency by size, over new connections.
pub fn by_size(
    plan: &Plan,
    scenario: Scenario,
    sides: &mut [Side<'_>],
    limit: Limit,
    tell: &mut Tell<'_>,
) -> Result<()> {
    let settings = &plan.settings;
    let is_ping_pong = scenario == Scenario::Latency;
    let (forward, back) = if is_ping_pong { (1, 1) } else { (settings.channels(), 0) };
    let sizes = settings.sizes(scenario);
    for side in sides.iter_mut() {
        side.open(forward, back, buffer_bytes(&sizes, settings.in_flight, forward + back))?;
    }
    for bytes in sizes {
        let layout = settings.layout(bytes);
        let wrong = check(sides, layout)?;
        let run = |side: &mut Side<'_>, messages: u64| match is_ping_pong {
            true => side.ping_pong(layout, messages),
            false => {
                let seconds = side.stream(layout, messages)?;
                Ok((seconds, vec![of_stream(scenario, messages * forward as u64, bytes, seconds)]))
            }
        };
        let pilots = sides.iter_mut().map(|side| calibrate(plan, |messages| Ok(run(side, messages)?.0)));
        let messages = pilots.collect::<Result<Vec<_>>>()?;
        let sides = rounds(plan, sides, scenario.metrics(), |side, number, _| {
            run(side, messages[number].div_ceil(WARM_UP))?;
            Ok(run(side, messages[number])?.1)
        })?;
        let limit = match scenario {
            Scenario::Latency => limit.one_way_us(bytes),
            Scenario::Rate => limit.messages_per_s(bytes),
            _ => limit.gb_s(),
        };
        tell(Point { place: Place::SizeBytes(bytes), limit, sides, wrong: Some(wrong) })?;
    }
    sides.iter_mut().try_for_each(Side::close)
}

/// Returns messages per second for scenario rate, otherwise GB/s.
fn of_stream(scenario: Scenario, messages: u64, bytes: usize, seconds: f64) -> f64 {
    match scenario {
        Scenario::Rate => messages as f64 / seconds,
        _ => messages as f64 * bytes as f64 / seconds / 1e9,
    }
}

/// Measures growing numbers of connections, all driven by one thread: their bandwidth together, the
/// time to connect one, and the resident memory of each (without messages).
pub fn connections(plan: &Plan, sides: &mut [Side<'_>], limit: Limit, tell: &mut Tell<'_>) -> Result<()> {
    let layout = plan.settings.layout(CONNECTION_BYTES);
    let counts = plan.settings.connections();
    let metrics = Scenario::Connections.metrics();
    let mut wrong = vec![Vec::new(); counts.len()];
    let measured = rounds(plan, sides, &metrics.repeat(counts.len()), |side, _, round| {
        let (mut open, mut kept_bytes, mut values) = (0, [0.0; 2], Vec::new());
        for (&count, wrong) in counts.iter().zip(&mut wrong) {
            let opened = side.open(count - open, 0, buffer_bytes(&[layout.bytes], layout.in_flight, count))?;
            if round == 0 {
                wrong.push(side.check(layout)?);
            }
            let messages = calibrate(plan, |messages| side.stream(layout, messages))?;
            let seconds = side.stream(layout, messages)?;
            values.push(of_stream(Scenario::Connections, messages * count as u64, layout.bytes, seconds));
            let slowest_s = opened.iter().map(|one| one.seconds).fold(0.0, f64::max);
            values.push(slowest_s * 1e3 / (count - open) as f64);
            for (kept_bytes, one) in kept_bytes.iter_mut().zip(&opened) {
                *kept_bytes += one.rss_after_bytes as f64 - one.rss_before_bytes as f64;
                values.push(*kept_bytes / 1024.0 / count as f64);
            }
            open = count;
        }
        side.close()?;
        Ok(values)
    })?;
    for (at, (count, wrong)) in counts.into_iter().zip(wrong).enumerate() {
        let of_count = |series: &Vec<Series>| series[at * metrics.len()..][..metrics.len()].to_vec();
        let sides = measured.iter().map(of_count).collect();
        tell(Point { place: Place::Connections(count), limit: limit.gb_s(), sides, wrong: Some(wrong) })?;
    }
    Ok(())
}

/// Measures all rounds. Returns a series for each metric, by library. `once` measures one round of
/// one library, and returns a value for each metric. It gets the library's ranks in new processes,
/// the library's number, and the round.
pub fn rounds(
    plan: &Plan,
    sides: &mut [Side<'_>],
    metrics: &[Metric],
    mut once: impl FnMut(&mut Side<'_>, usize, u32) -> Result<Vec<f64>>,
) -> Result<Vec<Vec<Series>>> {
    let blank = metrics.iter().map(|metric| Series { metric: *metric, rounds: Vec::new() }).collect::<Vec<_>>();
    let mut measured = vec![blank; sides.len()];
    for round in 0..plan.settings.rounds {
        for number in order(round, sides.len()) {
            sides[number].renew()?;
            let values = once(&mut sides[number], number, round)?;
            measured[number].iter_mut().zip(values).for_each(|(series, value)| series.rounds.push(value));
        }
    }
    Ok(measured)
}

/// Returns the order of the libraries in a round: they take turns at being first.
fn order(round: u32, sides: usize) -> Vec<usize> {
    match round % 2 {
        0 => (0..sides).collect(),
        _ => (0..sides).rev().collect(),
    }
}

/// Sends every message buffer once over each library and checks every byte, outside the timed part:
/// a library that delivers wrong data is not fast.
pub fn check(sides: &mut [Side<'_>], layout: Layout) -> Result<Vec<WrongBytes>> {
    sides.iter_mut().map(|side| side.check(layout)).collect()
}

/// Finds the number of messages of a run by pilot runs.
fn calibrate(plan: &Plan, mut seconds_of: impl FnMut(u64) -> Result<f64>) -> Result<u64> {
    let mut pilot = Pilot { messages: MIN_MESSAGES.max(plan.settings.in_flight as u64), earlier_rate: None };
    loop {
        let seconds = seconds_of(pilot.messages)?;
        if let Some(messages) = pilot.next(seconds, plan.settings.seconds) {
            return Ok(messages);
        }
    }
}

#[derive(Debug)]
struct Pilot {
    messages: u64,
    /// Messages per second of the last pilot run that was long enough.
    earlier_rate: Option<f64>,
}

impl Pilot {
    /// Takes the seconds of a pilot run. Returns the number of messages of a run, or prepares the
    /// next pilot run. `wanted` is the time of a run in seconds.
    fn next(&mut self, seconds: f64, wanted: f64) -> Option<u64> {
        let rate = self.messages as f64 / seconds.max(1e-9);
        if seconds < wanted * MIN_PILOT_PART {
            // A very short run says little about the rate: the next has at most 64 times as many
            // messages.
            let more = (rate * wanted * MIN_PILOT_PART * 1.5) as u64;
            self.messages = more.clamp(self.messages * 2, self.messages * 64);
            return None;
        }
        let longest = (wanted * MAX_STRETCH).min(LONG_S).max(wanted);
        let is_steady = self.earlier_rate.is_some_and(|earlier| (rate / earlier - 1.0).abs() <= STEADY);
        if is_steady || seconds >= longest {
            // The run is as long as this pilot run, within the bounds.
            return Some(((rate * seconds.clamp(wanted, longest)) as u64).max(MIN_MESSAGES));
        }
        // The second long enough pilot run is as long as the first. Each later one is twice as long
        // as the one before.
        if self.earlier_rate.replace(rate).is_some() {
            self.messages *= 2;
        }
        None
    }
}

/// Returns the size of each connection's memory. All messages in flight have room in it side by
/// side if [`BUFFER_BYTES`] suffice for that, and one message has room in any case.
fn buffer_bytes(sizes: &[usize], in_flight: usize, connections: usize) -> usize {
    let greatest = sizes.iter().copied().max().unwrap_or(1);
    let share = BUFFER_BYTES / connections.max(1);
    (greatest * in_flight).min(share.max(greatest)).max(BUFFER_MIN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_take_turns_at_going_first() {
        assert_eq!((order(0, 2), order(1, 2), order(2, 2)), (vec![0, 1], vec![1, 0], vec![0, 1]));
        assert_eq!(order(1, 1), [0]);
    }

    /// Plays pilot runs at these rates (messages a second); the last rate repeats. Returns the
    /// number of messages of each pilot run, and of the run that follows.
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
        // 8 messages in 8 us: the next pilot run has at most 64 times as many.
        assert_eq!(pilots(&[1e6], 0.01).0, [8, 512, 3000, 3000]);
        // Slow messages: a run has at least the minimum number of messages, and no pilot run
        // follows one that took longer than the longest run.
        assert_eq!(pilots(&[0.1], 1.0), (vec![8], MIN_MESSAGES));
    }

    #[test]
    fn runs_become_longer_until_two_pilot_runs_agree() {
        // The third pilot run is 30 % faster, the fourth within 5 % of that. Both are shorter than
        // a run, so the run has the time asked for.
        let (asked, messages) = pilots(&[1000.0, 1000.0, 1300.0, 1310.0], 1.0);
        assert_eq!((asked, messages), (vec![8, 300, 300, 600], 1310));
        let restless = [1000.0, 1000.0, 1400.0, 1000.0, 1400.0, 1000.0, 1400.0, 1000.0];
        // Pilot runs that never agree: the run takes four times the time asked for.
        assert_eq!(pilots(&restless, 0.25), (vec![8, 75, 75, 150, 300, 600, 1200, 2400], 1000));
        // But at most two seconds.
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
        assert_eq!(of_stream(Scenario::Bandwidth, 1000, 1_000_000, 0.5), 2.0);
        assert_eq!(of_stream(Scenario::Rate, 1000, 8, 0.5), 2000.0);
    }
}
