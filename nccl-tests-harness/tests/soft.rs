//! The plugin over the software fabric. The tests are skipped if the whole workspace is not built.

mod common;

use common::{ProgramOutput, built, is_built, nccl_spark};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any delay of the machine: only a hung program exceeds it.
const PATIENCE: Duration = Duration::from_secs(60);

fn command(arguments: &str) -> Command {
    let mut command = nccl_spark();
    command.args(arguments.split_whitespace());
    if !["fabric", "rails"]
        .iter()
        .any(|other| arguments.starts_with(other))
    {
        command
            .arg("--plugin")
            .arg(built().expect("is_built() was checked first"));
    }
    command
        .env_remove("NCCL_IB_HCA")
        .env_remove("NCCL_SPARK_SYSFS")
        .env_remove("SOFTVERBS_DIR");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn start(arguments: &str) -> Child {
    command(arguments).spawn().unwrap()
}

fn run(arguments: &str) -> ProgramOutput {
    start(arguments).wait_with_output().unwrap().into()
}

/// A job that runs until it is ended, on a fabric in its own folder.
struct Endless {
    dir: tempfile::TempDir,
    job: Child,
    ranks: Vec<u64>,
}

impl Endless {
    fn start(arguments: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let endless = format!(
            "all-gather --fabric soft --profile unpaced -b 1K -e 1K -n 4000000000 -w 0 {arguments}"
        );
        let inner = command(&endless);
        // A shell starts a background job with SIGINT ignored. The tests may be such a job, and
        // then the processes that they start inherit the ignored SIGINT. A user starts this job in
        // the foreground, where SIGINT is not ignored, so `env` resets it.
        let mut outer = Command::new("env");
        outer
            .arg("--default-signal=INT,TERM")
            .arg(inner.get_program())
            .args(inner.get_args());
        outer
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // As from a shell, the job gets its own process group, which Ctrl-C reaches as a whole.
        let job = outer
            .env("SOFTVERBS_DIR", dir.path())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut endless = Self {
            dir,
            job,
            ranks: Vec::new(),
        };
        let deadline = Instant::now() + PATIENCE;
        while endless.ranks.len() < 2 {
            assert!(
                Instant::now() < deadline && endless.job.try_wait().unwrap().is_none(),
                "its ranks did not come up"
            );
            std::thread::sleep(Duration::from_millis(50));
            endless.ranks = pids(&endless.fabric("status --json -"));
        }
        endless
    }

    fn fabric(&self, arguments: &str) -> ProgramOutput {
        let fabric = command(&format!("fabric {arguments}"))
            .env("SOFTVERBS_DIR", self.dir.path())
            .output();
        fabric.unwrap().into()
    }

    fn folder(&self) -> PathBuf {
        let mut folders = std::fs::read_dir(self.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let first = folders
            .next()
            .expect("the job's fabric is in SOFTVERBS_DIR");
        assert_eq!(folders.next(), None);
        first
    }

    fn signal(&self, signal: Signal, to_all: bool) {
        let pid = Pid::from_raw(i32::try_from(self.job.id()).unwrap());
        if to_all {
            signal::killpg(pid, signal)
        } else {
            signal::kill(pid, signal)
        }
        .unwrap();
    }

    fn ended(mut self) -> (ProgramOutput, tempfile::TempDir, Vec<u64>) {
        let deadline = Instant::now() + PATIENCE;
        while self.job.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                self.signal(Signal::SIGKILL, true);
                panic!("the job goes on");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        (
            self.job.wait_with_output().unwrap().into(),
            self.dir,
            self.ranks,
        )
    }
}

fn pids(output: &ProgramOutput) -> Vec<u64> {
    let Ok(json) = serde_json::from_str::<Value>(&output.out) else {
        panic!("{output:?}")
    };
    let nodes = json["fabrics"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|fabric| fabric["nodes"].as_array().unwrap());
    nodes
        .flat_map(|node| node["pids"].as_array().unwrap())
        .map(|pid| pid.as_u64().unwrap())
        .collect()
}

#[test]
fn every_collective_is_right_over_merged_rails() {
    if !is_built() {
        return;
    }
    for collective in [
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "broadcast",
        "alltoall",
        "sendrecv",
    ] {
        let output = run(&format!(
            "{collective} --fabric soft --profile unpaced -r 3 -b 16 -e 2M -f 256 -n 2 --json -"
        ));
        assert_eq!(output.status, Some(0), "{collective}: {output:?}");
        let json: Value = serde_json::from_str(&output.out).unwrap();
        assert_eq!(
            (&json["fabric"], &json["networks"][0]["name"]),
            (&"soft".into(), &"Spark".into()),
            "{json}"
        );
        let rows = json["rows"].as_array().unwrap();
        assert!(
            rows.len() == 3 && rows.iter().all(|row| row["wrong"] == 0),
            "{collective}: {json}"
        );
        let connected = json["connections"][1][0].as_str().unwrap();
        assert!(
            connected.contains("over 2 rails"),
            "{collective}: {connected}"
        );
        assert!(
            output.err.contains("# fabric: soft, as requested"),
            "{collective}: {output:?}"
        );
    }
}

#[test]
fn a_rail_is_slowed_while_a_job_runs_and_nothing_stays_behind() {
    if !is_built() {
        return;
    }
    let name = format!("test-{}", std::process::id());
    let job = format!(
        "all-gather --fabric-name {name} --scale 0.02 -b 4M -e 4M -n 60 -w 0 --slow-rail rocep1s0f0=0.5"
    );
    let mut job = start(&job);
    let slow = |rail: &str| run(&format!("fabric slow {rail} 0.25 --fabric-name {name}"));
    let deadline = Instant::now() + PATIENCE;
    let slowed = loop {
        let slowed = slow("1:roceP2p1s0f0");
        if slowed.status == Some(0)
            || Instant::now() > deadline
            || job.try_wait().unwrap().is_some()
        {
            break slowed;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(
        slowed.out,
        format!("fabric {name}: roceP2p1s0f0 of node 1: limited to 0.25 of its rate\n"),
        "{slowed:?}"
    );
    let wrong = slow("*:mlx5_9");
    assert!(
        wrong.status == Some(1) && wrong.err.contains("mlx5_9"),
        "{wrong:?}"
    );
    let nowhere = slow("2:rocep1s0f0");
    assert!(
        nowhere.status == Some(1) && nowhere.err.ends_with("has no node 2; its nodes: 0, 1\n"),
        "{nowhere:?}"
    );
    let output = ProgramOutput::from(job.wait_with_output().unwrap());
    assert!(
        output.status == Some(0) && output.out.contains("rocep1s0f0 at 0.5 of its rate"),
        "{output:?}"
    );
    assert!(
        output
            .out
            .contains(&format!("each rank is a node; fabric {name}\n")),
        "{output:?}"
    );
    let gone = slow("*:rocep1s0f0");
    assert!(
        gone.status == Some(1) && gone.err.contains(&name),
        "{gone:?}"
    );
}

#[test]
fn a_job_survives_the_removal_and_return_of_all_functions_of_a_node() {
    if !is_built() {
        return;
    }
    let name = format!("test-unplugged-{}", std::process::id());
    // The job takes about ten seconds, and longer on slower machines.
    let job = start(&format!(
        "sendrecv --fabric-name {name} --profile spark-2cable --scale 0.02 -b 4M -e 4M -n 1000 -w 0 -v"
    ));
    let fabric = |what: &str| run(&format!("fabric {what} --fabric-name {name}"));
    let all = ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"];
    let deadline = Instant::now() + PATIENCE;
    while fabric("unplug 0:rocep1s0f0").status != Some(0) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(
        fabric("plug 0:rocep1s0f0").out,
        format!("fabric {name}: rocep1s0f0 of node 0: plugged in\n")
    );
    std::thread::sleep(Duration::from_secs(1));
    // A firmware reset on the other node.
    let reset = fabric("reset 1:roceP2p1s0f1");
    if reset.out != format!("fabric {name}: roceP2p1s0f1 of node 1: reset\n") {
        panic!(
            "{reset:?}; the job: {:?}",
            ProgramOutput::from(job.wait_with_output().unwrap())
        );
    }
    std::thread::sleep(Duration::from_secs(1));
    for (node, rail) in all.iter().flat_map(|rail| [(0, rail), (1, rail)]) {
        assert_eq!(fabric(&format!("unplug {node}:{rail}")).status, Some(0));
    }
    for (node, rail) in all.iter().flat_map(|rail| [(1, rail), (0, rail)]) {
        assert_eq!(fabric(&format!("plug {node}:{rail}")).status, Some(0));
    }
    let output = ProgramOutput::from(job.wait_with_output().unwrap());
    assert_eq!(output.status, Some(0), "{output:?}");
    for text in [
        "lost: its device was removed",
        "its device is back",
        "recovered after",
    ] {
        assert!(
            output.out.contains(text) || output.err.contains(text),
            "{text}: {output:?}"
        );
    }
}

#[test]
fn the_status_shows_ports_that_are_down_and_path_faults() {
    if !is_built() {
        return;
    }
    let job = Endless::start("--path-fault rocep1s0f0=spanning-tree:0.01");
    let folder = job.folder();
    let name = folder.file_name().unwrap().to_str().unwrap();
    let slowed = job.fabric("slow 1:rocep1s0f0 0.25");
    assert_eq!(
        (slowed.status, slowed.out),
        (
            Some(0),
            format!("fabric {name}: rocep1s0f0 of node 1: limited to 0.25 of its rate\n")
        )
    );
    assert_eq!(job.fabric("down *:roceP2p1s0f0").status, Some(0));
    for (arguments, effect) in [
        ("1:rocep1s0f0 switch-mtu", "switch-mtu"),
        ("1:rocep1s0f0 crossed-arp --off", "crossed-arp ended"),
        (
            "0:rocep1s0f0 spanning-tree:2 --off",
            "spanning-tree:2 ended",
        ),
    ] {
        let node = &arguments[..1];
        let output = job.fabric(&format!("path {arguments}"));
        assert_eq!(
            output.out,
            format!("fabric {name}: rocep1s0f0 of node {node}: path fault {effect}\n"),
            "{output:?}"
        );
    }
    let output = job.fabric("status");
    assert_eq!(output.status, Some(0), "{output:?}");
    let first = format!("fabric {name}: 2 nodes, files in {}\n", folder.display());
    assert!(
        output.out.starts_with(&first) && output.out.matches("port down\n").count() == 2,
        "{output:?}"
    );
    let json: Value = serde_json::from_str(
        &job.fabric(&format!("status --fabric-name {name} --json -"))
            .out,
    )
    .unwrap();
    let rail = &json["fabrics"][0]["nodes"][1]["rails"][0];
    assert!(
        json["ok"] == true && rail["device"] == "rocep1s0f0" && rail["full_mbps"].is_null(),
        "{json}"
    );
    assert!(
        rail["now_mbps"].as_f64().unwrap() > 0.0 && rail["down"] == false,
        "{json}"
    );
    let faults = |node: usize| json["fabrics"][0]["nodes"][node]["rails"][0]["path_faults"].clone();
    assert_eq!(
        [faults(0), faults(1)],
        [json!([]), json!(["switch-mtu", "spanning-tree:0.01"])],
        "{json}"
    );
    job.signal(Signal::SIGKILL, true);
    job.ended();
}

#[test]
fn a_rails_addresses_leave_and_return() {
    if !is_built() {
        return;
    }
    let job = Endless::start("");
    let folder = job.folder();
    let name = folder.file_name().unwrap().to_str().unwrap();
    for (arguments, effect) in [
        ("1:rocep1s0f0 del", "no address"),
        ("0:rocep1s0f0 del", "no address"),
        ("0:rocep1s0f0 add", "has addresses"),
    ] {
        let node = &arguments[..1];
        let output = job.fabric(&format!("address {arguments}"));
        assert_eq!(
            output.out,
            format!("fabric {name}: rocep1s0f0 of node {node}: {effect}\n"),
            "{output:?}"
        );
    }
    let json: Value = serde_json::from_str(&job.fabric("status --json -").out).unwrap();
    let has_none = [0, 1].map(|node: usize| {
        let rail = &json["fabrics"][0]["nodes"][node]["rails"][0];
        rail["without_address"] == true
    });
    assert_eq!(has_none, [false, true], "{json}");
    job.signal(Signal::SIGKILL, true);
    job.ended();
}

#[test]
fn the_files_of_a_killed_job_stay_where_softverbs_dir_says_until_the_next_job() {
    if !is_built() {
        return;
    }
    let job = Endless::start("");
    let folder = job.folder();
    let name = folder.file_name().unwrap().to_str().unwrap();
    job.signal(Signal::SIGKILL, true);
    let (_, dir, _) = job.ended();
    // The fabric's files still exist, but no process uses them.
    assert!(folder.join("fabric").exists());
    let fabric = |arguments: &str| -> ProgramOutput {
        command(&format!("fabric {arguments}"))
            .env("SOFTVERBS_DIR", dir.path())
            .output()
            .unwrap()
            .into()
    };
    let output = fabric("status");
    assert!(
        output.status == Some(1) && output.out.starts_with("no software fabric runs in "),
        "{output:?}"
    );
    let output = fabric("down *:rocep1s0f0");
    assert!(
        output.status == Some(1) && output.err.contains("no software fabric runs in "),
        "{output:?}"
    );
    let output = fabric(&format!("up 0:rocep1s0f0 --fabric-name {name}"));
    assert!(
        output.status == Some(1) && output.err.ends_with("running: none\n"),
        "{output:?}"
    );
    // The next job removes the killed job's files.
    let next = command("all-gather --fabric soft --profile unpaced -b 1K -e 1K -n 1")
        .env("SOFTVERBS_DIR", dir.path())
        .output();
    assert!(next.unwrap().status.success() && !folder.exists());
}

#[test]
fn an_interrupted_job_is_reported_and_leaves_neither_ranks_nor_files() {
    if !is_built() {
        return;
    }
    for (signal, to_all, status) in [
        (Signal::SIGINT, true, 130),
        (Signal::SIGINT, false, 130),
        (Signal::SIGTERM, false, 143),
    ] {
        let job = Endless::start("--fabric-name mine");
        let began = Instant::now();
        job.signal(signal, to_all);
        let (output, dir, ranks) = job.ended();
        assert_eq!(output.status, Some(status), "{signal}: {output:?}");
        let lines: Vec<&str> = output.err.lines().collect();
        assert_eq!(
            lines,
            [format!(
                "nccl-spark: interrupted by {signal}: stopping the ranks"
            )],
            "{output:?}"
        );
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "{signal}: {:?}",
            began.elapsed()
        );
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "{signal}"
        );
        assert!(
            !ranks
                .iter()
                .any(|pid| Path::new(&format!("/proc/{pid}")).exists()),
            "{signal}: {ranks:?}"
        );
    }
}

#[test]
fn a_job_in_another_pid_namespace_leaves_a_running_fabric_alone() {
    if !is_built() {
        return;
    }
    let unshare = |program: &str| {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", program]);
        command
    };
    if !unshare("true")
        .output()
        .is_ok_and(|output| output.status.success())
    {
        eprintln!(
            "skipped: this user cannot make a PID namespace (unshare --pid --fork --mount-proc)"
        );
        return;
    }
    // A name like the default one, with a PID that does not exist in the other namespace.
    let job = Endless::start("--fabric-name nccl-spark-4000000");
    let elsewhere = |arguments: &str| -> ProgramOutput {
        let inner = command(arguments);
        let mut outer = unshare(inner.get_program().to_str().unwrap());
        outer
            .args(inner.get_args())
            .env("SOFTVERBS_DIR", job.dir.path())
            .env_remove("NCCL_SPARK_SYSFS");
        outer
            .env_remove("NCCL_IB_HCA")
            .env_remove("NCCL_IBVERBS_LIB")
            .output()
            .unwrap()
            .into()
    };
    let output = elsewhere("fabric status");
    let ranks: Vec<String> = job
        .ranks
        .iter()
        .map(|pid| format!("(process {pid})"))
        .collect();
    assert!(
        output.status == Some(0) && ranks.iter().all(|rank| output.out.contains(rank)),
        "{output:?}"
    );
    let soft = "all-gather --fabric soft --profile unpaced -b 1K -e 1K -n 1";
    assert_eq!(elsewhere(soft).status, Some(0));
    let taken = elsewhere(&format!("{soft} --fabric-name nccl-spark-4000000"));
    assert!(
        taken.status == Some(1) && taken.err.contains("in use by another run"),
        "{taken:?}"
    );
    // A process in another namespace could not read its peers' memory, so it is refused.
    let mut outsider = unshare(env!("CARGO_BIN_EXE_nccl-spark"));
    outsider
        .arg("rails")
        .env("SOFTVERBS_DIR", job.dir.path())
        .env("SOFTVERBS_FABRIC", "nccl-spark-4000000");
    outsider.env(
        "NCCL_IBVERBS_LIB",
        Path::new(env!("CARGO_BIN_EXE_nccl-spark")).with_file_name("softverbs-ibverbs"),
    );
    let refused = ProgramOutput::from(outsider.output().unwrap());
    assert!(
        refused.status == Some(1) && refused.err.contains("another PID namespace"),
        "{refused:?}"
    );
    assert!(job.folder().join("fabric").exists());
    job.signal(Signal::SIGTERM, false);
    assert_eq!(job.ended().0.status, Some(143));
}

#[test]
fn rails_of_a_software_fabric_need_no_variables_and_a_line_each_if_short() {
    if !is_built() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let rails = |arguments: &str, filter: &str| rails_in(dir.path(), arguments, filter);
    let output = rails("--fabric soft", "");
    let first = "2 rails are merged into one device: rocep1s0f0:1, roceP2p1s0f0:1\n";
    assert!(
        output.status == Some(0) && output.out.starts_with(first),
        "{output:?}"
    );
    let output = rails(
        "--profile spark-2cable --short",
        "=rocep1s0f0,roceP2p1s0f0,rocep1s0f1",
    );
    let lines = [
        "rocep1s0f0:1    enp1s0f0np0    p0  used    200 Gb/s",
        "roceP2p1s0f0:1  enP2p1s0f0np0  p0  used    200 Gb/s",
        "rocep1s0f1:1    enp1s0f1np1    p1  used    200 Gb/s",
        "roceP2p1s0f1:1  enP2p1s0f1np1  p1  unused  200 Gb/s",
    ];
    assert_eq!(
        (output.status, output.out.lines().collect::<Vec<_>>()),
        (Some(0), lines.to_vec()),
        "{output:?}"
    );
    let json: Value = serde_json::from_str(&rails("--fabric soft --json", "").out).unwrap();
    assert!(
        json["ok"] == true && json["rails"].as_array().unwrap().len() == 2,
        "{json}"
    );
    let output = rails("--fabric soft", "nobody");
    assert!(
        output.status == Some(1) && output.out.starts_with("No rail is usable:\n"),
        "{output:?}"
    );
    assert_eq!(rails("--fabric soft --json /no/such/x", "").status, Some(2));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Runs `nccl-spark rails` with fabrics in the folder `dir`, and `filter` as `NCCL_IB_HCA`.
fn rails_in(dir: &Path, arguments: &str, filter: &str) -> ProgramOutput {
    command(&format!("rails {arguments}"))
        .env("SOFTVERBS_DIR", dir)
        .env("NCCL_IB_HCA", filter)
        .env_remove("NCCL_SPARK_SYSFS")
        .env_remove("NCCL_IBVERBS_LIB")
        .output()
        .unwrap()
        .into()
}

#[test]
fn rails_of_a_profile_in_a_file_leave_the_file_alone() {
    if !is_built() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile");
    let rail = |number| {
        format!(
            "cable p{number} payload=0\nrail r{number} netdev=e{number} port=p{number} link=L cable=p{number} \
             function={number} line=1 qp=1 latency=1 speed=40000\n"
        )
    };
    let link = "link L pci=0000:01:00 gts=32 width=4 payload=0\n";
    std::fs::write(
        &file,
        [
            link,
            &rail(0),
            &rail(1),
            "wire a ends=0.p0,1.p0 subnets=each\n",
        ]
        .concat(),
    )
    .unwrap();
    let arguments = format!("--profile {} --short", file.display());
    let output = rails_in(dir.path(), &arguments, "");
    assert_eq!(
        output.out, "r0:1  e0  p0  used  40 Gb/s\nr1:1  e1  p1  down  -\n",
        "{output:?}"
    );
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        1,
        "the profile alone is left"
    );
}

#[test]
fn rails_begins_with_the_usable_ports_and_sets_the_exit_status() {
    if !is_built() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let library = Path::new(env!("CARGO_BIN_EXE_nccl-spark")).with_file_name("softverbs-ibverbs");
    let sysfs = dir.path().join("default/sys");
    let rails = |arguments: &str, filter: &str, sysfs: &Path| -> ProgramOutput {
        let mut command = command(&format!("rails {arguments}"));
        command
            .env("SOFTVERBS_DIR", dir.path())
            .env("SOFTVERBS_PROFILE", "spark-2cable");
        command
            .env("NCCL_IBVERBS_LIB", &library)
            .env("NCCL_SPARK_SYSFS", sysfs)
            .env("NCCL_IB_HCA", filter);
        command.output().unwrap().into()
    };
    let output = rails("", "", &sysfs);
    let first = "4 rails are merged into one device: rocep1s0f0:1, roceP2p1s0f0:1, rocep1s0f1:1,\n  roceP2p1s0f1:1\n\
                 expected payload: 224.1 Gb/s (28.0 GB/s) each way, limited by the PCIe links\n";
    assert!(
        output.status == Some(0) && output.out.starts_with(first),
        "{output:?}"
    );
    assert!(
        output.out.lines().all(|line| line.len() <= 80),
        "{output:?}"
    );
    let output = rails("--json -", "", &sysfs);
    let json: Value = serde_json::from_str(&output.out).unwrap();
    assert!(
        json["ok"] == true && json["rails"].as_array().unwrap().len() == 4,
        "{json}"
    );
    assert_eq!(
        (&json["expected_mbps"], &json["limited_by"]),
        (&224_054.into(), &"pcie".into()),
        "{json}"
    );
    let output = rails("", "nobody", &sysfs);
    assert!(
        output.status == Some(1) && output.out.starts_with("No rail is usable:\n"),
        "{output:?}"
    );
    let json: Value = serde_json::from_str(&rails("--json -", "nobody", &sysfs).out).unwrap();
    assert!(
        json["ok"] == false && json["unused"][0]["reason"] == "NCCL_IB_HCA excludes it",
        "{json}"
    );
    let output = rails("", "", Path::new("/no/such/sys"));
    assert!(
        output.status == Some(1) && output.out.is_empty() && output.err.lines().count() == 1,
        "{output:?}"
    );
    assert!(
        output.err.starts_with(
            "nccl-spark: NCCL_SPARK_SYSFS=\"/no/such/sys\" is not usable: No such file"
        ),
        "{output:?}"
    );
    assert_eq!(rails("--jsn", "", &sysfs).status, Some(2));
    let json: Value =
        serde_json::from_str(&rails("--json -", "", Path::new("/no/such/sys")).out).unwrap();
    assert!(
        json["ok"] == false && json["error"].as_str().unwrap().contains("NCCL_SPARK_SYSFS"),
        "{json}"
    );
}
