//! The user that owns the other end of a connection within this machine. The kernel lists each TCP
//! socket with its owner. The list shows the owner only after `accept`; before, the entry has no
//! inode.

use anyhow::{Context, Result, bail, ensure};
use nix::unistd::geteuid;
use std::net::{IpAddr, SocketAddr, TcpStream};

const LISTS: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// Fails unless a process of this user owns the other end of `stream`. The other end must have sent
/// something, so that it has been accepted.
pub fn check(stream: &TcpStream) -> Result<()> {
    let own = canonical(stream.local_addr()?);
    let peer = canonical(stream.peer_addr()?);
    let mut uid = None;
    for list in LISTS {
        // A kernel without IPv6 has only one of the lists.
        let Ok(text) = std::fs::read_to_string(list) else {
            continue;
        };
        uid = uid.or_else(|| text.lines().find_map(|line| owner(line, peer, own)));
    }
    let uid = uid.with_context(|| {
        format!(
            "{} and {} do not list the owner of {peer}",
            LISTS[0], LISTS[1]
        )
    })?;
    let user = geteuid().as_raw();
    ensure!(
        uid == user,
        "the process at {peer} belongs to user {uid}, and this process to user {user}"
    );
    Ok(())
}

/// Returns the owner in a line of the list, if the line is the socket from `local` to `remote`.
fn owner(line: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [_, from, to, _, _, _, _, uid, _, inode, ..] = fields[..] else {
        return None;
    };
    let is_it =
        inode != "0" && address(from).ok() == Some(local) && address(to).ok() == Some(remote);
    if is_it { uid.parse().ok() } else { None }
}

/// Parses an address of the list. The kernel prints each 32-bit word of the address as a number in
/// the machine's byte order.
fn address(text: &str) -> Result<SocketAddr> {
    let (ip, port) = text.split_once(':').context("no port")?;
    ensure!(ip.is_ascii(), "not hexadecimal");
    let words = ip
        .as_bytes()
        .chunks(8)
        .map(|word| Ok(u32::from_str_radix(std::str::from_utf8(word)?, 16)?));
    let bytes: Vec<u8> = words
        .collect::<Result<Vec<u32>>>()?
        .into_iter()
        .flat_map(u32::to_ne_bytes)
        .collect();
    let ip: IpAddr = match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes.as_slice())?.into(),
        16 => <[u8; 16]>::try_from(bytes.as_slice())?.into(),
        _ => bail!("neither IPv4 nor IPv6"),
    };
    Ok(canonical(SocketAddr::new(
        ip,
        u16::from_str_radix(port, 16)?,
    )))
}

/// Makes an IPv4 address in IPv6 form an IPv4 one, and removes an IPv6 address's scope.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_connection_of_this_process_is_this_users_on_both_ends() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else {
                continue;
            };
            let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let error = check(&connected).unwrap_err().to_string();
            assert!(
                error.contains("do not list the owner"),
                "not accepted yet: {error}"
            );
            let (accepted, _) = listener.accept().unwrap();
            check(&accepted).unwrap();
            check(&connected).unwrap();
        }
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn lines_of_the_kernel_are_read() {
        let line = "   1: 0100007F:1F90 0100007F:D431 01 00000000:00000000 00:00000000 00000000  1000        0 4711 1";
        let listener = "127.0.0.1:8080".parse().unwrap();
        let client = "127.0.0.1:54321".parse().unwrap();
        assert_eq!(owner(line, listener, client), Some(1000));
        assert_eq!(owner(line, client, listener), None);
        assert_eq!(
            owner(&line.replace("4711", "0"), listener, client),
            None,
            "not accepted yet"
        );
        let mapped = line.replace("0100007F", "0000000000000000FFFF00000100007F");
        assert_eq!(owner(&mapped, listener, client), Some(1000));
        assert_eq!(
            owner("  sl  local_address rem_address   st", listener, client),
            None
        );
    }
}
