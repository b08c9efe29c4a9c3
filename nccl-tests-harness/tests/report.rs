//! `nccl-spark report` as a program: planted values in every input, parts that fail and hang,
//! Ctrl-C, existing files.

mod common;

use common::{ProgramOutput, built, is_built, is_running, nccl_spark};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Values that are planted in the inputs, and must not be in the report.
const PLANTED: &[&str] = &[
    // Hosts and users.
    "gx10-a1b2",
    "lab.example.org",
    "blackbird",
    "margarete",
    "walter",
    "/home/rosalind/nccl",
    // Addresses: IPv4, IPv6, GIDs, hardware addresses, GUIDs.
    "192.168.177.11",
    "10.77.3.9",
    "2001:db8:7::11",
    "fe80:0000:0000:0000:4ebb:47ff:fe2d:19e3",
    "0000:0000:0000:0000:0000:ffff:c0a8:b10b",
    "4c:bb:47:2d:19:e3",
    "4cbb472d19e3",
    "fc4c:ea03:00f9:4230",
    // Serial numbers and tokens.
    "1654324000718",
    "3c9e2f10-aaaa-bbbb-cccc-1234567890ab",
    "0b1c2d3e4f5061728394a5b6c7d8e9f0",
    "hf_abcdefghijKLMNOPqrst",
    "00112233445566778899aabbccddeeff00112233",
    "correct horse battery staple",
];

const FILES: &[(&str, &str)] = &[
    ("proc/sys/kernel/osrelease", "6.17.0-1014-nvidia"),
    (
        "etc/os-release",
        "ID=ubuntu\nVERSION_ID=\"24.04\"\nPRETTY_NAME=\"Ubuntu 24.04.3 LTS\"",
    ),
    (
        "etc/dgx-release",
        "DGX_SWBUILD_VERSION=\"7.2.3\"\nDGX_SERIAL_NUMBER=\"1654324000718\"",
    ),
    ("sys/class/dmi/id/sys_vendor", "NVIDIA"),
    ("sys/class/dmi/id/product_name", "NVIDIA_DGX_Spark"),
    ("sys/class/dmi/id/product_serial", "1654324000718"),
    ("sys/class/dmi/id/bios_version", "5.36_0ACUM018"),
    ("sys/class/dmi/id/bios_date", "07/29/2025"),
    ("sys/module/nvidia/version", "580.95.05"),
    ("sys/module/mlx5_core/version", "24.10-2.1.8"),
    (
        "usr/local/cuda/version.json",
        r#"{"cuda": {"version": "13.0.1"}}"#,
    ),
    (
        "proc/driver/nvidia/gpus/000f:01:00.0/information",
        "Model: \t NVIDIA GB10\nGPU UUID: GPU-3c9e2f10-aaaa-bbbb-cccc-1234567890ab",
    ),
    ("proc/modules", "mlx5_ib 500000 0 - Live 0x0"),
    ("proc/meminfo", "CmaTotal: 32768 kB\nCmaFree: 30000 kB"),
    (
        "proc/self/limits",
        "Max locked memory 8388608 8388608 bytes",
    ),
    ("proc/self/status", "Name: x\nCpus_allowed_list: 0-19"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state0/name", "WFI"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state0/latency", "1"),
    ("answers/cuda", "1 0 0"),
    ("RDMA/fw_ver", "28.45.4028"),
    ("RDMA/board_id", "NVD0000000087"),
    ("RDMA/node_guid", "fc4c:ea03:00f9:4230"),
    ("RDMA/ports/1/counters/port_xmit_data", "1"),
    ("RDMA/ports/1/hw_counters/out_of_sequence", "3"),
    ("PCI/vendor", "0x15b3"),
    ("PCI/current_link_speed", "32.0 GT/s PCIe"),
    ("PCI/current_link_width", "4"),
    ("PCI/aer_dev_correctable", "TOTAL_ERR_COR 5"),
    ("PCI/aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 0"),
    ("PCI/aer_dev_fatal", "TOTAL_ERR_FATAL 0"),
    ("PCI/iommu_group/type", "DMA-FQ"),
    ("NET/phys_port_name", "p0"),
    ("NET/mtu", "9000"),
    ("NET/address", "4c:bb:47:2d:19:e3"),
    ("answers/ethtool-a/enp1s0f0np0", "RX: on\nTX: on"),
    (
        "answers/ethtool-S/enp1s0f0np0",
        "NIC statistics:\n     rx_prio3_pause: 12\n     rx_discards_phy: 7\n     rx_packets: 9",
    ),
];
const RAIL: &[(&str, &str)] = &[
    ("RDMA/ports/1/state", "4: ACTIVE"),
    ("RDMA/ports/1/rate", "200 Gb/sec (2X NDR)"),
    ("RDMA/ports/1/link_layer", "Ethernet"),
    (
        "RDMA/ports/1/gids/0",
        "0000:0000:0000:0000:0000:ffff:c0a8:b10b",
    ),
    ("RDMA/ports/1/gid_attrs/types/0", "RoCE v2"),
    ("RDMA/ports/1/gid_attrs/ndevs/0", "enp1s0f0np0"),
    (
        "answers/ip-addr.json",
        r#"[{"ifindex": 2, "ifname": "enp1s0f0np0", "flags": ["UP", "LOWER_UP"],
            "addr_info": [{"family": "inet", "local": "192.168.177.11", "prefixlen": 24}]}]"#,
    ),
];

