//! One run of `nccl-spark top`: takes looks (readings of all counters), and prints them if there is
//! no terminal.

use super::json::LookJson;
use super::lines::Lines;
use super::look::Looker;
use super::prometheus::{self, Textfile};
use super::rates::{Picture, Rates};
use crate::{date, interrupt, output};
use anyhow::{Context, Result};
use std::io::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longest sleep, and so the longest time to react to a signal.
pub const SLICE: Duration = Duration::from_millis(50);

pub struct Session {
    pub looker: Looker,
    pub rates: Rates,
    pub textfile: Option<Textfile>,
    pub interval: Duration,
    /// Number of looks left. `None` if only a signal or a key ends the program.
    pub looks_left: Option<u32>,
}

impl Session {
    pub fn look(&mut self) -> Result<Picture> {
        let picture = self.rates.take(self.looker.look().context("read /proc")?);
        if let Some(textfile) = &mut self.textfile {
            textfile.write(&prometheus::text(&picture)?)?;
        }
        Ok(picture)
    }

    /// Counts a look that was shown. Returns false after the last look.
    pub fn goes_on(&mut self) -> bool {
        self.looks_left = self.looks_left.map(|left| left.saturating_sub(1));
        self.looks_left != Some(0)
    }

    /// Prints looks as lines or JSON until a signal, or for --count looks.
    pub fn print(&mut self, is_json: bool, by_peer: bool) -> Result<()> {
        let (mut lines, mut out) = (Lines::default(), output::standard());
        // The first look only starts the first interval.
        self.look()?;
        let mut next = Instant::now() + self.interval;
        while wait_until(next) {
            let picture = self.look()?;
            if is_json {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
                writeln!(out, "{}", serde_json::to_string(&LookJson::new(&picture, by_peer, now))?)?;
                out.flush()?;
            } else {
                lines.write(&mut out, &picture, by_peer, &date::moment())?;
            }
            if !self.goes_on() {
                break;
            }
            next = after(next, self.interval);
        }
        Ok(())
    }

    /// Keeps the file for Prometheus after --count looks, and removes it after a signal.
    pub fn end(self) {
        if let Some(textfile) = self.textfile.filter(|_| self.looks_left == Some(0)) {
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

/// Returns the time of the look after the one at `time`. Skips missed looks, for example after the
/// machine slept.
pub fn after(time: Instant, interval: Duration) -> Instant {
    (time + interval).max(Instant::now())
}
