//! `nccl-spark tune collectives` with a shell script that imitates nccl-tests. The script needs no
//! GPU. The times that it prints depend on the rows of the tuner's table that it gets.

mod common;

use common::{ProgramOutput, nccl_spark};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// The start of the script. A test adds the function `time_us SIZE CHOICE MEMBERS`, which prints a
/// time in microseconds. CHOICE is the choice of the table's row for the size, for example
/// `ring/ll/1`, or `none` if the table has no such row. MEMBERS is the number of collectives in a
/// group; it is 1 without groups. The test may also set `host` or `wrong`, or exit.
const HEAD: &str = r##"#!/bin/sh
# libmpi: as if it were linked.
set -f
collective=$(basename "$0" _perf); rank=${OMPI_COMM_WORLD_RANK:-0}; folder=$(dirname "$0")
host=NVIDIA_H200/4x224054/2.28.3; wrong=0
rows=; policy="off: NCCL_SPARK_TUNER=off"
if [ "$NCCL_SPARK_TUNER" = on ]; then
  rows=$(echo "${NCCL_SPARK_TUNER_TABLE#*;}" | tr ';' ' ')
  policy="learned table of $(echo $rows | wc -w) rows, hash 1"
fi
choice() {
  found=none
  for row in $rows; do
    sizes=${row#*:}; sizes=${sizes%%=*}
    if [ "${row%%:*}" = "$collective@2" ] && [ "$1" -ge "${sizes%-*}" ] && [ "$1" -le "${sizes#*-}" ]; then found=${row#*=}; fi
  done
  echo $found
}
"##;

const TAIL: &str = r##"
log() { echo "h:1:1 [0] NCCL INFO $*"; }
log "NCCL version 2.28.3+cuda13.0"
log "tuner: $policy; this host is $host"
if [ "$NCCL_SPARK_TUNER" = on ]; then log "NET/Spark: tuner: ${use:-in use for} a communicator of 2 ranks"; fi
log "comm 0x55 rank $rank nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0"
log "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Spark/0"
[ "$rank" = 0 ] || exit 0
echo "$NCCL_SPARK_TUNER $NCCL_SPARK_TUNER_TABLE" >> "$folder/runs"
echo "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong"
members=1
while [ $# -gt 1 ]; do [ "$1" != -m ] || members=$2; [ "$1" != -b ] || size=$2; [ "$1" != -e ] || last=$2; shift; done
while [ "$size" -le "$last" ]; do
  us=$(time_us $size $(choice $((size * members))) $members)
  echo "  $size  2048  float  sum  -1  $us  0.1  0.1  $wrong  $us  0.1  0.1  0"
  size=$((size * 2))
done
"##;

struct Programs(tempfile::TempDir);

impl Programs {
    fn new(body: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["all_reduce_perf", "all_gather_perf"] {
            let file = folder.path().join(name);
            fs::write(&file, format!("{HEAD}{body}{TAIL}")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        Self(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn settings(&self) -> String {
        fs::read_to_string(self.file("spark.conf")).unwrap()
    }

    fn runs(&self) -> Vec<String> {
        fs::read_to_string(self.file("runs"))
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// Tunes all_reduce, unless `arguments` name another collective. Returns `None` if mpirun is
    /// missing.
    fn tune(&self, arguments: &str) -> Option<ProgramOutput> {
        if !common::has_mpirun() {
            return None;
        }
        let mut command = nccl_spark();
        command.args([
            "tune",
            "collectives",
            "-b",
            "8K",
            "--rounds",
            "1",
            "--fabric",
            "verbs",
        ]);
        command.arg("--dir");
        command
            .arg(self.0.path())
            .env("NCCL_SPARK_SETTINGS_FILE", self.file("spark.conf"));
        for name in [
            "NCCL_SPARK_TUNER",
            "NCCL_SPARK_TUNER_TABLE",
            "NCCL_SPARK_LL128",
            "NCCL_ALGO",
            "NCCL_PROTO",
        ] {
            command.env_remove(name);
        }
        if !arguments.contains("--collectives") {
            command.args(["--collectives", "all_reduce"]);
        }
        Some(
            command
                .args(arguments.split_whitespace())
                .output()
                .unwrap()
                .into(),
        )
    }
}

/// Returns the rows of the written table, without the part that names the hosts (`for=`).
fn rows(settings: &str) -> Vec<&str> {
    let line = settings
        .lines()
        .find_map(|line| line.strip_prefix("NCCL_SPARK_TUNER_TABLE="))
        .unwrap();
    line.strip_prefix("for=NVIDIA_H200/4x224054/2.28.3;")
        .unwrap()
        .split(';')
        .collect()
}

/// ring/simple/1 and ring/simple/2 fail. At 8K, ring/ll/1 and ring/ll/2 are about equally fast.
/// ring/ll/1 wins at 16K, ring/ll/2 at 64K.
const TWO_FASTER_CHOICES: &str = r#"
        case $rows in
        *ring/simple/1) echo "h:1:1 [0] NCCL WARN no memory for that"; exit 3 ;;
        *ring/simple/2) wrong=4 ;;
        esac
        time_us() {
            case "$2" in
            ring/simple/2) echo 10 ;;
            ring/ll/1) case $1 in 8192|16384) echo 50 ;; 32768) echo 98 ;; *) echo 120 ;; esac ;;
            ring/ll/2) case $1 in 8192) echo 49.5 ;; 65536) echo 60 ;; *) echo 110 ;; esac ;;
            *) echo 100 ;;
            esac
        }"#;