/// A folder with all that a report needs: `root` in place of the machine's file system, scripts in
/// place of nccl-spark and mpirun, and the place for the report (`r.json`).
struct Bed {
    folder: tempfile::TempDir,
}

impl Bed {
    /// Makes the files of a Spark with one rail. The script in place of nccl-spark writes the JSON
    /// result that `results()` returns for the command.
    fn new() -> Self {
        let bed = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        FILES
            .iter()
            .chain(RAIL)
            .for_each(|(path, text)| bed.file(path, text));
        let pci = "sys/devices/pci0000:00/0000:01:00.0";
        for (target, at) in [
            (
                format!("{pci}/infiniband/rocep1s0f0"),
                "sys/class/infiniband/rocep1s0f0".to_owned(),
            ),
            (
                pci.to_owned(),
                format!("{pci}/infiniband/rocep1s0f0/device"),
            ),
            (
                format!("{pci}/net/enp1s0f0np0"),
                "sys/class/net/enp1s0f0np0".to_owned(),
            ),
        ] {
            let at = bed.path("root").join(at);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            symlink(bed.path("root").join(target), at).unwrap();
        }
        bed.library("libnccl.so.2", "NCCL version 2.28.9+cuda13.0");
        bed.library("libibverbs.so.1", "x");
        bed.file("dev/nvidia0", "");
        bed.results(results());
        let own = bed.folder.path().display();
        let script = format!(
            "touch {own}/ran; case \"$*\" in *--hosts*) name=hosts;; *--peer*) name=peer;; memory*) name=memory;;\n\
             *all-gather*--rendezvous*|all-gather*) name=all-gather;; nccl-tests*) name=nccl-tests;; *) name=tune;; esac\n\
             cat {own}/planted; cat {own}/planted >&2; json=\n\
             for word; do test \"$json\" = next && cp {own}/results/$name \"$word\"; json=\n\
             test \"$word\" = --json && json=next; done; exit 0"
        );
        let planted = PLANTED
            .iter()
            .map(|one| format!("nccl-spark: a {one}, ({one}) \"{one}\"\n{one}\n"));
        bed.write("planted", &planted.collect::<String>());
        bed.program("nccl-spark", &script);
        bed.program("mpirun", &format!("exec {own}/nccl-spark \"$@\""));
        fs::create_dir(bed.path("tests")).unwrap();
        bed
    }

