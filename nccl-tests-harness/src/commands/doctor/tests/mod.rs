//! The doctor on machines that are folders, healthy or with one fault, and on launchers' variables.

mod bed;
mod environment;
mod faults;
mod ids;
mod picture;
mod qos;
mod ssh;
