//! The program `spark-lab` tries the plugin with NCCL itself, on any NVIDIA GPU. No release package
//! contains it.
//!
//! Ranks, fabrics, NCCL's environment and output come from `nccl_tests_harness`, the library of
//! `nccl-spark`. The program looks for the plugin and the software fabric in its own folder; `cargo
//! build --release --workspace` puts all three there. Exit statuses are those of `nccl-spark`.

mod as_spark;
mod communicators;
mod proc_status;

use anyhow::Result;
use clap::{Parser, Subcommand};
use nccl_tests_harness::output;
use nccl_tests_harness::program::{self, Outcome, OutputLevel, variable};
use std::process::ExitCode;

/// Tries the NCCL network plugin for DGX Spark with NCCL itself, on any NVIDIA GPU.
#[derive(Debug, Parser)]
#[command(name = "spark-lab", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output_level: OutputLevel,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Stress-tests communicator lifecycle: many at the same time, split, re-created, aborted, and
    /// with a rank that dies.
    ///
    /// Each rank is a process that uses NCCL on a GPU; ranks may share a GPU. Every value is
    /// checked, NCCL's log must show the plugin, and memory, descriptors and threads of a process
    /// must not grow.
    #[command(after_help = COMMUNICATORS)]
    Communicators(Box<communicators::options::Options>),
    /// Runs a command in which NCCL takes this machine, with its own GPUs, for a DGX Spark.
    ///
    /// NCCL gets a graph (NCCL_TOPO_FILE) with the software fabric's rails at a Spark's speeds, so
    /// that NCCL chooses channels as on a Spark. NCCL_SPARK_TUNER is `on` unless it is set. A run
    /// in which NCCL chose fewer than 16 collective channels fails.
    #[command(after_help = AS_SPARK)]
    AsSpark(as_spark::Options),
    /// One rank of communicators, started by that command.
    #[command(name = "communicators-rank", hide = true)]
    CommunicatorsRank(communicators::rank::Task),
}

const AS_SPARK: &str = "\
Examples:
  spark-lab as-spark nccl-spark nccl-tests all_gather --profile spark-2cable --scale 0.25
  spark-lab as-spark spark-lab communicators several --profile unpaced";

const COMMUNICATORS: &str = "\
Examples:
  spark-lab communicators                     # all scenarios, two ranks
  spark-lab communicators again --count 10000
  spark-lab communicators lost mixed -r 4 --log log.txt";

fn main() -> ExitCode {
    program::run(|cli: &Cli| &cli.output_level, |cli| execute(cli.command))
}

fn execute(command: Command) -> Result<Outcome> {
    let program = program::file()?;
    match command {
        Command::Communicators(options) => {
            program::clean_up_on_signal()?;
            let plan = options.plan(&program)?;
            communicators::run(&plan, &program, &variable, &mut output::standard())
                .map(Outcome::from)
        }
        Command::AsSpark(options) => {
            program::clean_up_on_signal()?;
            options.run(&variable)
        }
        Command::CommunicatorsRank(task) => task.run().map(|()| Outcome::Good),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_examples_parse() {
        for line in [COMMUNICATORS, AS_SPARK]
            .join("\n")
            .lines()
            .filter(|line| line.contains("spark-lab"))
        {
            let words = line
                .split_whitespace()
                .skip_while(|word| *word != "spark-lab");
            if let Err(error) = Cli::try_parse_from(words.take_while(|word| *word != "#")) {
                panic!("{line}: {error}");
            }
        }
    }
}