    fn results(&self, results: Vec<(&str, Value)>) {
        results
            .iter()
            .for_each(|(name, json)| self.write(&format!("results/{name}"), &json.to_string()));
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), text).unwrap();
    }

    /// Writes a file of the machine. In `path`, `RDMA/`, `PCI/` and `NET/` stand for the folders of
    /// the machine's only RDMA function.
    fn file(&self, path: &str, text: &str) {
        let pci = "sys/devices/pci0000:00/0000:01:00.0";
        let path = path.replace("RDMA/", &format!("{pci}/infiniband/rocep1s0f0/"));
        let path = path
            .replace("PCI/", &format!("{pci}/"))
            .replace("NET/", &format!("{pci}/net/enp1s0f0np0/"));
        self.write(&format!("root/{path}"), &format!("{text}\n"));
    }

    fn library(&self, name: &str, text: &str) {
        let source = self.path("library.c");
        fs::write(&source, format!("const char text[] = \"{text}\";")).unwrap();
        self.write(&format!("root/usr/lib/{name}"), "");
        let library = self.path("root/usr/lib").join(name);
        let status = Command::new("cc")
            .args(["-shared", "-nostdlib", "-o"])
            .arg(library)
            .arg(source)
            .status();
        assert!(status.unwrap().success());
    }

    fn program(&self, name: &str, script: &str) {
        self.write(name, &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, arguments: &str) -> Command {
        let mut command = nccl_spark();
        command
            .arg("report")
            .args(arguments.split_whitespace())
            .current_dir(&self.folder);
        command
            .arg("--with-program")
            .arg(self.path("nccl-spark"))
            .arg("--root")
            .arg(self.path("root"));
        command.env(
            "PATH",
            format!("{}:/usr/bin:/bin", self.folder.path().display()),
        );
        command.env("HOME", "/home/margarete");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, arguments: &str) -> ProgramOutput {
        self.command(arguments).output().unwrap().into()
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path("r.json")).unwrap()
    }

    fn report(&self) -> Value {
        serde_json::from_str(&self.text()).unwrap()
    }
}

