//! Makes findings from measured paths, without I/O.

use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::hosts::together::{Grade, Outcome, Path, Rate};
use crate::output::numbers::significant;

kinds! {
    SWITCH_MTU = Slow "switch-mtu": "a switch between two ports drops packets that both ports could send", "[switches.md](switches.md#mtu)";
    PAIR_UNREACHABLE = Slow "pair-unreachable": "a pair of rails delivers no packets", "`nccl-spark doctor` on both: cable, VLAN, MTU, ARP";
    WRONG_BYTES = Broken "wrong-bytes": "bytes arrived wrong", "stop using that rail, and report it";
    SLOW_RAIL = Slow "slow-rail": "one rail is slow and others are not, though its attributes are right", "as for `slow-node`";
    SLOW_NODE = Slow "slow-node": "every rail carries 8 to 25 Gb/s over fast links: a node needs a restart", "restart the node, or else power-cycle it";
    SLOW_PATH = Slow "slow-path": "a pair of rails is slow, and no other pair is much faster", "`nccl-spark doctor` on both; stop other jobs";
    SLOW_MERGED = Slow "slow-merged": "each rail is fast, and all together are slow", "`nccl-spark doctor` on both";
    FAIR_RAIL = Note "fair-rail": "a pair of rails carries 80 to 90 % of what it should", "nothing; other jobs may share the rail";
}

pub fn judge(host: &str, pairs: &[Path], merged: Option<&Path>) -> Vec<Finding> {
    let mut found = Vec::new();
    unreachable(host, pairs, merged, &mut found);
    wrong_bytes(pairs.iter().chain(merged), &mut found);
    small_switch_mtu(host, pairs, &mut found);
    if let Some(finding) = slow_node(host, pairs) {
        // This explains each slow rail, and the slow total.
        found.push(finding);
        return found;
    }
    slow(host, pairs, &mut found);
    found.extend(merged.and_then(|merged| slow_together(host, pairs, merged)));
    found
}

fn unreachable(host: &str, pairs: &[Path], merged: Option<&Path>, found: &mut Vec<Finding>) {
    let carries = |path: &Path| matches!(path.outcome, Outcome::Measured(_));
    for path in pairs.iter().chain(merged) {
        let Outcome::Failed(why) = &path.outcome else {
            continue;
        };
        let (severity, what) = match pairs.iter().any(carries) {
            true => (Severity::Slow, "other rails work"),
            false => (Severity::Broken, "no other rail works"),
        };
        let text = format!(
            "nothing gets through to {host} by {} ({what}): {why}",
            path.name()
        );
        found.push(
            PAIR_UNREACHABLE
                .finding(text)
                .at(severity)
                .cured_by("nccl-spark doctor    # on both: cable, port, address, VLAN, MTU, ARP"),
        );
    }
}

fn wrong_bytes<'a>(paths: impl Iterator<Item = &'a Path>, found: &mut Vec<Finding>) {
    for path in paths {
        if let Some(figures) = path.figures().filter(|figures| figures.wrong_bytes > 0) {
            let text = format!(
                "{} wrong bytes arrived by {}: data is not safe there",
                figures.wrong_bytes,
                path.name()
            );
            found.push(WRONG_BYTES.finding(text));
        }
    }
}

/// Finds switches that drop large packets. With such a switch the plugin uses smaller packets.
fn small_switch_mtu(host: &str, pairs: &[Path], found: &mut Vec<Finding>) {
    for path in pairs {
        let (Some((path_mtu, port_mtu)), [here], [there]) =
            (path.narrowed(), &path.here[..], &path.there[..])
        else {
            continue;
        };
        let text = format!(
            "packets above {path_mtu} bytes get lost between {here} here and {there} of {host}, whose ports have \
             path MTU {port_mtu}: the plugin uses path MTU {path_mtu} there"
        );
        found.push(SWITCH_MTU.finding(text).cured_by(SWITCH_PORTS));
    }
}

const SWITCH_PORTS: &str = "nccl-spark doctor --peer HOST    # after MTU 9000 (4200 at least) is set on every switch port between the two";

