//! The command line.

use crate::drive::Plan;
use clap::Parser;
use clap::builder::RangedU64ValueParser;
use std::path::{Path, PathBuf};

/// Counts the instructions that a plugin's own code spends on a message: isend, irecv and test
/// together, over the software fabric, under valgrind's callgrind.
#[derive(Debug, Clone, Parser)]
#[command(name = "cost")]
pub struct Options {
    /// The plugin's library.
    #[arg(long, value_name = "FILE", default_value = "target/release/libnccl_net_spark.so", value_parser = file)]
    pub plugin: PathBuf,
    /// The software fabric [default: softverbs-ibverbs beside the plugin]
    #[arg(long, value_name = "FILE", value_parser = file)]
    softverbs: Option<PathBuf>,
    /// Another plugin's library to compare with.
    #[arg(long, value_name = "FILE", value_parser = file)]
    pub against: Option<PathBuf>,
    /// Fails if this plugin needs more than this ratio of the other's instructions.
    #[arg(long, value_name = "RATIO", requires = "against")]
    pub at_most: Option<f64>,
    /// Fails if this plugin needs more than this number of instructions for one message.
    #[arg(long, value_name = "N")]
    pub limit: Option<f64>,
    /// Rails of a connection, 1 to 4.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4], value_parser = RangedU64ValueParser::<usize>::new().range(1..=4))]
    pub rails: Vec<usize>,
    #[command(flatten)]
    pub plan: Plan,
    /// Shows this number of functions and source files that cost most, and other libraries' calls.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub functions: usize,
    /// Keeps callgrind's files in this folder, for callgrind_annotate.
    #[arg(long, value_name = "FOLDER")]
    pub keep: Option<PathBuf>,
}

impl Options {
    /// Returns the software fabric's library.
    ///
    /// # Errors
    /// There is none beside the plugin, and the option is not set.
    pub fn softverbs(&self) -> Result<PathBuf, String> {
        let beside = || {
            file(
                &self
                    .plugin
                    .with_file_name("softverbs-ibverbs")
                    .display()
                    .to_string(),
            )
        };
        self.softverbs.clone().map_or_else(beside, Ok)
    }
}

/// Returns the full path of a file, because callgrind names files by their full paths.
fn file(path: &str) -> Result<PathBuf, String> {
    Path::new(path)
        .canonicalize()
        .map_err(|error| format!("{path}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_numbers_are_bounded() {
        Options::command().debug_assert();
        let program = std::env::current_exe().unwrap();
        let parse = |words: &[&str]| {
            let all = ["cost", "--plugin", program.to_str().unwrap()]
                .into_iter()
                .chain(words.iter().copied());
            Options::try_parse_from(all)
        };
        let usual = parse(&[]).unwrap();
        assert_eq!(
            (usual.rails, usual.plan.windows, usual.plan.messages),
            (vec![1, 4], vec![1, 8], 128)
        );
        assert_eq!(parse(&["--rails", "2,3"]).unwrap().rails, [2, 3]);
        for wrong in [
            &["--rails", "0"][..],
            &["--rails", "1,,2"],
            &["--in-flight", "33"],
            &["--plugins", "x"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        let uneven = parse(&["--messages", "12", "--in-flight", "8"]).unwrap();
        assert!(uneven.plan.check().unwrap_err().contains("multiple"));
    }
}
