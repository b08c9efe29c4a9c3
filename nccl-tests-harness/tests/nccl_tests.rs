//! `nccl-spark nccl-tests` with shell scripts that imitate nccl-tests and need no GPU.

mod common;

use common::{ProgramOutput, nccl_spark};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A folder with the script all_gather_perf, which consists of [`HEAD`] and a test's `body`. The
/// body calls the functions of [`HEAD`]: `head` and `row` print lines of the table, `log_channel`
/// and `log_channel_counts` print lines of NCCL's log.
struct Program(tempfile::TempDir);

const HEAD: &str = r##"#!/bin/sh
# The word libmpi makes nccl-spark believe that this is built with MPI.
echo "# nccl-tests version 2.19.6"
echo "h:1:1 [0] NCCL INFO NCCL version 2.28.3+cuda13.0"
log_channel() { echo "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/$1/0"; }
log_channel_counts() { echo "h:1:2 [0] NCCL INFO $1 coll channels, $1 collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer"; }
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

    fn run(&self, arguments: &[&str]) -> ProgramOutput {
        self.run_over("verbs", arguments)
    }

    fn run_over(&self, fabric: &str, arguments: &[&str]) -> ProgramOutput {
        self.command(fabric, arguments).output().unwrap().into()
    }

    fn command(&self, fabric: &str, arguments: &[&str]) -> Command {
        let mut command = nccl_spark();
        command
            .args(["nccl-tests", "--fabric", fabric, "--dir"])
            .arg(self.0.path())
            .args(arguments);
        for name in ["NCCL_TESTS_DEVICE", "NCCL_SPARK_TUNER", "NCCL_DEBUG_SUBSYS"] {
            command.env_remove(name);
        }
        command
    }
}

fn run_command(mut command: Command) -> ProgramOutput {
    command.output().unwrap().into()
}

#[test]
fn a_run_over_the_plugin_shows_its_environment_its_table_and_its_network() {
    let program = Program::new(
        r##"log_channel Spark; head; row 8 13.2 0.00 0; row 1048576 240 2.18 0; echo "# told: $*""##,
    );
    let output = program.run(&["-r", "1", "--", "-b", "8", "-g", "2"]);
    assert_eq!(output.status, Some(0), "{output:?}");
    for part in [
        "NCCL_NET=Spark",
        "NCCL_DEBUG=INFO",
        "NET/Spark at 1 ends of channels",
        "2.28.3",
        "1048576",
        "told: -b 8 -g 2",
        "0 wrong",
    ] {
        assert!(output.out.contains(part), "{part}: {output:?}");
    }
    assert!(
        !output.out.contains("Channel 00"),
        "NCCL's log is for --log: {output:?}"
    );
}

#[test]
fn a_run_over_another_network_fails_with_the_reason() {
    let body = r#"echo "h:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net-spark.so"; log_channel Socket; head; row 8 13.2 0.1 0"#;
    let output = Program::new(body).run(&["-r", "1"]);
    assert_eq!(output.status, Some(1), "{output:?}");
    assert!(
        output.err.contains("NET/Socket instead of NET/Spark")
            && output.err.contains("libnccl-net-spark.so"),
        "{output:?}"
    );
}

#[test]
fn wrong_data_and_missing_tables_are_failures() {
    let output = Program::new("log_channel Spark; head; row 8 13.2 0.1 4").run(&["-r", "1"]);
    assert_eq!(output.status, Some(1), "{output:?}");
    assert!(output.out.contains("8 WRONG"), "{output:?}");
    let output = Program::new("log_channel Spark; echo oh dear").run(&["-r", "1"]);
    assert!(
        output.status == Some(1) && output.err.contains("no table; its last line: oh dear"),
        "{output:?}"
    );
    let output =
        Program::new("echo 'h:1:1 [0] NCCL WARN Cuda failure 999'; exit 3").run(&["-r", "1"]);
    assert!(
        output.status == Some(1)
            && output.err.contains("status 3")
            && output.err.contains("Cuda failure 999"),
        "{output:?}"
    );
}

