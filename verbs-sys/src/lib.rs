//! The part of libibverbs' C interface that this workspace uses: structs, constants, and a type for
//! each function.
//!
//! This crate declares no symbol and links nothing. The plugin loads libibverbs at run time;
//! `softverbs` implements the functions.
//!
//! bindgen makes `src/bindings.rs` from `src/bindings.h` and the headers of rdma-core 44 (Debian
//! and Ubuntu: `libibverbs-dev`). `src/bindings.rs` is checked in, so that a build needs neither
//! libclang nor the headers. To regenerate it, with libclang:
//!
//! ```sh
//! cargo check -p verbs-sys --features regenerate-bindings
//! ```
//!
//! `tests/verbs_bindings.rs` regenerates the bindings and compares them with the checked-in file.
//! `tests/rdma-sys-check` compares them with the `rdma-sys` crate.
#![no_std]
#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals
)]

mod bindings;

pub use bindings::*;
