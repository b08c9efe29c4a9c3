//! Judges a scenario by the reports and exit statuses of its ranks.

use super::health::Health;
use super::options::{Plan, Scenario};
use anyhow::{Result, bail, ensure};
use nccl_tests_harness::ranks::job;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// Memory that a destroyed communicator may leave behind. Measured for each communicator, with NCCL
/// 2.28.3 and two ranks on two H200. Over the plugin on the software fabric, 0.23 KiB in rank 0 and
/// 0.08 KiB in rank 1 (the last 900 of 1,000 communicators). Over NCCL's own Socket network, 0.44
/// to 1.19 KiB (the last 54 of 60).
const LEFT_KIB: u64 = 8;
/// Memory that may be taken once, for any number of communicators: the allocators of NCCL and CUDA
/// grow by steps. Measured: 972 and 1992 KiB within 54 communicators, and no more in the next 900.
const STEP_KIB: u64 = 4096;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Number of all-reduces whose every value was checked.
    pub checked: u64,
    pub wrong: u64,
    pub words: String,
    /// Resources after a tenth of the communicators and after all of them, and the number of
    /// communicators in between.
    pub held: Option<(Health, Health, u32)>,
}

#[derive(Debug)]
pub struct End {
    pub status: ExitStatus,
    pub report: Option<Report>,
    pub complaint: Option<String>,
}

impl End {
    fn text(&self) -> String {
        format!(
            "{}: {}",
            job::ended(self.status),
            self.complaint.as_deref().unwrap_or("no error message")
        )
    }
}

/// Returns the result in words, or the fault as an error.
pub fn judge(plan: &Plan, scenario: Scenario, ends: &[End]) -> Result<String> {
    let (last, others) = ends
        .split_last()
        .map_or((None, ends), |(last, others)| (Some(last), others));
    match scenario {
        Scenario::Mixed => refused(ends),
        Scenario::Lost => {
            let killed = last.and_then(|end| end.status.signal()) == Some(Signal::SIGKILL as i32);
            ensure!(
                killed,
                "the last rank should have been killed, but {}",
                last.map_or_else(String::new, End::text)
            );
            let words = others
                .iter()
                .filter_map(|end| end.report.as_ref())
                .map(|report| report.words.clone());
            Ok(format!(
                "{}; {}",
                right(others)?,
                words.collect::<Vec<_>>().join("; ")
            ))
        }
        Scenario::Again => Ok(format!("{}; {}", right(ends)?, flat(ends)?)),
        Scenario::Several | Scenario::Split | Scenario::Abort | Scenario::Returns => {
            let words = ends
                .first()
                .and_then(|end| end.report.as_ref())
                .map(|report| report.words.clone());
            Ok(format!(
                "{}; {} ranks: {}",
                right(ends)?,
                plan.tests.ranks,
                words.unwrap_or_default()
            ))
        }
    }
}

/// Requires that all ranks ended well and found every value right.
fn right(ends: &[End]) -> Result<String> {
    let mut checked = 0;
    for (rank, end) in ends.iter().enumerate() {
        let End { status, report, .. } = end;
        let Some(report) = report.as_ref().filter(|_| status.success()) else {
            bail!("rank {rank} {}", end.text());
        };
        ensure!(
            report.wrong == 0,
            "rank {rank}: {} WRONG values",
            report.wrong
        );
        ensure!(report.checked > 0, "rank {rank} checked nothing");
        checked += report.checked;
    }
    Ok(format!("{checked} all-reduces, 0 wrong"))
}

/// Requires that no rank has more descriptors or threads than before, and that no rank's memory
/// grew by more than [`STEP_KIB`] and [`LEFT_KIB`] allow.
fn flat(ends: &[End]) -> Result<String> {
    let mut words = Vec::new();
    for (rank, end) in ends.iter().enumerate() {
        let Some((before, after, count)) = end.report.as_ref().and_then(|report| report.held)
        else {
            bail!("rank {rank} did not report its memory, descriptors and threads");
        };
        let grown_kib = after.memory_kib.saturating_sub(before.memory_kib);
        let allowed_kib = STEP_KIB.max(LEFT_KIB * u64::from(count));
        let each = (after.memory_kib as f64 - before.memory_kib as f64) / f64::from(count);
        let text = format!(
            "rank {rank} over {count}: memory {} to {} KiB ({each:.2} each), descriptors {} to {}, threads {} to {}",
            before.memory_kib,
            after.memory_kib,
            before.descriptors,
            after.descriptors,
            before.threads,
            after.threads
        );
        let is_flat = grown_kib <= allowed_kib
            && after.descriptors <= before.descriptors
            && after.threads <= before.threads;
        ensure!(
            is_flat,
            "{text}; allowed: {allowed_kib} KiB more, no more descriptors or threads"
        );
        words.push(text);
    }
    Ok(words.join("; "))
}

