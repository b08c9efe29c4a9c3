//! The library under the command line `nccl-spark`. The laboratory (`lab`, which no package
//! contains) uses this library too. Besides [`nccl_spark`], only items that `lab` uses are public.
//!
//! `program` has the parts that `nccl-spark` and `lab` share. `cli` defines the commands of
//! `nccl-spark`, and `commands` implements them. The commands share `ranks` (the processes of a
//! run), `fabric` (the devices that carry the ranks' messages), `scene` (the environment of real
//! NCCL) and `output`. The plugin is always a library file, driven through its C interface as NCCL
//! drives it (`net`).

#![deny(clippy::disallowed_methods)]

pub mod abi;
mod cli;
mod commands;
mod date;
mod digest;
pub mod fabric;
pub mod gpu;
mod interrupt;
pub mod lines;
#[allow(unsafe_code)]
pub mod net;
pub mod output;
pub mod places;
mod proc_stat;
pub mod program;
pub mod ranks;
pub mod scene;
pub mod sizes;
mod unique;
pub mod usage;
mod words;

use std::process::ExitCode;

/// Runs the command line `nccl-spark`.
pub fn nccl_spark() -> ExitCode {
    program::run(
        |cli: &cli::Cli| &cli.output_level,
        |cli| cli.command.execute(),
    )
}

// Reads the variable by which CI forbids skipped tests.
#[cfg(test)]
#[allow(clippy::disallowed_methods)]
#[path = "../../tests/common/skip.rs"]
mod skip;
