//! The software fabric as a verbs library: a program that is linked as a shared object (see
//! `build.rs`) and replaces `libibverbs.so.1`. [`softverbs::abi`] has the exports.
#![no_main]

/// Refers to the exported functions, so that the linker keeps them.
#[used]
static EXPORTS: &softverbs::abi::Exports = &softverbs::abi::EXPORTS;
