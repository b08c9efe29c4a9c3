//! Collectives end to end: real processes, a fake plugin over loopback TCP, and planted faults.

mod common;

use common::{Fake, ProgramOutput, is_running, nccl_spark, say};
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Longer than any delay of the machine: only a hung program exceeds it.
const PATIENCE: Duration = Duration::from_secs(60);

fn run(collective: &str, arguments: &str) -> ProgramOutput {
    let fake = Fake::compile(&[]);
    let library = fake.library();
    let mut all = vec![
        collective,
        "--fabric",
        "verbs",
        "--plugin",
        library.to_str().unwrap(),
    ];
    all.extend(arguments.split_whitespace());
    say(&all)
}

/// Returns the rows of the table: size, count, busbw, wrong.
fn rows(output: &ProgramOutput) -> Vec<(u64, u64, f64, String)> {
    rows_of(output, "none", "-1")
}

fn rows_of(output: &ProgramOutput, operation: &str, root: &str) -> Vec<(u64, u64, f64, String)> {
    let rows = output.out.lines().filter(|line| !line.starts_with('#'));
    rows.map(|row| {
        let cells: Vec<_> = row.split_whitespace().collect();
        assert_eq!(
            (cells.len(), cells[2], cells[3], cells[4]),
            (9, "int8", operation, root),
            "{row}"
        );
        (
            cells[0].parse().unwrap(),
            cells[1].parse().unwrap(),
            cells[7].parse().unwrap(),
            cells[8].to_owned(),
        )
    })
    .collect()
}

fn assert_all_right(output: &ProgramOutput, sizes: &[(u64, u64)]) {
    assert_right(output, sizes, "none", "-1");
}

fn assert_right(output: &ProgramOutput, sizes: &[(u64, u64)], operation: &str, root: &str) {
    assert_eq!(output.status, Some(0), "{output:?}");
    // The fake plugin prints a message if it is not closed in order.
    assert_eq!(output.err, "", "{output:?}");
    let rows = rows_of(output, operation, root);
    assert_eq!(
        rows.iter().map(|row| (row.0, row.1)).collect::<Vec<_>>(),
        sizes,
        "{output:?}"
    );
    assert!(rows.iter().all(|row| row.3 == "0"), "{output:?}");
    assert!(
        output
            .out
            .contains("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : "),
        "{output:?}"
    );
}

#[test]
fn all_gather_of_two_and_three_ranks_is_right_at_every_size() {
    let two = run("all-gather", "-b 8 -e 8M -f 64 -n 3");
    assert_all_right(
        &two,
        &[(8, 4), (512, 256), (32 << 10, 16 << 10), (2 << 20, 1 << 20)],
    );
    let three = run(
        "all-gather",
        "-r 3 --channels 2 -b 100 -e 9000100 -i 4500000 -n 2 -c 2",
    );
    assert_all_right(
        &three,
        &[(99, 33), (4_500_099, 1_500_033), (9_000_099, 3_000_033)],
    );
}

#[test]
fn sendrecv_of_two_and_three_ranks_is_right_at_every_size() {
    let two = run("sendrecv", "-b 1 -e 4M -f 128 -n 3 --channels 4");
    assert_all_right(
        &two,
        &[(1, 1), (128, 128), (16 << 10, 16 << 10), (2 << 20, 2 << 20)],
    );
    assert_all_right(
        &run("sendrecv", "-r 3 -b 3M -e 3M -n 2"),
        &[(3 << 20, 3 << 20)],
    );
}

#[test]
fn all_reduce_adds_up_every_byte() {
    let two = run("all-reduce", "-b 1 -e 4M -f 128 -n 3");
    assert_right(
        &two,
        &[(1, 1), (128, 128), (16 << 10, 16 << 10), (2 << 20, 2 << 20)],
        "sum",
        "-1",
    );
    let four = run(
        "all-reduce",
        "-r 4 --channels 2 -b 3 -e 5000003 -i 5000000 -n 2 -c 2",
    );
    assert_right(&four, &[(3, 3), (5_000_003, 5_000_003)], "sum", "-1");
}

