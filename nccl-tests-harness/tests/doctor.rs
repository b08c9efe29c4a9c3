//! Tests of the program `nccl-spark doctor`: its exit status, its JSON, its examination of another
//! process, and its text on a terminal.

mod common;

use common::{ProgramOutput, nccl_spark, run_on_terminal};
use nix::pty::Winsize;
use serde_json::Value;
use std::process::{Command, Stdio};

/// Runs the doctor with only these environment variables.
fn doctor(arguments: &str, variables: &str) -> ProgramOutput {
    let mut command = Command::new(nccl_spark().get_program());
    command
        .env_clear()
        .arg("doctor")
        .args(arguments.split_whitespace());
    command.envs(
        variables
            .split_whitespace()
            .filter_map(|pair| pair.split_once('=')),
    );
    command.output().unwrap().into()
}

#[test]
fn the_exit_status_reports_faults() {
    for (arguments, variables, status) in [
        ("--env", "", 0),
        (
            "--env",
            "NCCL_NET=Spark NCCL_NET_PLUGIN=spark NCCL_IB_TIMEOUT=14",
            0,
        ),
        ("--env", "NCCL_IB_TIMEOUT=22", 1),
        ("--env", "NCCL_IB_DISABLE=1", 1),
        ("--env", "NCCL_NET=IB", 3),
        ("--env", "NCCL_NET_PLUGIN=none NCCL_IB_TIMEOUT=22", 3),
        ("--no-such-option", "", 2),
        ("--pid 4194304000", "", 2),
        ("--pid 4194303", "", 2),
        ("--json /no/such/folder/x.json --env", "", 2),
    ] {
        let output = doctor(arguments, variables);
        assert_eq!(
            output.status,
            Some(status),
            "{arguments} {variables}: {output:?}"
        );
    }
}

/// With these variables and no plugin file, NCCL would print "network Spark not found".
#[test]
fn a_missing_plugin_is_a_fault() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("libnccl-net-spark.so");
    let variables = format!("NCCL_NET=Spark NCCL_NET_PLUGIN={}", plugin.display());
    let assert_judged = |arguments: &str, why: &str| {
        let output = doctor(arguments, &variables);
        assert_eq!(output.status, Some(3), "{arguments}: {output:?}");
        let json: Value = serde_json::from_str(&output.out).unwrap();
        let finding = json["findings"]
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["id"] == "plugin-kept-out")
            .unwrap();
        let texts =
            [&finding["text"], &json["variables"][1]["text"]].map(|text| text.as_str().unwrap());
        let words = format!("{why} {}", plugin.display());
        assert!(
            finding["severity"] == "broken" && texts.iter().all(|text| text.contains(&words)),
            "{json}"
        );
    };
    let unnamed = doctor("--env", "NCCL_NET=Spark");
    assert!(unnamed.out.contains("[plugin-not-named]"), "{unnamed:?}");
    assert_judged("--env --json -", "file not found:");
    assert_judged("--json -", "file not found:");
    std::fs::create_dir(&plugin).unwrap();
    assert_judged("--env --json -", "not a regular file:");
    std::fs::remove_dir(&plugin).unwrap();
    std::fs::write(&plugin, "").unwrap();
    assert_eq!(doctor("--env", &variables).status, Some(0));
}

#[test]
fn an_empty_root_is_judged_broken_and_missing_parts_are_listed() {
    let root = tempfile::tempdir().unwrap();
    let output = doctor(
        &format!("--root {} --json -", root.path().display()),
        "NCCL_NET=Spark",
    );
    assert_eq!(output.status, Some(3), "{output:?}");
    let json: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!(
        (&json["schema"], &json["verdict"]),
        (&1.into(), &"broken".into())
    );
    let ids: Vec<_> = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids[..2], ["no-rdma-device", "libibverbs"], "{ids:?}");
    assert!(
        json["findings"][0]["cure"]
            .as_str()
            .unwrap()
            .contains("modprobe"),
        "{json}"
    );
    let variable = &json["variables"][0];
    assert_eq!(
        (&variable["name"], &variable["effect"], &variable["source"]),
        (&"NCCL_NET".into(), &"nccl".into(), &"environment".into())
    );
    let not_seen: Vec<_> = json["not_seen"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["what"].as_str().unwrap())
        .collect();
    assert!(
        not_seen.contains(&"the limit of locked memory"),
        "{not_seen:?}"
    );
    // With `--json -` the text goes to standard error. It begins with the verdict.
    assert!(
        output.err.starts_with("The plugin does not work: "),
        "{output:?}"
    );
}

