//! Asks the kernel for routes, by netlink (`rtnetlink(7)`). Any user may ask.

use nix::errno::Errno;
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{Error, ErrorKind, Read, Result};
use std::net::Ipv6Addr;
use std::time::Duration;

/// Answers come while the request is sent, so this limit is never reached.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
const HEADER_BYTES: usize = 16;

/// Returns true if the kernel has a route from one address to another through an interface, by its
/// tables and rules. Both are GIDs of one IP version.
///
/// Without a route the kernel takes an IPv4 address as a neighbour on the interface
/// (`ip_route_output_key_hash_rcu` in Linux' `net/ipv4/route.c`), so the question is for the
/// matching entry of a table (`RTM_F_FIB_MATCH`). For IPv6 the kernel binds the search to the
/// interface only if the question names no source address, so rules by source do not count there.
///
/// May wait while another process changes the network's configuration, as `getifaddrs` does.
///
/// # Errors
/// The kernel's answer if it is neither yes nor no.
pub fn has_route(interface: u32, from: [u8; 16], to: [u8; 16]) -> Result<bool> {
    let mut socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(Protocol::from(libc::NETLINK_ROUTE)))?;
    socket.set_read_timeout(Some(ANSWER_LIMIT))?;
    socket.send(&question(interface, from, to))?;
    let mut answer = [0; 4096];
    let length = socket.read(&mut answer)?;
    is_route(&answer[..length])
}

fn question(interface: u32, from: [u8; 16], to: [u8; 16]) -> Vec<u8> {
    let is_ipv4 = Ipv6Addr::from(to).to_ipv4_mapped().is_some();
    let address = |gid: &[u8; 16]| gid[if is_ipv4 { 12 } else { 0 }..].to_vec();
    let (family, bits, from_bits) = if is_ipv4 { (libc::AF_INET, 32, 32) } else { (libc::AF_INET6, 128, 0) };
    // struct rtmsg: family, length of destination and source, type of service, table, protocol,
    // scope, type; flags.
    let mut body = vec![family as u8, bits, from_bits, 0, 0, 0, 0, 0];
    body.extend(libc::RTM_F_FIB_MATCH.to_ne_bytes());
    body.extend(attribute(libc::RTA_DST, &address(&to)));
    if is_ipv4 {
        body.extend(attribute(libc::RTA_SRC, &address(&from)));
    }
    body.extend(attribute(libc::RTA_OIF, &interface.to_ne_bytes()));
    // struct nlmsghdr: length, type, flags, sequence number, port.
    let mut message = ((HEADER_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
    message.extend(libc::RTM_GETROUTE.to_ne_bytes());
    message.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// Encodes a netlink attribute. All lengths here are multiples of 4, so none needs padding.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = (4 + value.len()) as u16;
    [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat()
}

fn is_route(answer: &[u8]) -> Result<bool> {
    let malformed = || Error::from(ErrorKind::InvalidData);
    let kind: [u8; 2] = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).ok_or_else(malformed)?;
    match i32::from(u16::from_ne_bytes(kind)) {
        kind if kind == i32::from(libc::RTM_NEWROUTE) => Ok(true),
        libc::NLMSG_ERROR => {
            let code = answer.get(HEADER_BYTES..HEADER_BYTES + 4).and_then(|bytes| bytes.try_into().ok());
            // Netlink negates the error number.
            let errno = i32::from_ne_bytes(code.ok_or_else(malformed)?).saturating_neg();
            match Errno::from_raw(errno) {
                // No entry, or one that says unreachable, prohibit or blackhole.
                Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::EACCES | Errno::EINVAL => Ok(false),
                other => Err(other.into()),
            }
        }
        _ => Err(malformed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::IpAddr;

    fn gid(ip: &str) -> [u8; 16] {
        match ip.parse().unwrap() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        }
    }

    /// Every network namespace has the interface `lo`, with index 1.
    #[test]
    fn only_what_a_table_has_is_a_route() {
        assert!(has_route(1, gid("127.0.0.1"), gid("127.0.0.2")).unwrap());
        // TEST-NET-1, through an interface that has no default route.
        assert!(!has_route(1, gid("127.0.0.1"), gid("192.0.2.1")).unwrap());
        assert!(!has_route(1, gid("::1"), gid("2001:db8::1")).unwrap());
        let error = has_route(u32::MAX >> 1, gid("127.0.0.1"), gid("127.0.0.2"));
        assert!(error.is_err(), "there is no such interface: {error:?}");
    }

    #[test]
    fn the_kernels_answers_are_checked() {
        let error = |errno: i32| [&[36, 0, 0, 0, 2, 0, 0, 0][..], &[0; 8], &(-errno).to_ne_bytes(), &[0; 16]].concat();
        assert!(!is_route(&error(libc::ENETUNREACH)).unwrap());
        assert_eq!(is_route(&error(libc::EPERM)).unwrap_err().raw_os_error(), Some(libc::EPERM));
        for odd in [&[][..], &[0; 5], &[0; 16], &error(libc::EPERM)[..18], &error(0)] {
            assert!(is_route(odd).is_err(), "{odd:?}");
        }
    }
}
