//! CPU wake-up latency request (`NCCL_SPARK_CPU_LATENCY_US`): keeps processors out of deep sleep.
//!
//! A process makes the request by opening `/dev/cpu_dma_latency` and writing a 32-bit integer in
//! machine byte order: the longest permitted wake-up time of any processor, in microseconds. The
//! request applies to the whole machine and costs power. It ends when the descriptor closes,
//! however the process ends (Linux, Documentation/power/pm_qos_interface.rst).
//!
//! This process keeps the request in effect while it has a connection. A refusal by the kernel is
//! logged once and not retried.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

const DEVICE: &str = "/dev/cpu_dma_latency";

/// State of the process's request.
#[derive(Debug)]
pub enum CpuLatency {
    /// The setting has no value.
    NotWanted,
    /// The request is wanted, but there is no connection.
    Wanted(Wish),
    /// The request is in effect until the descriptor is closed.
    Held { wish: Wish, _descriptor: File },
    /// The kernel has refused the request, and the refusal was logged.
    Refused,
}

/// The value of a request, and the device to write the value to.
#[derive(Debug, Clone)]
pub struct Wish {
    device: PathBuf,
    latency_us: u32,
}

impl CpuLatency {
    /// Creates the state for a value of the setting.
    pub fn new(latency_us: Option<u32>) -> Self {
        Self::of(PathBuf::from(DEVICE), latency_us)
    }

    pub(super) fn of(device: PathBuf, latency_us: Option<u32>) -> Self {
        latency_us.map_or(Self::NotWanted, |latency_us| Self::Wanted(Wish { device, latency_us }))
    }

    /// Makes the request if it is wanted and not in effect. Called when a connection opens.
    pub fn hold(&mut self) {
        let Self::Wanted(wish) = self else { return };
        let Wish { device, latency_us } = &*wish;
        *self = match wish.ask() {
            Ok(file) => {
                tracing::info!("CPU wake-up latency of at most {latency_us} us requested while connections are open");
                Self::Held { wish: wish.clone(), _descriptor: file }
            }
            Err(error) => {
                let device = device.display();
                tracing::warn!(
                    "NCCL_SPARK_CPU_LATENCY_US={latency_us} has no effect: {device}: {error}; the job continues; run as root, or let the job's user write to {device} (a udev rule)"
                );
                Self::Refused
            }
        };
    }

    /// Ends the request. Called when the last connection closes.
    pub fn release(&mut self) {
        if let Self::Held { wish, .. } = self {
            *self = Self::Wanted(wish.clone());
        }
    }
}

impl Wish {
    /// Makes the request. Child processes do not inherit the file: std opens it with `O_CLOEXEC`.
    fn ask(&self) -> std::io::Result<File> {
        let mut file = OpenOptions::new().write(true).open(&self.device)?;
        // One write: the kernel reads four bytes as a number, and any other length as text
        // (kernel/power/qos.c).
        let written = file.write(&self.latency_us.to_ne_bytes())?;
        if written == size_of::<u32>() { Ok(file) } else { Err(std::io::ErrorKind::WriteZero.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn stand_in() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("cpu_dma_latency");
        std::fs::write(&device, b"").unwrap();
        (folder, device)
    }

    fn is_open(device: &PathBuf) -> bool {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        open.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to == *device))
    }

    #[test]
    fn the_descriptor_stays_open_with_its_value_while_held() {
        let (_folder, device) = stand_in();
        let mut latency = CpuLatency::of(device.clone(), Some(0x0102));
        assert!(!is_open(&device));
        for _ in 0..2 {
            std::fs::write(&device, b"").unwrap();
            latency.hold();
            latency.hold();
            assert!(is_open(&device));
            assert_eq!(std::fs::read(&device).unwrap(), 0x0102_i32.to_ne_bytes());
            let CpuLatency::Held { _descriptor: file, .. } = &latency else { panic!("{latency:?}") };
            let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
            let flags = about.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
            let flags = i32::from_str_radix(flags, 8).unwrap();
            assert_ne!(flags & libc::O_CLOEXEC, 0, "programs that this process starts inherit it: {about}");
            latency.release();
            assert!(!is_open(&device));
        }
        latency.hold();
        drop(latency);
        assert!(!is_open(&device));
    }

    #[test]
    fn without_the_setting_nothing_is_opened() {
        let (_folder, device) = stand_in();
        let mut latency = CpuLatency::of(device.clone(), None);
        latency.hold();
        assert!(matches!(latency, CpuLatency::NotWanted) && !is_open(&device));
        assert!(matches!(CpuLatency::new(None), CpuLatency::NotWanted));
    }

    #[test]
    fn a_refusal_is_final() {
        let (_folder, device) = stand_in();
        let mut latency = CpuLatency::of(device.with_file_name("none"), Some(5));
        latency.hold();
        assert!(matches!(latency, CpuLatency::Refused));
        std::fs::write(device.with_file_name("none"), b"").unwrap();
        latency.release();
        latency.hold();
        assert!(matches!(latency, CpuLatency::Refused));
    }
}
