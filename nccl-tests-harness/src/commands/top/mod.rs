//! `nccl-spark top`: the live traffic of this machine's jobs over their rails.
//!
//! `look` takes a reading: it reads the counters of all processes, without trusting their data.
//! `rates` computes the traffic between two readings (a snapshot), and `rows` sums it up by job,
//! peer and rail. `screen` shows snapshots in the terminal, drawn by `view`. Without a terminal,
//! `lines` or `json` prints them. `prometheus` writes them to a file. Only `look`, `session`,
//! `screen` and the file of `prometheus` do I/O. Jobs are not affected: the files with their
//! counters are read, but not mapped or written.

mod columns;
mod json;
mod lines;
pub mod look;
mod prometheus;
mod rates;
mod rows;
mod screen;
mod session;
mod view;

use crate::interrupt;
use crate::usage::wrong;
use anyhow::Result;
use clap::Args;
use look::Reader;
use prometheus::Textfile;
use rates::Rates;
use session::Session;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;
use view::View;

/// Options of top.
#[derive(Debug, Args)]
pub struct Options {
    /// Seconds from one reading to the next: 0.1 to 3600.
    #[arg(short, long, value_name = "S", default_value = "2", value_parser = parse_interval)]
    interval: Duration,
    /// Ends after N readings. The first comes one interval after the start [default: none].
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: Option<u32>,
    /// Looks at this process alone. May be repeated.
    #[arg(short, long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pid: Vec<u32>,
    /// Splits each rail by the peer's host.
    #[arg(long)]
    peers: bool,
    /// Prints each reading as a JSON object in a line of its own.
    #[arg(long)]
    json: bool,
    /// Writes each reading for node_exporter's textfile collector. FILE must end in .prom. It is
    /// removed at the end, unless --count ends the program.
    #[arg(long, value_name = "FILE", value_parser = prometheus::parse_path)]
    prometheus: Option<PathBuf>,
}

impl Options {
    /// Shows readings until a signal or a key ends the program, or --count readings were shown.
    ///
    /// # Errors
    /// A process does not exist, /proc cannot be read, or the output cannot be written.
    pub fn run(self, has_colours: bool) -> Result<()> {
        // A process that ends after this check only causes a remark.
        if let Some(pid) = self.pid.iter().find(|pid| !look::is_there(**pid)) {
            return Err(wrong(format!("--pid {pid}: there is no such process")))?;
        }
        interrupt::note()?;
        let is_screen =
            !self.json && std::io::stdout().is_terminal() && std::io::stdin().is_terminal();
        let mut session = Session {
            reader: Reader::new(&self.pid),
            rates: Rates::default(),
            textfile: self.prometheus.map(Textfile::new),
            interval: self.interval,
            readings_left: self.count,
        };
        if is_screen {
            screen::run(
                &mut session,
                View::new(self.peers, self.interval, has_colours),
            )?;
        } else {
            session.print(self.json, self.peers)?;
        }
        session.end();
        Ok(())
    }
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse::<f64>()
        .ok()
        .filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "must be 0.1 to 3600 seconds, as in 0.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(parse_interval("0.1"), Ok(Duration::from_millis(100)));
        assert_eq!(parse_interval("3600"), Ok(Duration::from_secs(3600)));
        for wrong in ["0", "0.09", "3600.1", "-1", "2s", "", "nan", "inf", "1e9"] {
            assert_eq!(
                parse_interval(wrong).unwrap_err(),
                "must be 0.1 to 3600 seconds, as in 0.5",
                "{wrong}"
            );
        }
    }
}
