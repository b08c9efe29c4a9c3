//! Prints the doctor's results as text.

pub(super) mod picture;

use super::answer::Answer;
use super::finding::{Finding, Severity, Verdict};
use super::hosts::PeerResult;
use super::look::silence::Silence;
use crate::output::{self, Verbosity, numbers, plain};
use anyhow::Result;
use host::rails::wrapped;
use std::io::Write;

/// Prints the results. With `-v`, also the facts, and the facts that could not be read.
pub fn show(answer: &Answer, is_env_alone: bool, mut out: impl Write) -> Result<()> {
    let is_verbose = matches!(output::verbosity(), Verbosity::Verbose | Verbosity::Trace);
    write!(
        out,
        "{}",
        text(answer, is_env_alone, is_verbose, output::columns())
    )?;
    Ok(out.flush()?)
}

fn text(answer: &Answer, is_env_alone: bool, is_verbose: bool, columns: usize) -> String {
    let mut page = wrapped(columns, "", &verdict(answer, is_env_alone));
    let line = |indent: &str, text: &str| wrapped(columns, indent, &plain(text));
    for finding in &answer.findings {
        page += &format!("\n{}", of_finding(finding, "", &line));
    }
    if let Some(silence) = &answer.silence {
        page += &of_silence(silence, &line);
    }
    if let Some(peer) = &answer.peer {
        page += &of_peer(peer, &line);
    }
    if !answer.variables.is_empty() {
        page += "\nVariables:\n";
        for one in &answer.variables {
            let head = format!(
                "  {}={}  {}: {}",
                one.name,
                one.value,
                one.effect.word(),
                one.text
            );
            page += &line("      ", &head);
        }
    }
    if !answer.picture.is_empty() {
        page += "\nRails:\n";
        for drawn in &answer.picture {
            page += &format!("{}\n", plain(drawn));
        }
    }
    page + &if is_verbose {
        read(answer, &line)
    } else {
        unshown(answer, &line)
    }
}

fn read(answer: &Answer, line: &dyn Fn(&str, &str) -> String) -> String {
    let facts = answer
        .facts
        .iter()
        .map(|fact| format!("  {}: {}", fact.name, fact.value));
    let not_seen = answer
        .not_seen
        .iter()
        .map(|one| format!("  {}: {}", one.what, one.why));
    let section = |head: &str, rows: Vec<String>| match rows.is_empty() {
        true => String::new(),
        false => {
            format!("\n{head}:\n")
                + &rows
                    .iter()
                    .map(|row| line("      ", row))
                    .collect::<String>()
        }
    };
    section("Read", facts.collect()) + &section("Not seen", not_seen.collect())
}

fn unshown(answer: &Answer, line: &dyn Fn(&str, &str) -> String) -> String {
    let read = answer.facts.len();
    let not_seen = answer.not_seen.len();
    if read + not_seen == 0 {
        return String::new();
    }
    let remark =
        format!("# -v lists what was read ({read}) and what could not be seen ({not_seen}).");
    format!("\n{}", line("# ", &remark))
}

fn of_silence(silence: &Silence, line: &dyn Fn(&str, &str) -> String) -> String {
    let head = format!(
        "Time to report a silent peer, measured within each NIC (by the specification {:.1} s, with NCCL_IB_TIMEOUT={} \
         and NCCL_IB_RETRY_CNT={}):",
        silence.specified_s, silence.timeout, silence.retry_count
    );
    let rails = silence
        .rails
        .iter()
        .map(|rail| line("      ", &format!("  {}: {}", rail.rail, rail.outcome)));
    format!("\n{}", line("  ", &head)) + &rails.collect::<String>()
}

fn of_peer(peer: &PeerResult, line: &dyn Fn(&str, &str) -> String) -> String {
    let host = plain(&peer.host);
    let mut page = format!("\nBetween here and {host}:\n");
    if peer.paths.is_empty() {
        page += "  nothing was measured\n";
    }
    for path in &peer.paths {
        page += &line("      ", &format!("  {}", path.summary()));
    }
    page += &match peer.findings.len() {
        0 => format!("\nOn {host} nothing is wrong by itself.\n"),
        _ => format!("\nOn {host}:\n"),
    };
    page + &peer
        .findings
        .iter()
        .map(|finding| of_finding(finding, "  ", line))
        .collect::<String>()
}

