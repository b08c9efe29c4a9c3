//! The connection handle, the 128 bytes that NCCL hands to the connecting side. A handle may be
//! damaged, or come from another network plugin or from another version of this plugin.

use crate::memory;
use crate::target::Seeds;
use proto::wire::handle::{HANDLE_BYTES, Handle, TOKEN_BYTES};
use std::net::SocketAddr;

/// Number of bytes that `encode` fills: magic, version, port, scope, address and token.
const USED: usize = 8 + 2 + 2 + 4 + 16 + TOKEN_BYTES;
const SCOPE: std::ops::Range<usize> = 12..16;

/// Checks any 128 bytes. Shorter input is padded with zeros.
pub fn check(data: &[u8]) -> bool {
    let mut bytes = [0; HANDLE_BYTES];
    let count = data.len().min(HANDLE_BYTES);
    bytes[..count].copy_from_slice(&data[..count]);
    let (decoded, allocated) = memory::peak(|| Handle::decode(&bytes));
    assert_eq!(allocated, 0, "a handle is no reason to allocate");
    let handle = match decoded {
        Ok(handle) => handle,
        Err(foreign) => {
            assert!(!foreign.to_string().is_empty());
            return false;
        }
    };
    assert!(
        handle.address.port() != 0 && !handle.address.ip().is_unspecified(),
        "no listener can have {}",
        handle.address
    );
    let mut again = handle.encode();
    assert_eq!(Handle::decode(&again), Ok(handle));
    // An IPv4 address has no scope, so encoding drops the scope's bytes.
    if handle.address.is_ipv4() {
        again[SCOPE].copy_from_slice(&bytes[SCOPE]);
    }
    assert_eq!(
        again[..USED],
        bytes[..USED],
        "the handle changes when it is written again"
    );
    let ticket = Handle::ticket(&bytes) ^ 1;
    Handle::set_ticket(&mut bytes, ticket);
    assert_eq!(
        (Handle::ticket(&bytes), Handle::decode(&bytes)),
        (ticket, Ok(handle))
    );
    true
}

/// A handle of each address family.
pub fn seeds() -> Seeds {
    let seed = |address: &str| {
        let address: SocketAddr = address.parse().expect("an address");
        Handle {
            address,
            token: *b"sixteen bytes in",
        }
        .encode()
        .to_vec()
    };
    vec![
        ("ipv4", seed("192.168.100.1:4791")),
        ("ipv6", seed("[2001:db8::7]:65535")),
        ("scoped", seed("[fe80::1%3]:1")),
    ]
}
