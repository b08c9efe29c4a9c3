//! The doctor on folders with a machine's files, healthy or faulty, and on launchers' variables.

pub mod bed;
mod cures;
pub mod faults;
mod ids;
mod picture;
mod qos;
mod ssh;
mod variables;
