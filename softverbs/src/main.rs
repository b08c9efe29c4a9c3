//! The software fabric as a verbs library: a shared object that replaces `libibverbs.so.1`.
//!
//! A program that is linked as a library (see `build.rs`). [`softverbs::abi`] has the exports.
#![no_main]

/// Refers to the exported functions; without a reference the linker would leave them out.
#[used]
static EXPORTS: &softverbs::abi::Exports = &softverbs::abi::EXPORTS;
