//! The network that NCCL is set to use, and the network that NCCL used according to its log.

use anyhow::{Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// A network that NCCL can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Network {
    /// This plugin.
    Spark,
    /// This plugin with its tuner off.
    SparkUntuned,
    /// NCCL's own over verbs.
    Ib,
    /// NCCL's own over TCP.
    Socket,
}

/// The plugin's setting for its tuner.
pub const TUNER: &str = "NCCL_SPARK_TUNER";

impl Network {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spark => "spark",
            Self::SparkUntuned => "spark-untuned",
            Self::Ib => "ib",
            Self::Socket => "socket",
        }
    }

    /// Returns NCCL's name, as in `NCCL_NET` and in the log (`via NET/...`).
    pub(crate) fn nccl_name(self) -> &'static str {
        match self {
            Self::Spark | Self::SparkUntuned => "Spark",
            Self::Ib => "IB",
            Self::Socket => "Socket",
        }
    }

    /// Returns true for this plugin, with its tuner or without.
    pub fn is_plugin(self) -> bool {
        matches!(self, Self::Spark | Self::SparkUntuned)
    }

    /// Returns the variables that make NCCL use the network.
    pub fn environment(self, plugin: &Path) -> Vec<(String, String)> {
        let plugin = if self.is_plugin() {
            plugin.display().to_string()
        } else {
            "none".to_owned()
        };
        let mut environment = vec![
            ("NCCL_NET_PLUGIN".to_owned(), plugin),
            ("NCCL_NET".to_owned(), self.nccl_name().to_owned()),
        ];
        if self == Self::SparkUntuned {
            environment.push((TUNER.to_owned(), "off".to_owned()));
        }
        environment
    }
}

/// The channels that NCCL chose for a communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Channels {
    /// Number of channels for collectives.
    pub collective: u32,
    /// All kinds of channels, in NCCL's words.
    pub text: String,
}

impl Channels {
    /// Parses NCCL's line "18 coll channels, 18 collnet channels, ..." (init.cc, subsystem INIT).
    fn read(line: &str) -> Option<Self> {
        let (before, _) = line.split_once(" coll channels, ")?;
        let (prefix, number) = before.rsplit_once("NCCL INFO ")?;
        let text = line[prefix.len()..]
            .trim_start_matches("NCCL INFO ")
            .trim_end()
            .to_owned();
        Some(Self {
            collective: number.parse().ok()?,
            text,
        })
    }

    /// Returns the number of channels by kind. The names of the kinds are NCCL's, as in
    /// `p2p_per_peer`.
    pub fn counts(&self) -> BTreeMap<String, u32> {
        let count = |part: &str| {
            let (number, name) = part.split_once(' ')?;
            Some((
                name.replace(" channels", "").replace(' ', "_"),
                number.parse().ok()?,
            ))
        };
        self.text.split(", ").filter_map(count).collect()
    }
}

/// Facts from NCCL's log about the network that it used.
#[derive(Debug, Default)]
pub struct Used {
    /// Number of channel ends that each network carries.
    ends: BTreeMap<String, usize>,
    /// The channels of the communicator with the fewest collective channels.
    channels: Option<Channels>,
    /// NCCL's version as NCCL prints it.
    pub version: Option<String>,
    /// Version of the plugin's interface that NCCL loaded.
    abi: Option<u32>,
    /// Lines with the reason of a failure: the first three lines and the last line.
    complaints: Vec<String>,
}

const COMPLAINTS: usize = 4;

impl Used {
    /// Reads a line of output. Returns true for a line of NCCL's log.
    pub fn note(&mut self, line: &str) -> bool {
        if let Some((_, rest)) = line.split_once(" via NET/") {
            // mpirun may cut a line within the name and continue with a line of another rank.
            let is_letter = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            if let Some((network, _)) = rest
                .split_once('/')
                .filter(|(network, _)| network.chars().all(is_letter))
            {
                *self.ends.entry(network.to_owned()).or_default() += 1;
            }
        }
        if let Some(channels) = Channels::read(line)
            && self
                .channels
                .as_ref()
                .is_none_or(|known| channels.collective < known.collective)
        {
            self.channels = Some(channels);
        }
        if let Some(at) = line.find("NCCL version ") {
            self.version
                .get_or_insert_with(|| line[at + "NCCL version ".len()..].trim().to_owned());
        }
        if let Some((_, rest)) = line.split_once("Loaded net plugin Spark (v") {
            self.abi = rest
                .split(')')
                .next()
                .and_then(|version| version.parse().ok());
        }
        let is_reason = [
            " NCCL WARN ",
            " NCCL ATTN ",
            "NET/Plugin: Could not",
            "NET/Plugin: Failed",
            "error while loading shared",
        ];
        let cause = is_reason.iter().find_map(|word| line.find(word));
        if let Some(at) = cause {
            let text = line[at..]
                .trim()
                .trim_start_matches("NCCL WARN ")
                .trim_start_matches("NCCL ATTN ")
                .to_owned();
            if !self.complaints.contains(&text) {
                // If the list is full, this line replaces the last one: the last line of a log is
                // usually the error that ended the run.
                self.complaints.truncate(COMPLAINTS - 1);
                self.complaints.push(text);
            }
        }
        line.contains(" NCCL ") || line.starts_with("NCCL version ")
    }

    /// Returns the channels of the communicator with the fewest collective channels.
    pub fn channels(&self) -> Option<&Channels> {
        self.channels.as_ref()
    }

    /// Returns NCCL's complaints in one line.
    pub fn complaints(&self) -> Option<String> {
        (!self.complaints.is_empty()).then(|| self.complaints.join("; "))
    }

