//! The software fabric as a verbs library: a shared object that stands in for `libibverbs.so.1`.
//!
//! It is built as a program, and linked as a library (see `build.rs`). What it exports is in [`softverbs::abi`].
#![no_main]

/// Without this nothing here would refer to the exported functions, and the linker would leave them out.
#[used]
static EXPORTS: &softverbs::abi::Exports = &softverbs::abi::EXPORTS;
