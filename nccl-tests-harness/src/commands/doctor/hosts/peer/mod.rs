//! `nccl-spark doctor --peer`: findings about two hosts together. Compares the results of both
//! hosts' doctors. Measures each pair of rails alone, then all pairs together.
//!
//! On the other host, ssh (`reach`) or the user starts a partner. The partner listens on one
//! address for one doctor, for at most five minutes. Doctor and partner prove a token to each other
//! (`ranks::token_port`). The control connection of each rank there has its own port, which asks
//! for the same token. The token itself is never sent. The partner sends the result of its host's
//! doctor (a `sheet`), and starts a rank for each direction of a measurement. The ranks run this
//! program's broadcast (`measure`), so this module transfers no data itself. `compare`, `grade` and
//! `neighbours::judge` do no I/O.
//!
//! With the token, a doctor can do two things: get the result of that host's doctor, and run ranks
//! of this program with that host's plugin and rails. Any user of that host can do the same. The
//! partner accepts no path and no variable from the doctor. Each side limits the size of the
//! other's messages before it uses them (`Sheet::received`, `ranks::line`).

pub mod compare;
pub mod grade;
mod host;
mod measure;
mod messages;
pub mod neighbours;
mod partner;
mod reach;
mod sheet;
#[cfg(test)]
mod tests;

pub use host::Host;
pub use partner::{address, end_with_input, run as serve};
pub use reach::Peer;

use super::rail::{Pair, pairs};
use super::together::{Path, PeerResult};
use crate::commands::doctor::answer::Answer;
use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::finding::kinds;
use crate::output;
use crate::output::watch::Watch;
use anyhow::{Result, anyhow};
use measure::Measurements;
use messages::Ask;
use reach::Partner;
use sheet::Sheet;
use std::io::Write;
use std::path::Path as File;
use std::time::Instant;

kinds! {
    PEER_LOST = Broken "peer-lost": "the partner ended before all rail pairs were measured", "the partner's output on that host";
}

/// Examines a peer. Adds the results to `answer`, which has the results for this host.
///
/// # Errors
/// The peer cannot be reached, or sends no sheet. A later end of the partner is a finding, not an
/// error.
pub fn examine(
    peer: &Peer,
    host: &Host,
    answer: &mut Answer,
    program: &File,
    end: Instant,
) -> Result<()> {
    let mut partner = peer.reach(end)?;
    let mut there = sheet_of(&mut partner)?;
    // The hosts may have the same name, but the text of a finding must tell them apart.
    if there.host == host.sheet.host {
        there.host = format!("{} (the peer)", there.host);
    }
    let pairs = pairs(&host.sheet.rails, &there.rails, |rail, own, peer| {
        host.has_route(rail, own, peer)
    });
    let mut found = compare::compare(&host.sheet, &there, &pairs);
    let watch = Watch::start("measurements", || pairs.len() as u64 + 1);
    let measurements = Measurements {
        host,
        there: &there,
        partner,
        program,
        end,
        watch,
    };
    let (paths, lost) = measured(measurements, &pairs, &mut found);
    let (alone, merged) = paths.split_at(paths.len().min(pairs.len()));
    found.extend(grade::judge(&there.host, alone, merged.first()));
    if let Some(error) = lost {
        let text = format!(
            "the partner on {} ended before all rail pairs were measured: {error:#}",
            there.host
        );
        found.push(
            PEER_LOST
                .finding(text)
                .cured_by("nccl-spark doctor    # there"),
        );
    }
    answer.findings.extend(found);
    answer.peer = Some(PeerResult {
        host: there.host,
        verdict: there.verdict,
        findings: there.findings,
        paths,
    });
    answer.settle();
    Ok(())
}

/// Measures each pair alone, then all pairs together, and judges the ARP tables of both hosts. Does
/// none of this if there is no pair, or if the hosts have different versions of nccl-spark. Returns
/// the measured paths, and the error that ended the measurements early, if any.
fn measured(
    mut measurements: Measurements<'_>,
    pairs: &[Pair],
    found: &mut Vec<Finding>,
) -> (Vec<Path>, Option<anyhow::Error>) {
    let mut paths = Vec::new();
    let here = &measurements.host.sheet;
    let there = measurements.there;
    let watch = measurements.watch.clone();
    if pairs.is_empty() || here.program != there.program {
        return (paths, None);
    }
    let mut selections: Vec<&[Pair]> = pairs.chunks(1).collect();
    selections.extend((pairs.len() > 1).then_some(pairs));
    let mut all = || -> Result<()> {
        for (number, selection) in selections.iter().enumerate() {
            let path = measurements.measure(selection)?;
            watch.step();
            // The measurements continue even if standard error is closed.
            let _ = writeln!(
                watch.over(output::error()),
                "# {}/{} {}",
                number + 1,
                selections.len(),
                path.summary()
            );
            paths.push(path);
        }
        let table = sheet_of(&mut measurements.partner)?.neighbours;
        let ours: Vec<(usize, usize)> = pairs.iter().map(|pair| (pair.here, pair.there)).collect();
        found.extend(neighbours::judge(
            here,
            &measurements.host.sheet_with_arp_table().neighbours,
            there,
            &ours,
        ));
        found.extend(neighbours::judge(
            there,
            &table,
            here,
            &neighbours::swapped(pairs),
        ));
        Ok(())
    };
    let outcome = all();
    watch.end();
    (paths, outcome.err())
}

fn sheet_of(partner: &mut Partner) -> Result<Sheet> {
    let sheet: Sheet = partner.ask(&Ask::Sheet)?;
    sheet
        .received()
        .map_err(|why| anyhow!("{}: {why}", partner.name))
}
