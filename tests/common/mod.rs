//! What the tests over the C interface share: where the built library is, and a C compiler.
#![allow(dead_code, reason = "each test uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The library that cargo built for this test run, beside the test's own executable.
pub fn plugin_library() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    let candidates: Vec<PathBuf> =
        exe.ancestors().skip(1).take(2).map(|folder| folder.join("libnccl_net_spark.so")).collect();
    let built = candidates.iter().filter(|path| path.is_file()).max_by_key(|path| modified(path));
    built.unwrap_or_else(|| panic!("no library at {candidates:?}: run `cargo build` first")).clone()
}

/// A path of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Runs the C compiler (`CC`, or cc: Rust links with it already) with `-std=c11`, our header's folder, and `arguments`.
pub fn cc(arguments: &[&str]) -> Output {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(repository("include"))
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"))
}

/// Compiles C text without making anything of it. The error is what the compiler said.
pub fn compiles(text: &str, arguments: &[&str]) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a folder for C text");
    let source = folder.path().join("check.c");
    std::fs::write(&source, text).expect("C text written");
    let mut all = vec!["-fsyntax-only", source.to_str().expect("a plain path")];
    all.extend(arguments);
    let output = cc(&all);
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Builds `tests/c/drive.c` and returns the program's path, which stays the same: the test beds run it as well.
pub fn drive_program() -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("abi_drive");
    // Several tests may build at once: make it elsewhere and move it into place in one step.
    let own = program.with_extension(format!("{}-{:?}", std::process::id(), std::thread::current().id()));
    let sources = ["drive.c", "interface.c", "log.c", "with_device.c", "without_device.c"]
        .map(|name| repository("tests/c").join(name).to_str().expect("a plain path").to_owned());
    let mut arguments: Vec<&str> = sources.iter().map(String::as_str).collect();
    let own_text = own.to_str().expect("a plain path").to_owned();
    arguments.extend(["-g", "-O1", "-pthread", "-D_GNU_SOURCE", "-o", &own_text, "-ldl"]);
    let output = cc(&arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, &program).expect("the program in its place");
    program
}

fn modified(path: &Path) -> std::time::SystemTime {
    path.metadata().and_then(|data| data.modified()).unwrap_or(std::time::UNIX_EPOCH)
}

/// The settings of this process's environment that say which verbs library to use: a test gives its hosts settings of
/// its own, and runs on the kernel's stack or on the software fabric as it is told from outside.
pub fn verbs_library_settings() -> Vec<(String, String)> {
    let names = ["NCCL_IBVERBS_LIB", "NCCL_SPARK_SYSFS"];
    names.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?))).collect()
}
