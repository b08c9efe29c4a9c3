//! The doctor on machines that are folders, healthy and with each fault planted, and on the
//! variables of launchers.

mod bed;
mod environment;
mod faults;
mod ids;
mod picture;
mod qos;
mod ssh;
