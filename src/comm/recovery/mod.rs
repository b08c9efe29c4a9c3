//! Lost rails, and lost TCP. [`crate::flow::recovery`] has the protocol and decides; this room
//! executes.
//!
//! - `service`: the thread that watches over all connections.
//! - `driver`: executes the decisions for one connection; `attempt`: a rail on its way back.
//! - `devices`: events of this host's devices, and questions to them.
//! - `tcp`: a connection's TCP, from its loss to its return; `redial`: the listener where peers
//!   dial again.

pub mod attempt;
pub mod devices;
pub mod driver;
pub mod redial;
pub mod service;
pub mod tcp;
