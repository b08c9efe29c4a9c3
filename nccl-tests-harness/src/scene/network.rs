//! Which network NCCL is asked to use, and which it really used, by its own log.

use anyhow::{Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::Path;

/// A network of NCCL's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Network {
    /// This plugin.
    Spark,
    /// NCCL's own over verbs.
    Ib,
    /// NCCL's own over TCP.
    Socket,
}

impl Network {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spark => "spark",
            Self::Ib => "ib",
            Self::Socket => "socket",
        }
    }

    /// As NCCL has it (`NCCL_NET`, `via NET/...`).
    pub fn nccl_name(self) -> &'static str {
        match self {
            Self::Spark => "Spark",
            Self::Ib => "IB",
            Self::Socket => "Socket",
        }
    }

    /// What makes NCCL use it.
    pub fn environment(self, plugin: &Path) -> Vec<(String, String)> {
        let plugin = match self {
            Self::Spark => plugin.display().to_string(),
            Self::Ib | Self::Socket => "none".to_owned(),
        };
        vec![("NCCL_NET_PLUGIN".to_owned(), plugin), ("NCCL_NET".to_owned(), self.nccl_name().to_owned())]
    }
}

/// What NCCL's log says of the network.
#[derive(Debug, Default)]
pub struct Used {
    /// Ends of channels by the network that they go over.
    channels: BTreeMap<String, usize>,
    /// NCCL's version, as it prints it.
    pub version: Option<String>,
    /// The version of the plugin's interface that NCCL took.
    abi: Option<u32>,
    /// Lines that tell why something did not come up: the first ones, and the last one.
    complaints: Vec<String>,
}

/// So many complaints are kept and shown.
const COMPLAINTS: usize = 4;

impl Used {
    /// Takes in a line of output; whether it was one of NCCL's log.
    pub fn note(&mut self, line: &str) -> bool {
        if let Some((_, rest)) = line.split_once(" via NET/") {
            let network = rest.split(['/', ' ']).next().unwrap_or(rest);
            *self.channels.entry(network.to_owned()).or_default() += 1;
        }
        if let Some(at) = line.find("NCCL version ") {
            self.version.get_or_insert_with(|| line[at + "NCCL version ".len()..].trim().to_owned());
        }
        if let Some((_, rest)) = line.split_once("Loaded net plugin Spark (v") {
            self.abi = rest.split(')').next().and_then(|version| version.parse().ok());
        }
        let is_reason = [" NCCL WARN ", "NET/Plugin: Could not", "NET/Plugin: Failed", "error while loading shared"];
        let cause = is_reason.iter().find_map(|word| line.find(word));
        if let Some(at) = cause {
            let text = line[at..].trim().trim_start_matches("NCCL WARN ").to_owned();
            if !self.complaints.contains(&text) {
                // The last one is mostly what ended the run.
                self.complaints.truncate(COMPLAINTS - 1);
                self.complaints.push(text);
            }
        }
        line.contains(" NCCL ") || line.starts_with("NCCL version ")
    }

    /// What NCCL complained of, in a line.
    pub fn complaints(&self) -> Option<String> {
        (!self.complaints.is_empty()).then(|| self.complaints.join("; "))
    }

    /// In words, where all channels went over `wanted`, and by version `abi` of the plugin's interface if one is given.
    ///
    /// # Errors
    /// When they did not, with the reason that the log gives.
    pub fn judge(&self, wanted: Network, abi: Option<u32>) -> Result<String> {
        let reason = self.complaints().map(|text| format!(": NCCL says: {text}")).unwrap_or_default();
        let others = self.channels.keys().filter(|name| *name != wanted.nccl_name()).cloned().collect::<Vec<_>>();
        match self.channels.get(wanted.nccl_name()) {
            Some(count) if others.is_empty() => {
                if wanted == Network::Spark && abi.is_some() {
                    ensure!(
                        self.abi == abi,
                        "NCCL does not say that it took version {} of the interface",
                        abi.unwrap_or_default()
                    );
                }
                let abi = self.abi.map(|version| format!(" (interface v{version})")).unwrap_or_default();
                Ok(format!("NET/{}{abi} at {count} ends of channels", wanted.nccl_name()))
            }
            _ if !others.is_empty() => {
                bail!(
                    "NCCL used NET/{} where NET/{} was asked for{reason}",
                    others.join(" and NET/"),
                    wanted.nccl_name()
                )
            }
            _ => bail!(
                "no channel went over a network (NET/{} was asked for): the ranks may look like one host, or nothing \
                 was sent{reason}",
                wanted.nccl_name()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(lines: &[&str]) -> Used {
        let mut used = Used::default();
        for line in lines {
            used.note(line);
        }
        used
    }

    const SPARK: &str = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Spark/0";
    const SOCKET: &str = "h:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [receive] via NET/Socket/1/Shared";

    #[test]
    fn the_network_is_what_the_channels_went_over() {
        let log = used(&["h:1:1 [0] NCCL INFO NCCL version 2.28.3+cuda13.0", SPARK, SPARK]);
        assert_eq!(log.judge(Network::Spark, None).unwrap(), "NET/Spark at 2 ends of channels");
        assert_eq!(log.version.as_deref(), Some("2.28.3+cuda13.0"));
        assert!(log.judge(Network::Ib, None).unwrap_err().to_string().contains("used NET/Spark where NET/IB"));
    }

    #[test]
    fn the_interface_that_nccl_took_is_named() {
        let log = used(&["h:1:2 [0] NCCL INFO NET/Plugin: Loaded net plugin Spark (v9)", SPARK]);
        assert_eq!(log.judge(Network::Spark, None).unwrap(), "NET/Spark (interface v9) at 1 ends of channels");
        assert!(log.judge(Network::Spark, Some(9)).is_ok());
        assert!(log.judge(Network::Spark, Some(8)).unwrap_err().to_string().contains("version 8"));
    }

    #[test]
    fn a_fallback_is_told_with_its_reason() {
        let reason = "h:1:2 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net-spark.so";
        let text = used(&[reason, reason, SOCKET]).judge(Network::Spark, None).unwrap_err().to_string();
        assert!(text.contains("used NET/Socket where NET/Spark") && text.contains("libnccl-net-spark.so"), "{text}");
        assert_eq!(text.matches("Could not find").count(), 1);
        let mixed = used(&[SPARK, SOCKET]).judge(Network::Spark, None);
        assert!(mixed.unwrap_err().to_string().contains("NET/Socket"));
    }

    #[test]
    fn the_last_complaint_is_kept() {
        let lines: Vec<String> = (0..9).map(|n| format!("h:1:2 [0] net.cc:4 NCCL WARN number {n}")).collect();
        let log = used(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(log.complaints().unwrap(), "number 0; number 1; number 2; number 8");
    }

    #[test]
    fn no_network_at_all_is_told() {
        let text = used(&["h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"]).judge(Network::Spark, None);
        assert!(text.unwrap_err().to_string().contains("look like one host"));
    }

    #[test]
    fn lines_of_the_log_are_told_from_others() {
        let mut log = Used::default();
        assert!(log.note(SPARK) && log.note("NCCL version 2.28.3+cuda13.0") && !log.note("# Using devices"));
    }
}