#[test]
fn clearly_better_choices_are_written_and_failing_ones_are_left_out() {
    let programs = Programs::new(TWO_FASTER_CHOICES);
    let before =
        "for=NVIDIA_H200/4x224054/2.28.3;all_reduce@2:1-9=ring/ll/8;broadcast@2:1-9=ring/ll/8";
    let text = format!("# mine\nNCCL_IB_TC=106\nNCCL_SPARK_TUNER_TABLE={before}\n");
    fs::write(programs.file("spark.conf"), text).unwrap();
    let json = programs.file("out.json");
    let options = format!(
        "-e 64K --protocols ll,simple --channels 1,2 -n 7 --json {}",
        json.display()
    );
    let Some(output) = programs.tune(&options) else {
        return;
    };
    assert_eq!(output.status, Some(0), "{output:?}");
    assert_explains_the_choices(&output);
    assert_settings_have_the_faster_choices(&programs.settings());
    let runs = programs.runs();
    assert_eq!(
        runs.iter().filter(|run| run.trim_end() == "off").count(),
        6,
        "one round, and five again: {runs:?}"
    );
    assert!(
        runs.contains(&"on for=*;all_reduce@2:5793-92681=ring/ll/2".to_owned()),
        "{runs:?}"
    );
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(
        report["collectives"][0]["sizes"][0]["choice"], "ring/ll/1",
        "{report}"
    );
    let arguments = report["arguments"].as_array().unwrap();
    assert!(arguments.contains(&"7".into()), "{report}");
}

fn assert_explains_the_choices(output: &ProgramOutput) {
    for part in [
        "ring/simple/1 not measured further: all_reduce_perf exited with status 3; NCCL says: no memory for that",
        "ring/simple/2 not measured further: 16 WRONG elements",
        "# all_reduce with ring/simple/2: a run failed and is repeated once: 16 WRONG elements",
        "# hosts: NVIDIA_H200/4x224054/2.28.3, ranks: 2",
        "gain too small",
        "  no row\n",
        "this GPU is not a GB10: the tuner uses the table only with NCCL_SPARK_TUNER=on",
    ] {
        assert!(output.out.contains(part), "{part}: {output:?}");
    }
    let mut table = output.out.lines().filter(|line| line.starts_with("  "));
    assert!(table.all(|line| line.len() <= 80), "{output:?}");
}