/// Returns results of the commands with every field; `?` is a placeholder for any text.
fn results() -> Vec<(&'static str, Value)> {
    let finding = json!([{"severity": "slow", "id": "slow-rail", "text": "?", "cure": "?"}]);
    let rate = json!({"mbps": 1.0, "grade": "good"});
    let measured = json!({"to_peer": rate, "from_peer": rate, "latency_us": 1.0, "wrong_bytes": 0, "path_mtu_bytes": 4096});
    let path = json!({"here": ["rocep1s0f0:1"], "there": ["?"], "expected_mbps": 1.0, "port_mtu_bytes": 4096, "measured": measured});
    let failed = json!({"here": [], "there": [], "expected_mbps": null, "port_mtu_bytes": null, "failed": "?"});
    let peer =
        json!({"host": "?", "verdict": "good", "findings": finding, "paths": [path, failed]});
    let message = json!({"bytes": 8, "wrong": 0, "first_wrong": null, "beyond": 0});
    let moved = json!({"moved": {"written_by": "?", "checked_by": "?", "messages": [message]}});
    let read = json!({"path": "writer_to_cpu", "lines": 1, "torn": 0, "old_pieces": [], "lines_per_s": 1.0});
    let ran = json!({"written_by": "?", "read_by": "?", "seconds": 1.0, "messages": 1,
        "sizes_bytes": [128], "missing": 0, "reads": [read]});
    let gpu = json!({"number": 0, "name": "?", "integrated": true, "pageable_memory_access": true,
        "managed_memory": true, "concurrent_managed_access": true});
    let row = json!({"size_bytes": 8, "count": 8, "time_us": 1.0, "time_p50_us": 1.0, "time_p99_us": 1.0, "algbw_gb_s": 1.0,
        "busbw_gb_s": 1.0, "longest_pause_us": 1.0, "wrong": 0, "first_wrong": ["?"]});
    let half = json!({"time_us": 1.0, "algbw_gb_s": 1.0, "busbw_gb_s": 1.0, "wrong": 0.0});
    let channels =
        json!({"coll": 16, "collnet": 16, "nvls": 0, "p2p": 16, "p2p_per_peer": 2, "?": 7});
    let network =
        json!({"name": "?", "device": "?", "devices": 1, "speed_mbps": 200_000, "rails": ["?"]});
    let compared = json!({"name": "spark", "network": "?", "nccl_version": "2.28.9+cuda13.0", "used": "?", "channels": channels,
        "failure": "?", "wrong": 0.0, "medians": [{"bytes": 8, "time_us": 1.0, "busbw_gb_s": null}],
        "rounds": [[{"bytes": 8, "out_of_place": half, "in_place": half}]]});
    let record =
        json!({"choice": "ring/ll128/16", "rounds_time_us_by_bytes": [{"8": 1.0}], "dropped": "?"});
    let confirmed = json!({"bytes": 8, "choice": "ring/ll128/16", "finding": "?", "differs": true, "row_is_written": true});
    let sweep = json!({"collective": "all_reduce", "nccl": record, "candidates": [record],
        "groups": [{"members": 2, "nccl": record, "candidates": [record]}],
        "sizes": [{"bytes": 8, "nccl_us": 1.0, "choice": "ring/ll128/16", "choice_us": 1.0, "finding": "?"}],
        "confirmation": {"nccl": record, "table": record, "sizes": [confirmed]}});
    vec![
        (
            "hosts",
            json!({"hosts": [{"name": "?", "rails": ["?", "rocep1s0f0:1"], "pairs": [0, 2]}], "order": ["?"], "ok": true}),
        ),
        (
            "peer",
            json!({"schema": 1, "verdict": "impaired", "findings": finding, "peer": peer, "facts": [{"name": "?", "value": "?"}]}),
        ),
        (
            "memory",
            json!({"fabric": "verbs", "fabric_text": "?", "gpus": [gpu, gpu], "ok": true, "error": "?", "connections": ["?"],
                "kinds": [{"kind": "malloc", "name": "?", "outcome": moved, "fault": "?"},
                    {"kind": "managed", "name": "?", "outcome": {"failed": {"registered": true, "reason": "?"}}, "fault": null}],
                "litmus": {"planted": false, "outcome": {"ran": ran}, "fault": null}}),
        ),
        (
            "all-gather",
            json!({"fabric": "verbs", "fabric_text": "?", "ranks": 2, "channels": 1, "iters": 20, "check_iters": 1, "ok": true,
                "error": "?", "networks": [network], "connections": [["?"]], "rows": [row], "average_busbw_gb_s": 1.0}),
        ),
        (
            "nccl-tests",
            json!({"program": "?", "arguments": ["?"], "networks": [compared]}),
        ),
        (
            "tune",
            json!({"fingerprint": "?", "ranks": 2, "minimal_gain": 1.05, "collectives": [sweep], "table": "?"}),
        ),
    ]
}

/// Replaces placeholders, or all text if `is_all`, by `planted`. Adds a field with the name and the
/// value `planted` to each object.
fn plant(json: &mut Value, planted: &str, is_all: bool) {
    match json {
        Value::String(text) if is_all || text == "?" => planted.clone_into(text),
        Value::Array(array) => array.iter_mut().for_each(|one| plant(one, planted, is_all)),
        Value::Object(object) => {
            object
                .values_mut()
                .for_each(|one| plant(one, planted, is_all));
            object.insert(planted.to_owned(), Value::from(planted));
        }
        _ => {}
    }
}

fn found(text: &str) -> Vec<&'static str> {
    let lower = text.to_lowercase();
    PLANTED
        .iter()
        .copied()
        .filter(|one| lower.contains(&one.to_lowercase()))
        .collect()
}

const ALL: &str = "--output r.json --hosts gx10-a1b2,walter@blackbird --nccl-tests tests";