fn of_finding(finding: &Finding, indent: &str, line: &dyn Fn(&str, &str) -> String) -> String {
    let text = format!(
        "{indent}{}: {} [{}]",
        finding.severity.word(),
        finding.text,
        finding.id
    );
    // The cure is not wrapped, so that users can copy it.
    let cure = finding
        .cure
        .as_ref()
        .map(|cure| format!("{indent}    $ {}\n", plain(cure)));
    let now = finding.now.as_ref().map(|now| {
        let lasts = if now.contains(" # ") {
            ", until the next boot"
        } else {
            "    # until the next boot"
        };
        format!("{indent}    $ {}{lasts}\n", plain(now))
    });
    line(&format!("{indent}    "), &text) + &cure.unwrap_or_default() + &now.unwrap_or_default()
}

fn verdict(answer: &Answer, is_env_alone: bool) -> String {
    let there = answer
        .peer
        .iter()
        .flat_map(|peer| &peer.findings)
        .map(|finding| finding.severity);
    let all: Vec<Severity> = answer
        .findings
        .iter()
        .map(|finding| finding.severity)
        .chain(there)
        .collect();
    let count = |severity| all.iter().filter(|one| **one == severity).count();
    let what = if is_env_alone {
        "With these variables the plugin"
    } else {
        "The plugin"
    };
    let broken = count(Severity::Broken);
    let slow = count(Severity::Slow);
    let fragile = count(Severity::Fragile);
    match answer.verdict {
        Verdict::Good if is_env_alone => format!("{what} is not blocked."),
        Verdict::Good if answer.peer.is_some() => {
            format!("{what} works on both hosts, as far as the doctor could check.")
        }
        Verdict::Good => format!("{what} works here, as far as the doctor could check."),
        Verdict::Impaired => {
            let kinds = [(slow, "slow"), (fragile, "fragile")]
                .into_iter()
                .filter(|(count, _)| *count > 0);
            let kinds: Vec<String> = kinds
                .map(|(count, kind)| format!("{} {kind}", numbers::count(count, "finding")))
                .collect();
            format!("{what} works, but: {}.", kinds.join(", "))
        }
        Verdict::Broken => format!(
            "{what} does not work: {}.",
            numbers::count(broken, "finding")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::finding::{Fact, NotSeen};
    use crate::commands::doctor::findings::rails::NO_RAIL;
    use crate::commands::doctor::hosts::together::{Outcome, Path};

    #[test]
    fn text_from_files_cannot_control_the_terminal() {
        const ODD: &str = "x\x1b]0;pwned\x07\nBROKEN: forged\r\u{9b}2J";
        let odd = || ODD.to_owned();
        let finding = NO_RAIL.finding(ODD).at(Severity::Note).cured_by(ODD);
        let here = vec![odd()];
        let there = vec![odd()];
        let outcome = Outcome::Failed(odd());
        let path = Path {
            here,
            there,
            expected_mbps: None,
            port_mtu_bytes: None,
            outcome,
        };
        let answer = Answer {
            findings: vec![finding],
            picture: vec![odd()],
            facts: vec![Fact::new(ODD, ODD)],
            not_seen: vec![NotSeen {
                what: odd(),
                why: odd(),
            }],
            peer: Some(PeerResult {
                host: odd(),
                verdict: Verdict::Good,
                findings: Vec::new(),
                paths: vec![path],
            }),
            ..Answer::default()
        };
        let page = text(&answer, false, true, 80);
        assert!(
            page.chars().all(|c| c == '\n' || !c.is_control()),
            "{page:?}"
        );
        assert!(
            !page.contains("\nBROKEN") && page.contains("    $ x?]0;pwned??BROKEN: forged??2J\n"),
            "{page}"
        );
    }
}
