//! `--json` of every command: printed without a FILE, and no file left by a run without a report.

mod common;

use common::{Fake, Fakes, ProgramOutput, say};
use serde_json::Value;
use std::fs;
use std::path::Path;

fn printed(output: &ProgramOutput) -> Value {
    serde_json::from_str(&output.out).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

fn run(fake: &Fake, arguments: &str) -> ProgramOutput {
    let library = fake.library();
    let mut words: Vec<&str> = arguments.split_whitespace().collect();
    words.extend(["--fabric", "verbs", "--plugin", library.to_str().unwrap()]);
    say(&words)
}

fn files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    entries.filter(|name| !name.ends_with(".so")).collect()
}

#[test]
fn without_a_file_the_result_is_printed() {
    let fake = Fake::compile(&[]);
    let json = printed(&run(&fake, "all-gather -b 64 -e 64 -n 1 --json"));
    assert_eq!(
        (&json["collective"], &json["ok"]),
        (&"all-gather".into(), &true.into()),
        "{json}"
    );
    let settings = fake.folder().join("none.conf");
    let tune =
        "tune --json -b 64K -e 64K -n 1 -w 0 --rounds 1 --qps 2 --min-share 16K --dry-run --output";
    let json = printed(&run(&fake, &format!("{tune} {}", settings.display())));
    assert_eq!(json["tried"].as_array().unwrap().len(), 1, "{json}");
    assert!(printed(&Fakes::new().run("--json -b 8", ""))["kinds"].is_array());
    for command in [
        &["rails", "--json"][..],
        &["fabric", "status", "--json"],
        &["doctor", "--env", "--json"],
    ] {
        assert!(printed(&say(command)).is_object(), "{command:?}");
    }
    assert_eq!(files(fake.folder()), [""; 0]);
}

#[test]
fn a_run_without_a_report_leaves_no_file_and_keeps_one_that_was_there() {
    let fake = Fake::compile(&[]);
    let file = fake.folder().join("out.json");
    let option = format!("--json {}", file.display());
    let without = [
        ("doctor --pid 4194303", 2),
        (
            "tune --qps 2 --min-share 16K --dry-run --rank-env 1:FAKE_FAIL=1 --fabric verbs",
            1,
        ),
        ("nccl-tests --dir /no/such/folder", 1),
    ];
    for (command, status) in without {
        let words = format!("{command} {option}");
        let mut words: Vec<&str> = words.split(' ').collect();
        let library = fake.library();
        if command.starts_with("tune") {
            words.extend(["--plugin", library.to_str().unwrap()]);
        }
        let output = say(&words);
        assert!(
            output.status == Some(status) && !file.exists(),
            "{command}: {output:?}"
        );
        fs::write(&file, "of before").unwrap();
        say(&words);
        assert_eq!(fs::read_to_string(&file).unwrap(), "of before", "{command}");
        fs::remove_file(&file).unwrap();
    }
    // The new report replaces a longer one.
    fs::write(&file, "x".repeat(100_000)).unwrap();
    let output = run(&fake, &format!("all-gather -b 64 -e 64 -n 1 {option}"));
    let json: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert!(output.status == Some(0) && json["ok"] == true, "{output:?}");
}

#[test]
fn an_unwritable_file_is_named() {
    let fake = Fake::compile(&[]);
    let folder = format!("{}/", fake.folder().display());
    for (file, status, why) in [
        (
            "/no/such/folder/x",
            2,
            "No such file or directory (os error 2)",
        ),
        (
            folder.trim_end_matches('/'),
            2,
            "Is a directory (os error 21)",
        ),
        ("/dev/full", 1, "No space left on device (os error 28)"),
    ] {
        let output = run(&fake, &format!("sendrecv -b 64 -e 64 -n 1 --json {file}"));
        let line = format!("nccl-spark: --json {file}: {why}\n");
        assert!(
            output.status == Some(status) && output.err == line,
            "{file}: {output:?}"
        );
    }
}
