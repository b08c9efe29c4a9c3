//! Admission of clients to a listener. A client must send the token that NCCL has passed to the
//! expected peer. A token is valid for one connection.

use crate::comm::channel::Channel;
use crate::comm::descriptors::DescriptorWarning;
use crate::comm::unauthenticated::{Admitted, Unauthenticated, Verdict};
use proto::wire::handle::TOKEN_BYTES;
use proto::wire::message::{Hello, Message, Stream};
use std::net::TcpListener;

/// A listener that waits for one peer.
pub struct Admission {
    unauthenticated: Unauthenticated,
    token: [u8; TOKEN_BYTES],
    /// True once a client has sent the token. The token is for one connection, so a later client
    /// that sends it is refused.
    token_was_used: bool,
}

impl Admission {
    /// Creates the admission of one connection with `token`. `listener` must be non-blocking.
    pub fn new(listener: TcpListener, token: [u8; TOKEN_BYTES]) -> Self {
        Self {
            unauthenticated: Unauthenticated::new(listener),
            token,
            token_was_used: false,
        }
    }

    /// Returns the reason why connections cannot be accepted at the moment.
    pub fn shortage(&self) -> Option<&str> {
        self.unauthenticated.shortage()
    }

    /// Drops all unauthenticated connections.
    pub fn clear(&mut self) {
        self.unauthenticated.clear();
    }

    /// Accepts connections and reads their first messages. Returns the first HELLO that has the
    /// token. Refuses every later HELLO that has the token.
    pub fn poll(&mut self, descriptors: &DescriptorWarning) -> Option<(Channel, Hello)> {
        let admitted = self.look_for(descriptors, None);
        admitted
            .into_iter()
            .find_map(|admitted| match admitted.message {
                Message::Hello(hello) => Some((admitted.channel, hello)),
                _ => None,
            })
    }

    /// Accepts connections and reads their first messages, as [`poll`](Self::poll) does. Returns
    /// further TCP streams of the admitted peer, which send `token`.
    pub fn look_for_streams(
        &mut self,
        descriptors: &DescriptorWarning,
        token: &[u8; TOKEN_BYTES],
    ) -> impl Iterator<Item = (Channel, Stream)> + use<> {
        self.token_was_used = true;
        let admitted = self.look_for(descriptors, Some(token));
        admitted
            .into_iter()
            .filter_map(|admitted| match admitted.message {
                Message::Stream(stream) => Some((admitted.channel, stream)),
                _ => None,
            })
    }

    fn look_for(
        &mut self,
        descriptors: &DescriptorWarning,
        streams: Option<&[u8; TOKEN_BYTES]>,
    ) -> Vec<Admitted> {
        let Self {
            unauthenticated,
            token,
            token_was_used,
        } = self;
        unauthenticated.poll(descriptors, &mut |message, channel| match message {
            Message::Stream(stream) if streams == Some(&stream.token) => Verdict::Admit,
            Message::Hello(hello) if hello.token == *token && !std::mem::replace(token_was_used, true) => {
                Verdict::Admit
            }
            Message::Hello(hello) if hello.token == *token => {
                tracing::warn!("bootstrap connection from {} rejected: its token was used before", channel.peer());
                Verdict::Refuse(
                    "this connection's token was used before: by another process, or by this one before its TCP \
                     connection was reset",
                )
            }
            _ => Verdict::Reject,
        })
    }
}
