//! `nccl-spark top` shows valid and hostile counters that the test writes, and the counters of a
//! real job.

mod common;

use common::{ProgramOutput, built, is_built, nccl_spark, skip};
use host::counters::layout::{
    FILE_BYTES, FILE_NAME, HEADER_WORDS, HeaderWord, MAGIC, RECORD_WORDS, RECORDS, VERSION, Word,
    text_words,
};
use nix::pty::{Winsize, openpty};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{self, Signal};
use nix::sys::termios::tcgetattr;
use nix::unistd::Pid;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any delay of the machine: only a hung program exceeds it.
const PATIENCE: Duration = Duration::from_secs(60);

/// An idle process that has a counters file open as its standard input.
struct FakeJob {
    child: Child,
    file: File,
}

impl FakeJob {
    /// Makes a process whose counters file has this size and no header.
    fn sized(bytes: u64) -> Self {
        let file = File::from(memfd_create(FILE_NAME, MFdFlags::MFD_CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        let mut command = Command::new("sleep");
        command
            .arg("600")
            .env("RANK", "3")
            .env("SLURM_PROCID", "9")
            .stdin(file.try_clone().unwrap());
        Self {
            child: command.spawn().unwrap(),
            file,
        }
    }

    /// Makes a process whose counters file has a valid header and two records. The first record is
    /// of a rail that sends to spark-b, the second is of the same rail receiving from spark-b.
    fn new() -> Self {
        let fake = Self::sized(FILE_BYTES as u64);
        for index in 0..2 {
            fake.set(index, Word::State, 1);
            fake.set(index, Word::Direction, index as u64 + 1);
            fake.set(index, Word::Connection, index as u64 + 1);
            fake.set(index, Word::BitsPerS, 112_000_000_000);
            fake.text(index, Word::Rail, "rocep1s0f0:1");
            fake.text(index, Word::PeerRail, "rocep1s0f0:1");
            fake.text(index, Word::Peer, "spark-b");
            fake.set(index, Word::Sequence, 2);
        }
        fake.header(HeaderWord::Version, VERSION);
        fake.header(HeaderWord::HeaderWords, HEADER_WORDS as u64);
        fake.header(HeaderWord::RecordWords, RECORD_WORDS as u64);
        fake.header(HeaderWord::Records, RECORDS as u64);
        fake.header(HeaderWord::Used, 2);
        fake.header(HeaderWord::ProcessId, u64::from(fake.child.id()));
        fake.header(HeaderWord::Magic, MAGIC);
        fake
    }

    fn word(&self, at: usize, value: u64) {
        self.file
            .write_all_at(&value.to_ne_bytes(), at as u64 * 8)
            .unwrap();
    }

    fn header(&self, word: HeaderWord, value: u64) {
        self.word(word as usize, value);
    }

    fn set(&self, index: usize, word: Word, value: u64) {
        self.word(HEADER_WORDS + index * RECORD_WORDS + word as usize, value);
    }

    fn text(&self, index: usize, word: Word, text: &str) {
        for (at, value) in text_words::<4>(text).into_iter().enumerate() {
            self.word(
                HEADER_WORDS + index * RECORD_WORDS + word as usize + at,
                value,
            );
        }
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn top(&self, arguments: &[&str]) -> Command {
        let mut command = nccl_spark();
        command
            .args(["top", "--interval", "0.1", "--pid", &self.pid()])
            .args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> ProgramOutput {
        self.top(arguments).output().unwrap().into()
    }
}

impl Drop for FakeJob {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Running(Child);

impl Running {
    fn signal(&self, signal: Signal) {
        signal::kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), signal).unwrap();
    }

    fn ended(&mut self) -> std::process::ExitStatus {
        wait_for("the program's end", || self.0.try_wait().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "still waiting for {what} after {} s",
            PATIENCE.as_secs()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

#[test]
fn rates_are_differences_of_two_readings() {
    let fake = FakeJob::new();
    fake.set(0, Word::Bytes, 5_000);
    let mut command = fake.top(&["--json"]);
    let mut top = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(top.0.stdout.take().unwrap())
        .lines()
        .map(|line| json(&line.unwrap()));
    let first = lines.next().unwrap();
    assert_eq!(first["jobs"][0]["sent"]["bytes_per_s"], 0.0, "{first}");
    fake.set(0, Word::TimedWrites, 4);
    fake.set(0, Word::TimedNs, 20_000);
    fake.set(0, Word::Bytes, 1_005_000);
    let second = lines
        .find(|look| look["jobs"][0]["sent"]["bytes_per_s"] != 0.0)
        .unwrap();
    let job = &second["jobs"][0];
    let rate = job["sent"]["bytes_per_s"].as_f64().unwrap();
    let interval = job["interval_s"].as_f64().unwrap();
    assert!((rate * interval - 1_000_000.0).abs() < 1.0, "{second}");
    assert_eq!(
        (&job["pid"], &job["rank"], &job["command"]),
        (&fake.child.id().into(), &3.into(), &"sleep".into())
    );
    let rail = &job["rails"][0];
    assert_eq!(
        (&rail["rail"], &rail["sent"]["share_percent"]),
        (&"rocep1s0f0:1".into(), &100.0.into()),
        "{second}"
    );
    assert_eq!(
        (&rail["sent"]["bytes"], &rail["mean_latency_us"]),
        (&1_005_000.into(), &5.0.into()),
        "{second}"
    );
    // The rail is lost in the direction from spark-b.
    fake.set(1, Word::Losses, 1);
    fake.set(1, Word::State, 2);
    let third = lines
        .find(|look| look["jobs"][0]["rails"][0]["condition"] != "good")
        .unwrap();
    let rail = &third["jobs"][0]["rails"][0];
    assert_eq!(
        (&rail["condition"], &rail["received"]["carrying"]),
        (&"lost".into(), &0.into()),
        "{third}"
    );
    assert_eq!(
        (&rail["losses"], &rail["sent"]["carrying"]),
        (&1.into(), &1.into()),
        "{third}"
    );
    top.signal(Signal::SIGTERM);
    assert_eq!(top.ended().code(), Some(143));
}

#[test]
fn plain_lines_are_a_table_and_quiet_ones_have_no_remarks() {
    let fake = FakeJob::new();
    let output = fake.run(&["--count", "2", "--peers", "-q"]);
    let rows: Vec<Vec<&str>> = output
        .out
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(
        (output.status, output.err.as_str(), rows.len()),
        (Some(0), "", 6),
        "{output:?}"
    );
    let expected = [
        ["all", "all"],
        ["spark-b", "all"],
        ["spark-b", "rocep1s0f0:1"],
    ];
    for (row, names) in rows.iter().zip(expected.iter().cycle()) {
        assert_eq!(
            (row[0], row[1], row[2], &row[3..5]),
            (fake.pid().as_str(), "3", "sleep", &names[..]),
            "{output:?}"
        );
    }
    let output = fake.run(&["--count", "1"]);
    assert!(
        output.out.starts_with("# 20") && output.out.contains(" UTC: 1 job\n#"),
        "{output:?}"
    );
}

#[test]
fn hostile_contents_are_skipped_with_a_message() {
    let reason_shown_for = |fake: &FakeJob| {
        let output = fake.run(&["--count", "1"]);
        assert_eq!(
            (output.status, output.err.as_str()),
            (Some(0), ""),
            "{output:?}"
        );
        let prefix = format!("# process {}: ", fake.pid());
        output
            .out
            .lines()
            .find_map(|line| line.strip_prefix(&prefix))
            .unwrap_or_default()
            .to_owned()
    };
    assert_eq!(
        reason_shown_for(&FakeJob::sized(4096)),
        format!("its counters: 4096 bytes instead of {FILE_BYTES}")
    );
    assert_eq!(
        reason_shown_for(&FakeJob::sized(FILE_BYTES as u64)),
        "its counters: the file has no valid header"
    );
    let fake = FakeJob::new();
    fake.header(HeaderWord::Version, 2);
    assert_eq!(
        reason_shown_for(&fake),
        "its counters: layout 2; this program reads layout 1"
    );
    fake.header(HeaderWord::Version, VERSION);
    fake.header(HeaderWord::Used, u64::MAX);
    assert_eq!(
        reason_shown_for(&fake),
        "its counters: its header contradicts its layout"
    );
    let missing: ProgramOutput = nccl_spark()
        .args(["top", "-n1", "-i0.1", "--pid", "4194304"])
        .output()
        .unwrap()
        .into();
    let expected = "nccl-spark: --pid 4194304: there is no such process\n";
    assert_eq!(
        (missing.status, missing.out.as_str(), missing.err.as_str()),
        (Some(2), "", expected)
    );
    let none: ProgramOutput = nccl_spark()
        .args(["top", "-n1", "-i0.1", "--pid", "1"])
        .output()
        .unwrap()
        .into();
    assert!(
        none.out.contains("# process 1: it has no counters file\n")
            || none.out.contains("another user"),
        "{none:?}"
    );
}

/// While `top` runs, the test keeps overwriting every word of two records with random values. `top`
/// must not panic, nor print text that a terminal could interpret as a command.
#[test]
fn random_counters_neither_end_top_nor_reach_the_terminal() {
    let fake = FakeJob::new();
    let mut command = fake.top(&["--peers", "--count", "15"]);
    let mut top = Running(
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut random = 1_u64;
    while top.0.try_wait().unwrap().is_none() {
        for word in 0..2 * RECORD_WORDS {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // The first three words of a record are its sequence, its state and its direction.
            // Small even values make valid records frequent enough.
            let value = if word % RECORD_WORDS < 3 {
                random >> 62 << 1
            } else {
                random
            };
            fake.word(HEADER_WORDS + word, value);
        }
    }
    let mut text = Vec::new();
    top.0.stdout.take().unwrap().read_to_end(&mut text).unwrap();
    assert!(top.ended().success());
    assert!(
        text.iter()
            .all(|byte| byte.is_ascii_graphic() || b" \n".contains(byte)),
        "{}",
        String::from_utf8_lossy(&text)
    );
}

#[test]
fn an_ended_process_is_gone_at_the_next_reading() {
    let fake = FakeJob::new();
    let mut command = fake.top(&["--json"]);
    let mut top = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(top.0.stdout.take().unwrap())
        .lines()
        .map(|line| json(&line.unwrap()));
    assert_eq!(lines.next().unwrap()["jobs"].as_array().unwrap().len(), 1);
    let pid = fake.child.id();
    drop(fake);
    let gone = lines
        .find(|look| look["jobs"].as_array().unwrap().is_empty())
        .unwrap();
    assert_eq!(
        gone["passed_over"][0],
        serde_json::json!({"pid": pid, "reason": "there is no such process"})
    );
}

#[test]
fn missing_permissions_are_reported_with_the_advice_to_use_sudo() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.path().join("nccl-spark");
    fs::copy(env!("CARGO_BIN_EXE_nccl-spark"), &program).unwrap();
    // Process 1 is root's, and this program runs as another user.
    let mut command = if nix::unistd::geteuid().is_root() {
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
            .arg(&program);
        command
    } else {
        Command::new(&program)
    };
    let output: ProgramOutput = command
        .args(["top", "-n1", "-i0.1", "--pid", "1"])
        .output()
        .unwrap()
        .into();
    assert!(
        output
            .out
            .contains("# 1 process of another user cannot be read: run with sudo\n"),
        "{output:?}"
    );
}

fn promtool(file: &Path) -> Option<ProgramOutput> {
    let mut command = Command::new("promtool");
    command
        .args(["check", "metrics"])
        .stdin(File::open(file).unwrap());
    match command.output() {
        Ok(output) => Some(output.into()),
        Err(_) => {
            skip::missing("there is no promtool (Debian's prometheus)");
            None
        }
    }
}

#[test]
fn promtool_accepts_the_file_and_only_count_leaves_it_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("spark.prom");
    let file = path.to_str().unwrap();
    let fake = FakeJob::new();
    fake.set(0, Word::Bytes, 123_456_789);
    fake.text(0, Word::Rail, "r\"\\{}");
    let output = fake.run(&["--count", "1", "--prometheus", file]);
    assert_eq!(output.status, Some(0), "{output:?}");
    let text = fs::read_to_string(&path).unwrap();
    let expected = format!(
        "{{command=\"sleep\",pid=\"{}\",rank=\"3\",rail=\"r\\\"\\\\{{}}\",peer=\"spark-b\"}} 123456789\n",
        fake.pid()
    );
    assert!(
        text.contains(&format!("nccl_spark_rail_sent_bytes_total{expected}")),
        "{text}"
    );
    assert_eq!(
        fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
        0o644
    );
    if let Some(output) = promtool(&path) {
        assert_eq!(
            (output.status, output.out.as_str(), output.err.as_str()),
            (Some(0), "", ""),
            "{text}"
        );
        // promtool does report faults, for example a metric without its help.
        fs::write(
            folder.path().join("wrong"),
            text.replacen("# HELP nccl_spark_jobs ", "# ", 1),
        )
        .unwrap();
        assert_ne!(
            promtool(&folder.path().join("wrong")).unwrap().status,
            Some(0)
        );
        fs::remove_file(folder.path().join("wrong")).unwrap();
    }
    // `top` removes its file when SIGTERM ends it.
    let mut top = Running(
        fake.top(&["--prometheus", file])
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let inode = |path: &Path| {
        fs::metadata(path)
            .ok()
            .map(|metadata| std::os::unix::fs::MetadataExt::ino(&metadata))
    };
    let old = inode(&path);
    wait_for("another file", || (inode(&path) != old).then_some(()));
    top.signal(Signal::SIGTERM);
    assert_eq!(top.ended().code(), Some(143));
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
}

#[test]
fn wrong_options_are_one_clear_error() {
    let output = common::say(&["top", "--prometheus", "/tmp/x.txt"]);
    assert_eq!(
        (output.status, output.err.lines().count()),
        (Some(2), 1),
        "{output:?}"
    );
    assert!(
        output.err.contains("--prometheus <FILE>") && output.err.contains("must end in .prom"),
        "{output:?}"
    );
    let output = common::say(&[
        "top",
        "--count",
        "1",
        "--prometheus",
        "/no/such/folder/x.prom",
    ]);
    assert!(
        output.status == Some(1)
            && output
                .err
                .starts_with("nccl-spark: --prometheus /no/such/folder/x.prom: "),
        "{output:?}"
    );
    for (arguments, allowed) in [
        (["--interval", "0.05"], "must be 0.1 to 3600 seconds"),
        (["--interval", "5s"], "must be 0.1 to 3600 seconds"),
        (["--count", "0"], "must be at least 1"),
        (["--pid", "x"], "must be a whole number"),
    ] {
        let output = common::say(&["top", arguments[0], arguments[1]]);
        assert!(
            output.status == Some(2) && output.err.contains(allowed),
            "{arguments:?}: {output:?}"
        );
    }
}

/// A killed `top` leaves at most its Prometheus file and one temporary file. A hundred `top`s at a
/// time leave the process running and its counters file unchanged in size.
#[test]
fn killed_tops_leave_at_most_two_files_and_a_hundred_do_not_disturb_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let mut fake = FakeJob::new();
    let path = folder.path().join("spark.prom");
    let mut top = Running(
        fake.top(&["--prometheus", path.to_str().unwrap()])
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    wait_for("the file", || path.exists().then_some(()));
    top.0.kill().unwrap();
    assert_eq!(top.ended().signal(), Some(9));
    let names: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let others: Vec<_> = names.iter().filter(|name| *name != "spark.prom").collect();
    assert!(
        others.len() <= 1 && others.iter().all(|name| name.ends_with(".tmp")),
        "{names:?}"
    );
    let before = fs::metadata(format!("/proc/{}/fd/0", fake.pid()))
        .unwrap()
        .len();
    let readers: Vec<_> = (0..100)
        .map(|_| {
            Running(
                fake.top(&["--json", "-n1"])
                    .stdout(Stdio::piped())
                    .spawn()
                    .unwrap(),
            )
        })
        .collect();
    for mut reader in readers {
        let mut text = String::new();
        reader
            .0
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert!(reader.ended().success());
        assert_eq!(json(&text)["jobs"][0]["pid"], fake.child.id(), "{text}");
    }
    assert!(fake.child.try_wait().unwrap().is_none());
    assert_eq!(
        fs::metadata(format!("/proc/{}/fd/0", fake.pid()))
            .unwrap()
            .len(),
        before
    );
}

/// Runs `top` on a terminal of its own until `end` makes `top` end. Checks that `top` draws on the
/// terminal, and restores it at the end. Returns the exit status and the output of `top`.
fn on_a_terminal(end: impl FnOnce(&mut File, &Running)) -> (std::process::ExitStatus, String) {
    let fake = FakeJob::new();
    let size = Winsize {
        ws_row: 24,
        ws_col: 100,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let pty = openpty(&size, None).unwrap();
    let before = tcgetattr(&pty.slave).unwrap();
    let side = || Stdio::from(pty.slave.try_clone().unwrap());
    let mut command = fake.top(&[]);
    let mut top = Running(
        command
            .stdin(side())
            .stdout(side())
            .stderr(side())
            .env("TERM", "xterm")
            .spawn()
            .unwrap(),
    );
    drop(command);
    let mut master = File::from(pty.master);
    let mut reader = master.try_clone().unwrap();
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let shared = std::sync::Arc::clone(&seen);
    let thread = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        // Reading fails with EIO once no process has the other side open.
        while let Ok(count @ 1..) = reader.read(&mut bytes) {
            shared.lock().unwrap().extend_from_slice(&bytes[..count]);
        }
    });
    let text = || String::from_utf8_lossy(&seen.lock().unwrap()).into_owned();
    wait_for("the job's row", || text().contains("sleep").then_some(()));
    assert!(
        tcgetattr(&pty.slave).unwrap().local_flags != before.local_flags,
        "top left echo on"
    );
    end(&mut master, &top);
    let status = top.ended();
    let after = tcgetattr(&pty.slave).unwrap();
    assert_eq!(
        (after.local_flags, after.input_flags),
        (before.local_flags, before.input_flags)
    );
    drop(pty.slave);
    thread.join().unwrap();
    let text = text();
    let last = |code: &str| {
        text.rfind(code)
            .unwrap_or_else(|| panic!("no {code:?} in {text:?}"))
    };
    assert!(
        last("\x1b[?1049h") < last("\x1b[?1049l") && last("\x1b[?25l") < last("\x1b[?25h"),
        "{text:?}"
    );
    (status, text)
}

#[test]
fn the_terminal_is_restored_after_a_key_and_after_a_signal() {
    let (status, text) = on_a_terminal(|keys, _| keys.write_all(b"q").unwrap());
    assert!(
        status.success() && text.contains("nccl-spark top: 1 job"),
        "{text:?}"
    );
    let (status, _) = on_a_terminal(|keys, _| keys.write_all(b"\x03").unwrap());
    assert!(status.success());
    let (status, _) = on_a_terminal(|_, top| top.signal(Signal::SIGTERM));
    assert_eq!(status.code(), Some(143));
}

struct Job {
    dir: tempfile::TempDir,
    ranks: Vec<u64>,
    rails: Vec<String>,
    _job: Running,
}

impl Job {
    fn start(options: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = nccl_spark();
        command.args([
            "all-gather",
            "--fabric",
            "soft",
            "-b",
            "4M",
            "-e",
            "4M",
            "-n",
            "4000000000",
            "-w",
            "0",
        ]);
        command
            .args(options.split(' '))
            .arg("--plugin")
            .arg(built().expect("is_built() was checked first"));
        command
            .env("SOFTVERBS_DIR", dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut job = Running(command.spawn().unwrap());
        let nodes = wait_for("the ranks", || {
            assert!(job.0.try_wait().unwrap().is_none(), "the job ended");
            let nodes = fabric(dir.path(), "status --json -")["fabrics"][0]["nodes"]
                .as_array()?
                .clone();
            let all = nodes
                .iter()
                .all(|node| node["pids"].as_array().is_some_and(|pids| pids.len() == 1));
            (nodes.len() == 2 && all).then_some(nodes)
        });
        let ranks = nodes
            .iter()
            .map(|node| node["pids"][0].as_u64().unwrap())
            .collect();
        let rails = nodes[0]["rails"].as_array().unwrap().iter();
        let rails = rails
            .map(|rail| rail["device"].as_str().unwrap().to_owned())
            .collect();
        Self {
            dir,
            ranks,
            rails,
            _job: job,
        }
    }

    /// Reads the counters until both ranks' jobs satisfy `wanted`. `wanted` gets the jobs in the
    /// order of the ranks.
    fn until(&self, what: &str, mut wanted: impl FnMut(&[Value]) -> bool) -> Vec<Value> {
        wait_for(what, || {
            let jobs = self.look();
            (jobs.len() == 2 && wanted(&jobs)).then_some(jobs)
        })
    }

    fn look(&self) -> Vec<Value> {
        let mut command = nccl_spark();
        command
            .args(["top", "--json", "-n1", "-i0.5", "--pid"])
            .arg(self.ranks[0].to_string());
        let output: ProgramOutput = command
            .arg("--pid")
            .arg(self.ranks[1].to_string())
            .output()
            .unwrap()
            .into();
        assert_eq!(output.status, Some(0), "{output:?}");
        let jobs = json(&output.out)["jobs"].as_array().unwrap().clone();
        let job = |pid: &u64| jobs.iter().find(|job| job["pid"] == *pid).cloned();
        self.ranks.iter().filter_map(job).collect()
    }

    fn signal(&self, signal: Signal) {
        for pid in &self.ranks {
            signal::kill(Pid::from_raw(i32::try_from(*pid).unwrap()), signal).unwrap();
        }
    }
}

fn fabric(dir: &Path, arguments: &str) -> Value {
    let mut command = nccl_spark();
    command
        .arg("fabric")
        .args(arguments.split_whitespace())
        .env("SOFTVERBS_DIR", dir);
    let output: ProgramOutput = command.output().unwrap().into();
    serde_json::from_str(&output.out).unwrap_or(Value::Null)
}

fn rail<'a>(job: &'a Value, device: &str) -> &'a Value {
    let rails = job["rails"].as_array().unwrap();
    rails
        .iter()
        .find(|rail| rail["rail"] == format!("{device}:1"))
        .unwrap_or_else(|| panic!("no {device}: {job}"))
}

fn moves(side: &Value) -> bool {
    side["bytes_per_s"].as_f64().is_some_and(|rate| rate > 0.0)
}

#[test]
fn a_real_jobs_bytes_match_the_fabrics() {
    if !is_built() {
        return;
    }
    let job = Job::start("--profile unpaced");
    // Wait until so many bytes are sent that the messages in flight, four of 2 MiB each, are less
    // than 1 % of the bytes.
    let has_sent =
        |job: &Value| moves(&job["sent"]) && job["sent"]["bytes"].as_u64() > Some(2_000_000_000);
    let jobs = job.until("both ranks to move bytes", |jobs| jobs.iter().all(has_sent));
    for rank in &jobs {
        assert_shows_all_rails(rank, &job.rails);
    }
    // While the job is stopped, received bytes equal sent bytes, except for messages in flight.
    job.signal(Signal::SIGSTOP);
    let still = job.until("the ranks to stand still", |jobs| {
        !jobs
            .iter()
            .any(|job| moves(&job["sent"]) || moves(&job["received"]))
    });
    let nodes = fabric(job.dir.path(), "status --json -")["fabrics"][0]["nodes"].clone();
    job.signal(Signal::SIGCONT);
    for rank in [0, 1] {
        assert_matches_fabric(&still[rank], &nodes[rank], &job.rails);
    }
    for (sender, receiver) in [(0, 1), (1, 0)] {
        let bytes = |job: &Value, side: &str| job[side]["bytes"].as_f64().unwrap();
        let sent = bytes(&still[sender], "sent");
        let received = bytes(&still[receiver], "received");
        assert!((sent - received).abs() < sent / 100.0, "{sent} {received}");
    }
}

/// Asserts that a rank shows all rails, and that their shares add up to 100 %.
fn assert_shows_all_rails(rank: &Value, devices: &[String]) {
    let rails = rank["rails"].as_array().unwrap();
    let mut shown: Vec<&str> = rails
        .iter()
        .map(|rail| rail["rail"].as_str().unwrap())
        .collect();
    let mut expected: Vec<String> = devices.iter().map(|device| format!("{device}:1")).collect();
    shown.sort_unstable();
    expected.sort_unstable();
    assert_eq!(shown, expected, "{rank}");
    let share: f64 = rails
        .iter()
        .map(|rail| rail["share_percent"].as_f64().unwrap())
        .sum();
    assert!((share - 100.0).abs() < 0.01, "{rank}");
}

/// Compares the bytes that a rank shows with the counters that the fabric keeps itself.
fn assert_matches_fabric(rank: &Value, node: &Value, devices: &[String]) {
    let rails = node["rails"].as_array().unwrap();
    for device in devices {
        let carried = rails.iter().find(|rail| rail["device"] == **device);
        let carried = carried.unwrap()["sent_bytes"].as_f64().unwrap();
        let shown = rail(rank, device)["sent"]["bytes"].as_f64().unwrap();
        assert!(
            (shown - carried).abs() < carried / 100.0,
            "{device}: {shown}, and by the fabric {carried}: {rank}"
        );
    }
}

#[test]
fn a_real_jobs_rails_are_shown_while_one_is_lost_and_comes_back() {
    if !is_built() {
        return;
    }
    let job = Job::start("--profile unpaced");
    job.until("both ranks to move bytes", |jobs| {
        jobs.iter().all(|job| moves(&job["sent"]))
    });
    let device = &job.rails[0];
    fabric(job.dir.path(), &format!("down 0:{device}"));
    let lost = job.until("the lost rail", |jobs| {
        rail(&jobs[0], device)["condition"] == "lost"
    });
    let row = rail(&lost[0], device);
    assert!(
        row["losses"].as_u64() > Some(0) && row["sent"]["carrying"] == 0,
        "{row}"
    );
    let others = job.until("bytes on the other rails", |jobs| moves(&jobs[0]["sent"]));
    assert_eq!(others[0]["condition"], "lost");
    fabric(job.dir.path(), &format!("up 0:{device}"));
    let back = job.until("the rail's return", |jobs| {
        jobs.iter().all(|job| job["condition"] != "lost") && moves(&rail(&jobs[0], device)["sent"])
    });
    let row = rail(&back[0], device);
    assert!(
        row["recoveries"].as_u64() > Some(0) && row["lost_s"].as_f64() > Some(0.0),
        "{row}"
    );
}

/// The example of docs/guide/commands.md, with rates low enough for a busy machine.
#[test]
fn a_slow_rail_is_marked_slow_until_it_recovers() {
    if !is_built() {
        return;
    }
    let job = Job::start("--profile spark-2cable --scale 0.005");
    let is = |job: &Value, condition: &str| rail(job, "rocep1s0f0")["condition"] == condition;
    fabric(job.dir.path(), "slow *:rocep1s0f0 0.25");
    job.until("both ranks to mark the rail slow", |jobs| {
        jobs.iter().all(|job| is(job, "slow"))
    });
    fabric(job.dir.path(), "slow *:rocep1s0f0 1");
    job.until("both ranks to mark it good", |jobs| {
        jobs.iter().all(|job| is(job, "good"))
    });
}
