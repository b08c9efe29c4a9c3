//! What needs the operating system, and `unsafe`: shared memory, other processes' memory, and sleeping.
#![allow(unsafe_code)]

pub(crate) mod memory;
pub(crate) mod process;
mod registration;
pub mod shm;