#[test]
fn networks_are_measured_in_turns_and_a_failing_one_is_reported() {
    let body = r#"
        case $NCCL_NET in
        IB) echo "h:1:1 [0] NCCL WARN NET/IB : No device found."; exit 1 ;;
        Spark) log_channel Spark; head; row 8 10 0.10 0; row 4096 20 4.00 0 ;;
        Socket) [ "$NCCL_NET_PLUGIN" = none ] || exit 9; log_channel Socket; head; row 8 30 0.03 0; row 4096 50 1.60 0 ;;
        esac"#;
    let program = Program::new(body);
    let json = program.0.path().join("out.json");
    let plots = program.0.path().join("plots");
    let output = program.run(&[
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
    assert_eq!(output.status, Some(0), "{output:?}");
    assert!(
        output.out.contains("ib: not measured") && output.out.contains("No device found"),
        "{output:?}"
    );
    assert_eq!(
        output.out.matches("not measured").count(),
        1,
        "it is tried once: {output:?}"
    );
    let mut lines = output
        .out
        .lines()
        .skip_while(|line| !line.starts_with("        4096  spark "));
    assert!(lines.next().unwrap().contains("4.00..4.00"), "{output:?}");
    let socket = lines
        .find(|line| line.trim_start().starts_with("socket "))
        .unwrap();
    assert!(socket.ends_with(" 2.500"), "{output:?}");
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(report["networks"][0]["rounds"].as_array().unwrap().len(), 3);
    assert_eq!(report["networks"][0]["medians"][1]["busbw_gb_s"], 4.0);
    assert_eq!(
        report["networks"][0]["used"],
        "NET/Spark at 1 ends of channels"
    );
    assert!(
        report["networks"][1]["failure"]
            .as_str()
            .unwrap()
            .contains("No device found")
    );
    assert!(plots.join("all_gather_perf.svg").is_file());
}

#[test]
fn several_programs_and_size_ranges_run_in_one_command() {
    // `$2` is the smallest size and `$4` the largest. Over Socket, all_reduce is faster than over
    // this plugin, and all_gather is slower.
    let body = r#"
        log_channel "$NCCL_NET"; head
        case ${0##*/}:$NCCL_NET in all_reduce_perf:Socket) us=5 ;; *:Socket) us=20 ;; *) us=10 ;; esac
        row "$2" $us 0.10 0; row "$4" $us 0.20 0"#;
    let program = Program::new(body);
    fs::copy(
        program.0.path().join("all_gather_perf"),
        program.0.path().join("all_reduce_perf"),
    )
    .unwrap();
    let json = program.0.path().join("out.json");
    let tests = [
        "all_gather",
        "all_reduce",
        "--compare",
        "spark,socket",
        "--rounds",
        "1",
        "--sizes",
        "8-16,24-48",
    ];
    let output =
        program.run(&[&["-r", "1", "--json", json.to_str().unwrap()][..], &tests].concat());
    assert_eq!(output.status, Some(0), "{output:?}");
    let lines: Vec<&str> = output
        .out
        .lines()
        .filter(|line| line.starts_with("# slowest"))
        .collect();
    let expected = [
        "# slowest against socket: 2.00 at 8",
        "# slowest against socket: 0.50 at 8",
    ];
    assert_eq!(
        lines,
        [
            &expected[..],
            &["# slowest against socket: 0.50 at 8 of all_reduce_perf"]
        ]
        .concat(),
        "{output:?}"
    );
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let sizes = report[1]["networks"][0]["medians"]
        .as_array()
        .unwrap()
        .iter()
        .map(|point| point["bytes"].clone());
    assert_eq!(sizes.collect::<Vec<_>>(), [8, 16, 24, 48], "{report}");
    assert!(
        report[0]["program"]
            .as_str()
            .unwrap()
            .ends_with("all_gather_perf"),
        "{report}"
    );
}

#[test]
fn json_without_a_file_is_alone_on_standard_output() {
    let program = Program::new("log_channel Spark; head; row 8 13.2 0.1 0");
    let output = program.run(&["-r", "1", "--json", "all_gather"]);
    let report: serde_json::Value =
        serde_json::from_str(&output.out).unwrap_or_else(|_| panic!("{output:?}"));
    assert_eq!(
        (output.status, &report["networks"][0]["wrong"]),
        (Some(0), &0.0.into()),
        "{output:?}"
    );
    assert!(output.err.contains("spark: 0 wrong"), "{output:?}");
}

#[test]
fn nccls_own_verbs_transport_finds_the_software_fabric() {
    let body = r#"
        [ -n "$SOFTVERBS_FABRIC" ] && [ "$SOFTVERBS_NODE" = 0 ] || exit 7
        if [ "$NCCL_NET" = IB ]; then [ -f "${LD_LIBRARY_PATH%%:*}/libibverbs.so.1" ] && [ "$NCCL_IB_GID_INDEX" = 1 ] || exit 8; fi
        log_channel "$NCCL_NET"; head; row 8 10 0.10 0"#;
    let output = Program::new(body).run_over(
        "soft",
        &["-r", "1", "--compare", "spark,ib", "--rounds", "1"],
    );
    assert_eq!(output.status, Some(0), "{output:?}");
    assert!(
        output.out.contains("ib: 0 wrong") && !output.out.contains("not measured"),
        "{output:?}"
    );
}

#[test]
fn the_tuner_is_compared_in_rotating_order_with_a_control() {
    let body = r#"
        echo "$NCCL_NET:$NCCL_SPARK_TUNER" >> "${0%/*}/runs"; n=$(wc -l < "${0%/*}/runs")
        log_channel_counts 18; log_channel "$NCCL_NET"; head
        case $NCCL_SPARK_TUNER:$n in on:*) row 8 10 0.1 0 ;; off:[2-3]) row 8 20 0.1 0 ;; *) row 8 21 0.1 2 ;; esac"#;
    let program = Program::new(body);
    let json = program.0.path().join("out.json");
    let compare = [
        "--compare",
        "spark,spark-untuned",
        "--rounds",
        "2",
        "--json",
        json.to_str().unwrap(),
    ];
    let mut command = program.command("verbs", &["-r", "1"]);
    command.args(compare).env("NCCL_SPARK_TUNER", "on");
    let compared = run_command(command);
    let runs = fs::read_to_string(program.0.path().join("runs")).unwrap();
    // Round 1: spark, spark-untuned, control. Round 2: spark-untuned, control, spark.
    let expected = ["on", "off", "off", "off", "off", "on"].map(|tuner| format!("Spark:{tuner}"));
    assert_eq!(runs.lines().collect::<Vec<_>>(), expected, "{compared:?}");
    let lines = compared
        .out
        .lines()
        .skip_while(|line| !line.starts_with("           8  spark "));
    let ends: Vec<_> = lines
        .take(3)
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    assert_eq!(ends[1..], ["2.050", "1.000"], "{compared:?}");
    for part in [
        "time ratio: the line's time / that of spark;",
        "  control ",
        "# control: 4 WRONG",
        "# spark: 0 wrong",
        "# spark: 18 coll channels, 18 collnet channels",
    ] {
        assert!(compared.out.contains(part), "{part}: {compared:?}");
    }
    assert_eq!(
        compared.status,
        Some(1),
        "wrong data of the control counts: {compared:?}"
    );
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let names: Vec<_> = (0..3)
        .map(|at| report["networks"][at]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["spark", "spark-untuned", "control"]);
    assert_eq!(report["networks"][0]["channels"]["coll"], 18);
    assert_eq!(report["ratios"][0]["name"], "spark/spark-untuned");
    assert_eq!(report["ratios"][0]["points"][0]["time_ratio"], 2.05);
    assert_eq!(report["ratios"][1]["name"], "spark-untuned/control");
    assert_eq!(report["ratios"][1]["points"][0]["time_ratio"], 1.0);
}