#[test]
fn reduce_scatter_adds_up_every_byte() {
    let two = run("reduce-scatter", "-b 8 -e 8M -f 64 -n 3");
    assert_right(
        &two,
        &[(8, 4), (512, 256), (32 << 10, 16 << 10), (2 << 20, 1 << 20)],
        "sum",
        "-1",
    );
    let three = run(
        "reduce-scatter",
        "-r 3 --channels 2 -b 100 -e 4500100 -i 4500000 -n 2",
    );
    assert_right(&three, &[(99, 33), (4_500_099, 1_500_033)], "sum", "-1");
}

#[test]
fn broadcast_reaches_every_rank() {
    let two = run("broadcast", "-b 1 -e 4M -f 128 -n 3");
    assert_right(
        &two,
        &[(1, 1), (128, 128), (16 << 10, 16 << 10), (2 << 20, 2 << 20)],
        "none",
        "0",
    );
    assert_right(
        &run("broadcast", "-r 4 -b 3M -e 3M -n 2"),
        &[(3 << 20, 3 << 20)],
        "none",
        "0",
    );
}

#[test]
fn alltoall_brings_each_part_to_its_rank() {
    let two = run("alltoall", "-b 8 -e 8M -f 64 -n 3");
    assert_all_right(
        &two,
        &[(8, 4), (512, 256), (32 << 10, 16 << 10), (2 << 20, 1 << 20)],
    );
    let four = run(
        "alltoall",
        "-r 4 --channels 2 -b 100 -e 3000100 -i 3000000 -n 2",
    );
    assert_all_right(&four, &[(100, 25), (3_000_100, 750_025)]);
}

/// The checked iteration is the fourth, so message 4 belongs to it where a rank receives one
/// message in each iteration. In all-reduce, each of two ranks receives two messages in an
/// iteration, so messages 7 and 8 belong to the fourth one. Message 7 becomes a part of a sum that
/// both ranks get, so both find its damage.
#[test]
fn damage_in_the_other_collectives_is_found() {
    for (collective, fault, wrong) in [
        ("all-reduce", "FAKE_CORRUPT=7", "2"),
        ("all-reduce", "FAKE_CORRUPT=8", "1"),
        ("all-reduce", "FAKE_STALE=8", "2048"),
        ("reduce-scatter", "FAKE_CORRUPT=4", "1"),
        ("reduce-scatter", "FAKE_STALE=4", "2048"),
        ("broadcast", "FAKE_CORRUPT=4", "1"),
        ("broadcast", "FAKE_STALE=4", "4096"),
        ("alltoall", "FAKE_CORRUPT=4", "1"),
        ("alltoall", "FAKE_STALE=4", "2048"),
    ] {
        let output = run(
            collective,
            &format!("-b 4096 -e 4096 -n 2 --rank-env 1:{fault}"),
        );
        let row = output
            .out
            .lines()
            .find(|line| !line.starts_with('#'))
            .unwrap_or_default();
        let found = row.split_whitespace().last();
        if fault.contains("STALE") && collective == "reduce-scatter" {
            // The rank's own data is added to the stale result of the iteration before, so some
            // bytes are right by chance.
            assert!(
                found.unwrap().parse::<u32>().unwrap() > 1900,
                "{collective} {fault}: {output:?}"
            );
        } else {
            assert_eq!(found, Some(wrong), "{collective} {fault}: {output:?}");
        }
        assert_eq!(output.status, Some(1), "{collective} {fault}: {output:?}");
    }
}

#[test]
fn the_last_lines_state_what_nccl_would_see() {
    let output = run("sendrecv", "-b 8 -e 8");
    let expected = "# On every rank NCCL would see network Fake, device Fake0 (1 of 1), 40000 Mb/s\n\
                    # every rank: NET/Fake: merged 2 rails into one device: lo0 lo1\n\
                    # rank 0: NET/Fake: connected with loopback over 2 rails\n\
                    # rank 1: NET/Fake: connected with loopback over 2 rails\n";
    assert!(output.out.ends_with(expected), "{output:?}");
}

