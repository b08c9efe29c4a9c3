//! CPU wake-up latency request (`NCCL_SPARK_CPU_LATENCY_US`): keeps processors out of deep sleep
//! while connections carry traffic.
//!
//! A process makes the request by opening `/dev/cpu_dma_latency` and writing a 32-bit integer in
//! machine byte order: the longest permitted wake-up time of any processor, in microseconds. The
//! request applies to the whole machine and costs power. It ends when the descriptor closes,
//! however the process ends (Linux, Documentation/power/pm_qos_interface.rst).
//!
//! On a GB10 the request is made without a setting ([`LatencyLimit::on`]).
//!
//! The request begins when a connection opens, and ends [`IDLE`] after the last work, so that a
//! server without requests can sleep. The service thread compares the lanes' counters, so the data
//! path does nothing for it. A refusal by the kernel is logged once and not retried.

use host::config::LatencyLimit;
use proto::time::Instant;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

const DEVICE: &str = "/dev/cpu_dma_latency";
/// Time without work after which the request ends.
const IDLE: Duration = Duration::from_secs(60);
/// The kernel's own value, which limits nothing: `PM_QOS_CPU_LATENCY_DEFAULT_VALUE` in pm_qos.h.
const NO_LIMIT_US: u32 = 2_000_000_000;
/// Interval between comparisons of the counters.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The process's request, and the work that keeps it in effect.
#[derive(Debug)]
pub struct CpuLatency {
    request: Request,
    /// Sum of the lanes' counters at the last comparison, and the time when it last changed.
    work: Option<(u64, Instant)>,
    compared: Option<Instant>,
    has_logged: bool,
}

#[derive(Debug)]
enum Request {
    /// Not wanted on this host.
    None,
    /// Wanted, but nothing needs it now.
    Wanted(Wish),
    /// In effect until [`NO_LIMIT_US`] is written, or the last copy of the descriptor is closed.
    Held { wish: Wish, file: File },
    /// The kernel has refused the request, and the refusal was logged.
    Refused,
}

/// The value of a request, and the device to write the value to.
#[derive(Debug, Clone)]
struct Wish {
    device: PathBuf,
    latency_us: u32,
    /// False if the setting asks for the request.
    is_automatic: bool,
}

impl CpuLatency {
    /// Creates the state for a value of the setting on a host with this GPU.
    pub fn new(limit: LatencyLimit, gpu: &str) -> Self {
        Self::of(PathBuf::from(DEVICE), limit, gpu)
    }

    pub(super) fn of(device: PathBuf, limit: LatencyLimit, gpu: &str) -> Self {
        let is_automatic = limit == LatencyLimit::Auto;
        let wish = limit.on(gpu).map(|latency_us| Wish {
            device,
            latency_us,
            is_automatic,
        });
        let request = wish.map_or(Request::None, Request::Wanted);
        Self {
            request,
            work: None,
            compared: None,
            has_logged: false,
        }
    }

    /// Makes the request if it is wanted and not in effect. Called when a connection opens.
    pub fn hold(&mut self, now: Instant) {
        self.work = self.work.map(|(work, _)| (work, now));
        let Request::Wanted(wish) = &self.request else {
            return;
        };
        self.request = match wish.ask() {
            Ok(file) => {
                let latency_us = wish.latency_us;
                if !std::mem::replace(&mut self.has_logged, true) {
                    tracing::info!(
                        "CPU wake-up latency of at most {latency_us} us requested while connections carry traffic"
                    );
                }
                Request::Held {
                    wish: wish.clone(),
                    file,
                }
            }
            Err(error) => {
                wish.log_refusal(&error);
                Request::Refused
            }
        };
    }

    /// Ends the request. Called when the last connection closes.
    pub fn release(&mut self) {
        if let Request::Held { wish, file } = &mut self.request {
            // A forked child has a copy of the descriptor, which would keep the request in effect.
            if let Err(error) = file.write(&NO_LIMIT_US.to_ne_bytes()) {
                tracing::debug!("the CPU wake-up latency was not reset: {error}");
            }
            self.request = Request::Wanted(wish.clone());
        }
    }

    /// Ends the request after [`IDLE`] without work, and makes it again when there is work. `work`
    /// returns the sum of the lanes' counters. The service thread calls this in each round.
    pub fn follow(&mut self, now: Instant, work: impl FnOnce() -> u64) {
        let is_due = self
            .compared
            .is_none_or(|compared| now.saturating_duration_since(compared) >= LOOK_EVERY);
        if !is_due || matches!(self.request, Request::None | Request::Refused) {
            return;
        }
        self.compared = Some(now);
        let work = work();
        match self.work {
            Some((before, since)) if before == work => {
                if now.saturating_duration_since(since) >= IDLE {
                    self.release();
                }
            }
            before => {
                self.work = Some((work, now));
                if before.is_some() {
                    self.hold(now);
                }
            }
        }
    }

    /// Returns true while the request is in effect.
    #[cfg(test)]
    pub fn is_held(&self) -> bool {
        matches!(self.request, Request::Held { .. })
    }
}

