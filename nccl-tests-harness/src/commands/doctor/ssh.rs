//! Programs on other hosts, by ssh. It asks for nothing (`BatchMode`), so what needs a password fails at once, and every wait has a limit.

use crate::output;
use anyhow::{Context, Result, anyhow, bail};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How ssh is called.
#[derive(Debug, Clone)]
pub struct Ssh {
    /// The program and its options.
    words: Vec<String>,
    /// This program's name or path on the other hosts.
    program: String,
}

/// How long a host may take to answer.
pub const ANSWER: Duration = Duration::from_secs(30);
/// How long ssh may take to connect, in seconds.
const CONNECT_S: u32 = 10;
/// The longest line, and how many bytes of errors are kept.
const LINE_MAX_BYTES: u64 = 16 << 10;
const KEPT_BYTES: usize = 2 << 10;
/// How long a program may take to end after its output did.
const EXIT: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);

/// A program that runs on another host. It ends with this.
pub struct Remote {
    host: String,
    ssh: Child,
    /// Closed when this is dropped; the program there sees it.
    _input: Option<ChildStdin>,
    output: mpsc::Receiver<String>,
    errors: mpsc::Receiver<String>,
}

impl Ssh {
    /// `words` is the command, as in `ssh -p 22`; `program` is this program's name on the other hosts.
    ///
    /// # Errors
    /// What is allowed.
    pub fn new(words: &str, program: &str) -> Result<Self, String> {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() {
            return Err("--ssh: a command, as in \"ssh -p 22\"".to_owned());
        }
        if !is_plain(program, "/_.-+") {
            return Err(format!("--partner-program {program:?}: a name or path of letters, digits, / _ . - +"));
        }
        Ok(Self { words, program: program.to_owned() })
    }

    /// Starts this program with `arguments` on a host. What is in them must be plain: the shell there reads it.
    ///
    /// # Errors
    /// When ssh cannot be started.
    pub fn start(&self, host: &str, arguments: &[&str]) -> Result<Remote> {
        if let Some(odd) = arguments.iter().find(|one| !is_plain(one, "/_.-+:%=,")) {
            bail!("{odd:?} cannot be passed to {host}");
        }
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args(["-o", "BatchMode=yes", "-o", &format!("ConnectTimeout={CONNECT_S}")]);
        command.arg(host).arg(&self.program).args(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut ssh = command.spawn().with_context(|| format!("start {}", self.words[0]))?;
        let (output, errors) = (follow(ssh.stdout.take()), follow(ssh.stderr.take()));
        Ok(Remote { host: host.to_owned(), _input: ssh.stdin.take(), ssh, output, errors })
    }
}

impl Remote {
    /// The next line that it prints; `None` when it prints no more.
    ///
    /// # Errors
    /// When nothing comes by `end`.
    pub fn line(&mut self, end: Instant) -> Result<Option<String>> {
        match self.output.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => Ok(Some(line)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("{} did not answer by ssh in time{}", self.host, self.errors())
            }
        }
    }

    /// How it ended, once it prints no more.
    ///
    /// # Errors
    /// When it does not end.
    pub fn status(&mut self) -> Result<ExitStatus> {
        let end = Instant::now() + EXIT;
        loop {
            match self.ssh.try_wait().context("wait for ssh")? {
                Some(status) => return Ok(status),
                None if Instant::now() >= end => bail!("ssh to {} does not end", self.host),
                None => std::thread::sleep(LOOK),
            }
        }
    }

    /// Why there is no more output, as an error.
    pub fn ended(&mut self) -> anyhow::Error {
        let status = self.status().map_or_else(|error| error.to_string(), crate::ranks::job::ended);
        anyhow!("ssh {}: {status}{}", self.host, self.errors())
    }

    /// The last errors that were printed, as the end of a sentence.
    fn errors(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        // The thread that reads them may be about to.
        while let Ok(line) = self.errors.recv_timeout(LOOK * 10) {
            lines.push(line);
        }
        let text = lines.iter().filter(|line| !line.starts_with('#')).rev().take(3).cloned().collect::<Vec<_>>();
        let text: String = text.into_iter().rev().collect::<Vec<_>>().join("; ").chars().take(KEPT_BYTES).collect();
        if text.is_empty() { String::new() } else { format!(": {text}") }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        drop(self._input.take());
        // It may have ended by itself.
        let _ = self.ssh.kill();
        let _ = self.ssh.wait();
    }
}

/// Whether a host's name may be given to ssh: none that it would take for an option, and none that a shell would.
///
/// # Errors
/// What is allowed.
pub fn check_host(host: &str) -> Result<(), String> {
    let is_name = !host.is_empty() && host.len() <= 255 && !host.starts_with('-') && is_plain(host, "._-@:%");
    if is_name { Ok(()) } else { Err(format!("{host:?}: a host is a name or address, as in spark-2 or user@spark-2")) }
}

fn is_plain(text: &str, also: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || also.contains(c))
}

/// The lines of a stream, without control characters, until it ends. Of a line that is too long, and of more lines than anybody reads, the
/// rest is thrown away: the program at the other end must not stand still for it.
fn follow(stream: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    const MOST_LINES: usize = 1 << 16;
    let (lines_in, lines) = mpsc::channel();
    let Some(stream) = stream else { return lines };
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        for _ in 0..MOST_LINES {
            let mut bytes = Vec::new();
            match reader.by_ref().take(LINE_MAX_BYTES).read_until(b'\n', &mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&bytes);
            let text = output::plain(text.trim_end());
            if lines_in.send(text).is_err() {
                break;
            }
        }
        let _ = std::io::copy(&mut reader, &mut std::io::sink());
    });
    lines
}
