//! The commands that users run, each with its options.

pub mod collectives;
pub mod doctor;
pub mod env;
pub mod fabric;
pub mod install;
pub mod manual;
pub mod memory;
pub mod nccl_tests;
pub mod rails;
pub mod report;
pub mod settings;
pub mod top;
pub mod tune;
