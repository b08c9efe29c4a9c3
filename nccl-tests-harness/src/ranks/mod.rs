//! The ranks of a run, each a process of its own. A command starts them (`job`, `seats`; for those of a launcher `launch` and
//! `rendezvous`) and talks with them (`control`). The rest is the rank's side: its process, its data, what it reports, its log, and the
//! plugin's device as it uses it.

pub mod activity;
pub mod control;
pub mod device;
pub mod job;
pub mod launch;
pub mod log;
pub mod pattern;
pub mod process;
pub mod rendezvous;
pub mod seats;
