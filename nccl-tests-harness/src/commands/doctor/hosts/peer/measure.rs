//! Measures the paths between two hosts with jobs of two ranks, one here and one on the peer. Each
//! rank's plugin is restricted to the rails to measure.
//!
//! A broadcast between two ranks sends data in one direction, so each direction has its own job. A
//! round has eight timed broadcasts and one more; the bytes of the last two are checked. To measure
//! the rate, a job runs rounds until it has timed one second.
//!
//! To measure the latency, it runs rounds with broadcasts of 8 bytes. The receiving rank requests
//! each message with a clear-to-send, so for this rank such a broadcast takes a full round trip.
//! The latency is half of the broadcast's time.

use super::host::Host;
use super::messages::{Ask, RankPort};
use super::reach::Partner;
use super::sheet::Sheet;
use crate::commands::collectives::Collective;
use crate::commands::collectives::messages::{Answer, Measurement, Order, RunParameters, Setup};
use crate::commands::collectives::rank::Collectives;
use crate::commands::doctor::hosts::rail::Pair;
use crate::commands::doctor::hosts::together::{Figures, Outcome, Path as MeasuredPath, Rate};
use crate::commands::top::look::Reader;
use crate::output::watch::Watch;
use crate::ranks::control::answer;
use crate::ranks::job::{Job, RankPlace};
use crate::ranks::rendezvous::{Guest, Hello};
use anyhow::{Context, Result, ensure};
use host::counters::layout::State;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit of one job.
const JOB: Duration = Duration::from_secs(60);
/// Time without progress after which a job fails. It exceeds the plugin's time limits for paths
/// without data.
const STUCK: Duration = Duration::from_secs(45);
/// Number of parallel streams. A single stream would limit the rate; NCCL uses several, too.
const CHANNELS: usize = 4;
const ITERS: u32 = 8;
/// Size of the first broadcasts when the rate is measured.
const LEAST_BYTES: usize = 16 << 10;
/// Largest size of a broadcast.
const MOST_BYTES: usize = 32 << 20;
/// Seconds of timed broadcasts from which the rate is computed.
const TIMED_S: f64 = 1.0;
/// Smallest fraction of `TIMED_S` that one round should take. The broadcasts of such a round are so
/// large that the pauses between them hardly count.
const MIN_ROUND_PART: f64 = 0.5;
const LATENCY_ROUNDS: usize = 15;

pub struct Measurements<'a> {
    pub host: &'a Host,
    pub there: &'a Sheet,
    pub partner: Partner,
    /// This program's file, which also runs the rank here.
    pub program: &'a Path,
    /// Time limit of all measurements together.
    pub end: Instant,
    pub watch: Watch,
}

struct OneWay {
    mbps: f64,
    latency_us: f64,
    wrong_bytes: u64,
    path_mtu_bytes: Option<u32>,
}

