//! The command's side of a run's ranks: starts them, reads their messages, and ends them.

use crate::output::watch::Watch;
use crate::ranks::control::{self, FromRank, Sender, ToRank, Work};
use crate::ranks::rendezvous::Guest;
use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sys::signal::Signal;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Time to wait for more messages after the first failure. The first failure may be only an effect,
/// and the rank with the cause may report the cause a little later.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// Time for a rank to exit after it closed its control connection.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// A rank without a report for this long is shown as silent. Ranks report four times per second.
const SILENCE: Duration = Duration::from_secs(3);

/// All ranks of a run, which do one kind of work. Dropping the job ends the ranks that still run.
pub struct Job<W: Work> {
    ranks: Vec<Rank>,
    events: mpsc::Receiver<Event<FromRank<W::Answer>>>,
    timeout: Duration,
    last_progress: Instant,
    /// Time at which the run fails even if its ranks make progress.
    end: Option<Instant>,
    watch: Watch,
}

/// Number of a rank, and its message. The message is `None` when the rank's connection has ended.
type Event<Message> = (usize, Option<Message>);

/// Place of a rank.
pub enum RankPlace {
    /// A child process, with these variables added to its environment.
    Here(Vec<(String, String)>),
    /// A connected process that a launcher started.
    Guest(Guest),
}

struct Rank {
    process: Process,
    sender: Sender,
    ticks: u64,
    doing: String,
    last_message: Instant,
}

enum Process {
    Ours(Child),
    /// PID and machine of a rank that a launcher started.
    Launched(u32, String),
}

/// A variable in the environment of one rank's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankEnv {
    /// Number of the rank.
    pub rank: usize,
    /// Name of the variable.
    pub name: String,
    /// Value of the variable.
    pub value: String,
}

impl Serialize for RankEnv {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { rank, name, value } = self;
        serializer.collect_str(&format_args!("{rank}:{name}={value}"))
    }
}

impl RankEnv {
    /// Parses `RANK:NAME=VALUE`.
    ///
    /// # Errors
    /// The text has another form. The error names the allowed one.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts = text
            .split_once(':')
            .and_then(|(rank, variable)| Some((rank.parse().ok()?, variable.split_once('=')?)));
        match parts {
            Some((rank, (name, value))) if !name.is_empty() && !text.contains('\0') => Ok(Self {
                rank,
                name: name.to_owned(),
                value: value.to_owned(),
            }),
            _ => Err("RANK:NAME=VALUE, as in 0:NCCL_IB_HCA==mlx5_0".to_owned()),
        }
    }
}

impl<W: Work> Job<W> {
    /// Starts a process of the file `program` for each rank that is to be a child process. Reads
    /// the messages of all ranks, each on a thread. The run fails when no rank makes progress for
    /// `timeout`.
    pub fn start(
        program: &Path,
        places: Vec<RankPlace>,
        timeout: Duration,
        watch: Watch,
    ) -> Result<Self> {
        let (events_in, events) = mpsc::channel();
        let mut job = Self {
            ranks: Vec::new(),
            events,
            timeout,
            last_progress: Instant::now(),
            end: None,
            watch,
        };
        for (number, place) in places.into_iter().enumerate() {
            let is_guest = matches!(place, RankPlace::Guest(_));
            let (process, socket) = match place {
                RankPlace::Here(environment) => spawn(program, W::COMMAND, number, environment)?,
                RankPlace::Guest(Guest { hello, line }) => (
                    Process::Launched(hello.pid, hello.host),
                    OwnedFd::from(line),
                ),
            };
            let (sender, mut receiver) = control::split(socket)?;
            let doing = "starting".to_owned();
            let last_message = Instant::now();
            job.ranks.push(Rank {
                process,
                sender,
                ticks: 0,
                doing,
                last_message,
            });
            let events = events_in.clone();
            std::thread::spawn(move || {
                let mut next = || {
                    if is_guest {
                        receiver.receive_plain()
                    } else {
                        receiver.receive()
                    }
                };
                while let Ok(Some(message)) = next() {
                    if events.send((number, Some(message))).is_err() {
                        return;
                    }
                }
                let _ = events.send((number, None));
            });
        }
        Ok(job)
    }

