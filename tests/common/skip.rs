//! Tests that cannot run here: they say so where it is seen, and fail where everything has to be there.

use std::io::Write;

/// Set to `all` where a missing program is a failure, as in CI. Not `NCCL_SPARK_*`: the plugin refuses names that it does not know.
const NEEDS: &str = "SPARK_TEST_NEEDS";

/// Says that this test does not run because a program or a build is missing.
///
/// # Panics
/// Where `SPARK_TEST_NEEDS=all` says that nothing may be missing.
#[track_caller]
pub fn missing(what: &str) {
    let all = std::env::var(NEEDS).is_ok_and(|needs| needs == "all");
    assert!(!all, "{what}; {NEEDS}=all says that it must be there");
    skip(what);
}

/// Says that this test does not run, on standard error itself: what the print macros write is shown for tests that fail alone.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", thread.name().unwrap_or("a test"));
}
