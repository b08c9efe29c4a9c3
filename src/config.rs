//! Every setting in one table: name, default, meaning. Read once, at the first `init`.
//!
//! `NCCL_IB_*` and `NCCL_SOCKET_*` mean what they mean to NCCL's own transport. A variable set to an empty string is an
//! unset one. An unknown `NCCL_SPARK_*` variable is an error, so that a misspelt one does not pass for a working one.
//! Only this file reads the environment.

use crate::error::{Error, Result};
use std::str::FromStr;
use std::time::Duration;

/// One line of the table of settings.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The environment variable.
    pub name: &'static str,
    /// What holds when it is unset; empty where the plugin chooses by itself.
    pub default: &'static str,
    /// What it means, and which values it takes.
    pub doc: &'static str,
}

/// The table of all settings, in the order in which the documentation shows them.
pub fn table() -> &'static [Row] {
    TABLE
}

/// What `NCCL_IB_PCI_RELAXED_ORDERING` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelaxedOrdering {
    /// Never.
    Off,
    /// Always; a device that refuses it is an error.
    On,
    /// Where the device takes it.
    Auto,
}

/// What `NCCL_SOCKET_FAMILY` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketFamily {
    /// IPv4 if there is one, else IPv6.
    Any,
    /// IPv4 alone.
    V4,
    /// IPv6 alone.
    V6,
}

