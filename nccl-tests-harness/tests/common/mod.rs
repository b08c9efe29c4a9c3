//! Common parts of the command line's tests: the fake plugin, and the program under test.
#![allow(dead_code, unused_imports, reason = "each test uses a part")]

pub mod programs;
#[path = "../../../tests/common/skip.rs"]
pub mod skip;

pub use programs::{Fake, Fakes, ProgramOutput, shared_object};

use nix::pty::{Winsize, openpty};
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_nccl-spark");

impl Fakes {
    /// Runs `nccl-spark memory` with `arguments` and with the variables of `environment`, which has
    /// the form "FAKE_GPUS=2".
    pub fn run(&self, arguments: &str, environment: &str) -> ProgramOutput {
        let mut command = nccl_spark();
        command
            .args(["memory", "--fabric", "verbs", "--plugin"])
            .arg(self.plugin.library());
        command
            .args(arguments.split_whitespace())
            .env("LD_LIBRARY_PATH", self.plugin.folder());
        command.envs(
            environment
                .split_whitespace()
                .filter_map(|one| one.split_once('=')),
        );
        command.output().unwrap().into()
    }
}

pub fn nccl_spark() -> Command {
    programs::clean(PROGRAM)
}

pub fn say(arguments: &[&str]) -> ProgramOutput {
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

/// Returns true while the process runs, and false for a zombie.
pub fn is_running(pid: impl Display) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')')
        .next()
        .and_then(|rest| rest.split_whitespace().next())
        .is_some_and(|state| state != "Z")
}

/// Runs a command with its standard output on a terminal. Returns its exit status, and the text on
/// the terminal.
pub fn run_on_terminal(mut command: Command, size: Option<&Winsize>) -> (ExitStatus, String) {
    let terminal = openpty(size, None).unwrap();
    let mut process = command.stdout(Stdio::from(terminal.slave)).spawn().unwrap();
    // `command` has the terminal open, too, and `read_terminal` waits until no process has.
    drop(command);
    let text = read_terminal(terminal.master);
    (process.wait().unwrap(), text)
}

/// Reads a terminal until no process has its other side open.
pub fn read_terminal(master: OwnedFd) -> String {
    let mut text = Vec::new();
    // Reading at the end of a terminal is an error.
    let _ = File::from(master).read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}
