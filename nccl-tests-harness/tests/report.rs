//! `nccl-spark report` as a program: one value of each kind planted in every part, parts that fail and hang, Ctrl-C, files that are there.

mod common;

use common::{Said, is_built, nccl_spark, plugin};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What is planted, in the notations in which programs print it. None of it may be in the file.
const PLANTED: &[&str] = &[
    // Hosts: this one, one of /etc/hosts, one of --hosts and what ssh calls it, one that only NCCL's log names.
    "gx10-a1b2",
    "lab.example.org",
    "printer-room",
    "blackbird",
    "blackbird-real",
    "thor-7",
    // Users.
    "margarete",
    "walter",
    "rosalind",
    // Addresses: of an interface, of a neighbour, of nobody known; as IPv4-mapped GIDs.
    "192.168.177.11",
    "192.168.177.12",
    "10.77.3.9",
    "::ffff:c0a8:b10b",
    "0000:0000:0000:0000:0000:ffff:c0a8:b10b",
    "2001:db8:7::11",
    "2001:0db8:0007:0000:0000:0000:0000:0011",
    "fe80::4ebb:47ff:fe2d:19e3",
    "4ebb:47ff:fe2d:19e3",
    "fe800000000000004ebb47fffe2d19e3",
    // Hardware addresses.
    "4c:bb:47:2d:19:e3",
    "4c-bb-47-2d-19-e3",
    "4cbb.472d.19e3",
    "4cbb472d19e3",
    "4c:bb:47:2d:19:e4",
    // GUIDs.
    "fc4c:ea03:00f9:4230",
    "fc4cea0300f94230",
    "0xfc4cea0300f94231",
    // Serial numbers.
    "1654324000718",
    "3c9e2f10-aaaa-bbbb-cccc-1234567890ab",
    "0b1c2d3e4f5061728394a5b6c7d8e9f0",
    // Tokens: by form, by name, from the environment, of the doctor.
    "hf_abcdefghijKLMNOPqrst",
    "s3cr3t-of-a-variable",
    "an-unmarked-secret-value",
    "0123456789abcdef0123456789abcdef",
    "rosalind@example.com",
];

/// What must come through as it is.
const KEPT: &[&str] = &[
    "NCCL version 2.28.3+cuda13.0",
    "580.95.05",
    "0000:01:00.0",
    "12:34:56",
    "127.0.0.1",
    "255.255.255.0",
    "busbw 23.74 GB/s at 128M",
    "c0db936000000000000000000000000000000000",
];

/// A machine that is a folder, a program in place of nccl-spark, and a folder for the file.
struct Bed {
    folder: tempfile::TempDir,
}

