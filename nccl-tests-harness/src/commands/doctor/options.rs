//! The command line of `nccl-spark doctor`.

use super::hosts::peer::Peer;
use super::hosts::ssh::{self, Ssh};
use crate::output::report::JsonOption;
use crate::ranks::rendezvous::parse_place;
use crate::ranks::token::Token;
use crate::usage::wrong;
use clap::{ArgGroup, Args};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Options of doctor.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("other hosts").args(["peer", "partner", "hosts"]))]
pub struct Options {
    /// Judges the variables alone: what each one does to the plugin.
    #[arg(long, conflicts_with = "other hosts")]
    pub(super) env: bool,
    /// Judges the running process N: its variables as it was started, its libraries, its limits.
    #[arg(long, value_name = "N", conflicts_with = "other hosts")]
    pub(super) pid: Option<u32>,
    /// Judges the libnccl that this Python would load [default: python3 in PATH]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pid", "program"])]
    pub(super) python: Option<PathBuf>,
    /// Judges the libnccl that this program would load, not Python's
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    pub(super) program: Option<PathBuf>,
    #[command(flatten)]
    pub(super) json: JsonOption,
    /// Judges the machine whose files were copied below DIR.
    #[arg(long, value_name = "DIR", hide = true, conflicts_with = "other hosts")]
    pub(super) root: Option<PathBuf>,
    /// Also examines another host, and measures each pair of rails alone and all pairs together.
    /// The value is a host that ssh reaches, or the address that a partner there has printed.
    #[arg(long, value_name = "HOST|ADDRESS:PORT")]
    peer: Option<String>,
    /// Measures how long the NIC of each rail needs to report a peer that no longer answers.
    #[arg(long, conflicts_with_all = ["env", "pid", "partner", "hosts"])]
    pub(super) silence: bool,
    /// Waits for a doctor on another host (--peer), and takes part in what it measures.
    #[arg(long, conflicts_with = "json")]
    pub(super) partner: bool,
    /// Compares the subnets of these hosts, and prints the order of ranks in which each host has a
    /// cable to the next.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    pub(super) hosts: Vec<String>,
    /// Interface or address that the partner listens on [default: the one that ssh connected to]
    #[arg(long, value_name = "NAME|ADDRESS", conflicts_with_all = ["env", "pid", "root", "hosts"])]
    pub(super) interface: Option<String>,
    /// Time limit in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = MOST_SECONDS, value_parser = clap::value_parser!(u64).range(1..=MOST_SECONDS))]
    limit: u64,
    /// File with the token of a partner that was started by hand [default: the variable
    /// SPARK_DOCTOR_TOKEN]
    #[arg(long, value_name = "FILE", requires = "peer")]
    token_file: Option<PathBuf>,
    /// The token itself. Other users of this host may see it.
    #[arg(
        long,
        value_name = "TOKEN",
        requires = "peer",
        conflicts_with = "token_file"
    )]
    token: Option<String>,
    /// Command that runs a program on another host, as in "ssh -p 2222".
    #[arg(long, value_name = "COMMAND", default_value = "ssh")]
    ssh: String,
    /// This program's name or path on other hosts.
    #[arg(long, value_name = "PATH", default_value = "nccl-spark")]
    partner_program: String,
    /// Ends when standard input does.
    #[arg(long, hide = true, requires = "partner")]
    pub(super) attached: bool,
}

const MOST_SECONDS: u64 = 300;
pub const TOKEN_VARIABLE: &str = "SPARK_DOCTOR_TOKEN";

impl Options {
    pub fn starts_processes(&self) -> bool {
        self.partner || self.peer.is_some() || !self.hosts.is_empty()
    }

    pub(super) fn limit(&self) -> Duration {
        Duration::from_secs(self.limit)
    }

    /// Returns the peer to examine, and the ssh command.
    ///
    /// # Errors
    /// A mistake on the command line.
    pub(super) fn checked(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<(Option<Peer>, Ssh), clap::Error> {
        let ssh = Ssh::new(&self.ssh, &self.partner_program).map_err(wrong)?;
        let peer = self
            .peer
            .as_deref()
            .map(|peer| self.peer(peer, &ssh, variable))
            .transpose()?;
        if self.interface.is_some() && !self.partner && peer.is_none() {
            return Err(wrong("--interface is for --partner and --peer"));
        }
        if !self.hosts.is_empty() {
            ssh::check_hosts(&self.hosts)?;
        }
        Ok((peer, ssh))
    }

    fn peer(
        &self,
        peer: &str,
        ssh: &Ssh,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Peer, clap::Error> {
        let is_address = peer.parse::<IpAddr>().is_err();
        let Some(place) = parse_place(peer).ok().filter(|_| is_address) else {
            ssh::check_host(peer).map_err(|allowed| wrong(format!("--peer: {allowed}")))?;
            if self.token.is_some() || self.token_file.is_some() {
                return Err(wrong(format!(
                    "--peer {peer}: a token is for ADDRESS:PORT; ssh brings one itself"
                )));
            }
            let host = peer.to_owned();
            let interface = self.interface.clone();
            return Ok(Peer::ByHost {
                host,
                ssh: ssh.clone(),
                interface,
            });
        };
        if self.interface.is_some() {
            return Err(wrong(format!(
                "--peer {peer}: --interface is for the partner there, which listens already"
            )));
        }
        let none = || {
            format!(
                "--peer {peer} needs the token that the partner printed: {TOKEN_VARIABLE} or --token-file"
            )
        };
        let (text, source) = match (&self.token, &self.token_file) {
            (Some(token), _) => (token.clone(), "--token".to_owned()),
            (None, Some(file)) => {
                let source = format!("--token-file {}", file.display());
                (
                    std::fs::read_to_string(file)
                        .map_err(|error| wrong(format!("{source}: {error}")))?,
                    source,
                )
            }
            (None, None) => (
                variable(TOKEN_VARIABLE).ok_or_else(|| wrong(none()))?,
                TOKEN_VARIABLE.to_owned(),
            ),
        };
        let token = Token::parse(&text).map_err(|allowed| wrong(format!("{source}: {allowed}")))?;
        Ok(Peer::ByAddress { place, token })
    }
}
