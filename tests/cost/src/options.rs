//! The command line.

use crate::drive::Plan;
use std::path::{Path, PathBuf};

pub const USAGE: &str = "\
Counts the instructions that a plugin's own code spends on a message: isend, irecv and test together, over the software
fabric, under valgrind's callgrind.

  cost [OPTION]...
    --plugin FILE      the plugin's library (target/release/libnccl_net_spark.so)
    --softverbs FILE   the software fabric (softverbs-ibverbs beside the plugin)
    --against FILE     another plugin's library to compare with
    --at-most RATIO    fail where this plugin needs more than so much of the other's instructions
    --limit N          fail where this plugin needs more than N instructions
    --rails N,...      rails of a connection, 1 to 4 (1,4)
    --sizes BYTES,...  message sizes (8,128,4096,65536,524288)
    --in-flight N,...  messages under way at a time, 1 to 32 (1,8)
    --messages N       messages of each size and kind (128)
    --functions N      show the N functions and source files that cost most, and calls of other libraries (0)
    --keep FOLDER      keep callgrind's files there, for callgrind_annotate";

#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    pub plugin: PathBuf,
    pub softverbs: PathBuf,
    pub against: Option<PathBuf>,
    /// Greatest allowed ratio of this plugin's instructions to those of the plugin `against`.
    pub at_most: Option<f64>,
    /// Greatest allowed number of instructions for one message.
    pub limit: Option<f64>,
    pub rails: Vec<usize>,
    pub plan: Plan,
    pub functions: usize,
    pub keep: Option<PathBuf>,
}

impl Options {
    /// Reads the command line. An error names the unusable option.
    pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let plan = Plan { sizes: vec![8, 128, 4096, 65536, 524_288], windows: vec![1, 8], messages: 128 };
        let plugin = PathBuf::from("target/release/libnccl_net_spark.so");
        let mut softverbs = None;
        let (against, at_most, limit, keep) = (None, None, None, None);
        let rails = vec![1, 4];
        let mut options =
            Self { plugin, softverbs: PathBuf::new(), against, at_most, limit, rails, plan, functions: 0, keep };
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(|| format!("{name} needs a value"))?;
            match name.as_str() {
                "--plugin" => options.plugin = value.into(),
                "--softverbs" => softverbs = Some(value.into()),
                "--against" => options.against = Some(file(value.as_ref())?),
                "--at-most" => options.at_most = Some(value.parse().map_err(|_| format!("{name}: no number"))?),
                "--limit" => options.limit = Some(value.parse().map_err(|_| format!("{name}: no number"))?),
                "--rails" => options.rails = numbers(&name, &value, 1..=4)?,
                "--sizes" => options.plan.sizes = numbers(&name, &value, 1..=1 << 30)?,
                "--in-flight" => options.plan.windows = numbers(&name, &value, 1..=32)?,
                "--messages" => options.plan.messages = numbers(&name, &value, 1..=1 << 20)?[0],
                "--functions" => options.functions = numbers(&name, &value, 0..=1000)?[0],
                "--keep" => options.keep = Some(value.into()),
                _ => return Err(format!("unknown option {name}\n\n{USAGE}")),
            }
        }
        if options.plan.windows.iter().any(|window| !options.plan.messages.is_multiple_of(*window)) {
            return Err("--messages has to be a multiple of each of --in-flight".to_owned());
        }
        options.plugin = file(&options.plugin)?;
        options.softverbs = file(&softverbs.unwrap_or_else(|| options.plugin.with_file_name("softverbs-ibverbs")))?;
        Ok(options)
    }
}

/// Returns the full path of a file, because callgrind names files by their full paths.
fn file(path: &Path) -> Result<PathBuf, String> {
    path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))
}

/// Reads numbers within `range`, with commas between them.
pub fn numbers(name: &str, text: &str, range: std::ops::RangeInclusive<usize>) -> Result<Vec<usize>, String> {
    let number = |word: &str| word.parse().ok().filter(|number| range.contains(number));
    let numbers: Option<Vec<usize>> = text.split(',').map(number).collect();
    numbers.ok_or_else(|| format!("{name} {text}: numbers from {} to {}", range.start(), range.end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_bounded() {
        assert_eq!(numbers("--rails", "1,4", 1..=4), Ok(vec![1, 4]));
        assert!(numbers("--rails", "0", 1..=4).is_err());
        assert!(numbers("--rails", "1,,2", 1..=4).is_err());
    }

    #[test]
    fn unknown_input_is_an_error() {
        let parse = |words: &[&str]| Options::parse(words.iter().map(|word| (*word).to_owned()));
        assert!(parse(&["--plugins", "x"]).unwrap_err().contains("unknown option"));
        assert!(parse(&["--rails"]).unwrap_err().contains("needs a value"));
        assert!(parse(&["--messages", "12", "--in-flight", "8"]).unwrap_err().contains("multiple"));
    }
}
