//! The meeting of the ranks that a launcher started. Rank 0 listens, the others connect and
//! introduce themselves. The messages of `control` then use these connections.

use crate::output;
use crate::ranks::line::{self, GreetingStream};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Place and name of a job's meeting.
#[derive(Debug, Clone)]
pub struct Meeting {
    /// Name or address of the machine of rank 0.
    pub host: String,
    /// Port of rank 0.
    pub port: u16,
    /// Name of the job, the same for all of its ranks. A rank with another name is refused.
    pub job: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Time that rank 0 waits for the other ranks, and that each other rank waits for rank 0.
    pub timeout: Duration,
}

/// The first message of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The program's version. Messages differ between versions.
    pub version: String,
    /// Name of the job.
    pub job: String,
    /// Number of the rank.
    pub rank: usize,
    /// Number of ranks that this rank expects.
    pub ranks: usize,
    /// Process id of the rank.
    pub pid: u32,
    /// Name of the machine, for people.
    pub host: String,
    /// Identity of the machine, for comparisons.
    pub machine: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome { environment: Vec<(String, String)> },
    Refused { reason: String },
}

/// A rank that has connected.
pub struct Guest {
    /// The rank's first message.
    pub hello: Hello,
    /// The connection to the rank.
    pub line: TcpStream,
}

/// Time for a connected client to send its first message.
const HELLO: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect. It is also rank 0's longest pause between two looks for
/// connections.
const RETRY: Duration = Duration::from_millis(20);
/// Time after which a waiting rank prints a remark about its wait.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of connections without a first message. All ranks of a large job may connect at
/// the same time.
const MAX_UNAUTHENTICATED: usize = 4096;

pub(crate) struct Rendezvous {
    arrivals: Arrivals<Hello>,
    meeting: Meeting,
}

/// A port, and the connections to it whose first message has arrived. A connection without a
/// message does not delay others and is closed after 5 s.
pub(super) struct Arrivals<T> {
    listener: TcpListener,
    hello_sender: mpsc::Sender<(T, GreetingStream, SocketAddr)>,
    hello_receiver: mpsc::Receiver<(T, GreetingStream, SocketAddr)>,
    /// Number of connections that have not sent their first message.
    unauthenticated: Arc<AtomicUsize>,
    /// Maximum number of `unauthenticated`. Further connections are closed.
    most: usize,
}

impl<T: DeserializeOwned + Send + 'static> Arrivals<T> {
    pub(super) fn of(listener: TcpListener, most: usize) -> Result<Self> {
        listener.set_nonblocking(true).context("set the rendezvous port")?;
        let (hello_sender, hello_receiver) = mpsc::channel();
        Ok(Self { listener, hello_sender, hello_receiver, unauthenticated: Arc::default(), most })
    }

    pub(super) fn address(&self) -> Result<SocketAddr> {
        self.listener.local_addr().context("ask for the port")
    }

    /// Returns the next connection whose first message has arrived, if any. Waits at most 20 ms.
    pub(super) fn next(&self) -> Option<(T, GreetingStream, SocketAddr)> {
        // An error of `accept` is not reported: no connection is waiting, or the error concerns one
        // connection or is temporary. The caller has a time limit.
        let Ok((stream, address)) = self.listener.accept() else { return self.hello_receiver.recv_timeout(RETRY).ok() };
        if self.unauthenticated.fetch_add(1, Ordering::Relaxed) >= self.most {
            self.unauthenticated.fetch_sub(1, Ordering::Relaxed);
            return self.hello_receiver.try_recv().ok();
        }
        let (hello_sender, unauthenticated) = (self.hello_sender.clone(), Arc::clone(&self.unauthenticated));
        std::thread::spawn(move || {
            let mut line = GreetingStream::new(stream, address.to_string(), Instant::now() + HELLO);
            let hello = line.as_mut().ok().and_then(|line| line.receive(HELLO).ok());
            unauthenticated.fetch_sub(1, Ordering::Relaxed);
            if let (Ok(line), Some(hello)) = (line, hello) {
                // The listening side may have ended.
                let _ = hello_sender.send((hello, line, address));
            }
        });
        self.hello_receiver.try_recv().ok()
    }
}

