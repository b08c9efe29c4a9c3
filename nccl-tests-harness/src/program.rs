//! The main function of `nccl-spark` and `spark-lab`: it reads the command line and the
//! environment, runs the command, and returns the exit status. No other file of the crate reads the
//! environment.

use crate::output::{self, STANDARD_OUTPUT, Verbosity};
use crate::places::PluginOption;
use crate::ranks::launch::{self, World};
use crate::{interrupt, usage, words};
use anyhow::{Context, Result};
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use host::config::Settings;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const FAILED: u8 = 1;
const USAGE: u8 = 2;
/// Exit status that shells show if a program ends because its output was closed (128 + SIGPIPE).
const OUTPUT_CLOSED: u8 = 141;

/// The options, common to all commands, that set how much a command prints.
#[derive(Debug, clap::Args)]
pub struct OutputLevel {
    /// Prints results and errors only: no progress, no lines that start with #.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Also shows the plugin's log (-v: as with NCCL_DEBUG=INFO, -vv: as with NCCL_DEBUG=TRACE),
    /// and the facts that doctor has read.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

/// Result of a command that ran to its end.
pub enum Outcome {
    /// Success.
    Good,
    /// Data was wrong, or there was nothing to show, as when `fabric status` finds no fabric.
    Failed,
    /// Exit status that the command defines itself, as `doctor` and `rails` do.
    Status(u8),
}

impl From<bool> for Outcome {
    /// `false` means [`Outcome::Failed`].
    fn from(is_good: bool) -> Self {
        if is_good { Self::Good } else { Self::Failed }
    }
}

/// Parses this process's command line, and runs its command with `execute`.
pub fn run<C: CommandFactory + FromArgMatches>(
    output_level: impl FnOnce(&C) -> &OutputLevel,
    execute: impl FnOnce(C) -> Result<Outcome>,
) -> ExitCode {
    let name = C::command().get_name().to_owned();
    let outcome = parse::<C>(std::env::args_os())
        .map_err(anyhow::Error::from)
        .and_then(|cli| {
            output::set_verbosity(match output_level(&cli) {
                OutputLevel { quiet: true, .. } => Verbosity::Quiet,
                OutputLevel { verbose: 0, .. } => Verbosity::Normal,
                OutputLevel { verbose: 1, .. } => Verbosity::Verbose,
                _ => Verbosity::Trace,
            });
            output::set_columns(variable("COLUMNS").as_deref());
            execute(cli)
        });
    if let Some(status) = interrupt::status() {
        return ExitCode::from(status);
    }
    let error = match outcome {
        Ok(Outcome::Good) => return ExitCode::SUCCESS,
        Ok(Outcome::Status(status)) => return ExitCode::from(status),
        Ok(Outcome::Failed) => {
            if output::verbosity() == Verbosity::Quiet {
                complain(&name, "failed; run again without --quiet for the reason");
            }
            return ExitCode::from(FAILED);
        }
        Err(error) => error,
    };
    match error.downcast_ref::<clap::Error>() {
        Some(usage) => complain_of_usage(&name, usage),
        None if output::is_output_closed(&error) => ExitCode::from(OUTPUT_CLOSED),
        None => {
            complain(&name, &format!("{error:#}"));
            ExitCode::from(FAILED)
        }
    }
}

/// Parses the words of a command line. The first one is the program's name.
///
/// # Errors
/// Fails on a mistake on the command line.
pub fn parse<C: CommandFactory + FromArgMatches>(
    words: impl IntoIterator<Item = OsString>,
) -> Result<C, clap::Error> {
    let command = C::command();
    let words = words::prepared(&command, words);
    let matches = command
        .clone()
        .try_get_matches_from(&words)
        .map_err(|error| match error.kind() {
            ErrorKind::InvalidUtf8 => words::not_utf8(&command, &words).unwrap_or(error),
            _ => error,
        })?;
    C::from_arg_matches(&matches)
}

/// Returns the path of this program's executable.
pub fn file() -> Result<PathBuf> {
    std::env::current_exe().context("find this program's file")
}

/// Handles SIGINT, SIGTERM and SIGHUP from now on: on such a signal, the program ends the processes
/// that it started and removes the files that it made. Commands that start processes or make files
/// call this function.
pub fn clean_up_on_signal() -> Result<()> {
    interrupt::watch()
}

/// Returns a variable of the environment, unless it is empty.
#[allow(clippy::disallowed_methods)]
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[allow(clippy::disallowed_methods)]
pub(crate) fn variables() -> Vec<(String, String)> {
    let text = |value: OsString| value.to_string_lossy().into_owned();
    std::env::vars_os()
        .map(|(name, value)| (text(name), text(value)))
        .collect()
}

/// Returns this process's place in the job that a launcher such as mpirun started, if any. Returns
/// None if `is_local`, because then this process starts all ranks itself.
pub fn world(is_local: bool) -> Result<Option<World>> {
    if is_local {
        Ok(None)
    } else {
        launch::detect(variable, std::os::unix::process::parent_id())
    }
}

/// Checks the plugin's settings before any rank starts. Otherwise a setting that is not usable
/// would make the plugin fail in every rank. If `plugin` is not the plugin that belongs to
/// `program`, nothing is checked, because another plugin has its own settings.
pub fn check_settings(plugin: &Path, program: &Path) -> Result<()> {
    if PluginOption::default().library(program)? == plugin {
        Settings::of_this_process()?;
    }
    Ok(())
}

/// Writes `text` to standard error. Nothing can be done about a failed write.
fn complain(name: &str, text: &str) {
    for line in text.lines() {
        let _ = writeln!(output::error(), "{name}: {line}");
    }
}

fn complain_of_usage(name: &str, error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match error.print() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                ExitCode::from(OUTPUT_CLOSED)
            }
            Err(error) => {
                complain(name, &format!("{STANDARD_OUTPUT}: {error}"));
                ExitCode::from(FAILED)
            }
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(USAGE)
        }
        _ => {
            complain(name, &usage::one_line(error));
            ExitCode::from(USAGE)
        }
    }
}
