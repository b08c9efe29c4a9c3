//! `spark-lab communicators`: stress-tests the lifecycle of NCCL's communicators over the plugin,
//! with NCCL itself on real GPUs: several together, split, created many times, aborted, with a rank
//! that dies, and over two networks in one job.
//!
//! Every rank is a process that uses NCCL as any program does. The ranks check every value of their
//! all-reduces, except of those that only keep the network busy or carry a signal. NCCL's own log
//! shows which network was used, and a scenario fails if it exceeds its time limit. Of the plugin,
//! the command needs only the library file.

mod health;
mod judge;
#[allow(unsafe_code)]
mod nccl;
pub mod options;
pub mod rank;
mod returns;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use judge::{End, Report};
use nccl_tests_harness::fabric::Kind;
use nccl_tests_harness::lines;
use nccl_tests_harness::output::watch::Watch;
use nccl_tests_harness::scene::network::{Network, Used};
use nccl_tests_harness::scene::{Scene, loader_path};
use options::{Plan, Scenario};
use returns::Director;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

const RETURNS_NEEDS: &str =
    "it needs the software fabric (--fabric soft) and this plugin (--network spark)";

/// Prefix of a rank's error message.
const COMPLAINT: &str = "spark-lab: ";

/// Runs the scenarios. Returns false when one failed, or an error if none could be run. `own` is
/// this program's file; `lookup` reads an environment variable.
pub fn run(
    plan: &Plan,
    own: &Path,
    lookup: &dyn Fn(&str) -> Option<String>,
    out: &mut impl Write,
) -> Result<bool> {
    // Checked here, because each rank would fail alike in every scenario.
    rank::check_machine()?;
    let scene = Scene::set(&plan.setting, plan.tests.ranks, lookup)?;
    let can_return = scene.fabric.kind == Kind::Soft && plan.tests.network.is_plugin();
    let is_chosen = plan.tests.scenarios.contains(&Scenario::Returns)
        && plan.tests.scenarios.len() < Scenario::value_variants().len();
    ensure!(
        can_return || !is_chosen,
        "scenario returns: {RETURNS_NEEDS}"
    );
    let environment = environment(plan, &scene, plan.tests.network, lookup)?;
    let shown: Vec<String> = environment
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    writeln!(
        out,
        "# spark-lab {}: communicators, {} ranks",
        env!("CARGO_PKG_VERSION"),
        plan.tests.ranks
    )?;
    writeln!(out, "# fabric: {}", scene.fabric.about)?;
    writeln!(out, "# {}", shown.join(" "))?;
    let watch = Watch::start("scenarios", || plan.tests.scenarios.len() as u64);
    let out = &mut watch.over(out);
    let mut good = true;
    for scenario in &plan.tests.scenarios {
        if *scenario == Scenario::Returns && !can_return {
            writeln!(out, "{:<8} left out: {RETURNS_NEEDS}", scenario.name())?;
            watch.step();
            continue;
        }
        let outcome = play(plan, &scene, *scenario, own, lookup, &watch);
        watch.step();
        let text = match outcome {
            Ok(text) => text,
            Err(error) if nccl_tests_harness::output::is_output_closed(&error) => {
                return Err(error);
            }
            Err(error) => {
                good = false;
                format!("FAILED: {error:#}")
            }
        };
        writeln!(out, "{:<8} {text}", scenario.name())?;
        out.flush()?;
    }
    watch.end();
    Ok(good)
}

fn play(
    plan: &Plan,
    scene: &Scene,
    scenario: Scenario,
    own: &Path,
    lookup: &dyn Fn(&str) -> Option<String>,
    watch: &Watch,
) -> Result<String> {
    let mut children = Vec::new();
    for rank in 0..plan.tests.ranks {
        children.push(start(plan, scene, scenario, rank, own, lookup)?);
    }
    let mut logs = RankLogs {
        complaints: vec![None; plan.tests.ranks],
        used: Used::default(),
    };
    let (ends, directed) = follow(plan, scene, scenario, &mut children, |rank, line| {
        watch.doing(&scenario.name());
        scene.log(&format!("{} {rank}", scenario.name()), line)?;
        logs.take_in(rank, line);
        Ok(())
    })?;
    let RankLogs { complaints, used } = logs;
    // The director's error is the reason for all other errors.
    let directed = directed.transpose()?;
    let Some(statuses) = ends else {
        let reason = used
            .complaints()
            .unwrap_or_else(|| "NCCL logged no reason".to_owned());
        bail!(
            "the ranks did not end within {} s (--timeout): {reason}",
            plan.setting.timeout.as_secs()
        );
    };
    // A rank's own error message does not have the plugin's messages: they are in NCCL's log.
    let log = used
        .complaints()
        .map(|text| format!(" (NCCL's log: {text})"))
        .unwrap_or_default();
    let told = |complaint: Option<String>| complaint.map(|text| text + &log);
    let end = |(rank, (status, complaint))| {
        Ok(End {
            status,
            report: report(scene, scenario, rank)?,
            complaint: told(complaint),
        })
    };
    let ends = statuses
        .into_iter()
        .zip(complaints)
        .enumerate()
        .map(end)
        .collect::<Result<Vec<_>>>()?;
    let mut words = judge::judge(plan, scenario, &ends)?;
    if let Some(directed) = directed {
        words = format!(
            "{words}; {}",
            directed.context("the ranks ended before the devices had returned")?
        );
    }
    // Scenario mixed uses two networks, so its log is not judged by the chosen network.
    if scenario == Scenario::Mixed {
        Ok(words)
    } else {
        Ok(format!("{words}; {}", used.judge(plan.tests.network)?))
    }
}

