//! The commands that prove what the plugin does.

pub mod bench;
pub mod communicators;
