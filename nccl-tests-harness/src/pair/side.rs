//! A library that is measured: its two ranks, and the orders they get.

use super::messages::{Answer, Flowed, HalfTrip, Layout, Opened, Order, Setup};
use super::rank::Pair;
use crate::output::watch::Watch;
use crate::ranks::control::answer;
use crate::ranks::device::Network;
use crate::ranks::job::{Job, Seat};
use anyhow::{Context, Result, anyhow};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The rank that sends.
const SENDER: usize = 0;
/// The rank that receives.
const RECEIVER: usize = 1;

/// Facts about a side.
#[derive(Debug, Clone)]
pub struct About {
    /// `ours` or `theirs`.
    pub name: &'static str,
    /// The library.
    pub library: PathBuf,
    /// The version of the plugin interface asked for.
    pub abi_wanted: Option<u32>,
    /// The version that is used.
    pub abi: u32,
    /// The network as NCCL would see it, by rank.
    pub networks: Vec<Network>,
    /// The ranks' processes and hosts.
    pub whereabouts: Vec<String>,
    /// What the plugin logged about its connections, by rank, each line once.
    pub connections: Vec<Vec<String>>,
}

/// A library that is measured.
pub struct Side {
    /// Facts about it.
    pub about: About,
    job: Job<Pair>,
    checks: u64,
    /// The connections that are open: forward, back, bytes of memory for each.
    open: Vec<(usize, usize, usize)>,
    /// How to start its ranks again; none where a launcher started them.
    restart: Option<Restart>,
}

/// How to start ranks again on this machine.
struct Restart {
    program: PathBuf,
    /// By rank.
    environments: Vec<Vec<(String, String)>>,
    timeout: Duration,
    watch: Watch,
}

/// The result of a check.
#[derive(Debug, Clone, Default)]
pub struct Wrong {
    /// Wrong bytes of both ranks.
    pub bytes: u64,
    /// A description of the first of each rank.
    pub first: Vec<String>,
}

/// A rail that is slowed and restored during a run, and when.
pub struct Fall<'a> {
    /// The length of each of its three parts.
    pub part: Duration,
    /// The length of the windows in which bytes are counted.
    pub window_ms: u64,
    /// Slows the rail, or restores it.
    pub turn: &'a mut dyn FnMut(Turn) -> Result<()>,
}

/// What happens to the rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It is slowed.
    Fall,
    /// It is restored.
    Return,
}

impl Side {
    /// Starts the ranks, and the plugin in them.
    pub fn start(program: &Path, mut about: About, seats: Vec<Seat>, timeout: Duration, watch: Watch) -> Result<Self> {
        let environments = seats.iter().map(|seat| match seat {
            Seat::Here(environment) => Some(environment.clone()),
            Seat::Guest(_) => None,
        });
        let restart = environments.collect::<Option<Vec<_>>>().map(|environments| Restart {
            program: program.to_owned(),
            environments,
            timeout,
            watch: watch.clone(),
        });
        let mut job = Job::start(program, seats, timeout, watch)?;
        let up = set_up(&mut job, &about)?;
        let (networks, versions): (Vec<_>, Vec<_>) = up.into_iter().unzip();
        about.networks = networks;
        about.abi = versions.first().copied().unwrap_or_default();
        about.whereabouts = job.whereabouts().collect();
        about.connections = vec![Vec::new(); 2];
        Ok(Self { about, job, checks: 0, open: Vec::new(), restart })
    }

    /// Replaces the ranks by new processes with the same connections. How fast a process is depends for its whole life on where the
    /// kernel placed its threads and memory: two processes of the same library can differ by a factor of three, round after round.
    /// Ranks that a launcher started stay, and get new connections.
    pub fn renew(&mut self) -> Result<()> {
        let open = std::mem::take(&mut self.open);
        match &self.restart {
            Some(Restart { program, environments, timeout, watch }) => {
                let seats = environments.iter().cloned().map(Seat::Here).collect();
                let mut job = Job::start(program, seats, *timeout, watch.clone())?;
                set_up(&mut job, &self.about)?;
                let old = std::mem::replace(&mut self.job, job);
                old.finish().map_err(|error| of(self.about.name, &error))?;
            }
            None => self.close()?,
        }
        for (forward, back, buffer_bytes) in open {
            self.connect(forward, back, buffer_bytes)?;
        }
        Ok(())
    }

    /// Opens `forward` connections more from the sender to the receiver, and `back` the other way; how each rank saw it.
    pub fn open(&mut self, forward: usize, back: usize, buffer_bytes: usize) -> Result<Vec<Opened>> {
        let opened = self.connect(forward, back, buffer_bytes)?;
        for (known, said) in self.about.connections.iter_mut().zip(&opened) {
            let new = said.lines.iter().filter(|line| !known.contains(line)).cloned().collect::<Vec<_>>();
            known.extend(new);
        }
        Ok(opened)
    }

    fn connect(&mut self, forward: usize, back: usize, buffer_bytes: usize) -> Result<Vec<Opened>> {
        self.open.push((forward, back, buffer_bytes));
        // Who listens is the rank that receives.
        let listening = self.ask_both(
            |rank| Order::Listen { connections: if rank == SENDER { back } else { forward } },
            answer!(Answer::Listening { handles } => handles),
        )?;
        self.ask_both(
            |rank| Order::Connect { handles: listening[1 - rank].clone(), buffer_bytes },
            answer!(Answer::Connected(opened) => opened),
        )
    }