fn assert_settings_have_the_faster_choices(settings: &str) {
    let lines: Vec<&str> = settings.lines().collect();
    assert_eq!(lines.len(), 4, "{settings}");
    assert_eq!(lines[..2], ["# mine", "NCCL_IB_TC=106"], "{settings}");
    assert!(
        lines[2].starts_with(
            "# nccl-spark tune collectives: all_reduce, 2 ranks: 1.67 to 2.00 times as fast"
        ),
        "{settings}"
    );
    // ring/ll/1 also wins at 16K, so a single row of ring/ll/1 has 8K and 16K.
    assert_eq!(
        rows(settings),
        [
            "broadcast@2:1-9=ring/ll/8",
            "all_reduce@2:5793-23170=ring/ll/1",
            "all_reduce@2:46341-92681=ring/ll/2",
        ],
        "broadcast was not measured"
    );
}

#[test]
fn nothing_is_written_without_a_better_choice_or_on_a_dry_run() {
    let programs = Programs::new("time_us() { case $2 in none) echo 100 ;; *) echo 96 ;; esac; }");
    fs::write(programs.file("spark.conf"), "NCCL_IB_TC=106").unwrap();
    let Some(output) = programs.tune("-e 16K --protocols ll --channels 1,2 --json") else {
        return;
    };
    assert!(
        output.status == Some(0) && output.err.contains("nothing is clearly better"),
        "{output:?}"
    );
    let report: serde_json::Value =
        serde_json::from_str(&output.out).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(
        report["collectives"][0]["collective"], "all_reduce",
        "{report}"
    );
    // Having no table is not the same as having no tuner.
    for part in [
        "on a GB10 the tuner still uses the rows that the plugin ships",
        "set NCCL_SPARK_TUNER=off",
    ] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
    assert_eq!(
        (programs.settings().as_str(), programs.runs().len()),
        ("NCCL_IB_TC=106", 3),
        "no confirmation is needed"
    );
    let output = programs
        .tune("-e 16K --protocols ll --channels 1 --gain 1.01 --dry-run")
        .unwrap();
    assert!(
        output.status == Some(0)
            && output
                .out
                .contains("no settings file is written (--dry-run)"),
        "{output:?}"
    );
    assert!(
        output.out.contains(";all_reduce@2:5793-23170=ring/ll/1\n"),
        "{output:?}"
    );
    assert_eq!(programs.settings(), "NCCL_IB_TC=106");
}

#[test]
fn times_measured_with_another_table_do_not_count() {
    let body = r#"
        case $rows in
        *ring/ll/1) policy="shipped table of 3 rows, hash 2" ;;
        *ring/ll/2) policy="learned table of 0 rows" ;;
        *ring/ll/4) use="not used for" ;;
        esac
        time_us() { case $2 in none) echo 100 ;; *) echo 50 ;; esac; }"#;
    let programs = Programs::new(body);
    let Some(output) = programs.tune("-e 8K --protocols ll --channels 1,2,4") else {
        return;
    };
    assert!(
        output.status == Some(0) && output.out.contains("this run writes no rows"),
        "{output:?}"
    );
    assert!(
        output.out.contains(
            "ring/ll/4 not measured further: NCCL did not use this plugin's tuner on every rank"
        ),
        "{output:?}"
    );
    for policy in ["shipped table of 3 rows, hash 2", "learned table of 0 rows"] {
        let text = format!(
            "this run needs the tuner with a learned table of 1 row(s), but the plugin logs \"{policy}\""
        );
        assert!(output.out.contains(&text), "{text}: {output:?}");
    }
    assert!(!programs.file("spark.conf").exists());
}

