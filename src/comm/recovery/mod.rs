//! Lost rails: `service` is the thread that watches over the connections, `driver` executes what [`crate::flow::recovery`] decides for
//! one of them, `attempt` is a rail on its way back.

pub mod attempt;
pub mod driver;
pub mod service;
