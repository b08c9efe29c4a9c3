//! What needs the operating system, and `unsafe`: shared memory, other processes' memory, and sleeping.
#![allow(unsafe_code)]

pub mod memory;
pub mod process;
mod registration;
pub mod shm;
