//! Measures how long the NIC of each rail needs to report a peer that no longer answers.
//!
//! Two queue pairs of one rail are connected to each other through the rail's own address, with the
//! plugin's attributes. Once a write has arrived, the second queue pair is destroyed, so that
//! nothing answers the next write. The retransmission timer is the sender's, so the result does not
//! depend on where the peer is, and no other host is needed.
//!
//! For a copied machine, `answers/silence` has a line for each rail: its name, and the seconds. A
//! `>` before them means that the NIC had reported nothing then.

use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::hosts::rail;
use crate::commands::doctor::look::variables::Variable;
use crate::commands::doctor::place::Place;
use host::config::{Config, QpConfig};
use host::error::Error;
use host::rails::{Rail, Survey};
use serde::{Serialize, Serializer};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use verbs::{
    Access, Completion, CompletionBuffer, Context, Cq, Mr, OpenPorts, Path, Pd, Qp, QpCaps, Region,
    Remote, Write,
};

/// Longest time that one rail is measured.
const MOST: Duration = Duration::from_secs(60);
/// Interval between polls, and so the precision of the result.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Number of bytes of a write.
const BYTES: usize = 8;
/// Number of the first packet in each direction.
const PSN: u32 = 1;
/// Room for the two writes.
const CAPS: QpCaps = QpCaps {
    send_requests: 2,
    receive_requests: 1,
    inline_bytes: 0,
};

/// The rails' times to report a silent peer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Silence {
    /// `NCCL_IB_TIMEOUT`.
    pub timeout: u8,
    /// `NCCL_IB_RETRY_CNT`.
    pub retry_count: u8,
    /// Time in seconds by the InfiniBand specification.
    pub specified_s: f64,
    pub rails: Vec<RailSilence>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RailSilence {
    /// Device and port, in the form of `NCCL_IB_HCA`.
    pub rail: String,
    #[serde(skip)]
    pub device: String,
    #[serde(flatten)]
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The NIC reported the silent peer after this number of seconds.
    ReportedS(f64),
    /// The NIC had not reported it after this number of seconds, when time was up.
    SilentS(f64),
    /// The rail was not measured.
    #[serde(serialize_with = "as_text")]
    Failed(Obstacle),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReportedS(seconds) => write!(f, "after {seconds:.1} s"),
            Self::SilentS(seconds) => write!(f, "not within {seconds:.1} s"),
            Self::Failed(obstacle) => write!(f, "not measured: {obstacle}"),
        }
    }
}

/// Reason why a rail was not measured.
#[derive(Debug, Clone, PartialEq)]
pub enum Obstacle {
    /// libibverbs does not list the rail's port.
    NoDevice,
    /// The survey gives the rail no address.
    NoAddress,
    Verbs(Error),
    /// The first write failed, although its queue pair existed.
    NotDelivered(&'static str),
    /// The first write had no completion when time was up.
    NotDeliveredInTime,
    /// The write to the destroyed queue pair was acknowledged.
    Acknowledged,
    /// The write to the destroyed queue pair failed for another reason than the silence.
    OtherFailure(&'static str),
    /// The thread that measured has panicked.
    Panicked,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => f.write_str("libibverbs does not list its port"),
            Self::NoAddress => f.write_str("it has no address"),
            Self::Verbs(error) => error.fmt(f),
            Self::NotDelivered(status) => {
                write!(f, "a write to its own address failed: {status}")
            }
            Self::NotDeliveredInTime => {
                f.write_str("a write to its own address was not acknowledged before time was up")
            }
            Self::Acknowledged => f.write_str("a write to a destroyed queue pair was acknowledged"),
            Self::OtherFailure(status) => write!(
                f,
                "a write to a destroyed queue pair failed, but not for its silence: {status}"
            ),
            Self::Panicked => f.write_str("an internal error, shown above"),
        }
    }
}

fn as_text<S: Serializer>(obstacle: &Obstacle, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(obstacle)
}

/// Measures all rails at the same time, with the settings that `variables` give. Takes at most
/// `limit`.
pub fn silence(
    place: &Place,
    variables: &[Variable],
    survey: &Survey,
    limit: Duration,
    not_seen: &mut Vec<NotSeen>,
) -> Option<Silence> {
    let config = super::config(variables);
    let rails = if place.is_live() {
        measure_all(&config, survey, Instant::now() + limit.min(MOST))
    } else {
        of_copy(place, survey)
    };
    let rails = rails
        .map_err(|why| {
            not_seen.push(NotSeen::new("how late the NICs report a silent peer", why));
        })
        .ok()?;
    let QpConfig {
        timeout,
        retry_count,
        ..
    } = config.qp;
    Some(Silence {
        timeout,
        retry_count,
        specified_s: config.qp.silence_limit().as_secs_f64(),
        rails,
    })
}

fn of_rail(rail: &Rail, outcome: Outcome) -> RailSilence {
    RailSilence {
        rail: rail::name(rail),
        device: rail.device.clone(),
        outcome,
    }
}

