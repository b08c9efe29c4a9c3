//! One call of top: its looks, and where they go without a terminal.

use super::json::LookJson;
use super::lines::Lines;
use super::look::Looker;
use super::prometheus::{self, Textfile};
use super::rates::{Picture, Rates};
use crate::{date, interrupt, output};
use anyhow::{Context, Result};
use std::io::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a signal waits at most.
pub const SLICE: Duration = Duration::from_millis(50);

/// All that one call of top keeps from look to look.
pub struct Session {
    /// Looks at the processes.
    pub looker: Looker,
    /// What the look before said.
    pub rates: Rates,
    /// The file for Prometheus.
    pub textfile: Option<Textfile>,
    /// From one look to the next.
    pub interval: Duration,
    /// None: until it is asked to end.
    pub looks_left: Option<u32>,
}

impl Session {
    /// Looks, and writes the file for Prometheus.
    pub fn look(&mut self) -> Result<Picture> {
        let picture = self.rates.take(self.looker.look().context("read /proc")?);
        if let Some(textfile) = &mut self.textfile {
            textfile.write(&prometheus::text(&picture)?)?;
        }
        Ok(picture)
    }

    /// Counts a look that was shown. False when it was the last.
    pub fn goes_on(&mut self) -> bool {
        self.looks_left = self.looks_left.map(|left| left.saturating_sub(1));
        self.looks_left != Some(0)
    }

    /// Prints looks as lines or JSON until it is asked to end, or as many as were asked for.
    pub fn print(&mut self, is_json: bool, by_peer: bool) -> Result<()> {
        let (mut lines, mut out) = (Lines::default(), output::standard());
        // What was before the first interval belongs to no rate.
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

    /// The file for Prometheus stays where the looks that were asked for are over, and goes where somebody ended them.
    pub fn end(self) {
        if let Some(textfile) = self.textfile.filter(|_| self.looks_left == Some(0)) {
            textfile.keep();
        }
    }
}

/// False when the program was asked to end.
fn wait_until(time: Instant) -> bool {
    loop {
        let left = time.saturating_duration_since(Instant::now());
        if interrupt::status().is_some() || left.is_zero() {
            return interrupt::status().is_none();
        }
        std::thread::sleep(left.min(SLICE));
    }
}

/// When the next look is due. Those that were missed, as while the machine slept, are left out.
pub fn after(time: Instant, interval: Duration) -> Instant {
    (time + interval).max(Instant::now())
}