    pub(crate) fn end_by(&mut self, end: Instant) {
        self.end = Some(end);
    }

    /// Returns each rank's PID, and its machine if a launcher started it.
    pub fn whereabouts(&self) -> impl Iterator<Item = String> {
        self.ranks.iter().map(|rank| match &rank.process {
            Process::Ours(process) => format!("Pid {:>6}", process.id()),
            Process::Launched(pid, host) => format!("Pid {pid:>6} on {host}"),
        })
    }

    pub(crate) fn child(&self, rank: usize) -> Option<u32> {
        match &self.ranks.get(rank)?.process {
            Process::Ours(process) => Some(process.id()),
            Process::Launched(..) => None,
        }
    }

    /// Sends an order to every rank, and waits for all answers. Returns them in rank order.
    /// `answer` returns `None` for a message that is no answer to this order; such messages are
    /// ignored.
    ///
    /// # Errors
    /// Fails when a rank fails or exits, or the run hangs. If ranks failed, the error has a line
    /// for each reason, with the ranks that have it.
    pub fn order_all<T>(
        &mut self,
        order: impl Fn(usize) -> W::Order,
        answer: impl Fn(W::Answer) -> Option<T>,
    ) -> Result<Vec<T>> {
        self.order_some(0..self.ranks.len(), |rank| Some(order(rank)), answer)
    }

    /// Works like [`Job::order_all`] for some ranks. A rank for which `order` returns `None` gets
    /// no new order. Its next answer is then the answer to an earlier order.
    pub fn order_some<T>(
        &mut self,
        ranks: Range<usize>,
        order: impl Fn(usize) -> Option<W::Order>,
        answer: impl Fn(W::Answer) -> Option<T>,
    ) -> Result<Vec<T>> {
        let count = ranks.len();
        self.tell(ranks, |rank| order(rank).map(ToRank::Order));
        let mut answers = BTreeMap::new();
        while answers.len() < count {
            let (number, from_rank) = self.next(None)?.context("no event")?;
            let from_rank = from_rank.ok_or_else(|| self.failure(number, None))?;
            answers.extend(answer(from_rank).map(|value| (number, value)));
        }
        Ok(answers.into_values().collect())
    }

    /// Waits until `end` and ignores the ranks' answers. Fails when a rank fails or the run hangs.
    pub fn wait_until(&mut self, end: Instant) -> Result<()> {
        while let Some((number, answer)) = self.next(Some(end))? {
            answer.ok_or_else(|| self.failure(number, None))?;
        }
        Ok(())
    }

    /// Makes all ranks close and exit, and waits until they have. Fails when a rank fails.
    pub fn finish(mut self) -> Result<()> {
        self.tell(0..self.ranks.len(), |_| Some(ToRank::Finish));
        let mut left = self.ranks.len();
        while left > 0 {
            if let (number, None) = self.next(None)?.context("no event")? {
                match self.ranks[number].exit_status() {
                    Some(status) if !status.success() => return Err(self.failure(number, None)),
                    _ => left -= 1,
                }
            }
        }
        Ok(())
    }

    /// Sends messages. A failed write is ignored: it means that the rank has exited, and the end of
    /// the rank's connection is an event of its own.
    fn tell(&mut self, ranks: Range<usize>, what: impl Fn(usize) -> Option<ToRank<W::Order>>) {
        for (number, message) in ranks.filter_map(|number| Some((number, what(number)?))) {
            let _ = self.ranks[number].sender.send(&message);
        }
        self.last_progress = Instant::now();
    }

