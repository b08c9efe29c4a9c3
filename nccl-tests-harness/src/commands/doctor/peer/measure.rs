//! Measures the ways between two hosts: a rank here and one at the peer, each with the plugin restricted to the rails in question, as
//! NCCL drives it.

use super::host::{Host, lesser};
use super::rail::Pair;
use super::reach::{self, Partner};
use super::sheet::Sheet;
use super::together::{Figures, Outcome, Path as Way, Rate};
use super::words::{Ask, OPENING, Told};
use crate::commands::top::look::Looker;
use crate::output::watch::Watch;
use crate::pair::messages::Layout;
use crate::pair::side::{About, Side};
use crate::ranks::job::Seat;
use crate::ranks::rendezvous::{Guest, Hello};
use anyhow::{Context, Result, bail};
use nccl_net_spark::counters::layout::State;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long one way may take, whatever it does.
const WAY: Duration = Duration::from_secs(60);
/// How long a rank may make no progress. Above the plugin's own limits for paths that do not carry.
const STUCK: Duration = Duration::from_secs(45);
/// The length of a run that counts, in seconds, and the part of it that a pilot run needs to say how many messages that is.
const RUN_S: f64 = 1.0;
const ENOUGH: f64 = 0.2;
/// Several, as NCCL has, so that no single stream is the limit.
const CONNECTIONS: usize = 4;
/// Messages in flight on each connection, as NCCL has at most.
const IN_FLIGHT: usize = 8;
/// The size of messages: a large one where rails are fast, a smaller one where a test's are slow.
const BYTES: std::ops::RangeInclusive<usize> = 16 << 10..=1 << 20;
/// The messages of a ping-pong, and how long one may take in seconds.
const PING_PONGS: std::ops::RangeInclusive<u64> = 50..=10_000;
const PING_PONG_S: f64 = 0.3;

/// What all measurements share.
pub struct Course<'a> {
    /// This host.
    pub host: &'a Host,
    /// The peer's sheet.
    pub there: &'a Sheet,
    /// The partner there.
    pub partner: Partner,
    /// This program's file, which the rank here is.
    pub program: &'a Path,
    /// When all of it ends.
    pub end: Instant,
    /// Shows what is being done.
    pub watch: Watch,
}

impl Course<'_> {
    /// Measures the rails of `pairs` together.
    ///
    /// # Errors
    /// When the partner is gone; that a way does not carry is an outcome.
    pub fn measure(&mut self, pairs: &[Pair]) -> Result<Way> {
        let mut here: Vec<String> = pairs.iter().map(|pair| self.host.sheet.rails[pair.here].name.clone()).collect();
        let mut there: Vec<String> = pairs.iter().map(|pair| self.there.rails[pair.there].name.clone()).collect();
        // A fast rail may serve several of the other side.
        here.dedup();
        there.dedup();
        let port_mtu_bytes = self.port_mtu_bytes(pairs);
        let own_mbps = self.host.expected_mbps(&here)?;
        if Instant::now() >= self.end {
            let outcome = Outcome::NotMeasured("time was up".to_owned());
            return Ok(Way { here, there, expected_mbps: own_mbps, port_mtu_bytes, outcome });
        }
        self.watch.doing(&format!("{} to {}", here.join(", "), there.join(", ")));
        self.partner.line.say(&Ask::Measure { rails: there.clone() })?;
        let (token, their_mbps) = match self.partner.line.hear(OPENING)? {
            Told::Ready { token, expected_mbps } => {
                (token, expected_mbps.filter(|mbps| mbps.is_finite() && *mbps > 0.0))
            }
            Told::Failed { why } => {
                let outcome = Outcome::Failed(super::sheet::plain(&why));
                return Ok(Way { here, there, expected_mbps: own_mbps, port_mtu_bytes, outcome });
            }
            Told::Sheet(_) | Told::Neighbours(_) => {
                bail!("{} answered something else than it was asked", self.partner.name)
            }
        };
        let expected_mbps = lesser(own_mbps, their_mbps);
        let line = reach::again(&self.partner, &token, self.end)?;
        let guest = Guest { hello: self.hello(), line };
        let seats = vec![Seat::Here(self.host.environment(&here)?), Seat::Guest(guest)];
        let outcome = match self.figures(seats, expected_mbps) {
            Ok(figures) => Outcome::Measured(figures),
            Err(error) => Outcome::Failed(self.named(&format!("{error:#}"))),
        };
        Ok(Way { here, there, expected_mbps, port_mtu_bytes, outcome })
    }

    /// The smallest path MTU of the ports at both ends.
    fn port_mtu_bytes(&self, pairs: &[Pair]) -> Option<u32> {
        let ports = |pair: &Pair| [self.host.sheet.rails[pair.here].mtu_bytes, self.there.rails[pair.there].mtu_bytes];
        pairs.iter().flat_map(ports).min()
    }

    fn figures(&self, seats: Vec<Seat>, expected_mbps: Option<f64>) -> Result<Figures> {
        let about = About {
            name: "way",
            library: self.host.plugin.clone(),
            abi_wanted: None,
            abi: 0,
            networks: Vec::new(),
            whereabouts: Vec::new(),
            connections: Vec::new(),
        };
        let mut side = Side::start(self.program, about, seats, STUCK, self.watch.part())?;
        side.end_by(self.end.min(Instant::now() + WAY));
        let most = layout(bytes(expected_mbps));
        let memory = most.bytes * IN_FLIGHT;
        side.open(CONNECTIONS, 0, memory)?;
        let (to_peer, wrong_there) = one_way(&mut side, most)?;
        side.open(0, CONNECTIONS, memory)?;
        let (from_peer, wrong_back) = one_way(&mut side, most)?;
        let wrong_bytes = wrong_there + wrong_back;
        side.open(1, 1, memory)?;
        let latency_us = latency_us(&mut side)?;
        let path_mtu_bytes = path_mtu_bytes(&side)?;
        side.finish()?;
        let rate = |mbps| Rate::of(mbps, expected_mbps);
        let (to_peer, from_peer) = (rate(to_peer), rate(from_peer));
        Ok(Figures { to_peer, from_peer, latency_us, wrong_bytes, path_mtu_bytes })
    }

    /// What the rank there would say of itself.
    fn hello(&self) -> Hello {
        Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: "doctor".to_owned(),
            rank: 1,
            ranks: 2,
            pid: 0,
            host: self.there.host.clone(),
            machine: String::new(),
        }
    }

    /// An error of the two ranks, with the hosts in place of their numbers.
    fn named(&self, error: &str) -> String {
        let line = |line: &str| {
            let line = line.strip_prefix("way: ").unwrap_or(line);
            let named = line.strip_prefix("rank 0: ").map(|rest| format!("here: {rest}"));
            let named =
                named.or_else(|| line.strip_prefix("rank 1: ").map(|rest| format!("{}: {rest}", self.there.host)));
            let named = named.unwrap_or_else(|| line.replacen("ranks 0, 1: ", "both: ", 1));
            named.replace("process 0 on ", "the process on ")
        };
        error.lines().map(line).collect::<Vec<_>>().join("; ")
    }
}

