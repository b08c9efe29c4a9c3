//! Counts the NVIDIA GPUs of this machine by their files in /dev, which needs no driver library.

use std::fs;

pub fn gpus() -> usize {
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    entries
        .filter(|entry| is_gpu(&entry.file_name().to_string_lossy()))
        .count()
}

/// Returns true if a file of this name in /dev is a GPU.
pub fn is_gpu(name: &str) -> bool {
    name.strip_prefix("nvidia")
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
}

pub fn missing_gpu() -> Option<&'static str> {
    (gpus() == 0)
        .then_some("nccl-tests needs an NVIDIA GPU and this machine has none (no /dev/nvidia0)")
}
