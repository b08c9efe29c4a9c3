//! Single messages between two ranks: rank 0 sends, rank 1 receives. `side` orders them, `rank` is
//! one of them, and `traffic` moves the messages.

pub mod messages;
pub mod rank;
pub mod side;
mod traffic;