#[test]
fn the_report_contains_nothing_planted_in_its_inputs() {
    let variables = [
        "NCCL_HOSTID",
        "NCCL_COMM_ID",
        "NCCL_NET_PLUGIN",
        "NCCL_DEBUG_FILE",
        "NCCL_SPARK_SYSFS",
        "NCCL_IB_HCA",
    ];
    for (at, planted) in PLANTED.iter().enumerate() {
        let bed = Bed::new();
        // A planted number in a file that has only a number may rightly be in the report.
        let is_text = |text: &str| text.parse::<u64>().is_err() || planted.parse::<u64>().is_err();
        // The planted text replaces the contents of the file, or follows them.
        for (path, text) in FILES.iter().filter(|(_, text)| is_text(text)) {
            bed.file(
                path,
                &if at % 2 == 0 {
                    (*planted).to_owned()
                } else {
                    format!("{text}-{planted}")
                },
            );
        }
        bed.file(
            &format!("RDMA/ports/1/counters/{}", planted.replace('/', "-")),
            "7",
        );
        bed.file(
            "home/margarete/.nccl.conf",
            &format!("NCCL_TOKEN={planted}\nNCCL_{planted}=1"),
        );
        let mut results = results();
        results
            .iter_mut()
            .for_each(|(_, json)| plant(json, planted, at % 4 == 3));
        bed.results(results);
        let mut command = bed.command(ALL);
        command.envs(variables.map(|name| (name, planted)));
        command
            .env(format!("NCCL_{planted}"), planted)
            .env("MY_SERVICE_KEY", planted);
        let output: ProgramOutput = command.output().unwrap().into();
        assert_eq!(output.status, Some(0), "{output:?}");
        assert_eq!(found(&bed.text()), [""; 0], "{planted}: {}", bed.text());
    }
}

#[test]
fn the_report_has_a_sparks_facts() {
    let bed = Bed::new();
    let output = bed
        .command(ALL)
        .env("NCCL_IB_TIMEOUT", "22")
        .env("NCCL_PROTO", "LL128")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let report = bed.report();
    let parts = report["parts"].as_array().unwrap();
    let names: Vec<&str> = parts
        .iter()
        .map(|part| part["part"].as_str().unwrap())
        .collect();
    let expected = [
        "machine",
        "hosts",
        "peer",
        "memory",
        "all-gather",
        "nccl-tests",
        "nccl-tests",
        "tune",
    ];
    assert_eq!(names, expected);
    assert!(
        parts
            .iter()
            .all(|part| part["state"] == "ended" && !part["facts"].is_null()),
        "{}",
        bed.text()
    );
    assert_machine_facts(&parts[0]["facts"]);
    assert_eq!(parts[2]["peer"], 1);
    assert_eq!(
        parts[2]["facts"]["peer"]["findings"][0],
        json!({"severity": "slow", "id": "slow-rail"})
    );
    assert_eq!(parts[2]["facts"]["peer"]["paths"][1]["failed"], true);
    assert_eq!(parts[4]["facts"]["rows"][0]["busbw_gb_s"], 1.0);
}

fn assert_machine_facts(machine: &Value) {
    for (pointer, value) in expected_machine_facts() {
        assert_eq!(
            machine.pointer(pointer),
            Some(&value),
            "{pointer}: {machine:#}"
        );
    }
    let has = |list: &str, one: Value| machine[list].as_array().unwrap().contains(&one);
    assert!(
        has(
            "settings",
            json!({"name": "NCCL_IB_TIMEOUT", "value": 22, "source": "environment"})
        ),
        "{machine:#}"
    );
    assert!(
        has(
            "variables",
            json!({"name": "NCCL_PROTO", "value": "LL128", "effect": "nccl"})
        ),
        "{machine:#}"
    );
    let findings = machine["doctor"]["findings"].as_array().unwrap();
    assert!(
        findings.iter().any(|one| one["id"] == "out-of-sequence"),
        "{findings:?}"
    );
}

