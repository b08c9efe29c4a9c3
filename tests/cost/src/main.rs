//! Counts the instructions that a plugin's own code spends on a message, and compares two plugins.
//!
//! ```sh
//! cargo build --release && cargo run --release -p cost
//! ```
//!
//! The program loads a plugin's library as NCCL does, connects it with itself in one thread over
//! the software fabric, and runs messages under callgrind. It counts only calls of `irecv`, `isend`
//! and `test`, not set-up or other threads. Before it tests a request, it waits until the fabric
//! has carried everything, so two runs give the same numbers. Polls that find nothing are counted
//! separately. Instructions are summed by library file: *plugin* is the plugin's own code, *verbs*
//! is the verbs library (here the software fabric, so it says nothing about hardware), *libc* is
//! the plugin's calls into all other libraries.
//!
//! gungraun, a benchmark harness for callgrind, is not used. It counts a function together with
//! everything that it calls, which here is mostly the software fabric. It also links the measured
//! code into the benchmark, whereas this program compares two library files from any source.

mod callgrind;
mod drive;
mod net;
mod options;
mod profile;
mod report;

use callgrind::{DRIVE, Run};
use clap::Parser;
use options::Options;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.first().map(String::as_str) {
        Some(DRIVE) => drive_as_told(&words[1..]).map(|()| true),
        _ => measure(&Options::parse()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cost: {error}");
            ExitCode::from(2)
        }
    }
}

fn drive_as_told(words: &[String]) -> Result<(), String> {
    let [library, sizes, windows, messages] = words else {
        return Err("the driving half is not for people".to_owned());
    };
    let number = |word: &str| {
        word.parse()
            .map_err(|error| format!("{DRIVE} {word}: {error}"))
    };
    let numbers = |words: &String| {
        words
            .split(',')
            .map(number)
            .collect::<Result<Vec<usize>, _>>()
    };
    let plan = drive::Plan {
        sizes: numbers(sizes)?,
        windows: numbers(windows)?,
        messages: number(messages)?,
    };
    drive::run(Path::new(library), &plan)
}

/// Measures and prints. Returns false if the allowed ratio or number of instructions was exceeded.
fn measure(options: &Options) -> Result<bool, String> {
    options.plan.check()?;
    let softverbs = options.softverbs()?;
    let folder = options
        .keep
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("cost-{}", std::process::id())));
    let mut kept = true;
    for &rails in &options.rails {
        let run = |plugin: &Path, name: &str| {
            let folder = folder.join(format!("{name}-{rails}"));
            let run = Run {
                plugin,
                softverbs: &softverbs,
                rails,
                plan: &options.plan,
                folder,
            };
            let phases = run.start()?;
            Ok::<_, String>(report::Costs::of(plugin, &softverbs, phases))
        };
        let ours = run(&options.plugin, "plugin")?;
        let theirs = options
            .against
            .as_deref()
            .map(|other| run(other, "against"))
            .transpose()?;
        println!(
            "{}",
            report::heading(rails, &options.plugin, options.against.as_deref())
        );
        kept &= report::table(&ours, theirs.as_ref(), options);
        for costs in std::iter::once(&ours).chain(&theirs) {
            report::functions(costs, options.functions);
        }
    }
    if options.keep.is_none() {
        let _ = std::fs::remove_dir_all(&folder);
    }
    Ok(kept)
}
