//! `nccl-spark doctor` with another host: two processes on two nodes of a software fabric, with
//! rates so low that any machine reaches them. A script in place of ssh starts the program on
//! another node. Also the times that `--silence` measures on such a fabric.

mod common;

use common::{ProgramOutput, built, is_built, nccl_spark};
use serde_json::Value;
use softverbs::control::{self, Action, Prepared};
use softverbs::path::PathFault;
use softverbs::profile::Profile;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// With this scale a link carries 22.4 Mb/s.
const SCALE: f64 = 0.0002;
const FABRIC: &str = "bed";
/// Longer than any delay of the machine: only a hung program exceeds it.
const PATIENCE: Duration = Duration::from_secs(240);

struct TestFabric {
    dir: tempfile::TempDir,
    prepared: Prepared,
}

/// A partner that was started as a user starts it by hand, without ssh.
struct Partner {
    process: Child,
    address: String,
    token: String,
    _out: BufReader<ChildStdout>,
}

impl TestFabric {
    fn new(profile: &str, nodes: usize) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        let profile = Profile::load(profile, SCALE).unwrap();
        let prepared = control::prepare(dir.path(), FABRIC, &profile, nodes).unwrap();
        Self { dir, prepared }
    }

    /// Returns the command that runs the program on a node, without the variables of the test's own
    /// environment.
    fn program(&self, node: usize, arguments: &[&str]) -> Command {
        let mut command = Command::new(nccl_spark().get_program());
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .args(arguments);
        command.envs(
            self.prepared
                .environment
                .iter()
                .map(|(name, value)| (name, value)),
        );
        let shared = self.prepared.folder().join("sys").display().to_string();
        command
            .env("NCCL_SPARK_SYSFS", control::sysfs_of_node(&shared, node))
            .env("SOFTVERBS_NODE", node.to_string());
        let plugin = built().expect("is_built() was checked first");
        command
            .env(
                "NCCL_IBVERBS_LIB",
                plugin.with_file_name("softverbs-ibverbs"),
            )
            .env("NCCL_NET_PLUGIN", &plugin);
        if let Some(library) = softverbs_library(&plugin) {
            command.env("NCCL_IBVERBS_LIB", library);
        }
        command
            .env("NCCL_NET", "Spark")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_SPARK_SETTINGS_FILE", "/dev/null");
        command
            .env("NCCL_SPARK_PROBE_TIMEOUT_MS", "1000")
            .env("NCCL_SPARK_CONNECT_TIMEOUT_S", "20");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn partner(&self) -> Partner {
        let mut process = self
            .program(1, &["doctor", "--partner", "--interface", "lo"])
            .spawn()
            .unwrap();
        let mut out = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["nccl-spark-partner", "3", address, token] = words[..] else {
            panic!("{line:?}")
        };
        Partner {
            process,
            address: address.to_owned(),
            token: token.to_owned(),
            _out: out,
        }
    }

    fn examine(&self, partner: &Partner) -> ProgramOutput {
        let mut command = self.program(0, &["doctor", "--json", "-", "--peer", &partner.address]);
        command
            .env("SPARK_DOCTOR_TOKEN", &partner.token)
            .output()
            .unwrap()
            .into()
    }

    fn rail(&self, at: usize) -> String {
        control::profile(self.dir.path(), FABRIC).unwrap().rails[at]
            .name
            .clone()
    }

    fn plant(&self, node: usize, rail: &str, action: Action) {
        control::control(self.dir.path(), FABRIC, Some(node), rail, action).unwrap();
    }

    /// Makes a script in place of ssh, which first runs `before`. A host's name ends with its
    /// node's number.
    fn ssh(&self, before: &str) -> String {
        let script = self.dir.path().join("ssh");
        let root = self.prepared.folder().join("sys/nodes");
        let text = format!(
            "#!/bin/sh\nshift 4\nhost=$1\nshift\n{before}\nexport SOFTVERBS_NODE=${{host#node}} NCCL_SPARK_SYSFS={}/${{host#node}}\nexec \"$@\"\n",
            root.display()
        );
        std::fs::write(&script, text).unwrap();
        format!("sh {}", script.display())
    }
}

fn softverbs_library(plugin: &Path) -> Option<std::path::PathBuf> {
    let folder = plugin.parent()?;
    [folder, folder.parent()?]
        .into_iter()
        .map(|folder| folder.join("softverbs-ibverbs"))
        .find(|path| path.is_file())
}

