//! The meeting of the ranks that a launcher started. Rank 0 listens at the address of the meeting
//! and nowhere else. The others connect and introduce themselves (`greeting`). The messages of
//! `control` then use these connections.
//!
//! A rank takes from rank 0 only the typed data in [`Welcome`]: no variable, no path of a library.

use crate::fabric::SoftPlace;
use crate::output;
use crate::ranks::greeting::{Answer, Arrival, Arrivals, Trust, greet};
use crate::ranks::line;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
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
    /// Conditions on which the ranks trust each other.
    pub trust: Trust,
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

/// Data that a rank gets from rank 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Welcome {
    /// The rank's place in rank 0's software fabric; `None` with RDMA devices.
    pub soft: Option<SoftPlace>,
}

/// A rank that has connected.
pub struct Guest {
    /// The rank's first message.
    pub hello: Hello,
    /// The connection to the rank.
    pub line: TcpStream,
}

/// Shortest time that a rank waits for rank 0's answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Pause between two attempts to connect.
const RETRY: Duration = Duration::from_millis(20);
/// Time after which a waiting rank prints a remark about its wait.
const PATIENCE: Duration = Duration::from_secs(2);
/// Number of refused connections that rank 0's error names.
const SHOWN_REFUSALS: usize = 4;
/// Maximum number of connections that have not introduced themselves. All ranks of a large job may
/// connect at the same time.
const MAX_UNAUTHENTICATED: usize = 4096;

pub(crate) struct Rendezvous {
    arrivals: Arrivals<Hello>,
    meeting: Meeting,
}

impl Rendezvous {
    /// Makes rank 0 listen. Fails when the host's name cannot be looked up, has no address of this
    /// machine, or needs a token, and when the port is taken.
    pub fn open(meeting: Meeting) -> Result<Self> {
        let Meeting {
            host, port, trust, ..
        } = &meeting;
        let found = addresses(host, *port)?;
        for address in &found {
            trust
                .check_address(address.ip())
                .with_context(|| format!("rank 0 does not listen at {host}:{port}"))?;
        }
        let mut listeners = Vec::new();
        let mut foreign = None;
        for address in places_to_listen(&meeting, found) {
            match TcpListener::bind(address) {
                Ok(listener) => listeners.push(listener),
                Err(error) if error.kind() == ErrorKind::AddrInUse => bail!(
                    "rank 0 cannot listen at {address} for the other ranks: {error}; --rendezvous HOST:PORT sets \
                     another port, the same on every rank"
                ),
                Err(error) => foreign = Some(anyhow!("{address}: {error}")),
            }
        }
        if let (true, Some(error)) = (listeners.is_empty(), foreign) {
            return Err(error.context(format!(
                "rank 0 cannot listen at {host}:{port}: --rendezvous must name an address of rank 0's machine"
            )));
        }
        let arrivals = Arrivals::new(listeners, trust.clone(), MAX_UNAUTHENTICATED)?;
        Ok(Self { arrivals, meeting })
    }

    /// Waits until all other ranks have connected. Returns them in rank order. `welcome` returns
    /// the data for a rank, or the reason why the rank cannot take part.
    ///
    /// # Errors
    /// Fails when a rank does not connect in time, or cannot take part.
    pub(crate) fn gather(self, welcome: impl Fn(&Hello) -> Result<Welcome>) -> Result<Vec<Guest>> {
        let start = Instant::now();
        let deadline = start + self.meeting.timeout;
        let mut guests = BTreeMap::new();
        let mut refused = Vec::new();
        let mut has_remarked = false;
        while guests.len() + 1 < self.meeting.ranks {
            let arrival = self.arrivals.next();
            ensure!(
                Instant::now() < deadline,
                "{}",
                self.missing(&guests, &refused)
            );
            if arrival.is_none() && !has_remarked && start.elapsed() >= PATIENCE {
                has_remarked = true;
                self.remark_wait(&guests);
            }
            let (hello, mut line, address) = match arrival {
                Some(Arrival::Admitted {
                    hello,
                    line,
                    address,
                }) => (hello.plain(), line, address),
                Some(Arrival::Refused { address, reason }) => {
                    refused.push(refusal(address, &reason));
                    refused.truncate(SHOWN_REFUSALS);
                    continue;
                }
                None => continue,
            };
            if let Some(reason) = self.objection(&hello, &guests) {
                refused.push(refusal(address, &reason));
                // The other end may have closed, so errors are ignored.
                let _ = line.send(&Answer::<Welcome>::Refused { reason });
                continue;
            }
            let welcome = welcome(&hello).inspect_err(|error| {
                let _ = line.send(&Answer::<Welcome>::Refused {
                    reason: format!("{error:#}"),
                });
            })?;
            let sent = line.send(&Answer::Welcome(welcome));
            sent.with_context(|| {
                format!(
                    "lost the connection to rank {} ({})",
                    hello.rank, hello.host
                )
            })?;
            guests.insert(
                hello.rank,
                Guest {
                    hello,
                    line: line.settle()?,
                },
            );
        }
        Ok(guests.into_values().collect())
    }

