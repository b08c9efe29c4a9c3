//! `nccl-spark nccl-tests` around programs that look like nccl-tests': shell scripts, which need no GPU.

mod common;

use common::{Fake, Said, nccl_spark};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A program by the name of all_gather_perf, which runs `body`; `row` prints a line of the table, `via` a line of NCCL's log.
struct Program(tempfile::TempDir);

const HEAD: &str = r##"#!/bin/sh
# libmpi: as if it were linked.
echo "# nccl-tests version 2.19.6"
echo "h:1:1 [0] NCCL INFO NCCL version 2.28.3+cuda13.0"
via() { echo "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/$1/0"; }
head() { echo "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong"; }
row() { echo "  $1   256   float   none   -1   $2   $3   $3   $4   $2   $3   $3   $4"; }
"##;

impl Program {
    fn new(body: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("all_gather_perf");
        fs::write(&file, format!("{HEAD}{body}\n")).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        Self(folder)
    }

    fn run(&self, arguments: &[&str]) -> Said {
        self.run_over("verbs", arguments)
    }

    fn run_over(&self, fabric: &str, arguments: &[&str]) -> Said {
        let mut command = nccl_spark();
        command.args(["nccl-tests", "--fabric", fabric, "--dir"]).arg(self.0.path());
        command.args(arguments).env_remove("NCCL_TESTS_DEVICE").output().unwrap().into()
    }
}

