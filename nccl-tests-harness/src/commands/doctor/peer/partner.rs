//! The partner: waits on one address for one doctor with the token, tells it about this host, and takes part in what it measures. It
//! starts nothing but ranks of this program, with its own plugin, by rails of this host.

use super::admission::Admission;
use super::host::Host;
use super::line::Line;
use super::neighbours;
use super::words::{Ask, OPENING, PARTNER_WORD, PROTOCOL, Token, Told};
use crate::commands::doctor::place::Place;
use crate::output;
use crate::pair::rank::Pair;
use crate::ranks::control::Work;
use crate::usage::wrong;
use anyhow::{Context, Result};
use std::io::Write;
use std::net::{IpAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Waits for a doctor, serves it until it goes, and ends at `end` at the latest.
///
/// # Errors
/// When nobody comes, or the doctor that came is gone or sends nonsense.
pub fn run(host: &Host, place: &Place, address: IpAddr, program: &Path, end: Instant) -> Result<()> {
    let admission = Admission::open(address)?;
    let token = admission.expect_one()?;
    announce(&admission, &token, end)?;
    let stream = admission.next(end)?;
    let mut line = Line::new(stream, "the doctor that connected", end)?;
    let mut rank = None;
    loop {
        // It may measure until the end.
        let ask: Ask = match line.hear(end.saturating_duration_since(Instant::now())) {
            Ok(ask) => ask,
            Err(error) if error.to_string().ends_with("closed the connection") => return Ok(()),
            Err(error) => return Err(error),
        };
        match ask {
            Ask::Sheet => line.say(&Told::Sheet(Box::new(host.sheet.clone())))?,
            Ask::Neighbours => line.say(&Told::Neighbours(neighbours::read(place)))?,
            Ask::Measure { rails } => {
                // The rank of an earlier measurement ends first: it may hang.
                drop(rank.take());
                rank = take_part(host, &rails, &admission, &mut line, program, end)?;
            }
        }
    }
}

/// For a program: one line on standard output. For a person: what to do with it.
fn announce(admission: &Admission, token: &Token, end: Instant) -> Result<()> {
    let (address, token) = (admission.address, token.text());
    let seconds = end.saturating_duration_since(Instant::now()).as_secs();
    let mut out = output::standard();
    writeln!(out, "{PARTNER_WORD} {PROTOCOL} {address} {token}")
        .and_then(|()| out.flush())
        .context("say where this is")?;
    writeln!(
        output::error(),
        "# on the other host, within {seconds} s: SPARK_DOCTOR_TOKEN={token} nccl-spark doctor --peer {address}"
    )?;
    Ok(())
}

/// A rank that takes part in a measurement. It ends with this.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a rank over the connection that the doctor opens next; none where it asked for what this host does not have.
fn take_part(
    host: &Host,
    rails: &[String],
    admission: &Admission,
    line: &mut Line,
    program: &Path,
    end: Instant,
) -> Result<Option<Rank>> {
    let prepared = host.expected_mbps(rails).and_then(|expected| Ok((expected, host.environment(rails)?)));
    let (expected_mbps, environment) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            line.say(&Told::Failed { why: format!("{error:#}") })?;
            return Ok(None);
        }
    };
    let token = admission.expect_one()?;
    line.say(&Told::Ready { token: token.text().to_owned(), expected_mbps })?;
    let control = admission.next(end.min(Instant::now() + OPENING))?;
    start(program, &host.plugin, environment, control).map(|rank| Some(Rank(rank)))
}

fn start(program: &Path, plugin: &Path, environment: Vec<(String, String)>, control: TcpStream) -> Result<Child> {
    let set = || -> std::io::Result<()> {
        control.set_read_timeout(None)?;
        control.set_write_timeout(None)
    };
    set().context("set up a rank's connection")?;
    let mut command = Command::new(program);
    command.args([Pair::COMMAND, "1", "--launched", "--plugin"]).arg(plugin).envs(environment);
    command.stdin(Stdio::from(OwnedFd::from(control))).stdout(Stdio::from(std::io::stderr()));
    command.spawn().with_context(|| format!("start {}", program.display()))
}

/// The address that a partner listens on: of an interface, or an address itself. Without either, the one by which ssh came
/// (`SSH_CONNECTION` has the client's address and port, then the server's).
///
/// # Errors
/// A mistake on the command line, or an interface without an address.
pub fn address(wanted: Option<&str>, ssh_connection: Option<&str>) -> Result<IpAddr> {
    let Some(wanted) = wanted else {
        let server = ssh_connection.and_then(|text| text.split_whitespace().nth(2)?.parse().ok());
        const NONE: &str = "--partner needs --interface NAME or ADDRESS: the interface by which the other host comes";
        return server.ok_or_else(|| wrong(NONE).into());
    };
    if let Ok(address) = wanted.parse() {
        return Ok(address);
    }
    let interfaces = nccl_net_spark::interfaces::all()?;
    let Some(interface) = interfaces.iter().find(|one| one.name == wanted) else {
        let names: Vec<&str> = interfaces.iter().map(|one| one.name.as_str()).collect();
        let names = names.join(", ");
        let text = format!("--interface {wanted}: no such interface, and no address; the interfaces: {names}");
        return Err(wrong(text).into());
    };
    let mut addresses: Vec<IpAddr> = interface.addresses.iter().map(|one| one.address.ip()).collect();
    addresses.retain(|ip| !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()));
    addresses.sort_by_key(IpAddr::is_ipv6);
    addresses
        .first()
        .copied()
        .with_context(|| format!("--interface {wanted}: it has no address beside link-local ones"))
}

/// Ends this process when standard input does: ssh closes it when the doctor at its other end is gone.
pub fn end_with_input() {
    std::thread::spawn(|| {
        // Whatever comes means nothing.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(1);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partner_listens_where_it_is_told_or_where_ssh_came() {
        let ssh = Some("192.168.1.7 51034 192.168.1.12 22");
        let of = |wanted, ssh| address(wanted, ssh).map(|ip| ip.to_string()).map_err(|error| error.to_string());
        assert_eq!(of(None, ssh).unwrap(), "192.168.1.12");
        assert_eq!(of(Some("10.0.0.1"), ssh).unwrap(), "10.0.0.1");
        assert_eq!(of(Some("lo"), None).unwrap(), "127.0.0.1");
        assert!(of(None, None).unwrap_err().contains("--interface"));
        assert!(of(None, Some("what is this")).is_err());
        assert!(of(Some("nosuch0"), ssh).unwrap_err().contains("the interfaces: "));
    }
}