impl Drop for Partner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Partner {
    /// Waits for the partner to end, at most [`PATIENCE`], and returns its exit status.
    fn status(&mut self) -> Option<i32> {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "the partner does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn json(output: &ProgramOutput) -> Value {
    serde_json::from_str(&output.out).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Returns the ids of the findings that concern both hosts.
fn ids(json: &Value) -> Vec<&str> {
    let known = [
        "peer-",
        "switch-mtu",
        "slow-rail",
        "slow-path",
        "slow-merged",
        "fair-rail",
        "pair-unreachable",
        "wrong-bytes",
        "no-common-subnet",
        "asymmetric",
        "arp-",
    ];
    let all = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["id"].as_str().unwrap());
    all.filter(|id| known.iter().any(|known| id.starts_with(known)))
        .collect()
}

fn text_of<'a>(json: &'a Value, id: &str) -> &'a str {
    let finding = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|finding| finding["id"] == id);
    finding.unwrap_or_else(|| panic!("no {id}: {json}"))["text"]
        .as_str()
        .unwrap()
}

fn paths(json: &Value) -> &Vec<Value> {
    json["peer"]["paths"]
        .as_array()
        .unwrap_or_else(|| panic!("{json}"))
}

/// The profile has no rates, so the doctor expects none, and a busy machine does not count as slow.
#[test]
fn two_healthy_hosts_are_measured_rail_by_rail_and_nothing_is_found() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("unpaced", 2);
    let mut partner = fabric.partner();
    let output = fabric.examine(&partner);
    let json = json(&output);
    assert_eq!(ids(&json), Vec::<&str>::new(), "{output:?}");
    assert!(
        paths(&json).len() == 3
            && paths(&json)
                .iter()
                .all(|path| path["expected_mbps"].is_null()),
        "{json}"
    );
    let mtus = |path: &Value| {
        [&path["measured"]["path_mtu_bytes"], &path["port_mtu_bytes"]].map(Value::as_u64)
    };
    assert!(
        paths(&json)
            .iter()
            .all(|path| mtus(path) == [Some(4096); 2]),
        "{json}"
    );
    assert_eq!(partner.status(), Some(0));
}

#[test]
fn rails_are_compared_with_the_capacity_of_links_and_cables() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-2cable", 2);
    let output = fabric.examine(&fabric.partner());
    let json = json(&output);
    let paths = paths(&json);
    assert_eq!(
        (paths.len(), paths[4]["here"].as_array().unwrap().len()),
        (5, 4),
        "{json}"
    );
    assert!(
        paths[..4].iter().all(|path| path["here"] == path["there"]),
        "{json}"
    );
    // Computed by hand: one link of 112 Gb/s for each rail, and two links for all rails, at a
    // five-thousandth of their rate.
    let expected: Vec<f64> = paths
        .iter()
        .map(|path| path["expected_mbps"].as_f64().unwrap())
        .collect();
    assert_eq!(
        expected
            .iter()
            .map(|mbps| (mbps * 10.0).round() / 10.0)
            .collect::<Vec<_>>(),
        [22.4, 22.4, 22.4, 22.4, 44.8],
        "{json}"
    );
    let mut grades = Vec::new();
    for path in paths {
        let figures = &path["measured"];
        assert!(
            figures["wrong_bytes"] == 0 && figures["latency_us"].as_f64().unwrap() > 0.0,
            "{json}"
        );
        for way in ["to_peer", "from_peer"] {
            let mbps = figures[way]["mbps"].as_f64().unwrap();
            let expected = path["expected_mbps"].as_f64().unwrap();
            // Bytes that were queued before the measurement count too, but they are few.
            assert!(mbps > 0.0 && mbps < expected * 1.2, "{json}");
            grades.push(figures[way]["grade"].as_str().unwrap());
        }
    }
    // A machine that is too busy for these rates has slow rails, and the doctor reports them.
    assert!(
        ids(&json).is_empty() || grades.iter().any(|grade| *grade != "good"),
        "{output:?}"
    );
    assert!(
        output.err.contains("# 1/5 ") && output.err.contains("# 5/5 all rails together: "),
        "{output:?}"
    );
}

