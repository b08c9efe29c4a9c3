//! Lost rails, and lost TCP: `service` is the thread that watches over the connections, `driver` executes what [`crate::flow::recovery`]
//! decides for one of them, `attempt` is a rail on its way back, `tcp` a connection's TCP until it is given up and its return, `redial` the
//! listener where peers dial again.

pub mod attempt;
pub mod devices;
pub mod driver;
pub mod redial;
pub mod service;
pub mod tcp;
