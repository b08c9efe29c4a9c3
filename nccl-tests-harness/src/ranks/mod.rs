//! The ranks of a run, each a process of its own. A command starts them (`job`, `seats`) and talks
//! with them (`control`). Ranks on other hosts connect first, over a `line`: those of a launcher
//! where rank 0 listens (`launch`, `rendezvous`), that of the doctor's partner through a `door`.
//! The rest is the rank's side: its process, its data, what it reports, its log, and the plugin's
//! device as it uses it.

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
