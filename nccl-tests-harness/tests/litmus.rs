//! Tests of `nccl-spark memory --litmus`, which looks for torn lines of NCCL's protocol LL128. A
//! line is 128 bytes long and ends with a flag. It is torn if a reader finds the new flag but old
//! data. The tests use a fake CUDA driver, and the real plugin or a fake one. Some tests plant torn
//! lines.

mod common;

use common::{Fakes, ProgramOutput, built, nccl_spark};
use serde_json::Value;

/// Returns the first two numbers of a result row: the number of lines, and the number of torn ones.
#[track_caller]
fn row(output: &ProgramOutput, name: &str) -> [u64; 2] {
    let start = format!("{name}  ");
    let row = output
        .out
        .lines()
        .find_map(|line| line.strip_prefix(&start))
        .unwrap_or_else(|| panic!("{name}: {output:?}"));
    let mut cells = row.split_whitespace().map(|cell| cell.parse().unwrap());
    [cells.next().unwrap(), cells.next().unwrap()]
}

const REMEDY: &str =
    "NCCL_PROTO=^LL128 on every rank (or NCCL_SPARK_LL128=0 where this plugin's tuner";

/// Runs the litmus test over the real plugin and the software fabric with a fake GPU. The memory
/// test that precedes it moves only 8 bytes. Returns None if the plugin is not built.
fn over_softverbs(arguments: &str) -> Option<ProgramOutput> {
    let plugin = built()?;
    let fakes = Fakes::new();
    let mut command = nccl_spark();
    command
        .args([
            "memory",
            "-b",
            "8",
            "--fabric",
            "soft",
            "--profile",
            "unpaced",
            "--plugin",
        ])
        .arg(plugin);
    command
        .args(arguments.split_whitespace())
        .env_remove("NCCL_IB_HCA")
        .env_remove("NCCL_SPARK_SYSFS");
    Some(
        command
            .env("LD_LIBRARY_PATH", fakes.folder())
            .output()
            .unwrap()
            .into(),
    )
}

#[test]
fn no_line_is_torn_over_the_software_fabric() {
    let Some(output) = over_softverbs("--litmus 2") else {
        return;
    };
    assert_eq!(output.status, Some(0), "{output:?}");
    for name in ["GPU to CPU", "NIC to GPU", "NIC to GPU, second load"] {
        let [lines, torn] = row(&output, name);
        assert!(lines > 20 && torn == 0, "{name}: {output:?}");
    }
    assert!(
        output.out.contains("not a NIC\n") && output.out.ends_with("# OK\n"),
        "{output:?}"
    );
}

#[test]
fn planted_lines_are_found_on_both_sides_of_the_software_fabric() {
    let Some(output) = over_softverbs("--litmus 2 --litmus-plant") else {
        return;
    };
    assert_eq!(output.status, Some(1), "{output:?}");
    for name in ["GPU to CPU", "NIC to GPU"] {
        let [lines, torn] = row(&output, name);
        assert!(torn > 0 && torn <= lines, "{name}: {output:?}");
    }
    assert!(
        output.out.contains("tears lines on purpose") && output.out.contains(REMEDY),
        "{output:?}"
    );
}

#[test]
fn gpus_store_and_load_lines() {
    let output = Fakes::new().run("--gpu 0 --receiver-gpu 1 -b 8 --litmus 1", "FAKE_GPUS=2");
    assert_eq!(output.status, Some(0), "{output:?}");
    assert!(
        output
            .out
            .contains("messages of 128 to 614400 bytes, written by GPU 0, read by GPU 1\n"),
        "{output:?}"
    );
    for name in ["GPU to CPU", "NIC to GPU", "NIC to GPU, second load"] {
        let [lines, torn] = row(&output, name);
        assert!(lines > 20 && torn == 0, "{name}: {output:?}");
    }
    assert!(
        !output.out.contains("the tool") && !output.out.contains("on purpose"),
        "{output:?}"
    );
    assert!(
        !output.err.contains("LEAK") && !output.err.contains("closed with memory"),
        "{output:?}"
    );
    let output = Fakes::new().run("-b 8", "");
    assert!(
        output.status == Some(0) && !output.out.contains("LL128"),
        "LL128 is reported without --litmus: {output:?}"
    );
    let output = Fakes::new().run("-b 8 --litmus 1", "FAKE_GPUS=0");
    assert!(
        output.status == Some(1) && output.err.contains("--litmus need a GPU: cuInit returned"),
        "{output:?}"
    );
}

