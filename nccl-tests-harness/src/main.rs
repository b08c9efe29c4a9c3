//! The command line `nccl-spark`.
//!
//! Exit status: 0 all is well, 1 a run failed or data was wrong, 2 the command line is wrong, 3 the
//! doctor found that the plugin does not work, 141 the output was closed, 130, 143 and 129 ended by
//! SIGINT (Ctrl-C), SIGTERM and SIGHUP.

use std::process::ExitCode;

fn main() -> ExitCode {
    nccl_tests_harness::nccl_spark()
}
