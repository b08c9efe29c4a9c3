//! The commands that prove what the plugin does: they measure it, and run real NCCL over it.

pub mod bench;
pub mod communicators;
pub mod memory;
pub mod nccl_tests;
