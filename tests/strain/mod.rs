//! What `tests/load.rs` is made of: two processes on the software fabric that do as they are told (`end`), who tells them
//! (`bed`), rails that come and go (`flaps`), and what the processes hold while they do (`gauge`).

pub mod bed;
pub mod end;
pub mod flaps;
pub mod gauge;
pub mod heap;