#[test]
fn a_slow_rail_with_correct_attributes_is_found_over_ssh() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-1cable", 2);
    fabric.plant(1, "roceP2p1s0f0", Action::Slow(0.1));
    let ssh = fabric.ssh("echo Welcome to DGX OS; echo '# a remark' >&2");
    let program = nccl_spark().get_program().to_owned();
    let arguments = [
        "doctor",
        "--json",
        "-",
        "--peer",
        "node1",
        "--interface",
        "lo",
        "--ssh",
        &ssh,
        "--partner-program",
    ];
    let output: ProgramOutput = fabric
        .program(0, &arguments)
        .arg(program)
        .output()
        .unwrap()
        .into();
    let json = json(&output);
    let grade = |at: usize, way: &str| paths(&json)[at]["measured"][way]["grade"].as_str().unwrap();
    assert_eq!(
        (grade(1, "to_peer"), grade(1, "from_peer")),
        ("bad", "bad"),
        "{json}"
    );
    // If the machine is too busy for both rails, neither is slower than the other, and the doctor
    // finds slow paths in place of a slow rail.
    let id = if [grade(0, "to_peer"), grade(0, "from_peer")].contains(&"bad") {
        "slow-path"
    } else {
        "slow-rail"
    };
    let finding = json["findings"].as_array().unwrap().iter().find(|finding| {
        finding["id"] == id
            && finding["text"]
                .as_str()
                .unwrap()
                .starts_with("roceP2p1s0f0:1 to roceP2p1s0f0:1 of ")
    });
    let text = finding.unwrap_or_else(|| panic!("{json}"))["text"]
        .as_str()
        .unwrap();
    assert!(text.contains(" back of 0.0224 Gb/s"), "{text}");
    assert!(matches!(output.status, Some(1 | 3)), "{output:?}");
    assert!(
        output.err.contains("\nBetween here and ") && output.err.contains("BAD"),
        "{output:?}"
    );
}

#[test]
fn a_rail_that_does_not_carry_is_named_and_the_others_are_measured() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("unpaced", 2);
    let silent = fabric.rail(0);
    fabric.plant(0, &silent, Action::Path(PathFault::Silent, true));
    let output = fabric.examine(&fabric.partner());
    let json = json(&output);
    let text = text_of(&json, "pair-unreachable");
    assert_eq!(ids(&json), ["pair-unreachable"], "{output:?}");
    assert!(
        text.contains(&format!("{silent}:1 to {silent}:1 (other rails work)")),
        "{text}"
    );
    let [silent, good, merged] = &paths(&json)[..] else {
        panic!("{json}")
    };
    assert!(
        silent["failed"].is_string()
            && good["measured"].is_object()
            && merged["measured"].is_object(),
        "{json}"
    );
}

#[test]
fn a_switch_that_drops_large_packets_is_found_despite_large_path_mtus() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("unpaced", 2);
    let narrow = fabric.rail(0);
    fabric.plant(0, &narrow, Action::Path(PathFault::SwitchMtu, true));
    let output = fabric.examine(&fabric.partner());
    let json = json(&output);
    assert_eq!(ids(&json), ["switch-mtu"], "{output:?}");
    let text = text_of(&json, "switch-mtu");
    assert!(
        text.contains(&format!(
            "above 1024 bytes get lost between {narrow}:1 here and {narrow}:1 of "
        )),
        "{text}"
    );
    assert!(text.contains("whose ports have path MTU 4096"), "{text}");
    let mtus: Vec<_> = paths(&json)[..2]
        .iter()
        .map(|path| path["measured"]["path_mtu_bytes"].as_u64())
        .collect();
    assert_eq!(mtus, [Some(1024), Some(4096)], "{json}");
    assert!(matches!(output.status, Some(1 | 3)), "{output:?}");
}

/// The first rail has a profile of adaptive retransmission, the second the specification's time. On
/// the third, no packet arrives.
const SLOW_TO_REPORT: &str = "link A pci=0000:01:00 gts=32 width=4 payload=0
link B pci=0002:01:00 gts=32 width=4 payload=0
cable p0 payload=0
cable p1 payload=0
rail rocep1s0f0 netdev=enp1s0f0np0 port=p0 link=A cable=p0 function=0 line=0 qp=0 latency=0 silence=2500
rail roceP2p1s0f0 netdev=enP2p1s0f0np0 port=p0 link=B cable=p0 function=0 line=0 qp=0 latency=0
rail rocep1s0f1 netdev=enp1s0f1np1 port=p1 link=A cable=p1 function=1 line=0 qp=0 latency=0 path=silent
";

