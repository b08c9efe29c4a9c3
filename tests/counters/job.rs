//! A process that runs a job, and readers of its counters.

use crate::bed::RAILS;
use crate::common::{self, LIMIT};
use host::counters::layout::{Counters, Direction, FILE_NAME, Record};
use softverbs::control::{Action, control, status};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Process of a job. It ends when the test's process ends, because that closes the job's standard
/// input.
pub struct Job {
    child: Child,
    /// Lines of the standard output.
    lines: Receiver<String>,
    /// Lines of the standard error.
    log: Receiver<String>,
}

impl Job {
    pub fn start(environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_job", "--ignored", "--nocapture"])
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let job = Self {
            lines: lines(child.stdout.take().unwrap()),
            log: lines(child.stderr.take().unwrap()),
            child,
        };
        job.wait_for_line("up");
        job
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn write_line(&mut self, word: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{word}").expect("the job listens");
    }

    pub fn wait_for_line(&self, start: &str) -> String {
        wait_for_line(&self.lines, start)
    }

    /// Checks that the job has transferred more than `messages` messages, and ends it. Returns the
    /// lines of its standard error.
    pub fn finish(mut self, messages: u64) -> Vec<String> {
        self.write_line("pause");
        let done: u64 = self.wait_for_line("paused ").parse().unwrap();
        assert!(done > messages, "{done} messages");
        self.write_line("close");
        self.wait_for_line("closed");
        self.end()
    }

    /// Waits for the job to exit with success. Returns the lines of its standard error.
    pub fn end(mut self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let log = self.log.iter().collect();
                assert!(status.success(), "the job ended with {status}: {log:#?}");
                return log;
            }
            assert!(begun.elapsed() < LIMIT, "the job does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The job's counter files (memfds), found as any reader finds them.
    pub fn files(&self) -> Vec<PathBuf> {
        let link = format!("/memfd:{FILE_NAME} (deleted)");
        let folder = Path::new("/proc").join(self.id().to_string()).join("fd");
        let all = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        all.filter(|path| std::fs::read_link(path).is_ok_and(|to| to == Path::new(&link)))
            .collect()
    }

    pub fn records(&self) -> Vec<Record> {
        self.files()
            .iter()
            .flat_map(|file| read(file).expect("counters").records)
            .collect()
    }

    pub fn wait_for(&self, what: &str, is_so: impl Fn(&[Record]) -> bool) {
        let begun = Instant::now();
        loop {
            let records = self.records();
            if is_so(&records) {
                return;
            }
            assert!(
                begun.elapsed() < LIMIT / 4,
                "not seen: {what}: {records:#?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Bytes sent on each rail, as the fabric counts them.
    pub fn sent_by_fabric(&self) -> [u64; 2] {
        let status = status(&common::fabric_folder(), &self.fabric()).unwrap();
        let sent = |rail: &str| {
            status.nodes[0]
                .rails
                .iter()
                .find(|known| known.device == rail)
                .unwrap()
                .sent_bytes
        };
        RAILS.map(sent)
    }

    pub fn control(&self, rail: &str, action: Action) {
        control(&common::fabric_folder(), &self.fabric(), None, rail, action).unwrap();
    }

    fn fabric(&self) -> String {
        format!("test-{}", self.id())
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Ends the job of a failed test. Errors are ignored: the job may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a counter file (memfd) as readers do. Returns `None` once the job's process has ended.
pub fn read(path: &Path) -> Option<Counters> {
    let first = std::fs::read(path).ok()?;
    let second = std::fs::read(path).ok()?;
    Some(Counters::parse(&first, &second).unwrap_or_else(|why| panic!("{}: {why}", path.display())))
}

pub fn sums(records: &[Record], rail: &str, direction: Direction) -> (u64, u64) {
    let of_rail = records
        .iter()
        .filter(|record| record.rail == format!("{rail}:1") && record.direction == direction);
    of_rail.fold((0, 0), |(bytes, writes), record| {
        (bytes + record.counts.bytes, writes + record.counts.writes)
    })
}

/// Reads lines on a new thread, which ends when the source ends.
pub fn lines(from: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

pub fn wait_for_line(lines: &Receiver<String>, start: &str) -> String {
    let begun = Instant::now();
    loop {
        let left = LIMIT.saturating_sub(begun.elapsed());
        let line = lines
            .recv_timeout(left)
            .unwrap_or_else(|error| panic!("{start:?} was not printed: {error}"));
        if let Some(rest) = line.strip_prefix(start) {
            return rest.to_owned();
        }
    }
}
