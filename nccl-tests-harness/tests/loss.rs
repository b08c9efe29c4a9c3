//! Jobs over the software fabric in which one rail loses one packet in a thousand. The tests check
//! where the loss is shown: the job's output, `top`, the report and the file for Prometheus.

mod common;

use common::{ProgramOutput, built, is_built, nccl_spark};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The rail that loses packets, on every node.
const RAIL: &str = "rocep1s0f0";
/// Longer than any delay of the machine: only a hung program exceeds it.
const PATIENCE: Duration = Duration::from_secs(120);

struct LossyFabric {
    folder: tempfile::TempDir,
}

struct Job(Child);

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl LossyFabric {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn job(&self, rounds: &str) -> Command {
        let mut command = nccl_spark();
        command.args([
            "all-gather",
            "--fabric",
            "soft",
            "--fabric-name",
            "bed",
            "--profile",
            "unpaced",
        ]);
        command.args([
            "-b",
            "4M",
            "-e",
            "4M",
            "-w",
            "0",
            "-n",
            rounds,
            "--path-fault",
            &format!("{RAIL}=loss:1000"),
        ]);
        command
            .arg("--plugin")
            .arg(built().expect("is_built() was checked first"));
        command
            .env("SOFTVERBS_DIR", self.folder.path())
            .stdin(Stdio::null());
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn on_node_0(&self, arguments: &[&str]) -> ProgramOutput {
        let mut command = nccl_spark();
        command
            .args(arguments)
            .env("NCCL_SPARK_SYSFS", self.path("bed/sys/nodes/0"));
        command
            .env("SOFTVERBS_DIR", self.folder.path())
            .env("SOFTVERBS_FABRIC", "bed")
            .env("SOFTVERBS_NODE", "0");
        let plugin = built().expect("is_built() was checked first");
        let program = nccl_spark().get_program().to_owned();
        let library = PathBuf::from(program).with_file_name("softverbs-ibverbs");
        command
            .env("NCCL_IBVERBS_LIB", library)
            .env("NCCL_NET_PLUGIN", plugin);
        let output: ProgramOutput = command.output().unwrap().into();
        assert_eq!(output.status, Some(0), "{output:?}");
        output
    }

    /// Returns the value of `packet_seq_err` of [`RAIL`] in the file for Prometheus.
    fn exported_sequence_errors(&self) -> u64 {
        let file = self.path("spark.prom").display().to_string();
        self.on_node_0(&[
            "top",
            "--count",
            "1",
            "--interval",
            "0.1",
            "--prometheus",
            &file,
        ]);
        let text = std::fs::read_to_string(&file).unwrap();
        let series = format!(
            "nccl_spark_port_counter_total{{rail=\"{RAIL}:1\",counter=\"packet_seq_err\"}} "
        );
        text.lines()
            .find_map(|line| line.strip_prefix(&series)?.parse().ok())
            .unwrap_or_else(|| panic!("{text}"))
    }

    /// Returns the value of `packet_seq_err` of [`RAIL`] in the report.
    fn reported_sequence_errors(&self) -> u64 {
        let output = self.on_node_0(&["report", "--only", "machine", "--output", "-"]);
        let report: Value = serde_json::from_str(&output.out).unwrap();
        let functions = report["parts"][0]["facts"]["functions"].as_array().unwrap();
        let function = functions.iter().find(|function| function["device"] == RAIL);
        counter(function.unwrap(), "packet_seq_err")
    }

    /// Waits until `top` shows in an interval that packets were lost.
    fn top_shows_losses(&self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let top = ["top", "--count", "1", "--interval", "0.5"];
            let text = self.on_node_0(&top).out;
            let port = format!("# port {RAIL}:1: ");
            if text.contains(&port) && text.contains(" packet_seq_err/s") {
                return;
            }
            assert!(Instant::now() < deadline, "{text}");
        }
    }

    /// Waits until node 0 has lost at least `least_lost` packets and is still losing some. Returns
    /// the ports of node 0, as `top` shows them.
    fn ports(&self, least_lost: u64) -> Vec<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.on_node_0(&["top", "--json", "--count", "1", "--interval", "0.5"]);
            let snapshot: Value = serde_json::from_str(&output.out).unwrap();
            let ports = snapshot["ports"].as_array().unwrap().clone();
            let is_growing = ports
                .iter()
                .any(|port| port["per_s"]["packet_seq_err"].as_f64() > Some(0.0));
            if is_growing && ports.iter().map(lost).sum::<u64>() >= least_lost {
                return ports;
            }
            assert!(
                Instant::now() < deadline,
                "fewer than {least_lost} packets lost, or no packet lost in the last interval: {snapshot:#}"
            );
        }
    }
}

