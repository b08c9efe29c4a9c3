//! Tests of `nccl-spark memory`. One test uses the real plugin and this machine's GPUs, if any. The
//! others use a fake plugin and a fake CUDA driver; tests plant faults in these two.

mod common;

use common::{Fakes, ProgramOutput, built, nccl_spark};
use serde_json::Value;

/// Returns the cells of the table row of one kind of memory, from the column "registered" on.
/// Columns are two spaces apart.
fn row(output: &ProgramOutput, kind: &str) -> Vec<String> {
    let rows = output.out.lines().filter(|line| !line.starts_with('#'));
    let mut cells = rows.map(|line| {
        line.split("  ")
            .map(str::trim)
            .filter(|cell| !cell.is_empty())
    });
    let row = cells
        .find_map(|mut row| (row.next() == Some(kind)).then(|| row.map(str::to_owned).collect()));
    row.unwrap_or_else(|| panic!("no row {kind}: {output:?}"))
}

const PINNED: [&str; 2] = ["cudaHostAlloc", "cudaHostRegister"];

#[test]
fn gpus_write_and_check_every_kind_of_memory() {
    let output = Fakes::new().run("--gpu 0 --receiver-gpu 1 -b 100001", "FAKE_GPUS=2");
    assert_eq!(output.status, Some(0), "{output:?}");
    for kind in ["malloc", PINNED[0], PINNED[1], "cudaMallocManaged"] {
        assert_eq!(
            row(&output, kind),
            ["yes", "GPU 0", "GPU 1", "6 sizes to 100001", "0"],
            "{output:?}"
        );
    }
    // The fake plugin registers any address as host memory. The processor cannot read memory of
    // `cudaMalloc`, so that memory is registered but not moved.
    assert_eq!(
        row(&output, "cudaMalloc"),
        ["yes", "-", "-", "no", "-"],
        "{output:?}"
    );
    assert!(
        output
            .out
            .contains("# cudaMalloc: not moved: child process: a message of 8 bytes: "),
        "{output:?}"
    );
    assert_eq!(row(&output, "cudaMalloc, as CUDA")[0], "no", "{output:?}");
    assert!(output.out.contains(
        "as CUDA: not registered: regMr returned ncclInvalidUsage (5): NET/Fake: host memory only"
    ));
    assert!(
        output
            .out
            .contains("GPU 1: Fake 1, INTEGRATED=0 PAGEABLE_MEMORY_ACCESS=1")
            && output.out.ends_with("# OK\n")
    );
    assert!(
        !output.err.contains("LEAK") && !output.err.contains("closed with memory"),
        "{output:?}"
    );
}

#[test]
fn flipped_bytes_and_missing_messages_are_found() {
    let fakes = Fakes::new();
    let output = fakes.run("-b 4096", "FAKE_CORRUPT=2");
    assert_eq!(output.status, Some(1), "{output:?}");
    for kind in ["malloc", PINNED[0], PINNED[1], "cudaMallocManaged"] {
        assert_eq!(row(&output, kind).last().unwrap(), "1", "{output:?}");
        assert!(
            output
                .out
                .contains(&format!("# {kind}: 1 of 13 bytes WRONG, the first at 6\n")),
            "{output:?}"
        );
    }
    assert!(
        output
            .out
            .contains("# FAILED: malloc: 1 WRONG bytes; cudaHostAlloc: 1 WRONG bytes;"),
        "{output:?}"
    );
    // Without a GPU the processor checks the bytes. Every byte of a lost message is wrong.
    let output = fakes.run("-b 4096", "FAKE_GPUS=0 FAKE_STALE=4");
    assert_eq!(
        (output.status, row(&output, "malloc")[4].as_str()),
        (Some(1), "4096"),
        "{output:?}"
    );
    assert!(
        output
            .out
            .contains("# malloc: 4096 of 4096 bytes WRONG, the first at 0\n"),
        "{output:?}"
    );
}

