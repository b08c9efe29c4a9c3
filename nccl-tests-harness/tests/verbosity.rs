//! Verbosity and colours of the output.

mod common;

use common::{Fake, Said, nccl_spark, say};
use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};

fn run(more: &[&str]) -> Said {
    let fake = Fake::compile(&[]);
    let library = fake.library();
    let all = ["sendrecv", "--fabric", "verbs", "-b", "64", "-e", "4096", "-f", "64", "-n", "2", "--plugin"];
    say(&[&all[..], &[library.to_str().unwrap()], more].concat())
}

#[test]
fn quiet_prints_results_alone() {
    let said = run(&["--quiet"]);
    assert_eq!((said.status, said.err.as_str()), (Some(0), ""), "{said:?}");
    assert_eq!(said.out.lines().count(), 2, "{said:?}");
    assert!(said.out.lines().all(|line| line.trim().starts_with(|c: char| c.is_ascii_digit())), "{said:?}");
    let said = run(&["-q", "--rank-env", "0:FAKE_CORRUPT=4"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(said.out.contains("FAILED") && said.err.contains("nccl-spark: failed"), "{said:?}");
}

#[test]
fn verbose_shows_the_plugins_log_unless_a_rank_has_a_level_of_its_own() {
    let information = "NCCL INFO NET/Fake: merged 2 rails into one device: lo0 lo1\n";
    let said = run(&["-v"]);
    let all = [0, 1].map(|rank| format!("rank {rank}: {information}"));
    assert!(said.status == Some(0) && all.iter().all(|line| said.err.contains(line)), "{said:?}");
    let said = run(&["-v", "--rank-env", "1:NCCL_DEBUG=WARN"]);
    assert!(said.err.contains(&all[0]) && !said.err.contains(&all[1]), "{said:?}");
    let said = run(&["-v", "-q"]);
    assert!(said.status == Some(2) && said.err.contains("cannot be used with"), "{said:?}");
}

#[test]
fn the_version_names_the_commit_of_a_checkout() {
    let said = say(&["--version"]);
    let git = Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR"), "rev-parse", "--short=12", "HEAD"]).output();
    let Some(git) = git.ok().filter(|output| output.status.success()) else {
        return common::skip::skip("this is no checkout that git reads");
    };
    let commit = String::from_utf8(git.stdout).unwrap();
    assert_eq!(said.out, format!("nccl-spark {} ({})\n", env!("CARGO_PKG_VERSION"), commit.trim()), "{said:?}");
}

#[test]
fn a_terminal_has_colours_unless_no_color_is_set() {
    let shown = |variable: Option<&str>| {
        let terminal = nix::pty::openpty(None, None).unwrap();
        let mut command = nccl_spark();
        command.arg("--help").env("TERM", "xterm").env_remove("NO_COLOR").stdout(Stdio::from(terminal.slave));
        command.envs(variable.map(|name| (name, "1")));
        let mut process = command.spawn().unwrap();
        drop(command);
        let (mut screen, mut part) = (Vec::new(), [0; 4096]);
        let mut master = File::from(terminal.master);
        // Reading at the end of a terminal is an error.
        while let Ok(bytes @ 1..) = master.read(&mut part) {
            screen.extend_from_slice(&part[..bytes]);
        }
        assert!(process.wait().unwrap().success());
        String::from_utf8_lossy(&screen).into_owned()
    };
    assert!(shown(None).contains("\u{1b}["));
    let plain = shown(Some("NO_COLOR"));
    assert!(plain.contains("Usage: nccl-spark") && !plain.contains('\u{1b}'), "{plain}");
}