    /// Returns the next answer of a rank, or the end of its connection, or `None` if nothing
    /// arrives before `until`. Fails when a rank fails, the run hangs, or the run's time is up.
    fn next(&mut self, until: Option<Instant>) -> Result<Option<Event<W::Answer>>> {
        loop {
            let deadline = until
                .into_iter()
                .chain(self.end)
                .fold(self.last_progress + self.timeout, Instant::min);
            match self
                .events
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok((number, Some(FromRank::Beat { ticks, doing }))) => {
                    self.beat(number, ticks, doing)
                }
                Ok((number, message)) => {
                    self.last_progress = Instant::now();
                    self.ranks[number].last_message = self.last_progress;
                    return match message {
                        Some(FromRank::Failed { reason }) => {
                            Err(self.failure(number, Some(reason)))
                        }
                        Some(FromRank::Answer(answer)) => Ok(Some((number, Some(answer)))),
                        Some(FromRank::Beat { .. }) | None => Ok(Some((number, None))),
                    };
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("all ranks have exited"),
            }
            let now = Instant::now();
            if until.is_some_and(|until| until <= now) {
                return Ok(None);
            }
            ensure!(
                self.end.is_none_or(|end| now < end),
                "time is up: {}",
                self.doing()
            );
            let timeout_s = self.timeout.as_secs();
            let is_hung = now >= self.last_progress + self.timeout;
            ensure!(
                !is_hung,
                "no progress for {timeout_s} s (--timeout): {}",
                self.doing()
            );
        }
    }

    fn beat(&mut self, number: usize, ticks: u64, doing: String) {
        let rank = &mut self.ranks[number];
        rank.last_message = Instant::now();
        if ticks != rank.ticks {
            self.last_progress = rank.last_message;
        }
        if number == 0 {
            self.watch.doing(&doing);
        }
        rank.ticks = ticks;
        rank.doing = doing;
    }

    fn doing(&self) -> String {
        let doing = self.ranks.iter().enumerate().map(|(number, rank)| {
            match rank.last_message.elapsed() > SILENCE {
                true => {
                    format!(
                        "rank {number}: no message for {} s; last: {}",
                        rank.last_message.elapsed().as_secs(),
                        rank.doing
                    )
                }
                false => format!("rank {number}: {}", rank.doing),
            }
        });
        doing.collect::<Vec<_>>().join("; ")
    }

    /// Returns the error of the first rank to fail, and the errors that follow shortly after. Ranks
    /// that died come first, because the other errors are often consequences.
    fn failure(&mut self, number: usize, reason: Option<String>) -> anyhow::Error {
        let mut died = Vec::new();
        let mut failed = Vec::new();
        let until = Instant::now() + LAST_WORDS;
        let mut next = Some((number, reason));
        while let Some((number, reason)) = next {
            match reason {
                Some(reason) => failed.push((number, reason)),
                None => died.push((number, self.ranks[number].end())),
            }
            next = self.next_failure(until);
        }
        died.append(&mut failed);
        anyhow!(by_reason(died).join("\n"))
    }

    fn next_failure(&self, until: Instant) -> Option<Event<String>> {
        loop {
            match self
                .events
                .recv_timeout(until.saturating_duration_since(Instant::now()))
                .ok()?
            {
                (number, Some(FromRank::Failed { reason })) => return Some((number, Some(reason))),
                (number, None) => return Some((number, None)),
                (_, Some(_)) => {}
            }
        }
    }
}

impl<W: Work> Drop for Job<W> {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // A launcher's ranks exit when their control connection closes.
            if let Process::Ours(process) = &mut rank.process {
                let _ = process.kill();
                let _ = process.wait();
            }
        }
    }
}

impl Rank {
    /// Returns the exit status of a process that closed its control connection. Kills the process
    /// if it does not exit within [`EXIT_TIMEOUT`]. Returns `None` for a process that a launcher
    /// started, because only the launcher gets the exit status.
    fn exit_status(&mut self) -> Option<ExitStatus> {
        let Process::Ours(process) = &mut self.process else {
            return None;
        };
        let deadline = Instant::now() + EXIT_TIMEOUT;
        loop {
            match process.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1))
                }
                _ => {
                    let _ = process.kill();
                    return Some(process.wait().unwrap_or_default());
                }
            }
        }
    }

    fn end(&mut self) -> String {
        match (self.exit_status(), &self.process) {
            (Some(status), _) if status.code().is_some() => {
                format!("{} and no error message", ended(status))
            }
            (Some(status), _) => ended(status),
            (None, Process::Launched(pid, host)) => {
                format!("process {pid} on {host} ended without an error message")
            }
            (None, Process::Ours(_)) => "gone".to_owned(),
        }
    }
}