impl Rendezvous {
    /// Makes rank 0 listen. Fails when the host's name cannot be looked up, or the port is taken.
    pub fn open(meeting: Meeting) -> Result<Self> {
        let Meeting { host, port, .. } = &meeting;
        let loopback = addresses(host, *port)?.iter().all(|address| address.ip().is_loopback());
        // The host's name may stand for another address on other machines. So rank 0 listens on all
        // addresses, unless the host is given as a loopback address.
        let opened = match loopback && host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback()) {
            true => TcpListener::bind((host.as_str(), *port)),
            false => TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port))),
        };
        let listener = opened.map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::AddrInUse => "; --rendezvous HOST:PORT sets another one, the same on every rank",
                _ => "",
            };
            anyhow!("rank 0 cannot listen on port {port} for the other ranks: {error}{hint}")
        })?;
        Ok(Self { arrivals: Arrivals::of(listener, MAX_UNAUTHENTICATED)?, meeting })
    }

    /// Waits until all other ranks have connected. Returns them in rank order. `environment`
    /// returns the variables for a rank, or the reason why the rank cannot take part.
    ///
    /// # Errors
    /// Fails when a rank does not connect in time, or cannot take part.
    pub(crate) fn gather(self, environment: impl Fn(&Hello) -> Result<Vec<(String, String)>>) -> Result<Vec<Guest>> {
        let start = Instant::now();
        let deadline = start + self.meeting.timeout;
        let (mut guests, mut refused, mut has_remarked) = (BTreeMap::new(), Vec::new(), false);
        while guests.len() + 1 < self.meeting.ranks {
            let Some((hello, mut line, address)) = self.arrivals.next() else {
                ensure!(Instant::now() < deadline, "{}", self.missing(&guests, &refused));
                if !has_remarked && start.elapsed() >= PATIENCE {
                    has_remarked = true;
                    let Meeting { host, port, timeout, .. } = &self.meeting;
                    let place = format!("at {host}:{port} for ranks {}", self.absent(&guests));
                    remark(&format!("rank 0 waits up to {} s {place}", timeout.as_secs()));
                }
                continue;
            };
            if let Some(reason) = self.objection(&hello, &guests) {
                refused.push(format!("{address} was refused: {reason}"));
                // The other end may have closed, so errors are ignored.
                let _ = line.send(&Answer::Refused { reason });
                continue;
            }
            let environment = environment(&hello).inspect_err(|error| {
                let _ = line.send(&Answer::Refused { reason: format!("{error:#}") });
            })?;
            let sent = line.send(&Answer::Welcome { environment });
            sent.with_context(|| format!("lost the connection to rank {} ({})", hello.rank, hello.host))?;
            guests.insert(hello.rank, Guest { hello, line: line.settle()? });
        }
        Ok(guests.into_values().collect())
    }

    fn objection(&self, hello: &Hello, guests: &BTreeMap<usize, Guest>) -> Option<String> {
        let Meeting { job, ranks, .. } = &self.meeting;
        let version = env!("CARGO_PKG_VERSION");
        if hello.version != version {
            return Some(format!("it runs nccl-spark {}, rank 0 runs {version}", hello.version));
        }
        if hello.job != *job {
            return Some(format!("it belongs to the job {:?}, rank 0 to {job:?}", hello.job));
        }
        if hello.ranks != *ranks {
            return Some(format!("it expects {} ranks, rank 0 expects {ranks}", hello.ranks));
        }
        if hello.rank == 0 || hello.rank >= *ranks {
            return Some(format!("it is rank {}, and ranks 1 to {} connect", hello.rank, ranks - 1));
        }
        guests.get(&hello.rank).map(|guest| {
            format!("rank {} has connected already, as PID {} on {}", hello.rank, guest.hello.pid, guest.hello.host)
        })
    }

    fn absent(&self, guests: &BTreeMap<usize, Guest>) -> String {
        let absent = (1..self.meeting.ranks).filter(|rank| !guests.contains_key(rank)).map(|rank| rank.to_string());
        absent.collect::<Vec<_>>().join(", ")
    }

    fn missing(&self, guests: &BTreeMap<usize, Guest>, refused: &[String]) -> String {
        let Meeting { host, port, ranks, timeout, .. } = &self.meeting;
        let mut text = format!(
            "rank 0 waited {} s at {host}:{port}; of ranks 1 to {} did not connect: {}; --rendezvous HOST:PORT sets \
             another place, -r N starts all ranks on this machine",
            timeout.as_secs(),
            ranks - 1,
            self.absent(guests)
        );
        refused.iter().take(4).for_each(|line| text += &format!("\n{line}"));
        text
    }
}