/// Facts of the machine that [`FILES`] describe, by JSON pointer.
fn expected_machine_facts() -> Vec<(&'static str, Value)> {
    vec![
        ("/versions/kernel", json!("6.17.0-1014-nvidia")),
        ("/versions/os_version", json!("24.04")),
        ("/versions/dgx_os", json!("7.2.3")),
        ("/versions/bios", json!("5.36_0ACUM018")),
        ("/versions/nvidia_driver", json!("580.95.05")),
        ("/versions/cuda_toolkit", json!("13.0.1")),
        ("/versions/mlx5_driver", json!("24.10-2.1.8")),
        ("/versions/nccl/0/version", json!("2.28.9+cuda13.0")),
        (
            "/hardware/product",
            json!(["NVIDIA", "NVIDIA", "DGX", "Spark"]),
        ),
        ("/hardware/gpus", json!([["NVIDIA", "GB10"]])),
        ("/hardware/cma_free_kib", json!(30_000)),
        ("/rails/rails/0/device", json!("rocep1s0f0")),
        ("/rails/rails/0/speed_mbps", json!(200_000)),
        ("/rails/rails/0/addresses/0/prefix", json!(24)),
        ("/functions/0/firmware", json!("28.45.4028")),
        ("/functions/0/board", json!("NVD0000000087")),
        ("/functions/0/pcie/width", json!(4)),
        ("/functions/0/pcie_errors/corrected", json!(5)),
        ("/functions/0/pause_rx", json!(true)),
        ("/functions/0/iommu", json!("DMA-FQ")),
        ("/functions/0/counters/out_of_sequence", json!(3)),
        ("/functions/0/counters/rx_prio3_pause", json!(12)),
        ("/functions/0/counters/rx_discards_phy", json!(7)),
    ]
}

/// Collects all keys of objects, except keys that are numbers (sizes).
fn keys(json: &Value, into: &mut BTreeSet<String>) {
    match json {
        Value::Array(array) => array.iter().for_each(|one| keys(one, into)),
        Value::Object(object) => {
            into.extend(
                object
                    .keys()
                    .filter(|key| key.parse::<u64>().is_err())
                    .cloned(),
            );
            object.values().for_each(|one| keys(one, into));
        }
        _ => {}
    }
}

