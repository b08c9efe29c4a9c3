//! Verbosity and colours of the output.

mod common;

use common::{Fake, ProgramOutput, nccl_spark, run_on_terminal, say};
use std::process::Command;

fn run(more: &[&str]) -> ProgramOutput {
    let fake = Fake::compile(&[]);
    let library = fake.library();
    let all = [
        "sendrecv", "--fabric", "verbs", "-b", "64", "-e", "4096", "-f", "64", "-n", "2",
        "--plugin",
    ];
    say(&[&all[..], &[library.to_str().unwrap()], more].concat())
}

#[test]
fn quiet_prints_results_alone() {
    let output = run(&["--quiet"]);
    assert_eq!(
        (output.status, output.err.as_str()),
        (Some(0), ""),
        "{output:?}"
    );
    assert_eq!(output.out.lines().count(), 2, "{output:?}");
    assert!(
        output
            .out
            .lines()
            .all(|line| line.trim().starts_with(|c: char| c.is_ascii_digit())),
        "{output:?}"
    );
    let output = run(&["-q", "--rank-env", "0:FAKE_CORRUPT=4"]);
    assert_eq!(output.status, Some(1), "{output:?}");
    assert!(
        output.out.contains("FAILED") && output.err.contains("nccl-spark: failed"),
        "{output:?}"
    );
}

#[test]
fn verbose_shows_the_plugins_log_unless_a_rank_has_a_level_of_its_own() {
    let information = "NCCL INFO NET/Fake: merged 2 rails into one device: lo0 lo1\n";
    let output = run(&["-v"]);
    let all = [0, 1].map(|rank| format!("rank {rank}: {information}"));
    assert!(
        output.status == Some(0) && all.iter().all(|line| output.err.contains(line)),
        "{output:?}"
    );
    let output = run(&["-v", "--rank-env", "1:NCCL_DEBUG=WARN"]);
    assert!(
        output.err.contains(&all[0]) && !output.err.contains(&all[1]),
        "{output:?}"
    );
    let output = run(&["-v", "-q"]);
    assert!(
        output.status == Some(2) && output.err.contains("cannot be used with"),
        "{output:?}"
    );
}

#[test]
fn the_version_names_the_commit_of_a_checkout() {
    let output = say(&["--version"]);
    let git = Command::new("git")
        .args([
            "-C",
            env!("CARGO_MANIFEST_DIR"),
            "rev-parse",
            "--short=12",
            "HEAD",
        ])
        .output();
    let Some(git) = git.ok().filter(|output| output.status.success()) else {
        return common::skip::skip("this is no checkout that git reads");
    };
    let commit = String::from_utf8(git.stdout).unwrap();
    assert_eq!(
        output.out,
        format!(
            "nccl-spark {} ({})\n",
            env!("CARGO_PKG_VERSION"),
            commit.trim()
        ),
        "{output:?}"
    );
}

#[test]
fn a_terminal_has_colours_unless_no_color_is_set() {
    let shown = |variable: Option<&str>| {
        let mut command = nccl_spark();
        command
            .arg("--help")
            .env("TERM", "xterm")
            .env_remove("NO_COLOR");
        command.envs(variable.map(|name| (name, "1")));
        let (status, screen) = run_on_terminal(command, None);
        assert!(status.success());
        screen
    };
    assert!(shown(None).contains("\u{1b}["));
    let plain = shown(Some("NO_COLOR"));
    assert!(
        plain.contains("Usage: nccl-spark") && !plain.contains('\u{1b}'),
        "{plain}"
    );
}
