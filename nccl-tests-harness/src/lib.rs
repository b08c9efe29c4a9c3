//! The library under the command lines `nccl-spark` and `spark-lab`, the laboratory of this workspace.
//!
//! `cli` has all commands of `nccl-spark`, `commands` what they do, `program` what both programs share. The commands share `ranks` (the
//! processes of a run), `fabric` (what the ranks' messages travel over), `scene` (what real NCCL is run in) and `output`. The plugin is
//! always a library file, driven through its C interface as NCCL drives it (`net`). What is public here is what `spark-lab` uses.

pub mod abi;
mod cli;
mod commands;
mod date;
pub mod fabric;
pub mod gpu;
mod interrupt;
pub mod lines;
#[allow(unsafe_code)]
pub mod net;
pub mod output;
// The measuring ranks of doctor --peer alone; `lab` has its own.
#[allow(dead_code)]
mod pair;
pub mod places;
mod proc_stat;
pub mod program;
pub mod ranks;
pub mod scene;
pub mod sizes;
pub mod usage;
mod words;

use std::process::ExitCode;

/// Runs the command line `nccl-spark`.
pub fn nccl_spark() -> ExitCode {
    program::run(|cli: &cli::Cli| &cli.loudness, |cli| cli.command.execute())
}
