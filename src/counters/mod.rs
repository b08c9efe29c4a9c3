//! Counters of a job's rails: what each lane of each connection carries, where other processes can read it.
//!
//! `layout` says what stands where, and takes apart what a reader has read. It does no I/O and has no `unsafe`. `memory` is the memory file, which
//! has the room's `unsafe`. `book` hands out its records to the lanes of a connection, and takes them back. `summary` adds up what closed
//! connections have carried, for the log.
//!
//! Promises: nothing here fails a job, and nothing that stands in the file decides anything. Where there is no file, or every record is in use, a lane
//! counts into memory of its own. While messages go, a counter is a load and a store by its one writer ([`Record::add`]); locks are
//! taken where connections are made and end.

mod book;
pub mod layout;
mod memory;
mod summary;

pub use book::{CountedConnection, CountedLane, Counting, Outages, Record, nanos};