    fn remark_wait(&self, guests: &BTreeMap<usize, Guest>) {
        let Meeting {
            host,
            port,
            timeout,
            ..
        } = &self.meeting;
        let timeout_s = timeout.as_secs();
        let absent = self.absent(guests);
        let hint = self.loopback_hint();
        remark(&format!(
            "rank 0 waits up to {timeout_s} s at {host}:{port} for ranks {absent}{hint}"
        ));
    }

    /// Returns the end of a sentence if rank 0's name is a loopback address on its own machine, and
    /// without a token rank 0 listens nowhere else.
    fn loopback_hint(&self) -> String {
        let host = &self.meeting.host;
        let listens = self.arrivals.addresses().unwrap_or_default();
        match listens.first() {
            Some(first) if is_only_loopback_here(host, &listens) => format!(
                "; here {host} is {}, which other machines cannot reach: name an address of this machine instead",
                first.ip()
            ),
            _ => String::new(),
        }
    }

    fn objection(&self, hello: &Hello, guests: &BTreeMap<usize, Guest>) -> Option<String> {
        let Meeting { job, ranks, .. } = &self.meeting;
        let version = env!("CARGO_PKG_VERSION");
        if hello.version != version {
            return Some(format!(
                "it runs nccl-spark {}, rank 0 runs {version}",
                hello.version
            ));
        }
        if hello.job != *job {
            return Some(format!(
                "it belongs to the job {:?}, rank 0 to {job:?}",
                hello.job
            ));
        }
        if hello.ranks != *ranks {
            return Some(format!(
                "it expects {} ranks, rank 0 expects {ranks}",
                hello.ranks
            ));
        }
        if hello.rank == 0 || hello.rank >= *ranks {
            return Some(format!(
                "it is rank {}, and ranks 1 to {} connect",
                hello.rank,
                ranks - 1
            ));
        }
        guests.get(&hello.rank).map(|guest| {
            format!(
                "rank {} has connected already, as PID {} on {}",
                hello.rank, guest.hello.pid, guest.hello.host
            )
        })
    }

    fn absent(&self, guests: &BTreeMap<usize, Guest>) -> String {
        let absent = (1..self.meeting.ranks)
            .filter(|rank| !guests.contains_key(rank))
            .map(|rank| rank.to_string());
        absent.collect::<Vec<_>>().join(", ")
    }

    fn missing(&self, guests: &BTreeMap<usize, Guest>, refused: &[String]) -> String {
        let Meeting {
            host,
            port,
            ranks,
            timeout,
            ..
        } = &self.meeting;
        let mut text = format!(
            "rank 0 waited {} s at {host}:{port}; of ranks 1 to {} did not connect: {}; --rendezvous HOST:PORT sets \
             another place, -r N starts all ranks on this machine{}",
            timeout.as_secs(),
            ranks - 1,
            self.absent(guests),
            self.loopback_hint()
        );
        refused
            .iter()
            .take(SHOWN_REFUSALS)
            .for_each(|line| text += &format!("\n{line}"));
        text
    }
}

