//! The ranks of a run, each a process of its own. A command starts them (`job`, `seats`) and
//! exchanges messages with them (`control`). Ranks on other hosts connect first, over a `line`: a
//! launcher's ranks to rank 0 (`launch`, `rendezvous`), the rank of the doctor's partner through a
//! `door`. The other modules are the rank's side: its process, data, activity, log, and use of the
//! plugin's device.

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
