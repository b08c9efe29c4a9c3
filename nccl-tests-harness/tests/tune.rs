//! Tuning with few measurements: the tried values, the written file, and its use by the plugin. The
//! best settings depend on timing, so these tests use `--write-best` and a single candidate.

mod common;

use common::{Fake, Said, nccl_spark};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

const SETTINGS_FILE: &str = "NCCL_SPARK_SETTINGS_FILE";
const LITTLE: &str = "tune -b 64K -e 64K -n 1 -w 0 --rounds 1";

/// Runs the program with a temporary settings file in place of this machine's.
fn run(arguments: &str, settings: &Path, environment: &[(&str, &str)]) -> Said {
    let mut command = nccl_spark();
    command.args(arguments.split_whitespace()).env(SETTINGS_FILE, settings).envs(environment.iter().copied());
    for name in ["NCCL_IB_QPS_PER_CONNECTION", "NCCL_SPARK_MIN_SHARE_BYTES", "NCCL_IB_HCA", "NCCL_SPARK_SYSFS"] {
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
    let settings = file(&fake, "spark.conf", "# mine\nNCCL_IB_QPS_PER_CONNECTION=9\nNCCL_IB_TC=106\n");
    let plugin = fake.library();
    let tune = format!("{LITTLE} --fabric verbs --plugin {} --qps 3 --min-share 32K --write-best", plugin.display());
    let said = run(&format!("{tune} --json -"), &settings, &[]);
    assert_eq!(said.status, Some(0), "{said:?}");
    let text = fs::read_to_string(&settings).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[1].starts_with("# nccl-spark tune: "), "{text}");
    let others =
        ["# mine", lines[1], "NCCL_IB_QPS_PER_CONNECTION=3", "NCCL_SPARK_MIN_SHARE_BYTES=32768", "NCCL_IB_TC=106"];
    assert_eq!(lines, others);
    assert!(said.err.contains("the plugin reads it when a job starts"), "{said:?}");
    let told: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((&told["chosen"]["qps"], &told["chosen"]["min_share_bytes"]), (&3.into(), &32768.into()), "{told}");
    let rounds = |record: &Value| record["rounds"].as_array().unwrap().len();
    assert_eq!((rounds(&told["defaults"]), rounds(&told["tried"][0])), (1, 1), "{told}");

    let shown = run("settings", &settings, &[("NCCL_IB_TC", "7")]);
    let from_file = format!("    current value: 3 ({}, line 3)\n", settings.display());
    assert!(shown.status == Some(0) && shown.out.contains(&from_file), "{shown:?}");
    assert!(shown.out.contains("    current value: 7 (environment)\n"), "{shown:?}");

    // The environment overrides the file, and the command must report it.
    let said = run(&tune, &settings, &[("NCCL_IB_QPS_PER_CONNECTION", "5")]);
    let above = "NCCL_IB_QPS_PER_CONNECTION=5 from the environment overrides it";
    assert!(said.status == Some(0) && said.out.contains(above), "{said:?}");
}

#[test]
fn a_dry_run_writes_nothing_and_a_failed_write_comes_after_the_table() {
    let fake = Fake::compile(&[]);
    let settings = file(&fake, "spark.conf", "NCCL_IB_TC=106\n");
    let tune = format!("{LITTLE} --fabric verbs --plugin {} --qps 2 --min-share 16K", fake.library().display());
    let said = run(&format!("{tune} --write-best --dry-run"), &settings, &[]);
    assert!(said.status == Some(0) && said.out.contains("no file is written"), "{said:?}");
    assert_eq!(fs::read_to_string(&settings).unwrap(), "NCCL_IB_TC=106\n");
    let new = fake.folder().join("new.conf");
    let said = run(&format!("{tune} --write-best"), &new, &[]);
    assert!(said.status == Some(0) && said.out.contains("the plugin reads it when"), "{said:?}");
    assert!(new.exists(), "the file that the variable names need not be there yet");
    let said = run(&format!("{tune} --write-best --output /no/where/a.conf"), &settings, &[]);
    assert!(said.status == Some(1) && said.out.contains("  default   default "), "{said:?}");
    assert!(said.err.starts_with("nccl-spark: cannot write /no/where/a.conf: No such file"), "{said:?}");
}