/// Connects to rank 0. Returns the connection, and the variables that rank 0 sets for this rank.
///
/// # Errors
/// Fails when rank 0 is not found in time, or refuses this rank.
pub fn join(meeting: &Meeting, hello: &Hello) -> Result<(TcpStream, Vec<(String, String)>)> {
    let deadline = Instant::now() + meeting.timeout;
    let stream = dial(meeting, hello.rank, deadline)?;
    let rank_0 = format!("rank 0 at {}:{}", meeting.host, meeting.port);
    // Rank 0 answers one rank after another, so its answer may take all the time that is left.
    let left = deadline.saturating_duration_since(Instant::now()).max(HELLO);
    greet(stream, &rank_0, hello, left, "rank")
}

/// Sends the first message on a connection to [`Arrivals`], and waits up to `limit` for the answer.
/// `other` and `own` name both sides, for errors. Fails when no answer comes, or `other` refuses.
pub(super) fn greet(
    stream: TcpStream,
    other: &str,
    first: &impl Serialize,
    limit: Duration,
    own: &str,
) -> Result<(TcpStream, Vec<(String, String)>)> {
    let mut line = GreetingStream::new(stream, other, Instant::now() + limit)?;
    line.send(first)?;
    match line.receive(limit)? {
        Answer::Refused { reason } => bail!("{other} refused this {own}: {}", output::plain(&reason)),
        Answer::Welcome { environment } => Ok((line.settle()?, environment)),
    }
}

fn dial(meeting: &Meeting, rank: usize, deadline: Instant) -> Result<TcpStream> {
    let Meeting { host, port, timeout, .. } = meeting;
    let timeout_s = timeout.as_secs();
    let waiting = Waiting::start(format!("rank {rank} waits up to {timeout_s} s for rank 0 at {host}:{port}"));
    loop {
        // Each attempt looks up the host's name, which may become known only after the ranks start.
        match addresses(host, *port).and_then(|addresses| line::connect(&addresses, deadline)) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() >= deadline => bail!(
                "rank 0 was not found at {host}:{port} in {timeout_s} s ({error:#}); --rendezvous HOST:PORT sets \
                 another place, the same on every rank"
            ),
            Err(error) => waiting.fails(&error),
        }
        std::thread::sleep(RETRY);
    }
}

/// Prints a remark about a rank's wait, unless this value is dropped within [`PATIENCE`]. A thread
/// prints the remark, because the look-up of a name or an attempt to connect may alone take longer
/// than that.
struct Waiting {
    error: Arc<Mutex<String>>,
    /// Dropping this sender ends the thread.
    _end: mpsc::Sender<()>,
}

impl Waiting {
    fn start(wait: String) -> Self {
        let error = Arc::new(Mutex::new("no answer yet".to_owned()));
        let (end, is_over) = mpsc::channel();
        let last = Arc::clone(&error);
        std::thread::spawn(move || {
            if is_over.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                remark(&format!("{wait}: {}", last.lock().unwrap_or_else(PoisonError::into_inner)));
            }
        });
        Self { error, _end: end }
    }

    fn fails(&self, error: &anyhow::Error) {
        *self.error.lock().unwrap_or_else(PoisonError::into_inner) = format!("{error:#}");
    }
}

/// Prints a remark to standard error. --quiet leaves it out.
fn remark(text: &str) {
    // A rank also works without standard error, so an error is ignored.
    let _ = writeln!(output::error(), "# {text}");
}

fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let found = (host, port).to_socket_addrs().with_context(|| format!("look up the host {host}"))?;
    Ok(found.collect())
}

