//! Listener of this process where peers dial again after they have given up their TCP connection.
//!
//! The listener opens with the first accepted connection, at the address where the peer reached
//! this host, and closes with the last. It serves all connections that were accepted at the same
//! address. The others never get another TCP connection.
//!
//! A peer that dials must send the token from its connection's GO message, the last one of the
//! handshake. Its connection must also expect the attempt. Other callers are treated as in the
//! handshake ([`crate::comm::unauthenticated`]). The service thread polls the listener in its
//! rounds and is not woken by it, so repeated dialling adds no load. [`Unauthenticated`] limits the
//! log lines about rejected callers.

use super::tcp::Redialling;
use crate::clock;
use crate::comm::channel::{Channel, Received};
use crate::comm::descriptors::DescriptorWarning;
use crate::comm::unauthenticated::{Admitted, Unauthenticated, Verdict};
use host::error::{Call, Error, Internal, Network, Result};
use proto::time::Instant;
use proto::wire::handle::TOKEN_BYTES;
use proto::wire::message::{Message, Redial, RedialAt};
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

/// Shortest interval between polls of the listener. The service thread's rounds can be shorter.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Connection set-up's access to the listener: opens it, and knows its address.
#[derive(Default)]
pub struct RedialHandle {
    at: Option<SocketAddr>,
    /// A new listener that the service thread has not taken yet.
    opened: Option<RedialListener>,
    /// True once a warning has reported that the listener cannot be opened.
    was_reported: bool,
}

/// The listener itself, owned by the service thread.
pub struct RedialListener {
    unauthenticated: Unauthenticated,
    descriptors: Arc<DescriptorWarning>,
    next_poll: Instant,
}

impl RedialHandle {
    /// Returns the means for an accepted connection to get another TCP connection, and the data for
    /// its peer to dial. If the listener cannot be opened, logs the reason and returns
    /// [`Redialling::Never`].
    pub fn prepare_redial(
        &mut self,
        channel: &Channel,
        descriptors: &Arc<DescriptorWarning>,
    ) -> (Redialling, Option<RedialAt>) {
        match self.try_to_prepare(channel, descriptors) {
            Ok(redial) => (Redialling::awaits(redial.token), Some(redial)),
            Err(error) => {
                if std::mem::replace(&mut self.was_reported, true) {
                    tracing::debug!("a connection cannot have another TCP connection: {error}");
                } else {
                    tracing::warn!(
                        "cannot accept redials ({error}): connections that lose TCP use only the rails"
                    );
                }
                (Redialling::Never, None)
            }
        }
    }

    fn try_to_prepare(
        &mut self,
        channel: &Channel,
        descriptors: &Arc<DescriptorWarning>,
    ) -> Result<RedialAt> {
        let trouble = |e: std::io::Error| Error::os(Call::Bootstrap, &e);
        let [mut own, _] = channel.addresses().map_err(trouble)?;
        own.set_port(0);
        let at = match self.at {
            Some(at) => at,
            None => self.open(own, descriptors)?,
        };
        if at.ip() != own.ip() {
            return Err(Network::OtherAddress { at, own }.into());
        }
        let port = NonZeroU16::new(at.port()).ok_or(Internal::NoPort)?;
        let mut token = [0; TOKEN_BYTES];
        getrandom::fill(&mut token)?;
        Ok(RedialAt { port, token })
    }

    fn open(
        &mut self,
        address: SocketAddr,
        descriptors: &Arc<DescriptorWarning>,
    ) -> Result<SocketAddr> {
        let trouble = |e: std::io::Error| Error::os(Call::Listen(address), &e);
        let listener = TcpListener::bind(address).map_err(trouble)?;
        listener.set_nonblocking(true).map_err(trouble)?;
        let at = listener.local_addr().map_err(trouble)?;
        let unauthenticated = Unauthenticated::new(listener);
        let descriptors = Arc::clone(descriptors);
        self.opened = Some(RedialListener {
            unauthenticated,
            descriptors,
            next_poll: clock::now(),
        });
        self.at = Some(at);
        Ok(at)
    }

    /// Takes a listener that was just opened, for the service thread.
    pub fn take_opened(&mut self) -> Option<RedialListener> {
        self.opened.take()
    }

    /// Forgets the listener. The service thread closes it by dropping the [`RedialListener`].
    pub fn close(&mut self) {
        (self.at, self.opened) = (None, None);
    }
}

impl RedialListener {
    /// Returns the new TCP connections that `expects` accepts, with their messages, oldest first.
    pub fn poll(
        &mut self,
        expects: impl Fn(&Redial) -> bool,
        now: Instant,
    ) -> Vec<(Channel, Redial)> {
        if now < self.next_poll {
            return Vec::new();
        }
        self.next_poll = now + POLL_INTERVAL;
        let admitted = self.unauthenticated.poll(&self.descriptors, &mut |message, channel| match message {
            Message::Redial(redial) if expects(redial) => Verdict::Admit,
            Message::Redial(_) => {
                tracing::debug!(
                    "{} redialled a connection that is closed, or with an attempt that is not new",
                    channel.peer()
                );
                Verdict::Drop
            }
            _ => Verdict::Reject,
        });
        let redialled = |Admitted {
                             mut channel,
                             message,
                         }| match (message, channel.receive()) {
            // The peer sends nothing more before it gets an answer.
            (Message::Redial(redial), Ok(Received::Nothing)) => Some((channel, redial)),
            // The peer waited too long for the service thread and gave up this attempt. The
            // connection's present TCP connection may work, so it is kept.
            _ => {
                tracing::debug!("{} redialled, then gave up the attempt", channel.peer());
                None
            }
        };
        admitted.into_iter().filter_map(redialled).collect()
    }
}
