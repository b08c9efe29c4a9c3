//! Parts of `tests/load.rs`: two processes on the software fabric that execute orders (`end`),
//! their controller (`bed`), rails that go down and up (`flaps`), and measurements of the processes
//! (`gauge`).

pub mod bed;
pub mod end;
pub mod flaps;
pub mod gauge;
pub mod heap;
