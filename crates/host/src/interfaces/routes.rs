//! Queries of the kernel's routes, by [`netlink`].

use super::netlink;
use nix::errno::Errno;
use std::io::{ErrorKind, Result};
use std::net::Ipv6Addr;

/// Returns true if the kernel's tables and rules have a route from one GID to another through the
/// interface with this index. Both GIDs must have the same IP version.
///
/// The request asks for the matching table entry (`RTM_F_FIB_MATCH`). Without this flag, the kernel
/// would treat an IPv4 address without a route as a neighbour on the interface
/// (`ip_route_output_key_hash_rcu` in Linux' `net/ipv4/route.c`). An IPv6 request has no source
/// address: with a source address, the kernel would not limit the search to the interface. So rules
/// by source address do not count for IPv6.
///
/// # Errors
/// The errors of [`netlink::ask`], except those that mean "no route"; a reply of another type.
pub fn has_route(interface: u32, from: [u8; 16], to: [u8; 16]) -> Result<bool> {
    is_route(netlink::ask(&question(interface, from, to)))
}

fn question(interface: u32, from: [u8; 16], to: [u8; 16]) -> Vec<u8> {
    let is_ipv4 = Ipv6Addr::from(to).to_ipv4_mapped().is_some();
    let address = |gid: &[u8; 16]| gid[if is_ipv4 { 12 } else { 0 }..].to_vec();
    let (family, bits, from_bits) = if is_ipv4 {
        (libc::AF_INET, 32, 32)
    } else {
        (libc::AF_INET6, 128, 0)
    };
    // struct rtmsg: family, destination bits, source bits, TOS, table, protocol, scope, type;
    // flags.
    let mut header = vec![family as u8, bits, from_bits, 0, 0, 0, 0, 0];
    header.extend(libc::RTM_F_FIB_MATCH.to_ne_bytes());
    let from = address(&from);
    let to = address(&to);
    let interface = interface.to_ne_bytes();
    let mut attributes = vec![(libc::RTA_DST, &to[..]), (libc::RTA_OIF, &interface)];
    if is_ipv4 {
        attributes.push((libc::RTA_SRC, &from));
    }
    netlink::request(libc::RTM_GETROUTE, &header, &attributes)
}

fn is_route(reply: Result<(u16, Vec<u8>)>) -> Result<bool> {
    match reply {
        Ok((libc::RTM_NEWROUTE, _)) => Ok(true),
        Ok(_) => Err(ErrorKind::InvalidData.into()),
        Err(error) => match error.raw_os_error().map(Errno::from_raw) {
            // No entry, or an entry of type unreachable, prohibit or blackhole.
            Some(Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::EACCES | Errno::EINVAL) => {
                Ok(false)
            }
            _ => Err(error),
        },
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

    /// Every network namespace has interface `lo`, index 1.
    #[test]
    fn only_what_a_table_has_is_a_route() {
        assert!(has_route(1, gid("127.0.0.1"), gid("127.0.0.2")).unwrap());
        // TEST-NET-1, without a default route on the interface.
        assert!(!has_route(1, gid("127.0.0.1"), gid("192.0.2.1")).unwrap());
        assert!(!has_route(1, gid("::1"), gid("2001:db8::1")).unwrap());
        let error = has_route(u32::MAX >> 1, gid("127.0.0.1"), gid("127.0.0.2"));
        assert!(error.is_err(), "there is no such interface: {error:?}");
    }

    #[test]
    fn the_kernels_answers_are_checked() {
        let error = |errno: i32| {
            [
                &[36, 0, 0, 0, 2, 0, 0, 0][..],
                &[0; 8],
                &(-errno).to_ne_bytes(),
                &[0; 16],
            ]
            .concat()
        };
        let is_route = |reply: &[u8]| is_route(netlink::decode(reply));
        assert!(!is_route(&error(libc::ENETUNREACH)).unwrap());
        assert_eq!(
            is_route(&error(libc::EPERM)).unwrap_err().raw_os_error(),
            Some(libc::EPERM)
        );
        for odd in [
            &[][..],
            &[0; 5],
            &[0; 16],
            &error(libc::EPERM)[..18],
            &error(0),
        ] {
            assert!(is_route(odd).is_err(), "{odd:?}");
        }
    }
}
