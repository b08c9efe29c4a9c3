//! The `nccl-spark` command line: collectives through the plugin without a GPU, what this machine has, installation.
//!
//! `cli` has all commands. `commands` are those that users run, `proofs` those that measure the plugin or run real NCCL over it. They
//! share `ranks` (the processes of a run), `fabric` (what the ranks' messages travel over), `scene` (what real NCCL is run in) and
//! `output`. The plugin is always a library file, driven through its C interface as NCCL drives it (`net`).
//!
//! Exit status: 0 all is well, 1 a run failed or data was wrong, 2 the command line is wrong, 3 the doctor found that the plugin does not
//! work, 141 the output was closed,
//! 130, 143 and 129 ended by SIGINT (Ctrl-C), SIGTERM and SIGHUP.

mod abi;
mod cli;
mod commands;
mod date;
mod fabric;
mod gpu;
mod interrupt;
mod lines;
#[allow(unsafe_code)]
mod net;
mod output;
mod pair;
mod places;
mod proc_stat;
mod proofs;
mod ranks;
mod scene;
mod sizes;
mod usage;

use anyhow::{Context, Result};
use clap::CommandFactory;
use clap::error::ErrorKind;
use cli::{Cli, Command};
use commands::collectives::rank::Collectives;
use commands::collectives::{Collective, lead};
use commands::doctor::{Ended, Verdict};
use commands::memory::rank::Memory;
use commands::{memory, nccl_tests, rails, settings, tune};
use nccl_net_spark::config::Settings;
use output::{STANDARD_OUTPUT, Verbosity, report};
use pair::rank::Pair;
use proofs::{bench, communicators};
use ranks::launch::{self, World};
use ranks::process;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

const FAILED: u8 = 1;
const USAGE: u8 = 2;
/// The doctor's: the plugin does not work here.
const BROKEN: u8 = 3;
/// What shells show for a program that ended because its output was closed (128 + SIGPIPE).
const UNREAD: u8 = 141;

fn main() -> ExitCode {
    let outcome = Cli::read(std::env::args_os()).map_err(anyhow::Error::from).and_then(|cli| {
        output::set_verbosity(match (cli.quiet, cli.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, 0) => Verbosity::Normal,
            (false, 1) => Verbosity::Verbose,
            (false, _) => Verbosity::Trace,
        });
        output::set_columns(variable("COLUMNS").as_deref());
        execute(cli.command)
    });
    if let Some(status) = interrupt::status() {
        return ExitCode::from(status);
    }
    let error = match outcome {
        Ok(Outcome::Good) => return ExitCode::SUCCESS,
        Ok(Outcome::Status(status)) => return ExitCode::from(status),
        Ok(Outcome::Failed) => {
            if output::verbosity() == Verbosity::Quiet {
                complain("failed; without --quiet it says more");
            }
            return ExitCode::from(FAILED);
        }
        Err(error) => error,
    };
    match error.downcast_ref::<clap::Error>() {
        Some(usage) => complain_of_usage(usage),
        None if output::is_unread(&error) => ExitCode::from(UNREAD),
        None => {
            complain(&format!("{error:#}"));
            ExitCode::from(FAILED)
        }
    }
}

/// How a command ended that did what it was asked for.
enum Outcome {
    Good,
    /// Data was wrong, or there is nothing to use.
    Failed,
    /// An exit status of its own: of the doctor, and of rails.
    Status(u8),
}

fn execute(command: Command) -> Result<Outcome> {
    if let Command::Doctor(options) = command {
        return doctor(options).map(Outcome::Status);
    }
    if let Command::Rails(options) = command {
        let program = std::env::current_exe().context("find this program's file")?;
        return rails::rails(*options, &program).map(Outcome::Status);
    }
    if let Command::Report(options) = command {
        return gather(*options).map(|()| Outcome::Good);
    }
    run(command).map(|is_good| if is_good { Outcome::Good } else { Outcome::Failed })
}

fn doctor(options: commands::doctor::Options) -> Result<u8> {
    let program = std::env::current_exe().context("find this program's file")?;
    if options.starts_processes() {
        interrupt::watch()?;
    }
    Ok(match options.run(&program, variables())? {
        Ended::Served | Ended::Judged(Verdict::Good) => 0,
        Ended::Judged(Verdict::Impaired) => FAILED,
        Ended::Judged(Verdict::Broken) => BROKEN,
    })
}

fn gather(options: commands::report::Options) -> Result<()> {
    let program = std::env::current_exe().context("find this program's file")?;
    if options.starts_processes() {
        interrupt::watch()?;
    }
    options.run(&program, &variables())
}

