//! Connects to a partner that ssh starts, or that the user has started.

use super::messages::{ANSWER_TIMEOUT, Ask, PARTNER_WORD};
use crate::commands::doctor::hosts::ssh::{self, Remote, Ssh};
use crate::ranks::greeting::PROTOCOL;
use crate::ranks::line::GreetingStream;
use crate::ranks::token::Token;
use crate::ranks::token_port;
use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Instant;

#[derive(Debug, Clone)]
pub enum Peer {
    /// A host on which ssh starts the partner.
    ByHost {
        host: String,
        ssh: Ssh,
        /// Interface or address for the partner to listen on. The default is the address that ssh
        /// connects to.
        interface: Option<String>,
    },
    /// A partner that the user has started.
    ByAddress { place: (String, u16), token: Token },
}

/// A partner that has accepted the token.
pub struct Partner {
    line: GreetingStream,
    pub name: String,
    address: SocketAddr,
    token: Token,
    /// The ssh process that started the partner, if any. Dropping it ends the partner.
    _remote: Option<Remote>,
}

impl Peer {
    /// Connects to the partner. For [`Self::ByHost`], starts it first. Reads from the connection
    /// fail after `end`.
    ///
    /// # Errors
    /// No partner answers, or the partner refuses the token.
    pub fn reach(&self, end: Instant) -> Result<Partner> {
        match self {
            Self::ByHost {
                host,
                ssh,
                interface,
            } => {
                let (remote, address, token) = start(host, ssh, interface.as_deref(), end)?;
                Partner::connect(&[address], &token, host.clone(), Some(remote), end).with_context(|| {
                    format!("the partner on {host} listens on {address}; --interface names another interface or address there")
                })
            }
            Self::ByAddress {
                place: (host, port),
                token,
            } => {
                let addresses = (host.as_str(), *port)
                    .to_socket_addrs()
                    .with_context(|| format!("look up {host}"))?;
                Partner::connect(
                    &addresses.collect::<Vec<_>>(),
                    token,
                    format!("{host}:{port}"),
                    None,
                    end,
                )
            }
        }
    }
}

impl Partner {
    fn connect(
        addresses: &[SocketAddr],
        token: &Token,
        name: String,
        remote: Option<Remote>,
        end: Instant,
    ) -> Result<Self> {
        let stream = token_port::connect(addresses, &name, token, end)?;
        let address = stream
            .peer_addr()
            .with_context(|| format!("lost the connection to {name}"))?;
        let line = GreetingStream::new(stream, &name, end)?;
        Ok(Self {
            line,
            name,
            address,
            token: token.clone(),
            _remote: remote,
        })
    }

    /// Sends `ask`, and returns the answer.
    ///
    /// # Errors
    /// The connection fails, or no answer arrives within 10 s.
    pub fn ask<T: DeserializeOwned>(&mut self, ask: &Ask) -> Result<T> {
        self.line.send(ask)?;
        self.line.receive(ANSWER_TIMEOUT)
    }

    /// Connects to another port of the partner, which accepts one connection.
    pub fn connect_to_port(&self, port: u16, end: Instant) -> Result<TcpStream> {
        let mut address = self.address;
        address.set_port(port);
        token_port::connect(&[address], &self.name, &self.token, end)
    }
}

fn start(
    host: &str,
    ssh: &Ssh,
    interface: Option<&str>,
    end: Instant,
) -> Result<(Remote, SocketAddr, Token)> {
    let seconds = end
        .saturating_duration_since(Instant::now())
        .as_secs()
        .max(1)
        .to_string();
    let mut arguments = vec!["doctor", "--partner", "--attached", "--limit", &seconds];
    arguments.extend(
        interface
            .iter()
            .flat_map(|interface| ["--interface", interface]),
    );
    let mut remote = ssh.start(host, &arguments)?;
    let answer = end.min(Instant::now() + ssh::SSH_ANSWER_TIMEOUT);
    // The login shell may print other lines first.
    while let Some(line) = remote.line(answer)? {
        if let Some(rest) = line.strip_prefix(PARTNER_WORD) {
            let (address, token) =
                parse(rest).with_context(|| format!("{host} printed {line:?}"))?;
            return Ok((remote, address, token));
        }
    }
    Err(remote.exit_error())
}

/// Parses the words that a partner prints after `PARTNER_WORD`: version, address and token.
pub fn parse(text: &str) -> Result<(SocketAddr, Token)> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [version, address, token] = words[..] else {
        bail!("a version, an address and a token are expected")
    };
    if version.parse() != Ok(PROTOCOL) {
        bail!(
            "it has version {version} of the messages, this one {PROTOCOL}: install the same nccl-spark on both hosts"
        );
    }
    let token = Token::parse(token).map_err(anyhow::Error::msg)?;
    Ok((address.parse().context("its address")?, token))
}
