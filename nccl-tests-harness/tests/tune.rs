//! Tuning with few measurements: the tried values, the written file, and its use by the plugin. The
//! best settings depend on timing. So these tests use `--write-best`, which writes the best
//! settings even if they gain little. A test that expects a certain value in the file offers no
//! other candidate for that setting.

mod common;

use common::{Fake, ProgramOutput, nccl_spark};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const SETTINGS_FILE: &str = "NCCL_SPARK_SETTINGS_FILE";
const LITTLE: &str = "tune -b 64K -e 64K -n 1 -w 0 --rounds 1";

/// Runs the program with a temporary settings file in place of this machine's.
fn run(arguments: &str, settings: &Path, environment: &[(&str, &str)]) -> ProgramOutput {
    let mut command = nccl_spark();
    command
        .args(arguments.split_whitespace())
        .env(SETTINGS_FILE, settings)
        .envs(environment.iter().copied());
    for name in [
        "NCCL_IB_QPS_PER_CONNECTION",
        "NCCL_SPARK_MIN_SHARE_BYTES",
        "NCCL_IB_HCA",
        "NCCL_SPARK_SYSFS",
    ] {
        if environment.iter().all(|(given, _)| *given != name) {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null()).output().unwrap().into()
}

fn file(fake: &Fake, name: &str, text: &str) -> PathBuf {
    let path = fake.folder().join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_best_choice_is_written_to_the_settings_file_and_other_lines_are_kept() {
    let fake = Fake::compile(&[]);
    let settings = file(
        &fake,
        "spark.conf",
        "# mine\nNCCL_IB_QPS_PER_CONNECTION=9\nNCCL_IB_TC=106\n",
    );
    let plugin = fake.library();
    let tune = format!(
        "{LITTLE} --fabric verbs --plugin {} --qps 3 --min-share 32K --write-best",
        plugin.display()
    );
    let output = run(&format!("{tune} --json -"), &settings, &[]);
    assert_eq!(output.status, Some(0), "{output:?}");
    let text = fs::read_to_string(&settings).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[1].starts_with("# nccl-spark tune: "), "{text}");
    let others = [
        "# mine",
        lines[1],
        "NCCL_IB_QPS_PER_CONNECTION=3",
        "NCCL_SPARK_MIN_SHARE_BYTES=32768",
        "NCCL_IB_TC=106",
    ];
    assert_eq!(lines, others);
    assert!(
        output.err.contains("the plugin reads it when a job starts"),
        "{output:?}"
    );
    let json: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!(
        (&json["chosen"]["qps"], &json["chosen"]["min_share_bytes"]),
        (&3.into(), &32768.into()),
        "{json}"
    );
    let rounds = |record: &Value| record["rounds"].as_array().unwrap().len();
    assert_eq!(
        (rounds(&json["defaults"]), rounds(&json["tried"][0])),
        (1, 1),
        "{json}"
    );

    let shown = run("settings", &settings, &[("NCCL_IB_TC", "7")]);
    let from_file = format!("    current value: 3 ({}, line 3)\n", settings.display());
    assert!(
        shown.status == Some(0) && shown.out.contains(&from_file),
        "{shown:?}"
    );
    assert!(
        shown.out.contains("    current value: 7 (environment)\n"),
        "{shown:?}"
    );

    // The environment overrides the file, and the command must report that.
    let output = run(&tune, &settings, &[("NCCL_IB_QPS_PER_CONNECTION", "5")]);
    let above = "NCCL_IB_QPS_PER_CONNECTION=5 from the environment overrides it";
    assert!(
        output.status == Some(0) && output.out.contains(above),
        "{output:?}"
    );
}

#[test]
fn a_dry_run_writes_nothing_and_a_failed_write_comes_after_the_table() {
    let fake = Fake::compile(&[]);
    let settings = file(&fake, "spark.conf", "NCCL_IB_TC=106\n");
    let tune = format!(
        "{LITTLE} --fabric verbs --plugin {} --qps 2 --min-share 16K",
        fake.library().display()
    );
    let output = run(&format!("{tune} --write-best --dry-run"), &settings, &[]);
    assert!(
        output.status == Some(0) && output.out.contains("no file is written"),
        "{output:?}"
    );
    assert_eq!(fs::read_to_string(&settings).unwrap(), "NCCL_IB_TC=106\n");
    let new = fake.folder().join("new.conf");
    let output = run(&format!("{tune} --write-best"), &new, &[]);
    assert!(
        output.status == Some(0) && output.out.contains("the plugin reads it when"),
        "{output:?}"
    );
    assert!(
        new.exists(),
        "the file that the variable names need not be there yet"
    );
    let output = run(
        &format!("{tune} --write-best --output /no/where/a.conf"),
        &settings,
        &[],
    );
    assert!(
        output.status == Some(1) && output.out.contains("  default   default "),
        "{output:?}"
    );
    assert!(
        output
            .err
            .starts_with("nccl-spark: cannot write /no/where/a.conf: No such file"),
        "{output:?}"
    );
}

#[test]
fn mistakes_are_reported_before_anything_is_measured() {
    let fake = Fake::compile(&[]);
    let settings = file(&fake, "spark.conf", "NCCL_IB_TC=106\n");
    let broken = file(&fake, "broken.conf", "\nNCCL_IB_TC=300\n");
    for (arguments, settings, message, status) in [
        (
            format!("--output {}", broken.display()),
            &settings,
            "broken.conf, line 2: NCCL_IB_TC=\"300\"",
            1,
        ),
        (
            String::new(),
            &broken,
            "broken.conf, line 2: NCCL_IB_TC=\"300\"",
            1,
        ),
        ("--qps 17".to_owned(), &settings, "must be 1 to 16", 2),
        ("--min-share 1".to_owned(), &settings, "128 to 1G", 2),
        ("--rounds 0".to_owned(), &settings, "--rounds", 2),
    ] {
        let output = run(&format!("{LITTLE} {arguments}"), settings, &[]);
        assert!(
            output.status == Some(status) && output.err.contains(message) && output.out.is_empty(),
            "{arguments}: {output:?}"
        );
    }
}

#[test]
fn ranks_that_a_launcher_started_take_part_in_every_run() {
    let fake = Fake::compile(&[]);
    let settings = file(&fake, "spark.conf", "");
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let start = |rank: usize| {
        let mut command = nccl_spark();
        command.args(LITTLE.split_whitespace()).args([
            "--qps",
            "2,4",
            "--min-share",
            "16K",
            "--write-best",
            "--output",
        ]);
        command
            .arg(&settings)
            .args(["--fabric", "verbs", "--plugin"])
            .arg(fake.library());
        command
            .args(["--rendezvous", &format!("127.0.0.1:{port}")])
            .env(SETTINGS_FILE, "/dev/null");
        command
            .env("OMPI_COMM_WORLD_RANK", rank.to_string())
            .env("OMPI_COMM_WORLD_SIZE", "2");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let output: Vec<ProgramOutput> = [0, 1]
        .map(start)
        .into_iter()
        .map(|rank| rank.wait_with_output().unwrap().into())
        .collect();
    assert!(
        output
            .iter()
            .all(|one| (one.status, one.err.as_str()) == (Some(0), "")),
        "{output:?}"
    );
    // On one machine only one rank writes; the other prints nothing.
    assert!(
        output[0]
            .out
            .contains("# wrote NCCL_IB_QPS_PER_CONNECTION=")
            && output[1].out.is_empty(),
        "{output:?}"
    );
    let export = format!(
        "the plugin reads it with: export {SETTINGS_FILE}={}",
        settings.display()
    );
    assert!(output[0].out.contains(&export), "{output:?}");
    assert!(
        fs::read_to_string(&settings)
            .unwrap()
            .contains("NCCL_SPARK_MIN_SHARE_BYTES=16384\n")
    );
}

#[test]
fn the_plugin_starts_with_what_was_written() {
    let Some(plugin) = common::built() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("spark.conf");
    let before = "NCCL_IB_HCA==rocep1s0f0\nNCCL_IB_QPS_PER_CONNECTION=9\n";
    fs::write(&settings, before).unwrap();
    let soft = format!(
        "--fabric soft --profile unpaced --plugin {}",
        plugin.display()
    );
    let log = [("NCCL_DEBUG", "INFO")];
    let output = run(
        &format!("{LITTLE} {soft} --qps 3 --min-share 32K --write-best"),
        &settings,
        &log,
    );
    assert_eq!(output.status, Some(0), "{output:?}");
    // While it tunes, the ranks read a file with the machine's settings except the tuned ones, so
    // NCCL_IB_HCA is still there.
    let read: Vec<_> = output
        .err
        .lines()
        .filter(|line| line.contains("settings from "))
        .collect();
    assert!(
        !read.is_empty()
            && read
                .iter()
                .all(|line| line.ends_with(": NCCL_IB_HCA==rocep1s0f0")),
        "{output:?}"
    );
    assert!(output.err.contains("merged 1 rail"), "{output:?}");

    let output = run(
        &format!("all-gather {soft} -b 64K -e 64K -n 1"),
        &settings,
        &log,
    );
    let line = format!(
        "settings from {}: NCCL_IB_HCA==rocep1s0f0, NCCL_IB_QPS_PER_CONNECTION=3, NCCL_SPARK_MIN_SHARE_BYTES=32768\n",
        settings.display()
    );
    assert!(
        output.status == Some(0)
            && output.err.contains(&line)
            && output.err.contains("merged 1 rail"),
        "{output:?}"
    );
}
