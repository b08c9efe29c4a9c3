//! A C program drives the built library's network tables, as NCCL does: `tests/c/drive.c`.

mod abi;
mod common;

use abi::Header;
use common::CRun;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn without_a_verbs_library_every_call_fails_cleanly_and_the_warning_names_it() {
    let output = drive(&[("NCCL_IBVERBS_LIB", "libibverbs-not-there.so.1")]);
    assert!(
        output.text.contains("libibverbs-not-there.so.1"),
        "{}",
        output.text
    );
}

#[test]
fn without_a_device_every_call_fails_cleanly_and_a_warning_says_so() {
    let output = drive(&[("NCCL_IB_HCA", "=not-there")]);
    assert!(output.text.contains("init: "), "{}", output.text);
}

#[test]
fn details_reach_nccls_log_only_at_level_trace() {
    // `[5]` is NCCL's level TRACE. Each finalize without an init logs at this level.
    let detail = |level: &str| {
        let output = drive(&[("NCCL_IB_HCA", "=not-there"), ("NCCL_DEBUG", level)]);
        output
            .text
            .lines()
            .filter(|line| line.starts_with("[5] "))
            .count()
    };
    assert!(detail("trace") > 0);
    assert_eq!(detail("INFO"), 0);
}

#[test]
fn a_misspelt_setting_is_named() {
    let program = common::drive_program();
    let output = common::run_c_program(&program, &[], [("NCCL_SPARK_CONECT_TIMEOUT_S", "3")]);
    // The program expects ncclSystemError from the first init, as on a host without RDMA. A
    // misspelt setting gives another error, so the program fails.
    assert!(!output.success, "{}", output.text);
    assert!(
        output.text.contains("NCCL_SPARK_CONECT_TIMEOUT_S"),
        "{}",
        output.text
    );
}

#[test]
fn with_devices_data_moves_in_every_version() {
    if std::env::var("SPARK_TEST_RDMA").as_deref() != Ok("1") {
        return common::skip::skip("SPARK_TEST_RDMA=1 says that this machine has RDMA devices");
    }
    drive(&[("SPARK_TEST_RDMA", "1")]);
}

#[test]
fn the_example_moves_bytes() {
    let folder = std::env::current_exe()
        .unwrap()
        .ancestors()
        .nth(2)
        .unwrap()
        .join("examples");
    let program = folder.join("move_bytes");
    if !program.is_file() {
        return common::skip::missing(
            "examples/move_bytes.rs is not built: cargo build --examples",
        );
    }
    let (_, settings) = common::test_rails();
    let output = Command::new(program)
        .arg(common::plugin_library())
        .envs(settings)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .output();
    let output = output.unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1048576 bytes arrived"),
        "{output:?}"
    );
}

/// In v8, `*request` may be uninitialised when `irecv` is called. An optimiser may remove a read
/// whose value is not used, so CI names an unoptimised library (`SPARK_TEST_UNOPTIMISED_LIBRARY`).
#[test]
fn v8s_irecv_does_not_read_its_request_word() {
    let program = common::c_program("uninitialised", &["uninitialised.c", "log.c"]);
    let unoptimised = std::env::var_os("SPARK_TEST_UNOPTIMISED_LIBRARY").map(PathBuf::from);
    let library = unoptimised.unwrap_or_else(common::plugin_library);
    let (_, settings) = common::test_rails();
    let output = Command::new("valgrind")
        .args(["--quiet", "--error-exitcode=9", "--fair-sched=yes"])
        .args([program, library])
        .envs(settings)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .output();
    let Ok(output) = output else {
        return common::skip::missing("there is no valgrind");
    };
    assert!(
        output.status.success(),
        "{:?}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn the_library_exports_the_headers_tables_and_nothing_else() {
    let output = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(common::plugin_library())
        .output();
    let Ok(output) = output else {
        return common::skip::missing("there is no nm (binutils)");
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<_> = text
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    names.sort_unstable();
    let header = Header::read();
    let mut expected = header.tables();
    expected.sort_unstable();
    assert_eq!(names, expected);
}

fn drive(variables: &[(&str, &str)]) -> CRun {
    let output = common::run_c_program(&common::drive_program(), &[], variables.iter().copied());
    assert!(output.success, "{}", output.text);
    output
}
