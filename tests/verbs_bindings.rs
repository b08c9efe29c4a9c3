//! The checked-in verbs bindings equal the output of bindgen for the headers, for both processors.
//!
//! The tests are skipped if libclang, its headers or libibverbs-dev are missing. The comparison for
//! the other processor also needs that processor's C headers (Debian and Ubuntu:
//! libc6-dev-arm64-cross, libc6-dev-amd64-cross).

#[path = "common/skip.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod skip;

use std::path::{Path, PathBuf};
use std::process::Command;

const CHECKED_IN: &str = include_str!("../verbs-sys/src/bindings.rs");
/// Version of the headers from which the bindings were made (rdma-core 44), in the notation of
/// libibverbs.pc.
const HEADERS: &str = "1.14.44";

#[test]
fn bindings_match_the_headers() {
    if let Some(regenerated) = regenerate(None) {
        compare(&regenerated);
    }
}

#[test]
fn bindings_are_the_same_for_the_other_processor() {
    let target = if cfg!(target_arch = "x86_64") {
        "aarch64-linux-gnu"
    } else {
        "x86_64-linux-gnu"
    };
    let own = Path::new("/usr/include").join(target);
    let cross = Path::new("/usr").join(target).join("include");
    let Some(headers) = [cross, own]
        .into_iter()
        .find(|folder| folder.join("bits/wordsize.h").exists())
    else {
        return skip(&format!("there are no C headers for {target}"));
    };
    let arguments = format!(
        "--target={target} -I{} -idirafter /usr/include",
        headers.display()
    );
    if let Some(regenerated) = regenerate(Some(&arguments)) {
        compare(&regenerated);
    }
}

#[test]
fn added_and_changed_header_lines_are_distinguished() {
    assert_eq!(first_line_not_in("a\nb\n", "a\nnew\nb\nnew\n"), None);
    assert_eq!(first_line_not_in("a\nb\n", "a\nchanged\n"), Some("b"));
    assert_eq!(first_line_not_in("a\nb\n", "b\na\n"), Some("b"));
}

fn compare(regenerated: &str) {
    if header_version().is_some_and(|version| version.starts_with(HEADERS)) {
        let differing = CHECKED_IN
            .lines()
            .zip(regenerated.lines())
            .find(|(old, new)| old != new);
        assert!(
            CHECKED_IN == regenerated,
            "first lines to differ, checked in and regenerated: {differing:#?}"
        );
    } else if let Some(missing) = first_line_not_in(CHECKED_IN, regenerated) {
        panic!(
            "the headers here (rdma-core {:?}) change what was {missing:?}",
            header_version()
        );
    }
}

/// Returns the first checked-in line that is missing or out of order in the regenerated text. Newer
/// headers may add to enums and structs in compatible ways. They never remove anything.
fn first_line_not_in<'a>(checked_in: &'a str, regenerated: &str) -> Option<&'a str> {
    let mut regenerated = regenerated.lines();
    checked_in
        .lines()
        .find(|line| !regenerated.any(|candidate| candidate == *line))
}

/// Returns the output of `verbs-sys/build.rs`, or `None`, with a message, if it cannot run.
fn regenerate(clang_arguments: Option<&str>) -> Option<String> {
    if !Path::new("/usr/include/infiniband/verbs.h").exists() {
        skip("infiniband/verbs.h is not there (libibverbs-dev)");
        return None;
    }
    if header_version().is_some_and(|version| older(&version)) {
        skip("the headers are older than rdma-core 44");
        return None;
    }
    if !libclang_exists() {
        skip("libclang is not there (libclang-dev; LIBCLANG_PATH names its folder)");
        return None;
    }
    // A new path each time, because cargo then runs the build script again.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let output = folder.path().join("bindings.rs");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.args([
        "check",
        "--quiet",
        "-p",
        "verbs-sys",
        "--features",
        "regenerate-bindings",
        "--target-dir",
    ]);
    cargo.arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("verbs_bindings"));
    cargo
        .env("VERBS_BINDINGS_OUTPUT", &output)
        .env_remove("BINDGEN_EXTRA_CLANG_ARGS");
    if let Some(arguments) = clang_arguments {
        cargo.env("BINDGEN_EXTRA_CLANG_ARGS", arguments);
    }
    let finished = cargo.output().expect("cargo runs");
    match std::fs::read_to_string(&output) {
        Ok(bindings) => Some(bindings),
        Err(_) => {
            let stderr = String::from_utf8_lossy(&finished.stderr);
            assert!(
                stderr.contains("file not found"),
                "the bindings were not made:\n{stderr}"
            );
            skip(&format!("libclang lacks headers:\n{stderr}"));
            None
        }
    }
}

fn skip(why: &str) {
    skip::skip(&format!("the bindings were not compared: {why}"));
}

fn header_version() -> Option<String> {
    let asked = Command::new("pkg-config")
        .args(["--modversion", "libibverbs"])
        .output()
        .ok()?;
    asked
        .status
        .success()
        .then(|| String::from_utf8_lossy(&asked.stdout).trim().to_owned())
}

fn older(version: &str) -> bool {
    let numbers = |text: &str| {
        text.split('.')
            .filter_map(|number| number.parse().ok())
            .collect::<Vec<u32>>()
    };
    numbers(version) < numbers(HEADERS)
}

/// Returns true if libclang is in one of the folders that bindgen searches.
fn libclang_exists() -> bool {
    let mut folders: Vec<PathBuf> = std::env::var_os("LIBCLANG_PATH")
        .map(PathBuf::from)
        .into_iter()
        .collect();
    folders.extend(["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(PathBuf::from));
    for entry in std::fs::read_dir("/usr/lib")
        .into_iter()
        .flatten()
        .flatten()
    {
        folders.extend([entry.path(), entry.path().join("lib")]);
    }
    let names = folders
        .into_iter()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
    names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .any(|name| {
            (name.starts_with("libclang.so") || name.starts_with("libclang-"))
                && !name.contains("cpp")
                && name.contains(".so")
        })
}
