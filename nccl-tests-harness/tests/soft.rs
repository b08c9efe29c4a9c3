//! The plugin itself over the software fabric. Both are there once the whole workspace is built; these tests are for that,
//! and say so where they are not.

mod common;

use common::{Said, is_built, nccl_spark, plugin};
use serde_json::Value;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Enough for a hung test to be the program's fault and not the machine's.
const PATIENCE: Duration = Duration::from_secs(60);

fn start(arguments: &str) -> Child {
    let mut command = nccl_spark();
    command.args(arguments.split_whitespace());
    if !arguments.starts_with("fabric") {
        command.arg("--plugin").arg(plugin().expect("looked for before"));
    }
    command.env_remove("NCCL_IB_HCA").env_remove("NCCL_SPARK_SYSFS");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn run(arguments: &str) -> Said {
    start(arguments).wait_with_output().unwrap().into()
}

#[test]
fn every_collective_is_right_over_merged_rails() {
    if !is_built() {
        return;
    }
    for collective in ["all-gather", "all-reduce", "reduce-scatter", "broadcast", "alltoall", "sendrecv"] {
        let said = run(&format!("{collective} --fabric soft --profile unpaced -r 3 -b 16 -e 2M -f 256 -n 2 --json -"));
        assert_eq!(said.status, Some(0), "{collective}: {said:?}");
        let told: Value = serde_json::from_str(&said.out).unwrap();
        assert_eq!((&told["fabric"], &told["networks"][0]["name"]), (&"soft".into(), &"Spark".into()), "{told}");
        let rows = told["rows"].as_array().unwrap();
        assert!(rows.len() == 3 && rows.iter().all(|row| row["wrong"] == 0), "{collective}: {told}");
        let connected = told["connections"][1][0].as_str().unwrap();
        assert!(connected.contains("over 2 rails"), "{collective}: {connected}");
        assert!(said.err.contains("# fabric: soft, as asked"), "{collective}: {said:?}");
    }
}

#[test]
fn a_rail_is_slowed_while_a_job_runs_and_nothing_stays_behind() {
    if !is_built() {
        return;
    }
    let name = format!("test-{}", std::process::id());
    let job = format!("all-gather --fabric-name {name} --scale 0.02 -b 4M -e 4M -n 60 -w 0 --slow-rail rocep1s0f0=0.5");
    let mut job = start(&job);
    let slow = |rail: &str| run(&format!("fabric slow {rail} 0.25 --fabric-name {name}"));
    let deadline = Instant::now() + PATIENCE;
    let told = loop {
        let told = slow("1:roceP2p1s0f0");
        if told.status == Some(0) || Instant::now() > deadline || job.try_wait().unwrap().is_some() {
            break told;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(told.out, format!("{name}: roceP2p1s0f0 of node 1 is at 0.25 of its rate\n"), "{told:?}");
    let wrong = slow("*:mlx5_9");
    assert!(wrong.status == Some(1) && wrong.err.contains("mlx5_9"), "{wrong:?}");
    let said = Said::from(job.wait_with_output().unwrap());
    assert!(said.status == Some(0) && said.out.contains("rocep1s0f0 at 0.5 of its rate"), "{said:?}");
    let gone = slow("*:rocep1s0f0");
    assert!(gone.status == Some(1) && gone.err.contains(&name), "{gone:?}");
}