    /// Checks that all channels over a network used `wanted`. Returns a description of the network.
    ///
    /// # Errors
    /// Fails when a channel used another network, or no channel used any. The error has the reason
    /// that NCCL's log gives.
    pub fn judge(&self, wanted: Network) -> Result<String> {
        let reason = self
            .complaints()
            .map(|text| format!(": NCCL says: {text}"))
            .unwrap_or_default();
        let others = self
            .ends
            .keys()
            .filter(|name| *name != wanted.nccl_name())
            .cloned()
            .collect::<Vec<_>>();
        match self.ends.get(wanted.nccl_name()) {
            Some(count) if others.is_empty() => {
                let abi = self
                    .abi
                    .map(|version| format!(" (interface v{version})"))
                    .unwrap_or_default();
                Ok(format!(
                    "NET/{}{abi} at {count} ends of channels",
                    wanted.nccl_name()
                ))
            }
            _ if !others.is_empty() => {
                bail!(
                    "NCCL used NET/{} instead of NET/{}{reason}",
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
    const SOCKET: &str =
        "h:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [receive] via NET/Socket/1/Shared";

    #[test]
    fn the_network_is_what_the_channels_went_over() {
        let log = used(&[
            "h:1:1 [0] NCCL INFO NCCL version 2.28.3+cuda13.0",
            SPARK,
            SPARK,
        ]);
        assert_eq!(
            log.judge(Network::Spark).unwrap(),
            "NET/Spark at 2 ends of channels"
        );
        assert_eq!(log.version.as_deref(), Some("2.28.3+cuda13.0"));
        assert!(
            log.judge(Network::Ib)
                .unwrap_err()
                .to_string()
                .contains("used NET/Spark instead of NET/IB")
        );
    }

    #[test]
    fn a_network_name_cut_by_another_ranks_line_is_ignored() {
        let cut = "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Soh:3:4 [0] NCCL INFO Channel 01/0";
        let log = used(&[cut, SPARK]);
        assert_eq!(
            log.judge(Network::SparkUntuned).unwrap(),
            "NET/Spark at 1 ends of channels"
        );
    }

    #[test]
    fn the_fewest_channels_are_kept_in_nccls_words() {
        let line = |count: u32| {
            format!(
                "h:1:2 [0] NCCL INFO {count} coll channels, {count} collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer"
            )
        };
        assert_eq!(used(&[SPARK]).channels(), None);
        let log = used(&[&line(20), &line(18), &line(19)]);
        let channels = log.channels().unwrap();
        assert_eq!(channels.collective, 18);
        assert!(
            channels.text.starts_with("18 coll channels, 18 collnet")
                && channels.text.ends_with("per peer")
        );
        let counts = [
            ("coll", 18),
            ("collnet", 18),
            ("nvls", 0),
            ("p2p", 32),
            ("p2p_per_peer", 2),
        ];
        assert_eq!(
            channels.counts(),
            counts.map(|(name, count)| (name.to_owned(), count)).into()
        );
        // mpirun may cut a rank's line and insert another rank's line. First, a line that is cut
        // after the "1" of "18", with another rank's whole line behind the cut. Then, the rest of a
        // line that was cut there.
        let cut = format!("h:1:2 [0] NCCL INFO 1{}", line(18));
        assert_eq!(used(&[&cut]).channels().unwrap().collective, 18);
        assert_eq!(
            used(&["8 coll channels, 8 collnet channels"]).channels(),
            None
        );
    }

    #[test]
    fn each_network_has_its_variables() {
        for (network, plugin, name, tuner) in [
            (Network::Spark, "/p.so", "Spark", None),
            (Network::SparkUntuned, "/p.so", "Spark", Some("off")),
            (Network::Ib, "none", "IB", None),
            (Network::Socket, "none", "Socket", None),
        ] {
            let expected = [
                ("NCCL_NET_PLUGIN", Some(plugin)),
                ("NCCL_NET", Some(name)),
                (TUNER, tuner),
            ];
            let expected = expected
                .into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())));
            assert_eq!(
                network.environment(Path::new("/p.so")),
                expected.collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn the_interface_that_nccl_took_is_named() {
        let log = used(&[
            "h:1:2 [0] NCCL INFO NET/Plugin: Loaded net plugin Spark (v9)",
            SPARK,
        ]);
        assert_eq!(
            log.judge(Network::Spark).unwrap(),
            "NET/Spark (interface v9) at 1 ends of channels"
        );
    }

    #[test]
    fn a_fallback_is_reported_with_its_reason() {
        let reason = "h:1:2 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net-spark.so";
        let text = used(&[reason, reason, SOCKET])
            .judge(Network::Spark)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("used NET/Socket instead of NET/Spark")
                && text.contains("libnccl-net-spark.so"),
            "{text}"
        );
        assert_eq!(text.matches("Could not find").count(), 1);
        let mixed = used(&[SPARK, SOCKET]).judge(Network::Spark);
        assert!(mixed.unwrap_err().to_string().contains("NET/Socket"));
    }

    #[test]
    fn the_last_error_is_kept() {
        let lines: Vec<String> = (0..9)
            .map(|n| format!("h:1:2 [0] net.cc:4 NCCL WARN number {n}"))
            .collect();
        let log = used(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(
            log.complaints().unwrap(),
            "number 0; number 1; number 2; number 8"
        );
    }

    #[test]
    fn a_missing_network_is_reported() {
        let text = used(&["h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"])
            .judge(Network::Spark);
        assert!(text.unwrap_err().to_string().contains("look like one host"));
    }

    #[test]
    fn log_lines_are_recognised() {
        let mut log = Used::default();
        assert!(
            log.note(SPARK)
                && log.note("NCCL version 2.28.3+cuda13.0")
                && !log.note("# Using devices")
        );
    }
}
