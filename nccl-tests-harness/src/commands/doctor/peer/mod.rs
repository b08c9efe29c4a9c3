//! `nccl-spark doctor --peer`: what is wrong between two hosts. It compares what both tell of themselves, and measures each pair of rails,
//! then all of them together.
//!
//! On the other host a partner (`partner`) waits on one address, for one doctor, with a token that is good for one connection
//! (`admission`), for five minutes at most. ssh starts it (`reach`), or a person does. The two talk in lines of JSON (`line`, `words`);
//! versions are compared, sizes and times have limits. `sheet`, `rail` and `neighbours` are what a host tells of itself; `compare`,
//! `grade` and `neighbours::judge` are pure. `measure` drives the plugin itself by two ranks, as NCCL would: no verbs code is here.
//!
//! A partner does for a doctor with the token what any user on its host may do: it tells what its own doctor sees, and starts ranks of
//! this program with its own plugin and rails. It takes no path and no variable from the other side.

mod admission;
mod compare;
mod grade;
mod host;
mod line;
mod measure;
mod neighbours;
mod partner;
mod rail;
mod reach;
mod sheet;
#[cfg(test)]
mod tests;
mod together;
mod words;

pub use rail::{Pair, RailSheet, pairs};
pub use reach::Peer;
pub use together::{Outcome, Path, Rate, Together};
pub use words::Token;

use super::answer::{Answer, Seen};
use super::finding::{Finding, Severity};
use super::id::Id;
use super::place::Place;
use crate::output::numbers::significant;
use crate::output::watch::Watch;
use crate::output::{self, plain};
use anyhow::{Context, Result, anyhow, bail};
use host::Host;
use measure::Course;
use neighbours::Neighbour;
use reach::Partner;
use std::io::Write;
use std::path::Path as File;
use std::time::{Duration, Instant};
use words::{Ask, Told};

/// How long a partner may take to answer a question that is no measurement.
const ANSWER: Duration = Duration::from_secs(10);

/// Waits as a partner for a doctor on another host and serves it.
///
/// # Errors
/// When nobody comes by `end`, or the doctor that came is gone or sends nonsense.
pub fn serve(
    waits: Waits<'_>,
    place: &Place,
    answer: &Answer,
    seen: &Seen,
    program: &File,
    end: Instant,
) -> Result<()> {
    let address = partner::address(waits.interface, waits.ssh_connection)?;
    let host = Host::new(place, answer, seen, program)?;
    if waits.is_attached {
        partner::end_with_input();
    }
    partner::run(&host, place, address, program, end)
}

/// How a partner waits.
#[derive(Debug, Clone, Copy)]
pub struct Waits<'a> {
    /// The interface or address that it listens on.
    pub interface: Option<&'a str>,
    /// `SSH_CONNECTION`, where ssh started it.
    pub ssh_connection: Option<&'a str>,
    /// It ends when its standard input does.
    pub is_attached: bool,
}

/// Examines a peer, and adds what was found to the answer for this host.
///
/// # Errors
/// When the peer cannot be reached or tells nothing of itself. If it goes away later, that is a finding.
pub fn examine(
    peer: &Peer,
    place: &Place,
    answer: &mut Answer,
    seen: &Seen,
    program: &File,
    end: Instant,
) -> Result<()> {
    let host = Host::new(place, answer, seen, program)?;
    let mut partner = peer.reach(end)?;
    partner.line.say(&Ask::Sheet)?;
    let Told::Sheet(there) = partner.line.hear(ANSWER)? else {
        bail!("{} answered something else than it was asked", partner.name)
    };
    let mut there = there.received().map_err(|why| anyhow!("{}: {why}", partner.name))?;
    // Two names are needed in sentences.
    if there.host == host.sheet.host {
        there.host = format!("{} (the peer)", there.host);
    }
    let pairs = pairs(&host.sheet.rails, &there.rails);
    let mut found = compare::compare(&host.sheet, &there, &pairs);
    let watch = Watch::start("measurements", || pairs.len() as u64 + 1);
    let course = Course { host: &host, there: &there, partner, program, end, watch };
    let (paths, lost) = measured(course, &pairs, place, &mut found);
    let (alone, merged) = paths.split_at(paths.len().min(pairs.len()));
    found.extend(grade::judge(&there.host, alone, merged.first()));
    if let Some(error) = lost {
        let text = format!("the partner on {} ended before all was measured: {error:#}", there.host);
        found.push(Finding::new(Severity::Broken, Id::PeerLost, text).cured_by("nccl-spark doctor    # there"));
    }
    answer.findings.extend(found);
    answer.peer = Some(Together { host: there.host, verdict: there.verdict, findings: there.findings, paths });
    answer.settle();
    Ok(())
}

/// Each pair by itself, then all together, and the addresses that both hosts have for each other by then. With it, why that ended before.
fn measured(
    mut course: Course<'_>,
    pairs: &[Pair],
    place: &Place,
    found: &mut Vec<Finding>,
) -> (Vec<Path>, Option<anyhow::Error>) {
    let mut paths = Vec::new();
    let (here, there, watch) = (&course.host.sheet, course.there, course.watch.clone());
    if pairs.is_empty() || here.program != there.program {
        return (paths, None);
    }
    let mut ways: Vec<&[Pair]> = pairs.chunks(1).collect();
    ways.extend((pairs.len() > 1).then_some(pairs));
    let mut all = || -> Result<()> {
        for (number, way) in ways.iter().enumerate() {
            let path = course.measure(way)?;
            watch.step();
            // Nobody is left to tell when this fails.
            let _ = writeln!(watch.over(output::error()), "# {}/{} {}", number + 1, ways.len(), summary(&path));
            paths.push(path);
        }
        let table = neighbours_of(&mut course.partner)?;
        let ours: Vec<(usize, usize)> = pairs.iter().map(|pair| (pair.here, pair.there)).collect();
        found.extend(neighbours::judge(here, &neighbours::read(place), there, &ours));
        found.extend(neighbours::judge(there, &table, here, &neighbours::turned(pairs)));
        Ok(())
    };
    let outcome = all();
    watch.end();
    (paths, outcome.err())
}

fn neighbours_of(partner: &mut Partner) -> Result<Vec<Neighbour>> {
    partner.line.say(&Ask::Neighbours)?;
    match partner.line.hear(ANSWER).context("its ARP table")? {
        Told::Neighbours(table) => Ok(table),
        Told::Sheet(_) | Told::Ready { .. } | Told::Failed { .. } => {
            bail!("it answered something else than it was asked")
        }
    }
}

/// A path and what came of it, in a line.
pub fn summary(path: &Path) -> String {
    let rate = |rate: Rate| {
        let grade = rate
            .grade
            .zip(path.expected_mbps)
            .map(|(grade, expected)| format!(" ({:.0} %, {})", rate.mbps / expected * 100.0, grade.word()));
        format!("{} Gb/s{}", significant(rate.mbps / 1e3), grade.unwrap_or_default())
    };
    let what = match &path.outcome {
        Outcome::Measured(figures) => format!(
            "{} there, {} back, {} us",
            rate(figures.to_peer),
            rate(figures.from_peer),
            significant(figures.latency_us)
        ),
        Outcome::Failed(why) => format!("does not carry: {why}"),
        Outcome::NotMeasured(why) => format!("not measured: {why}"),
    };
    plain(&format!("{}: {what}", path.name()))
}
