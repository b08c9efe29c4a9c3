//! Tests of `spark-lab communicators`: all scenarios on a machine with a GPU, the errors on others.

mod common;

use common::{Fakes, ProgramOutput, say, spark_lab};
use std::path::Path;

#[test]
fn without_a_gpu_one_error_says_so_before_anything_starts() {
    if Path::new("/dev/nvidia0").exists() {
        let output = say(&[
            "communicators",
            "--fabric",
            "soft",
            "--profile",
            "unpaced",
            "--count",
            "20",
        ]);
        assert_eq!(output.status, Some(0), "{output:?}");
        return;
    }
    let output = say(&["communicators", "several", "lost", "--fabric", "soft"]);
    assert_eq!(
        (
            output.status,
            output.out.as_str(),
            output.err.lines().count()
        ),
        (Some(1), "", 1),
        "{output:?}"
    );
    assert!(
        output
            .err
            .starts_with("spark-lab: communicators needs an NVIDIA GPU"),
        "{output:?}"
    );
}

#[test]
fn a_driver_without_a_gpu_is_distinguished_from_no_driver() {
    let fake = Fakes::new();
    let mut command = spark_lab();
    command
        .args(["communicators", "--fabric", "verbs", "--plugin"])
        .arg(fake.plugin.library());
    let output: ProgramOutput = command
        .env("LD_LIBRARY_PATH", fake.folder())
        .env("FAKE_GPUS", "0")
        .output()
        .unwrap()
        .into();
    assert_eq!(
        (
            output.status,
            output.out.as_str(),
            output.err.lines().count()
        ),
        (Some(1), "", 1),
        "{output:?}"
    );
    assert!(
        output
            .err
            .contains("needs an NVIDIA GPU and its driver: cuInit returned"),
        "{output:?}"
    );
}

#[test]
fn a_wrong_command_line_is_reported() {
    let output = say(&["communicators", "sever"]);
    assert!(
        output.status == Some(2) && output.err.contains("several"),
        "{output:?}"
    );
    let output = say(&["communicators", "-r", "1"]);
    assert!(
        output.status == Some(2) && output.err.contains("must be 2 to 16"),
        "{output:?}"
    );
}
