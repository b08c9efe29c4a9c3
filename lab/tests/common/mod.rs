//! Helpers of the tests of `spark-lab`: the helpers that the tests of `nccl-spark` use too, and the
//! program under test.
#![allow(dead_code, unused_imports, reason = "each test uses a part")]

#[path = "../../../nccl-tests-harness/tests/common/programs.rs"]
pub mod programs;
#[path = "../../../tests/common/skip.rs"]
pub mod skip;

pub use programs::{Fake, Fakes, ProgramOutput};

use std::path::PathBuf;
use std::process::Command;

const PROGRAM: &str = env!("CARGO_BIN_EXE_spark-lab");

/// The program under test, without environment variables that could change its behaviour.
pub fn spark_lab() -> Command {
    programs::clean(PROGRAM)
}

pub fn say(arguments: &[&str]) -> ProgramOutput {
    spark_lab().args(arguments).output().unwrap().into()
}

/// Path of another program of the workspace.
pub fn beside(name: &str) -> String {
    PathBuf::from(PROGRAM)
        .with_file_name(name)
        .display()
        .to_string()
}

/// The plugin, if the whole workspace is built; otherwise prints that the test is skipped.
#[track_caller]
pub fn built() -> Option<PathBuf> {
    programs::built_beside(PROGRAM)
}