impl Bed {
    /// The program prints what is planted, on both streams and as JSON.
    fn new() -> Self {
        let bed = Self { folder: tempfile::tempdir().unwrap() };
        for (path, text) in [
            ("etc/hostname", "gx10-a1b2.lab.example.org\n"),
            ("etc/hosts", "127.0.0.1 localhost\n192.168.177.12 printer-room # x\n"),
            ("etc/passwd", "root:x:0:0::/root:/bin/sh\nmargarete:x:1000:1000::/home/margarete:/bin/sh\n"),
            ("etc/machine-id", "0b1c2d3e4f5061728394a5b6c7d8e9f0\n"),
            ("etc/os-release", "PRETTY_NAME=\"Ubuntu 24.04.3 LTS\"\n"),
            ("etc/dgx-release", "DGX_SWBUILD_VERSION=\"7.2.3\"\nDGX_SERIAL_NUMBER=\"1654324000718\"\n"),
            (
                "home/margarete/.ssh/config",
                "Host blackbird\n  HostName blackbird-real.lab.example.org\n  User walter\n",
            ),
            ("sys/class/net/enp1s0f0np0/address", "4c:bb:47:2d:19:e3\n"),
            ("sys/class/infiniband/rocep1s0f0/node_guid", "fc4c:ea03:00f9:4230\n"),
            ("sys/class/infiniband/rocep1s0f0/fw_ver", "28.45.4028\n"),
            ("sys/class/infiniband/rocep1s0f0/ports/1/gids/0", "fe80:0000:0000:0000:4ebb:47ff:fe2d:19e3\n"),
            ("proc/sys/kernel/osrelease", "6.17.0-1008-nvidia\n"),
            ("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  580.95.05\n"),
            ("dev/nvidia0", ""),
            (
                "answers/ip-addr.json",
                r#"[{"ifindex": 2, "ifname": "enp1s0f0np0", "flags": ["UP"], "addr_info":
                [{"family": "inet", "local": "192.168.177.11", "prefixlen": 24}]}]"#,
            ),
        ] {
            bed.write(&format!("root/{path}"), text);
        }
        bed.write("planted.txt", &planted_text());
        bed.write("planted.json", &serde_json::to_string_pretty(&serde_json::json!({"text": planted_text()})).unwrap());
        let own = bed.folder.path().display();
        bed.program(
            "nccl-spark",
            &format!(
                "cat {own}/planted.txt; cat {own}/planted.txt >&2; json=\n\
                 for word; do test \"$json\" = next && cp {own}/planted.json \"$word\"; json=\n\
                 test \"$word\" = --json && json=next; done; exit 0"
            ),
        );
        bed.program("mpirun", &format!("exec {own}/nccl-spark \"$@\""));
        fs::create_dir(bed.path("tests")).unwrap();
        bed
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    fn program(&self, name: &str, script: &str) {
        self.write(name, &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The report, with the program of this bed and its machine.
    fn command(&self, arguments: &str) -> Command {
        let mut command = nccl_spark();
        command.arg("report").args(arguments.split_whitespace()).current_dir(&self.folder);
        command.arg("--with-program").arg(self.path("nccl-spark")).arg("--root").arg(self.path("root"));
        command.env("PATH", format!("{}:/usr/bin:/bin", self.folder.path().display()));
        command.env("HOME", "/home/margarete").env("MY_SERVICE_KEY", "an-unmarked-secret-value");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &str) -> Said {
        self.command(arguments).output().unwrap().into()
    }

    fn report(&self) -> String {
        fs::read_to_string(self.path("r.md")).unwrap()
    }
}

fn planted_text() -> String {
    let mut text: String = PLANTED.iter().map(|one| format!("a {one}, ({one}) \"{one}\"\n{one}\n")).collect();
    text +=
        "thor-7:123:456 [0] NCCL INFO x\nlogin walter@gx10-a1b2\nS3_PASSWORD=s3cr3t-of-a-variable\n/home/rosalind/x\n";
    // Secrets in capitals are others.
    let capitals = PLANTED.iter().filter(|one| !one.contains('_') && !one.contains("-of-") && !one.contains("secret"));
    text += &capitals.map(|one| format!("{}\n", one.to_uppercase())).collect::<String>();
    text + &KEPT.join("\n") + "\n"
}

/// In capitals or not.
fn found(text: &str) -> Vec<&'static str> {
    let lower = text.to_lowercase();
    PLANTED.iter().copied().filter(|one| lower.contains(&one.to_lowercase())).collect()
}

#[test]
fn what_tells_whose_machine_it_is_is_in_no_part_of_the_file() {
    let bed = Bed::new();
    let said = bed.run("--output r.md --hosts gx10-a1b2,walter@blackbird --nccl-tests tests");
    assert_eq!(said.status, Some(0), "{said:?}");
    let report = bed.report();
    assert_eq!(found(&report), [""; 0], "{report}");
    let parts = [
        "versions",
        "doctor",
        "rails",
        "settings",
        "hosts",
        "peer",
        "memory",
        "bench",
        "nccl-tests all_reduce",
        "nccl-tests all_gather",
        "tune collectives",
    ];
    let sections: Vec<&str> = report.split("\n## ").skip(1).collect();
    assert_eq!(sections.len(), parts.len(), "{report}");
    for (part, section) in parts.iter().zip(&sections) {
        assert!(section.starts_with(part), "{part}: {section}");
        if *part == "versions" {
            assert!(section.contains("DGX OS: 7.2.3\n") && section.contains("rocep1s0f0 28.45.4028"), "{section}");
            continue;
        }
        assert!(KEPT.iter().all(|kept| section.contains(kept)), "{part}: {section}");
        // Both streams, and the JSON where there is one, which still is JSON.
        let copies = if *part == "settings" { 2 } else { 3 };
        assert_eq!(section.matches("2.28.3+cuda13.0").count(), copies, "{part}: {section}");
        if let Some(json) = section.split("```json\n").nth(1) {
            let json: Value = serde_json::from_str(json.split("\n```").next().unwrap()).unwrap();
            assert!(json["text"].as_str().unwrap().contains("ip4-net1."), "{json}");
        }
    }
    // Equal things are equal in all parts.
    let line = |section: &str| section.lines().find(|line| line.contains(" NCCL INFO x")).unwrap().to_owned();
    assert!(sections[1..].iter().all(|section| line(section) == line(sections[1])), "{report}");
}

