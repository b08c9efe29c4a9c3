//! One run of `nccl-spark top`: reads all counters once per interval. With --json or without a
//! terminal, prints the readings; otherwise `screen` shows them.

use super::json::SnapshotJson;
use super::lines::Lines;
use super::look::Reader;
use super::prometheus::{self, Textfile};
use super::rates::{Rates, Snapshot};
use crate::{date, interrupt, output};
use anyhow::{Context, Result};
use std::io::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longest sleep, and so the longest time to react to a signal.
pub const SLICE: Duration = Duration::from_millis(50);

pub struct Session {
    pub reader: Reader,
    pub rates: Rates,
    pub textfile: Option<Textfile>,
    pub interval: Duration,
    /// Number of readings left. `None` if only a signal or a key ends the program.
    pub readings_left: Option<u32>,
}

impl Session {
    pub fn read(&mut self) -> Result<Snapshot> {
        let snapshot = self
            .rates
            .take(self.reader.read_all().context("read /proc")?);
        if let Some(textfile) = &mut self.textfile {
            textfile.write(&prometheus::text(&snapshot)?)?;
        }
        Ok(snapshot)
    }

    /// Counts a reading. Returns false if this was the last of --count readings.
    pub fn goes_on(&mut self) -> bool {
        self.readings_left = self.readings_left.map(|left| left.saturating_sub(1));
        self.readings_left != Some(0)
    }

    /// Prints readings as lines or JSON until a signal comes, or --count readings are printed.
    pub fn print(&mut self, is_json: bool, by_peer: bool) -> Result<()> {
        let mut lines = Lines::default();
        let mut out = output::standard();
        // The first reading only starts the first interval.
        self.read()?;
        let mut next = Instant::now() + self.interval;
        while wait_until(next) {
            let snapshot = self.read()?;
            if is_json {
                let now = SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0.0, |since| since.as_secs_f64());
                writeln!(
                    out,
                    "{}",
                    serde_json::to_string(&SnapshotJson::new(&snapshot, by_peer, now))?
                )?;
                out.flush()?;
            } else {
                lines.write(&mut out, &snapshot, by_peer, &date::moment())?;
            }
            if !self.goes_on() {
                break;
            }
            next = after(next, self.interval);
        }
        Ok(())
    }

    /// Ends the run. Keeps the file for Prometheus if --count readings were taken. Removes the file
    /// if a signal or a key ended the run before.
    pub fn end(self) {
        if let Some(textfile) = self.textfile.filter(|_| self.readings_left == Some(0)) {
            textfile.keep();
        }
    }
}

/// Waits until `time`. Returns false after a signal.
fn wait_until(time: Instant) -> bool {
    loop {
        let left = time.saturating_duration_since(Instant::now());
        if interrupt::status().is_some() || left.is_zero() {
            return interrupt::status().is_none();
        }
        std::thread::sleep(left.min(SLICE));
    }
}

/// Returns the time of the reading after the one at `time`. Skips missed readings, for example
/// after the machine slept.
pub fn after(time: Instant, interval: Duration) -> Instant {
    (time + interval).max(Instant::now())
}
