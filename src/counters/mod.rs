//! Counters of a job's rails: the work of each lane of each connection, in memory that other
//! processes can read.
//!
//! - `layout`: the words of the memory, and a parser for readers. No I/O, no `unsafe`.
//! - `memory`: the memory file, with this room's `unsafe`.
//! - `book`: gives a record to each lane of a connection, and takes it back.
//! - `summary`: sums of closed connections, for the log.
//!
//! Nothing here fails a job, and no content of the file decides anything, because others can write
//! it. Without the file, or when every record is in use, a lane counts into memory of its own, for
//! messages and the summary. While messages run, a counter is a load and a store by its one writer
//! ([`Record::add`]). Locks are taken only where connections are made and end.

mod book;
pub mod layout;
mod memory;
mod summary;

pub use book::{CountedConnection, CountedLane, Counting, Outages, Record, nanos};