/// Messages that take about a millisecond at the rate that is expected.
fn bytes(expected_mbps: Option<f64>) -> usize {
    // Mb/s are 125 bytes a millisecond.
    let wanted = expected_mbps.map_or(*BYTES.end(), |mbps| (mbps * 125.0) as usize);
    let wanted = wanted.clamp(*BYTES.start(), *BYTES.end());
    1 << wanted.ilog2()
}

fn layout(bytes: usize) -> Layout {
    Layout { bytes, in_flight: IN_FLIGHT, rest_us: 0 }
}

/// The rate of the direction whose connections are open, in Mb/s, and its wrong bytes. Closes them.
fn one_way(side: &mut Side, most: Layout) -> Result<(f64, u64)> {
    let least = layout(*BYTES.start());
    let began = Instant::now();
    let mut wrong_bytes = side.check(least)?.bytes;
    let layout = if is_slow(began.elapsed()) { least } else { most };
    if layout.bytes != least.bytes {
        wrong_bytes += side.check(layout)?.bytes;
    }
    let mbps = stream(side, layout)?;
    side.close()?;
    Ok((mbps, wrong_bytes))
}

/// Whether the smallest messages, half a MiB in all, took so long that the largest would take seconds: whatever the rail promises. A rail
/// of a Spark carries them in less than a millisecond.
fn is_slow(took: Duration) -> bool {
    took >= Duration::from_millis(100)
}

/// The rate of all connections together, in Mb/s.
fn stream(side: &mut Side, layout: Layout) -> Result<f64> {
    let mut messages = layout.in_flight as u64;
    loop {
        let seconds = side.stream(layout, messages)?.max(1e-9);
        let mbps = |messages: u64, seconds: f64| {
            (messages * CONNECTIONS as u64 * layout.bytes as u64 * 8) as f64 / seconds / 1e6
        };
        if seconds >= RUN_S * ENOUGH {
            // The pilot run was the warm-up.
            let wanted = (messages as f64 / seconds * RUN_S) as u64;
            let messages = wanted.max(layout.in_flight as u64);
            let seconds = side.stream(layout, messages)?.max(1e-9);
            return Ok(mbps(messages, seconds));
        }
        let more = (messages as f64 / seconds * RUN_S * ENOUGH * 1.5) as u64;
        messages = more.clamp(messages * 2, messages * 64);
    }
}

/// The smallest path MTU of the lanes that carry now, as the counters of the rank here have it.
fn path_mtu_bytes(side: &Side) -> Result<Option<u32>> {
    let Some(child) = side.sending_child() else { return Ok(None) };
    let look = Looker::new(&[child]).look().context("the counters of the rank here")?;
    let records = look.jobs.iter().flat_map(|job| &job.counters.records);
    let carrying = records.filter(|record| record.state == State::Carries && record.path_mtu_bytes > 0);
    Ok(carrying.filter_map(|record| u32::try_from(record.path_mtu_bytes).ok()).min())
}

/// Half a round trip of 8 bytes, the median, in microseconds.
fn latency_us(side: &mut Side) -> Result<f64> {
    let layout = layout(8);
    let (pilot, _) = side.ping_pong(layout, *PING_PONGS.start())?;
    let each = pilot / *PING_PONGS.start() as f64;
    let messages = (PING_PONG_S / each.max(1e-9)) as u64;
    let (_, half) = side.ping_pong(layout, messages.clamp(*PING_PONGS.start(), *PING_PONGS.end()))?;
    Some(half.p50_us).filter(|us| us.is_finite()).context("the ping-pong was not timed")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: 112 Gb/s are 14 MB a millisecond, 112 Mb/s 14 kB; the next power of two below, within the limits.
    #[test]
    fn messages_are_as_large_as_the_rate_asks_for() {
        assert_eq!(
            [Some(112_000.0), Some(112.0), Some(1_000.0), None].map(bytes),
            [1 << 20, 16 << 10, 64 << 10, 1 << 20]
        );
    }
}