#[test]
fn mistakes_are_reported_before_anything_is_measured() {
    let fake = Fake::compile(&[]);
    let settings = file(&fake, "spark.conf", "NCCL_IB_TC=106\n");
    let broken = file(&fake, "broken.conf", "\nNCCL_IB_TC=300\n");
    for (arguments, settings, told, status) in [
        (format!("--output {}", broken.display()), &settings, "broken.conf, line 2: NCCL_IB_TC=\"300\"", 1),
        (String::new(), &broken, "broken.conf, line 2: NCCL_IB_TC=\"300\"", 1),
        ("--qps 17".to_owned(), &settings, "must be 1 to 16", 2),
        ("--min-share 1".to_owned(), &settings, "128 to 1G", 2),
        ("--rounds 0".to_owned(), &settings, "--rounds", 2),
    ] {
        let said = run(&format!("{LITTLE} {arguments}"), settings, &[]);
        assert!(said.status == Some(status) && said.err.contains(told) && said.out.is_empty(), "{arguments}: {said:?}");
    }
}

#[test]
fn ranks_that_a_launcher_started_take_part_in_every_run() {
    let fake = Fake::compile(&[]);
    let settings = file(&fake, "spark.conf", "");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
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
        command.arg(&settings).args(["--fabric", "verbs", "--plugin"]).arg(fake.library());
        command.args(["--rendezvous", &format!("127.0.0.1:{port}")]).env(SETTINGS_FILE, "/dev/null");
        command.env("OMPI_COMM_WORLD_RANK", rank.to_string()).env("OMPI_COMM_WORLD_SIZE", "2");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let said: Vec<Said> = [0, 1].map(start).into_iter().map(|rank| rank.wait_with_output().unwrap().into()).collect();
    assert!(said.iter().all(|one| (one.status, one.err.as_str()) == (Some(0), "")), "{said:?}");
    // On one machine only one rank writes; the other prints nothing.
    assert!(said[0].out.contains("# wrote NCCL_IB_QPS_PER_CONNECTION=") && said[1].out.is_empty(), "{said:?}");
    let export = format!("the plugin reads it with: export {SETTINGS_FILE}={}", settings.display());
    assert!(said[0].out.contains(&export), "{said:?}");
    assert!(fs::read_to_string(&settings).unwrap().contains("NCCL_SPARK_MIN_SHARE_BYTES=16384\n"));
}

#[test]
fn the_plugin_starts_with_what_was_written() {
    let Some(plugin) = common::built() else { return };
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("spark.conf");
    let before = "NCCL_IB_HCA==rocep1s0f0\nNCCL_IB_QPS_PER_CONNECTION=9\n";
    fs::write(&settings, before).unwrap();
    let soft = format!("--fabric soft --profile unpaced --plugin {}", plugin.display());
    let log = [("NCCL_DEBUG", "INFO")];
    let said = run(&format!("{LITTLE} {soft} --qps 3 --min-share 32K --write-best"), &settings, &log);
    assert_eq!(said.status, Some(0), "{said:?}");
    // Only the tuned settings are removed from the file that the ranks read.
    let read: Vec<_> = said.err.lines().filter(|line| line.contains("settings from ")).collect();
    assert!(!read.is_empty() && read.iter().all(|line| line.ends_with(": NCCL_IB_HCA==rocep1s0f0")), "{said:?}");
    assert!(said.err.contains("merged 1 rail"), "{said:?}");

    let said = run(&format!("all-gather {soft} -b 64K -e 64K -n 1"), &settings, &log);
    let line = format!(
        "settings from {}: NCCL_IB_HCA==rocep1s0f0, NCCL_IB_QPS_PER_CONNECTION=3, NCCL_SPARK_MIN_SHARE_BYTES=32768\n",
        settings.display()
    );
    assert!(said.status == Some(0) && said.err.contains(&line) && said.err.contains("merged 1 rail"), "{said:?}");
}
