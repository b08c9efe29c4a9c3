//! Runs programs on other hosts over ssh. With `BatchMode`, a login that needs a password fails
//! instead of asking. Every wait has a limit.

use crate::output;
use crate::usage::wrong;
use anyhow::{Context, Result, anyhow, bail};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

#[derive(Debug, Clone)]
pub struct Ssh {
    words: Vec<String>,
    program: String,
}

/// Limit for one command, because `hosts::order` searches for an order of ranks.
pub const MOST_HOSTS: usize = 16;
pub const SSH_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit of connecting, in seconds.
const CONNECT_S: u32 = 10;
const LINE_MAX_BYTES: u64 = 16 << 10;
/// Longest error text.
const KEPT_BYTES: usize = 2 << 10;
/// Time limit for a program to exit after its output has ended.
const EXIT: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);

/// A program that runs on another host. It ends when this value is dropped.
pub struct Remote {
    host: String,
    ssh: Child,
    /// Closed on drop, which the program on the other host notices.
    _input: Option<ChildStdin>,
    output: mpsc::Receiver<String>,
    errors: mpsc::Receiver<String>,
}

impl Ssh {
    /// Takes the ssh command, as in `ssh -p 22`, and this program's name on the other hosts.
    ///
    /// # Errors
    /// Names the allowed form.
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

    /// Starts this program on a host. The remote shell reads `arguments`, so they must be plain.
    ///
    /// # Errors
    /// ssh cannot be started, or an argument is not plain.
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
    /// Returns the next line of output, or `None` at its end.
    ///
    /// # Errors
    /// No line comes until `end`.
    pub fn line(&mut self, end: Instant) -> Result<Option<String>> {
        match self.output.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => Ok(Some(line)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!("{} did not answer by ssh in time{}", self.host, self.errors())
            }
        }
    }

    /// Returns the exit status after the end of the output.
    ///
    /// # Errors
    /// The program does not end.
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

    pub fn ended(&mut self) -> anyhow::Error {
        let status = self.status().map_or_else(|error| error.to_string(), crate::ranks::job::ended);
        anyhow!("ssh {}: {status}{}", self.host, self.errors())
    }

    /// Returns the last lines of standard error, as the end of a sentence.
    fn errors(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        // The reading thread may need a moment.
        while let Ok(line) = self.errors.recv_timeout(LOOK * 10) {
            lines.push(line);
        }
        lines.retain(|line| !line.starts_with('#'));
        let last = lines.split_off(lines.len().saturating_sub(3));
        let text: String = last.join("; ").chars().take(KEPT_BYTES).collect();
        if text.is_empty() { String::new() } else { format!(": {text}") }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        drop(self._input.take());
        // Both fail if ssh has already ended.
        let _ = self.ssh.kill();
        let _ = self.ssh.wait();
    }
}

/// Checks that ssh and a shell take this text only as a host's name.
///
/// # Errors
/// Names the allowed form.
pub fn check_host(host: &str) -> Result<(), String> {
    let is_name = !host.is_empty() && host.len() <= 255 && !host.starts_with('-') && is_plain(host, "._-@:%");
    if is_name { Ok(()) } else { Err(format!("{host:?}: a host is a name or address, as in spark-2 or user@spark-2")) }
}

/// Checks the hosts of `--hosts`.
///
/// # Errors
/// A mistake on the command line.
pub fn check_hosts(hosts: &[String]) -> Result<(), clap::Error> {
    for (at, host) in hosts.iter().enumerate() {
        check_host(host).map_err(|allowed| wrong(format!("--hosts: {allowed}")))?;
        if hosts[..at].contains(host) {
            return Err(wrong(format!("--hosts: {host} is named twice")));
        }
    }
    match hosts.len() {
        2..=MOST_HOSTS => Ok(()),
        other => Err(wrong(format!("--hosts: {other} hosts; must be 2 to {MOST_HOSTS}"))),
    }
}

fn is_plain(text: &str, also: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || also.contains(c))
}

/// Sends the lines of a stream, without control characters, until its end. It also reads the excess
/// of a long line and all lines after `MOST_LINES`, so that the other program does not block.
fn follow(stream: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    const MOST_LINES: usize = 1 << 16;
    let (lines_in, lines) = mpsc::channel();
    let Some(stream) = stream else { return lines };
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        for _ in 0..MOST_LINES {
            let mut bytes = Vec::new();
            if !reader.by_ref().take(LINE_MAX_BYTES).read_until(b'\n', &mut bytes).is_ok_and(|count| count > 0) {
                return;
            }
            if lines_in.send(output::plain(String::from_utf8_lossy(&bytes).trim_end())).is_err() {
                break;
            }
        }
        let _ = std::io::copy(&mut reader, &mut std::io::sink());
    });
    lines
}
