//! Two processes on two machines of a software fabric, and measurements from outside.

use super::flaps::Switches;
use super::gauge::{self, History, Sample, SelfReported};
use crate::common::{LIMIT, fabric_folder, fabric_library, fabric_name};
use softverbs::os::shm::{self, FabricMemory};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Profile of the fabric: two cables and four functions, with the rates of a Spark.
const PROFILE: &str = "spark-2cable";
/// Time limit until closed connections are gone. A closed connection waits for its peer to close
/// for at most a sixth of this time.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the answer after a long job of ten thousand connections.
const CHURN_LIMIT: Duration = Duration::from_secs(7200);

pub struct Bed {
    pub switches: Switches,
    processes: [Process; 2],
    memory: &'static FabricMemory,
    begun: Instant,
}

struct Process {
    child: Child,
    orders: Arc<Mutex<ChildStdin>>,
    answers: Receiver<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    pub messages: u64,
    pub bytes: u64,
}

impl Bed {
    pub fn new() -> Self {
        let dir = fabric_folder();
        let fabric = fabric_name();
        let switches = Switches { dir, fabric };
        let [(mut first, tell_first), (mut second, tell_second)] =
            [0, 1].map(|side| Process::start(side, &switches));
        first.listen(tell_first, &second);
        second.listen(tell_second, &first);
        let processes = [first, second];
        processes
            .iter()
            .for_each(|process| assert_eq!(process.answer("ready", LIMIT), [0_u64; 0]));
        let path = switches.dir.join(&switches.fabric).join("fabric");
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .expect("the fabric's file");
        let memory = shm::map(&file).unwrap();
        let bed = Self {
            switches,
            processes,
            memory,
            begun: Instant::now(),
        };
        // This also reads the whole list once: the kernel takes half a second for the first read of
        // such a large file, and later reads are fast.
        assert_eq!(bed.queue_pairs(), 0);
        bed
    }

    pub fn tell(&self, order: &str, answer: &str) -> [Vec<u64>; 2] {
        self.processes
            .iter()
            .for_each(|process| process.order(order));
        [0, 1].map(|side| self.processes[side].answer(answer, CHURN_LIMIT))
    }

    pub fn sample(&self) -> ([Sample; 2], Carried) {
        let at_s = self.begun.elapsed().as_secs_f64();
        let mut carried = Carried::default();
        let samples = self
            .tell("gauge", "gauge")
            .into_iter()
            .zip(&self.processes)
            .map(|(gauge, process)| {
                let [
                    heap_bytes,
                    blocks,
                    rust_bytes,
                    registrations,
                    messages,
                    bytes,
                ] = gauge[..]
                else {
                    panic!("a gauge of {gauge:?}")
                };
                carried.messages += messages;
                carried.bytes += bytes;
                let reported = SelfReported {
                    heap_bytes,
                    blocks,
                    bytes: rust_bytes,
                    registrations,
                };
                Sample::take(process.child.id(), at_s, reported)
            });
        (
            samples
                .collect::<Vec<_>>()
                .try_into()
                .expect("two processes"),
            carried,
        )
    }

    pub fn queue_pairs(&self) -> usize {
        self.memory
            .qps
            .iter()
            .filter(|qp| qp.number.load(Ordering::Acquire) != 0)
            .count()
    }

    pub fn made(&self) -> u64 {
        u64::from(self.memory.generations.load(Ordering::Relaxed))
    }

    /// Waits until closed connections' queue pairs and service threads are gone. Returns lines
    /// about what is left after [`SETTLE_LIMIT`].
    pub fn settle(&self) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let queue_pairs = self.queue_pairs();
            let mut off = Vec::new();
            if queue_pairs > 0 {
                off.push(format!("{queue_pairs} queue pairs are left"));
            }
            for process in &self.processes {
                let threads = gauge::threads(process.child.id());
                if threads.iter().any(|name| name.starts_with("spark-service")) {
                    off.push(format!(
                        "process {}: its service thread still runs",
                        process.child.id()
                    ));
                }
            }
            if off.is_empty() || begun.elapsed() > SETTLE_LIMIT {
                println!(
                    "  waited {:.2} s for closed connections to end",
                    begun.elapsed().as_secs_f64()
                );
                return off;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn print(&self, histories: &[History; 2]) -> Vec<String> {
        gauge::print_head();
        histories
            .iter()
            .enumerate()
            .flat_map(|(process, history)| history.print(process))
            .collect()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // A process with open connections does not end when its input closes. The results are
            // ignored, because a process that failed has ended already.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
        // Ends all faults for the next test of this program. The fabric's files remain until
        // a later test program deletes them (`fabric_folder`).
        self.switches.mend();
    }
}

impl Process {
    fn start(side: usize, switches: &Switches) -> (Self, ChildStdout) {
        let dir = &switches.dir;
        let fabric = &switches.fabric;
        let sysfs = dir.join(fabric).join("sys");
        let mut child = Command::new(std::env::current_exe().expect("the test's own path"))
            .args([
                "--exact",
                "one_of_two_processes",
                "--ignored",
                "--nocapture",
            ])
            .env("SOFTVERBS_DIR", dir)
            .env("SOFTVERBS_FABRIC", fabric)
            .env("SOFTVERBS_PROFILE", PROFILE)
            .env("SOFTVERBS_NODE", side.to_string())
            .env("NCCL_IBVERBS_LIB", fabric_library())
            .env("NCCL_SPARK_SYSFS", sysfs)
            // glibc counts the free blocks in its thread caches as in use, which would hide how
            // much is really in use.
            .env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program again");
        let orders = Arc::new(Mutex::new(child.stdin.take().expect("its input")));
        let stdout = child.stdout.take().expect("its output");
        let (_, answers) = channel();
        (
            Self {
                child,
                orders,
                answers,
            },
            stdout,
        )
    }

    /// Starts a thread that reads the process's output. The thread forwards lines for the other
    /// process, and keeps all other lines as answers.
    fn listen(&mut self, stdout: ChildStdout, other: &Process) {
        let (keep, answers): (Sender<String>, _) = channel();
        let other = Arc::clone(&other.orders);
        self.answers = answers;
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // A process that accepts no lines has ended, which its missing answers will show.
                let is_taken = match line.starts_with("peer ") {
                    true => writeln!(other.lock().expect("no writer panics"), "{line}").is_ok(),
                    false => keep.send(line).is_ok(),
                };
                if !is_taken {
                    return;
                }
            }
        });
    }

    fn order(&self, order: &str) {
        writeln!(self.orders.lock().expect("no writer panics"), "{order}")
            .expect("the process takes orders");
    }

    fn answer(&self, begin: &str, limit: Duration) -> Vec<u64> {
        loop {
            let line = self.answers.recv_timeout(limit);
            let line = line.unwrap_or_else(|e| {
                panic!("process {} did not say {begin:?}: {e}", self.child.id())
            });
            if let Some(rest) = line.strip_prefix(begin) {
                return rest
                    .split_whitespace()
                    .map(|word| word.parse().expect("a number"))
                    .collect();
            }
        }
    }
}
