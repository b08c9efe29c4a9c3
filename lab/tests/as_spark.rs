//! `spark-lab as-spark`. A shell script in place of nccl-spark reads the graph and the variables
//! that NCCL would read.

mod common;

use common::{ProgramOutput, spark_lab};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// A script that runs `body`, and an nvidia-smi that prints `bus`. In `body`, `chose RUN NUMBER`
/// writes NCCL's line on channels into the log.
struct Script(tempfile::TempDir);

const HEAD: &str = r##"#!/bin/sh
all="$*"
while [ "$1" != --log ]; do shift; done
log=$2
chose() { echo "$1: h:1:2 [0] NCCL INFO $2 coll channels, $2 collnet channels, 0 nvls channels" >> "$log"; }
: > "$log"
"##;

impl Script {
    fn new(bus: &str, body: &str) -> Self {
        let script = Self(tempfile::tempdir().unwrap());
        for (name, text) in [
            ("run", format!("{HEAD}{body}\n")),
            ("nvidia-smi", format!("#!/bin/sh\necho {bus}\n")),
        ] {
            fs::write(script.file(name), text).unwrap();
            fs::set_permissions(script.file(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        script
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, options: &[&str], arguments: &str) -> ProgramOutput {
        self.run_with(options, arguments, None)
    }

    fn run_with(&self, options: &[&str], arguments: &str, tuner: Option<&str>) -> ProgramOutput {
        let mut command = spark_lab();
        command.env(
            "PATH",
            format!(
                "{}:{}",
                self.0.path().display(),
                std::env::var("PATH").unwrap()
            ),
        );
        command
            .env_remove("NCCL_SPARK_TUNER")
            .envs(tuner.map(|value| ("NCCL_SPARK_TUNER", value)));
        command
            .arg("as-spark")
            .args(options)
            .arg(self.file("run"))
            .args(arguments.split_whitespace());
        command.output().unwrap().into()
    }
}

const BUS: &str = "00000000:41:00.0";

#[test]
fn the_command_gets_a_sparks_graph_and_the_tuner() {
    let body = r#"
        for part in 0000:41:00.0 0002:01:00.1 '<net name="rocep1s0f1" speed="200000"/>' '<nvlink target="fffe:ff:ff.0"' \
            '<net name="spark-rails" speed="224054"/>'; do grep -q "$part" "$NCCL_TOPO_FILE" || exit 5; done
        echo "tuner $NCCL_SPARK_TUNER, words $all"; chose spark 18"#;
    let script = Script::new(BUS, body);
    let graph = script.run(&[], "--profile spark-2cable --scale 0.1 -- -b 8");
    assert_eq!(graph.status, Some(0), "{graph:?}");
    assert!(
        graph
            .out
            .starts_with("tuner on, words --profile spark-2cable --scale 0.1 --log /"),
        "{graph:?}"
    );
    assert!(graph.out.ends_with("/log -- -b 8\n"), "{graph:?}");
    let set = script.run_with(&[], "--profile spark-2cable", Some("auto"));
    assert!(
        set.status == Some(0) && set.out.starts_with("tuner auto,"),
        "{set:?}"
    );
    let scale = script.run(&[], "--profile spark-2cable --scale 0.5");
    assert!(
        scale.status == Some(2) && scale.err.contains("--scale 1, 0.25, 0.1 or 0.05"),
        "{scale:?}"
    );
    let gpus = Script::new("no devices; exit 9", body).run(&[], "--profile unpaced");
    assert!(
        gpus.status == Some(1) && gpus.err.contains("no devices"),
        "{gpus:?}"
    );
    let failed = Script::new(BUS, "chose spark 18; exit 7").run(&[], "--profile unpaced");
    assert_eq!(failed.status, Some(7), "{failed:?}");
}

#[test]
fn few_channels_fail_unless_they_are_allowed() {
    let few = Script::new(BUS, "chose spark 18; chose spark 8");
    let refused = few.run(&[], "--profile unpaced");
    assert_eq!(refused.status, Some(1), "{refused:?}");
    for part in [
        "chose 8 collective channels",
        "16 or more",
        "protocol",
        "--allow-few-channels",
    ] {
        assert!(refused.err.contains(part), "{part}: {refused:?}");
    }
    assert_eq!(
        few.run(&["--allow-few-channels"], "--profile unpaced")
            .status,
        Some(0)
    );
    // Over its own networks, NCCL may choose any number of channels.
    let others = Script::new(BUS, "chose ib 8; chose socket 2; chose spark 16")
        .run(&[], "--profile unpaced");
    assert_eq!(others.status, Some(0), "{others:?}");
    let silent = Script::new(BUS, "chose ib 18").run(&[], "--profile unpaced");
    assert!(
        silent.status == Some(1) && silent.err.contains("does not say how many"),
        "{silent:?}"
    );
    // A log that the command names is read and kept.
    let log = few.file("kept");
    let kept = few.run(&[], &format!("--profile unpaced --log {}", log.display()));
    assert!(
        kept.status == Some(1)
            && fs::read_to_string(log)
                .unwrap()
                .contains(" 8 coll channels"),
        "{kept:?}"
    );
}

/// The plugin announces the same device as the graph, with the same speed at every scale.
#[test]
fn a_sparks_graph_has_the_device_that_the_plugin_announces() {
    let Some(plugin) = common::built() else {
        return;
    };
    let script = Script::new(BUS, r#"cat "$NCCL_TOPO_FILE"; chose spark 18"#);
    for (profile, scale) in [
        ("spark-1cable", "1"),
        ("spark-1cable", "0.25"),
        ("spark-2cable", "1"),
        ("spark-2cable", "0.1"),
    ] {
        let mut command = common::programs::clean(&common::beside("nccl-spark"));
        command.args([
            "all-gather",
            "-r",
            "2",
            "-b",
            "8",
            "-e",
            "8",
            "-n",
            "1",
            "-w",
            "0",
            "--json",
            "-",
        ]);
        command
            .args(["--profile", profile, "--scale", scale, "--plugin"])
            .arg(&plugin);
        let real: ProgramOutput = command
            .env_remove("NCCL_IB_HCA")
            .env_remove("NCCL_SPARK_SYSFS")
            .output()
            .unwrap()
            .into();
        let report: serde_json::Value =
            serde_json::from_str(&real.out).unwrap_or_else(|_| panic!("{real:?}"));
        let network = &report["networks"][0];
        let device = network["device"].as_str().unwrap();
        let speed = network["speed_mbps"].as_u64().unwrap();
        let graph = script.run(&[], &format!("--profile {profile} --scale {scale}"));
        let net = format!("<nic><net name=\"{device}\" speed=\"{speed}\"/></nic>");
        assert!(
            graph.status == Some(0) && graph.out.contains(&net),
            "{net}: {graph:?}"
        );
    }
}
