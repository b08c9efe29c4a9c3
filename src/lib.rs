//! NCCL network plugin for DGX Spark.
//!
//! ARCHITECTURE.md is the map of the rooms below. This file holds the crate's doc and the exported symbols, nothing else.

pub mod abi;
pub mod comm;
pub mod config;
pub mod error;
pub mod flow;
pub mod plugin;
pub mod rails;
pub mod telemetry;
pub mod tuner;
pub mod verbs;
pub mod wire;
