//! `nccl-spark memory`: tests which kinds of memory the plugin registers. The command also tests
//! that data arrives intact between two buffers of one kind. One GPU writes the data, and the same
//! or another GPU checks it. In memory of `malloc`, the CPU takes the place of a GPU that is absent
//! or cannot access this memory.
//!
//! With `--litmus` the command also tests whether NCCL's LL128 protocol is safe on this machine
//! ([`litmus`]).
//!
//! Each kind is tested in its own process, which is both ends of one connection. So if the fabric
//! cannot reach a kind of memory, only that kind's row of the table fails. A row reports what was
//! done, never what should have been done. A GPU checks messages only after a test of the GPU
//! itself: it must find bytes that the CPU changed on purpose. No process outlives the command.

pub mod ends;
pub mod litmus;
pub mod messages;
pub mod options;
pub mod rank;
mod show;

use crate::fabric::{self, Fabric, Kind as FabricKind};
use crate::gpu::{GpuInfo, Kind};
use crate::output::report;
use crate::output::watch::Watch;
use crate::ranks::control::answer;
use crate::ranks::device::Network;
use crate::ranks::job::Job;
use crate::ranks::placement;
use anyhow::{Context, Result, bail};
use litmus::{Outcome, Verdict};
use messages::{Answer, Ready, Setup, TestResult};
use options::Plan;
use rank::Memory;
use serde::Serialize;
use std::io::Write;
use std::path::Path;

#[derive(Debug, Default, Serialize)]
struct Report {
    command: &'static str,
    version: &'static str,
    /// `soft` or `verbs`.
    fabric: &'static str,
    fabric_text: String,
    network: Option<Network>,
    connections: Vec<String>,
    /// The GPU that wrote and the GPU that checked. Null without a GPU.
    gpus: Option<[GpuInfo; 2]>,
    sizes_bytes: Vec<usize>,
    kinds: Vec<Row>,
    /// Null if the litmus test of LL128 was not requested.
    litmus: Option<Verdict>,
}

#[derive(Debug, Serialize)]
struct Row {
    kind: Kind,
    name: &'static str,
    outcome: TestResult,
    fault: Option<String>,
}

/// Tests all kinds of memory, and LL128 if requested. Returns false if a result counts as failed.
///
/// # Errors
/// The plugin does not start, or the output cannot be written.
pub fn run(plan: &Plan, program: &Path) -> Result<bool> {
    let version = env!("CARGO_PKG_VERSION");
    let report = Report {
        command: "memory",
        version,
        sizes_bytes: plan.setup.sizes.clone(),
        ..Report::default()
    };
    report::of_run(plan.json.as_ref(), report, |mut out, report| {
        lead(plan, program, &mut out, report)
    })
}

fn lead(
    plan: &Plan,
    program: &Path,
    mut out: &mut impl Write,
    report: &mut Report,
) -> Result<bool> {
    let fabric = fabric::set_up(&plan.fabric, 1, plan.verbs_library.as_deref())?;
    report.fabric = if fabric.kind == FabricKind::Soft {
        "soft"
    } else {
        "verbs"
    };
    report.fabric_text.clone_from(&fabric.about);
    let largest = plan.setup.sizes.iter().max().unwrap_or(&0);
    writeln!(
        out,
        "# nccl-spark {} memory: messages of up to {largest} bytes",
        report.version
    )?;
    writeln!(out, "# fabric: {}", fabric.about)?;
    let mut absent = None;
    for kind in Kind::ALL {
        let result = match &absent {
            Some(reason) => TestResult::NotTried {
                reason: String::clone(reason),
            },
            None => {
                let (ready, result) = attempt(plan, program, &fabric, kind)?;
                if let (Some(ready), None) = (ready, &report.network) {
                    absent = introduce(plan, ready, &mut out, report)?;
                }
                result
            }
        };
        show::row(out, kind, &result)?;
        let fault = show::fault(kind, &result);
        report.kinds.push(Row {
            kind,
            name: kind.name(),
            outcome: result,
            fault,
        });
    }
    if let Some(order) = plan.litmus {
        let outcome = judge_lines(plan, program, &fabric, order);
        litmus::show::write(
            out,
            &outcome,
            order.planted,
            fabric.kind == FabricKind::Soft,
        )?;
        let fault = outcome.fault();
        report.litmus = Some(Verdict {
            planted: order.planted,
            outcome,
            fault,
        });
    }
    let faults = report
        .kinds
        .iter()
        .filter_map(|row| Some(format!("{}: {}", row.name, row.fault.as_ref()?)));
    let lines = report
        .litmus
        .iter()
        .filter_map(|verdict| Some(format!("LL128: {}", verdict.fault.as_ref()?)));
    let faults = faults.chain(lines).collect::<Vec<_>>();
    match faults.is_empty() {
        true => writeln!(out, "# OK")?,
        false => writeln!(out, "# FAILED: {}", faults.join("; "))?,
    }
    out.flush()?;
    Ok(faults.is_empty())
}

