//! Asks the kernel to keep the processors from sleeping deeply: `NCCL_SPARK_CPU_LATENCY_US`.
//!
//! A process that holds `/dev/cpu_dma_latency` open, with a 32-bit integer in the machine's byte order written to it, asks that no processor
//! take longer than so many microseconds to wake up. The request ends when the descriptor closes, however the process ends (Linux,
//! Documentation/power/pm_qos_interface.rst). It holds for the whole machine, and costs power.
//!
//! It is held while this process has at least one connection: that is what is known without a look at each message. A refusal is logged
//! once in a process, and then not tried again.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

/// The kernel's device for it.
const DEVICE: &str = "/dev/cpu_dma_latency";

/// The request of this process.
#[derive(Debug)]
pub enum CpuLatency {
    /// No setting asks for it.
    NotWanted,
    /// To be made for the first connection.
    Wanted(Wish),
    /// It holds until the descriptor is closed.
    Held {
        /// What is asked for.
        wish: Wish,
        /// Nothing is done with it but to close it.
        _descriptor: File,
    },
    /// The kernel has refused it, which was logged.
    Refused,
}

/// What is asked for, and where.
#[derive(Debug, Clone)]
pub struct Wish {
    device: PathBuf,
    latency_us: u32,
}

impl CpuLatency {
    /// As the setting says.
    pub fn new(latency_us: Option<u32>) -> Self {
        Self::of(PathBuf::from(DEVICE), latency_us)
    }

    /// The same of another device.
    pub(super) fn of(device: PathBuf, latency_us: Option<u32>) -> Self {
        latency_us.map_or(Self::NotWanted, |latency_us| Self::Wanted(Wish { device, latency_us }))
    }

    /// The process has a connection: makes the request, where it is wanted and not made yet.
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
                    "NCCL_SPARK_CPU_LATENCY_US={latency_us} has no effect: {device}: {error}; the job goes on; run as root, or let the job's user write to {device} (a udev rule)"
                );
                Self::Refused
            }
        };
    }

    /// The process has no connection any more.
    pub fn release(&mut self) {
        if let Self::Held { wish, .. } = self {
            *self = Self::Wanted(wish.clone());
        }
    }
}

impl Wish {
    /// The descriptor is closed in programs that this process starts: the standard library opens every file so.
    fn ask(&self) -> std::io::Result<File> {
        let mut file = OpenOptions::new().write(true).open(&self.device)?;
        // All in one write: the kernel takes four bytes for a number, and any other length for text (kernel/power/qos.c).
        let written = file.write(&self.latency_us.to_ne_bytes())?;
        if written == size_of::<u32>() { Ok(file) } else { Err(std::io::ErrorKind::WriteZero.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// A file in the device's place.
    fn stand_in() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("cpu_dma_latency");
        std::fs::write(&device, b"").unwrap();
        (folder, device)
    }

    /// Whether this process has a file open.
    fn is_open(device: &PathBuf) -> bool {
        let open = std::fs::read_dir("/proc/self/fd").unwrap();
        open.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to == *device))
    }

    #[test]
    fn the_descriptor_is_open_with_the_value_while_it_is_held() {
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
