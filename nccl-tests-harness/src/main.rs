//! The command line `nccl-spark`.
//!
//! Exit status: 0 success, 1 a run failed or data was wrong, 2 wrong command line, 3 the doctor
//! found that the plugin does not work, 141 output closed; 130, 143 and 129: SIGINT (Ctrl-C),
//! SIGTERM and SIGHUP.

use std::process::ExitCode;

fn main() -> ExitCode {
    nccl_tests_harness::nccl_spark()
}
