//! Runs programs on other hosts over ssh. With `BatchMode`, a login that needs a password fails
//! instead of asking. Every wait has a time limit.

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

/// Maximum number of hosts. The search in `hosts::order` grows exponentially with this number.
pub const MOST_HOSTS: usize = 16;
pub const SSH_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for ssh to connect, in seconds.
const CONNECT_S: u32 = 10;
const LINE_MAX_BYTES: u64 = 16 << 10;
/// Maximum length of an error text, in characters.
const ERROR_MAX_CHARS: usize = 2 << 10;
/// Time limit for ssh to exit after the remote program's output has ended.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A program that runs on another host. It ends when this value is dropped.
pub struct Remote {
    host: String,
    ssh: Child,
    /// Standard input of the program. A partner (`doctor --partner --attached`) ends when its
    /// standard input is closed.
    _input: Option<ChildStdin>,
    output: mpsc::Receiver<String>,
    errors: mpsc::Receiver<String>,
}

impl Ssh {
    /// `words` is the ssh command, as in `ssh -p 22`. `program` is the name or path of `nccl-spark`
    /// on the other hosts.
    ///
    /// # Errors
    /// `words` or `program` is empty, or `program` has a forbidden character.
    pub fn new(words: &str, program: &str) -> Result<Self, String> {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() {
            return Err("--ssh: a command, as in \"ssh -p 22\"".to_owned());
        }
        if !is_plain(program, "/_.-+") {
            return Err(format!(
                "--partner-program {program:?}: a name or path of letters, digits, / _ . - +"
            ));
        }
        Ok(Self {
            words,
            program: program.to_owned(),
        })
    }

    /// Starts `nccl-spark` on a host. The remote shell interprets `arguments`, so few characters
    /// are allowed besides letters and digits.
    ///
    /// # Errors
    /// ssh cannot be started, or an argument is empty or has a forbidden character.
    pub fn start(&self, host: &str, arguments: &[&str]) -> Result<Remote> {
        if let Some(odd) = arguments.iter().find(|one| !is_plain(one, "/_.-+:%=,")) {
            bail!("{odd:?} cannot be passed to {host}");
        }
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).args([
            "-o",
            "BatchMode=yes",
            "-o",
            &format!("ConnectTimeout={CONNECT_S}"),
        ]);
        command.arg(host).arg(&self.program).args(arguments);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut ssh = command
            .spawn()
            .with_context(|| format!("start {}", self.words[0]))?;
        let output = follow(ssh.stdout.take());
        let errors = follow(ssh.stderr.take());
        Ok(Remote {
            host: host.to_owned(),
            _input: ssh.stdin.take(),
            ssh,
            output,
            errors,
        })
    }
}

impl Remote {
    /// Returns the next line of the program's output, or `None` at the end of the output.
    ///
    /// # Errors
    /// No line arrives before `end`.
    pub fn line(&mut self, end: Instant) -> Result<Option<String>> {
        match self
            .output
            .recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            Ok(line) => Ok(Some(line)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                bail!(
                    "{} did not answer by ssh in time{}",
                    self.host,
                    self.errors()
                )
            }
        }
    }

    /// Waits for ssh to exit, and returns its exit status. Callers should have read the output to
    /// its end, because until then the remote program may still run.
    ///
    /// # Errors
    /// ssh does not exit within 5 s.
    pub fn status(&mut self) -> Result<ExitStatus> {
        let end = Instant::now() + EXIT_TIMEOUT;
        loop {
            match self.ssh.try_wait().context("wait for ssh")? {
                Some(status) => return Ok(status),
                None if Instant::now() >= end => bail!("ssh to {} does not end", self.host),
                None => std::thread::sleep(POLL_INTERVAL),
            }
        }
    }

    pub fn exit_error(&mut self) -> anyhow::Error {
        let status = self
            .status()
            .map_or_else(|error| error.to_string(), crate::ranks::job::ended);
        anyhow!("ssh {}: {status}{}", self.host, self.errors())
    }

    /// Returns a colon and the last three lines of standard error, or an empty text if there are no
    /// lines. Lines that begin with `#` do not count.
    fn errors(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        // The reading thread may not have sent the last lines yet.
        while let Ok(line) = self.errors.recv_timeout(POLL_INTERVAL * 10) {
            lines.push(line);
        }
        lines.retain(|line| !line.starts_with('#'));
        let last = lines.split_off(lines.len().saturating_sub(3));
        let text: String = last.join("; ").chars().take(ERROR_MAX_CHARS).collect();
        if text.is_empty() {
            String::new()
        } else {
            format!(": {text}")
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        drop(self._input.take());
        // `drop` cannot report an error. If ssh has already ended, both calls succeed.
        let _ = self.ssh.kill();
        let _ = self.ssh.wait();
    }
}

/// Checks that ssh and a shell interpret `host` only as a host's name.
///
/// # Errors
/// `host` is not a host's name.
pub fn check_host(host: &str) -> Result<(), String> {
    let is_name =
        !host.is_empty() && host.len() <= 255 && !host.starts_with('-') && is_plain(host, "._-@:%");
    if is_name {
        Ok(())
    } else {
        Err(format!(
            "{host:?}: a host is a name or address, as in spark-2 or user@spark-2"
        ))
    }
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
        other => Err(wrong(format!(
            "--hosts: {other} hosts; must be 2 to {MOST_HOSTS}"
        ))),
    }
}

fn is_plain(text: &str, also: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || also.contains(c))
}

/// Starts a thread that sends the lines of a stream, without control characters. A line longer than
/// `LINE_MAX_BYTES` is sent in pieces. Lines after the first `MOST_LINES` are read and dropped, so
/// that the program that writes them does not block.
fn follow(stream: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    const MOST_LINES: usize = 1 << 16;
    let (lines_in, lines) = mpsc::channel();
    let Some(stream) = stream else { return lines };
    std::thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        for _ in 0..MOST_LINES {
            let mut bytes = Vec::new();
            if !reader
                .by_ref()
                .take(LINE_MAX_BYTES)
                .read_until(b'\n', &mut bytes)
                .is_ok_and(|count| count > 0)
            {
                return;
            }
            if lines_in
                .send(output::plain(String::from_utf8_lossy(&bytes).trim_end()))
                .is_err()
            {
                break;
            }
        }
        let _ = std::io::copy(&mut reader, &mut std::io::sink());
    });
    lines
}