#[test]
fn the_time_to_report_a_silent_peer_is_measured_for_each_rail() {
    if !is_built() {
        return;
    }
    let mut profile = tempfile::NamedTempFile::new().unwrap();
    profile.write_all(SLOW_TO_REPORT.as_bytes()).unwrap();
    let fabric = TestFabric::new(profile.path().to_str().unwrap(), 1);
    let command = |arguments: &[&str]| -> ProgramOutput {
        let all = [&["doctor", "--silence"], arguments].concat();
        fabric.program(0, &all).output().unwrap().into()
    };
    let json = json(&command(&["--json", "-"]));
    let silence = &json["silence"];
    assert_eq!(
        (&silence["timeout"], &silence["retry_count"]),
        (&14.into(), &6.into())
    );
    let rail = |name: &str| {
        let rails = silence["rails"].as_array().unwrap().iter();
        let mut found = rails.filter(|rail| rail["rail"] == format!("{name}:1"));
        found.next().unwrap_or_else(|| panic!("{name}: {json}"))
    };
    // A busy machine may see a report later, but no NIC reports too soon.
    let slow_s = rail("rocep1s0f0")["reported_s"].as_f64().unwrap();
    let usual_s = rail("roceP2p1s0f0")["reported_s"].as_f64().unwrap();
    let specified_s = silence["specified_s"].as_f64().unwrap();
    assert!(slow_s >= 2.5 && usual_s >= specified_s, "{json}");
    let dead = rail("rocep1s0f1")["failed"].as_str().unwrap();
    assert!(dead.contains("its own address failed: no ack"), "{dead}");
    let found = text_of(&json, "late-report");
    assert!(found.contains("rocep1s0f0:1"), "{found}");
    let text = command(&[]).out;
    let lines = [
        "Time to report a silent peer",
        "  rocep1s0f0:1: after ",
        "  rocep1s0f1:1: not measured: ",
    ];
    for line in lines {
        assert!(text.contains(line), "{text}");
    }
}

#[test]
fn silence_is_measured_beside_the_pairs_of_two_hosts() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("unpaced", 2);
    let partner = fabric.partner();
    let arguments = ["doctor", "--silence", "--json", "-", "--peer"];
    let mut command = fabric.program(0, &[&arguments[..], &[&partner.address]].concat());
    let token = ("SPARK_DOCTOR_TOKEN", &partner.token);
    let output: ProgramOutput = command.env(token.0, token.1).output().unwrap().into();
    let json = json(&output);
    assert_eq!(paths(&json).len(), 3, "{json}");
    let rails = json["silence"]["rails"].as_array().unwrap();
    let is_measured = |rail: &Value| rail["reported_s"].is_f64();
    assert!(rails.len() == 2 && rails.iter().all(is_measured), "{json}");
}

#[test]
fn a_client_with_a_wrong_token_learns_nothing_and_the_partner_keeps_waiting() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-1cable", 2);
    let mut partner = fabric.partner();
    let wrong = fabric.dir.path().join("token");
    std::fs::write(&wrong, "0123456789abcdef0123456789abcdef\n").unwrap();
    let arguments = [
        "doctor",
        "--peer",
        &partner.address,
        "--token-file",
        wrong.to_str().unwrap(),
    ];
    let output: ProgramOutput = fabric.program(0, &arguments).output().unwrap().into();
    assert_eq!(
        (output.status, output.out.as_str()),
        (Some(1), ""),
        "{output:?}"
    );
    let error = "is not trusted: the token is wrong, or was used before: each start of a partner has a new one\n";
    assert!(
        output.err.starts_with("nccl-spark: ") && output.err.ends_with(error),
        "{output:?}"
    );
    assert_eq!(output.err.lines().count(), 1, "{output:?}");
    assert!(paths(&json(&fabric.examine(&partner))).len() == 3);
    assert_eq!(partner.status(), Some(0));
}

