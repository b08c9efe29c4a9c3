//! One side of a comparison of two plugin libraries: one library, and the two ranks that use it. A
//! [`Side`] starts the ranks and sends orders to them.

use super::messages::{Answer, Flowed, Layout, Opened, Order};
use super::rank::Pair;
use anyhow::{Context, Result, anyhow};
use nccl_tests_harness::fabric::Fabric;
use nccl_tests_harness::output::watch::Watch;
use nccl_tests_harness::ranks::control::answer;
use nccl_tests_harness::ranks::device::Network;
use nccl_tests_harness::ranks::job::{Job, RankEnv};
use nccl_tests_harness::ranks::placement;
use serde::Serialize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const SENDER: usize = 0;
const RECEIVER: usize = 1;

#[derive(Debug, Clone, Serialize)]
pub struct About {
    /// `ours` or `theirs`.
    pub name: &'static str,
    pub library: PathBuf,
    /// Version of the plugin interface. Before the ranks run, the requested version (`None`: the
    /// newest that the library exports). Once they run, the version that they use.
    #[serde(rename = "plugin_interface")]
    pub abi: Option<u32>,
    /// Network of each rank, as NCCL would see it.
    pub networks: Vec<Network>,
    #[serde(skip)]
    pub pids: Vec<String>,
    /// The plugin's log lines about its connections, by rank, each line once.
    pub connections: Vec<Vec<String>>,
}

pub struct Side<'a> {
    pub about: About,
    job: Job<Pair>,
    checks: u64,
    /// Calls of `connect` since the last close: connections forward, connections back, and
    /// buffer bytes of each connection.
    open_calls: Vec<(usize, usize, usize)>,
    start: LaunchConfig<'a>,
}

pub struct LaunchConfig<'a> {
    pub program: &'a Path,
    pub fabric: &'a Fabric,
    pub rank_env: Vec<RankEnv>,
    /// Time without progress after which the ranks count as hung.
    pub timeout: Duration,
    pub watch: Watch,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WrongBytes {
    /// Number of wrong bytes, both ranks together.
    pub bytes: u64,
    /// Descriptions of the first wrong byte of each rank.
    pub first: Vec<String>,
}

impl<'a> Side<'a> {
    pub fn start(name: &'static str, library: PathBuf, abi: Option<u32>, start: LaunchConfig<'a>) -> Result<Self> {
        let (networks, pids, connections) = (Vec::new(), Vec::new(), vec![Vec::new(); 2]);
        let mut about = About { name, library, abi, networks, pids, connections };
        let (job, networks, abi) = start.job(&about)?;
        (about.networks, about.abi, about.pids) = (networks, abi, job.whereabouts().collect());
        Ok(Self { about, job, checks: 0, open_calls: Vec::new(), start })
    }

    /// Replaces the ranks by new processes with the same connections. The kernel's placement of
    /// threads and memory determines a process's speed for its whole life. Two processes of the
    /// same library can differ by a factor of three, round after round.
    pub fn renew(&mut self) -> Result<()> {
        let (job, _, _) = self.start.job(&self.about)?;
        let old = std::mem::replace(&mut self.job, job);
        old.finish().map_err(|error| with_library_name(self.about.name, &error))?;
        for (forward, back, buffer_bytes) in std::mem::take(&mut self.open_calls) {
            self.connect(forward, back, buffer_bytes)?;
        }
        Ok(())
    }

    /// Opens `forward` more connections from the sender to the receiver, and `back` the other way.
    pub fn open(&mut self, forward: usize, back: usize, buffer_bytes: usize) -> Result<Vec<Opened>> {
        let opened = self.connect(forward, back, buffer_bytes)?;
        for (known, opened_rank) in self.about.connections.iter_mut().zip(&opened) {
            let new = opened_rank.lines.iter().filter(|line| !known.contains(line)).cloned().collect::<Vec<_>>();
            known.extend(new);
        }
        Ok(opened)
    }

    fn connect(&mut self, forward: usize, back: usize, buffer_bytes: usize) -> Result<Vec<Opened>> {
        self.open_calls.push((forward, back, buffer_bytes));
        // The receiving rank of a connection listens.
        let listening = self.order_all(
            |rank| Order::Listen { connections: if rank == SENDER { back } else { forward } },
            answer!(Answer::Listening(handles) => handles),
        )?;
        self.order_all(
            |rank| Order::Connect { handles: listening[1 - rank].clone(), buffer_bytes },
            answer!(Answer::Connected(opened) => opened),
        )
    }

    /// Sends each message buffer once, and checks every byte.
    pub fn check(&mut self, layout: Layout) -> Result<WrongBytes> {
        self.checks += 1;
        let iteration = self.checks;
        let checked = self.order_all(
            |_| Order::Check { layout, iteration },
            answer!(Answer::Checked(wrong, first) => (wrong, first)),
        )?;
        let name = self.about.name;
        let first = checked.iter().enumerate().filter_map(|(rank, (_, first))| Some((rank, first.as_ref()?)));
        let first = first.map(|(rank, first)| format!("{name}: rank {rank}: {first}")).collect();
        Ok(WrongBytes { bytes: checked.iter().map(|(wrong, _)| wrong).sum(), first })
    }

