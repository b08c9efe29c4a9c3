//! Storms in real time: two processes on two nodes of a software fabric. The test starts itself
//! twice as these processes, forwards their handles, and injects the events.

use super::caller::{Channel, Terms};
use super::events::{Change, RAILS, Storm, What};
use crate::common::{LIMIT, fabric_folder, fabric_library, fabric_name, mix, until};
use host::config::Config;
use nccl_net_spark::comm::{Host, ListenComm, RecvComm, SendComm};
use nccl_net_spark::plugin::bring_up;
use proto::wire::handle::HANDLE_BYTES;
use softverbs::control::{Action, Prepared, control, prepare, sysfs_of_node};
use softverbs::profile::Profile;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Name of the ignored test that is one of the two processes.
pub const PROCESS: &str = "one_of_two_processes";
/// Part of a Spark's rates at which the fabric runs.
const SCALE: f64 = 0.02;

/// Injects faults into the fabric.
#[derive(Clone)]
pub struct Switches {
    dir: PathBuf,
    name: String,
}

pub struct Bed {
    switches: Switches,
    _prepared: Prepared,
    processes: [Process; 2],
}

struct Process {
    child: Child,
    orders: ChildStdin,
    lines: Receiver<String>,
}

impl Bed {
    pub fn new() -> Self {
        let dir = fabric_folder();
        let name = format!("{}-live", fabric_name());
        std::fs::create_dir_all(&dir).unwrap();
        let profile = Profile::load("spark-2cable", SCALE).unwrap();
        let prepared = prepare(&dir, &name, &profile, 2).unwrap();
        let processes = [0, 1].map(|node| Process::start(node, &prepared));
        let mut bed = Self {
            switches: Switches { dir, name },
            _prepared: prepared,
            processes,
        };
        bed.answers("ready", LIMIT).expect("both processes start");
        bed
    }

    /// Plays a storm over these channels. Returns the number of steps that both processes have
    /// checked, or the reason of the failure.
    pub fn play(
        &mut self,
        storm: &Storm,
        channels: &[Terms],
        limit: Duration,
    ) -> Result<u64, String> {
        let text: Vec<String> = channels.iter().map(Terms::text).collect();
        // The storm begins before, during or after the set-up of the connections.
        let switches = self.switches.clone();
        let changes = storm.changes();
        let raging = std::thread::spawn(move || {
            switches.rage(&changes);
            switches.mend();
        });
        std::thread::sleep(Duration::from_millis(
            storm.0.first().map_or(0, |first| first.away_ms % 100),
        ));
        self.order(&format!("open {}", text.join(" ")));
        self.answers("opened", LIMIT)?;
        raging.join().expect("the storm");
        std::thread::sleep(Duration::from_millis(200));
        self.order("stop");
        let steps: Vec<u64> = {
            let [ours, theirs] = self.answers("begun", LIMIT)?;
            ours.iter()
                .zip(&theirs)
                .map(|(one, other)| *one.max(other))
                .collect()
        };
        let text: Vec<String> = steps.iter().map(u64::to_string).collect();
        self.order(&format!("steps {}", text.join(" ")));
        let done = self.answers("done", limit)?;
        Ok(done.iter().flatten().sum())
    }

    fn order(&mut self, order: &str) {
        for process in &mut self.processes {
            writeln!(process.orders, "{order}").expect("the process takes orders");
        }
    }

