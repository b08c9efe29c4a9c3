//! Single messages between two ranks: rank 0 sends, rank 1 receives. `side` sends the orders,
//! `rank` obeys them, and `traffic` moves the messages.

pub mod messages;
pub mod rank;
pub mod side;
mod traffic;