macro_rules! settings {
    ($($field:ident: $type:ty = $name:literal, $default:literal, $parse:expr, $allowed:literal, $doc:literal;)*) => {
        /// All settings, parsed.
        #[derive(Debug, Clone)]
        pub struct Config { $(#[doc = $doc] #[doc = $allowed] pub $field: $type,)* }

        static TABLE: &[Row] = &[$(Row { name: $name, default: $default, doc: concat!($doc, " ", $allowed) },)*];

        impl Config {
            fn parse_all(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Config> {
                Ok(Config { $($field: parse_one(lookup, $name, $default, $allowed, $parse)?,)* })
            }
        }
    };
}

settings! {
    verbs_library: String = "NCCL_IBVERBS_LIB", "libibverbs.so.1", text, "A file name or path.",
        "The verbs library to load.";
    hca: NameFilter = "NCCL_IB_HCA", "", NameFilter::parse, "`[^][=]NAME[:PORT],...` (at most 32 entries).",
        "Which RDMA devices may become rails: a prefix match, `=` exact, `^` all but these.";
    gid_index: Option<u16> = "NCCL_IB_GID_INDEX", "-1", gid_index, "-1 (look it up at each connect) to 255.",
        "The GID table index to use on every port; a fixed index breaks when addresses change.";
    traffic_class: u8 = "NCCL_IB_TC", "0", number::<u8, 0, 255>, "0 to 255.",
        "Traffic class (DSCP and ECN) of RoCE packets.";
    service_level: u8 = "NCCL_IB_SL", "0", number::<u8, 0, 15>, "0 to 15.",
        "Service level, for RoCE the priority.";
    timeout: u8 = "NCCL_IB_TIMEOUT", "20", number::<u8, 1, 31>, "1 to 31, as 4.096 us x 2^n.",
        "How long a queue pair waits for an acknowledgement before it sends again.";
    retry_count: u8 = "NCCL_IB_RETRY_CNT", "7", number::<u8, 0, 7>, "0 to 7.",
        "How often a queue pair sends again before the rail counts as lost.";
    qps_per_rail: Option<u8> = "NCCL_IB_QPS_PER_CONNECTION", "", optional::<1, 16>, "1 to 16.",
        "Queue pairs of one connection on each rail; unset: chosen from the rails.";
    relaxed_ordering: RelaxedOrdering = "NCCL_IB_PCI_RELAXED_ORDERING", "2", relaxed_ordering,
        "0 (off), 1 (on) or 2 (where the device takes it).",
        "PCIe relaxed ordering for bulk data; a device may take the request and ignore it.";
    socket_interfaces: NameFilter = "NCCL_SOCKET_IFNAME", "", NameFilter::parse, "`[^][=]NAME,...` (at most 32 entries).",
        "Which network interface carries the set-up of connections.";
    socket_family: SocketFamily = "NCCL_SOCKET_FAMILY", "", socket_family, "AF_INET or AF_INET6.",
        "Which address family carries the set-up of connections.";
    trace: bool = "NCCL_DEBUG", "", |text| Ok(text.eq_ignore_ascii_case("TRACE")), "NCCL's own values.",
        "NCCL's log level; TRACE shows this plugin's detail as well.";
    sysfs: String = "NCCL_SPARK_SYSFS", "/sys", text, "A directory.",
        "Where the kernel's device tree is mounted.";
    connect_timeout: Duration = "NCCL_SPARK_CONNECT_TIMEOUT_S", "120", seconds::<1, 3600>, "1 to 3600 seconds.",
        "How long one connection may take to come up before it fails.";
    probe_timeout: Duration = "NCCL_SPARK_PROBE_TIMEOUT_MS", "3000", millis::<100, 60_000>, "100 to 60000 milliseconds.",
        "How long a rail may take to carry its first write before it is left out of a connection.";
    min_share_bytes: u64 = "NCCL_SPARK_MIN_SHARE_BYTES", "16384", number::<u64, 128, 1_073_741_824>,
        "128 to 1073741824 bytes.",
        "The smallest part of a message that is worth a rail of its own.";
    stall_warn: Duration = "NCCL_SPARK_STALL_WARN_S", "60", seconds::<1, 86_400>, "1 to 86400 seconds.",
        "After how long without progress a request writes a warning.";
}

impl Config {
    /// Reads the process's environment.
    ///
    /// # Errors
    /// [`Error::Setting`] names the first variable that is unknown or malformed, and what is allowed.
    pub fn from_environment() -> Result<Config> {
        let variables: Vec<(String, String)> = std::env::vars_os()
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
            .collect();
        Self::from_variables(&variables)
    }

    /// Reads the given variables.
    ///
    /// # Errors
    /// As [`Config::from_environment`].
    pub fn from_variables(variables: &[(String, String)]) -> Result<Config> {
        for (name, value) in variables {
            if name.starts_with(OWN_PREFIX) && !TABLE.iter().any(|row| row.name == name) {
                let known: Vec<&str> = TABLE.iter().map(|row| row.name).filter(|n| n.starts_with(OWN_PREFIX)).collect();
                return Err(Error::Setting {
                    name: name.clone(),
                    value: value.clone(),
                    allowed: format!("there is no such setting; there are {}", known.join(", ")),
                });
            }
        }
        Self::parse_all(&|wanted| {
            variables
                .iter()
                .find(|(name, _)| name == wanted)
                .map(|(_, v)| v.trim().to_owned())
                .filter(|v| !v.is_empty())
        })
    }
}

const OWN_PREFIX: &str = "NCCL_SPARK_";

fn parse_one<T>(
    lookup: &dyn Fn(&str) -> Option<String>,
    name: &str,
    default: &str,
    allowed: &str,
    parse: impl Fn(&str) -> std::result::Result<T, ()>,
) -> Result<T> {
    let value = lookup(name).unwrap_or_else(|| default.to_owned());
    parse(&value).map_err(|()| Error::Setting { name: name.to_owned(), value, allowed: allowed.to_owned() })
}

type Parsed<T> = std::result::Result<T, ()>;

fn text(value: &str) -> Parsed<String> {
    Ok(value.to_owned())
}

fn number<T: FromStr + TryInto<u64> + Copy, const LOW: u64, const HIGH: u64>(value: &str) -> Parsed<T> {
    let parsed: T = value.parse().map_err(|_| ())?;
    let wide: u64 = parsed.try_into().map_err(|_| ())?;
    if (LOW..=HIGH).contains(&wide) { Ok(parsed) } else { Err(()) }
}

fn optional<const LOW: u64, const HIGH: u64>(value: &str) -> Parsed<Option<u8>> {
    if value.is_empty() { Ok(None) } else { number::<u8, LOW, HIGH>(value).map(Some) }
}

fn seconds<const LOW: u64, const HIGH: u64>(value: &str) -> Parsed<Duration> {
    number::<u64, LOW, HIGH>(value).map(Duration::from_secs)
}

fn millis<const LOW: u64, const HIGH: u64>(value: &str) -> Parsed<Duration> {
    number::<u64, LOW, HIGH>(value).map(Duration::from_millis)
}

fn gid_index(value: &str) -> Parsed<Option<u16>> {
    match value.parse::<i32>().map_err(|_| ())? {
        -1 => Ok(None),
        index @ 0..=255 => Ok(Some(index as u16)),
        _ => Err(()),
    }
}

fn relaxed_ordering(value: &str) -> Parsed<RelaxedOrdering> {
    match value {
        "0" => Ok(RelaxedOrdering::Off),
        "1" => Ok(RelaxedOrdering::On),
        "2" => Ok(RelaxedOrdering::Auto),
        _ => Err(()),
    }
}

fn socket_family(value: &str) -> Parsed<SocketFamily> {
    match value {
        "" => Ok(SocketFamily::Any),
        "AF_INET" => Ok(SocketFamily::V4),
        "AF_INET6" => Ok(SocketFamily::V6),
        _ => Err(()),
    }
}

/// A list of names as `NCCL_IB_HCA` and `NCCL_SOCKET_IFNAME` write it: `[^][=]NAME[:PORT],...`. The rail and plane
/// numbers that NCCL 2.30 takes behind a port are read and have no meaning here: there is one merged device.
///
/// `^` turns the list into one of exclusions, `=` asks for whole names where otherwise a prefix is enough (both marks
/// stand before the first name, in this order, and hold for all). An empty list admits everything. The grammar is
/// that of NCCL's own parser (`parseStringList` and `matchIfList` in its `utils.cc`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NameFilter {
    excludes: bool,
    whole_names: bool,
    entries: Vec<(String, Option<u8>)>,
}

impl NameFilter {
    /// As many entries as NCCL takes (`MAX_IB_DEVS` in its `net_ib`).
    const MAX_ENTRIES: usize = 32;

    fn parse(text: &str) -> Parsed<Self> {
        let (excludes, rest) = strip_mark(text, '^');
        let (whole_names, rest) = strip_mark(rest, '=');
        if rest.is_empty() {
            return if text.is_empty() { Ok(Self::default()) } else { Err(()) };
        }
        let entries = rest.split(',').filter(|e| !e.trim().is_empty()).map(entry).collect::<Parsed<Vec<_>>>()?;
        if entries.is_empty() || entries.len() > Self::MAX_ENTRIES {
            return Err(());
        }
        Ok(Self { excludes, whole_names, entries })
    }

    /// Whether the name passes; an entry without a port stands for every port.
    pub fn admits(&self, name: &str, port: Option<u8>) -> bool {
        if self.entries.is_empty() {
            return true;
        }
        let matched = self.entries.iter().any(|(wanted, wanted_port)| {
            let named = if self.whole_names { name == wanted } else { name.starts_with(wanted.as_str()) };
            named && (wanted_port.is_none() || port.is_none() || *wanted_port == port)
        });
        matched != self.excludes
    }

    /// Whether it asks for something by name, rather than for all or all but something.
    pub fn names_something(&self) -> bool {
        !self.entries.is_empty() && !self.excludes
    }
}

fn strip_mark(text: &str, mark: char) -> (bool, &str) {
    match text.strip_prefix(mark) {
        Some(rest) => (true, rest),
        None => (false, text),
    }
}

fn entry(text: &str) -> Parsed<(String, Option<u8>)> {
    let mut fields = text.trim().split(':');
    let name = fields.next().unwrap_or_default();
    let port = match fields.next() {
        None | Some("") => None,
        Some(port) => Some(number::<u8, 1, 255>(port)?),
    };
    for rail_or_plane in fields.by_ref().take(2) {
        number::<u64, 0, 65_535>(rail_or_plane)?;
    }
    // What the kernel allows in the name of an interface, less what the grammar needs.
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && !matches!(c, '/' | '^' | '=');
    let well_formed = !name.is_empty() && name.len() <= 64 && name.chars().all(plain) && fields.next().is_none();
    if well_formed { Ok((name.to_owned(), port)) } else { Err(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Config> {
        let variables: Vec<_> = pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        Config::from_variables(&variables)
    }

    #[test]
    fn every_default_parses_and_empty_is_unset() {
        let config = read(&[]).unwrap();
        assert_eq!(config.verbs_library, "libibverbs.so.1");
        assert_eq!((config.gid_index, config.timeout, config.retry_count), (None, 20, 7));
        let emptied: Vec<_> = table().iter().map(|row| (row.name, "")).collect();
        let config = read(&emptied).unwrap();
        assert_eq!((config.timeout, config.traffic_class, config.qps_per_rail), (20, 0, None));
    }

    #[test]
    fn a_setting_out_of_range_is_named_with_what_is_allowed() {
        for (name, value) in [
            ("NCCL_IB_TC", "256"),
            ("NCCL_IB_TC", "-1"),
            ("NCCL_IB_TIMEOUT", "0"),
            ("NCCL_IB_RETRY_CNT", "8"),
            ("NCCL_IB_GID_INDEX", "-2"),
            ("NCCL_IB_GID_INDEX", "256"),
            ("NCCL_IB_QPS_PER_CONNECTION", "17"),
            ("NCCL_SOCKET_FAMILY", "ipv4"),
            ("NCCL_SPARK_CONNECT_TIMEOUT_S", "soon"),
            ("NCCL_IB_HCA", "mlx5_0:x"),
            ("NCCL_IB_HCA", "^="),
            ("NCCL_IB_HCA", "mlx5 0"),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            let row = table().iter().find(|row| row.name == name).unwrap();
            assert!(error.contains(name) && error.contains(value), "{error}");
            assert!(row.doc.ends_with(error.rsplit("usable: ").next().unwrap()), "{error}");
        }
    }

    #[test]
    fn an_unknown_variable_of_ours_is_an_error_and_others_are_not_ours() {
        let error = read(&[("NCCL_SPARK_CONECT_TIMEOUT_S", "3")]).unwrap_err().to_string();
        assert!(
            error.contains("NCCL_SPARK_CONECT_TIMEOUT_S") && error.contains("NCCL_SPARK_CONNECT_TIMEOUT_S"),
            "{error}"
        );
        read(&[("NCCL_ALGO", "Ring"), ("PATH", "/bin"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")]).unwrap();
    }

    #[test]
    fn the_name_filter_is_nccls() {
        let admits = |filter: &str, name: &str, port: u8| NameFilter::parse(filter).unwrap().admits(name, Some(port));
        assert!(admits("", "anything", 1));
        assert!(admits("mlx5", "mlx5_10", 1) && !admits("mlx5", "rocep1s0f0", 1));
        assert!(admits("=mlx5_1", "mlx5_1", 1) && !admits("=mlx5_1", "mlx5_10", 1));
        assert!(!admits("^mlx5_1", "mlx5_10", 1) && admits("^=mlx5_1", "mlx5_10", 1));
        assert!(admits("mlx5_0:1", "mlx5_0", 1) && !admits("mlx5_0:1", "mlx5_0", 2));
        assert!(admits("mlx5_0:1,mlx5_1", "mlx5_1", 2));
        assert!(!admits("^mlx5_0:1,mlx5_1", "mlx5_1", 2) && admits("^mlx5_0:1", "mlx5_0", 2));
        assert!(admits("mlx5_0:", "mlx5_0", 2) && !admits("mlx5_0:1:0:3", "mlx5_0", 2));
        assert!(NameFilter::parse("mlx5_0:1:0:3:4").is_err() && NameFilter::parse("mlx5_0:1:x").is_err());
        assert!(NameFilter::parse(&vec!["a"; 33].join(",")).is_err());
    }
}