#[test]
fn a_row_that_is_not_confirmed_with_the_whole_table_is_removed() {
    // Once the table has rows of both collectives, all_reduce at 16K is as slow as without a table.
    let programs = Programs::new(
        r#"
        time_us() {
            case "$2 $1 $rows" in
            none*) echo 100 ;;
            *" 16384 all_reduce"*" "*) echo 100 ;;
            *" 16384 all_gather"*all_reduce*) [ $collective = all_reduce ] && echo 100 || echo 50 ;;
            *) echo 50 ;;
            esac
        }"#,
    );
    let options = "-e 16K --protocols ll --channels 4 --collectives all_reduce,all_gather";
    let Some(output) = programs.tune(options) else {
        return;
    };
    assert!(
        output.status == Some(0) && output.out.contains("no row: gain too small"),
        "{output:?}"
    );
    assert_eq!(
        rows(&programs.settings()),
        [
            "all_gather@2:5793-23170=ring/ll/4",
            "all_reduce@2:5793-11585=ring/ll/4"
        ]
    );
}

#[test]
fn differing_hosts_and_a_failure_of_nccls_choice_end_the_sweep() {
    let programs = Programs::new("host=GPU$rank/1x200000/2.28.3; time_us() { echo 100; }");
    let Some(output) = programs.tune("-e 8K --protocols ll --channels 1") else {
        return;
    };
    assert!(
        output.status == Some(1)
            && output
                .err
                .contains("hosts differ (GPU0/1x200000/2.28.3 and GPU1/"),
        "{output:?}"
    );
    let programs = Programs::new("wrong=1; time_us() { echo 100; }");
    let output = programs.tune("-e 8K --protocols ll --channels 1").unwrap();
    assert!(
        output.status == Some(1)
            && output
                .err
                .contains("all_reduce with NCCL's choice: 1 WRONG"),
        "{output:?}"
    );
    assert!(!programs.file("spark.conf").exists());
}

/// The first run prints an incomplete table. In every run, rank 1 also prints a line about the
/// tuner that another line cuts short. The program must skip the cut line.
#[test]
fn a_run_that_cannot_be_read_is_repeated_once() {
    let body = r##"
        if [ "$rank" = 0 ] && [ ! -e "$folder/first" ]; then
            touch "$folder/first"
            log "tuner: $policy; this host is $host"
            echo "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong"
            echo "  8192  2048  float  sum"
            exit 0
        fi
        if [ "$rank" = 1 ]; then log "tuner: learned tah:1:2 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0]"; fi
        time_us() { case $2 in none) echo 100 ;; *) echo 50 ;; esac; }"##;
    // The script defines `log` only after the body, so the body needs a `log` of its own.
    let programs = Programs::new(&format!(
        "log() {{ echo \"h:1:1 [0] NCCL INFO $*\"; }}\n{body}"
    ));
    let Some(output) = programs.tune("-e 8K --protocols ll --channels 1") else {
        return;
    };
    assert_eq!(output.status, Some(0), "{output:?}");
    assert_eq!(
        output
            .out
            .matches("all_reduce with NCCL's choice: a run failed and is repeated once: ")
            .count(),
        1,
        "{output:?}"
    );
    assert_eq!(
        rows(&programs.settings()),
        ["all_reduce@2:5793-11585=ring/ll/1"]
    );
}