#[test]
fn a_run_over_the_plugin_shows_its_environment_its_table_and_its_network() {
    let program = Program::new(r##"via Spark; head; row 8 13.2 0.00 0; row 1048576 240 2.18 0; echo "# told: $*""##);
    let said = program.run(&["-r", "1", "--", "-b", "8", "-g", "2"]);
    assert_eq!(said.status, Some(0), "{said:?}");
    for part in [
        "NCCL_NET=Spark",
        "NCCL_DEBUG=INFO",
        "NET/Spark at 1 ends of channels",
        "2.28.3",
        "1048576",
        "told: -b 8 -g 2",
        "0 wrong",
    ] {
        assert!(said.out.contains(part), "{part}: {said:?}");
    }
    assert!(!said.out.contains("Channel 00"), "NCCL's log is for --log: {said:?}");
}

#[test]
fn a_run_over_another_network_fails_with_the_reason() {
    let body = r#"echo "h:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net-spark.so"; via Socket; head; row 8 13.2 0.1 0"#;
    let said = Program::new(body).run(&["-r", "1"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(said.err.contains("NET/Socket where NET/Spark") && said.err.contains("libnccl-net-spark.so"), "{said:?}");
}

#[test]
fn wrong_data_and_missing_tables_are_failures() {
    let said = Program::new("via Spark; head; row 8 13.2 0.1 4").run(&["-r", "1"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(said.out.contains("8 WRONG"), "{said:?}");
    let said = Program::new("via Spark; echo oh dear").run(&["-r", "1"]);
    assert!(said.status == Some(1) && said.err.contains("no table; its last words: oh dear"), "{said:?}");
    let said = Program::new("echo 'h:1:1 [0] NCCL WARN Cuda failure 999'; exit 3").run(&["-r", "1"]);
    assert!(
        said.status == Some(1) && said.err.contains("status 3") && said.err.contains("Cuda failure 999"),
        "{said:?}"
    );
}

#[test]
fn networks_are_measured_in_turns_and_one_that_does_not_come_up_is_told() {
    let body = r#"
        case $NCCL_NET in
        IB) echo "h:1:1 [0] NCCL WARN NET/IB : No device found."; exit 1 ;;
        Spark) via Spark; head; row 8 10 0.10 0; row 4096 20 4.00 0 ;;
        Socket) [ "$NCCL_NET_PLUGIN" = none ] || exit 9; via Socket; head; row 8 30 0.03 0; row 4096 50 1.60 0 ;;
        esac"#;
    let program = Program::new(body);
    let (json, plots) = (program.0.path().join("out.json"), program.0.path().join("plots"));
    let said = program.run(&[
        "-r",
        "1",
        "--compare",
        "spark,ib,socket",
        "--rounds",
        "3",
        "--json",
        json.to_str().unwrap(),
        "--plot",
        plots.to_str().unwrap(),
    ]);
    assert_eq!(said.status, Some(0), "{said:?}");
    assert!(said.out.contains("ib: not measured") && said.out.contains("No device found"), "{said:?}");
    assert_eq!(said.out.matches("not measured").count(), 1, "it is tried once: {said:?}");
    let row = said.out.lines().find(|line| line.starts_with("        4096")).unwrap();
    assert!(row.trim_end().ends_with("2.500") && row.contains("4.00..4.00"), "{row}");
    let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(report["networks"][0]["rounds"].as_array().unwrap().len(), 3);
    assert_eq!(report["networks"][0]["medians"][1]["busbw_gb_s"], 4.0);
    assert_eq!(report["networks"][0]["used"], "NET/Spark at 1 ends of channels");
    assert!(report["networks"][1]["failure"].as_str().unwrap().contains("No device found"));
    assert!(plots.join("all_gather_perf.svg").is_file() && plots.join("all_gather_perf.png").is_file());
}

#[test]
fn nccls_own_verbs_transport_finds_the_software_fabric() {
    let body = r#"
        [ -n "$SOFTVERBS_FABRIC" ] && [ "$SOFTVERBS_NODE" = 0 ] || exit 7
        if [ "$NCCL_NET" = IB ]; then [ -f "${LD_LIBRARY_PATH%%:*}/libibverbs.so.1" ] && [ "$NCCL_IB_GID_INDEX" = 1 ] || exit 8; fi
        via "$NCCL_NET"; head; row 8 10 0.10 0"#;
    let said = Program::new(body).run_over("soft", &["-r", "1", "--compare", "spark,ib", "--rounds", "1"]);
    assert_eq!(said.status, Some(0), "{said:?}");
    assert!(said.out.contains("ib: 0 wrong") && !said.out.contains("not measured"), "{said:?}");
}

#[test]
fn one_version_of_the_interface_is_shown_where_one_is_asked_for() {
    // The script is told another file than the plugin, whose name says the version, and takes `$1` of what it shows.
    let program = |took: &str| {
        let took = format!("echo \"h:1:2 [0] NCCL INFO NET/Plugin: Loaded net plugin Spark ({took})\"");
        Program::new(&format!(
            r#"case $NCCL_NET_PLUGIN in */libnccl-net-spark-v9.so) {took} ;; esac; via Spark; head; row 8 10 0.1 0"#
        ))
    };
    let plugin = Fake::compile(&["-DFAKE_ALL_VERSIONS"]);
    let plugin = plugin.library();
    let plugin = plugin.to_str().unwrap();
    let said = program("v9").run(&["-r", "1", "--abi", "9", "--plugin", plugin]);
    assert!(said.status == Some(0) && said.out.contains("NET/Spark (interface v9) at 1"), "{said:?}");
    let said = program("v11").run(&["-r", "1", "--abi", "9", "--plugin", plugin]);
    assert!(said.status == Some(1) && said.err.contains("took version 9"), "{said:?}");
    let said = program("v9").run(&["-r", "1", "--abi", "7"]);
    assert!(said.status == Some(2) && said.err.contains("8..=12"), "{said:?}");
}

#[test]
fn nccl_is_given_a_sparks_graph_where_that_is_asked_for() {
    let body = r#"
        for part in 0000:41:00.0 0002:01:00.1 '<net name="rocep1s0f1"/>'; do grep -q "$part" "$NCCL_TOPO_FILE" || exit 5; done
        via Spark; head; row 8 10 0.1 0"#;
    let program = Program::new(body);
    let tool = program.0.path().join("nvidia-smi");
    fs::write(&tool, "#!/bin/sh\necho 00000000:41:00.0\n").unwrap();
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", program.0.path().display(), std::env::var("PATH").unwrap());
    let run = |fabric: &[&str]| -> Said {
        let mut command = nccl_spark();
        command.args(["nccl-tests", "--as-spark", "-r", "1", "--dir"]).arg(program.0.path()).arg("--fabric");
        command.args(fabric).env("PATH", &path).output().unwrap().into()
    };
    let said = run(&["soft", "--profile", "spark-2cable"]);
    assert!(said.status == Some(0) && said.out.contains("NCCL_TOPO_FILE="), "{said:?}");
    let said = run(&["verbs"]);
    assert!(said.status == Some(1) && said.err.contains("for the software fabric"), "{said:?}");
    fs::write(&tool, "#!/bin/sh\necho no devices; exit 9\n").unwrap();
    let said = run(&["soft"]);
    assert!(said.status == Some(1) && said.err.contains("no devices"), "{said:?}");
}

#[test]
fn a_program_that_hangs_is_ended() {
    let said = Program::new("echo started; exec sleep 600").run(&["-r", "1", "-T", "1"]);
    assert!(said.status == Some(1) && said.err.contains("ended after 1 s"), "{said:?}");
}

#[test]
fn what_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let said = common::say(&["nccl-tests", "alltoall", "--dir", folder.path().to_str().unwrap()]);
    assert!(said.status == Some(1) && said.err.contains("no alltoall_perf in"), "{said:?}");
    let program = Program::new("");
    let file = program.0.path().join("all_gather_perf");
    fs::write(&file, "#!/bin/sh\n").unwrap();
    let said = program.run(&[]);
    assert!(said.status == Some(1) && said.err.contains("built without MPI"), "{said:?}");
}

#[test]
fn ranks_of_mpirun_look_like_hosts_of_their_own() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        eprintln!("skipped: there is no mpirun");
        return;
    }
    let body = r##"echo "# I am $NCCL_HOSTID, device $NCCL_TESTS_DEVICE"; via Spark; [ "$OMPI_COMM_WORLD_RANK" = 0 ] || exit 0; head; row 8 10 0.1 0"##;
    let program = Program::new(body);
    let log = program.0.path().join("log");
    let said = program.run(&["-r", "2", "--log", log.to_str().unwrap()]);
    assert_eq!(said.status, Some(0), "{said:?}");
    let hosts: Vec<&str> = said.out.lines().filter_map(|line| line.strip_prefix("# I am nccl-spark-")).collect();
    assert!(hosts.len() == 2 && hosts[0] != hosts[1] && hosts.iter().all(|host| host.contains("device ")), "{said:?}");
    assert!(said.out.contains("NET/Spark at 2 ends of channels"), "{said:?}");
    assert!(fs::read_to_string(log).unwrap().contains("spark: h:1:2 [0] NCCL INFO Channel 00/0"));
}