#[test]
fn information_is_shown_when_asked_for_and_rank_env_reaches_its_rank_alone() {
    let output = run("sendrecv", "-b 8 -e 8 --rank-env 1:NCCL_DEBUG=INFO");
    let expected = "rank 1: NCCL INFO NET/Fake: merged 2 rails into one device: lo0 lo1\n\
                    rank 1: NCCL INFO NET/Fake: connected with loopback over 2 rails\n";
    assert_eq!(output.err, expected, "{output:?}");
}

#[test]
fn without_checks_no_result_is_called_right() {
    let output = run("all-gather", "-b 64 -e 64 -c 0 --rank-env 0:FAKE_CORRUPT=2");
    assert_eq!(
        (output.status, rows(&output)[0].3.as_str()),
        (Some(0), "N/A"),
        "{output:?}"
    );
}

/// Message 4 belongs to the checked iteration, after one for warming up and two timed ones.
#[test]
fn damaged_swapped_and_stale_data_is_counted_and_fails_the_run() {
    let flipped = run(
        "all-gather",
        "-b 8K -e 16K -f 2 -n 2 --rank-env 1:FAKE_CORRUPT=4",
    );
    assert_eq!(flipped.status, Some(1), "{flipped:?}");
    let wrong: Vec<_> = rows(&flipped).into_iter().map(|row| row.3).collect();
    assert_eq!(wrong, ["1", "0"], "{flipped:?}");
    assert!(
        flipped
            .out
            .contains("# rank 1: byte 2048 of rank 0's data is 0x"),
        "{flipped:?}"
    );
    assert!(
        flipped.out.contains("# Out of bounds values : 1 FAILED"),
        "{flipped:?}"
    );

    let stale = run("sendrecv", "-b 4096 -e 4096 -n 2 --rank-env 0:FAKE_STALE=4");
    assert_eq!(
        (stale.status, rows(&stale)[0].3.as_str()),
        (Some(1), "4096"),
        "{stale:?}"
    );

    let swapped = run("sendrecv", "-b 4096 -e 4096 -n 2 --rank-env 0:FAKE_SWAP=4");
    let wrong: u64 = rows(&swapped)[0].3.parse().unwrap();
    assert!(swapped.status == Some(1) && wrong > 3900, "{swapped:?}");
}

#[test]
fn the_last_timed_iteration_is_checked_too() {
    let output = run(
        "sendrecv",
        "-b 4096 -e 4096 -n 2 --rank-env 1:FAKE_CORRUPT=3",
    );
    assert_eq!(
        (output.status, rows(&output)[0].3.as_str()),
        (Some(1), "1"),
        "{output:?}"
    );
}

#[test]
fn a_failing_call_ends_the_run_with_its_reason() {
    for (fault, reason) in [
        (
            "FAKE_FAIL=3",
            "channel 0: isend returned ncclRemoteError (6): NET/Fake: planted: the cable is gone",
        ),
        ("FAKE_UNKNOWN=3", "channel 0: isend returned unknown (99)"),
        (
            "FAKE_SHORT=3",
            "channel 0: receive: message 0 has 63 bytes instead of 64",
        ),
        (
            "FAKE_INIT_FAILS=1",
            "init returned ncclSystemError (2): NET/Fake: planted: no such hardware",
        ),
        ("FAKE_NO_DEVICE=1", "the plugin has no device"),
        (
            "FAKE_DEVICE_ONLY=1",
            "device Fake0 does not take host memory",
        ),
    ] {
        let output = run(
            "sendrecv",
            &format!("-r 3 -b 64 -e 64 --rank-env 1:{fault}"),
        );
        assert_eq!(output.status, Some(1), "{fault}: {output:?}");
        assert!(
            output
                .err
                .lines()
                .any(|line| line == format!("nccl-spark: rank 1: {reason}")),
            "{fault}: {output:?}"
        );
    }
}