    /// Sends messages on each connection. Returns the seconds of the slower rank.
    pub fn stream(&mut self, layout: Layout, messages: u64) -> Result<f64> {
        let seconds =
            self.order_all(|_| Order::Stream { layout, messages }, answer!(Answer::Ran(seconds, _) => seconds))?;
        Ok(seconds.into_iter().fold(0.0, f64::max))
    }

    /// Runs a ping-pong. Returns its seconds, and half a round trip in microseconds: median, 99th
    /// percentile, shortest.
    pub fn ping_pong(&mut self, layout: Layout, messages: u64) -> Result<(f64, Vec<f64>)> {
        let times = self.order_all(
            |_| Order::PingPong { layout, messages },
            answer!(Answer::Ran(seconds, half_us) => (seconds, half_us)),
        )?;
        times.into_iter().next().context("rank 0 did not answer")
    }

    /// Streams in three parts, each of length `part`. `slow(true)` slows a rail down after the
    /// first part, and `slow(false)` restores it after the second. Returns the receiver's counts,
    /// with four marks: the times before and after each call of `slow`.
    pub fn flow(
        &mut self,
        layout: Layout,
        part: Duration,
        window_ms: u64,
        slow: &mut dyn FnMut(bool) -> Result<()>,
    ) -> Result<Flowed> {
        let done = answer!(Answer::Done => ());
        self.order_all(|_| Order::Flow { layout, window_ms }, done)?;
        for is_slow in [true, false] {
            // The receiver has already answered the order that begins this part: `Order::Flow`, or
            // the second `Order::Mark` of the round before. So the part lasts at least `part`.
            self.wait_until(Instant::now() + part)?;
            self.order_some(RECEIVER..RECEIVER + 1, |_| Some(Order::Mark), done)?;
            slow(is_slow)?;
            self.order_some(RECEIVER..RECEIVER + 1, |_| Some(Order::Mark), done)?;
        }
        self.wait_until(Instant::now() + part)?;
        let stopped = answer!(Answer::Stopped(messages) => messages);
        // Both ranks must end at the same number of messages. Otherwise one would wait forever. The
        // sender stops first. The receiver then ends at the number of messages sent, or at the
        // number that it has posted, if larger. The sender goes on to that number.
        let sent = self.order_some(SENDER..SENDER + 1, |_| Some(Order::Stop), stopped)?;
        let messages = sent.into_iter().max().unwrap_or_default();
        let posted = self.order_some(RECEIVER..RECEIVER + 1, |_| Some(Order::Until { messages }), stopped)?;
        let messages = posted.into_iter().max().unwrap_or_default();
        // The receiver may have finished already, so it gets no more orders.
        let last = |rank| (rank == SENDER).then_some(Order::Until { messages });
        let mut flowed = self.order_some(0..2, last, answer!(Answer::Flowed(flowed) => flowed))?;
        flowed.pop().context("rank 1 did not answer")
    }

    pub fn close(&mut self) -> Result<()> {
        self.open_calls.clear();
        self.order_all(|_| Order::Close, answer!(Answer::Done => ())).map(|_| ())
    }

    pub fn finish(self) -> Result<()> {
        let name = self.about.name;
        self.job.finish().map_err(|error| with_library_name(name, &error))
    }

    fn wait_until(&mut self, end: Instant) -> Result<()> {
        self.job.wait_until(end).map_err(|error| with_library_name(self.about.name, &error))
    }

    fn order_all<T>(&mut self, order: impl Fn(usize) -> Order, answer: impl Fn(Answer) -> Option<T>) -> Result<Vec<T>> {
        self.order_some(0..2, |rank| Some(order(rank)), answer)
    }

    fn order_some<T>(
        &mut self,
        ranks: Range<usize>,
        order: impl Fn(usize) -> Option<Order>,
        answer: impl Fn(Answer) -> Option<T>,
    ) -> Result<Vec<T>> {
        self.job.order_some(ranks, order, answer).map_err(|error| with_library_name(self.about.name, &error))
    }
}

impl LaunchConfig<'_> {
    /// Starts new ranks. Also returns each rank's network, and the plugin interface's version.
    fn job(&self, about: &About) -> Result<(Job<Pair>, Vec<Network>, Option<u32>)> {
        let places = placement::all_here(2, self.fabric, &self.rank_env);
        let mut job = Job::start(self.program, places, self.timeout, self.watch.clone())?;
        let (plugin, abi) = (&about.library, about.abi);
        let setup = |rank| Order::Setup { rank, plugin: plugin.clone(), abi, job: u64::from(std::process::id()) };
        let up = job.order_all(setup, answer!(Answer::Up(network, abi) => (network, abi)));
        let (networks, versions): (_, Vec<_>) =
            up.map_err(|error| with_library_name(about.name, &error))?.into_iter().unzip();
        Ok((job, networks, versions.into_iter().next()))
    }
}

/// Prefixes each line of an error of the ranks with the library's name.
fn with_library_name(name: &str, error: &anyhow::Error) -> anyhow::Error {
    let lines = format!("{error:#}");
    let lines: Vec<_> = lines.lines().map(|line| format!("{name}: {line}")).collect();
    anyhow!(lines.join("\n"))
}
