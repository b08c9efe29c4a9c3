//! Calls to the operating system, with the core's `unsafe` code.
#![allow(unsafe_code)]

pub(crate) mod memory;
pub(crate) mod process;
mod registration;
pub mod shm;
