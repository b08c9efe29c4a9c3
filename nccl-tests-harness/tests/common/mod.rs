//! Common parts of the command line's tests: the fake plugin, and the program under test.
#![allow(dead_code, unused_imports, reason = "each test uses a part")]

pub mod programs;
#[path = "../../../tests/common/skip.rs"]
pub mod skip;

pub use programs::{Fake, Fakes, Said, shared_object};

use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_nccl-spark");

impl Fakes {
    /// Runs `nccl-spark memory` with `arguments` and `environment`, in the form "FAKE_GPUS=2".
    pub fn run(&self, arguments: &str, environment: &str) -> Said {
        let mut command = nccl_spark();
        command.args(["memory", "--fabric", "verbs", "--plugin"]).arg(self.plugin.library());
        command.args(arguments.split_whitespace()).env("LD_LIBRARY_PATH", self.plugin.folder());
        command.envs(environment.split_whitespace().filter_map(|one| one.split_once('=')));
        command.output().unwrap().into()
    }
}

pub fn nccl_spark() -> Command {
    programs::clean(PROGRAM)
}

pub fn say(arguments: &[&str]) -> Said {
    nccl_spark().args(arguments).output().unwrap().into()
}

/// Returns the plugin if the whole workspace is built; otherwise prints that the test is skipped.
#[track_caller]
pub fn built() -> Option<PathBuf> {
    programs::built_beside(PROGRAM)
}

#[track_caller]
pub fn is_built() -> bool {
    built().is_some()
}

/// Returns true if mpirun is installed; otherwise prints that the test is skipped.
#[track_caller]
pub fn has_mpirun() -> bool {
    let is_there = Command::new("mpirun").arg("--version").output().is_ok();
    if !is_there {
        skip::missing("there is no mpirun (Debian's openmpi-bin)");
    }
    is_there
}
