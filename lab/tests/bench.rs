//! `spark-lab bench`: reports are complete, and wrong data and failures are found. No test checks
//! speeds.

mod common;

use common::{Fake, ProgramOutput, built, say, spark_lab};
use serde_json::Value;
use std::path::Path;

fn run(fake: &Fake, arguments: &[&str]) -> ProgramOutput {
    let library = fake.library();
    let common = ["bench", "--fabric", "verbs", "--seconds", "0.01", "--plugin", library.to_str().unwrap()];
    say(&[&common, arguments].concat())
}

fn json(output: &ProgramOutput) -> Value {
    serde_json::from_str(&output.out).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn run_soft(plugin: &Path, arguments: &str) -> ProgramOutput {
    let mut command = spark_lab();
    command.args(["bench", "--profile", "spark-1cable", "--scale", "0.01", "--json", "-", "--plugin"]).arg(plugin);
    command.args(arguments.split_whitespace());
    command.env_remove("NCCL_IB_HCA").env_remove("NCCL_SPARK_SYSFS");
    command.output().unwrap().into()
}

/// Returns the names of a library's metrics at a point. Asserts that each metric has `rounds`
/// values, and that `is_allowed` returns true for each value.
fn metrics(side: &Value, rounds: usize, is_allowed: impl Fn(f64) -> bool) -> Vec<&str> {
    let series = side.as_array().unwrap().iter().map(|series| {
        let values = series["rounds"].as_array().unwrap();
        assert!(values.len() == rounds && values.iter().all(|value| is_allowed(value.as_f64().unwrap())), "{series}");
        series["metric"].as_str().unwrap()
    });
    series.collect()
}

#[test]
fn every_scenario_reports_both_libraries_their_ratio_and_the_limit() {
    let Some(plugin) = built() else { return };
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("libother.so");
    std::fs::copy(&plugin, &other).unwrap();
    let against = format!("--against {} --against-env A=b", other.display());
    let output = run_soft(&plugin, &format!("--seconds 0.02 -b 64 -e 64K -f 1024 --channels 2 {against}"));
    assert_eq!(output.status, Some(0), "{output:?}");
    let json = json(&output);
    assert_eq!((&json["ok"], &json["settings"]["rounds"]), (&true.into(), &5.into()));
    assert_eq!(json["settings"]["against_env"][0], serde_json::json!(["A", "b"]));
    // A hundredth (`--scale 0.01`) of 195 Gb/s is 0.24375 GB/s.
    assert!((json["limit_gb_s"].as_f64().unwrap() - 0.24375).abs() < 1e-9, "{json}");
    let expected = [
        ("connections", 2, &["bandwidth_gb_s", "connect_ms", "sender_rss_kib", "receiver_rss_kib"][..]),
        ("bandwidth", 2, &["bandwidth_gb_s"]),
        ("latency", 2, &["latency_p50_us", "latency_p99_us", "latency_min_us"]),
        ("rate", 3, &["messages_per_s"]),
        ("unequal", 2, &["bandwidth_gb_s"]),
        ("slowdown", 5, &["bandwidth_gb_s"]),
    ];
    for (at, (name, points, expected)) in expected.into_iter().enumerate() {
        let scenario = &json["scenarios"][at];
        assert_eq!((&scenario["name"], scenario["points"].as_array().unwrap().len()), (&name.into(), points), "{json}");
        for point in scenario["points"].as_array().unwrap() {
            for side in 0..2 {
                // It can happen that a process does not run at all during a phase of 0.02 s.
                let is_allowed = |value: f64| if name == "slowdown" { value >= 0.0 } else { value > 0.0 };
                assert_eq!(metrics(&point["sides"][side], 5, is_allowed), expected, "{point}");
                let is_checked = point["phase"].is_null() || point["phase"] == "before";
                let wrong = if is_checked { 0.into() } else { Value::Null };
                assert_eq!(point["wrong"][side]["bytes"], wrong, "{point}");
            }
        }
    }
    let [limit, fallen] = [0, 2].map(|at| json["scenarios"][5]["points"][at]["limit"].as_f64().unwrap());
    // With a rail slowed: a quarter of its link's 112 Gb/s, and all of the other link's.
    assert!((limit - 0.24375).abs() < 1e-9 && (fallen - 0.175).abs() < 1e-9, "{json}");
    assert_eq!(json["scenarios"][4]["points"][0]["limit"].as_f64(), Some(fallen), "{json}");
    let courses = json["scenarios"][5]["courses"].as_array().unwrap();
    assert!(
        courses.len() == 10 && courses.iter().all(|course| course["fall_s"].as_f64() < course["return_s"].as_f64())
    );
    assert!(output.err.contains("# theirs: rank 1 Pid") && output.err.contains("# ratio: ours / theirs"), "{output:?}");
    let tables = output.err.lines().filter(|line| !line.starts_with("# "));
    assert!(tables.clone().count() > 40 && tables.clone().all(|line| line.chars().count() <= 80), "{output:?}");
    let ratios = tables.clone().filter(|line| line.trim_start().starts_with("ratio "));
    assert_eq!(ratios.count(), 2 + 2 + 2 + 3 + 2 + 5, "one for each place: {output:?}");
}

#[test]
fn every_version_of_the_interface_carries_the_right_bytes() {
    let Some(plugin) = built() else { return };
    for version in 8..=12 {
        let arguments = format!("bandwidth latency --seconds 0.01 --rounds 1 -b 8 -e 256K -f 32768 --abi {version}");
        let output = run_soft(&plugin, &arguments);
        let json = json(&output);
        assert_eq!((output.status, &json["sides"][0]["plugin_interface"]), (Some(0), &version.into()), "{output:?}");
        let points =
            json["scenarios"].as_array().unwrap().iter().flat_map(|scenario| scenario["points"].as_array().unwrap());
        let wrong: Vec<_> = points.map(|point| &point["wrong"][0]["bytes"]).collect();
        assert!(wrong.len() == 4 && wrong.iter().all(|wrong| **wrong == 0), "{json}");
    }
}

#[test]
fn wrong_bytes_are_counted_for_the_library_that_delivers_them() {
    let (good, bad) = (Fake::compile(&[]), Fake::compile(&[]));
    let other = bad.library();
    // The check before the runs sends 8 messages. The third that `theirs` receives is corrupted.
    let arguments = ["bandwidth", "-b", "64", "-e", "64", "--json", "-", "--against", other.to_str().unwrap()];
    let output = run(&good, &[&arguments[..], &["--against-env", "FAKE_CORRUPT=3"]].concat());
    let json = json(&output);
    let point = &json["scenarios"][0]["points"][0];
    assert_eq!((output.status, &json["ok"]), (Some(1), &false.into()), "{output:?}");
    assert_eq!((&point["wrong"][0]["bytes"], &point["wrong"][1]["bytes"]), (&0.into(), &1.into()), "{json}");
    let first = point["wrong"][1]["first"][0].as_str().unwrap();
    assert!(first.starts_with("theirs: rank 1: byte 32 of message 2 is "), "{first}");
    // The fake announces 40000 Mb/s, of which RoCE v2 leaves 4096 / 4178 for payload.
    let limit = point["limit"].as_f64().unwrap();
    assert!((limit - 5.0 * 4096.0 / 4178.0).abs() < 1e-9, "{json}");
    assert!(output.err.contains("# 1 WRONG bytes from theirs"), "{output:?}");
}

#[test]
fn failures_name_the_library_the_rank_and_the_reason() {
    let (fake, other) = (Fake::compile(&[]), Fake::compile(&[]));
    let other = other.library();
    let against =
        |fault| ["bandwidth", "-b", "64", "-e", "64", "--against", other.to_str().unwrap(), "--against-env", fault];
    let output = run(&fake, &against("FAKE_FAIL=20"));
    let line = output.err.lines().find(|line| line.starts_with("spark-lab: ")).unwrap_or_default();
    assert!(
        output.status == Some(1) && line.starts_with("spark-lab: theirs: rank 0: connection 0: send"),
        "{output:?}"
    );
    assert!(line.contains("the cable is gone"), "{output:?}");
    let output = run(&fake, &against("FAKE_INIT_FAILS=1"));
    // Both ranks fail alike. Their errors share one line if they fail at the same time.
    let line = output.err.lines().find(|line| line.starts_with("spark-lab: theirs: rank")).unwrap_or_default();
    assert!(output.status == Some(1) && line.contains(": init returned ncclSystemError"), "{output:?}");

    let output = run(&fake, &["latency", "-b", "64", "-e", "64", "--timeout", "3", "--rank-env", "1:FAKE_HANG=12"]);
    assert!(output.status == Some(1) && output.err.contains("no progress for 3 s (--timeout)"), "{output:?}");
    assert!(
        output.err.contains("ping-pong with messages of 64 bytes") && output.err.contains("inside isend"),
        "{output:?}"
    );

    let output = run(&fake, &["rate", "--abi", "12"]);
    assert!(output.err.contains("no symbol ncclNetPlugin_v12"), "{output:?}");
}

#[test]
fn commands_of_the_users_slow_a_rail() {
    let fake = Fake::compile(&[]);
    let place = fake.folder().join("said");
    let (fall, back) = (format!("echo fall >> {}", place.display()), format!("echo return >> {}", place.display()));
    let turns = ["--fall", &fall, "--return", &back];
    let output =
        run(&fake, &[&["slowdown", "--rounds", "2", "--slowdown-bytes", "4K", "--json", "-"][..], &turns].concat());
    assert_eq!(
        (output.status, std::fs::read_to_string(&place).unwrap().as_str()),
        (Some(0), "fall\nreturn\nfall\nreturn\n")
    );
    let json = json(&output);
    assert_eq!(json["settings"]["fall"], fall);
    // Only the user knows the rate of the slowed rail.
    let limits = [0, 1].map(|at| &json["scenarios"][0]["points"][at]["limit"]);
    assert!(limits[0].as_f64().unwrap() > 4.9 && limits[1].is_null(), "{json}");

    let output = run(&fake, &["slowdown", "--fall", "exit 3", "--return", "true"]);
    assert!(output.status == Some(1) && output.err.contains("--fall \"exit 3\" failed: exit status: 3"), "{output:?}");
    let output = run(&fake, &["slowdown", "--fall", "sleep 60", "--return", "true", "--timeout", "1"]);
    assert!(output.status == Some(1) && output.err.contains("did not end in 1 s (--timeout)"), "{output:?}");
    let output = run(&fake, &["slowdown"]);
    assert!(output.status == Some(2) && output.err.contains("--fall COMMAND and --return COMMAND"), "{output:?}");
}

/// The error comes before any rank starts.
#[test]
fn an_unusable_setting_or_profile_is_one_error() {
    let output: ProgramOutput = spark_lab().arg("bench").env("NCCL_SPARK_STALL_WARM_S", "3").output().unwrap().into();
    let error = "spark-lab: NCCL_SPARK_STALL_WARM_S=\"3\" is not usable: no such setting; did you mean";
    assert!(output.status == Some(1) && output.err.starts_with(error) && output.err.lines().count() == 1, "{output:?}");
    let fake = Fake::compile(&[]);
    let library = fake.library();
    let library = library.to_str().unwrap();
    let output =
        say(&["bench", "--fabric", "soft", "--softverbs", library, "--plugin", library, "--profile", "/no/such"]);
    let error = "spark-lab: --profile: profile \"/no/such\" is neither built in";
    assert!(output.status == Some(2) && output.err.starts_with(error) && output.err.lines().count() == 1, "{output:?}");
}
