//! Packet losses of this host's rails, read from the counters of their ports.
//!
//! A short-lived thread reads the counters when the first connection starts, then every second
//! while there are connections, and when the last connection or a communicator ends. If the losses
//! exceed the tolerated rate ([`nic::TOLERATED_LOSS_ONE_IN`]), the thread writes a WARN, once in
//! the life of a process. Messages about stalls and lost rails show the newest values, which are
//! about a second old. A port's counters include the packets of other jobs.

use crate::clock;
use crate::comm::threads::{self, lock};
use host::counters::nic::{self, PortCounters};
use proto::time::Instant;
use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const EVERY: Duration = Duration::from_secs(1);
/// Longest wait of [`Losses::end`]. A kernel driver that recovers its device can block a reading
/// for longer. In unit tests, which must not depend on the machine's speed, the limit is longer.
const LAST: Duration = Duration::from_millis(if cfg!(test) { 5_000 } else { 500 });

/// The port counters of a process's rails.
#[derive(Debug)]
pub struct Losses {
    sysfs: PathBuf,
    ports: Vec<Port>,
    state: Mutex<State>,
}

/// The port of a rail.
#[derive(Debug, Clone)]
pub struct Port {
    /// Device of the rail.
    pub device: String,
    /// Number of the port.
    pub port: u8,
}

#[derive(Debug, Default)]
struct State {
    /// First and newest values of each port, in `ports` order. Empty before the first reading.
    values: Vec<(PortCounters, PortCounters)>,
    due: Option<Instant>,
    is_reading: bool,
    has_warned: bool,
    /// True once a line has named the ports without counters.
    has_named_uncounted: bool,
    /// One channel for each running call of [`Losses::end`]. The channel wakes the call after a
    /// reading that began after the call.
    waiting: Vec<SyncSender<()>>,
}

impl Losses {
    /// Creates the state for `ports`. Reads no counter yet. `sysfs` is the mount point of sysfs.
    pub fn new(sysfs: impl Into<PathBuf>, ports: Vec<Port>) -> Arc<Self> {
        Arc::new(Self {
            sysfs: sysfs.into(),
            ports,
            state: Mutex::default(),
        })
    }

    /// Starts a reading, from which all growth is counted. Called when a connection opens and no
    /// other is open.
    pub fn start(self: &Arc<Self>) {
        lock(&self.state).values.clear();
        self.read_soon();
    }

    /// Starts a reading if one is due. The service thread calls this in each round.
    pub fn tick(self: &Arc<Self>, now: Instant) {
        if lock(&self.state).due.is_some_and(|due| now >= due) {
            self.read_soon();
        }
    }

    /// Waits at most half a second for a last reading. Returns a text with the counters that have
    /// grown, if any.
    pub fn end(self: &Arc<Self>) -> Option<String> {
        if self.ports.is_empty() {
            return None;
        }
        let (done, wait) = sync_channel(1);
        lock(&self.state).waiting.push(done);
        self.read_soon();
        if wait.recv_timeout(LAST).is_err() {
            tracing::debug!("the counters of the ports were not read within {LAST:?}");
        }
        self.text(|_| true)
    }

    /// Returns the counters of one device, or of all devices, that have grown, as the end of a
    /// message: "; since the start: 4,830 packet_seq_err on rocep1s0f0". Empty if none has grown.
    /// Uses the last reading, so the call does not wait for the kernel driver.
    pub fn grown(&self, device: Option<&str>) -> String {
        self.text(|port| device.is_none_or(|device| port.device == device))
            .map(|text| format!("; {text}"))
            .unwrap_or_default()
    }

    fn text(&self, wanted: impl Fn(&Port) -> bool) -> Option<String> {
        let state = lock(&self.state);
        let ports = self
            .ports
            .iter()
            .zip(&state.values)
            .filter(|(port, _)| wanted(port));
        let text = |(port, (start, now)): (&Port, &(PortCounters, PortCounters))| {
            Some(format!(
                "{} on {}",
                nic::errors_text(&nic::growth(start, now))?,
                port.device
            ))
        };
        let texts: Vec<String> = ports.filter_map(text).collect();
        (!texts.is_empty()).then(|| format!("since the start: {}", texts.join("; ")))
    }

