//! Parts that the test programs share.
#![allow(dead_code, unsafe_code, reason = "each test uses a part")]

pub mod captured_log;
pub mod comms;
pub mod ends;
pub mod skip;

use host::counters::layout::{Counters, Direction, Record};
use host::port::PortState;
use nccl_net_spark::comm::Rail;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Lock for those tests of a program that must not run at the same time.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the library that cargo built for this test run, beside the test's own executable.
pub fn plugin_library() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    let candidates: Vec<PathBuf> = exe
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libnccl_net_spark.so"))
        .collect();
    let built = candidates
        .iter()
        .filter(|path| path.is_file())
        .max_by_key(|path| modified(path));
    built
        .unwrap_or_else(|| panic!("no library at {candidates:?}: run `{}`", build_command()))
        .clone()
}

/// Returns the command that builds everything for the tests, in the profile of this test.
pub fn build_command() -> &'static str {
    if cfg!(debug_assertions) {
        "cargo build"
    } else {
        "cargo build --release"
    }
}

pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Runs the C compiler with the project's headers. The variable `CC` may name the compiler;
/// otherwise it is cc, which Rust needs too.
pub fn cc(arguments: &[&str]) -> Output {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(repository("include"))
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{compiler}: {error}"))
}

/// Checks that C text compiles. The error contains the compiler's messages.
pub fn compiles(text: &str, arguments: &[&str]) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a folder for C text");
    let source = folder.path().join("check.c");
    std::fs::write(&source, text).expect("C text written");
    let mut all = vec!["-fsyntax-only", source.to_str().expect("a plain path")];
    all.extend(arguments);
    let output = cc(&all);
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// Builds `tests/c/drive.c`. The program's path is constant, because the test beds run it as well.
pub fn drive_program() -> PathBuf {
    c_program(
        "abi_drive",
        &[
            "drive.c",
            "interface.c",
            "log.c",
            "with_device.c",
            "without_device.c",
        ],
    )
}

pub fn c_program(name: &str, sources: &[&str]) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    // Built under another name and then renamed in one step, because several tests may build the
    // program at the same time.
    let own = program.with_extension(format!(
        "{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let path = |name: &&str| {
        repository("tests/c")
            .join(name)
            .to_str()
            .expect("a plain path")
            .to_owned()
    };
    let sources: Vec<String> = sources.iter().map(path).collect();
    let mut arguments: Vec<&str> = sources.iter().map(String::as_str).collect();
    let own_text = own.to_str().expect("a plain path").to_owned();
    arguments.extend([
        "-g",
        "-O1",
        "-pthread",
        "-D_GNU_SOURCE",
        "-o",
        &own_text,
        "-ldl",
    ]);
    let output = cc(&arguments);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::rename(&own, &program).expect("the program in its place");
    program
}

/// Output of a program from `tests/c`.
pub struct CRun {
    pub success: bool,
    /// Status, standard output, standard error.
    pub text: String,
}

/// Runs a program from `tests/c` with the plugin's library. The run is a success if the program
/// exits with status 0 and its last line on standard output is "done".
pub fn run_c_program<N, V>(
    program: &Path,
    arguments: &[&str],
    variables: impl IntoIterator<Item = (N, V)>,
) -> CRun
where
    N: AsRef<OsStr>,
    V: AsRef<OsStr>,
{
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(program)
        .arg(plugin_library())
        .args(arguments)
        .env_remove("SPARK_TEST_RDMA")
        .env_remove("NCCL_NET")
        .env("SPARK_TEST_VERBOSE", "1")
        .envs(variables)
        .output()
        .expect("the program runs");
    let stdout = String::from_utf8_lossy(&stdout);
    let text = format!("{status}\n{stdout}{}", String::from_utf8_lossy(&stderr));
    CRun {
        success: status.success() && stdout.ends_with("done\n"),
        text,
    }
}

fn modified(path: &Path) -> std::time::SystemTime {
    path.metadata()
        .and_then(|data| data.modified())
        .unwrap_or(std::time::UNIX_EPOCH)
}

/// Returns the devices of a test's two ends, in `NCCL_IB_HCA`'s notation, and the settings that the
/// plugin needs for these devices.
///
/// `SPARK_TEST_RAILS="A;B"` names devices of this machine (the test bed's are soft-RoCE). Otherwise
/// both ends run in one process, on one machine of the software fabric.
pub fn test_rails() -> TestRails {
    test_rails_of("unpaced")
}

/// Does the same as [`test_rails`], with another profile of the software fabric. `profile` is the
/// name of a built-in profile, or the text of one. Only the program's first call chooses the
/// profile: later calls return the same devices.
pub fn test_rails_of(profile: &str) -> TestRails {
    static RAILS: OnceLock<TestRails> = OnceLock::new();
    RAILS.get_or_init(|| choose_rails(profile)).clone()
}

pub fn fabric_library() -> PathBuf {
    let exe = std::env::current_exe().expect("the test's own path");
    let built = exe
        .ancestors()
        .nth(2)
        .expect("cargo's folder")
        .join("softverbs-ibverbs");
    assert!(
        built.exists(),
        "{} is not built: run `{}`",
        built.display(),
        build_command()
    );
    built
}