#[test]
fn the_reason_for_a_failed_or_hanging_init_is_shown_once() {
    let output = run("sendrecv", "-b 64 -e 64 --rank-env 1:FAKE_INIT_FAILS=1");
    let line = "nccl-spark: rank 1: init returned ncclSystemError (2): NET/Fake: planted: no such hardware\n";
    assert_eq!(
        (output.status, output.err.as_str()),
        (Some(1), line),
        "{output:?}"
    );
    let output = run(
        "sendrecv",
        "-b 64 -e 64 -T 4 --rank-env 1:FAKE_INIT_HANGS=1",
    );
    let line = "rank 1: NCCL WARN NET/Fake: planted: no port has a link\n";
    assert!(
        output.status == Some(1) && output.err.starts_with(line),
        "{output:?}"
    );
    assert!(
        output.err.contains("no progress for 4 s (--timeout)"),
        "{output:?}"
    );
}

#[test]
fn a_rank_that_dies_ends_the_run_with_how_it_died() {
    for (fault, end) in [
        ("FAKE_DIE", "killed by signal 9 (SIGKILL)"),
        ("FAKE_EXIT", "exited with status 3 and no error message"),
    ] {
        let output = run(
            "all-gather",
            &format!("-r 3 -b 3M -e 3M --rank-env 2:{fault}=5"),
        );
        assert_eq!(output.status, Some(1), "{output:?}");
        let first = output
            .err
            .lines()
            .find(|line| line.starts_with("nccl-spark: "))
            .unwrap_or_default();
        assert_eq!(first, format!("nccl-spark: rank 2: {end}"), "{output:?}");
    }
}

#[test]
fn a_hang_ends_the_run_and_names_the_call() {
    let stuck = run(
        "sendrecv",
        "-b 64 -e 64 --timeout 4 --rank-env 1:FAKE_HANG=3",
    );
    assert_eq!(stuck.status, Some(1), "{stuck:?}");
    assert!(
        stuck
            .err
            .starts_with("nccl-spark: no progress for 4 s (--timeout): rank 0: "),
        "{stuck:?}"
    );
    assert!(
        stuck
            .err
            .contains("timing 64 bytes, 0 of 2 messages done, inside isend\n"),
        "{stuck:?}"
    );

    // After a lost message, the rank takes each message for the one before it, until the last one
    // is missing.
    let lost = run(
        "sendrecv",
        "-b 64 -e 64 --timeout 4 --rank-env 1:FAKE_LOSE=3",
    );
    let expected = [
        "checking 64 bytes, 1 of 2 messages done; rank 1: ",
        "waiting for the other ranks\n",
    ];
    assert!(
        lost.status == Some(1) && expected.iter().all(|part| lost.err.contains(part)),
        "{lost:?}"
    );
}

#[test]
fn a_library_that_is_no_plugin_is_an_error_that_names_it() {
    let output = say(&[
        "sendrecv",
        "--fabric",
        "verbs",
        "--plugin",
        env!("CARGO_BIN_EXE_nccl-spark"),
    ]);
    assert!(
        output.status == Some(1)
            && output.err.starts_with("nccl-spark: rank")
            && output.err.contains(": load "),
        "{output:?}"
    );
    let fake = Fake::compile(&["-DncclNetPlugin_v11=another_symbol"]);
    let output = say(&[
        "sendrecv",
        "--fabric",
        "verbs",
        "--plugin",
        fake.library().to_str().unwrap(),
    ]);
    assert!(
        output
            .err
            .contains("is not a usable NCCL plugin: no symbol ncclNetPlugin_v8 to _v"),
        "{output:?}"
    );
}

#[test]
fn wrong_options_are_one_line_and_exit_status_2() {
    for arguments in [
        &["all-gather", "-r", "1"][..],
        &["sendrecv", "-b", "2M", "-e", "1M"],
        &["gather"],
        &["settings", "x"],
    ] {
        let output = say(arguments);
        assert_eq!(
            (
                output.status,
                output.out.as_str(),
                output.err.lines().count()
            ),
            (Some(2), "", 1),
            "{output:?}"
        );
        assert!(output.err.starts_with("nccl-spark: "), "{output:?}");
    }
    assert_eq!(say(&[]).status, Some(2));
    assert_eq!(say(&["--help"]).status, Some(0));
}

