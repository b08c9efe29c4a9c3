//! Reads the sources and keeps the rules of ARCHITECTURE.md: who may import whom (its table of rooms is what is enforced
//! here), where `unsafe`, the environment, locks and panics may be, and how long files and functions may get.
//!
//! It works on tokens, not on syntax trees: the rules are about names, and a syntax tree leaves macro bodies opaque.

mod cycles;
mod modules;
mod reading;
mod rooms;
mod scopes;
mod the_checker;
mod the_cycles;
mod tokens;

use cycles::check_cycles;
use reading::File;
use rooms::{Rooms, rooms};
use std::collections::BTreeSet;
use std::path::Path;

/// Lines of a file, lines of a function: what fits in a head, and on a screen and a half.
const MAX_FILE_LINES: usize = 600;
const MAX_FUNCTION_LINES: usize = 70;

/// Written by a tool, so of any length.
const GENERATED: &[&str] = &["verbs-sys/src/bindings.rs"];

/// Where `unsafe` may be, besides tests: C inward, C outward, CUDA's driver, the cell that hands a connection from one
/// thread to the other, buffers of NCCL's that sockets fill and send, the memory file of counters, the command line's loaded plugin, and the software fabric's C interface and shared memory.
const UNSAFE: &[&str] = &[
    "src/abi/",
    "src/verbs/",
    "src/rails/cuda.rs",
    "src/comm/datapath/try_cell.rs",
    "src/comm/streams/caller_memory.rs",
    "src/counters/memory.rs",
    "lab/src/communicators/nccl.rs",
    "nccl-tests-harness/src/net/",
    "nccl-tests-harness/src/gpu/cuda/",
    "softverbs/src/abi/",
    "softverbs/src/os/",
];

/// Where the process's environment may be read (a build script's is cargo's).
const ENVIRONMENT: &[&str] = &["src/config.rs", "nccl-tests-harness/src/program.rs", "softverbs/src/settings.rs"];

/// What runs for each message: no lock of ours.
const DATA_PATH: &[&str] = &["src/flow/", "src/comm/datapath/", "src/comm/streams/", "src/comm/endpoint.rs"];
const LOCKS: &[&str] = &["Mutex", "RwLock", "Condvar"];

/// Rooms that are pure state, and what would make them impure: input, output, clocks, threads.
const PURE: &[&str] = &["src/flow/", "src/tuner/", "src/wire/"];
const IMPURE: &[&str] = &[
    "std::fs",
    "std::io",
    "std::process",
    "std::thread",
    "std::os",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::net::TcpStream",
    "std::net::TcpListener",
    "std::net::UdpSocket",
    "libc",
    "nix",
    "socket2",
    "getrandom",
];

#[test]
fn the_sources_keep_the_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let architecture = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let mut sources = Vec::new();
    collect(root, root, &mut sources);
    assert!(sources.len() > 20, "only {} source files found under {}", sources.len(), root.display());
    let broken = check_all(&sources, &architecture);
    assert!(broken.is_empty(), "{} house rules broken:\n{}", broken.len(), broken.join("\n"));
}

fn collect(root: &Path, folder: &Path, sources: &mut Vec<(String, String)>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            // Build folders carry the tag that cargo leaves for back-up programs, whatever their name.
            if !name.starts_with('.') && name != "target" && !path.join("CACHEDIR.TAG").exists() {
                collect(root, &path, sources);
            }
        } else if name.ends_with(".rs") {
            let relative = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            sources.push((relative, std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Every broken rule as a line `path:line: what`.
fn check_all(sources: &[(String, String)], architecture: &str) -> Vec<String> {
    let rooms = rooms(architecture);
    let files: Vec<File> = sources.iter().map(|(path, text)| File::read(path, text)).collect();
    let test_files: BTreeSet<String> = files.iter().flat_map(|file| file.test_files.iter().cloned()).collect();
    let mut broken = Vec::new();
    for list in [GENERATED, UNSAFE, ENVIRONMENT, DATA_PATH, PURE] {
        for path in list.iter().filter(|path| !path.starts_with("softverbs/")) {
            if !files.iter().any(|file| within(&file.path, &[path])) {
                broken.push(format!("{path}: named in tests/house_rules, and there is no such file"));
            }
        }
    }
    for file in &files {
        let tests_only = test_files.contains(&file.path) || file.is_test_code();
        broken.extend(check_file(file, tests_only, &rooms).into_iter().map(|line| format!("{}:{line}", file.path)));
    }
    broken.extend(check_cycles(&files));
    broken
}

fn check_file(file: &File, tests_only: bool, rooms: &Rooms) -> Vec<String> {
    let mut broken = Vec::new();
    check_sizes(file, &mut broken);
    for token in &file.words {
        let word = token.text.as_str();
        if token.is_macro && ["todo", "unimplemented", "dbg"].contains(&word) {
            broken.push(format!("{}: `{word}!`", token.line));
        }
        if file.is_test_code() {
            continue;
        }
        if word == "unsafe" && !token.is_type && !within(&file.path, UNSAFE) {
            broken.push(format!("{}: `unsafe` has no place here", token.line));
        }
        if LOCKS.contains(&word) && within(&file.path, DATA_PATH) && !token.in_test {
            broken.push(format!("{}: `{word}` on the data path", token.line));
        }
        if !token.in_test && !tests_only && file.path.starts_with("src/") {
            if token.is_call && ["unwrap", "expect", "unwrap_err", "expect_err"].contains(&word) {
                broken.push(format!("{}: `{word}()` outside tests", token.line));
            }
            if token.is_macro && word == "panic" {
                broken.push(format!("{}: `panic!` outside tests", token.line));
            }
        }
    }
    for path in &file.paths {
        let text = path.segments.join("::");
        let exempt = file.is_test_code() || file.path.ends_with("build.rs");
        if !exempt && starts_with(&path.segments, "std::env") && !within(&file.path, ENVIRONMENT) {
            broken.push(format!("{}: `{text}`: only {} read the environment", path.line, ENVIRONMENT.join(" and ")));
        }
        if within(&file.path, PURE) && !path.in_test && IMPURE.iter().any(|name| starts_with(&path.segments, name)) {
            broken.push(format!("{}: `{text}` in a room that is pure state", path.line));
        }
        if !tests_only
            && !path.in_test
            && let Some(wrong) = rooms.wrong_import(&file.path, path)
        {
            broken.push(format!("{}: {wrong}", path.line));
        }
    }
    broken
}

fn check_sizes(file: &File, broken: &mut Vec<String>) {
    if GENERATED.contains(&file.path.as_str()) {
        return;
    }
    if file.lines >= MAX_FILE_LINES {
        broken.push(format!("{}: the file has {} lines; under {MAX_FILE_LINES} is the rule", file.lines, file.lines));
    }
    for function in &file.functions {
        let lines = function.last_line - function.first_line + 1;
        if lines >= MAX_FUNCTION_LINES {
            let (line, name) = (function.first_line, &function.name);
            broken.push(format!("{line}: `fn {name}` has {lines} lines; under {MAX_FUNCTION_LINES} is the rule"));
        }
    }
}

/// Whether `path` is one of `places`, or inside one that ends with a slash.
fn within(path: &str, places: &[&str]) -> bool {
    places.iter().any(|place| path == *place || (place.ends_with('/') && path.starts_with(place)))
}

fn starts_with(segments: &[String], prefix: &str) -> bool {
    let prefix: Vec<&str> = prefix.split("::").collect();
    segments.len() >= prefix.len() && segments.iter().zip(&prefix).all(|(a, b)| a == b)
}
