//! Where peers dial again: the listener of this process for peers whose TCP connection was given up.
//!
//! One for all connections that were accepted, at the address by which their peers reached this host. It is opened when the first of them
//! comes up, and closed when none is left. Who dials has to show the token that GO carried, and the connection that it names has to
//! expect it; everybody else is treated as at a listener of the handshake ([`crate::comm::unauthenticated`]). The service thread looks
//! at it in its rounds and is not woken by it, so that whoever dials a thousand times makes it no busier; nor does he fill the log.

use super::tcp::Redialling;
use crate::comm::channel::{Channel, Received};
use crate::comm::descriptors::DescriptorWarning;
use crate::comm::unauthenticated::{Admitted, Unauthenticated, Verdict};
use crate::error::{Error, Result};
use crate::wire::handle::TOKEN_BYTES;
use crate::wire::message::{Message, Redial, RedialAt};
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the listener is looked at, at most: the service thread's rounds are shorter while a rail is on its way back.
const LOOK: Duration = Duration::from_millis(20);

/// The listener as those who set connections up know it.
#[derive(Default)]
pub struct Standing {
    /// Where it listens, while it does.
    at: Option<SocketAddr>,
    /// Opened, and not yet with the service thread.
    opened: Option<RedialListener>,
    /// Whether the user knows that there is none.
    was_reported: bool,
}

/// The listener as the service thread knows it.
pub struct RedialListener {
    unauthenticated: Unauthenticated,
    descriptors: Arc<DescriptorWarning>,
    next_look: Instant,
}

impl Standing {
    /// How an accepted connection gets another TCP connection, and what its peer has to know for that. Without a listener it gets none, and
    /// a line in the log says why.
    pub fn invite(
        &mut self,
        channel: &Channel,
        descriptors: &Arc<DescriptorWarning>,
    ) -> (Redialling, Option<RedialAt>) {
        match self.try_to_invite(channel, descriptors) {
            Ok(redial) => (Redialling::awaits(redial.token), Some(redial)),
            Err(error) => {
                if std::mem::replace(&mut self.was_reported, true) {
                    tracing::debug!("a connection cannot have another TCP connection: {error}");
                } else {
                    tracing::warn!("connections that lose their TCP continue over the rails alone: {error}");
                }
                (Redialling::Never, None)
            }
        }
    }

    fn try_to_invite(&mut self, channel: &Channel, descriptors: &Arc<DescriptorWarning>) -> Result<RedialAt> {
        let trouble = |e: std::io::Error| Error::os("cannot set up a bootstrap connection", &e);
        let [mut own, _] = channel.addresses().map_err(trouble)?;
        own.set_port(0);
        let at = match self.at {
            Some(at) => at,
            None => self.open(own, descriptors)?,
        };
        if at.ip() != own.ip() {
            return Err(Error::Network(format!("the process listens on {at}, and the peer came to {}", own.ip())));
        }
        let port = NonZeroU16::new(at.port()).ok_or_else(|| Error::Internal("a listener without a port".to_owned()))?;
        let mut token = [0; TOKEN_BYTES];
        getrandom::fill(&mut token).map_err(|e| Error::Missing(format!("cannot get random numbers: {e}")))?;
        Ok(RedialAt { port, token })
    }

    fn open(&mut self, address: SocketAddr, descriptors: &Arc<DescriptorWarning>) -> Result<SocketAddr> {
        let trouble = |e: std::io::Error| Error::os(format!("cannot listen on {address}"), &e);
        let listener = TcpListener::bind(address).map_err(trouble)?;
        listener.set_nonblocking(true).map_err(trouble)?;
        let at = listener.local_addr().map_err(trouble)?;
        let (unauthenticated, descriptors) = (Unauthenticated::lasting(listener), Arc::clone(descriptors));
        self.opened = Some(RedialListener { unauthenticated, descriptors, next_look: Instant::now() });
        self.at = Some(at);
        Ok(at)
    }

    /// For the service thread: the listener, where it was just opened.
    pub fn take_opened(&mut self) -> Option<RedialListener> {
        self.opened.take()
    }

    /// The service thread closes its listener, if it has one.
    pub fn close(&mut self) {
        (self.at, self.opened) = (None, None);
    }
}

impl RedialListener {
    /// The new TCP connections that `expects` lets in, each with what its peer said, in the order in which they came.
    pub fn look(&mut self, expects: impl Fn(&Redial) -> bool, now: Instant) -> Vec<(Channel, Redial)> {
        if now < self.next_look {
            return Vec::new();
        }
        self.next_look = now + LOOK;
        let admitted = self.unauthenticated.look(&self.descriptors, &mut |message, channel| match message {
            Message::Redial(redial) if expects(redial) => Verdict::Admit,
            Message::Redial(_) => {
                tracing::debug!(
                    "{} dialled again for a connection that is closed, late, or ahead of its time",
                    channel.peer()
                );
                Verdict::Drop
            }
            _ => Verdict::Reject,
        });
        let redialled = |Admitted { mut channel, message }| match (message, channel.receive()) {
            // The peer says nothing more before it is answered.
            (Message::Redial(redial), Ok(Received::Nothing)) => Some((channel, redial)),
            // It waited for this thread for longer than its attempt may take: what the connection has meanwhile may work.
            _ => {
                tracing::debug!("{} dialled again and has given that up", channel.peer());
                None
            }
        };
        admitted.into_iter().filter_map(redialled).collect()
    }
}
