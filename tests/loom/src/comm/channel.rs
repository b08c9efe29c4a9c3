//! In place of the plugin's `comm/channel.rs`: a peer who says nothing.

use crate::error::Result;
use crate::wire::message::Message;
use std::os::fd::{AsFd, BorrowedFd};

/// A channel to a peer who says nothing.
pub struct Channel;

/// What came.
pub enum Received {
    /// A message.
    Message(Message),
    /// Nothing yet.
    Nothing,
    /// The peer closed its end.
    Closed,
    /// The network carries no more.
    Unreachable(String),
}

impl Channel {
    /// Takes it.
    pub fn offer(&mut self, _: &Message) -> Result<bool> {
        Ok(true)
    }

    /// Nothing.
    pub fn receive(&mut self) -> Result<Received> {
        Ok(Received::Nothing)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        BorrowedFd(None)
    }
}
