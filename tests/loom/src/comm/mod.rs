//! The plugin's `comm`, as far as it is modelled: four of its files, and stand-ins for what the service thread works on.

pub mod channel;
pub mod datapath;
pub mod rail;
pub mod recovery;
pub mod streams;
pub mod threads;
