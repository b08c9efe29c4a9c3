//! The way to a partner: by ssh, which starts it, or to one that was started by hand.

use super::admission::show_token;
use super::line::Line;
use super::words::{OPENING, PARTNER_WORD, PROTOCOL, Token};
use crate::commands::doctor::ssh::{ANSWER, Remote, Ssh};
use anyhow::{Context, Result, bail};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Instant;

/// Where the partner is.
#[derive(Debug, Clone)]
pub enum Peer {
    /// On a host where ssh starts it.
    ByHost {
        /// The host.
        host: String,
        /// How ssh is called.
        ssh: Ssh,
        /// The interface or address there that it listens on; none: the one by which ssh comes.
        interface: Option<String>,
    },
    /// It was started by hand.
    ByAddress {
        /// Its host and port.
        place: (String, u16),
        /// What it printed.
        token: Token,
    },
}

/// A partner that has taken the token.
pub struct Partner {
    /// The connection to it.
    pub line: Line,
    /// Where it listens.
    pub address: SocketAddr,
    /// What it is called until it says its name.
    pub name: String,
    /// It ends with this where ssh started it.
    _remote: Option<Remote>,
}

impl Peer {
    /// Connects, and ends what it does at `end`.
    ///
    /// # Errors
    /// When nobody is there, or the partner refuses.
    pub fn reach(&self, end: Instant) -> Result<Partner> {
        match self {
            Self::ByHost { host, ssh, interface } => {
                let (remote, address, token) = start(host, ssh, interface.as_deref(), end)?;
                connect(vec![address], &token, host.clone(), Some(remote), end).with_context(|| {
                    format!("the partner on {host} listens on {address}; --interface names another interface or address there")
                })
            }
            Self::ByAddress { place: (host, port), token } => {
                let addresses = (host.as_str(), *port).to_socket_addrs().with_context(|| format!("look up {host}"))?;
                connect(addresses.collect(), token, format!("{host}:{port}"), None, end)
            }
        }
    }
}

/// Another connection to a partner that is there, by a token that it gave.
pub fn again(partner: &Partner, token: &str, end: Instant) -> Result<TcpStream> {
    let mut line = dial(&[partner.address], &partner.name, end)?;
    show_token(&mut line, token)?;
    Ok(line.into_stream())
}

fn start(host: &str, ssh: &Ssh, interface: Option<&str>, end: Instant) -> Result<(Remote, SocketAddr, Token)> {
    let seconds = end.saturating_duration_since(Instant::now()).as_secs().max(1).to_string();
    let mut arguments = vec!["doctor", "--partner", "--attached", "--limit", &seconds];
    arguments.extend(interface.iter().flat_map(|interface| ["--interface", interface]));
    let mut remote = ssh.start(host, &arguments)?;
    let answer = end.min(Instant::now() + ANSWER);
    // A login may print lines of its own first.
    while let Some(line) = remote.line(answer)? {
        if let Some(rest) = line.strip_prefix(PARTNER_WORD) {
            let (address, token) = parse(rest).with_context(|| format!("{host} printed {line:?}"))?;
            return Ok((remote, address, token));
        }
    }
    Err(remote.ended())
}

/// What a partner prints behind its first word: version, address and token.
fn parse(text: &str) -> Result<(SocketAddr, Token)> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [version, address, token] = words[..] else { bail!("a version, an address and a token are expected") };
    if version.parse() != Ok(PROTOCOL) {
        bail!(
            "it has version {version} of the messages, this one {PROTOCOL}: install the same nccl-spark on both hosts"
        );
    }
    let token = Token::parse(token).map_err(anyhow::Error::msg)?;
    Ok((address.parse().context("its address")?, token))
}

fn connect(
    addresses: Vec<SocketAddr>,
    token: &Token,
    name: String,
    remote: Option<Remote>,
    end: Instant,
) -> Result<Partner> {
    let mut line = dial(&addresses, &name, end)?;
    show_token(&mut line, token.text())?;
    let address = line.peer()?;
    Ok(Partner { line, address, name, _remote: remote })
}

fn dial(addresses: &[SocketAddr], name: &str, end: Instant) -> Result<Line> {
    let mut last = None;
    for address in addresses {
        let left = end.saturating_duration_since(Instant::now()).min(OPENING);
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => return Line::new(stream, name, end),
            Err(error) => last = Some((address, error)),
        }
    }
    match last {
        Some((address, error)) => bail!("connect to {name} at {address}: {error}"),
        None => bail!("{name} has no address that could be tried in time"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_partner_prints_is_read_with_care() {
        let token = "0123456789abcdef0123456789abcdef";
        let (address, parsed) = parse(&format!(" 1 192.168.1.12:40001 {token}")).unwrap();
        assert!(address.to_string() == "192.168.1.12:40001" && parsed.is(token));
        assert!(parse(&format!(" 1 [fd00::2]:40001 {token}")).is_ok());
        let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert!(error(&format!(" 2 192.168.1.12:40001 {token}")).contains("version 2"));
        assert!(error(" 1 spark-2 x").contains("token"));
        assert!(error(&format!(" 1 192.168.1.12 {token}")).contains("its address"));
        assert!(error("").contains("are expected"));
    }
}