    /// Sends what lies in memory, and checks every byte.
    pub fn check(&mut self, layout: Layout) -> Result<Wrong> {
        self.checks += 1;
        let iteration = self.checks;
        let checked = self.ask_both(
            |_| Order::Check { layout, iteration },
            answer!(Answer::Checked { wrong, first_wrong } => (wrong, first_wrong)),
        )?;
        let name = self.about.name;
        let first = checked.iter().enumerate().filter_map(|(rank, (_, first))| Some((rank, first.as_ref()?)));
        let first = first.map(|(rank, first)| format!("{name}: rank {rank}: {first}")).collect();
        Ok(Wrong { bytes: checked.iter().map(|(wrong, _)| wrong).sum(), first })
    }

    /// Sends so many messages on each connection: how many seconds that took, of the rank that it took longer.
    pub fn stream(&mut self, layout: Layout, messages: u64) -> Result<f64> {
        let seconds =
            self.ask_both(|_| Order::Stream { layout, messages }, answer!(Answer::Streamed { seconds } => seconds))?;
        Ok(seconds.into_iter().fold(0.0, f64::max))
    }

    /// Runs a ping-pong of so many messages: how many seconds that took, and the times of half a round trip.
    pub fn ping_pong(&mut self, layout: Layout, messages: u64) -> Result<(f64, HalfTrip)> {
        let times = self.ask_both(
            |_| Order::PingPong { layout, messages },
            answer!(Answer::PingPonged { seconds, half_trip } => (seconds, half_trip)),
        )?;
        times.into_iter().next().context("rank 0 did not answer")
    }

    /// Streams while a rail is slowed and restored: what the receiver counted. Its four marks are the times before and after each
    /// of the two.
    ///
    /// # Errors
    /// The ranks', or when the rail cannot be slowed or restored.
    pub fn flow(&mut self, layout: Layout, fall: Fall<'_>) -> Result<Flowed> {
        let Fall { part, window_ms, turn } = fall;
        self.ask_both(|_| Order::Flow { layout, window_ms }, |answer| matches!(answer, Answer::Flowing).then_some(()))?;
        for what in [Turn::Fall, Turn::Return] {
            // Each part begins when the receiver has noted the time of the one before, so none is shorter than it should be.
            self.wait_until(Instant::now() + part)?;
            self.mark()?;
            turn(what)?;
            self.mark()?;
        }
        self.wait_until(Instant::now() + part)?;
        let stopped = answer!(Answer::Stopped { messages } => messages);
        // Neither side may wait for the other for ever: first the sender stops, then the receiver ends at what it has posted, or
        // at what was sent where that is more.
        let sent = self.ask(SENDER..SENDER + 1, |_| Order::Stop, stopped)?;
        let messages = sent.into_iter().max().unwrap_or_default();
        let posted = self.ask(RECEIVER..RECEIVER + 1, |_| Order::Until { messages }, stopped)?;
        let messages = posted.into_iter().max().unwrap_or_default();
        // The receiver may have finished already, so it gets no more orders.
        self.ask_after(SENDER, Order::Until { messages })
    }

    /// Orders `rank` to end, and takes both ranks' answers at the end of a flow: returns the receiver's count.
    fn ask_after(&mut self, rank: usize, order: Order) -> Result<Flowed> {
        let flowed = answer!(Answer::Flowed(flowed) => flowed);
        let name = self.about.name;
        let told = move |number: usize| (number == rank).then(|| order.clone());
        let mut flowed = self.job.ask_some(0..2, told, flowed).map_err(|error| of(name, &error))?;
        flowed.pop().context("rank 1 did not answer")
    }

    fn mark(&mut self) -> Result<()> {
        let marked = |answer| matches!(answer, Answer::Marked).then_some(());
        self.ask(RECEIVER..RECEIVER + 1, |_| Order::Mark, marked).map(|_| ())
    }

    /// Closes all connections.
    pub fn close(&mut self) -> Result<()> {
        self.open.clear();
        self.ask_both(|_| Order::Close, |answer| matches!(answer, Answer::Closed).then_some(())).map(|_| ())
    }

    /// Ends the ranks.
    pub fn finish(self) -> Result<()> {
        let name = self.about.name;
        self.job.finish().map_err(|error| of(name, &error))
    }

    fn wait_until(&mut self, end: Instant) -> Result<()> {
        self.job.wait_until(end).map_err(|error| of(self.about.name, &error))
    }

    fn ask_both<T>(&mut self, order: impl Fn(usize) -> Order, answer: impl Fn(Answer) -> Option<T>) -> Result<Vec<T>> {
        self.ask(0..2, order, answer)
    }

    fn ask<T>(
        &mut self,
        ranks: Range<usize>,
        order: impl Fn(usize) -> Order,
        answer: impl Fn(Answer) -> Option<T>,
    ) -> Result<Vec<T>> {
        let answers = self.job.ask_some(ranks, |rank| Some(order(rank)), answer);
        answers.map_err(|error| of(self.about.name, &error))
    }
}

/// Starts the plugin in the ranks: the network as each sees it, and the version of the plugin interface.
fn set_up(job: &mut Job<Pair>, about: &About) -> Result<Vec<(Network, u32)>> {
    let setup = |rank| {
        let (plugin, abi) = (about.library.clone(), about.abi_wanted);
        Order::Setup(Setup { rank, plugin, abi, job: u64::from(std::process::id()) })
    };
    let up = job.ask(setup, answer!(Answer::Up { network, abi } => (network, abi)));
    up.map_err(|error| of(about.name, &error))
}

/// An error of the ranks with the library's name before each line.
fn of(name: &str, error: &anyhow::Error) -> anyhow::Error {
    let lines = format!("{error:#}");
    let lines: Vec<_> = lines.lines().map(|line| format!("{name}: {line}")).collect();
    anyhow!(lines.join("\n"))
}