/// Parses `HOST:PORT`.
///
/// # Errors
/// The text has another form. The error names the allowed one.
pub fn parse_place(text: &str) -> Result<(String, u16), String> {
    let parts =
        text.rsplit_once(':').and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() && port > 0 => Ok((host.to_owned(), port)),
        _ => Err("HOST:PORT, as in spark-1:29501".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meeting(port: u16, ranks: usize, timeout_ms: u64) -> Meeting {
        let timeout = Duration::from_millis(timeout_ms);
        Meeting { host: "127.0.0.1".into(), port, job: "test".into(), ranks, timeout }
    }

    fn hello(rank: usize, ranks: usize) -> Hello {
        Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            job: "test".into(),
            rank,
            ranks,
            pid: 1,
            host: "here".into(),
            machine: "m".into(),
        }
    }

    fn open(ranks: usize, timeout_ms: u64) -> (Rendezvous, u16) {
        let rendezvous = Rendezvous::open(meeting(0, ranks, timeout_ms)).unwrap();
        let port = rendezvous.arrivals.address().unwrap().port();
        (rendezvous, port)
    }

    #[test]
    fn ranks_come_in_any_order_and_other_clients_are_refused() {
        let (rendezvous, port) = open(3, 20_000);
        let silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let gathering =
            std::thread::spawn(move || rendezvous.gather(|hello| Ok(vec![("A".into(), hello.rank.to_string())])));
        let refused = |hello: Hello, why: &str| {
            let error = join(&meeting(port, 3, 20_000), &hello).unwrap_err().to_string();
            assert!(error.contains("refused this rank") && error.contains(why), "{error}");
        };
        refused(Hello { job: "other".into(), ..hello(1, 3) }, "belongs to the job \"other\"");
        refused(Hello { version: "0".into(), ..hello(1, 3) }, "runs nccl-spark 0");
        refused(hello(1, 4), "expects 4 ranks");
        refused(hello(3, 3), "rank 3");
        refused(hello(0, 3), "rank 0");
        let two = join(&meeting(port, 3, 20_000), &hello(2, 3)).unwrap();
        refused(hello(2, 3), "has connected already");
        let one = join(&meeting(port, 3, 20_000), &hello(1, 3)).unwrap();
        assert_eq!((&one.1[0].1, &two.1[0].1), (&"1".to_owned(), &"2".to_owned()));
        let guests = gathering.join().unwrap().unwrap();
        assert_eq!(guests.iter().map(|guest| guest.hello.rank).collect::<Vec<_>>(), [1, 2]);
        // The message after the greeting is not lost.
        let end = |line: &TcpStream| {
            GreetingStream::new(line.try_clone().unwrap(), "the other", Instant::now() + Duration::from_secs(60))
                .unwrap()
        };
        end(&guests[0].line).send(&"next").unwrap();
        assert_eq!(end(&one.0).receive::<String>(Duration::from_secs(60)).unwrap(), "next");
        drop(silent);
    }

    #[test]
    fn missing_ranks_are_named() {
        let (rendezvous, port) = open(3, 300);
        let waiting = std::thread::spawn(move || rendezvous.gather(|_| Ok(Vec::new())));
        let one = join(&meeting(port, 3, 20_000), &hello(1, 3)).unwrap();
        let error = waiting.join().unwrap().map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("did not connect: 2;") && error.contains("--rendezvous"), "{error}");
        drop(one);
    }

    #[test]
    fn a_rank_that_cannot_take_part_ends_the_run_and_gets_the_reason() {
        let (rendezvous, port) = open(2, 20_000);
        let waiting = std::thread::spawn(move || rendezvous.gather(|_| bail!("another machine")));
        let error = join(&meeting(port, 2, 20_000), &hello(1, 2)).unwrap_err().to_string();
        assert!(error.contains("another machine"), "{error}");
        assert!(waiting.join().unwrap().is_err());
    }

    #[test]
    fn a_missing_rank_0_is_reported() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = join(&meeting(port, 2, 200), &hello(1, 2)).unwrap_err().to_string();
        assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("refused"), "{error}");
        let (rendezvous, port) = open(2, 200);
        let error = Rendezvous::open(meeting(port, 2, 200)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("in use") && error.contains("--rendezvous"), "{error}");
        drop(rendezvous);
    }
}
