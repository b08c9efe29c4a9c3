//! The run's report as JSON, the progress line on a terminal, and outputs that cannot be written.

mod common;

use common::{Fake, ProgramOutput, nccl_spark, read_terminal, say};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::process::Stdio;

fn run(arguments: &str, fake: &Fake) -> ProgramOutput {
    let library = fake.library();
    let mut all: Vec<&str> = arguments.split_whitespace().collect();
    all.extend(["--fabric", "verbs", "--plugin", library.to_str().unwrap()]);
    say(&all)
}

#[test]
fn json_contains_the_table() {
    let fake = Fake::compile(&[]);
    let path = fake.folder().join("run.json");
    let output = run(
        &format!(
            "all-reduce -r 3 -b 64 -e 4096 -f 64 -n 2 --percentiles --json {}",
            path.display()
        ),
        &fake,
    );
    assert_eq!(
        (output.status, output.err.as_str()),
        (Some(0), ""),
        "{output:?}"
    );
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for (name, value) in [
        ("collective", "all-reduce"),
        ("element", "int8"),
        ("operation", "sum"),
        ("fabric", "verbs"),
    ] {
        assert_eq!(json[name], value, "{json}");
    }
    assert_eq!(
        (&json["ranks"], &json["ok"], &json["error"]),
        (&3.into(), &true.into(), &Value::Null)
    );
    assert_eq!(json["networks"][2]["device"], "Fake0");
    assert_eq!(
        json["connections"][0][0],
        "NET/Fake: connected with loopback over 2 rails"
    );
    let rows = json["rows"].as_array().unwrap();
    let table: Vec<_> = output
        .out
        .lines()
        .filter(|line| !line.starts_with('#'))
        .collect();
    assert_eq!((rows.len(), table.len()), (2, 2), "{json}");
    for (row, line) in rows.iter().zip(table) {
        let cells: Vec<_> = line.split_whitespace().collect();
        assert_eq!(
            (row["size_bytes"].to_string(), row["wrong"].to_string()),
            (cells[0].to_owned(), "0".to_owned())
        );
        let busbw = row["busbw_gb_s"].as_f64().unwrap();
        assert!(
            (busbw - cells[7].parse::<f64>().unwrap()).abs() < 0.006,
            "{row} {line}"
        );
        for (name, cell) in [("time_p50_us", 9), ("time_p99_us", 10)] {
            let time = row[name].as_f64().unwrap();
            assert!(
                time > 0.0 && (time - cells[cell].parse::<f64>().unwrap()).abs() < 0.006 * time,
                "{row} {line}"
            );
        }
        assert!(
            row["time_p50_us"].as_f64() <= row["time_p99_us"].as_f64(),
            "{row}"
        );
        // For all-reduce, busbw / algbw is 2 x (ranks - 1) / ranks, here with three ranks.
        assert!(
            (busbw / row["algbw_gb_s"].as_f64().unwrap() - 4.0 / 3.0).abs() < 1e-9,
            "{row}"
        );
    }
}

#[test]
fn json_on_standard_output_is_alone_there_and_has_the_errors() {
    let fake = Fake::compile(&[]);
    let output = run(
        "sendrecv -b 4096 -e 4096 -n 2 --json - --rank-env 0:FAKE_CORRUPT=4",
        &fake,
    );
    let json: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!(
        (output.status, &json["ok"], &json["rows"][0]["wrong"]),
        (Some(1), &false.into(), &1.into()),
        "{json}"
    );
    assert!(
        json["rows"][0]["first_wrong"][0]
            .as_str()
            .unwrap()
            .starts_with("rank 0: byte 2048 of rank 1's data")
    );
    assert!(
        output.err.contains("# Out of bounds values : 1 FAILED"),
        "{output:?}"
    );

    let output = run(
        "sendrecv -b 64 -e 64 --json - --rank-env 1:FAKE_FAIL=1",
        &fake,
    );
    let json: Value = serde_json::from_str(&output.out).unwrap();
    assert!(
        json["error"]
            .as_str()
            .unwrap()
            .contains("rank 1: channel 0: isend returned"),
        "{json}"
    );
    assert_eq!(
        (output.status, &json["ok"]),
        (Some(1), &false.into()),
        "{json}"
    );
}

