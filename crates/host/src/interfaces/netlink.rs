//! Requests to the kernel by netlink (`rtnetlink(7)`), allowed for any user.

use netlink_packet_core::{DefaultNla, Emitable, NetlinkBuffer};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{Error, Read, Result};
use std::time::Duration;

/// Time limit for a reply. It is never reached, because the kernel replies during the send.
const REPLY_LIMIT: Duration = Duration::from_secs(1);
/// Size of the buffer for a reply. The largest known reply has a port's DSCP table (64 entries of 8
/// bytes) and other attributes.
const REPLY_BYTES: usize = 16 << 10;
/// Size of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;

/// Sends a request. Returns the type of the reply, and the bytes after the reply's header. Like
/// `getifaddrs`, the call may wait while another process changes the network's configuration.
///
/// # Errors
/// The kernel's error, a malformed reply, or no reply.
pub fn ask(request: &[u8]) -> Result<(u16, Vec<u8>)> {
    let mut socket = Socket::new(
        Domain::from(libc::AF_NETLINK),
        Type::RAW,
        Some(Protocol::from(libc::NETLINK_ROUTE)),
    )?;
    socket.set_read_timeout(Some(REPLY_LIMIT))?;
    // A socket without a destination sends to the kernel.
    socket.send(request)?;
    let mut reply = [0; REPLY_BYTES];
    let bytes = socket.read(&mut reply)?;
    decode(&reply[..bytes])
}

/// Encodes a request. `family` holds the encoded header of the message type, which follows
/// netlink's own header. Each attribute is a kind with a value.
pub fn request(message_type: u16, family: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = [&[0; HEADER_BYTES], family].concat();
    for (kind, value) in attributes {
        let attribute = DefaultNla::new(*kind, value.to_vec());
        let at = bytes.len();
        bytes.resize(at + attribute.buffer_len(), 0);
        attribute.emit(&mut bytes[at..]);
    }
    let length = bytes.len() as u32;
    let mut message = NetlinkBuffer::new(&mut bytes);
    message.set_length(length);
    message.set_message_type(message_type);
    message.set_flags(libc::NLM_F_REQUEST as u16);
    bytes
}

pub(super) fn decode(reply: &[u8]) -> Result<(u16, Vec<u8>)> {
    let message = NetlinkBuffer::new_checked(reply).map_err(Error::other)?;
    let message_type = message.message_type();
    let payload = message.payload();
    if i32::from(message_type) == libc::NLMSG_ERROR {
        // Netlink negates the error number.
        let errno = payload
            .first_chunk()
            .map_or(0, |errno| i32::from_ne_bytes(*errno).saturating_neg());
        return Err(Error::from_raw_os_error(errno));
    }
    Ok((message_type, payload.to_vec()))
}
