//! Counters of the work of each lane of each connection, in memory that other processes can read.
//!
//! - `layout`: the layout of the memory in words, and a parser for readers. No I/O, no `unsafe`.
//! - `memory`: the memory file, with all of this module's `unsafe`.
//! - `book`: assigns a record to each lane of a connection, until the connection ends.
//! - `nic`: counters of a NIC's port, which the kernel keeps.
//! - `summary`: totals of closed connections, for the log.
//!
//! Failures here never fail a job. No decision depends on the file's content, because other
//! processes can write it. Without the file, or when every record is in use, a lane counts into
//! private memory, for log messages and the summary. During transfers, counting costs one load and
//! one store by the counter's only writer ([`Record::add`]), and no lock. Starting and ending a
//! connection take a lock.

mod book;
pub mod layout;
mod memory;
pub mod nic;
mod summary;

pub use book::{CountedConnection, CountedLane, Counting, Outages, Record, nanos};