#[test]
fn a_gpu_that_stores_or_counts_lines_wrongly_ends_the_test() {
    let fakes = Fakes::new();
    let output = fakes.run("-b 8 --litmus 1", "FAKE_SHORT_STORE=1");
    assert!(
        output
            .out
            .contains("GPU 0 stores 0x0 as word 0 of line 5 instead of 0x900000050"),
        "{output:?}"
    );
    assert!(
        output.status == Some(1) && output.out.contains("# FAILED: LL128: the test ended early"),
        "{output:?}"
    );
    let output = fakes.run("-b 8 --litmus 1", "FAKE_BLIND_LOAD=1");
    assert!(
        output.status == Some(1)
            && output
                .out
                .contains("GPU 0 counts Tally { lines: 266, torn: 0,"),
        "{output:?}"
    );
}

#[test]
fn a_gpu_that_tears_lines_is_found_by_the_processor() {
    let output = Fakes::new().run("-b 8 --litmus 1", "FAKE_TORN_STORE=1");
    assert_eq!(output.status, Some(1), "{output:?}");
    assert!(row(&output, "GPU to CPU")[1] > 0, "{output:?}");
    assert!(
        output
            .out
            .contains("TORN: new flag, old data in 16-byte pieces 2 of 0 to 7\n"),
        "{output:?}"
    );
    let output = Fakes::new().run("-b 8 --litmus 1 --litmus-plant", "");
    assert!(
        output.status == Some(1) && row(&output, "GPU to CPU")[1] > 0,
        "{output:?}"
    );
}

#[test]
fn lines_torn_by_the_network_are_counted_only_at_the_reader() {
    let output = Fakes::new().run("-b 8 --litmus 1", "FAKE_TORN=1");
    assert_eq!(output.status, Some(1), "{output:?}");
    for name in ["NIC to GPU", "NIC to GPU, second load"] {
        let ([_, stored], [lines, torn]) = (row(&output, "GPU to CPU"), row(&output, name));
        assert!(stored == 0 && torn > 0 && torn <= lines, "{output:?}");
    }
    assert!(
        output.out.contains("# NIC to GPU: ")
            && output
                .out
                .contains("in 16-byte pieces 0 1 2 3 of 0 to 7; NCCL does not use this load\n"),
        "{output:?}"
    );
    assert!(
        output.out.contains("# FAILED: LL128: ") && output.out.contains(REMEDY),
        "{output:?}"
    );
}

#[test]
fn lines_that_never_arrive_end_the_test() {
    let output = Fakes::new().run("-b 8 --litmus 30", "FAKE_STALE=5 FAKE_WAIT_MS=300");
    assert_eq!(output.status, Some(1), "{output:?}");
    assert!(
        output
            .out
            .contains("# LL128: lines that did not arrive at GPU 0: 256; the test ended early"),
        "{output:?}"
    );
    assert!(
        output
            .out
            .contains("# FAILED: LL128: lines that did not arrive: 256\n"),
        "{output:?}"
    );
}

#[test]
fn a_failed_optional_receive_ends_the_test_with_its_reason() {
    let output = Fakes::new().run("-b 8 --litmus 1", "FAKE_NO_OPTIONAL=1");
    assert_eq!(output.status, Some(1), "{output:?}");
    let reason = "NET/Fake: planted: no optional receives";
    assert!(
        output.out.contains(
            "# LL128: ended early: child process: message 0, Round { first: 0, lines: 1,"
        ),
        "{output:?}"
    );
    assert!(
        output.out.contains(reason)
            && output
                .out
                .contains("# FAILED: LL128: the test ended early: "),
        "{output:?}"
    );
}

#[test]
fn the_result_is_in_the_json() {
    let output = Fakes::new().run("-b 8 --litmus 1 --litmus-plant --json -", "");
    let json: Value = serde_json::from_str(&output.out).unwrap();
    let litmus = &json["litmus"];
    assert_eq!(
        (output.status, &json["ok"], &litmus["planted"]),
        (Some(1), &false.into(), &true.into()),
        "{output:?}"
    );
    assert!(
        litmus["fault"].as_str().unwrap().contains("TORN lines"),
        "{json}"
    );
    let found = &litmus["outcome"]["ran"];
    assert_eq!(found["written_by"], "GPU 0", "{json}");
    assert_eq!(
        found["sizes_bytes"],
        serde_json::json!([128, 512, 2048, 8064, 32_768, 131_072, 614_400])
    );
    let paths: Vec<_> = found["reads"]
        .as_array()
        .unwrap()
        .iter()
        .map(|read| read["path"].as_str().unwrap())
        .collect();
    assert_eq!(
        paths,
        [
            "writer_to_cpu",
            "nic_to_reader",
            "nic_to_reader_second_load"
        ]
    );
    assert!(
        found["reads"][0]["torn"].as_u64().unwrap() > 0
            && found["reads"][0]["lines_per_s"].as_f64().unwrap() > 0.0
    );
    let output = Fakes::new().run("-b 8 --json -", "");
    assert!(
        serde_json::from_str::<Value>(&output.out).unwrap()["litmus"].is_null(),
        "{output:?}"
    );
}
