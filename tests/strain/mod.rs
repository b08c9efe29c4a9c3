//! Parts of `tests/load.rs`: two processes on the software fabric (`end`), their controller
//! (`bed`), rails that go down and up (`flaps`), and measurements (`gauge`).

pub mod bed;
pub mod end;
pub mod flaps;
pub mod gauge;
pub mod heap;
