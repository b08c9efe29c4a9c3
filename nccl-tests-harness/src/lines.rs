//! Reads the output of child processes line by line, until all of them have ended or time is up.

use anyhow::{Context, Result};
use nix::sys::signal::{self, Signal};
use nix::sys::stat::Mode;
use nix::unistd::{self, Pid};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Time for a child to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(10);

/// A named pipe, which a process that is not a child can print into.
#[derive(Debug)]
pub struct NamedPipe {
    reader: File,
    /// Kept open, so that the stream does not end before a process has opened the pipe.
    writer: File,
}

impl NamedPipe {
    pub(crate) fn make(path: &Path) -> Result<Self> {
        let open = || {
            unistd::mkfifo(path, Mode::S_IRUSR | Mode::S_IWUSR)?;
            // Opening the pipe only for reading would wait for a writer.
            let writer = File::options().read(true).write(true).open(path)?;
            std::io::Result::Ok(Self {
                reader: File::open(path)?,
                writer,
            })
        };
        open().with_context(|| format!("make the pipe {}", path.display()))
    }
}

/// Passes every line of the children's standard output and error, and of `pipes`, to `on_line`. The
/// line keeps the spaces at its end, but not the newline. `on_line` also gets the child's index or,
/// for a pipe, the number of children plus the pipe's index. A child's standard output and error
/// are read only if the child was started with `Stdio::piped()` for them.
///
/// Reads until all children have closed both streams and no process has a pipe open for writing.
/// Then waits for the children to end, without a time limit, and returns their exit statuses. If
/// reading takes longer than `timeout`, ends the children that still run, and returns `None`. Also
/// ends the children when `on_line` fails.
///
/// # Errors
/// Fails when `on_line` fails, and on errors of the system.
pub fn follow(
    children: &mut [Child],
    pipes: Vec<NamedPipe>,
    timeout: Duration,
    mut on_line: impl FnMut(usize, &str) -> Result<()>,
) -> Result<Option<Vec<ExitStatus>>> {
    let (lines_in, lines) = mpsc::channel();
    let (readers, writers): (Vec<File>, Vec<File>) = pipes
        .into_iter()
        .map(|pipe| (pipe.reader, pipe.writer))
        .unzip();
    let mut streams: Vec<(usize, Box<dyn Read + Send>)> = Vec::new();
    for (number, child) in children.iter_mut().enumerate() {
        streams.extend(
            child
                .stdout
                .take()
                .map(|stream| (number, Box::new(stream) as Box<dyn Read + Send>)),
        );
        streams.extend(
            child
                .stderr
                .take()
                .map(|stream| (number, Box::new(stream) as Box<dyn Read + Send>)),
        );
    }
    let spawn = |(number, stream): (usize, Box<dyn Read + Send>)| {
        let lines_in = lines_in.clone();
        std::thread::spawn(move || pass_on(stream, |line| lines_in.send((number, line)).is_ok()))
    };
    let of_children: Vec<_> = streams.into_iter().map(spawn).collect();
    let count = children.len();
    readers
        .into_iter()
        .enumerate()
        .for_each(|(at, reader)| drop(spawn((count + at, Box::new(reader)))));
    std::thread::spawn(move || {
        // A reader that panicked has ended too, so its error does not matter.
        of_children
            .into_iter()
            .for_each(|reader| drop(reader.join()));
        drop(writers);
    });
    drop(lines_in);
    let deadline = Instant::now() + timeout;
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok((number, line)) => {
                if let Err(error) = on_line(number, &line) {
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
    let statuses = children
        .iter_mut()
        .map(|child| child.wait().context("wait for a process"));
    statuses.collect::<Result<Vec<_>>>().map(Some)
}

fn pass_on(stream: impl Read, mut tell: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while reader
        .read_until(b'\n', &mut line)
        .is_ok_and(|bytes| bytes > 0)
    {
        if !tell(
            String::from_utf8_lossy(&line)
                .trim_end_matches(['\n', '\r'])
                .to_owned(),
        ) {
            return;
        }
        line.clear();
    }
}

/// Sends SIGTERM to a child: mpirun then ends its ranks. Kills a child that does not end within
/// `GRACE`.
fn end(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    // `kill` fails only if the child has ended already, so errors are ignored here and below.
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
        command
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    #[test]
    fn lines_of_all_children_and_both_streams_are_read() {
        let mut lines = Vec::new();
        let mut children = [
            shell("printf 'a  \\r\\n'; echo b >&2"),
            shell("printf c; exit 3"),
        ];
        let ends = follow(
            &mut children,
            Vec::new(),
            Duration::from_secs(60),
            |number, line| {
                lines.push((number, line.to_owned()));
                Ok(())
            },
        );
        let codes: Vec<_> = ends
            .unwrap()
            .unwrap()
            .iter()
            .map(|end| end.code())
            .collect();
        lines.sort();
        let expected =
            [(0, "a  "), (0, "b"), (1, "c")].map(|(number, line)| (number, line.to_owned()));
        assert_eq!((lines, codes), (expected.to_vec(), vec![Some(0), Some(3)]));
    }

    #[test]
    fn lines_of_a_named_pipe_are_read_until_the_last_writer_closes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let pipes = vec![NamedPipe::make(&path).unwrap()];
        let script = format!(
            "echo a; (sleep 0.2; exec > {}; sleep 0.2; echo b; sleep 0.2; printf c) &",
            path.display()
        );
        let mut lines = Vec::new();
        let ends = follow(
            &mut [shell(&script)],
            pipes,
            Duration::from_secs(60),
            |number, line| {
                lines.push((number, line.to_owned()));
                Ok(())
            },
        );
        assert_eq!((lines.len(), ends.unwrap().unwrap().len()), (3, 1));
        assert_eq!(lines[1..], [(1, "b".to_owned()), (1, "c".to_owned())]);
        assert!(
            NamedPipe::make(&path)
                .unwrap_err()
                .to_string()
                .contains("make the pipe")
        );
        // A pipe that no process opens causes no delay.
        std::fs::remove_file(&path).unwrap();
        let pipes = vec![NamedPipe::make(&path).unwrap()];
        let ends = follow(
            &mut [shell("echo a")],
            pipes,
            Duration::from_secs(60),
            |_, _| Ok(()),
        );
        assert_eq!(ends.unwrap().unwrap().len(), 1);
    }

    #[test]
    fn children_that_go_on_are_ended() {
        let mut children = [shell("echo a; exec sleep 600"), shell("exec sleep 600")];
        let ends = follow(
            &mut children,
            Vec::new(),
            Duration::from_millis(300),
            |_, _| Ok(()),
        );
        assert!(
            ends.unwrap().is_none()
                && children
                    .iter_mut()
                    .all(|child| matches!(child.try_wait(), Ok(Some(_))))
        );
        let mut children = [shell("echo a; exec sleep 600")];
        let ends = follow(
            &mut children,
            Vec::new(),
            Duration::from_secs(60),
            |_, line| anyhow::bail!("enough of {line}"),
        );
        assert_eq!(ends.unwrap_err().to_string(), "enough of a");
        assert!(matches!(children[0].try_wait(), Ok(Some(_))));
    }
}
