//! The partner: listens on one address for one doctor with the token, sends the result of this
//! host's doctor, and starts ranks for the measurements. It starts only ranks of this program, with
//! the plugin and rails of this host.

use super::host::Host;
use super::messages::{ANSWER_TIMEOUT, Ask, PARTNER_WORD, RankPort};
use crate::commands::collectives::rank::Collectives;
use crate::output;
use crate::ranks::control::Work;
use crate::ranks::greeting::PROTOCOL;
use crate::ranks::line::GreetingStream;
use crate::ranks::token::Token;
use crate::ranks::token_port::TokenPort;
use crate::usage::wrong;
use anyhow::{Context, Result};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Waits for a doctor and serves it until it disconnects, or until `end`.
///
/// # Errors
/// No doctor connects before `end`, or the connection to the doctor fails.
pub fn run(host: &Host, address: IpAddr, program: &Path, end: Instant) -> Result<()> {
    let token = Token::new()?;
    let token_port = TokenPort::open(address, &token)?;
    announce(token_port.address, &token, end)?;
    let mut line = GreetingStream::new(
        token_port.accept_one(end)?,
        "the doctor that connected",
        end,
    )?;
    let mut rank = None;
    // The next message may come as late as `end`, because the doctor may measure that long.
    while let Some(ask) = line.receive_next(end.saturating_duration_since(Instant::now()))? {
        match ask {
            Ask::Sheet => line.send(&host.sheet_with_arp_table())?,
            Ask::Rank { rails } => {
                // The previous measurement's rank may hang, so it is ended first.
                drop(rank.take());
                let rank_port = TokenPort::open(address, &token)?;
                rank = Some(take_part(host, &rails, rank_port, &mut line, program)?);
            }
        }
    }
    Ok(())
}

fn announce(address: SocketAddr, token: &Token, end: Instant) -> Result<()> {
    let token = token.text();
    let seconds = end.saturating_duration_since(Instant::now()).as_secs();
    let mut out = output::standard();
    writeln!(out, "{PARTNER_WORD} {PROTOCOL} {address} {token}")
        .and_then(|()| out.flush())
        .context("print address and token")?;
    writeln!(
        output::error(),
        "# on the other host, within {seconds} s: SPARK_DOCTOR_TOKEN={token} nccl-spark doctor --peer {address}"
    )?;
    Ok(())
}

struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // `drop` cannot report an error. If the rank has already ended, both calls succeed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn take_part(
    host: &Host,
    rails: &[String],
    rank_port: TokenPort,
    line: &mut GreetingStream,
    program: &Path,
) -> Result<Rank> {
    let expected_mbps = host.expected_mbps(rails)?;
    let environment = host.environment(rails)?;
    line.send(&RankPort {
        port: rank_port.address.port(),
        expected_mbps,
    })?;
    let control = OwnedFd::from(rank_port.accept_one(Instant::now() + ANSWER_TIMEOUT)?);
    let mut command = Command::new(program);
    command
        .args([Collectives::COMMAND, "1", "--launched", "--plugin"])
        .arg(&host.plugin)
        .envs(environment);
    command
        .stdin(Stdio::from(control))
        .stdout(Stdio::from(std::io::stderr()));
    command
        .spawn()
        .map(Rank)
        .with_context(|| format!("start {}", program.display()))
}

/// Returns the address to listen on. `wanted` is an address, or an interface with an address.
/// Without `wanted`, returns the address that ssh connected to: `SSH_CONNECTION` has address and
/// port of the client, then of the server.
///
/// # Errors
/// A mistake on the command line, or an interface without an address.
pub fn address(wanted: Option<&str>, ssh_connection: Option<&str>) -> Result<IpAddr> {
    let Some(wanted) = wanted else {
        let server = ssh_connection.and_then(|text| text.split_whitespace().nth(2)?.parse().ok());
        const NONE: &str = "--partner needs --interface NAME or ADDRESS: the interface through which the other host connects";
        return server.ok_or_else(|| wrong(NONE).into());
    };
    if let Ok(address) = wanted.parse() {
        return Ok(address);
    }
    let interfaces = host::interfaces::all()?;
    let Some(interface) = interfaces.iter().find(|one| one.name == wanted) else {
        let names: Vec<&str> = interfaces.iter().map(|one| one.name.as_str()).collect();
        let names = names.join(", ");
        let text = format!(
            "--interface {wanted}: no such interface, and no address; the interfaces: {names}"
        );
        return Err(wrong(text).into());
    };
    let mut addresses: Vec<IpAddr> = interface
        .addresses
        .iter()
        .map(|one| one.address.ip())
        .collect();
    addresses.retain(|ip| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses
        .first()
        .copied()
        .with_context(|| format!("--interface {wanted}: it has no address beside link-local ones"))
}

/// Starts a thread that exits this process when standard input is closed. ssh closes it when the
/// doctor on the other host has ended.
pub fn end_with_input() {
    std::thread::spawn(|| {
        // The content of the input is ignored.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(1);
    });
}