fn spawn(
    program: &Path,
    command: &str,
    number: usize,
    environment: Vec<(String, String)>,
) -> Result<(Process, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair().context("make a socket pair")?;
    let mut rank = Command::new(program);
    rank.args([command, &number.to_string()])
        .stdin(Stdio::from(OwnedFd::from(theirs)));
    // Standard output is for the table. A plugin's output must not come between the table's lines.
    rank.stdout(Stdio::from(std::io::stderr()))
        .envs(environment);
    let process = rank
        .spawn()
        .with_context(|| format!("start {}", program.display()))?;
    Ok((Process::Ours(process), OwnedFd::from(ours)))
}

/// Returns a line for each reason, with the ranks that have it. The lines are in the order in which
/// `failures` first has the reasons.
fn by_reason(failures: Vec<(usize, String)>) -> Vec<String> {
    let mut lines: Vec<(Vec<usize>, String)> = Vec::new();
    for (number, reason) in failures {
        match lines.iter_mut().find(|(_, of)| *of == reason) {
            Some((ranks, _)) => ranks.push(number),
            None => lines.push((vec![number], reason)),
        }
    }
    let line = |(mut ranks, reason): (Vec<usize>, String)| {
        ranks.sort_unstable();
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        let numbers = ranks.iter().map(usize::to_string);
        format!(
            "{word} {}: {reason}",
            numbers.collect::<Vec<_>>().join(", ")
        )
    };
    lines.into_iter().map(line).collect()
}

/// Describes the end of a process, as in "exited with status 3".
pub fn ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(number), _) => match Signal::try_from(number) {
            Ok(signal) => format!("killed by signal {number} ({signal})"),
            Err(_) => format!("killed by signal {number}"),
        },
        (None, code) => format!("exited with status {}", code.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::rendezvous::Hello;
    use std::net::{TcpListener, TcpStream};

    /// Work whose messages are texts. Its ranks are never started.
    struct Texts;

    impl Work for Texts {
        const COMMAND: &'static str = "texts";
        type Order = ();
        type Answer = String;

        fn work(
            _: Option<&Path>,
            _: &mpsc::Receiver<()>,
            _: &dyn Fn(String) -> Result<()>,
        ) -> Result<()> {
            Ok(())
        }
    }

    /// The rank is a process of another host, so its texts may be anything.
    #[test]
    fn texts_of_a_guest_reach_nothing_as_they_are() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let rank = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let version = "0".into();
        let job = "test".into();
        let host = "far".into();
        let machine = "m".into();
        let hello = Hello {
            version,
            job,
            rank: 0,
            ranks: 1,
            pid: 1,
            host,
            machine,
        };
        let guest = RankPlace::Guest(Guest {
            hello,
            line: listener.accept().unwrap().0,
        });
        let limit = Duration::from_secs(60);
        let mut job =
            Job::<Texts>::start(Path::new("/no/program"), vec![guest], limit, Watch::none())
                .unwrap();
        let (sender, _) = control::split(rank).unwrap();
        sender.send(&FromRank::Answer("\u{1b}[2Janswer")).unwrap();
        assert_eq!(job.order_all(|_| (), Some).unwrap(), ["?[2Janswer"]);
        sender
            .send(&FromRank::<()>::Failed {
                reason: "\u{1b}]0;x\u{7}gone".to_owned(),
            })
            .unwrap();
        assert_eq!(
            job.order_all(|_| (), Some).unwrap_err().to_string(),
            "rank 0: ?]0;x?gone"
        );
    }

    #[test]
    fn ranks_that_fail_alike_share_a_line() {
        let failures = [(2, "gone"), (1, "no rail"), (0, "gone")]
            .map(|(rank, reason)| (rank, reason.to_owned()));
        assert_eq!(
            by_reason(failures.to_vec()),
            ["ranks 0, 2: gone", "rank 1: no rail"]
        );
    }
}