pub fn fabric_folder() -> PathBuf {
    let dir = std::env::temp_dir().join("spark-tests");
    sweep(&dir);
    dir
}

pub fn fabric_name() -> String {
    format!("test-{}", std::process::id())
}

/// Deletes the fabrics of test programs that have ended.
fn sweep(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // The number may be followed by a name, if a program has several fabrics.
        let pid = name
            .strip_prefix("test-")
            .and_then(|rest| rest.split('-').next())
            .unwrap_or_default();
        if !pid.is_empty() && !Path::new("/proc").join(pid).exists() {
            // Another test program may sweep at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

pub type TestRails = ([String; 2], Vec<(String, String)>);

fn choose_rails(profile: &str) -> TestRails {
    if let Ok(rails) = std::env::var("SPARK_TEST_RAILS") {
        let (a, b) = rails
            .split_once(';')
            .expect("SPARK_TEST_RAILS=\"a0,a1;b0,b1\" names both ends' devices");
        return ([a.to_owned(), b.to_owned()], Vec::new());
    }
    let built = fabric_library();
    let dir = fabric_folder();
    let fabric = fabric_name();
    let mut profile = profile.to_owned();
    if profile.contains('\n') {
        let file = dir.join(&fabric).join("wanted");
        std::fs::create_dir_all(dir.join(&fabric)).expect("the fabric's folder");
        std::fs::write(&file, &profile).expect("the profile");
        profile = file.display().to_string();
    }
    let sysfs = dir.join(&fabric).join("sys").display().to_string();
    let variables = [
        ("SOFTVERBS_DIR", dir.display().to_string()),
        ("SOFTVERBS_FABRIC", fabric),
        ("SOFTVERBS_PROFILE", profile),
        ("SOFTVERBS_NODE", "0".to_owned()),
    ];
    for (name, value) in variables {
        // SAFETY: called once, before the fabric reads its settings; no other code of this program
        // reads the environment.
        unsafe { std::env::set_var(name, value) };
    }
    let settings = [
        ("NCCL_IBVERBS_LIB", built.display().to_string()),
        ("NCCL_SPARK_SYSFS", sysfs),
    ];
    let rails = "rocep1s0f0,roceP2p1s0f0".to_owned();
    (
        [rails.clone(), rails],
        settings
            .map(|(name, value)| (name.to_owned(), value))
            .to_vec(),
    )
}

/// Time limit far above the duration of any test. A test that reaches it hangs.
pub const LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

pub fn until<T>(mut step: impl FnMut() -> Option<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        if let Some(done) = step() {
            return done;
        }
        assert!(begun.elapsed() < LIMIT, "it hangs");
    }
}

pub fn mix(number: u64) -> u64 {
    let state = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (state ^ state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 8
}

/// Fills a message with bytes that differ from those of messages with another seed.
pub fn fill(bytes: &mut [u8], seed: u64) {
    for (at, word) in bytes.chunks_mut(8).enumerate() {
        word.copy_from_slice(&mix(seed << 32 ^ at as u64).to_le_bytes()[..word.len()]);
    }
}

pub fn is_filled(bytes: &[u8], seed: u64) -> bool {
    bytes
        .chunks(8)
        .enumerate()
        .all(|(at, word)| *word == mix(seed << 32 ^ at as u64).to_le_bytes()[..word.len()])
}

/// Returns the number of bytes that each rail of a host has sent, from the counters that the host
/// publishes for other processes.
pub fn sent_bytes(host: &nccl_net_spark::comm::Host) -> Vec<u64> {
    let process = host.process();
    let records = records(host);
    let sent = |rail: String| {
        let is_of = |record: &&Record| record.rail == rail && record.direction == Direction::Send;
        records
            .iter()
            .filter(is_of)
            .map(|record| record.counts.bytes)
            .sum()
    };
    process.rails.iter().map(|rail| sent(rail.name())).collect()
}

pub fn records(host: &nccl_net_spark::comm::Host) -> Vec<Record> {
    let path = host.process().counting.path();
    let bytes = path
        .map(|path| std::fs::read(path).expect("the memory file"))
        .unwrap_or_default();
    Counters::parse(&bytes, &bytes)
        .map(|counters| counters.records)
        .unwrap_or_default()
}

/// Runs `act` while this process can open no more files. Restores the limit even after a panic,
/// because other tests of the process continue.
pub fn without_files<T>(act: impl FnOnce() -> T) -> T {
    let mut before = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call only writes the structure in its argument.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut before) };
    assert_eq!(result, 0);
    let _back = Limit(before);
    set_limit(libc::rlimit {
        rlim_cur: 0,
        ..before
    });
    act()
}

struct Limit(libc::rlimit);

impl Drop for Limit {
    fn drop(&mut self) {
        set_limit(self.0);
    }
}

fn set_limit(limit: libc::rlimit) {
    // SAFETY: the call only reads the structure in its argument.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

/// Returns true if the port is up. A device that does not answer counts as down.
pub fn is_up(rail: &Rail) -> bool {
    let port = rail.info.port;
    rail.device
        .query(move |context| context.port(port))
        .is_ok_and(|port| port.state == PortState::Active)
}