#[test]
fn with_mpirun_a_process_of_each_machine_writes() {
    let programs = Programs::new("time_us() { case $2 in none) echo 100 ;; *) echo 90 ;; esac; }");
    let mut options = vec![
        "tune",
        "collectives",
        "--fabric",
        "verbs",
        "-b",
        "8K",
        "-e",
        "8K",
        "--rounds",
        "1",
    ];
    options.extend([
        "--collectives",
        "all_gather",
        "--protocols",
        "ll128",
        "--channels",
        "2",
    ]);
    options.extend(["--mpirun", "--oversubscribe -np 2", "--dir"]);
    if !common::has_mpirun() {
        return;
    }
    let mut command = nccl_spark();
    command
        .args(options)
        .arg(programs.0.path())
        .arg("--output")
        .arg(programs.file("spark.conf"));
    let output: ProgramOutput = command
        .env("NCCL_SPARK_SETTINGS_FILE", "/dev/null")
        .output()
        .unwrap()
        .into();
    assert_eq!(output.status, Some(0), "{output:?}");
    assert_eq!(
        output.out.matches(": wrote NCCL_SPARK_TUNER_TABLE").count(),
        1,
        "{output:?}"
    );
    assert_eq!(
        rows(&programs.settings()),
        ["all_gather@2:5793-11585=ring/ll128/2"]
    );
    // A failed write by a single process is an error.
    let mut command = nccl_spark();
    command.args([
        "tune-collectives-write",
        "--table",
        "for=*",
        "--output",
        "/no/where/a.conf",
    ]);
    let output: ProgramOutput = command.output().unwrap().into();
    assert!(
        output.status == Some(1) && output.err.contains("cannot write /no/where/a.conf"),
        "{output:?}"
    );
}

#[test]
fn a_row_that_slows_groups_is_removed_where_groups_are_given() {
    // Alone, ring/ll/1 is twice as fast as NCCL's choice. In groups of four with 64 KiB in total,
    // it is half as fast. ring/ll/2 is always faster than NCCL's choice.
    let body = r#"
        time_us() {
            case "$2-$3-$1" in
            ring/ll/1-4-16384) echo 200 ;;
            ring/ll/1-*) echo 50 ;;
            ring/ll/2-*) echo 60 ;;
            *) echo 100 ;;
            esac
        }"#;
    let [below, above] = [
        "all_reduce@2:5793-46340=ring/ll/1",
        "all_reduce@2:92682-185363=ring/ll/1",
    ];
    for (options, expected) in [
        ("--channels 1", vec!["all_reduce@2:5793-185363=ring/ll/1"]),
        ("--channels 1 --groups 4", vec![below, above]),
        (
            "--channels 1 --groups 2",
            vec!["all_reduce@2:5793-185363=ring/ll/1"],
        ),
        (
            "--channels 1,2 --groups 2,4",
            vec![below, "all_reduce@2:46341-92681=ring/ll/2", above],
        ),
    ] {
        let programs = Programs::new(body);
        let Some(output) = programs.tune(&format!("-e 128K --protocols ll {options}")) else {
            return;
        };
        assert_eq!(output.status, Some(0), "{output:?}");
        assert_eq!(
            rows(&programs.settings()),
            expected,
            "{options}: {output:?}"
        );
        assert_eq!(
            output.out.contains("slower in groups"),
            expected.len() == 2,
            "{output:?}"
        );
    }
}

#[test]
fn a_row_that_slows_groups_only_with_the_whole_table_is_removed_too() {
    // In groups of four with 64 KiB in total, ring/ll/2 is slow from the second run on. The sweep
    // runs it once, so only the confirmation of the whole table finds it slow.
    let body = r#"
        time_us() {
            case "$2-$3-$1" in
            ring/ll/2-4-16384) echo "$1" >>"$runs"; [ "$(wc -l <"$runs")" -gt 1 ] && echo 200 || echo 50 ;;
            ring/ll/2-*) echo 50 ;;
            *) echo 100 ;;
            esac
        }"#;
    let programs = Programs::new("");
    let body = format!("runs={}\n{body}", programs.file("runs").display());
    let programs = Programs::new(&body);
    let Some(output) = programs.tune("-e 128K --protocols ll --channels 2 --groups 4") else {
        return;
    };
    assert_eq!(output.status, Some(0), "{output:?}");
    let expected = [
        "all_reduce@2:5793-46340=ring/ll/2",
        "all_reduce@2:92682-185363=ring/ll/2",
    ];
    assert_eq!(rows(&programs.settings()), expected, "{output:?}");
    assert!(
        output.out.contains("no row: slower in groups"),
        "{output:?}"
    );
}
