//! Prints the tables of the report.

use crate::drive::{Counted, Phase};
use crate::options::Options;
use crate::profile::{Calls, Dump, Place};
use std::collections::BTreeMap;
use std::path::Path;

pub struct Costs {
    plugin: String,
    verbs: String,
    phases: Vec<(Phase, Dump)>,
}

/// Receives, sends and tests are counted separately in phases of their own, and together in another
/// phase. This is the largest relative difference between the sum of the separate counts and the
/// common count. A line with a larger difference is marked as noise.
const NOISE: f64 = 0.01;

impl Costs {
    pub fn of(plugin: &Path, verbs: &Path, phases: Vec<(Phase, Dump)>) -> Self {
        Self {
            plugin: plugin.display().to_string(),
            verbs: verbs.display().to_string(),
            phases,
        }
    }

    fn sizes(&self) -> impl Iterator<Item = &Phase> {
        self.phases
            .iter()
            .map(|(phase, _)| phase)
            .filter(|phase| phase.counted == Counted::All)
    }

    fn find(&self, like: &Phase, counted: Counted) -> Option<&(Phase, Dump)> {
        let same = |phase: &Phase| {
            (phase.bytes, phase.window, phase.counted) == (like.bytes, like.window, counted)
        };
        self.phases.iter().find(|(phase, _)| same(phase))
    }

    /// Instructions of the plugin's own code for each message.
    fn own(&self, like: &Phase, counted: Counted) -> Option<f64> {
        let (phase, dump) = self.find(like, counted)?;
        let refused = match counted {
            Counted::All | Counted::Send => {
                phase.early as f64 * self.repeated_calls(Counted::Refused)?
            }
            _ => 0.0,
        };
        Some((dump.of(&self.plugin) as f64 - refused) / phase.messages as f64)
    }

    /// Instructions of a call that has no effect.
    fn repeated_calls(&self, counted: Counted) -> Option<f64> {
        let (phase, dump) = self
            .phases
            .iter()
            .find(|(phase, _)| phase.counted == counted)?;
        Some(a_message(dump.of(&self.plugin), phase))
    }

    fn libc(&self, like: &Phase) -> Option<f64> {
        let but = [self.verbs.as_str()];
        self.find(like, Counted::All).map(|(phase, dump)| {
            a_message(
                dump.leaving(&self.plugin, &but)
                    .map(|(_, calls)| calls.instructions)
                    .sum(),
                phase,
            )
        })
    }

    fn verbs(&self, like: &Phase) -> Option<f64> {
        self.find(like, Counted::All)
            .map(|(phase, dump)| a_message(dump.of(&self.verbs), phase))
    }
}

fn a_message(count: u64, phase: &Phase) -> f64 {
    count as f64 / phase.messages as f64
}

pub fn heading(rails: usize, plugin: &Path, against: Option<&Path>) -> String {
    let against = against
        .map(|path| format!(", against {}", path.display()))
        .unwrap_or_default();
    format!(
        "\n{rails} rail{}: instructions a message of {}{against}",
        if rails == 1 { "" } else { "s" },
        plugin.display()
    )
}

