//! Locked memory that NCCL's buffers need.

/// Memory that NCCL registers for each end of a connection and each channel: the buffers of its
/// protocols Simple (4 MiB), LL (8 lines of 16 bytes for each of 512 threads, in 8 steps) and LL128
/// (120 words of 8 bytes for each of 640 threads, in 8 steps). From `computeBuffSizes` in init.cc
/// and the constants of device.h, in NCCL 2.28.
const END_BYTES: u64 = (4 << 20) + 8 * 16 * 512 * 8 + 120 * 8 * 640 * 8;
/// Registrations of one channel on one rail: the sending end once, the receiving end with strict
/// and with relaxed PCIe ordering (`comm::rail::registration`).
const REGISTRATIONS: u64 = 3;
/// Number of channels that NCCL 2.28 uses over a network with one GPU in each host, and its maximum
/// without settings.
pub const CHANNELS: [u64; 2] = [18, 32];

/// Returns the locked memory in bytes that NCCL's buffers need, with one neighbour in each
/// direction. The kernel counts each registration, so each rail adds to it.
pub const fn locked_bytes(rails: u64, channels: u64) -> u64 {
    rails * channels * REGISTRATIONS * END_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_need_grows_with_rails_and_channels() {
        let [usual, most] = CHANNELS;
        let megabytes = |rails, channels| locked_bytes(rails, channels) / 1_000_000;
        assert_eq!(END_BYTES, 9_633_792);
        assert_eq!([megabytes(2, usual), megabytes(4, usual)], [1040, 2080]);
        assert_eq!([megabytes(2, most), megabytes(4, most)], [1849, 3699]);
    }
}
