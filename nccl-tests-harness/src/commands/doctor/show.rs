//! The answer as text for a person, in 80 columns where words allow it.

use super::answer::Answer;
use super::finding::{Severity, Verdict};
use super::peer::{self, Together};
use anyhow::Result;
use nccl_net_spark::rails::folded;
use std::io::Write;

/// Prints an answer: the verdict, the findings, the variables, the picture, the facts, and what was not seen.
pub fn show(answer: &Answer, is_env_alone: bool, mut out: impl Write) -> Result<()> {
    write!(out, "{}", text(answer, is_env_alone))?;
    Ok(out.flush()?)
}

fn text(answer: &Answer, is_env_alone: bool) -> String {
    let mut page = folded("", &verdict(answer, is_env_alone));
    for finding in &answer.findings {
        page += "\n";
        page += &folded("    ", &format!("{}: {} [{}]", finding.severity.word(), finding.text, finding.id));
        if let Some(cure) = &finding.cure {
            // Not folded: it is to be copied.
            page += &format!("    $ {cure}\n");
        }
    }
    if let Some(peer) = &answer.peer {
        page += &of_peer(peer);
    }
    if !answer.variables.is_empty() {
        page += "\nVariables:\n";
        for one in &answer.variables {
            let head = format!("  {}={}  {}: {}", one.name, one.value, one.effect.word(), one.text);
            page += &folded("      ", &head);
        }
    }
    if !answer.picture.is_empty() {
        page += "\nRails:\n";
        for line in &answer.picture {
            page += &format!("{line}\n");
        }
    }
    if !answer.facts.is_empty() {
        page += "\nRead:\n";
        for fact in &answer.facts {
            page += &folded("      ", &format!("  {}: {}", fact.name, fact.value));
        }
    }
    if !answer.not_seen.is_empty() {
        page += "\nNot seen:\n";
        for one in &answer.not_seen {
            page += &folded("      ", &format!("  {}: {}", one.what, one.why));
        }
    }
    page
}

fn of_peer(peer: &Together) -> String {
    let mut page = format!("\nBetween here and {}:\n", peer.host);
    if peer.paths.is_empty() {
        page += "  nothing was measured\n";
    }
    for path in &peer.paths {
        page += &folded("      ", &format!("  {}", peer::summary(path)));
    }
    page += &match peer.findings.len() {
        0 => format!("\nOn {} nothing is wrong by itself.\n", peer.host),
        _ => format!("\nOn {}:\n", peer.host),
    };
    for finding in &peer.findings {
        page += &folded("      ", &format!("  {}: {} [{}]", finding.severity.word(), finding.text, finding.id));
        if let Some(cure) = &finding.cure {
            page += &format!("      $ {cure}\n");
        }
    }
    page
}

fn verdict(answer: &Answer, is_env_alone: bool) -> String {
    let there = answer.peer.iter().flat_map(|peer| &peer.findings).map(|finding| finding.severity);
    let all: Vec<Severity> = answer.findings.iter().map(|finding| finding.severity).chain(there).collect();
    let count = |severity| all.iter().filter(|one| **one == severity).count();
    let what = if is_env_alone { "With these variables the plugin" } else { "The plugin" };
    let (broken, slow, fragile) = (count(Severity::Broken), count(Severity::Slow), count(Severity::Fragile));
    let findings = |count: usize| if count == 1 { "1 finding".to_owned() } else { format!("{count} findings") };
    match answer.verdict {
        Verdict::Good if is_env_alone => format!("{what} is not kept out."),
        Verdict::Good if answer.peer.is_some() => format!("{what} works here and there, as far as this was seen."),
        Verdict::Good => format!("{what} works here, as far as this was seen."),
        Verdict::Impaired => {
            let kinds = [(slow, "slow"), (fragile, "fragile")].into_iter().filter(|(count, _)| *count > 0);
            let kinds: Vec<String> = kinds.map(|(count, kind)| format!("{} {kind}", findings(count))).collect();
            format!("{what} works, but: {}.", kinds.join(", "))
        }
        Verdict::Broken => format!("{what} does not work: {}.", findings(broken)),
    }
}