#[test]
fn the_keys_match_the_guide() {
    let bed = Bed::new();
    let output: ProgramOutput = bed
        .command(ALL)
        .env("NCCL_PROTO", "LL128")
        .output()
        .unwrap()
        .into();
    assert_eq!(output.status, Some(0), "{output:?}");
    let mut written = BTreeSet::new();
    keys(&bed.report(), &mut written);
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/report.md");
    let guide = fs::read_to_string(guide).unwrap();
    let block = guide
        .split("```text\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next())
        .unwrap();
    let documented: BTreeSet<String> = block
        .split_whitespace()
        .filter(|word| !word.ends_with(':'))
        .map(str::to_owned)
        .collect();
    let counters = [
        "out_of_sequence",
        "port_xmit_data",
        "rx_discards_phy",
        "rx_prio3_pause",
    ]
    .map(str::to_owned);
    let written: BTreeSet<String> = written
        .into_iter()
        .filter(|key| !counters.contains(key))
        .collect();
    assert_eq!(written, documented);
}

#[test]
fn a_hanging_or_failing_part_is_named_and_the_others_run() {
    let bed = Bed::new();
    let script = "case $1 in\nmemory) echo before; sleep 600 & echo $! > child; sleep 600;;\n\
                  all-gather) echo 'nccl-spark: broken by gx10-a1b2' >&2; exit 7;;\n\
                  doctor) kill -SEGV $$;;\nesac";
    bed.program("nccl-spark", script);
    let began = Instant::now();
    let output = bed.run("--output r.json --hosts a,b --only memory --part-limit 1");
    assert_eq!(output.status, Some(0), "{output:?}");
    // The sleeps are longer than this limit.
    assert!(
        began.elapsed() < Duration::from_secs(300),
        "{:?}",
        began.elapsed()
    );
    let only = |at: usize, key: &str| bed.report()["parts"][at][key].clone();
    assert_eq!(
        (only(0, "state"), only(0, "facts")),
        (json!("out_of_time"), Value::Null)
    );
    assert!(
        output
            .err
            .contains("# report: 1/1 memory: no facts: ended at its time limit"),
        "{output:?}"
    );
    let child = fs::read_to_string(bed.path("child")).unwrap();
    assert!(!is_running(child.trim()), "{child}");
    fs::remove_file(bed.path("r.json")).unwrap();
    let output = bed.run("--output r.json --only machine,hosts,all-gather,tune");
    assert_eq!(output.status, Some(0), "{output:?}");
    assert_eq!(
        (only(0, "state"), only(1, "state"), only(3, "state")),
        (json!("ended"), json!("no_hosts"), json!("no_nccl_tests"))
    );
    assert_eq!(
        (only(2, "state"), only(2, "exit_status"), only(2, "facts")),
        (json!("ended"), json!(7), Value::Null)
    );
    assert!(
        !only(0, "facts").is_null() && !bed.text().contains("gx10"),
        "{}",
        bed.text()
    );
    assert!(
        output
            .err
            .contains("# report: 3/4 all-gather: no facts: ended: broken by gx10-a1b2"),
        "{output:?}"
    );
    fs::remove_file(bed.path("r.json")).unwrap();
    assert_eq!(
        bed.run("--output r.json --only peer --hosts a,b").status,
        Some(0)
    );
    assert_eq!(
        (only(0, "state"), only(0, "signal")),
        (json!("ended"), json!(11))
    );
}

#[test]
fn an_existing_file_is_not_overwritten_and_nothing_runs() {
    let bed = Bed::new();
    bed.write("r.json", "mine");
    let output = bed.run("--output r.json --only memory");
    assert!(
        output.status == Some(1) && output.err.contains("r.json exists and is not overwritten"),
        "{output:?}"
    );
    assert!(bed.text() == "mine" && !bed.path("ran").exists());
    let output = bed.run("--output no/such/folder/r.json --only memory");
    assert!(
        output.status == Some(1) && output.err.contains("--output no/such/folder/r.json"),
        "{output:?}"
    );
    // A file that appears meanwhile is not overwritten either.
    bed.program("nccl-spark", "echo theirs > new.json");
    let output = bed.run("--output new.json --only memory");
    assert!(
        output.status == Some(1) && output.err.contains("write new.json"),
        "{output:?}"
    );
    assert_eq!(
        fs::read_to_string(bed.path("new.json")).unwrap(),
        "theirs\n"
    );
    let left: Vec<_> = fs::read_dir(&bed.folder)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(
        !left
            .iter()
            .any(|name| name.to_string_lossy().starts_with(".nccl-spark")),
        "{left:?}"
    );
}

#[test]
fn mistakes_are_reported_and_a_dry_run_runs_nothing() {
    let bed = Bed::new();
    for (arguments, allowed) in [
        (
            "--part-limit 0",
            "'--part-limit <SECONDS>': must be 1 to 86400",
        ),
        ("--only nothing", "possible values: machine, hosts"),
        ("--hosts one", "--hosts: 1 hosts; must be 2 to 16"),
        ("--hosts a,a", "named twice"),
        ("--hosts a,-v", "a host is a name or address"),
        (
            "--nccl-tests no/such",
            "--nccl-tests no/such: must be a folder",
        ),
        ("--only memory --skip memory", "leave no part"),
        ("--ssh x", "--hosts"),
    ] {
        let output = bed.run(arguments);
        assert!(
            output.status == Some(2) && output.err.contains(allowed),
            "{arguments}: {output:?}"
        );
    }
    let output = bed.run("--dry-run --hosts a,b --nccl-tests tests");
    assert_eq!(output.status, Some(0), "{output:?}");
    for line in [
        "machine: at most 120 s: reads files, and asks the drivers\n",
        "nccl-spark doctor --peer b --ssh ssh --json ",
        "nccl-spark memory --litmus 20 --json ",
        "mpirun -np 2 -H a,b --map-by node --bind-to none ",
        " all-gather -b 8 -e 32M -f 4 --rendezvous a:29501 --json ",
        "nccl-spark nccl-tests all_reduce --compare spark,ib --rounds 3 --dir ",
        ".json -- -b 8 -e 128M -f 4\n",
        "nccl-spark tune collectives --dry-run --dir ",
    ] {
        assert!(output.out.contains(line), "{line}: {}", output.out);
    }
    assert!(!bed.path("ran").exists());
    let files: Vec<_> = fs::read_dir(&bed.folder)
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert!(
        !files
            .iter()
            .any(|name| name.to_string_lossy().ends_with(".json")),
        "{files:?}"
    );
}

#[test]
fn ctrl_c_ends_the_part_and_writes_the_rest() {
    let bed = Bed::new();
    bed.program(
        "nccl-spark",
        "case $1 in memory) touch begun; sleep 600;; esac",
    );
    let inner = bed.command("--output r.json --only machine,memory,all-gather");
    // The tests may be a shell's background job, which starts with SIGINT ignored. `env` resets
    // SIGINT for the program.
    let mut outer = Command::new("env");
    outer
        .arg("--default-signal=INT")
        .arg(inner.get_program())
        .args(inner.get_args())
        .current_dir(&bed.folder);
    outer.envs(
        inner
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?))),
    );
    outer
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let report = outer.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !bed.path("begun").exists() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    signal::kill(Pid::from_raw(report.id() as i32), Signal::SIGINT).unwrap();
    let output: ProgramOutput = report.wait_with_output().unwrap().into();
    assert_eq!(output.status, Some(130), "{output:?}");
    assert!(
        output
            .err
            .contains("interrupted; what there is was written to r.json"),
        "{output:?}"
    );
    let report = bed.report();
    let states: Vec<&str> = report["parts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["state"].as_str().unwrap())
        .collect();
    assert_eq!(
        (report["interrupted"].as_bool(), &states[..]),
        (Some(true), &["ended", "interrupted", "interrupted"][..])
    );
}