#[test]
fn a_silent_or_invalid_partner_is_one_error() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-1cable", 2);
    let long = "x".repeat(1 << 20);
    let unproved = format!(
        "{{\"Welcome\":{{\"nonce\":\"{}\",\"proof\":\"\"}}}}\n",
        "0".repeat(32)
    );
    for (speech, error) in [
        ("", "sent no complete message in "),
        (
            "HTTP/1.1 400 Bad Request\n",
            "sent no message of nccl-spark: \"HTTP/1.1 400 Bad Request\"",
        ),
        (
            "{\"Refused\":{\"reason\":\"go\\u001b[2J\"}}\n",
            "refused this doctor: go?[2J",
        ),
        (&long, "sent a line of more than 262144 bytes"),
        (&unproved, "is not trusted: the token is wrong"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let speech = speech.to_owned();
        let talking = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // The other end may give up and close first. The write then fails.
            let _ = stream.write_all(speech.as_bytes());
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let mut command = fabric.program(0, &["doctor", "--peer", &address, "--limit", "4"]);
        let output: ProgramOutput = command
            .env("SPARK_DOCTOR_TOKEN", "0".repeat(32))
            .output()
            .unwrap()
            .into();
        assert_eq!(
            (
                output.status,
                output.out.as_str(),
                output.err.lines().count()
            ),
            (Some(1), "", 1),
            "{output:?}"
        );
        assert!(
            output.err.contains(&address) && output.err.contains(error),
            "{error}: {output:?}"
        );
        talking.join().unwrap();
    }
}

#[test]
fn a_partner_that_dies_is_a_finding_and_earlier_measurements_are_kept() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-2cable", 2);
    let mut partner = fabric.partner();
    let mut command = fabric.program(0, &["doctor", "--json", "-", "--peer", &partner.address]);
    let mut doctor = command
        .env("SPARK_DOCTOR_TOKEN", &partner.token)
        .spawn()
        .unwrap();
    let mut progress = BufReader::new(doctor.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("# 1/5 ") {
        line.clear();
        assert!(
            progress.read_line(&mut line).unwrap() > 0,
            "it ended before it had measured anything"
        );
    }
    partner.process.kill().unwrap();
    partner.process.wait().unwrap();
    let mut out = String::new();
    let mut err = String::new();
    doctor
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut out)
        .unwrap();
    progress.read_to_string(&mut err).unwrap();
    let output = ProgramOutput {
        status: doctor.wait().unwrap().code(),
        out,
        err,
    };
    let json = json(&output);
    assert!(
        text_of(&json, "peer-lost").contains("ended before all rail pairs were measured"),
        "{output:?}"
    );
    assert!(
        output.status == Some(3) && paths(&json)[0]["measured"].is_object(),
        "{output:?}"
    );
}

#[test]
fn an_unused_partner_ends_at_its_limit() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-1cable", 2);
    let output: ProgramOutput = fabric
        .program(
            1,
            &["doctor", "--partner", "--interface", "lo", "--limit", "3"],
        )
        .output()
        .unwrap()
        .into();
    assert_eq!(output.status, Some(1), "{output:?}");
    let last = output.err.lines().last().unwrap();
    assert!(
        last.starts_with("nccl-spark: no doctor connected to 127.0.0.1:"),
        "{output:?}"
    );
}

#[test]
fn a_host_that_ssh_cannot_reach_is_one_error() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-1cable", 2);
    let refused = fabric.ssh("echo 'Permission denied (publickey).' >&2; exit 255");
    let output: ProgramOutput = fabric
        .program(0, &["doctor", "--peer", "node1", "--ssh", &refused])
        .output()
        .unwrap()
        .into();
    assert_eq!(
        (output.status, output.out.as_str()),
        (Some(1), ""),
        "{output:?}"
    );
    assert_eq!(
        output.err,
        "nccl-spark: ssh node1: exited with status 255: Permission denied (publickey).\n"
    );
    let silent = fabric.ssh("exec sleep 600");
    let output: ProgramOutput = fabric
        .program(
            0,
            &[
                "doctor", "--peer", "node1", "--ssh", &silent, "--limit", "3",
            ],
        )
        .output()
        .unwrap()
        .into();
    assert_eq!(
        (output.status, output.err.as_str()),
        (Some(1), "nccl-spark: node1 did not answer by ssh in time\n")
    );
}

