//! The commands that users run, each with its options.

pub mod collectives;
pub mod env;
pub mod fabric;
pub mod install;
pub mod manual;
pub mod rails;
pub mod settings;
pub mod tune;