fn slow(host: &str, pairs: &[Path], found: &mut Vec<Finding>) {
    let measured: Vec<&Path> = pairs.iter().filter(|path| worst(path).is_some()).collect();
    let bad = measured
        .iter()
        .filter(|path| worst(path) == Some(Grade::Bad))
        .count();
    let best = measured
        .iter()
        .filter_map(|path| share_of_expected(path))
        .fold(0.0, f64::max);
    // A switch that drops large packets also makes a rail slow. Such a switch has its own finding.
    for path in measured.iter().filter(|path| path.narrowed().is_none()) {
        let (Some(figures), Some(expected), Some(own)) =
            (path.figures(), path.expected_mbps, share_of_expected(path))
        else {
            continue;
        };
        let rates = directions(host, figures.to_peer, figures.from_peer, expected);
        let names = path.name();
        let others = match (measured.len() - bad, own * MUCH_SLOWER < best) {
            (1, _) => Some("another rail carries the expected rate".to_owned()),
            (2.., _) => Some("other rails carry the expected rate".to_owned()),
            (0, true) => Some(format!(
                "another rail carries {:.0} % of the expected rate",
                best * 100.0
            )),
            (0, false) => None,
        };
        let finding = match (worst(path), others) {
            (Some(Grade::Bad), Some(others)) => SLOW_RAIL
                .finding(format!(
                    "{names} of {host} is slow though its link, port and MTU are as they should be: {rates}; {others}"
                ))
                .cured_by(POWER_CYCLE),
            (Some(Grade::Bad), None) => SLOW_PATH
                .finding(format!("{names} of {host} is slow: {rates}"))
                .cured_by("nccl-spark doctor    # on both: processors, idle states, pause frames, counters"),
            (Some(Grade::Fair), _) => FAIR_RAIL.finding(format!("{names} of {host} is below 90 %: {rates}")),
            (Some(Grade::Good) | None, _) => continue,
        };
        found.push(finding);
    }
}

/// Finds a node whose functions all carry about 13 Gb/s, although links, ports and MTU are right.
/// Five owners published such cases (12.7 to 13.4 Gb/s for each function). A restart cured one, and
/// a power cycle others.
fn slow_node(host: &str, pairs: &[Path]) -> Option<Finding> {
    const SICK_MBPS: std::ops::RangeInclusive<f64> = 8e3..=25e3;
    const FAST_MBPS: f64 = 80e3;
    let rate = |path: &Path| {
        let figures = path.figures()?;
        let is_fast_link = path.expected_mbps? >= FAST_MBPS && path.narrowed().is_none();
        is_fast_link.then(|| figures.to_peer.mbps.min(figures.from_peer.mbps))
    };
    let rates: Vec<f64> = pairs.iter().filter_map(rate).collect();
    if rates.is_empty()
        || rates.len() < pairs.len()
        || !rates.iter().all(|rate| SICK_MBPS.contains(rate))
    {
        return None;
    }
    let texts: Vec<String> = rates.iter().map(|mbps| significant(mbps / 1e3)).collect();
    let text = format!(
        "every rail to {host} is slow, though links, ports and MTU are as they should be: {} Gb/s. This is a state of one \
         of the two nodes that a restart, or else a power cycle, has cured; `doctor --peer` between each and a third \
         host shows which node",
        texts.join(", ")
    );
    Some(SLOW_NODE.finding(text).cured_by(
        "sudo reboot    # that node; if it stays slow: sudo poweroff, then the power cable out for a minute, the network cable in",
    ))
}

/// If all rails are slower than expected, slow processors or a switch may be the cause. But a rail
/// that is more than this many times slower than the best rail has a fault of its own.
const MUCH_SLOWER: f64 = 3.0;

fn worst(path: &Path) -> Option<Grade> {
    path.figures()
        .and_then(|figures| figures.to_peer.grade.max(figures.from_peer.grade))
}

fn share_of_expected(path: &Path) -> Option<f64> {
    let figures = path.figures()?;
    let expected = path.expected_mbps.filter(|expected| *expected > 0.0)?;
    Some(figures.to_peer.mbps.min(figures.from_peer.mbps) / expected)
}

/// Cure for a firmware fault: after a replug, a rail carries only about 13 Gb/s, although its link
/// attributes are correct.
const POWER_CYCLE: &str = "sudo poweroff    # then the power cable out for a minute, the network cable in; on both machines";

fn slow_together(host: &str, pairs: &[Path], merged: &Path) -> Option<Finding> {
    let figures = merged.figures()?;
    let expected = merged.expected_mbps?;
    // A failed or slow rail has its own finding, which explains the slow total.
    let is_bad = |path: &Path| path.figures().is_none() || worst(path) == Some(Grade::Bad);
    if worst(merged)? != Grade::Bad || pairs.iter().any(is_bad) {
        return None;
    }
    let rates = directions(host, figures.to_peer, figures.from_peer, expected);
    let text =
        format!("all rails to {host} together are slow though each by itself is not: {rates}");
    let cure = "nccl-spark doctor    # on both: processors, PCIe payload, pause frames";
    Some(SLOW_MERGED.finding(text).cured_by(cure))
}

fn directions(host: &str, to: Rate, from: Rate, expected_mbps: f64) -> String {
    let one = |rate: Rate| {
        format!(
            "{} Gb/s ({:.0} %)",
            significant(rate.mbps / 1e3),
            rate.mbps / expected_mbps * 100.0
        )
    };
    format!(
        "{} to {host} and {} back of {} Gb/s",
        one(to),
        one(from),
        significant(expected_mbps / 1e3)
    )
}