/// The environment.
fn variables() -> Vec<(String, String)> {
    let text = |value: std::ffi::OsString| value.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

/// False when data was wrong.
fn run(command: Command) -> Result<bool> {
    let out = output::standard();
    let program = std::env::current_exe().context("find this program's file")?;
    if starts_processes(&command) {
        interrupt::watch()?;
    }
    match command {
        Command::AllGather(options) => collective(options, Collective::AllGather, &program),
        Command::AllReduce(options) => collective(options, Collective::AllReduce, &program),
        Command::ReduceScatter(options) => collective(options, Collective::ReduceScatter, &program),
        Command::Broadcast(options) => collective(options, Collective::Broadcast, &program),
        Command::AllToAll(options) => collective(options, Collective::AllToAll, &program),
        Command::SendRecv(options) => collective(options, Collective::SendRecv, &program),
        Command::Bench(options) => {
            let world = world(options.is_local())?;
            let plan = options.plan(&program, world, variable("NCCL_IBVERBS_LIB"))?;
            check_settings(&plan.plugin, &program)?;
            bench::run(&plan, &program)
        }
        Command::Tune(options) => tune(*options, &program),
        Command::TuneCollectivesWrite(task) => task.run(&variable, &mut output::standard()).map(|()| true),
        Command::NcclTests(options) => {
            let plan = options.plan(&program, variable("PATH").as_deref())?;
            nccl_tests::run(&plan, &program, &variable, &mut report::beside(plan.json.as_ref()))
        }
        Command::NcclTestsRank(rank) => {
            let number = launch::detect(variable, std::os::unix::process::parent_id())?.map_or(0, |world| world.rank);
            rank.run(number, variable).map(|()| true)
        }
        Command::Communicators(options) => {
            let plan = options.plan(&program)?;
            communicators::run(&plan, &program, &variable, &mut output::standard())
        }
        Command::CommunicatorsRank(task) => task.run().map(|()| true),
        Command::Memory(options) => {
            let plan = options.plan(&program, variable("NCCL_IBVERBS_LIB"))?;
            check_settings(&plan.plugin, &program)?;
            memory::run(&plan, &program)
        }
        Command::Fabric(options) => options.run(),
        // `execute` has them.
        Command::Doctor(_) | Command::Report(_) | Command::Rails(_) => Ok(true),
        Command::Top(options) => options.run(std::env::var_os("NO_COLOR").is_none()).map(|()| true),
        Command::Settings => settings::show(out).map(|()| true),
        Command::Env(options) => options.run(&program, out).map(|()| true),
        Command::Install(options) => {
            options.run(&program, variable("PATH").as_deref(), &Cli::command(), out).map(|()| true)
        }
        Command::Uninstall(options) => options.run(&program, out).map(|()| true),
        Command::Completions(options) => options.run(&Cli::command(), out).map(|()| true),
        Command::Manual(options) => options.run(&Cli::command(), out).map(|()| true),
        Command::Rank(start) => process::run::<Collectives>(&start, variable("NCCL_DEBUG").as_deref()).map(|()| true),
        Command::MemoryRank(start) => process::run::<Memory>(&start, variable("NCCL_DEBUG").as_deref()).map(|()| true),
        Command::PairRank(start) => process::run::<Pair>(&start, variable("NCCL_DEBUG").as_deref()).map(|()| true),
    }
}

/// Whether a command starts processes and makes files that must not outlive it.
fn starts_processes(command: &Command) -> bool {
    use Command::*;
    matches!(
        command,
        AllGather(_)
            | AllReduce(_)
            | ReduceScatter(_)
            | Broadcast(_)
            | AllToAll(_)
            | SendRecv(_)
            | Bench(_)
            | Tune(_)
            | NcclTests(_)
            | Communicators(_)
            | Memory(_)
    )
}

fn collective(
    options: commands::collectives::options::Options,
    collective: Collective,
    program: &Path,
) -> Result<bool> {
    let world = world(options.is_local())?;
    let plan = options.plan(collective, program, world, variable("NCCL_IBVERBS_LIB"))?;
    check_settings(&plan.plugin, program)?;
    lead::run(&plan, program)
}

/// Tells a setting that would stop the plugin in every rank, once and before any starts. Another plugin has settings of its own.
fn check_settings(plugin: &Path, program: &Path) -> Result<()> {
    if places::library(None, program)? == plugin {
        Settings::of_this_process()?;
    }
    Ok(())
}

fn tune(mut options: tune::options::Options, program: &Path) -> Result<bool> {
    if let Some(tune::options::What::Collectives(options)) = options.what.take() {
        let plan = options.plan(program, &variable)?;
        let mut out = report::beside(plan.json.as_ref());
        return tune::collectives::run(plan, program, &variable, &mut out).map(|()| true);
    }
    let world = world(options.run.is_local())?;
    tune::run(options, program, world, variable)
}

/// What a launcher passes, unless all ranks are started here.
fn world(is_local: bool) -> Result<Option<World>> {
    if is_local { Ok(None) } else { launch::detect(variable, std::os::unix::process::parent_id()) }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Nothing can be done when this fails.
fn complain(text: &str) {
    for line in text.lines() {
        let _ = writeln!(output::error(), "nccl-spark: {line}");
    }
}

fn complain_of_usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match error.print() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::from(UNREAD),
            Err(error) => {
                complain(&format!("{STANDARD_OUTPUT}: {error}"));
                ExitCode::from(FAILED)
            }
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(USAGE)
        }
        _ => {
            complain(&usage::one_line(error));
            ExitCode::from(USAGE)
        }
    }
}