    fn read_soon(self: &Arc<Self>) {
        let mut state = lock(&self.state);
        if self.ports.is_empty() || std::mem::replace(&mut state.is_reading, true) {
            return;
        }
        drop(state);
        let this = Arc::clone(self);
        threads::detach("spark-counters", move || this.read());
    }

    fn read(&self) {
        loop {
            let waiting = std::mem::take(&mut lock(&self.state).waiting);
            let read = |port: &Port| nic::read(&self.sysfs, &port.device, port.port, nic::is_known);
            let now: Vec<PortCounters> = self.ports.iter().map(read).collect();
            let mut state = lock(&self.state);
            // Silence must not be taken for health.
            if let Some(names) = self.first_uncounted(&mut state) {
                tracing::info!("packet losses of {names} are not seen: {}", nic::NONE);
            }
            self.take(&mut state, now);
            // Fails if the waiting call has timed out.
            waiting.iter().for_each(|done| _ = done.try_send(()));
            if state.waiting.is_empty() {
                state.is_reading = false;
                return;
            }
        }
    }

    /// Returns the names of the ports without counters, in the first call if there are any.
    fn first_uncounted(&self, state: &mut State) -> Option<String> {
        if std::mem::replace(&mut state.has_named_uncounted, true) {
            return None;
        }
        let uncounted = self
            .ports
            .iter()
            .filter(|port| nic::has_none(&self.sysfs, &port.device, port.port));
        let names: Vec<String> = uncounted
            .map(|port| format!("{}:{}", port.device, port.port))
            .collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    fn take(&self, state: &mut State, now: Vec<PortCounters>) {
        let next = clock::now() + EVERY;
        if state.values.is_empty() {
            // If no port has counters, the readings every second do not begin.
            state.due = now.iter().any(|port| !port.is_empty()).then_some(next);
            state.values = now.into_iter().map(|port| (port.clone(), port)).collect();
            return;
        }
        state.due = state.due.map(|_| next);
        // The counters of a removed device cannot be read, so its last values stay.
        for ((_, newest), now) in state
            .values
            .iter_mut()
            .zip(now)
            .filter(|(_, now)| !now.is_empty())
        {
            *newest = now;
        }
        let lost = |(port, (start, now)): (&Port, &(PortCounters, PortCounters))| {
            Some(format!(
                "{} lost {}",
                port.device,
                nic::losses_text(&nic::growth(start, now))?
            ))
        };
        let texts: Vec<String> = self
            .ports
            .iter()
            .zip(&state.values)
            .filter_map(lost)
            .collect();
        if !texts.is_empty() && !std::mem::replace(&mut state.has_warned, true) {
            let one_in = nic::TOLERATED_LOSS_ONE_IN;
            tracing::warn!(
                "more than one packet in {one_in} is lost and sent again: {}; on a switch, give RoCE a priority with PFC \
                 on every host and port after the job (switches.md, NCCL_IB_TC); on a cable, re-seat it; see Loss in troubleshooting.md",
                texts.join("; ")
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    fn put(sysfs: &Path, device: &str, values: [u64; 2]) {
        let folder = sysfs
            .join("class/infiniband")
            .join(device)
            .join("ports/1/hw_counters");
        std::fs::create_dir_all(&folder).unwrap();
        for (name, value) in ["packet_seq_err", "port_xmit_packets"].iter().zip(values) {
            std::fs::write(folder.join(name), value.to_string()).unwrap();
        }
    }

    #[test]
    fn ports_without_counters_are_named_once() {
        let sysfs = tempfile::tempdir().unwrap();
        put(sysfs.path(), "d0", [0, 0]);
        std::fs::create_dir_all(sysfs.path().join("class/infiniband/d1/ports/1")).unwrap();
        let losses = losses(sysfs.path());
        assert_eq!(
            losses.first_uncounted(&mut lock(&losses.state)).unwrap(),
            "d1:1"
        );
        assert_eq!(losses.first_uncounted(&mut lock(&losses.state)), None);
    }

    fn losses(sysfs: &Path) -> Arc<Losses> {
        let port = |device: &str| Port {
            device: device.to_owned(),
            port: 1,
        };
        Losses::new(sysfs, vec![port("d0"), port("d1")])
    }

    /// Replaces a counter of d0 by a named pipe. Reading the counter then blocks until a writer
    /// opens the pipe. Returns the counter's file, and another name of the pipe.
    fn block(sysfs: &Path) -> (PathBuf, PathBuf) {
        let file = sysfs.join("class/infiniband/d0/ports/1/hw_counters/packet_seq_err");
        let pipe = sysfs.join("pipe");
        std::fs::remove_file(&file).unwrap();
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        std::fs::hard_link(&pipe, &file).unwrap();
        (file, pipe)
    }

    fn wait_until(mut is_true: impl FnMut() -> bool) {
        let end = clock::now() + Duration::from_secs(30);
        while !is_true() {
            assert!(clock::now() < end, "not true within 30 s");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn growth_counts_from_the_start_and_much_of_it_is_remembered() {
        let sysfs = tempfile::tempdir().unwrap();
        put(sysfs.path(), "d0", [100, 1_000]);
        put(sysfs.path(), "d1", [5, 7]);
        let losses = losses(sysfs.path());
        assert_eq!(losses.grown(Some("d0")), "", "nothing was read");
        losses.read();
        assert_eq!(
            (
                losses.grown(Some("d0")).as_str(),
                lock(&losses.state).has_warned
            ),
            ("", false),
            "the start"
        );
        put(sysfs.path(), "d0", [1_109, 100_001_000]);
        losses.read();
        assert_eq!(
            losses.grown(None),
            "; since the start: 1,009 packet_seq_err on d0"
        );
        assert_eq!(losses.grown(Some("d1")), "");
        assert!(lock(&losses.state).has_warned);
        put(sysfs.path(), "d1", [6, 8]);
        std::fs::remove_dir_all(sysfs.path().join("class/infiniband/d0")).unwrap();
        let text = losses.end().unwrap();
        assert_eq!(
            text,
            "since the start: 1,009 packet_seq_err on d0; 1 packet_seq_err on d1"
        );
        losses.start();
        assert_eq!(losses.end(), None);
        put(sysfs.path(), "d1", [8, 8]);
        losses.tick(clock::now() + 2 * EVERY);
        wait_until(|| losses.grown(None) == "; since the start: 2 packet_seq_err on d1");
    }

    /// A reading that began before the call of `end` does not count for this call.
    #[test]
    fn the_end_waits_for_a_reading_that_began_after_it() {
        let sysfs = tempfile::tempdir().unwrap();
        put(sysfs.path(), "d0", [1, 1]);
        let losses = losses(sysfs.path());
        losses.read();
        let (file, pipe) = block(sysfs.path());
        losses.tick(clock::now() + 2 * EVERY);
        // A writer can open the pipe, without waiting, as soon as the reading has opened it.
        let mut writer = None;
        wait_until(|| {
            writer = std::fs::File::options()
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(&pipe)
                .ok();
            writer.is_some()
        });
        let mut writer = writer.unwrap();
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, "5").unwrap();
        std::thread::scope(|scope| {
            let end = scope.spawn(|| losses.end());
            wait_until(|| !lock(&losses.state).waiting.is_empty() || end.is_finished());
            std::io::Write::write_all(&mut writer, b"1\n").unwrap();
            drop(writer);
            assert_eq!(
                end.join().unwrap().as_deref(),
                Some("since the start: 4 packet_seq_err on d0")
            );
        });
    }

    #[test]
    fn a_reading_that_blocks_delays_nothing_for_long_and_is_not_repeated() {
        let sysfs = tempfile::tempdir().unwrap();
        put(sysfs.path(), "d0", [1, 1]);
        let losses = losses(sysfs.path());
        losses.read();
        let (file, _) = block(sysfs.path());
        let later = clock::now() + 2 * EVERY;
        losses.tick(later);
        losses.tick(later);
        assert_eq!((losses.end(), lock(&losses.state).is_reading), (None, true));
        std::fs::write(&file, "1\n").unwrap();
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_port_without_counters_is_read_once() {
        let sysfs = tempfile::tempdir().unwrap();
        let losses = losses(sysfs.path());
        losses.read();
        assert_eq!((losses.end(), lock(&losses.state).due), (None, None));
        let none = Losses::new(sysfs.path(), Vec::new());
        assert_eq!((none.end(), lock(&none.state).is_reading), (None, false));
    }
}