fn refusal(address: SocketAddr, reason: &str) -> String {
    format!("{address} was refused: {}", output::plain(reason))
}

impl Hello {
    /// Returns the message with texts that a terminal would not act on.
    fn plain(self) -> Self {
        let [version, job, host, machine] =
            [self.version, self.job, self.host, self.machine].map(|text| output::plain(&text));
        Self {
            version,
            job,
            host,
            machine,
            ..self
        }
    }
}

/// Connects to rank 0. Returns the connection, and rank 0's data for this rank.
///
/// # Errors
/// Fails when rank 0 is not found in time, is not trusted, or refuses this rank.
pub fn join(meeting: &Meeting, hello: &Hello) -> Result<(TcpStream, Welcome)> {
    let deadline = Instant::now() + meeting.timeout;
    let stream = dial(meeting, hello.rank, deadline)?;
    let rank_0 = format!("rank 0 at {}:{}", meeting.host, meeting.port);
    // Rank 0 answers one rank after another, so its answer may take all the time that is left.
    let left = deadline
        .saturating_duration_since(Instant::now())
        .max(ANSWER);
    greet(stream, [&rank_0, "rank"], &meeting.trust, hello, left)
}

fn dial(meeting: &Meeting, rank: usize, deadline: Instant) -> Result<TcpStream> {
    let Meeting {
        host,
        port,
        timeout,
        ..
    } = meeting;
    let timeout_s = timeout.as_secs();
    let waiting = Waiting::start(format!(
        "rank {rank} waits up to {timeout_s} s for rank 0 at {host}:{port}"
    ));
    loop {
        // Each attempt looks up the host's name, which may become known only after the ranks start.
        let found = addresses(host, *port);
        for address in found.iter().flatten() {
            let checked = meeting.trust.check_address(address.ip());
            checked.with_context(|| format!("rank {rank} does not connect to {host}:{port}"))?;
        }
        match found.and_then(|addresses| line::connect(&addresses, deadline)) {
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
                remark(&format!(
                    "{wait}: {}",
                    last.lock().unwrap_or_else(PoisonError::into_inner)
                ));
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

/// Returns the addresses at which rank 0 listens: those of the host that it was given. If these are
/// only loopback although the host is a name, rank 0 listens everywhere, so that other machines
/// can connect. The proof of the token protects the port. Without a token, rank 0 keeps to
/// loopback.
fn places_to_listen(meeting: &Meeting, found: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let Meeting {
        host, port, trust, ..
    } = meeting;
    if trust.token.is_none() || !is_only_loopback_here(host, &found) {
        return found;
    }
    // A machine without IPv6 has no such socket.
    let has_ipv6 = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok();
    let everywhere = if has_ipv6 {
        IpAddr::from(Ipv6Addr::UNSPECIFIED)
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    vec![SocketAddr::new(everywhere, *port)]
}

/// Returns true if `host` is a machine's name that stands for loopback addresses on that machine
/// itself. Debian and Ubuntu write the line `127.0.1.1 NAME` into /etc/hosts.
fn is_only_loopback_here(host: &str, found: &[SocketAddr]) -> bool {
    let is_on_purpose = host == "localhost" || host.parse::<IpAddr>().is_ok();
    !is_on_purpose && !found.is_empty() && found.iter().all(|address| address.ip().is_loopback())
}

fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let found = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("look up the host {host}"))?;
    let mut distinct = Vec::new();
    for address in found {
        if !distinct.contains(&address) {
            distinct.push(address);
        }
    }
    Ok(distinct)
}

/// Parses `HOST:PORT`.
///
/// # Errors
/// The text has another form. The error names the allowed one.
pub fn parse_place(text: &str) -> Result<(String, u16), String> {
    let parts = text
        .rsplit_once(':')
        .and_then(|(host, port)| Some((host.trim_matches(['[', ']']), port.parse().ok()?)));
    match parts {
        Some((host, port)) if !host.is_empty() && port > 0 => Ok((host.to_owned(), port)),
        _ => Err("HOST:PORT, as in spark-1:29501".to_owned()),
    }
}

#[cfg(test)]
mod tests;
