//! The software fabric as a verbs library: a shared object that stands in for `libibverbs.so.1`.
#![no_main]