impl Measurements<'_> {
    /// Measures the rails of `pairs` together. A path that carries no data is a result and not an
    /// error.
    ///
    /// # Errors
    /// The partner has ended.
    pub fn measure(&mut self, pairs: &[Pair]) -> Result<MeasuredPath> {
        let mut here: Vec<String> = pairs
            .iter()
            .map(|pair| self.host.sheet.rails[pair.here].name.clone())
            .collect();
        let mut there: Vec<String> = pairs
            .iter()
            .map(|pair| self.there.rails[pair.there].name.clone())
            .collect();
        // A fast rail may have pairs with several rails of the other host.
        here.dedup();
        there.dedup();
        let ports = |pair: &Pair| {
            [
                self.host.sheet.rails[pair.here].mtu_bytes,
                self.there.rails[pair.there].mtu_bytes,
            ]
        };
        let port_mtu_bytes = pairs.iter().flat_map(ports).min();
        let expected_mbps = self.host.expected_mbps(&here)?;
        let outcome = Outcome::NotMeasured("time was up".to_owned());
        let mut path = MeasuredPath {
            here,
            there,
            expected_mbps,
            port_mtu_bytes,
            outcome,
        };
        if Instant::now() < self.end {
            self.watch.doing(&format!(
                "{} to {}",
                path.here.join(", "),
                path.there.join(", ")
            ));
            path.outcome = match self.both_ways(&mut path)? {
                Ok(figures) => Outcome::Measured(figures),
                Err(why) => Outcome::Failed(why),
            };
        }
        Ok(path)
    }

    /// Measures both directions. An inner error comes from the ranks, and makes this path a failed
    /// one. An outer error comes from the partner.
    fn both_ways(&mut self, path: &mut MeasuredPath) -> Result<Result<Figures, String>> {
        let mut measured = |sends_here| -> Result<Result<OneWay, String>> {
            let own = RankPlace::Here(self.host.environment(&path.here)?);
            let guest = RankPlace::Guest(self.guest(path)?);
            let places = if sends_here {
                vec![own, guest]
            } else {
                vec![guest, own]
            };
            let one_way = self.one_way(places, usize::from(!sends_here));
            Ok(one_way.map_err(|error| self.named(&format!("{error:#}"), sends_here)))
        };
        let to_peer = match measured(true)? {
            Ok(one) => one,
            Err(why) => return Ok(Err(why)),
        };
        let rate = |one: &OneWay, path: &MeasuredPath| Rate::of(one.mbps, path.expected_mbps);
        Ok(measured(false)?.map(|from_peer| Figures {
            to_peer: rate(&to_peer, path),
            from_peer: rate(&from_peer, path),
            latency_us: (to_peer.latency_us + from_peer.latency_us) / 2.0,
            wrong_bytes: to_peer.wrong_bytes.saturating_add(from_peer.wrong_bytes),
            path_mtu_bytes: to_peer
                .path_mtu_bytes
                .into_iter()
                .chain(from_peer.path_mtu_bytes)
                .min(),
        }))
    }

    /// Starts a rank on the peer. Lowers the expected rate of `path` if the peer's rails are
    /// slower.
    fn guest(&mut self, path: &mut MeasuredPath) -> Result<Guest> {
        let RankPort {
            port,
            expected_mbps,
        } = self.partner.ask(&Ask::Rank {
            rails: path.there.clone(),
        })?;
        let theirs = expected_mbps.filter(|mbps| mbps.is_finite() && *mbps > 0.0);
        path.expected_mbps = path
            .expected_mbps
            .into_iter()
            .chain(theirs)
            .reduce(f64::min);
        let hello = Hello {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            job: "doctor".to_owned(),
            rank: 1,
            ranks: 2,
            pid: 0,
            host: self.there.host.clone(),
            machine: String::new(),
        };
        Ok(Guest {
            hello,
            line: self.partner.connect_to_port(port, self.end)?,
        })
    }

    /// Measures the direction from rank 0 to rank 1. `own` is the number of this host's rank.
    fn one_way(&self, places: Vec<RankPlace>, own: usize) -> Result<OneWay> {
        let mut job = Job::<Collectives>::start(self.program, places, STUCK, self.watch.part())?;
        job.end_by(self.end.min(Instant::now() + JOB));
        let setup = |rank| Setup {
            rank,
            plugin: self.host.plugin.clone(),
            job: u64::from(std::process::id()),
            max_count: MOST_BYTES,
            terms: RunParameters {
                collective: Collective::Broadcast,
                ranks: 2,
                channels: CHANNELS,
                warmup_iters: 1,
                iters: ITERS,
                check_iters: 1,
            },
        };
        let listening = job.order_all(
            |rank| Order::Setup(setup(rank)),
            answer!(Answer::Listening { handles, .. } => handles),
        )?;
        let handles = |rank: usize| listening.get(1 - rank).cloned().unwrap_or_default();
        job.order_all(
            |rank| Order::Connect {
                handles: handles(rank),
            },
            answer!(Answer::Connected { .. } => ()),
        )?;
        let (mbps, wrong_bytes) = rate(&mut job)?;
        let latency_us = latency_us(&mut job)?;
        let path_mtu_bytes = job.child(own).map(path_mtu).transpose()?.flatten();
        job.finish()?;
        Ok(OneWay {
            mbps,
            latency_us,
            wrong_bytes,
            path_mtu_bytes,
        })
    }

    fn named(&self, error: &str, sends_here: bool) -> String {
        let (here, there) = if sends_here {
            ("rank 0: ", "rank 1: ")
        } else {
            ("rank 1: ", "rank 0: ")
        };
        let line = |line: &str| {
            let named = line.replacen(here, "here: ", 1).replacen(
                there,
                &format!("{}: ", self.there.host),
                1,
            );
            named
                .replacen("ranks 0, 1: ", "both: ", 1)
                .replace("process 0 on ", "the process on ")
        };
        error.lines().map(line).collect::<Vec<_>>().join("; ")
    }
}