#[test]
fn secrets_with_blanks_and_hosts_of_nccls_variables_are_in_no_part_of_the_doctors_text() {
    let bed = Bed::new();
    bed.write("root/home/margarete/.nccl.conf", "NCCL_TOKEN=two words 1234 leak\nNCCL_HOSTID=acme-secret-host-42\n");
    let arguments = ["report", "--output", "r.md", "--only", "doctor", "--root", "root"];
    let mut real = nccl_spark();
    real.args(arguments).current_dir(&bed.folder);
    real.env("HOME", "/home/margarete").env("NCCL_COMM_ID", "gpu-node-77.corp.acme.com:12345");
    real.env("NCCL_PASSWORD", "correct horse battery staple and some more words to make it wrap over the line");
    real.env("NCCL_RAS_ADDR", "node5.internal:28028");
    let said: Said = real.stdin(Stdio::null()).output().unwrap().into();
    assert_eq!(said.status, Some(0), "{said:?}");
    let report = bed.report();
    // All of them were shown: in the text and in the JSON.
    for name in ["NCCL_TOKEN", "NCCL_HOSTID", "NCCL_COMM_ID", "NCCL_PASSWORD", "NCCL_RAS_ADDR"] {
        assert!(report.matches(name).count() >= 2, "{name}: {report}");
    }
    for planted in ["horse", "staple", "make it wrap", "over the line", "words 1234", "acme", "gpu-node", "node5"] {
        assert!(!report.contains(planted), "{planted}: {report}");
    }
    assert!(report.contains(":12345") && report.contains(":28028"), "{report}");
}

#[test]
fn what_is_asked_for_is_kept_but_no_token() {
    let bed = Bed::new();
    let keeps = "--keep-names --keep-addresses --keep-serials";
    let said = bed.run(&format!("--output r.md --only settings {keeps}"));
    assert_eq!(said.status, Some(0), "{said:?}");
    let report = bed.report();
    let tokens = ["hf_abcdefghijKLMNOPqrst", "s3cr3t-of-a-variable", "an-unmarked-secret-value"];
    assert!(tokens.iter().all(|token| !report.contains(token)), "{report}");
    for kept in ["gx10-a1b2", "margarete", "192.168.177.11", "4c:bb:47:2d:19:e3", "1654324000718"] {
        assert!(report.contains(kept), "{kept}: {report}");
    }
}

#[test]
fn a_part_that_hangs_or_fails_is_named_and_the_others_run() {
    let bed = Bed::new();
    let script = "case $1 in\nrails) echo before; sleep 600 & echo $! > child; sleep 600;;\nsettings) echo 'nccl-spark: broken | so' >&2; exit 7;;\n\
                  doctor) kill -SEGV $$;;\n*) echo well;;\nesac";
    bed.program("nccl-spark", script);
    let began = Instant::now();
    let said = bed.run("--output r.md --only doctor,rails,settings,bench,tune --part-limit 60 --part-limit rails=1");
    assert_eq!(said.status, Some(0), "{said:?}");
    // The limits of other parts and the sleeps are longer.
    assert!(began.elapsed() < Duration::from_secs(45), "{:?}", began.elapsed());
    let report = bed.report();
    for expected in [
        "| doctor | ended by signal 11 |",
        "| not done within 1 s: ended |\n",
        "| settings | exit status 7 |",
        r"| broken \| so |",
        "| bench on this machine | exit status 0 |",
        "| tune collectives | not run |  | --nccl-tests DIR was not given |",
        "before\n",
        "It left no 2-doctor.json",
    ] {
        assert!(report.contains(expected), "{expected}: {report}");
    }
    assert!(said.err.contains("# report: 2/5 rails: not done within 1 s: ended\n"), "{said:?}");
    let child = fs::read_to_string(bed.path("child")).unwrap();
    assert!(!is_running(child.trim()), "{child}");
}

/// A process that has ended and that nobody has waited for does not run.
fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).is_some_and(|state| state != "Z")
}

#[test]
fn a_file_that_is_there_is_not_overwritten_and_nothing_runs() {
    let bed = Bed::new();
    bed.program("nccl-spark", "touch ran");
    bed.write("r.md", "mine");
    let said = bed.run("--output r.md --only rails");
    assert!(said.status == Some(1) && said.err.contains("r.md is there already"), "{said:?}");
    assert!(bed.report() == "mine" && !bed.path("ran").exists());
    let said = bed.run("--output no/such/folder/r.md --only rails");
    assert!(said.status == Some(1) && said.err.contains("--output no/such/folder/r.md"), "{said:?}");
    // One that comes meanwhile is not overwritten either.
    bed.program("nccl-spark", "echo theirs > new.md");
    let said = bed.run("--output new.md --only rails");
    assert!(said.status == Some(1) && said.err.contains("write new.md"), "{said:?}");
    assert_eq!(fs::read_to_string(bed.path("new.md")).unwrap(), "theirs\n");
    let left: Vec<_> = fs::read_dir(&bed.folder).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().starts_with(".tmp")), "{left:?}");
}