/// Prints the network and the GPUs, and starts the table. If there is no GPU, returns the reason.
fn introduce(
    plan: &Plan,
    ready: Ready,
    mut out: &mut impl Write,
    report: &mut Report,
) -> Result<Option<String>> {
    let Ready {
        network,
        connections,
        gpus,
    } = ready;
    writeln!(out, "# network {} device {}", network.name, network.device)?;
    for line in network.rails.iter().chain(&connections) {
        writeln!(out, "# {line}")?;
    }
    report.network = Some(network);
    report.connections = connections;
    let absent = match gpus {
        Ok(gpus) => {
            let [writer, checker] = &gpus;
            let same = writer == checker;
            for about in [Some(writer), Some(checker).filter(|_| !same)]
                .into_iter()
                .flatten()
            {
                writeln!(out, "# {}", describe(about))?;
            }
            report.gpus = Some(gpus);
            None
        }
        Err(reason) if plan.needs_gpu => {
            bail!("--gpu, --receiver-gpu and --litmus need a GPU: {reason}")
        }
        Err(reason) => {
            writeln!(out, "# no GPU: {reason}")?;
            Some(reason)
        }
    };
    show::head(&mut out)?;
    Ok(absent)
}

fn describe(gpu: &GpuInfo) -> String {
    let digit = u8::from;
    format!(
        "GPU {}: {}, INTEGRATED={} PAGEABLE_MEMORY_ACCESS={} MANAGED_MEMORY={} CONCURRENT_MANAGED_ACCESS={}",
        gpu.number,
        gpu.name,
        digit(gpu.integrated),
        digit(gpu.pageable_memory_access),
        digit(gpu.managed_memory),
        digit(gpu.concurrent_managed_access)
    )
}

/// Tests one kind of memory in its own process. Returns the process's [`Ready`] and the result of
/// the test. If the process does not start, there is no `Ready`, and the test counts as failed.
///
/// # Errors
/// The process for `malloc` does not start. A process for another kind would not start either.
fn attempt(
    plan: &Plan,
    program: &Path,
    fabric: &Fabric,
    kind: Kind,
) -> Result<(Option<Ready>, TestResult)> {
    let (job, ready) = match start(plan, program, fabric, kind, None) {
        Ok(started) => started,
        Err(error) if kind == Kind::Malloc => return Err(error),
        Err(error) => return Ok((None, failed(false, &error))),
    };
    let mut registered = false;
    let result = proceed(job, &mut registered).unwrap_or_else(|error| failed(registered, &error));
    Ok((Some(ready), result))
}

/// Starts a process that tests a kind of memory, or runs the litmus test in that kind of memory.
fn start(
    plan: &Plan,
    program: &Path,
    fabric: &Fabric,
    kind: Kind,
    litmus: Option<litmus::Order>,
) -> Result<(Job<Memory>, Ready)> {
    let mut job = Job::start(
        program,
        placement::all_here(1, fabric, &[]),
        plan.timeout,
        Watch::none(),
    )?;
    let mut setup = Setup {
        kind,
        litmus,
        ..plan.setup.clone()
    };
    if litmus.is_some() {
        setup.sizes = vec![litmus::rounds::BUFFER_BYTES];
    }
    let ready = job.order_all(|_| setup.clone(), answer!(Answer::Ready(ready) => ready))?;
    Ok((
        job,
        ready
            .into_iter()
            .next()
            .context("no answer from the child process")?,
    ))
}

/// Runs the litmus test in memory pinned by CUDA, like NCCL's buffers.
fn judge_lines(plan: &Plan, program: &Path, fabric: &Fabric, order: litmus::Order) -> Outcome {
    let run = || -> Result<Outcome> {
        let (mut job, _) = start(plan, program, fabric, Kind::HostAlloc, Some(order))?;
        let registered = next(
            &mut job,
            answer!(Answer::Registered(registered) => registered),
        )?;
        if let Err(TestResult::Refused { reason } | TestResult::NotTried { reason }) = registered {
            return Ok(Outcome::Failed { reason });
        }
        let found = next(&mut job, answer!(Answer::Litmus(found) => found))?;
        // If lines did not arrive, the process cannot close normally.
        if found.missing == 0 {
            job.finish().context("close")?;
        }
        Ok(Outcome::Ran(found))
    };
    run().unwrap_or_else(|error| Outcome::Failed {
        reason: words_of(&error),
    })
}

fn failed(registered: bool, error: &anyhow::Error) -> TestResult {
    TestResult::Failed {
        registered,
        reason: words_of(error),
    }
}

/// Returns an error's text without the rank number, because there is only one rank.
fn words_of(error: &anyhow::Error) -> String {
    format!("{error:#}").replace("rank 0: ", "child process: ")
}

fn proceed(mut job: Job<Memory>, is_registered: &mut bool) -> Result<TestResult> {
    let registered = next(
        &mut job,
        answer!(Answer::Registered(registered) => registered),
    )?;
    let result = match registered {
        Err(result) => result,
        Ok(()) => {
            *is_registered = true;
            TestResult::Moved(next(&mut job, answer!(Answer::Moved(moved) => moved))?)
        }
    };
    job.finish().context("close")?;
    Ok(result)
}

fn next<T>(job: &mut Job<Memory>, answer: fn(Answer) -> Option<T>) -> Result<T> {
    let answers = job.order_some(0..1, |_| None, answer)?;
    answers
        .into_iter()
        .next()
        .context("no answer from the child process")
}