/// Increases the size of broadcasts until a round takes long enough, or the size is the largest.
/// Then times rounds of this size. Returns the rate in Mb/s and the number of wrong bytes.
fn rate(job: &mut Job<Collectives>) -> Result<(f64, u64)> {
    let mut bytes = LEAST_BYTES;
    let mut wrong = 0;
    let mut seconds = 0.0;
    let mut rounds = 0;
    prepare(job, bytes)?;
    while seconds < TIMED_S {
        let measured = round(job)?;
        wrong = measured
            .iter()
            .filter_map(|one| one.wrong)
            .fold(wrong, u64::saturating_add);
        // The shorter time is that of the rank that began last. The other rank waited for it.
        let took = measured
            .iter()
            .map(|one| one.seconds)
            .fold(f64::INFINITY, f64::min)
            .max(1e-9);
        (seconds, rounds) = (seconds + took, rounds + 1);
        if took < TIMED_S * MIN_ROUND_PART && bytes < MOST_BYTES {
            let wanted = (bytes as f64 * TIMED_S / took) as usize;
            bytes = wanted.max(bytes * 2).min(MOST_BYTES);
            (seconds, rounds) = (0.0, 0);
            prepare(job, bytes)?;
        }
    }
    let sent = f64::from(rounds) * f64::from(ITERS) * bytes as f64;
    Ok((sent * 8.0 / seconds / 1e6, wrong))
}

/// Returns half the time of a broadcast of 8 bytes, in microseconds. This time is the median, over
/// the rounds, of the receiving rank's median in each round.
fn latency_us(job: &mut Job<Collectives>) -> Result<f64> {
    prepare(job, 8)?;
    let mut medians = Vec::new();
    for _ in 0..LATENCY_ROUNDS {
        medians.extend(round(job)?.get(1).map(|receiver| receiver.p50_s));
    }
    medians.sort_by(f64::total_cmp);
    let median = medians
        .get(medians.len() / 2)
        .context("no round was timed")?;
    Ok(median / 2.0 * 1e6)
}

fn prepare(job: &mut Job<Collectives>, bytes: usize) -> Result<()> {
    job.order_all(
        |_| Order::Prepare { count: bytes },
        answer!(Answer::Ready => ()),
    )
    .map(|_| ())
}

fn round(job: &mut Job<Collectives>) -> Result<Vec<Measurement>> {
    let measured = job.order_all(|_| Order::Go, answer!(Answer::Measured(one) => one))?;
    let are_figures = measured
        .iter()
        .all(|one| one.seconds.is_finite() && one.p50_s.is_finite());
    ensure!(are_figures, "a rank measured a time that is no number");
    Ok(measured)
}

/// Returns the smallest path MTU of the lanes that carry data, from the plugin's counters for the
/// local process `pid`.
fn path_mtu(pid: u32) -> Result<Option<u32>> {
    let reading = Reader::new(&[pid])
        .read_all()
        .context("the counters of the rank here")?;
    let records = reading.jobs.iter().flat_map(|job| &job.counters.records);
    let carrying =
        records.filter(|record| record.state == State::Carries && record.path_mtu_bytes > 0);
    Ok(carrying
        .filter_map(|record| u32::try_from(record.path_mtu_bytes).ok())
        .min())
}