/// Without `--limit` the doctor would wait for half a minute for an answer by ssh.
#[test]
fn silent_hosts_are_waited_for_until_the_limit() {
    let mut command = Command::new(nccl_spark().get_program());
    command.args([
        "doctor",
        "--hosts",
        "spark-1,spark-2",
        "--limit",
        "1",
        "--ssh",
        "sh -c cat",
    ]);
    let begun = Instant::now();
    let output: ProgramOutput = command.stdin(Stdio::null()).output().unwrap().into();
    assert_eq!(
        (output.status, output.err.as_str()),
        (
            Some(1),
            "nccl-spark: spark-1 did not answer by ssh in time\n"
        )
    );
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn mistakes_on_the_command_line_are_reported_before_anything_starts() {
    for (arguments, error) in [
        ("--peer -oProxyCommand=id", "unexpected argument"),
        ("--peer=-oProxyCommand=id", "a host is a name or address"),
        (
            "--peer 127.0.0.1:7",
            "needs the token that the partner printed",
        ),
        ("--peer 127.0.0.1:7 --token x", "32 hexadecimal digits"),
        (
            "--peer 127.0.0.1:7 --token-file /no/such/file",
            "--token-file /no/such/file",
        ),
        (
            "--peer spark-2 --token 0123456789abcdef0123456789abcdef",
            "ssh brings one itself",
        ),
        ("--peer spark-2 --partner", "cannot be used with"),
        ("--peer spark-2 --env", "cannot be used with"),
        ("--peer spark-2 --limit 301", "must be 1 to 300"),
        (
            "--peer spark-2 --partner-program $(id)",
            "--partner-program",
        ),
        ("--interface eth0", "--interface is for"),
        ("--partner", "--partner needs --interface"),
        (
            "--partner --interface nosuch0",
            "--interface nosuch0: no such interface",
        ),
        ("--hosts spark-1", "must be 2 to 16"),
        ("--hosts spark-1,spark-1", "is named twice"),
        (
            "--hosts spark-1,-oProxyCommand=id",
            "a host is a name or address",
        ),
    ] {
        let mut command = Command::new(nccl_spark().get_program());
        let output: ProgramOutput = command
            .env_clear()
            .arg("doctor")
            .args(arguments.split_whitespace())
            .output()
            .unwrap()
            .into();
        assert_eq!(
            (output.status, output.out.as_str()),
            (Some(2), ""),
            "{arguments}: {output:?}"
        );
        assert!(output.err.contains(error), "{arguments}: {output:?}");
    }
}

/// The nodes of the ring are cabled 0-1-2-3-0.
#[test]
fn the_hosts_of_a_ring_are_put_in_the_order_of_their_cables() {
    if !is_built() {
        return;
    }
    let fabric = TestFabric::new("spark-ring", 4);
    let program = nccl_spark().get_program().to_owned();
    let hosts = |names: &str, before: &str| -> ProgramOutput {
        let ssh = fabric.ssh(before);
        let arguments = [
            "doctor",
            "--json",
            "-",
            "--hosts",
            names,
            "--ssh",
            &ssh,
            "--partner-program",
        ];
        fabric
            .program(0, &arguments)
            .arg(&program)
            .output()
            .unwrap()
            .into()
    };
    let output = hosts("node0,node2,node1,node3", "echo Welcome to DGX OS");
    let ring = json(&output);
    assert_eq!(output.status, Some(0), "{output:?}");
    assert_eq!(
        ring["order"],
        serde_json::json!(["node0", "node1", "node2", "node3"]),
        "{output:?}"
    );
    assert_eq!(
        ring["apart"],
        serde_json::json!([["node0", "node2"], ["node1", "node3"]]),
        "{output:?}"
    );
    assert_eq!(
        ring["hosts"][0]["pairs"],
        serde_json::json!([0, 0, 2, 2]),
        "{output:?}"
    );
    assert!(
        output
            .err
            .contains("node0 -- node1 -- node2 -- node3 -- node0"),
        "{output:?}"
    );
    let output = hosts("node0,node1,node2", "");
    assert!(
        output.status == Some(1) && json(&output)["order"].is_null(),
        "{output:?}"
    );
    let output = hosts("node0,node1", "echo 'Connection refused' >&2; exit 255");
    assert_eq!(output.status, Some(1), "{output:?}");
    assert!(
        output
            .err
            .contains("ssh node0: exited with status 255: Connection refused"),
        "{output:?}"
    );
}