#[test]
fn the_users_tuner_setting_reaches_nccl() {
    let program = Program::new(
        r#"echo "tuner: $NCCL_SPARK_TUNER."; log_channel_counts 18; log_channel Spark; head; row 8 10 0.1 0"#,
    );
    let tuner = |mut command: Command, set: Option<&str>| {
        set.map(|value| command.env("NCCL_SPARK_TUNER", value));
        let run = run_command(command);
        let line = run
            .out
            .lines()
            .find_map(|line| line.strip_prefix("tuner: "))
            .map(str::to_owned);
        line.unwrap_or_else(|| panic!("{run:?}"))
    };
    assert_eq!(tuner(program.command("verbs", &["-r", "1"]), None), ".");
    assert_eq!(
        tuner(program.command("verbs", &["-r", "1"]), Some("auto")),
        "auto."
    );
    let untuned = program.command("verbs", &["-r", "1", "--compare", "spark-untuned"]);
    assert_eq!(tuner(untuned, Some("on")), "off.");
}

#[test]
fn a_row_split_by_log_lines_is_rejoined() {
    let body = r#"
        log_channel Spark; head
        printf '     8388608       2097152     float     sum      -1'
        printf '\n[2026-11-21 03:45:10] h:1:2 [0] net.cc:4 NCCL WARN NET/Spark : rail lost\n'
        printf '   1234.5    6.80    6.80       0'; printf 'h:1:2 [0] NCCL INFO NET/Spark: rail is back\n'
        printf '   1230.2    6.82    6.82       0'; printf 'h:1:2 [0] NCCL INFO at the end\n\n'
        row 16777216 2400 6.9 0; echo '# Out of bounds values : 0 OK'"#;
    let run = Program::new(body).run(&["-r", "1"]);
    assert_eq!(run.status, Some(0), "{run:?}");
    let whole = "     8388608       2097152     float     sum      -1   1234.5    6.80    6.80       0   1230.2    6.82    6.82       0";
    assert!(
        run.out.lines().any(|line| line == whole) && run.out.contains("# spark: 0 wrong"),
        "{run:?}"
    );
    let body = "log_channel Spark; head; printf '   8   2   float   sum   -1'; printf '\\n\\n'; row 16 10 0.1 0";
    let run = Program::new(body).run(&["-r", "1"]);
    assert!(
        run.status == Some(1) && run.err.contains("row of 8 bytes was never completed"),
        "{run:?}"
    );
    let run = Program::new(
        "log_channel Spark; head; row 8 10 0.1 0; printf '   16   2   float   sum   -1'",
    )
    .run(&["-r", "1"]);
    assert!(
        run.status == Some(1) && run.err.contains("row of 16 bytes was never completed"),
        "{run:?}"
    );
}