/// Exit statuses of the ranks if they ended in time, and the director's result if there is one.
type Followed = (Option<Vec<ExitStatus>>, Option<Result<Option<String>>>);

fn follow(
    plan: &Plan,
    scene: &Scene,
    scenario: Scenario,
    children: &mut [Child],
    on_line: impl FnMut(usize, &str) -> Result<()>,
) -> Result<Followed> {
    let timeout = plan.setting.timeout;
    if scenario != Scenario::Returns {
        return Ok((lines::follow(children, Vec::new(), timeout, on_line)?, None));
    }
    let is_over = AtomicBool::new(false);
    let director = Director {
        fabric: &scene.fabric,
        folder: scene.folder(),
        is_over: &is_over,
    };
    std::thread::scope(|scope| {
        let directing = scope.spawn(|| director.direct(plan.tests.ranks));
        let ends = lines::follow(children, Vec::new(), timeout, on_line);
        is_over.store(true, Ordering::Relaxed);
        let directed = directing
            .join()
            .unwrap_or_else(|_| bail!("the thread that takes devices away panicked"));
        Ok((ends?, Some(directed)))
    })
}

struct RankLogs {
    complaints: Vec<Option<String>>,
    used: Used,
}

impl RankLogs {
    fn take_in(&mut self, rank: usize, line: &str) {
        let Some(complaint) = line.strip_prefix(COMPLAINT) else {
            self.used.note(line);
            return;
        };
        let told = self.complaints[rank].get_or_insert_default();
        told.push_str(if told.is_empty() { "" } else { " " });
        told.push_str(complaint);
    }
}

/// Returns the environment variables of a rank that uses `network`. When the last communicator is
/// destroyed, NCCL 2.28.3 forgets the name in `NCCL_NET_PLUGIN` and then looks for libnccl-net.so
/// (github.com/NVIDIA/nccl issue 1978). So the plugin's file exists under that name too.
fn environment(
    plan: &Plan,
    scene: &Scene,
    network: Network,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<Vec<(String, String)>> {
    let mut environment = scene.environment(network, true, lookup)?;
    if network.is_plugin() && plan.tests.network.is_plugin() {
        let folder = scene.plugin_by_its_usual_name()?;
        environment.push(("LD_LIBRARY_PATH".to_owned(), loader_path(&folder, lookup)));
    }
    Ok(environment)
}

fn report(scene: &Scene, scenario: Scenario, rank: usize) -> Result<Option<Report>> {
    match fs::read(rank::report_file(scene.folder(), scenario, rank)) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .with_context(|| format!("the report of rank {rank}")),
        Err(_) => Ok(None),
    }
}

fn start(
    plan: &Plan,
    scene: &Scene,
    scenario: Scenario,
    rank: usize,
    own: &Path,
    lookup: &dyn Fn(&str) -> Option<String>,
) -> Result<Child> {
    let is_last = rank + 1 == plan.tests.ranks;
    let network = if scenario == Scenario::Mixed && is_last {
        Network::Socket
    } else {
        plan.tests.network
    };
    let mut command = Command::new(own);
    command.args([
        "communicators-rank",
        &scenario.name(),
        "--rank",
        &rank.to_string(),
        "--ranks",
    ]);
    command
        .args([
            &plan.tests.ranks.to_string(),
            "--count",
            &plan.tests.count.to_string(),
            "--folder",
        ])
        .arg(scene.folder());
    command.envs(environment(plan, scene, network, lookup)?);
    command.envs(
        scene
            .fabric
            .environment(rank)
            .into_iter()
            .filter(|_| network != Network::Socket),
    );
    command.env(
        "NCCL_HOSTID",
        format!("spark-lab-{}-{rank}", std::process::id()),
    );
    // NCCL would write its log to that file and not to standard output.
    command.env_remove("NCCL_DEBUG_FILE");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
        .spawn()
        .with_context(|| format!("start rank {rank}"))
}
