//! Visible skips of tests that cannot run here.

use std::io::Write;

/// Name of a variable that is set to `all` where a missing program is a failure, as in CI. The name
/// does not begin with `NCCL_SPARK_`, because the plugin refuses unknown names of that form.
const NEEDS: &str = "SPARK_TEST_NEEDS";

/// Skips this test because a program or a build is missing.
///
/// # Panics
/// With `SPARK_TEST_NEEDS=all`.
#[track_caller]
pub fn missing(what: &str) {
    let all = std::env::var(NEEDS).is_ok_and(|needs| needs == "all");
    assert!(!all, "{what}; {NEEDS}=all requires it");
    skip(what);
}

/// Prints that this test is skipped, directly to standard error: the output of the print macros is
/// shown only for failing tests.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let _ = writeln!(
        std::io::stderr(),
        "skipped: {}: {why}",
        thread.name().unwrap_or("a test")
    );
}