/// Returns the number of packets that a port has lost and sent again.
fn lost(port: &Value) -> u64 {
    counter(port, "packet_seq_err") + counter(port, "local_ack_timeout_err")
}

/// Returns the port of a device of node 0.
fn port<'a>(ports: &'a [Value], device: &str) -> &'a Value {
    let rail = format!("{device}:1");
    ports.iter().find(|port| port["rail"] == rail).unwrap()
}

fn counter(port: &Value, name: &str) -> u64 {
    port["counters"][name].as_u64().unwrap()
}

#[test]
fn a_lossy_rail_is_warned_about_once_and_every_view_shows_its_counters() {
    if !is_built() {
        return;
    }
    let fabric = LossyFabric::new();
    let mut job = Job(fabric
        .job("4000000000")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap());
    let mut lines = BufReader::new(job.0.stderr.take().unwrap())
        .lines()
        .map(Result::unwrap);
    // Each rank warns once, so the first two warnings are of both ranks.
    let mut warnings = lines
        .by_ref()
        .filter(|line| line.contains("more than one packet in 100000 is lost"));
    let both = [(); 2].map(|()| warnings.next().expect("a warning of each rank"));
    for warning in &both {
        assert!(
            warning.contains(&format!("{RAIL} lost ")) && warning.contains("switches.md"),
            "{warning}"
        );
        assert!(!warning.contains("roceP2p1s0f0 lost"), "{warning}");
    }
    let ranks = both.each_ref().map(|warning| warning.split(':').next());
    assert_ne!(ranks[0], ranks[1], "{both:?}");

    let ports = fabric.ports(10);
    assert_only_one_rail_loses(&ports);
    fabric.top_shows_losses();
    // The job runs, so each view shows at least the count of the view before.
    let shown = counter(port(&ports, RAIL), "packet_seq_err");
    let exported = fabric.exported_sequence_errors();
    assert!(exported >= shown, "{exported} and before {shown}");
    let reported = fabric.reported_sequence_errors();
    assert!(reported >= exported, "{reported} and before {exported}");
}

/// Asserts that every thousandth packet is lost on [`RAIL`], and none on other rails.
fn assert_only_one_rail_loses(ports: &[Value]) {
    let lossy = port(ports, RAIL);
    // The counters of packets and of losses are not read at the same instant, so a small difference
    // is allowed.
    let lost = lost(lossy);
    let expected = counter(lossy, "port_xmit_packets") / 1000;
    assert!(
        lost.abs_diff(expected) <= 1 + expected / 10,
        "{lost} of {lossy:#}"
    );
    for port in ports.iter().filter(|port| port["rail"] != lossy["rail"]) {
        for name in [
            "packet_seq_err",
            "out_of_sequence",
            "local_ack_timeout_err",
            "rnr_nak_retry_err",
        ] {
            assert_eq!(counter(port, name), 0, "{name}: {port:#}");
        }
    }
}

#[test]
fn the_last_lines_of_a_job_list_loss_counters() {
    if !is_built() {
        return;
    }
    let fabric = LossyFabric::new();
    let output: ProgramOutput = fabric
        .job("100")
        .env("NCCL_DEBUG", "INFO")
        .output()
        .unwrap()
        .into();
    assert_eq!(output.status, Some(0), "{output:?}");
    let ends: Vec<&str> = output
        .err
        .lines()
        .filter(|line| line.contains("counters of the rails' ports"))
        .collect();
    assert_eq!(ends.len(), 2, "{}", output.err);
    for line in ends {
        assert!(
            ["packet_seq_err", "out_of_sequence"]
                .iter()
                .all(|name| line.contains(&format!(" {name}"))),
            "{line}"
        );
        assert!(
            line.ends_with(&format!(" on {RAIL}")),
            "another rail lost packets: {line}"
        );
    }
}