#[test]
fn an_output_that_cannot_be_written_is_named() {
    let fake = Fake::compile(&[]);
    let library = fake.library();
    let collective = [
        "all-gather",
        "-b",
        "64",
        "-e",
        "64",
        "--fabric",
        "verbs",
        "--plugin",
        library.to_str().unwrap(),
    ];
    for arguments in [
        &["settings"][..],
        &["--help"],
        &["--version"],
        &["doctor", "--env"],
        &["fabric", "status", "--json"],
        &collective,
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output: ProgramOutput = nccl_spark()
            .args(arguments)
            .stdout(full)
            .output()
            .unwrap()
            .into();
        let line = "nccl-spark: standard output: No space left on device (os error 28)";
        assert_eq!(
            (output.status, output.err.lines().last()),
            (Some(1), Some(line)),
            "{arguments:?}: {output:?}"
        );
    }
}

/// Runs the program with standard error on a terminal, and standard output too if `shares`. Returns
/// the text on the terminal and on standard output.
fn on_a_terminal(fake: &Fake, arguments: &str, shares: bool) -> (String, String) {
    let terminal = nix::pty::openpty(None, None).unwrap();
    let mut command = nccl_spark();
    command
        .args(arguments.split_whitespace())
        .args(["--fabric", "verbs", "--plugin"])
        .arg(fake.library());
    command.env("TERM", "xterm");
    if shares {
        command.stdout(terminal.slave.try_clone().unwrap());
    } else {
        command.stdout(Stdio::piped());
    }
    let mut process = command.stderr(Stdio::from(terminal.slave)).spawn().unwrap();
    drop(command);
    let reader = std::thread::spawn(move || read_terminal(terminal.master));
    let mut table = String::new();
    if let Some(mut output) = process.stdout.take() {
        output.read_to_string(&mut table).unwrap();
    }
    assert!(process.wait().unwrap().success());
    (reader.join().unwrap(), table)
}

/// A run that takes six seconds on any machine: rank 0 sends six messages, and each takes a second.
/// The run prints a table line every two seconds.
const SLOW: &str = "all-gather -b 8 -e 512 -f 8 -n 1 -w 0 --rank-env 0:FAKE_SLOW=1";

const ERASE: &str = "\x1b[2K";

#[test]
fn steps_over_two_seconds_show_progress_on_a_terminal() {
    let fake = Fake::compile(&[]);
    let (screen, table) = on_a_terminal(&fake, SLOW, false);
    assert!(screen.contains("/3 sizes"), "{screen:?}");
    assert!(
        table.contains("# Out of bounds values : 0 OK") && !table.contains(" sizes"),
        "{table}"
    );
    let (screen, _) = on_a_terminal(&fake, "all-gather -b 64 -e 4096 -f 64", false);
    assert_eq!(screen, "", "not for what is done sooner");
}

#[test]
fn no_progress_line_stays_in_the_table() {
    let fake = Fake::compile(&[]);
    let (screen, _) = on_a_terminal(&fake, SLOW, true);
    assert!(screen.contains("/3 sizes"), "{screen:?}");
    for line in screen.split('\n') {
        let kept = line.rsplit(ERASE).next().unwrap_or_default();
        assert!(!kept.contains(" sizes: "), "{kept:?} stays in {screen:?}");
    }
}

#[test]
fn a_closed_pipe_ends_the_program_quietly() {
    let fake = Fake::compile(&[]);
    let tune = ["tune", "--dry-run", "--fabric", "verbs"];
    for arguments in [
        &["settings"][..],
        &["sendrecv", "--fabric", "verbs", "-b", "8", "-e", "8"],
        &tune,
    ] {
        let mut command = nccl_spark();
        command.args(arguments);
        if arguments.len() > 1 {
            command.arg("--plugin").arg(fake.library());
        }
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output: ProgramOutput = command
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .unwrap()
            .into();
        assert_eq!(
            (output.status, output.err.as_str()),
            (Some(141), ""),
            "{arguments:?}"
        );
    }
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = nccl_spark().arg("gather").stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(2));
}
