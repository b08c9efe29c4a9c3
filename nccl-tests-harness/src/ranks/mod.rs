//! The ranks of a run, each a process of its own. A command starts them (`job`, `placement`) and
//! exchanges messages with them (`control`). Ranks that the command did not start are first greeted
//! over a `line`. The `greeting` proves to both sides that the other one belongs to the job, by a
//! `token` or by the socket's owner (`socket_owner`). A launcher's ranks connect to rank 0
//! (`launch`, `rendezvous`), and the doctor connects to a `token_port` for the rank on its
//! partner's host. The other modules are the rank's side: its process, data, activity, log, and use
//! of the plugin's device.

pub mod activity;
pub mod control;
pub mod device;
pub(crate) mod greeting;
pub mod job;
pub mod launch;
pub(crate) mod line;
pub mod log;
pub mod pattern;
pub mod placement;
pub mod process;
pub mod rendezvous;
mod socket_owner;
pub(crate) mod token;
pub(crate) mod token_port;
