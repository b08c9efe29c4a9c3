//! The ranks of a run, each a process of its own. A command starts them (`job`, `seats`) and talks
//! with them (`control`). Ranks on other hosts connect first, over a `line`: the ranks of a
//! launcher to rank 0 (`launch`, `rendezvous`), the rank of the doctor's partner through a `door`.
//! The rest is the rank's side: its process, data, activity and log, and its use of the plugin's
//! device.

pub mod activity;
pub mod control;
pub mod device;
pub(crate) mod door;
pub mod job;
pub mod launch;
pub(crate) mod line;
pub mod log;
pub mod pattern;
pub mod process;
pub mod rendezvous;
pub mod seats;
