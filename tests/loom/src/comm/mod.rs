//! Four files of the plugin's `comm`, and replacements for the service thread's other parts.

pub mod channel;
pub mod datapath;
pub mod process;
pub mod rail;
pub mod recovery;
pub mod threads;
