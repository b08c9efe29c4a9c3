//! Prepares the words of the command line for clap, where clap's definitions are not enough.

use crate::usage::wrong;
use clap::error::ErrorKind;
use clap::{Command, Error};
use std::ffi::{OsStr, OsString};

/// Returns the words for clap.
///
/// A `--json` without its own FILE becomes `--json=-`. Otherwise clap would take the next word as
/// the FILE, even if it is an argument, such as a test of nccl-tests. A negative number becomes a
/// part of the option before it, as in `-b=-5`. Otherwise clap would take `-5` for an option. With
/// `-b=-5`, clap's error names the option `-b` and the allowed values.
pub fn prepared(program: &Command, words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut command = program;
    let mut prepared = Vec::new();
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        command = command.find_subcommand(&word).unwrap_or(command);
        let mut word = word;
        if word == "--json" && words.peek().is_some_and(|next| is_known(command, next)) {
            word.push("=-");
        }
        if is_option(&word)
            && let Some(number) = words.next_if(|next| is_negative(next))
        {
            word.push("=");
            word.push(number);
        }
        let is_last = word == "--";
        prepared.push(word);
        if is_last {
            break;
        }
    }
    prepared.extend(words);
    prepared
}

/// Returns true for the name of a subcommand of `command`, and for a word that `command` lists as a
/// possible value of an argument.
fn is_known(command: &Command, word: &OsStr) -> bool {
    let mut values = command
        .get_positionals()
        .flat_map(|argument| argument.get_possible_values());
    let is_value = word
        .to_str()
        .is_some_and(|word| values.any(|value| value.matches(word, false)));
    is_value || command.find_subcommand(word).is_some()
}

/// Returns true for an option word without `=VALUE`.
fn is_option(word: &OsStr) -> bool {
    let bytes = word.as_encoded_bytes();
    bytes.starts_with(b"-") && bytes.iter().any(|byte| *byte != b'-') && !bytes.contains(&b'=')
}

fn is_negative(word: &OsStr) -> bool {
    matches!(word.as_encoded_bytes(), [b'-', b'0'..=b'9' | b'.', ..])
}

/// Returns the error for a value that must be UTF-8 and is not. clap's own error does not name the
/// value.
pub fn not_utf8(program: &Command, words: &[OsString]) -> Option<Error> {
    let text = |word: &OsString| OsString::from(word.to_string_lossy().into_owned());
    // Paths may have any bytes. The words are converted to text one after another. The cause
    // is the word whose conversion makes clap's error disappear.
    let is_cause = |at: &usize| {
        let mended = words[..=*at]
            .iter()
            .map(text)
            .chain(words[at + 1..].iter().cloned());
        !program
            .clone()
            .try_get_matches_from(mended)
            .is_err_and(|error| error.kind() == ErrorKind::InvalidUtf8)
    };
    let at = (0..words.len()).find(is_cause)?;
    let word = words[at].to_string_lossy();
    let before = at
        .checked_sub(1)
        .map(|before| words[before].to_string_lossy())
        .filter(|word| word.starts_with('-'));
    let (option, value) = match (
        word.strip_prefix('-').and_then(|_| word.split_once('=')),
        before,
    ) {
        (Some((option, value)), _) => (format!(" for '{option}'"), value.to_owned()),
        (None, Some(option)) => (format!(" for '{option}'"), word.into_owned()),
        (None, None) => (String::new(), word.into_owned()),
    };
    Some(wrong(format!(
        "invalid value '{value}'{option}: must be UTF-8"
    )))
}

#[cfg(test)]
mod tests {
    use super::prepared;
    use crate::cli::Cli;
    use crate::output::report::Target;
    use crate::program;
    use crate::usage::one_line;
    use clap::{ArgMatches, Command, CommandFactory};
    use std::ffi::{OsStr, OsString};
    use std::os::unix::ffi::OsStrExt;

    /// Returns the target of a line's `--json`, and the arguments of its command.
    fn told(line: &str) -> (Option<Target>, Vec<String>) {
        let program = Cli::command();
        let words = prepared(&program, line.split(' ').map(Into::into));
        let matches = program
            .try_get_matches_from(words)
            .unwrap_or_else(|error| panic!("{line}: {error}"));
        let mut inner: &ArgMatches = &matches;
        while let Some((_, deeper)) = inner.subcommand() {
            inner = deeper;
        }
        let arguments = ["tests", "arguments"].into_iter();
        let arguments = arguments
            .filter_map(|id| inner.try_get_raw(id).ok().flatten())
            .flatten();
        let arguments = arguments
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        (inner.get_one::<Target>("json").cloned(), arguments)
    }

    fn file(name: &str) -> Option<Target> {
        Some(Target::File(name.into()))
    }

    /// Returns those of `command` and the commands below it that have a report as JSON, each as a
    /// command line. `called` is the command line of `command`.
    fn with_report(command: &Command, called: &str) -> Vec<String> {
        let has_report = |command: &Command| {
            command
                .get_arguments()
                .any(|option| option.get_id() == "json" && option.get_action().takes_values())
        };
        let own = has_report(command).then(|| called.to_owned());
        let reports =
            |inner: &Command| with_report(inner, &format!("{called} {}", inner.get_name()));
        own.into_iter()
            .chain(command.get_subcommands().flat_map(reports))
            .collect()
    }