impl Wish {
    /// Makes the request. Child processes do not inherit the file: std opens it with `O_CLOEXEC`.
    fn ask(&self) -> std::io::Result<File> {
        let mut file = OpenOptions::new().write(true).open(&self.device)?;
        // One write: the kernel reads four bytes as a number, and any other length as text
        // (kernel/power/qos.c).
        let written = file.write(&self.latency_us.to_ne_bytes())?;
        if written == size_of::<u32>() {
            Ok(file)
        } else {
            Err(std::io::ErrorKind::WriteZero.into())
        }
    }

    fn log_refusal(&self, error: &std::io::Error) {
        let device = self.device.display();
        let latency_us = self.latency_us;
        if self.is_automatic {
            tracing::info!(
                "processors may sleep deeply between collectives, which delays the first one after a pause by some 0.5 ms: {device}: \
                 {error}; let the job's user write to {device} (group rdma, with the udev rule of the package; in a container \
                 --device {device})"
            );
        } else {
            tracing::warn!(
                "NCCL_SPARK_CPU_LATENCY_US={latency_us} has no effect: {device}: {error}; the job continues; run as root, or let the job's user write to {device} (a udev rule)"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use std::os::fd::AsRawFd;

    fn stand_in() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("cpu_dma_latency");
        std::fs::write(&device, b"").unwrap();
        (folder, device)
    }

    fn is_open(device: &PathBuf) -> bool {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        open.flatten()
            .any(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to == *device))
    }

    #[test]
    fn the_descriptor_stays_open_with_its_value_while_held() {
        let (_folder, device) = stand_in();
        let mut latency = CpuLatency::of(device.clone(), LatencyLimit::Us(0x0102), "");
        let now = clock::now();
        assert!(!is_open(&device));
        for _ in 0..2 {
            std::fs::write(&device, b"").unwrap();
            latency.hold(now);
            latency.hold(now);
            assert!(is_open(&device));
            assert_eq!(std::fs::read(&device).unwrap(), 0x0102_i32.to_ne_bytes());
            let Request::Held { file, .. } = &latency.request else {
                panic!("{latency:?}")
            };
            let about =
                std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
            let flags = about
                .lines()
                .find_map(|line| line.strip_prefix("flags:"))
                .unwrap()
                .trim();
            let flags = i32::from_str_radix(flags, 8).unwrap();
            assert_ne!(
                flags & libc::O_CLOEXEC,
                0,
                "programs that this process starts inherit it: {about}"
            );
            latency.release();
            assert!(!is_open(&device));
            let written = [0x0102_u32, NO_LIMIT_US].map(u32::to_ne_bytes).concat();
            assert_eq!(
                std::fs::read(&device).unwrap(),
                written,
                "a child's copy keeps no request"
            );
        }
        latency.hold(now);
        drop(latency);
        assert!(!is_open(&device));
    }

    #[test]
    fn a_minute_without_work_ends_the_request_and_work_makes_it_again() {
        let (_folder, device) = stand_in();
        let mut latency = CpuLatency::of(device, LatencyLimit::Us(20), "");
        let start = clock::now();
        latency.hold(start);
        let mut at = |second: u64, work: u64| {
            latency.follow(start + Duration::from_secs(second), || work);
            latency.is_held()
        };
        assert!(
            at(0, 5) && at(10, 7) && at(69, 7),
            "59 s after the last work"
        );
        assert!(!at(70, 7) && !at(500, 7));
        assert!(at(501, 8) && at(560, 8) && !at(561, 8));
        // Between two comparisons the counters are not read.
        let mut latency = CpuLatency::of(PathBuf::from("/none"), LatencyLimit::Us(20), "");
        latency.follow(start, || 1);
        latency.follow(start + Duration::from_millis(999), || {
            panic!("read too early")
        });
    }

    #[test]
    fn only_the_setting_or_a_gb10_makes_a_request() {
        let (_folder, device) = stand_in();
        for (limit, gpu, value) in [
            (LatencyLimit::Auto, "NVIDIA GB10", Some(20)),
            (LatencyLimit::Auto, "NVIDIA H200", None),
            (LatencyLimit::Off, "NVIDIA GB10", None),
            (LatencyLimit::Us(7), "NVIDIA GB10", Some(7)),
            (LatencyLimit::Us(7), "unknown", Some(7)),
        ] {
            std::fs::write(&device, b"").unwrap();
            let mut latency = CpuLatency::of(device.clone(), limit, gpu);
            latency.hold(clock::now());
            assert_eq!(
                (latency.is_held(), is_open(&device)),
                (value.is_some(), value.is_some()),
                "{limit:?} {gpu}"
            );
            let written = std::fs::read(&device).unwrap();
            assert_eq!(
                written,
                value.map_or(Vec::new(), |value: u32| value.to_ne_bytes().to_vec())
            );
        }
    }

    #[test]
    fn a_refusal_is_final() {
        let (_folder, device) = stand_in();
        let gone = device.with_file_name("none");
        let mut latency = CpuLatency::of(gone.clone(), LatencyLimit::Us(5), "");
        let now = clock::now();
        latency.hold(now);
        std::fs::write(gone, b"").unwrap();
        latency.release();
        latency.hold(now);
        latency.follow(now, || panic!("a refused request needs no counters"));
        assert!(matches!(latency.request, Request::Refused));
    }
}
