//! Storms of events: functions, ports and whole NICs that go and return, again and again, while a
//! caller like NCCL's proxy uses many connections.
#![allow(
    dead_code,
    reason = "each test program uses only a part of this module"
)]

pub mod bed;
pub mod caller;
pub mod events;
pub mod live;