#[test]
fn a_table_with_a_missing_row_is_rejected() {
    let body = r#"log_channel "$NCCL_NET"; head; row 8 10 0.1 0; [ "$NCCL_NET" = Socket ] || row 16 10 0.1 0"#;
    let run = Program::new(body).run(&["-r", "1", "--compare", "spark,socket", "--rounds", "1"]);
    assert!(
        run.out
            .contains("socket: not measured: its table has the sizes [8], an earlier one [8, 16]"),
        "{run:?}"
    );
}

#[test]
fn a_hanging_program_is_killed_after_the_timeout() {
    let output = Program::new("echo started; exec sleep 600").run(&["-r", "1", "-T", "1"]);
    assert!(
        output.status == Some(1) && output.err.contains("stopped after 1 s"),
        "{output:?}"
    );
}

#[test]
fn missing_programs_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let output = common::say(&[
        "nccl-tests",
        "alltoall",
        "--dir",
        folder.path().to_str().unwrap(),
    ]);
    assert!(
        output.status == Some(1) && output.err.contains("no alltoall_perf in"),
        "{output:?}"
    );
    let program = Program::new("");
    let file = program.0.path().join("all_gather_perf");
    fs::write(&file, "#!/bin/sh\n").unwrap();
    let output = program.run(&[]);
    assert!(
        output.status == Some(1) && output.err.contains("built without MPI"),
        "{output:?}"
    );
}

#[test]
fn each_mpirun_rank_has_its_own_host_id() {
    if !common::has_mpirun() {
        return;
    }
    let body = r##"echo "# I am $NCCL_HOSTID, device $NCCL_TESTS_DEVICE"; log_channel Spark; [ "$OMPI_COMM_WORLD_RANK" = 0 ] || exit 0; head; row 8 10 0.1 0"##;
    let program = Program::new(body);
    let log = program.0.path().join("log");
    let output = program.run(&["-r", "2", "--log", log.to_str().unwrap()]);
    assert_eq!(output.status, Some(0), "{output:?}");
    let hosts: Vec<&str> = output
        .out
        .lines()
        .filter_map(|line| line.strip_prefix("# I am nccl-spark-"))
        .collect();
    assert!(
        hosts.len() == 2
            && hosts[0] != hosts[1]
            && hosts.iter().all(|host| host.contains("device ")),
        "{output:?}"
    );
    assert!(
        output.out.contains("NET/Spark at 2 ends of channels"),
        "{output:?}"
    );
    assert!(
        fs::read_to_string(log)
            .unwrap()
            .contains("spark: h:1:2 [0] NCCL INFO Channel 00/0")
    );
}

#[test]
fn ranks_that_print_much_do_not_cut_the_table() {
    if !common::has_mpirun() {
        return;
    }
    // Both ranks print more than mpirun copies in one step.
    let body = r##"
        say() { yes "h:1:2 [0] NCCL INFO $1" | sed "$2"q; }
        [ "$OMPI_COMM_WORLD_RANK" = 0 ] || { say 'the other rank' 20000; exit 0; }
        log_channel Spark; head; n=8
        while [ $n -lt 108 ]; do
            printf '  %s   2   float   sum   -1' $n; say 'in the middle' 50; echo '  10.0  0.10  0.20  0  10.0  0.10  0.20  0'
            n=$((n + 1))
        done"##;
    let program = Program::new(body);
    let [json, log] = ["json", "log"].map(|name| program.0.path().join(name));
    let run = program.run(&[
        "-r",
        "2",
        "--json",
        json.to_str().unwrap(),
        "--log",
        log.to_str().unwrap(),
    ]);
    assert_eq!(run.status, Some(0), "{run:?}");
    let report: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    assert_eq!(
        report["networks"][0]["rounds"][0].as_array().unwrap().len(),
        100
    );
    assert_eq!(
        fs::read_to_string(log)
            .unwrap()
            .matches("spark: h:1:2 [0] NCCL INFO the other rank\n")
            .count(),
        20000
    );
}