#[test]
fn mistakes_are_told_and_a_dry_run_runs_nothing() {
    let bed = Bed::new();
    bed.program("nccl-spark", "touch ran");
    for (arguments, allowed) in [
        ("--part-limit 0", "must be SECONDS or PART=SECONDS, seconds from 1 to 86400"),
        ("--part-limit rail=5", "parts: versions, doctor, rails"),
        ("--only nothing", "possible values: versions, doctor"),
        ("--hosts one", "--hosts: 1 hosts; must be 2 to 16"),
        ("--hosts a,a", "named twice"),
        ("--hosts a,-v", "a host is a name or address"),
        ("--nccl-tests no/such", "--nccl-tests no/such: must be a folder"),
        ("--only rails --skip rails", "leave no part"),
        ("--ssh x", "--hosts"),
    ] {
        let said = bed.run(arguments);
        assert!(said.status == Some(2) && said.err.contains(allowed), "{arguments}: {said:?}");
    }
    let said = bed.run("--dry-run --hosts a,b --nccl-tests tests --part-limit tune=7");
    assert_eq!(said.status, Some(0), "{said:?}");
    for line in [
        "rails: at most 60 s: nccl-spark rails --json 3-rails.json\n",
        "peer b: at most 330 s: nccl-spark doctor --peer b --ssh ssh --json 6-peer.json\n",
        "memory: at most 300 s: nccl-spark memory --litmus 20 --json 7-memory.json\n",
        "bench between hosts: at most 300 s: mpirun -np 2 -H a,b --map-by node --bind-to none ",
        "tune collectives: at most 7 s: nccl-spark tune collectives --dry-run --dir ",
        " --compare spark,ib --rounds 3 --dir ",
    ] {
        assert!(said.out.contains(line), "{line}: {}", said.out);
    }
    assert!(!bed.path("ran").exists());
    let unread: Vec<_> = fs::read_dir(&bed.folder).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(!unread.iter().any(|name| name.to_string_lossy().ends_with(".md")), "{unread:?}");
}

#[test]
fn ctrl_c_ends_the_part_and_writes_what_there_is() {
    let bed = Bed::new();
    bed.program("nccl-spark", "case $1 in rails) echo begun; touch begun; sleep 600;; *) echo well;; esac");
    let inner = bed.command("--output r.md --only doctor,rails,settings");
    // The tests may be a background job of a shell, which starts it with SIGINT ignored.
    let mut outer = Command::new("env");
    outer.arg("--default-signal=INT").arg(inner.get_program()).args(inner.get_args()).current_dir(&bed.folder);
    outer.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
    outer.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let report = outer.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !bed.path("begun").exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    signal::kill(Pid::from_raw(report.id() as i32), Signal::SIGINT).unwrap();
    let said: Said = report.wait_with_output().unwrap().into();
    assert_eq!(said.status, Some(130), "{said:?}");
    assert!(said.err.contains("interrupted; what there is was written to r.md"), "{said:?}");
    let text = bed.report();
    for expected in [
        "**It was interrupted: what comes after that is missing.**",
        "| doctor | exit status 0 |",
        "| rails | interrupted |",
        "| settings | not run |  | the report was interrupted before |",
        "begun\n",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn this_machine_is_reported_on_over_the_software_fabric_where_there_is_no_other() {
    if !is_built() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = nccl_spark();
    command.args(["report", "--output", "-", "--only", "versions,doctor,rails,settings,memory,bench"]);
    command.env("SOFTVERBS_DIR", folder.path()).env_remove("NCCL_SPARK_SYSFS");
    // The loader finds the plugin as it finds an installed one.
    let library = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(plugin().unwrap(), library.path().join("libnccl-net-spark.so")).unwrap();
    command.env("LD_LIBRARY_PATH", library.path());
    let said: Said = command.output().unwrap().into();
    assert_eq!(said.status, Some(0), "{said:?}");
    let rows: Vec<&str> = said.out.lines().filter(|line| line.starts_with("| ")).collect();
    assert_eq!(rows.len(), 7, "{}", said.out);
    for expected in ["\n## bench on this machine\n", "\"schema\": 1", "NCCL_SPARK_STALL_WARN_S", "kernel: "] {
        assert!(said.out.contains(expected), "{expected}: {}", said.out);
    }
    let bench = rows.iter().find(|row| row.starts_with("| bench")).unwrap();
    assert!(bench.contains("exit status 0"), "{}", said.out);
    for interface in fs::read_dir("/sys/class/net").unwrap().flatten() {
        let mac = fs::read_to_string(interface.path().join("address")).unwrap_or_default();
        let is_own = !mac.trim().is_empty() && mac.trim() != "00:00:00:00:00:00";
        assert!(!is_own || !said.out.contains(mac.trim()), "{}", said.out);
    }
}
