//! The program `spark-lab`: commands that prove claims of docs/evidence. No release package
//! contains it.
//!
//! Ranks, fabrics, NCCL's environment and output come from `nccl_tests_harness`, the library of
//! `nccl-spark`. The program looks for the plugin and the software fabric in its own folder; `cargo
//! build --release --workspace` puts all three there. Exit statuses are those of `nccl-spark`.

mod as_spark;
mod bench;
mod communicators;
mod one_version;
mod pair;
mod proc_status;

use anyhow::Result;
use clap::{Parser, Subcommand};
use nccl_tests_harness::output;
use nccl_tests_harness::program::{self, Outcome, OutputLevel, check_settings, variable};
use nccl_tests_harness::ranks::control::Work;
use nccl_tests_harness::ranks::process;
use pair::rank::Pair;
use std::process::ExitCode;

/// Measures the NCCL network plugin for DGX Spark with single messages, and stress-tests NCCL over
/// it.
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
    /// Measures bandwidth, latency and message rate between two ranks. Can compare with another
    /// plugin.
    ///
    /// Rank 0 sends to rank 1 (latency: ping-pong). One thread per rank posts messages and tests
    /// the oldest of each connection, as NCCL's proxy thread does. Every byte is checked once for
    /// each size, outside the timed part.
    #[command(after_help = BENCH)]
    Bench(Box<bench::options::Bench>),
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
    /// Makes a copy of the plugin that shows NCCL only one version of the plugin interface.
    OneVersion(one_version::Options),
    /// One rank of bench. Its standard input is the connection to the command that starts it.
    #[command(name = Pair::COMMAND, hide = true)]
    PairRank(process::Start),
    /// One rank of communicators, started by that command.
    #[command(name = "communicators-rank", hide = true)]
    CommunicatorsRank(communicators::rank::Task),
}

const BENCH: &str = "\
Examples:
  spark-lab bench bandwidth latency           # two ranks on this machine
  spark-lab bench --against libnccl-net-other.so --json out.json";

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
        Command::Bench(options) => {
            program::clean_up_on_signal()?;
            let plan = options.plan(&program, variable("NCCL_IBVERBS_LIB"))?;
            check_settings(&plan.libraries[0].1, &program)?;
            bench::run(&plan, &program).map(Outcome::from)
        }
        Command::Communicators(options) => {
            program::clean_up_on_signal()?;
            let plan = options.plan(&program)?;
            communicators::run(&plan, &program, &variable, &mut output::standard()).map(Outcome::from)
        }
        Command::AsSpark(options) => {
            program::clean_up_on_signal()?;
            options.run(&variable)
        }
        Command::OneVersion(options) => options.run(&program, output::standard()).map(|()| Outcome::Good),
        Command::PairRank(start) => {
            process::run::<Pair>(&start, variable("NCCL_DEBUG").as_deref()).map(|()| Outcome::Good)
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
        for line in [BENCH, COMMUNICATORS, AS_SPARK].join("\n").lines().filter(|line| line.contains("spark-lab")) {
            let words = line.split_whitespace().skip_while(|word| *word != "spark-lab");
            if let Err(error) = Cli::try_parse_from(words.take_while(|word| *word != "#")) {
                panic!("{line}: {error}");
            }
        }
    }
}
