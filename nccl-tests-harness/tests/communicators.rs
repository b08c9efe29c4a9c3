//! `nccl-spark communicators` as far as it goes without a GPU; with one, all of it.

mod common;

use common::say;
use std::path::Path;

#[test]
fn what_is_missing_is_named_for_every_scenario() {
    if Path::new("/dev/nvidia0").exists() {
        let said = say(&["communicators", "--fabric", "soft", "--profile", "unpaced", "--count", "20"]);
        assert_eq!(said.status, Some(0), "{said:?}");
        return;
    }
    let said = say(&["communicators", "several", "lost", "--fabric", "soft"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    for scenario in ["several", "lost"] {
        let line = said.out.lines().find(|line| line.starts_with(scenario)).unwrap();
        assert!(line.contains("FAILED") && (scenario == "lost" || line.contains("libcuda")), "{said:?}");
    }
    assert!(said.out.contains("NCCL_NET=Spark"), "the environment is shown: {said:?}");
}

#[test]
fn a_wrong_command_line_is_told() {
    let said = say(&["communicators", "sever"]);
    assert!(said.status == Some(2) && said.err.contains("several"), "{said:?}");
    let said = say(&["communicators", "-r", "1"]);
    assert!(said.status == Some(2) && said.err.contains("2..=16"), "{said:?}");
}
