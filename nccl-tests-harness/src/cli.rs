//! All commands, with names, help and examples. Each command's options are in its own file or
//! folder of `commands/`.

mod examples;
mod execute;

use crate::commands::collectives::options::Options as Collective;
use crate::commands::collectives::rank::Collectives;
use crate::commands::memory::rank::Memory;
use crate::commands::{
    doctor, env, fabric, install, manual, memory, nccl_tests, rails, report, top, tune,
};
use crate::program::OutputLevel;
use crate::ranks::control::Work;
use crate::ranks::process;
use clap::{Parser, Subcommand};

/// Tests, measures, tunes and installs the NCCL network plugin for DGX Spark.
#[derive(Debug, Parser)]
#[command(name = "nccl-spark", version = env!("PROGRAM_VERSION"), infer_subcommands = false, after_help = examples::ALL)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// The amount of output.
    #[command(flatten)]
    pub output_level: OutputLevel,
}

/// The commands of the program.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Times and checks an all-gather over host memory, in place.
    ///
    /// The size is what every rank ends with; each rank contributes size / ranks, rounded down to
    /// whole bytes. busbw = algbw x (ranks - 1) / ranks.
    #[command(alias = "all_gather", after_help = examples::ALL_GATHER)]
    AllGather(Collective),
    /// Times and checks an all-reduce over host memory, out of place.
    ///
    /// The CPU adds up bytes, which wrap around. The size is what each rank contributes. busbw =
    /// algbw x 2 (ranks - 1) / ranks.
    #[command(alias = "all_reduce", after_help = examples::ALL_REDUCE)]
    AllReduce(Collective),
    /// Times and checks a reduce-scatter over host memory, out of place.
    ///
    /// The CPU adds up bytes, which wrap around. The size is what each rank contributes; each ends
    /// with size / ranks, rounded down to whole bytes. busbw = algbw x (ranks - 1) / ranks.
    #[command(alias = "reduce_scatter", after_help = examples::REDUCE_SCATTER)]
    ReduceScatter(Collective),
    /// Times and checks a broadcast from rank 0, in place.
    ///
    /// The size is what every rank ends with. busbw = algbw.
    #[command(after_help = examples::BROADCAST)]
    Broadcast(Collective),
    /// Times and checks an all-to-all: every rank sends a part to every rank, out of place.
    ///
    /// The size is what each rank sends in all; each part is size / ranks, rounded down to whole
    /// bytes. busbw = algbw x (ranks - 1) / ranks.
    #[command(name = "alltoall", aliases = ["all-to-all", "all_to_all"], after_help = examples::ALL_TO_ALL)]
    AllToAll(Collective),
    /// Times and checks a ring: every rank sends to the next one and receives from the one before,
    /// out of place.
    ///
    /// The size is what each rank sends. busbw = algbw.
    #[command(name = "sendrecv", aliases = ["send-recv", "send_recv"], after_help = examples::SEND_RECV)]
    SendRecv(Collective),
    /// Finds the fastest settings for these machines and writes them to the settings file.
    ///
    /// Measures several numbers of queue pairs and several smallest share sizes, in turns. Then
    /// measures the best of them and the defaults, again in turns. Writes the best only if their
    /// slowest round is faster than the fastest round of the defaults.
    #[command(after_help = examples::TUNE)]
    Tune(Box<tune::options::Options>),
    /// Writes a tuner's table into this machine's settings file.
    #[command(name = "tune-collectives-write", hide = true)]
    TuneCollectivesWrite(tune::collectives::write::Task),
    /// Runs your own build of nccl-tests over this plugin, or in turns over it and NCCL's own
    /// networks.
    ///
    /// Sets the environment and prints it, reads the program's table and NCCL's log, and fails if
    /// NCCL used another network than the one asked for. To NCCL each rank on this machine is a
    /// host of its own.
    #[command(name = "nccl-tests", alias = "nccl_tests", after_help = examples::NCCL_TESTS)]
    NcclTests(Box<nccl_tests::options::Options>),
    /// Becomes a rank of nccl-tests.
    #[command(name = "nccl-tests-rank", hide = true)]
    NcclTestsRank(nccl_tests::mpirun::Rank),
    /// Shows which kinds of memory the plugin can send from and receive into: malloc, CUDA pinned,
    /// managed, GPU.
    ///
    /// A GPU kernel writes a pattern, the plugin moves it into memory of the same kind, another
    /// kernel counts wrong bytes. Without a GPU the CPU does this with malloc alone. --litmus also
    /// tests whether NCCL's LL128 protocol is safe on this machine.
    #[command(after_help = examples::MEMORY)]
    Memory(Box<memory::options::Options>),
    /// Injects faults into the software fabric while a job runs over it, and shows what runs.
    #[command(after_help = examples::FABRIC)]
    Fabric(fabric::Options),
    /// Shows which RoCE ports of this machine would be merged, the expected rate, and why the
    /// others are not used.
    ///
    /// Exit status: 0 at least one rail is usable, 1 none is or the machine cannot be examined, 2
    /// the command line is wrong.
    #[command(after_help = examples::RAILS)]
    Rails(Box<rails::Options>),
    /// Finds what is wrong with this machine or a job, the worst first, each with the command that
    /// cures it.
    ///
    /// Looks at libraries, variables, devices, limits, links, addresses and counters. Needs no
    /// root, and says what it could not see. Of the environment it reads only NCCL_*, UCX_*,
    /// GLOO_*, TP_* and the variables that decide which libraries are loaded.
    #[command(after_help = examples::DOCTOR)]
    Doctor(doctor::Options),
    /// Writes the facts of this machine and a measurement into one JSON file that you can post.
    ///
    /// The file has numbers, versions, names of devices and ids of findings. It has no names of
    /// hosts or users, no addresses, paths or serial numbers, and no text of other programs. With
    /// --hosts it also measures between hosts, with --nccl-tests also NCCL. A part that fails is
    /// named in the file, and the others run.
    #[command(after_help = examples::REPORT)]
    Report(Box<report::Options>),
    /// Shows what the rails of this machine's jobs carry, live: rates both ways, shares, latency,
    /// losses, stalls.
    ///
    /// Reads the counters that each job's process keeps for its rails. Jobs of other users, and
    /// those in containers that run as root, need sudo. Where standard output is no terminal, plain
    /// lines.
    #[command(after_help = examples::TOP)]
    Top(top::Options),
    /// Lists the plugin's settings: name, default, meaning, current value.
    #[command(after_help = examples::SETTINGS)]
    Settings,
    /// Prints the environment variables that make a job use the plugin, for a shell, docker or Ray.
    ///
    /// Set them for a job, not in a login script: with NCCL_NET=Spark, NCCL fails where no rail
    /// exists.
    #[command(after_help = examples::ENV)]
    Env(env::Options),
    /// Installs this program, the plugin, the software fabric, shell completions and manual pages.
    ///
    /// Files that install did not put there are neither replaced nor removed.
    /// DIR/lib/nccl-spark/manifest lists what is installed.
    #[command(after_help = examples::INSTALL)]
    Install(install::Install),
    /// Removes what install installed; files that were changed since are kept.
    #[command(after_help = examples::UNINSTALL)]
    Uninstall(install::Uninstall),
    /// Prints completions for a shell.
    #[command(after_help = examples::COMPLETIONS)]
    Completions(manual::Completions),
    /// Prints the manual page.
    #[command(name = "man", hide = true)]
    Manual(manual::Manual),
    /// One rank of a collective. Its standard input is the connection to the command that starts
    /// it.
    #[command(name = Collectives::COMMAND, hide = true)]
    Rank(process::Start),
    /// The process that tries one kind of memory, in the same way.
    #[command(name = Memory::COMMAND, hide = true)]
    MemoryRank(process::Start),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::{one_line, wrong};
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    fn mistake(arguments: &str) -> String {
        one_line(&Cli::try_parse_from(arguments.split_whitespace()).unwrap_err())
    }

    /// Splits a line into words as a shell does, up to a comment or a redirection.
    fn words(line: &str) -> Vec<String> {
        let mut words = vec![String::new()];
        let mut quote = None;
        for c in line.chars() {
            match c {
                '\'' | '"' if quote.is_none() => quote = Some(c),
                c if quote == Some(c) => quote = None,
                '#' | '>' if quote.is_none() && words.last().is_some_and(String::is_empty) => break,
                ' ' if quote.is_none() => words.push(String::new()),
                c => words.last_mut().unwrap().push(c),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }

    #[test]
    fn the_command_line_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn errors_of_commands_look_like_claps() {
        let by_clap = Cli::command().error(ErrorKind::ValueValidation, "a mistake");
        assert_eq!(wrong("a mistake").to_string(), by_clap.to_string());
    }

    #[test]
    fn collectives_have_nccl_tests_names_too() {
        for name in [
            "all_gather",
            "all_reduce",
            "reduce_scatter",
            "all-gather",
            "alltoall",
            "sendrecv",
        ] {
            assert!(
                Cli::try_parse_from(["nccl-spark", name, "-b", "8"]).is_ok(),
                "{name}"
            );
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_range() {
        for (arguments, allowed) in [
            (
                "nccl-spark all-gather -n 0",
                "invalid value '0' for '--iters <N>': must be at least 1",
            ),
            (
                "nccl-spark all-gather -n 4294967296",
                "must be at most 4294967295",
            ),
            (
                "nccl-spark all-gather -f 0",
                "'--stepfactor <N>': must be at least 1",
            ),
            ("nccl-spark all-gather -r 1", "must be 2 to 256"),
            ("nccl-spark all-gather -T 86401", "must be 1 to 86400"),
            (
                "nccl-spark all-gather -n 1x",
                "'--iters <N>': must be a whole number",
            ),
            ("nccl-spark tune collectives -n 0", "must be at least 1"),
        ] {
            let text = mistake(arguments);
            assert!(text.ends_with(allowed), "{arguments}: {text}");
        }
    }

    #[test]
    fn every_command_has_examples_that_are_right() {
        let command = Cli::command();
        for command in command
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
        {
            let name = command.get_name();
            let examples = command.get_after_help().map(ToString::to_string);
            let examples = examples.unwrap_or_else(|| panic!("{name} has no examples"));
            let joined = examples.replace("\\\n", "");
            let lines: Vec<&str> = joined
                .lines()
                .filter(|line| line.starts_with("  "))
                .collect();
            assert!(!lines.is_empty(), "{name}: {examples}");
            assert!(
                examples.lines().all(|line| line.len() < 80),
                "{name}: {examples}"
            );
            for line in lines {
                // The command inside `$(...)`.
                let line = line
                    .split_once("$(")
                    .and_then(|(_, rest)| rest.split_once(')'))
                    .map_or(line, |(inner, _)| inner);
                let words = words(line);
                let command = words
                    .iter()
                    .skip_while(|word| *word != "nccl-spark" && !word.ends_with("/nccl-spark"));
                let command: Vec<&String> = command.collect();
                assert_eq!(
                    command.get(1).map(|word| word.as_str()),
                    Some(name),
                    "{line}"
                );
                if let Err(error) = Cli::try_parse_from(&command) {
                    panic!("{line}: {error}");
                }
            }
        }
    }
}