/// Prints a line for each size and window. Returns false if the allowed ratio or the allowed number
/// of instructions was exceeded.
pub fn table(ours: &Costs, theirs: Option<&Costs>, options: &Options) -> bool {
    let mut kept = true;
    println!(
        "in flight  bytes |   plugin  irecv  isend   test |  libc   verbs  tests |  against  irecv  isend   test  tests | ratio"
    );
    for phase in ours.sizes() {
        let parts = |costs: &Costs| {
            let own = |counted| costs.own(phase, counted).unwrap_or_default();
            [Counted::All, Counted::Receive, Counted::Send, Counted::Test].map(own)
        };
        let [all, receive, send, test] = parts(ours);
        let libc = ours.libc(phase).unwrap_or_default();
        let verbs = ours.verbs(phase).unwrap_or_default();
        let tests = phase.tests as f64 / phase.messages as f64;
        let mut line = format!(
            "{:9} {:6} | {all:8.1} {receive:6.1} {send:6.1} {test:6.1} | {libc:5.1} {verbs:7.0} {tests:6.2} |",
            phase.window, phase.bytes
        );
        let mut notes = noise(ours, phase, "plugin");
        if let Some(theirs) = theirs
            && let Some((other, _)) = theirs.find(phase, Counted::All)
        {
            let [against, receive, send, test] = parts(theirs);
            let tests = other.tests as f64 / other.messages as f64;
            let ratio = all / against;
            line += &format!(
                " {against:8.1} {receive:6.1} {send:6.1} {test:6.1} {tests:6.2} | {ratio:5.2}"
            );
            if options.at_most.is_some_and(|most| ratio > most) {
                kept = false;
                line += " too many";
            }
            notes += &noise(theirs, other, "against");
        }
        if options.limit.is_some_and(|limit| all > limit) {
            kept = false;
            line += " over the limit";
        }
        println!("{line}{notes}");
    }
    for (counted, what) in [
        (Counted::Fruitless, "a test without result"),
        (Counted::Refused, "an isend without a grant"),
    ] {
        let other = theirs.and_then(|costs| costs.repeated_calls(counted));
        let other = other
            .map(|cost| format!(", against {cost:.1}"))
            .unwrap_or_default();
        println!(
            "{what}: {:.1}{other}",
            ours.repeated_calls(counted).unwrap_or_default()
        );
    }
    kept
}

fn noise(costs: &Costs, phase: &Phase, who: &str) -> String {
    let one_by_one = [Counted::Receive, Counted::Send, Counted::Test];
    let sum: f64 = one_by_one
        .iter()
        .filter_map(|counted| costs.own(phase, *counted))
        .sum();
    let all = costs.own(phase, Counted::All).unwrap_or_default();
    if (sum - all).abs() > NOISE * all {
        format!(" [{who}: noise, one by one {sum:.1}]")
    } else {
        String::new()
    }
}

/// Prints, for each size and window, the `most` functions and the `most` source files that cost
/// most (much code is inlined, so a function's cost comes from several files), and the plugin's
/// calls into libraries other than verbs.
pub fn functions(costs: &Costs, most: usize) {
    if most == 0 {
        return;
    }
    println!("\nfunctions of {}, instructions a message", costs.plugin);
    for phase in costs.sizes() {
        let Some((_, dump)) = costs.find(phase, Counted::All) else {
            continue;
        };
        println!("  {} bytes, {} in flight", phase.bytes, phase.window);
        let own = |name: fn(&Place) -> &str| {
            let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
            for (place, cost) in dump
                .own
                .iter()
                .filter(|(place, _)| place.object == costs.plugin)
            {
                *sums.entry(name(place)).or_default() += cost;
            }
            let mut sums: Vec<_> = sums.into_iter().collect();
            sums.sort_by_key(|(_, cost)| std::cmp::Reverse(*cost));
            sums.into_iter().take(most)
        };
        for (function, cost) in own(|place| &place.function) {
            println!("    {:8.1}  {function}", a_message(cost, phase));
        }
        for (source, cost) in own(|place| &place.source) {
            println!("    {:8.1}  from {source}", a_message(cost, phase));
        }
        let mut outside: BTreeMap<&str, Calls> = BTreeMap::new();
        let but = [costs.verbs.as_str()];
        for (function, calls) in dump.leaving(&costs.plugin, &but) {
            let sum = outside.entry(function).or_default();
            sum.count += calls.count;
            sum.instructions += calls.instructions;
        }
        for (function, calls) in outside {
            let count = a_message(calls.count, phase);
            let cost = a_message(calls.instructions, phase);
            println!("    {cost:8.1}  in {count:.2} calls of {function}, not the plugin's");
        }
    }
}