fn of_copy(place: &Place, survey: &Survey) -> Result<Vec<RailSilence>, String> {
    let text = place
        .text("/answers/silence")
        .ok_or("the copy has no answers/silence")?;
    let outcome = |rail: &Rail| {
        let name = rail::name(rail);
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        let (_, seconds) = lines.find(|(known, _)| *known == name)?;
        match seconds.strip_prefix('>') {
            Some(silent) => silent.parse().ok().map(Outcome::SilentS),
            None => seconds.parse().ok().map(Outcome::ReportedS),
        }
    };
    let one = |rail: &Rail| Some(of_rail(rail, outcome(rail)?));
    Ok(survey.rails.iter().filter_map(one).collect())
}

fn measure_all(
    config: &Config,
    survey: &Survey,
    until: Instant,
) -> Result<Vec<RailSilence>, String> {
    let ports = OpenPorts::new(&config.rails.verbs_library).map_err(|error| error.to_string())?;
    Ok(std::thread::scope(|scope| {
        let start = |rail| {
            let ports = &ports;
            (
                rail,
                scope.spawn(move || measure(ports, rail, config, until)),
            )
        };
        let probes: Vec<_> = survey.rails.iter().map(start).collect();
        let ended = probes.into_iter().map(|(rail, probe)| {
            let outcome = probe.join().unwrap_or(Err(Obstacle::Panicked));
            of_rail(rail, outcome.unwrap_or_else(Outcome::Failed))
        });
        ended.collect()
    }))
}

/// Measures one rail.
///
/// # Errors
/// The reason why there is no result.
fn measure(
    ports: &OpenPorts,
    rail: &Rail,
    config: &Config,
    until: Instant,
) -> Result<Outcome, Obstacle> {
    let context = ports
        .context(&rail.device, rail.port)
        .ok_or(Obstacle::NoDevice)?;
    let (mut writer, target) = Writer::connected(context, rail, config)?;
    writer.write()?;
    match writer.completion(until)? {
        Some(done) if done.status() == 0 => {}
        Some(failed) => return Err(Obstacle::NotDelivered(failed.status_text())),
        None => return Err(Obstacle::NotDeliveredInTime),
    }
    drop(target);
    let begun = Instant::now();
    writer.write()?;
    let completion = writer.completion(until)?;
    let seconds = begun.elapsed().as_secs_f64();
    match completion {
        Some(failed) if failed.is_unacknowledged() => Ok(Outcome::ReportedS(seconds)),
        Some(done) if done.status() == 0 => Err(Obstacle::Acknowledged),
        Some(failed) => Err(Obstacle::OtherFailure(failed.status_text())),
        None => Ok(Outcome::SilentS(seconds)),
    }
}

/// The queue pair that writes, with its memory. The fields drop in this order.
struct Writer {
    qp: Qp,
    cq: Cq,
    memory: Mr,
    region: Arc<Region>,
}

impl Writer {
    /// Returns a queue pair of a rail, and the queue pair of the same rail that it is connected to.
    fn connected(
        context: &Arc<Context>,
        rail: &Rail,
        config: &Config,
    ) -> Result<(Self, Qp), Obstacle> {
        let pd = Pd::new(context)?;
        let cq = Cq::new(context, 2 * (CAPS.send_requests + CAPS.receive_requests))?;
        let region = Region::new(BYTES)?;
        let memory = region.register(&pd, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let mut qp = Qp::new(&pd, &cq, CAPS)?;
        let mut target = Qp::new(&pd, &cq, CAPS)?;
        connect(&mut target, qp.number(), rail, config)?;
        connect(&mut qp, target.number(), rail, config)?;
        let writer = Self {
            qp,
            cq,
            memory,
            region,
        };
        Ok((writer, target))
    }

    fn write(&mut self) -> Result<(), Error> {
        self.qp.write(&Write {
            local_addr: self.region.addr(),
            bytes: BYTES as u32,
            lkey: self.memory.lkey(),
            remote: Remote {
                addr: self.region.addr(),
                rkey: self.memory.rkey(),
            },
            immediate: None,
            wr_id: 0,
            signaled: true,
        })?;
        Ok(())
    }

    /// Returns the next completion of a write, or `None` if there is none before `until`.
    fn completion(&mut self, until: Instant) -> Result<Option<Completion>, Error> {
        let mut buffer = CompletionBuffer::new();
        loop {
            // A poll after the time limit finds a completion that came in the last interval.
            let is_last = Instant::now() >= until;
            let found = self.cq.poll(&mut buffer)?;
            let own = self.qp.number();
            let completion = found.iter().find(|one| one.qp_num() == own).copied();
            if completion.is_some() || is_last {
                return Ok(completion);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

fn connect(qp: &mut Qp, remote_qp: u32, rail: &Rail, config: &Config) -> Result<(), Obstacle> {
    let address = rail.addresses.first().ok_or(Obstacle::NoAddress)?;
    qp.init(rail.port)?;
    qp.ready_to_receive(&Path {
        port: rail.port,
        mtu_bytes: rail.path_mtu_bytes,
        remote_qp,
        receive_psn: PSN,
        gid_index: address.gid_index,
        remote_gid: address.gid,
        traffic_class: config.setup.traffic_class.unwrap_or(0),
        service_level: config.setup.service_level.unwrap_or(0),
        flow_label: config.qp.flow_label,
    })?;
    qp.ready_to_send(config.qp, PSN)?;
    Ok(())
}

impl From<Error> for Obstacle {
    fn from(error: Error) -> Self {
        Self::Verbs(error)
    }
}
