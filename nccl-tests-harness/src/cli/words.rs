//! The words of the command line before clap reads them, for what its definitions cannot say.

use clap::Command;
use std::ffi::{OsStr, OsString};

/// The words for clap. A `--json` without a FILE of its own becomes `--json=-`: clap would take the next word for the FILE, also
/// where it is an argument such as a scenario of bench.
pub fn prepared(program: &Command, words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let (mut command, mut prepared) = (program, Vec::new());
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        command = command.find_subcommand(&word).unwrap_or(command);
        let is_last = word == "--";
        let is_alone = word == "--json" && words.peek().is_some_and(|next| is_known(command, next));
        prepared.push(if is_alone { "--json=-".into() } else { word });
        if is_last {
            break;
        }
    }
    prepared.extend(words);
    prepared
}

/// True for the name of a subcommand, and for a value that the command lists for one of its arguments.
fn is_known(command: &Command, word: &OsStr) -> bool {
    let mut values = command.get_positionals().flat_map(|argument| argument.get_possible_values());
    let is_value = word.to_str().is_some_and(|word| values.any(|value| value.matches(word, false)));
    is_value || command.find_subcommand(word).is_some()
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use crate::cli::words::prepared;
    use crate::output::report::Target;
    use clap::{ArgMatches, Command, CommandFactory};

    /// The target of a line's `--json`, and the words that its command takes as arguments.
    fn told(line: &str) -> (Option<Target>, Vec<String>) {
        let program = Cli::command();
        let words = prepared(&program, line.split(' ').map(Into::into));
        let matches = program.try_get_matches_from(words).unwrap_or_else(|error| panic!("{line}: {error}"));
        let mut inner: &ArgMatches = &matches;
        while let Some((_, deeper)) = inner.subcommand() {
            inner = deeper;
        }
        let arguments = ["scenarios", "test", "arguments"].into_iter();
        let arguments = arguments.filter_map(|id| inner.try_get_raw(id).ok().flatten()).flatten();
        let arguments = arguments.map(|word| word.to_string_lossy().into_owned()).collect();
        (inner.get_one::<Target>("json").cloned(), arguments)
    }

    fn file(name: &str) -> Option<Target> {
        Some(Target::File(name.into()))
    }

    /// The commands of `command` with a report as JSON, as they are called.
    fn with_report(command: &Command, called: &str) -> Vec<String> {
        let has_report = |command: &Command| {
            command.get_arguments().any(|option| option.get_id() == "json" && option.get_action().takes_values())
        };
        let own = has_report(command).then(|| called.to_owned());
        let of = |inner: &Command| with_report(inner, &format!("{called} {}", inner.get_name()));
        own.into_iter().chain(command.get_subcommands().flat_map(of)).collect()
    }

    #[test]
    fn every_report_is_printed_or_written() {
        let commands = with_report(&Cli::command(), "nccl-spark");
        assert_eq!(commands.len(), 14, "{commands:?}");
        for command in commands {
            assert_eq!(told(&command).0, None, "{command}");
            for printed in ["--json", "--json -", "--json=-", "--json -q", "-q --json", "--json - -q"] {
                assert_eq!(told(&format!("{command} {printed}")).0, Some(Target::Output), "{command} {printed}");
            }
            for written in ["--json out", "--json=out", "--json out -q", "-q --json out"] {
                assert_eq!(told(&format!("{command} {written}")).0, file("out"), "{command} {written}");
            }
        }
    }

    #[test]
    fn an_argument_after_json_is_no_file() {
        for (line, target, arguments) in [
            ("bench --json latency", Some(Target::Output), "latency"),
            ("bench bandwidth --json latency rate", Some(Target::Output), "bandwidth latency rate"),
            ("bench --json out latency", file("out"), "latency"),
            ("bench --json - latency", Some(Target::Output), "latency"),
            ("bench --json=latency rate", file("latency"), "rate"),
            ("bench --json ./latency rate", file("./latency"), "rate"),
            ("nccl-tests --json all_reduce -- --json -b", Some(Target::Output), "all_reduce --json -b"),
            ("nccl-tests --json all-reduce", Some(Target::Output), "all-reduce"),
            ("nccl-tests --json all_reduce_perf", Some(Target::Output), "all_reduce_perf"),
            ("nccl-tests --json out all_reduce", file("out"), "all_reduce"),
            ("nccl-tests --json -- -b 8", Some(Target::Output), "all_gather -b 8"),
            ("nccl-tests sendrecv -- --json all_reduce", None, "sendrecv --json all_reduce"),
            // A scenario of bench, which rails does not have.
            ("rails --json latency", file("latency"), ""),
        ] {
            let expected = arguments.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect();
            assert_eq!(told(&format!("nccl-spark {line}")), (target, expected), "{line}");
        }
    }

    /// It would write a settings file, where the user wanted the sweep.
    #[test]
    fn a_subcommand_after_json_is_no_file() {
        let words = ["nccl-spark", "tune", "--json", "collectives"].map(Into::into);
        let error = Cli::read(words).unwrap_err().to_string();
        assert!(error.contains("'collectives' cannot be used with '--json"), "{error}");
    }
}