#[test]
fn an_unusable_setting_is_reported_once_before_any_rank_starts() {
    for command in ["all-gather", "memory"] {
        let output: ProgramOutput = nccl_spark()
            .arg(command)
            .env("NCCL_SPARK_STALL_WARM_S", "3")
            .output()
            .unwrap()
            .into();
        let expected = "nccl-spark: NCCL_SPARK_STALL_WARM_S=\"3\" is not usable: no such setting; did you mean \
                        NCCL_SPARK_STALL_WARN_S? `nccl-spark settings` lists all\n";
        assert_eq!(
            (output.status, output.out.as_str(), output.err.as_str()),
            (Some(1), "", expected),
            "{command}"
        );
    }
}

/// A missing file or unsuitable argument is a mistake on the command line, wherever it is found.
#[test]
fn a_mistake_on_the_command_line_has_status_2() {
    let fake = Fake::compile(&[]);
    let library = fake.library();
    let library = library.to_str().unwrap();
    let soft = [
        "--fabric",
        "soft",
        "--softverbs",
        library,
        "--plugin",
        library,
    ];
    for (arguments, why) in [
        (
            &["all-gather", "--plugin", "/no/such.so"][..],
            "--plugin /no/such.so: No such file or directory (os error 2)",
        ),
        (
            &["all-gather", "--softverbs", "/no/such.so"],
            "--softverbs /no/such.so: No such file or directory (os error 2)",
        ),
        (
            &[&["all-gather", "--profile", "/no/such"], &soft[..]].concat(),
            "--profile: profile \"/no/such\" is neither built in",
        ),
        (
            &[&["memory", "--profile", "/no/such"], &soft[..]].concat(),
            "--profile: profile \"/no/such\" is neither built in",
        ),
        (
            &[&["all-gather", "-r", "256"], &soft[..]].concat(),
            "256 ranks: the software fabric with --profile spark-1cable has at most 16",
        ),
        (
            &["all-gather", "-r", "257"],
            "invalid value '257' for '--ranks <N>': must be 2 to 256",
        ),
        (
            &[&["all-gather", "--slow-rail", "mlx5_0=0.5"], &soft[..]].concat(),
            "--slow-rail: ",
        ),
    ] {
        let output = say(arguments);
        let names_reason = output.err.starts_with(&format!("nccl-spark: {why}"))
            && output.err.lines().count() == 1;
        assert!(
            (output.status, output.out.as_str()) == (Some(2), "") && names_reason,
            "{arguments:?}: {output:?}"
        );
    }
    // The run's report has the same text.
    let output = say(&[
        &["all-gather", "--profile", "/no/such", "--json"],
        &soft[..],
    ]
    .concat());
    let json: serde_json::Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!(
        format!("nccl-spark: {}\n", json["error"].as_str().unwrap()),
        output.err,
        "{output:?}"
    );
}

#[test]
fn ranks_do_not_outlive_a_killed_parent() {
    let fake = Fake::compile(&[]);
    let mut command = nccl_spark();
    command.args([
        "sendrecv",
        "--fabric",
        "verbs",
        "-b",
        "64",
        "-e",
        "64",
        "--rank-env",
        "1:FAKE_HANG=3",
        "--plugin",
    ]);
    let mut parent = command
        .arg(fake.library())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let ranks = pids_of_ranks(&mut parent);
    assert_eq!(ranks.len(), 2);
    parent.kill().unwrap();
    parent.wait().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while ranks.iter().any(is_running) {
        assert!(
            Instant::now() < deadline,
            "a rank of {ranks:?} outlives its parent"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Reads the PIDs in `# Rank 0 Pid 1234 ...`, up to the table's head. The head is printed when the
/// ranks are connected.
fn pids_of_ranks(parent: &mut Child) -> Vec<u32> {
    let lines = BufReader::new(parent.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let head = lines
        .take_while(|line| !line.contains("(elements)"))
        .collect::<Vec<_>>();
    let pid = |line: &String| {
        line.split_once(" Pid ")?
            .1
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    };
    head.iter().filter_map(pid).collect()
}