#[test]
fn unavailable_memory_is_reported_and_required_kinds_must_register() {
    let fakes = Fakes::new();
    let output = fakes.run("-b 8", "FAKE_PAGEABLE=0 FAKE_MANAGED=0");
    assert_eq!(
        (output.status, &row(&output, "malloc")[1..3]),
        (Some(0), &["CPU".to_owned(), "CPU".to_owned()][..])
    );
    assert!(
        output
            .out
            .contains("# cudaMallocManaged: not tried: GPU 0 has no managed memory"),
        "{output:?}"
    );
    let output = fakes.run("-b 8", "FAKE_FREE=16000");
    assert_eq!(
        (output.status, row(&output, "cudaMallocManaged")[0].as_str()),
        (Some(0), "not tried"),
        "{output:?}"
    );
    assert!(
        output
            .out
            .contains("4112 bytes are more than a quarter of the 16000 bytes that GPU 0 has free"),
        "{output:?}"
    );
    let output = fakes.run("-b 8", "FAKE_GPUS=0");
    assert_eq!(output.status, Some(0), "{output:?}");
    assert!(
        output
            .out
            .contains("# cudaMalloc: not tried: cuInit returned CUDA_ERROR_NO_DEVICE"),
        "{output:?}"
    );
    let output = fakes.run("-b 8 --gpu 0", "FAKE_GPUS=0");
    assert!(
        output.status == Some(1) && output.err.contains("--gpu"),
        "{output:?}"
    );
    let output = fakes.run("-b 8 --receiver-gpu 2", "FAKE_GPUS=2");
    assert!(
        output.status == Some(1) && output.err.contains("GPU 2 not found: CUDA has 2"),
        "{output:?}"
    );
}

#[test]
fn a_gpu_that_fails_the_self_check_ends_the_run() {
    let fakes = Fakes::new();
    let output = fakes.run("-b 8", "FAKE_MISCOUNT=1");
    assert!(
        output.status == Some(1) && output.err.contains("GPU 0 counts Wrong { count: 0"),
        "{output:?}"
    );
    let output = fakes.run("-b 8", "FAKE_WRONG_PATTERN=1");
    assert!(
        output.status == Some(1)
            && output
                .err
                .contains("GPU 0 and the CPU wrote different patterns"),
        "{output:?}"
    );
    let output = fakes.run("-b 8", "FAKE_NO_PINNED=1");
    assert!(
        output.status == Some(1)
            && output
                .err
                .contains("cuMemHostAlloc returned CUDA_ERROR_OUT_OF_MEMORY"),
        "{output:?}"
    );
}

#[test]
fn a_message_that_never_completes_times_out() {
    let output = Fakes::new().run("-b 8 -T 1", "FAKE_GPUS=0 FAKE_LOSE=1");
    assert_eq!(output.status, Some(1), "{output:?}");
    assert!(
        output
            .out
            .contains("no progress for 1 s (--timeout): child process: moving 8 bytes of malloc"),
        "{output:?}"
    );
}

#[test]
fn the_result_is_printed_as_json() {
    let output = Fakes::new().run("-b 4096 --json -", "FAKE_CORRUPT=1");
    let json: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!(
        (output.status, &json["ok"], &json["command"]),
        (Some(1), &false.into(), &"memory".into()),
        "{output:?}"
    );
    assert_eq!(json["gpus"][1]["name"], "Fake 0");
    let kinds = json["kinds"].as_array().unwrap();
    assert_eq!(
        (kinds.len(), &kinds[1]["name"]),
        (6, &"cudaHostAlloc".into())
    );
    assert_eq!(kinds[1]["outcome"]["moved"]["messages"][0]["wrong"], 1);
    assert!(
        kinds[5]["outcome"]["refused"]["reason"]
            .as_str()
            .unwrap()
            .contains("host memory only"),
        "{json}"
    );
    assert!(
        output.err.contains("# FAILED: malloc"),
        "the table goes to standard error: {output:?}"
    );
}

/// The command succeeds. If this machine has no GPU, the command reports that, and CUDA's kinds of
/// memory are not tried.
#[test]
fn the_plugin_moves_all_available_memory_over_the_software_fabric() {
    let Some(plugin) = built() else { return };
    let mut command = nccl_spark();
    command
        .args([
            "memory",
            "--fabric",
            "soft",
            "--profile",
            "unpaced",
            "--plugin",
        ])
        .arg(plugin);
    let output: ProgramOutput = command
        .env_remove("NCCL_IB_HCA")
        .env_remove("NCCL_SPARK_SYSFS")
        .output()
        .unwrap()
        .into();
    assert_eq!(output.status, Some(0), "{output:?}");
    if !output.out.contains("# no GPU: ") {
        return;
    }
    assert_eq!(
        row(&output, "malloc"),
        ["yes", "CPU", "CPU", "7 sizes to 4194304", "0"],
        "{output:?}"
    );
    for kind in [
        PINNED[0],
        PINNED[1],
        "cudaMallocManaged",
        "cudaMalloc",
        "cudaMalloc, as CUDA",
    ] {
        assert_eq!(row(&output, kind)[0], "not tried", "{output:?}");
        assert!(
            output.out.contains(&format!("# {kind}: not tried: ")),
            "{output:?}"
        );
    }
}