    #[test]
    fn every_report_is_printed_or_written() {
        let commands = with_report(&Cli::command(), "nccl-spark");
        assert_eq!(commands.len(), 13, "{commands:?}");
        for command in commands {
            assert_eq!(told(&command).0, None, "{command}");
            for printed in [
                "--json",
                "--json -",
                "--json=-",
                "--json -q",
                "-q --json",
                "--json - -q",
            ] {
                assert_eq!(
                    told(&format!("{command} {printed}")).0,
                    Some(Target::Output),
                    "{command} {printed}"
                );
            }
            for written in ["--json out", "--json=out", "--json out -q", "-q --json out"] {
                assert_eq!(
                    told(&format!("{command} {written}")).0,
                    file("out"),
                    "{command} {written}"
                );
            }
        }
    }

    #[test]
    fn an_argument_after_json_is_no_file() {
        for (line, target, arguments) in [
            (
                "nccl-tests --json all_reduce -- --json -b",
                Some(Target::Output),
                "all_reduce --json -b",
            ),
            (
                "nccl-tests --json all-reduce",
                Some(Target::Output),
                "all-reduce",
            ),
            (
                "nccl-tests --json all_reduce_perf",
                Some(Target::Output),
                "all_reduce_perf",
            ),
            (
                "nccl-tests --json out all_reduce",
                file("out"),
                "all_reduce",
            ),
            (
                "nccl-tests --json - all_reduce",
                Some(Target::Output),
                "all_reduce",
            ),
            (
                "nccl-tests --json=all_reduce sendrecv",
                file("all_reduce"),
                "sendrecv",
            ),
            (
                "nccl-tests --json ./all_reduce sendrecv",
                file("./all_reduce"),
                "sendrecv",
            ),
            (
                "nccl-tests --json -- -b 8",
                Some(Target::Output),
                "all_gather -b 8",
            ),
            (
                "nccl-tests sendrecv -- --json all_reduce",
                None,
                "sendrecv --json all_reduce",
            ),
            // `rails` takes no such argument, so the word is the file.
            ("rails --json all_reduce", file("all_reduce"), ""),
        ] {
            let expected = arguments
                .split(' ')
                .filter(|word| !word.is_empty())
                .map(str::to_owned)
                .collect();
            assert_eq!(
                told(&format!("nccl-spark {line}")),
                (target, expected),
                "{line}"
            );
        }
    }

    /// If `collectives` were the FILE, plain `tune` would run and write a settings file.
    #[test]
    fn a_subcommand_after_json_is_no_file() {
        let words = ["nccl-spark", "tune", "--json", "collectives"].map(Into::into);
        let error = program::parse::<Cli>(words).unwrap_err().to_string();
        assert!(
            error.contains("'collectives' cannot be used with '--json"),
            "{error}"
        );
    }

    fn mistake(words: &[&[u8]]) -> String {
        let words = words.iter().map(|word| OsStr::from_bytes(word).to_owned());
        one_line(
            &program::parse::<Cli>([OsString::from("nccl-spark")].into_iter().chain(words))
                .unwrap_err(),
        )
    }

    #[test]
    fn a_negative_value_names_its_option() {
        let size =
            "must be a number of bytes below 2^53, with or without K, M or G (powers of 1024)";
        for (words, text) in [
            (
                "all-gather -b -5",
                format!("invalid value '-5' for '--minbytes <SIZE>': {size}"),
            ),
            (
                "all-gather --maxbytes -5K -q",
                format!("invalid value '-5K' for '--maxbytes <SIZE>': {size}"),
            ),
            (
                "all-gather -n -3",
                "invalid value '-3' for '--iters <N>': must be at least 1".to_owned(),
            ),
            (
                "all-gather --scale -.5",
                "invalid value '-.5' for '--scale <F>': must be 0.000001 to 1000000".to_owned(),
            ),
            (
                "top -i -1",
                "invalid value '-1' for '--interval <S>': must be 0.1 to 3600 seconds, as in 0.5"
                    .to_owned(),
            ),
            ("all-gather -5", "unexpected argument '-5' found".to_owned()),
            (
                "fabric refuse 0:a -1",
                "invalid value '-1' for '<COUNT>': must be a number from 0 on".to_owned(),
            ),
        ] {
            let words: Vec<&[u8]> = words.split(' ').map(str::as_bytes).collect();
            assert_eq!(mistake(&words), text);
        }
        let (_, arguments) = told("nccl-spark nccl-tests sendrecv -- -b -5");
        assert_eq!(arguments, ["sendrecv", "-b", "-5"], "left to the program");
    }

    #[test]
    fn a_value_that_is_not_text_names_its_option() {
        for (words, text) in [
            (
                &[&b"memory"[..], b"--profile", b"a\xff"][..],
                "invalid value 'a\u{fffd}' for '--profile': must be UTF-8",
            ),
            (
                &[b"all-gather", b"-b", b"8\xff", b"-q"],
                "invalid value '8\u{fffd}' for '-b': must be UTF-8",
            ),
            (
                &[b"all-gather", b"--minbytes=8\xff"],
                "invalid value '8\u{fffd}' for '--minbytes': must be UTF-8",
            ),
            (
                &[b"memory", b"--plugin", b"/\xff", b"--profile", b"\xff"],
                "invalid value '\u{fffd}' for '--profile': must be UTF-8",
            ),
            (
                &[b"nccl-tests", b"all\xff"],
                "invalid value 'all\u{fffd}': must be UTF-8",
            ),
        ] {
            assert_eq!(mistake(words), text);
        }
    }
}
