//! Recovery of lost rails and TCP connections, by the decisions of [`proto::flow::recovery`].
//!
//! - `service`: the thread that watches all connections.
//! - `driver`: executes the decisions for one connection. `attempt`: state of a rail that is being
//!   reconnected. `fence`: a lost rail whose queue pairs are being stopped. `stall`: state of a
//!   connection's stall detection.
//! - `devices`: events of this host's devices, and queries to them.
//! - `tcp`: the TCP connection of one connection. `redial`: the listener where peers dial again.

pub mod attempt;
pub mod devices;
pub mod driver;
pub mod fence;
pub mod redial;
pub mod service;
pub mod stall;
pub mod tcp;