#[test]
fn a_running_process_is_judged_by_its_own_environment() {
    let mut process = Command::new("sleep");
    process
        .arg("60")
        .env_clear()
        .env("NCCL_NET", "IB")
        .env("HF_TOKEN", "secret");
    let mut process = process.spawn().unwrap();
    let output = doctor(&format!("--env --pid {}", process.id()), "NCCL_NET=Spark");
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(output.status, Some(3), "{output:?}");
    assert!(
        output.out.contains("NCCL_NET=IB") && output.out.contains("[network-not-spark]"),
        "{output:?}"
    );
    assert!(
        !output.out.contains("secret") && !output.out.contains("HF_TOKEN"),
        "{output:?}"
    );
}

/// The process may belong to another user, who chose the variables' names and values. A terminal
/// would execute control characters in them.
#[test]
fn control_characters_of_variables_are_not_printed() {
    let forged = "x\x1b]0;pwned\x07\x1b[2J\nBROKEN: forged";
    let mut process = Command::new("sleep");
    process
        .arg("60")
        .env_clear()
        .env("NCCL_DEBUG", forged)
        .env("NCCL_NET", forged)
        .env("NCCL_\x1b[2J", "x");
    let mut process = process.spawn().unwrap();
    let output = doctor(&format!("--env --pid {}", process.id()), "");
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(
        output.out.contains("NCCL_DEBUG=x?]0;pwned??[2J?BROKEN:")
            && output.out.contains("NCCL_?[2J=x"),
        "{output:?}"
    );
    assert!(
        output.out.chars().all(|c| c == '\n' || !c.is_control()),
        "{output:?}"
    );
    assert!(!output.out.contains("\nBROKEN: forged"), "{output:?}");
}

#[test]
fn doctor_runs_without_root_and_hides_unrelated_variables() {
    let output = doctor("", "HF_TOKEN=secret");
    assert!(matches!(output.status, Some(0 | 1 | 3)), "{output:?}");
    assert_eq!(output.err, "", "{output:?}");
    assert!(
        output.out.starts_with("The plugin ")
            && output.out.contains("\n# -v lists what was read ("),
        "{output:?}"
    );
    assert!(!output.out.contains("secret"), "{output:?}");
}

#[test]
fn verbose_text_and_all_json_list_what_was_read_and_not_seen() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("proc/sys/kernel")).unwrap();
    std::fs::write(
        root.path().join("proc/sys/kernel/osrelease"),
        "6.17.0-1014-nvidia\n",
    )
    .unwrap();
    let output =
        |arguments: &str| doctor(&format!("--root {} {arguments}", root.path().display()), "");
    let listed = [
        "\nRead:\n",
        "\n  kernel: 6.17.0-1014-nvidia\n",
        "\nNot seen:\n",
        "\n  the BIOS version: ",
    ];
    let brief = output("");
    assert!(
        listed.iter().all(|part| !brief.out.contains(part)),
        "{brief:?}"
    );
    assert!(
        brief.out.contains("\n# -v lists what was read (")
            && brief.out.contains("could not be seen ("),
        "{brief:?}"
    );
    assert!(!output("-q").out.contains("# -v"));
    for option in ["-v", "--verbose"] {
        let long = output(option);
        assert!(
            listed.iter().all(|part| long.out.contains(part)) && !long.out.contains("# -v"),
            "{long:?}"
        );
    }
    for option in ["--json -", "--json - -v"] {
        let json: Value = serde_json::from_str(&output(option).out).unwrap();
        let lists = ["facts", "not_seen"].map(|list| json[list].as_array().unwrap().len());
        assert!(lists.iter().all(|length| *length > 0), "{json}");
    }
}

/// The width is COLUMNS, else the terminal's width, else 100.
#[test]
fn sentences_are_wrapped_to_the_width_of_the_terminal() {
    let root = tempfile::tempdir().unwrap();
    let shown = |columns: Option<&str>, terminal: Option<u16>| {
        let mut command = Command::new(nccl_spark().get_program());
        command
            .env_clear()
            .args(["doctor", "--root"])
            .arg(root.path());
        command.envs(columns.map(|columns| ("COLUMNS", columns)));
        let Some(ws_col) = terminal else {
            return ProgramOutput::from(command.output().unwrap()).out;
        };
        let size = Winsize {
            ws_row: 24,
            ws_col,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        command.stdin(Stdio::null());
        run_on_terminal(command, Some(&size)).1
    };
    for (columns, terminal, width) in [
        (Some("40"), None, 40),
        (Some("40"), Some(60), 40),
        (None, Some(60), 60),
        (Some("0"), Some(60), 60),
        (Some("wide"), None, 100),
        (None, None, 100),
    ] {
        let text = shown(columns, terminal);
        // Commands that cure a finding are not wrapped, so that they can be copied.
        let sentences = text
            .lines()
            .map(str::trim_end)
            .filter(|line| !line.starts_with("    $ "));
        let longest = sentences.map(|line| line.chars().count()).max().unwrap();
        assert!(
            longest <= width && longest > width - 20,
            "{columns:?} {terminal:?}: {longest}: {text}"
        );
    }
}
