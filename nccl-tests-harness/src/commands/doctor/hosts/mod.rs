//! The doctor on two hosts or more. [`peer`] examines another host together with this one, and
//! measures the paths between their rails. [`several`] compares the subnets of several hosts.

pub mod peer;
pub mod rail;
pub mod several;
pub mod ssh;
pub mod together;

pub(super) use together::PeerResult;
