//! The command line of `nccl-spark doctor`, parsed once: what is examined, and how another host is reached.

use super::hosts;
use super::peer::Peer;
use super::ssh::{self, Ssh};
use crate::output::report::JsonOption;
use crate::ranks::door::Token;
use crate::ranks::rendezvous::parse_place;
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
    /// Python whose libnccl counts [default: python3 in PATH]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pid", "program"])]
    pub(super) python: Option<PathBuf>,
    /// Program whose libnccl counts
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    pub(super) program: Option<PathBuf>,
    #[command(flatten)]
    pub(super) json: JsonOption,
    /// Judges the machine whose files were copied below DIR.
    #[arg(long, value_name = "DIR", hide = true, conflicts_with = "other hosts")]
    pub(super) root: Option<PathBuf>,
    /// Also examines another host, and measures each pair of rails and all together: a host that ssh reaches, or the address that a
    /// partner there has printed.
    #[arg(long, value_name = "HOST|ADDRESS:PORT")]
    peer: Option<String>,
    /// Waits for a doctor on another host (--peer), and takes part in what it measures.
    #[arg(long, conflicts_with = "json")]
    partner: bool,
    /// Compares the subnets of these hosts, and prints the order of ranks in which no neighbours lack a cable.
    #[arg(long, value_name = "A,B,...", value_delimiter = ',')]
    hosts: Vec<String>,
    /// Interface or address that the partner listens on [default: the one by which ssh comes]
    #[arg(long, value_name = "NAME|ADDRESS", conflicts_with_all = ["env", "pid", "root", "hosts"])]
    interface: Option<String>,
    /// Seconds after which it ends, whatever is left to measure.
    #[arg(long, value_name = "SECONDS", default_value_t = MOST_SECONDS, value_parser = clap::value_parser!(u64).range(1..=MOST_SECONDS))]
    limit: u64,
    /// File with the token of a partner that was started by hand [default: the variable SPARK_DOCTOR_TOKEN]
    #[arg(long, value_name = "FILE", requires = "peer")]
    token_file: Option<PathBuf>,
    /// The token itself. Other users of this host may see it.
    #[arg(long, value_name = "TOKEN", requires = "peer", conflicts_with = "token_file")]
    token: Option<String>,
    /// Command that runs a program on another host, as in "ssh -p 2222".
    #[arg(long, value_name = "COMMAND", default_value = "ssh")]
    ssh: String,
    /// This program's name or path on other hosts.
    #[arg(long, value_name = "PATH", default_value = "nccl-spark")]
    partner_program: String,
    /// Ends when standard input does.
    #[arg(long, hide = true, requires = "partner")]
    attached: bool,
}

/// Five minutes.
const MOST_SECONDS: u64 = 300;
/// What a token's variable is called.
pub const TOKEN_VARIABLE: &str = "SPARK_DOCTOR_TOKEN";

/// What is done beside the look at this host.
#[derive(Debug)]
pub enum Task {
    /// Nothing.
    Alone,
    /// Another host is examined too.
    Peer(Peer),
    /// It waits as a partner.
    Partner {
        /// The interface or address that it listens on.
        interface: Option<String>,
        /// It ends when its standard input does.
        is_attached: bool,
    },
    /// The subnets of several hosts are compared; this host is one of them only if it is named.
    Hosts {
        /// The hosts.
        names: Vec<String>,
        /// How ssh is called.
        ssh: Ssh,
    },
}

impl Options {
    /// Whether processes are started that must not outlive this one.
    pub fn starts_processes(&self) -> bool {
        self.partner || self.peer.is_some() || !self.hosts.is_empty()
    }

    /// How long it may take.
    pub(super) fn limit(&self) -> Duration {
        Duration::from_secs(self.limit)
    }

    /// What is to be done; `variable` gives the environment's.
    ///
    /// # Errors
    /// A mistake on the command line.
    pub(super) fn task(&self, variable: impl Fn(&str) -> Option<String>) -> Result<Task, clap::Error> {
        let ssh = Ssh::new(&self.ssh, &self.partner_program).map_err(wrong)?;
        if self.partner {
            return Ok(Task::Partner { interface: self.interface.clone(), is_attached: self.attached });
        }
        if let Some(peer) = &self.peer {
            return self.peer(peer, ssh, variable).map(Task::Peer);
        }
        if self.hosts.is_empty() {
            return match &self.interface {
                Some(_) => Err(wrong("--interface is for --partner and --peer")),
                None => Ok(Task::Alone),
            };
        }
        for (at, host) in self.hosts.iter().enumerate() {
            ssh::check_host(host).map_err(|allowed| wrong(format!("--hosts: {allowed}")))?;
            if self.hosts[..at].contains(host) {
                return Err(wrong(format!("--hosts: {host} is named twice")));
            }
        }
        match self.hosts.len() {
            2..=hosts::MOST => Ok(Task::Hosts { names: self.hosts.clone(), ssh }),
            other => Err(wrong(format!("--hosts: {other} hosts; must be 2 to {}", hosts::MOST))),
        }
    }

    fn peer(&self, peer: &str, ssh: Ssh, variable: impl Fn(&str) -> Option<String>) -> Result<Peer, clap::Error> {
        let is_address = peer.parse::<IpAddr>().is_err();
        let Some(place) = parse_place(peer).ok().filter(|_| is_address) else {
            ssh::check_host(peer).map_err(|allowed| wrong(format!("--peer: {allowed}")))?;
            if self.token.is_some() || self.token_file.is_some() {
                return Err(wrong(format!("--peer {peer}: a token is for ADDRESS:PORT; ssh brings one itself")));
            }
            return Ok(Peer::ByHost { host: peer.to_owned(), ssh, interface: self.interface.clone() });
        };
        if self.interface.is_some() {
            return Err(wrong(format!("--peer {peer}: --interface is for the partner there, which listens already")));
        }
        let (text, source) = match (&self.token, &self.token_file) {
            (Some(token), _) => (token.clone(), "--token".to_owned()),
            (None, Some(file)) => {
                let text = std::fs::read_to_string(file);
                let text = text.map_err(|error| wrong(format!("--token-file {}: {error}", file.display())))?;
                (text, format!("--token-file {}", file.display()))
            }
            (None, None) => {
                let none =
                    format!("--peer {peer} needs the token that the partner printed: {TOKEN_VARIABLE} or --token-file");
                (variable(TOKEN_VARIABLE).ok_or_else(|| wrong(none))?, TOKEN_VARIABLE.to_owned())
            }
        };
        let token = Token::parse(&text).map_err(|allowed| wrong(format!("{source}: {allowed}")))?;
        Ok(Peer::ByAddress { place, token })
    }
}
