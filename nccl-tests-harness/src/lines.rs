//! What child processes print, line by line as it comes, until all of them are done or time is up.

use anyhow::{Context, Result};
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long a child that was told to end may take before it is killed.
const GRACE: Duration = Duration::from_secs(10);

/// Gives every line of the children's standard output and error to `hear`, with the child's number; their exit statuses when
/// all have closed both, or none when `timeout` is over. Children that still run are ended then, and when `hear` fails. Both
/// streams must be pipes.
///
/// # Errors
/// That of `hear`, or the system's.
pub fn follow(
    children: &mut [Child],
    timeout: Duration,
    mut hear: impl FnMut(usize, &str) -> Result<()>,
) -> Result<Option<Vec<ExitStatus>>> {
    let (lines_in, lines) = mpsc::channel();
    for (number, child) in children.iter_mut().enumerate() {
        let output = child.stdout.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>);
        let errors = child.stderr.take().map(|stream| Box::new(stream) as Box<dyn Read + Send>);
        for stream in [output, errors].into_iter().flatten() {
            let lines_in = lines_in.clone();
            std::thread::spawn(move || pass_on(stream, |line| lines_in.send((number, line)).is_ok()));
        }
    }
    drop(lines_in);
    let deadline = Instant::now() + timeout;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((number, line)) => {
                if let Err(error) = hear(number, &line) {
                    children.iter_mut().for_each(end);
                    return Err(error);
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                children.iter_mut().for_each(end);
                return Ok(None);
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let statuses = children.iter_mut().map(|child| child.wait().context("wait for a process"));
    statuses.collect::<Result<Vec<_>>>().map(Some)
}

/// Reads until the stream ends or nobody listens.
fn pass_on(stream: impl Read, mut tell: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
        if !tell(String::from_utf8_lossy(&line).trim_end().to_owned()) {
            return;
        }
        line.clear();
    }
}

/// Asks a child to end, as mpirun needs it to end its ranks; one that does not is killed.
fn end(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    // Neither can fail but for a child that is gone, which is what is wanted.
    let _ = signal::kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
    let until = Instant::now() + GRACE;
    while Instant::now() < until {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    #[test]
    fn lines_of_all_children_and_both_streams_are_heard() {
        let mut heard = Vec::new();
        let mut children = [shell("echo a; echo b >&2"), shell("printf c; exit 3")];
        let ends = follow(&mut children, Duration::from_secs(60), |number, line| {
            heard.push((number, line.to_owned()));
            Ok(())
        });
        let codes: Vec<_> = ends.unwrap().unwrap().iter().map(|end| end.code()).collect();
        heard.sort();
        let expected = [(0, "a"), (0, "b"), (1, "c")].map(|(number, line)| (number, line.to_owned()));
        assert_eq!((heard, codes), (expected.to_vec(), vec![Some(0), Some(3)]));
    }

    #[test]
    fn children_that_go_on_are_ended() {
        let mut children = [shell("echo a; exec sleep 600"), shell("exec sleep 600")];
        let ends = follow(&mut children, Duration::from_millis(300), |_, _| Ok(()));
        assert!(ends.unwrap().is_none() && children.iter_mut().all(|child| matches!(child.try_wait(), Ok(Some(_)))));
        let mut children = [shell("echo a; exec sleep 600")];
        let ends = follow(&mut children, Duration::from_secs(60), |_, line| anyhow::bail!("enough of {line}"));
        assert_eq!(ends.unwrap_err().to_string(), "enough of a");
        assert!(matches!(children[0].try_wait(), Ok(Some(_))));
    }
}