#[test]
fn the_report_uses_the_software_fabric_where_no_other_exists() {
    if !is_built() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut command = nccl_spark();
    command.args(["report", "--output", "-", "--only", "machine,all-gather"]);
    command
        .env("SOFTVERBS_DIR", folder.path())
        .env_remove("NCCL_SPARK_SYSFS");
    // The loader finds the plugin as it finds an installed one.
    let library = tempfile::tempdir().unwrap();
    symlink(
        built().unwrap(),
        library.path().join("libnccl-net-spark.so"),
    )
    .unwrap();
    command.env("LD_LIBRARY_PATH", library.path());
    let output: ProgramOutput = command.output().unwrap().into();
    assert_eq!(output.status, Some(0), "{output:?}");
    let report: Value = serde_json::from_str(&output.out).unwrap();
    let [machine, all_gather] = &report["parts"].as_array().unwrap()[..] else {
        panic!("{report:#}")
    };
    assert!(
        machine["facts"]["versions"]["plugin_sha256"].is_string(),
        "{report:#}"
    );
    let rows = all_gather["facts"]["rows"].as_array().unwrap();
    assert!(
        rows.len() == 12 && rows.iter().all(|row| row["wrong"] == 0),
        "{report:#}"
    );
    for interface in fs::read_dir("/sys/class/net").unwrap().flatten() {
        let mac = fs::read_to_string(interface.path().join("address")).unwrap_or_default();
        let is_own = !mac.trim().is_empty() && mac.trim() != "00:00:00:00:00:00";
        assert!(
            !is_own || !output.out.contains(mac.trim()),
            "{}",
            output.out
        );
    }
}