    /// Waits for a line of each process that begins with `begin`, and returns its numbers.
    /// Meanwhile forwards the lines for the other process.
    fn answers(&mut self, begin: &str, limit: Duration) -> Result<[Vec<u64>; 2], String> {
        let start = Instant::now();
        let mut found = [None, None];
        while found.iter().any(Option::is_none) {
            for (node, found) in found.iter_mut().enumerate() {
                match self.processes[node].lines.try_recv() {
                    Ok(line) if line.starts_with("peer ") => {
                        writeln!(self.processes[1 - node].orders, "{line}")
                            .expect("the process takes lines");
                    }
                    Ok(line) if line.starts_with("failed") => {
                        return Err(format!("node {node}: {line}"));
                    }
                    Ok(line) => {
                        let numbers = line.strip_prefix(begin).map(str::split_whitespace);
                        let numbers = numbers
                            .map(|all| all.map(|word| word.parse().expect("a number")).collect());
                        *found = numbers.or(found.take());
                    }
                    Err(TryRecvError::Empty) => {}
                    Err(TryRecvError::Disconnected) => {
                        return Err(format!("node {node}'s process has ended"));
                    }
                }
            }
            if start.elapsed() > limit {
                self.order("state");
                std::thread::sleep(Duration::from_secs(1));
                let lines: Vec<String> = self
                    .processes
                    .iter()
                    .flat_map(|process| process.lines.try_iter())
                    .collect();
                return Err(format!(
                    "no {begin:?} within {} s\n{}",
                    limit.as_secs(),
                    lines.join("\n")
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(found.map(|numbers| numbers.expect("both were found")))
    }
}

impl Switches {
    pub fn new(dir: PathBuf, name: String) -> Self {
        Self { dir, name }
    }

    /// Prints a storm, and lets it rage.
    pub fn play(&self, storm: &Storm) {
        print!("{storm}");
        self.rage(&storm.changes());
    }

    fn rage(&self, changes: &[Change]) {
        let begun = Instant::now();
        let mut running = Vec::new();
        for change in changes {
            let at = Duration::from_millis(change.at_ms);
            std::thread::sleep(at.saturating_sub(begun.elapsed()));
            // On a thread of its own: a removal takes its time, and several may begin together.
            let switches = self.clone();
            let change = *change;
            running.push(std::thread::spawn(move || switches.change(&change)));
        }
        running
            .into_iter()
            .for_each(|thread| thread.join().expect("a change"));
    }

    fn change(
        &self,
        Change {
            node,
            rail,
            what,
            is_return,
            ..
        }: &Change,
    ) {
        let action = match (what, is_return) {
            (What::Port, false) => Action::Down,
            (What::Port, true) => Action::Up,
            (What::Address, _) => Action::Addresses(*is_return),
            (What::Function, false) => Action::Unplug,
            (What::Function, true) => Action::Plug,
        };
        control(&self.dir, &self.name, Some(*node), RAILS[*rail], action).unwrap();
    }

    /// Returns all functions and addresses, and takes all ports up.
    pub fn mend(&self) {
        for rail in RAILS {
            control(&self.dir, &self.name, None, rail, Action::Plug).unwrap();
            control(&self.dir, &self.name, None, rail, Action::Up).unwrap();
            control(&self.dir, &self.name, None, rail, Action::Addresses(true)).unwrap();
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for process in &mut self.processes {
            // The results are ignored: a process that failed has ended already.
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
        self._prepared.remove();
    }
}

impl Process {
    fn start(node: usize, prepared: &Prepared) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("the test's own path"))
            .args(["--exact", PROCESS, "--ignored", "--nocapture"])
            .envs(
                prepared
                    .environment
                    .iter()
                    .map(|(name, value)| (name, value)),
            )
            .env("SOFTVERBS_PROFILE", "spark-2cable")
            .env("SOFTVERBS_NODE", node.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program again");
        let orders = child.stdin.take().expect("its input");
        let stdout = child.stdout.take().expect("its output");
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(stdout)
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| tell.send(line))
        });
        Self {
            child,
            orders,
            lines,
        }
    }
}

impl Terms {
    fn text(&self) -> String {
        let Self {
            number,
            place_words,
            parts,
            lead,
            low_latency,
            operation_steps,
        } = self;
        format!(
            "{number},{place_words},{parts},{},{},{operation_steps}",
            lead.unwrap_or(0),
            u8::from(*low_latency)
        )
    }

    fn parse(text: &str) -> Self {
        let numbers: Vec<u64> = text
            .split(',')
            .map(|word| word.parse().expect("a number"))
            .collect();
        let [
            number,
            place_words,
            parts,
            lead,
            low_latency,
            operation_steps,
        ] = numbers[..]
        else {
            panic!("terms {text:?}")
        };
        Self {
            number,
            place_words: place_words as usize,
            parts: parts as usize,
            lead: (lead > 0).then_some(lead),
            low_latency: low_latency == 1,
            operation_steps,
        }
    }
}

/// One of the two processes: takes orders from standard input until it closes.
pub fn run_process() {
    let node: u64 = std::env::var("SOFTVERBS_NODE")
        .expect("the number of the node")
        .parse()
        .expect("0 or 1");
    let host = bring_up(Config::from_variables(&settings(node)).unwrap())
        .unwrap()
        .0;
    let (tell, lines) = channel();
    std::thread::spawn(move || {
        std::io::stdin()
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    println!("\nready");
    let mut rank = Rank {
        node,
        host,
        lines,
        channels: Vec::new(),
    };
    while rank.take_order() && rank.progress() {}
}

fn settings(node: u64) -> Vec<(String, String)> {
    let shared = std::env::var("NCCL_SPARK_SYSFS").expect("the fabric's sysfs");
    let settings = [
        ("NCCL_IBVERBS_LIB", fabric_library().display().to_string()),
        ("NCCL_SPARK_SYSFS", sysfs_of_node(&shared, node as usize)),
        ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
        ("NCCL_IB_HCA", RAILS.join(",")),
        ("NCCL_SPARK_LOSS_TIMEOUT_S", "120".to_owned()),
    ];
    settings
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

struct Rank {
    node: u64,
    host: Arc<Host>,
    /// Orders, and lines of the other process.
    lines: Receiver<String>,
    channels: Vec<Channel<SendComm, RecvComm>>,
}

impl Rank {
    /// Carries out an order, if there is one. Waits for one while no channel is open. Returns false
    /// once no order can follow.
    fn take_order(&mut self) -> bool {
        let line = match self.channels.is_empty() {
            true => match self.lines.recv() {
                Ok(line) => line,
                Err(_) => return false,
            },
            false => match self.lines.try_recv() {
                Ok(line) => line,
                Err(error) => return error == TryRecvError::Empty,
            },
        };
        let mut words = line.split_whitespace();
        match words.next() {
            Some("open") => {
                let terms: Vec<Terms> = words.map(Terms::parse).collect();
                self.channels = open(&self.host, self.node, &terms, &self.lines);
                println!("opened");
            }
            Some("stop") => {
                self.print("begun", Channel::begun);
                // Nothing may begin before the number of steps is known.
                let Ok(line) = self.lines.recv() else {
                    return false;
                };
                let steps = line
                    .strip_prefix("steps ")
                    .expect("the number of steps")
                    .split_whitespace();
                for (channel, steps) in self.channels.iter_mut().zip(steps) {
                    channel.end_after(steps.parse().expect("a number"));
                }
            }
            Some("state") => self
                .channels
                .iter()
                .for_each(|channel| println!("{}", channel.state())),
            other => panic!("unknown order {other:?}"),
        }
        true
    }

    fn print(&self, what: &str, number: fn(&Channel<SendComm, RecvComm>) -> u64) {
        let numbers: Vec<String> = self
            .channels
            .iter()
            .map(|channel| number(channel).to_string())
            .collect();
        println!("{what} {}", numbers.join(" "));
    }

    /// Makes each call once that is due, as NCCL's proxy thread does. Returns false after an error.
    fn progress(&mut self) -> bool {
        let mut moved = false;
        for channel in &mut self.channels {
            if channel.is_idle() && !channel.is_done() {
                // A pause between operations, in which NCCL's thread sleeps.
                if mix(channel.begun() << 8 ^ self.node).is_multiple_of(16) {
                    std::thread::sleep(Duration::from_millis(mix(channel.begun()) % 300));
                }
                channel.begin_operation();
            }
            match channel.progress() {
                Ok(has_moved) => moved |= has_moved,
                Err(error) => {
                    println!("failed: {error}; {}", channel.state());
                    return false;
                }
            }
        }
        if !self.channels.is_empty() && self.channels.iter().all(Channel::is_done) {
            self.print("done", Channel::consumed);
            self.channels.drain(..).for_each(|channel| channel.close());
        }
        if !moved {
            std::thread::yield_now();
        }
        true
    }
}

fn open(
    host: &Arc<Host>,
    node: u64,
    terms: &[Terms],
    lines: &Receiver<String>,
) -> Vec<Channel<SendComm, RecvComm>> {
    let mut listeners: Vec<(ListenComm, Option<RecvComm>)> = Vec::new();
    for at in 0..terms.len() {
        let (listener, handle) = host.listen().unwrap();
        let hex: String = handle.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("peer {at} {hex}");
        listeners.push((listener, None));
    }
    let mut handles: Vec<Option<[u8; HANDLE_BYTES]>> = vec![None; terms.len()];
    let mut sends: Vec<Option<SendComm>> = (0..terms.len()).map(|_| None).collect();
    until(|| {
        while let Ok(line) = lines.try_recv() {
            let mut words = line
                .strip_prefix("peer ")
                .expect("a handle")
                .split_whitespace();
            let at: usize = words.next().expect("a number").parse().expect("a number");
            let hex = words.next().expect("a handle");
            let byte =
                |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("a byte");
            handles[at] = Some(std::array::from_fn(byte));
        }
        for (handle, send) in handles.iter_mut().zip(&mut sends) {
            if let (Some(handle), None) = (handle, &send) {
                *send = host.connect(handle, None).unwrap();
            }
        }
        for (listener, recv) in &mut listeners {
            if recv.is_none() {
                *recv = listener.accept().unwrap();
            }
        }
        std::thread::yield_now();
        (sends.iter().all(Option::is_some) && listeners.iter().all(|(_, recv)| recv.is_some()))
            .then_some(())
    });
    let ends = sends.into_iter().zip(listeners).zip(terms);
    ends.map(|((send, (_, recv)), terms)| {
        Channel::new(*terms, node, send.unwrap(), recv.unwrap()).unwrap()
    })
    .collect()
}
