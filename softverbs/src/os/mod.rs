//! Calls to the operating system, with the core's `unsafe`: shared memory, other processes' memory,
//! and sleeping.
#![allow(unsafe_code)]

pub(crate) mod memory;
pub(crate) mod process;
mod registration;
pub mod shm;