/// Requires that every rank got an error, and that at least one of the errors has the reason.
fn refused(ends: &[End]) -> Result<String> {
    for (rank, end) in ends.iter().enumerate() {
        ensure!(
            end.status.code() == Some(1),
            "rank {rank} should have failed, but {}",
            end.text()
        );
    }
    let complaints: Vec<&str> = ends
        .iter()
        .filter_map(|end| end.complaint.as_deref())
        .collect();
    let Some(told) = complaints
        .iter()
        .find(|text| text.contains("uses another network"))
    else {
        bail!(
            "no rank reported that its peer uses another network; they reported: {}",
            complaints.join("; ")
        );
    };
    Ok(format!("all ranks failed, as they should: {told}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cli, Command};
    use clap::Parser;

    fn plan() -> Plan {
        let library = tempfile::NamedTempFile::new().unwrap();
        let line = [
            "spark-lab",
            "communicators",
            "--fabric",
            "verbs",
            "--plugin",
            library.path().to_str().unwrap(),
        ];
        let Command::Communicators(options) = Cli::try_parse_from(line).unwrap().command else {
            panic!()
        };
        options
            .plan(std::path::Path::new("/nowhere/nccl-spark"))
            .unwrap()
    }

    fn end(raw: i32, report: Option<Report>, complaint: &str) -> End {
        End {
            status: ExitStatus::from_raw(raw),
            report,
            complaint: Some(complaint.to_owned()),
        }
    }

    fn good(held: Option<(Health, Health, u32)>) -> End {
        end(
            0,
            Some(Report {
                checked: 4,
                wrong: 0,
                words: "words".to_owned(),
                held,
            }),
            "",
        )
    }

    #[test]
    fn wrong_values_silence_and_failure_are_found() {
        let plan = plan();
        assert!(
            judge(&plan, Scenario::Several, &[good(None), good(None)])
                .unwrap()
                .starts_with("8 all-reduces, 0 wrong")
        );
        let wrong = end(
            0,
            Some(Report {
                checked: 4,
                wrong: 1,
                ..Report::default()
            }),
            "",
        );
        let text = |end: End| {
            judge(&plan, Scenario::Split, &[good(None), end])
                .unwrap_err()
                .to_string()
        };
        assert!(text(wrong).contains("rank 1: 1 WRONG"));
        assert!(text(end(0, Some(Report::default()), "")).contains("checked nothing"));
        assert!(text(end(0, None, "")).contains("rank 1"));
        assert!(
            text(end(
                1 << 8,
                Some(Report {
                    checked: 1,
                    ..Report::default()
                }),
                "no GPU"
            ))
            .contains("no GPU")
        );
    }

    const BEFORE: Health = Health {
        memory_kib: 100_000,
        descriptors: 40,
        threads: 9,
    };

    /// Judges a rank that made `count` communicators, by its health after them.
    fn judged(count: u32, after: Health) -> Result<String> {
        let rank = good(Some((BEFORE, after, count)));
        judge(&plan(), Scenario::Again, &[rank])
    }

    fn with_memory(memory_kib: u64) -> Health {
        Health {
            memory_kib,
            ..BEFORE
        }
    }

    #[test]
    fn growth_of_memory_is_found() {
        let line = judged(900, with_memory(100_900)).unwrap();
        assert!(line.contains("(1.00 each)"), "{line}");
        assert!(judged(900, with_memory(107_200)).is_ok());
        let error = judged(900, with_memory(107_201)).unwrap_err().to_string();
        assert!(error.contains("7200 KiB more"), "{error}");
        // A step of the allocators, within few communicators.
        assert!(judged(54, with_memory(104_096)).is_ok());
        let error = judged(54, with_memory(104_097)).unwrap_err().to_string();
        assert!(error.contains("4096 KiB"), "{error}");
    }

    #[test]
    fn growth_of_descriptors_and_threads_is_found() {
        let more_descriptors = Health {
            descriptors: 41,
            ..BEFORE
        };
        let error = judged(900, more_descriptors).unwrap_err().to_string();
        assert!(error.contains("descriptors 40 to 41"), "{error}");
        let more_threads = Health {
            threads: 10,
            ..BEFORE
        };
        assert!(judged(900, more_threads).is_err());
        assert!(judge(&plan(), Scenario::Again, &[good(None)]).is_err());
    }

    #[test]
    fn ranks_to_be_killed_must_die_and_refused_ranks_must_report_it() {
        let killed = || end(Signal::SIGKILL as i32, None, "");
        assert!(
            judge(&plan(), Scenario::Lost, &[good(None), killed()])
                .unwrap()
                .contains("words")
        );
        let alive = judge(
            &plan(),
            Scenario::Lost,
            &[good(None), end(1 << 8, None, "no GPU")],
        )
        .unwrap_err();
        assert_eq!(
            alive.to_string(),
            "the last rank should have been killed, but exited with status 1: no GPU"
        );
        assert!(judge(&plan(), Scenario::Lost, &[killed(), killed()]).is_err());
        let refused = |text: &str| end(1 << 8, None, text);
        let why = "the peer rank uses another network";
        assert!(
            judge(&plan(), Scenario::Mixed, &[refused(why), refused("closed")])
                .unwrap()
                .contains(why)
        );
        assert!(
            judge(
                &plan(),
                Scenario::Mixed,
                &[refused("closed"), refused("closed")]
            )
            .is_err()
        );
        assert!(judge(&plan(), Scenario::Mixed, &[refused(why), good(None)]).is_err());
    }
}
