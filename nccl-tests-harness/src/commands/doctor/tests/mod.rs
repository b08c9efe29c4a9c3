//! The doctor on folders with a machine's files, healthy or faulty, and on launchers' variables.

mod bed;
mod environment;
mod faults;
mod ids;
mod picture;
mod qos;
mod ssh;
