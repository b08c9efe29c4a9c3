//! The connection handle: 128 bytes that NCCL passes from the listener to the connecting rank.
//!
//! NCCL does not check that both ranks use the same network plugin, so the handle identifies this
//! plugin and its protocol version. It also has the listener's address and a random token.
//! Everything else is exchanged over TCP. The last eight bytes are for the connecting side's
//! ticket: NCCL repeats `connect` with the same memory until the call succeeds, and the ticket says
//! which unfinished connection the call continues.

use super::PROTOCOL_VERSION;
use super::codec::{Malformed, Reader, Writer};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// `NCCL_NET_HANDLE_MAXSIZE` in NCCL's `nccl_net.h`.
pub const HANDLE_BYTES: usize = 128;
/// Size in bytes of the random token. The token identifies the peer: NCCL gives it to no other
/// rank.
pub const TOKEN_BYTES: usize = 16;

const MAGIC: [u8; 8] = *b"spark\x0anc";
const TICKET_AT: usize = HANDLE_BYTES - 8;

/// Address of a listener, and the token that it expects from the connecting side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    /// The listener's address.
    pub address: SocketAddr,
    /// The token that the connecting side must send first.
    pub token: [u8; TOKEN_BYTES],
}

/// Error of decoding a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Foreign {
    /// Another network plugin wrote the handle.
    #[error(
        "the peer rank uses another network: it must load this plugin too (NCCL_NET_PLUGIN and NCCL_NET=Spark on every node)"
    )]
    Network,
    /// A version of this plugin with another protocol wrote the handle.
    #[error(
        "the peer rank's plugin uses protocol version {0}, this plugin uses {PROTOCOL_VERSION}: install the same plugin version on every node"
    )]
    Version(u16),
    /// The magic number is this plugin's, but the handle is damaged.
    #[error("the connection handle is damaged: {0}")]
    Damaged(#[from] Malformed),
}

impl Handle {
    /// Encodes the handle, without a ticket.
    pub fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut writer = Writer::default();
        let (ip, scope) = match self.address {
            SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
            SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
        };
        writer
            .bytes(&MAGIC)
            .u16(PROTOCOL_VERSION)
            .u16(self.address.port())
            .u32(scope);
        writer.bytes(&ip.octets()).bytes(&self.token);
        let mut bytes = [0; HANDLE_BYTES];
        for (to, from) in bytes.iter_mut().zip(writer.into_bytes()) {
            *to = from;
        }
        bytes
    }

    /// Decodes a handle.
    ///
    /// # Errors
    /// [`Foreign`] if the bytes are not a handle of this protocol version.
    pub fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, Foreign> {
        let mut reader = Reader::new(bytes);
        if reader.array::<8>()? != MAGIC {
            return Err(Foreign::Network);
        }
        let version = reader.u16()?;
        if version != PROTOCOL_VERSION {
            return Err(Foreign::Version(version));
        }
        let port = reader.u16()?;
        let scope = reader.u32()?;
        let ip = Ipv6Addr::from(reader.array::<16>()?).to_canonical();
        let token = reader.array()?;
        if port == 0 || ip.is_unspecified() {
            return Err(Malformed::Value {
                what: "listener address or port",
                value: u64::from(port),
            }
            .into());
        }
        let address = match ip {
            IpAddr::V4(v4) => SocketAddr::from((v4, port)),
            IpAddr::V6(v6) => SocketAddr::V6(SocketAddrV6::new(v6, port, 0, scope)),
        };
        Ok(Self { address, token })
    }

    /// Returns the connecting side's ticket, or 0 before the first `connect` call.
    pub fn ticket(bytes: &[u8; HANDLE_BYTES]) -> u64 {
        bytes
            .last_chunk::<8>()
            .map_or(0, |last| u64::from_le_bytes(*last))
    }

    /// Writes the connecting side's ticket.
    pub fn set_ticket(bytes: &mut [u8; HANDLE_BYTES], ticket: u64) {
        bytes[TICKET_AT..].copy_from_slice(&ticket.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_handle_survives_encoding_and_keeps_its_ticket() {
        for address in ["192.168.100.1:4791", "[fe80::1%3]:1", "[2001:db8::7]:65535"] {
            let handle = Handle {
                address: address.parse().unwrap(),
                token: [9; 16],
            };
            let mut bytes = handle.encode();
            assert_eq!(Handle::decode(&bytes), Ok(handle));
            assert_eq!(Handle::ticket(&bytes), 0);
            Handle::set_ticket(&mut bytes, 0x1234_5678_9abc);
            assert_eq!(Handle::decode(&bytes), Ok(handle));
            assert_eq!(Handle::ticket(&bytes), 0x1234_5678_9abc);
        }
    }

    #[test]
    fn another_network_or_version_is_refused_with_an_error() {
        let mut bytes = Handle {
            address: "10.0.0.1:7".parse().unwrap(),
            token: [0; 16],
        }
        .encode();
        bytes[8] = 99;
        let text = Handle::decode(&bytes).unwrap_err().to_string();
        assert!(
            text.contains("protocol version 99") && text.contains("same plugin version"),
            "{text}"
        );
        bytes[0] = 2; // AF_INET, the first byte of a handle of NCCL's own transports
        assert!(
            Handle::decode(&bytes)
                .unwrap_err()
                .to_string()
                .contains("must load this plugin too")
        );
    }

    #[test]
    fn an_empty_address_cannot_be_listened_to() {
        for address in ["0.0.0.0:7", "[::]:7", "10.0.0.1:0"] {
            let bytes = Handle {
                address: address.parse().unwrap(),
                token: [0; 16],
            }
            .encode();
            assert!(
                matches!(Handle::decode(&bytes), Err(Foreign::Damaged(_))),
                "{address}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in any::<[u8; 64]>(), ours: bool) {
            let mut handle = [0; HANDLE_BYTES];
            handle[..64].copy_from_slice(&bytes);
            if ours { handle[..8].copy_from_slice(&MAGIC); handle[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes()); }
            let _ = Handle::decode(&handle);
        }
    }
}
