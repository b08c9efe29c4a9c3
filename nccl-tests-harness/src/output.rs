//! Standard output and standard error, which may be a pipe whose reader has had enough: `nccl-spark ... | head`.

use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::io::{self, ErrorKind, Write};

/// Standard output.
pub fn standard() -> impl Write {
    Output(io::stdout())
}

/// Standard error.
pub fn error() -> impl Write {
    Output(io::stderr())
}

/// Whether `error` is only that nobody reads what the program writes. Other broken pipes are errors: a rank's line is a
/// pipe too.
pub fn is_unread(error: &anyhow::Error) -> bool {
    let unread = |cause: &(dyn Error + 'static)| {
        let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        inner.is_some_and(|inner| inner.is::<Unread>())
    };
    error.chain().any(unread)
}

struct Output<W>(W);

#[derive(Debug)]
struct Unread;

impl Display for Unread {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        formatter.write_str("nobody reads the output")
    }
}

impl Error for Unread {}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(named)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(named)
    }
}

fn named(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::BrokenPipe => io::Error::new(ErrorKind::BrokenPipe, Unread),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    struct Closed;

    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn output_that_nobody_reads_is_told_from_other_pipes() {
        let unread = writeln!(Output(Closed), "text").context("write the table").unwrap_err();
        assert!(is_unread(&unread));
        let other: anyhow::Error = io::Error::from(ErrorKind::BrokenPipe).into();
        assert!(!is_unread(&other.context("write to the control socket")));
    }
}
