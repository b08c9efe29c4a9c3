//! Table of all settings: name, default, meaning. The settings are read once, at the first `init`.
//!
//! `NCCL_IB_*` and `NCCL_SOCKET_*` have the meaning that NCCL's own transport gives them. A
//! variable set to an empty string counts as unset. An unknown `NCCL_SPARK_*` variable is an error,
//! to reveal misspelt names. A setting of an earlier version is ignored with a warning (`REMOVED`).
//! Only this file reads the environment.
//!
//! A settings file (`file`) gives values for unset variables. `NCCL_SPARK_SETTINGS_FILE` names the
//! file. Without that variable, `~/.nccl-spark.conf` is read, then `/etc/nccl-spark.conf` for
//! settings that the first file leaves unset. Such a file is only for this plugin, so an unknown
//! name in it is an error, even without the prefix `NCCL_SPARK_`.

#![allow(
    clippy::disallowed_methods,
    reason = "the one file that reads the environment"
)]

pub mod fate;
mod file;
pub mod locked;
mod names;
pub mod nccl;
mod qp;
mod value;

use crate::error::{Error, Result, SettingFault};
use file::SettingsFile;
pub use names::NameFilter;
use proto::tuner::table::Table;
use proto::tuner::{self, Mode, TunerConfig};
pub use qp::{ENOUGH_RETRIES, QpConfig};
use std::path::PathBuf;
use std::time::Duration;
use value::{
    Parsed, Refusal, choice, millis, number, optional, optional_text, path, seconds, switch, text,
};

/// Row of the table of settings.
#[derive(Debug, Clone, Copy)]
pub struct SettingRow {
    /// Environment variable.
    pub name: &'static str,
    /// Default value. Empty if the setting is unset by default.
    pub default: &'static str,
    /// Meaning and allowed values.
    pub doc: &'static str,
    allowed: &'static str,
    set: fn(&mut Config, &str) -> Parsed<()>,
}

/// The table of all settings, in the order of the documentation.
pub fn table() -> &'static [SettingRow] {
    TABLE
}

/// All settings, parsed. Each part of the plugin that reads several settings has its own struct.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// True if `NCCL_DEBUG` asks for NCCL's most detailed log.
    pub trace: bool,
    /// Settings of rails.
    pub rails: RailConfig,
    /// Settings of connection set-up.
    pub setup: SetupConfig,
    /// Settings of queue pairs.
    pub qp: QpConfig,
    /// Settings of recovery.
    pub recovery: RecoveryConfig,
    /// Settings of data paths.
    pub data_path: DataPathConfig,
    /// `NCCL_SPARK_COUNTERS`.
    pub counters: bool,
    /// `NCCL_SPARK_CPU_LATENCY_US`.
    pub cpu_latency: LatencyLimit,
    /// Settings of the tuner.
    pub tuner: TunerConfig,
}

/// Value of `NCCL_SPARK_CPU_LATENCY_US`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LatencyLimit {
    /// The plugin asks for a latency on a GB10.
    #[default]
    Auto,
    /// The plugin asks for none.
    Off,
    /// The plugin asks for at most this number of microseconds.
    Us(u32),
}

/// Latency to ask for on a GB10. Its idle states take 42, 231 and 433 us to leave. The first
/// collective after a pause took 470 to 750 us without a request, 350 to 400 us with 50, and 3.4 to
/// 15 us with 20 (an owner's measurement: `docs/guide/settings.md`).
const GB10_LATENCY_US: u32 = 20;

impl LatencyLimit {
    /// Returns the latency in microseconds to ask for on a host with this GPU.
    pub fn on(self, gpu: &str) -> Option<u32> {
        match self {
            Self::Us(latency_us) => Some(latency_us),
            Self::Auto => tuner::is_for(gpu).then_some(GB10_LATENCY_US),
            Self::Off => None,
        }
    }
}

/// Settings of rails.
#[derive(Debug, Clone, Default)]
pub struct RailConfig {
    /// `NCCL_IBVERBS_LIB`.
    pub verbs_library: String,
    /// `NCCL_IB_HCA`.
    pub hca: NameFilter,
    /// `NCCL_IB_GID_INDEX`.
    pub gid_index: Option<u16>,
    /// `NCCL_IB_PCI_RELAXED_ORDERING`.
    pub relaxed_ordering: RelaxedOrdering,
    /// `NCCL_NET_OPTIONAL_RECV_COMPLETION`.
    pub marks_optional: bool,
    /// `NCCL_SPARK_SYSFS`.
    pub sysfs: PathBuf,
}

/// Settings of connection set-up.
#[derive(Debug, Clone, Default)]
pub struct SetupConfig {
    /// `NCCL_SOCKET_IFNAME`.
    pub interfaces: NameFilter,
    /// `NCCL_SOCKET_FAMILY`.
    pub family: SocketFamily,
    /// `NCCL_SPARK_CONNECT_TIMEOUT_S`.
    pub connect_timeout: Duration,
    /// `NCCL_IB_QPS_PER_CONNECTION`.
    pub qps_per_rail: Option<u8>,
    /// `NCCL_IB_TC`.
    pub traffic_class: Option<u8>,
    /// `NCCL_IB_SL`.
    pub service_level: Option<u8>,
    /// `NCCL_SPARK_RING_TCP`.
    pub ring_tcp: bool,
}

/// Settings of recovery.
#[derive(Debug, Clone, Default)]
pub struct RecoveryConfig {
    /// `NCCL_SPARK_PROBE_TIMEOUT_MS`.
    pub probe_timeout: Duration,
    /// `NCCL_SPARK_STALL_ABORT_S`.
    pub stall_abort_s: Option<u64>,
    /// `NCCL_SPARK_LOSS_TIMEOUT_S`.
    pub loss_timeout: Duration,
}

/// Settings of data paths.
#[derive(Debug, Clone, Default)]
pub struct DataPathConfig {
    /// `NCCL_SPARK_MIN_SHARE_BYTES`.
    pub min_share_bytes: u64,
    /// `NCCL_SPARK_STALL_WARN_S`.
    pub stall_warn: Duration,
}

/// Value of `NCCL_IB_PCI_RELAXED_ORDERING`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RelaxedOrdering {
    /// Relaxed ordering is not used.
    Off,
    /// Relaxed ordering is used on every device. A device that refuses it is an error.
    On,
    /// Relaxed ordering is used on the devices that support it.
    #[default]
    Auto,
}

/// Value of `NCCL_SOCKET_FAMILY`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SocketFamily {
    /// Both families. Among the addresses of equally preferred interfaces, IPv4 addresses are
    /// chosen before IPv6 addresses.
    #[default]
    Any,
    /// Only IPv4.
    V4,
    /// Only IPv6.
    V6,
}

// A row may have no field of `Config`. The value of such a row is parsed to check it, and `Config`
// does not store it. Either `Settings` uses the value (`NCCL_SPARK_SETTINGS_FILE`), or another
// program does (`NCCL_SPARK_VLLM`).
macro_rules! settings {
    ($($($($field:ident).+ =)? $name:literal, $default:literal, $parse:path, $allowed:literal, $doc:literal;)*) => {
        #[allow(unused_variables, reason = "a row without a field leaves `config` alone")]
        static TABLE: &[SettingRow] = &[$(SettingRow {
            name: $name,
            default: $default,
            doc: concat!($doc, " ", $allowed),
            allowed: $allowed,
            set: |config, value| {
                $(config.$($field).+ =)? $parse(value)?;
                Ok(())
            },
        },)*];
    };
}

settings! {
    "NCCL_SPARK_SETTINGS_FILE", "", text, "A file; /dev/null for none.",
        "The settings file to read instead of `~/.nccl-spark.conf` and `/etc/nccl-spark.conf`.";
    rails.verbs_library = "NCCL_IBVERBS_LIB", "libibverbs.so.1", text, "A file name or path.",
        "The verbs library to load.";
    rails.hca = "NCCL_IB_HCA", "", NameFilter::parse, "`[^][=]NAME[:PORT],...` (at most 32 entries).",
        "RDMA devices to use as rails. Names match as prefixes; `=` matches whole names, `^` excludes the names.";
    rails.gid_index = "NCCL_IB_GID_INDEX", "-1", gid_index, "-1 (look it up at each connect) to 255.",
        "GID index to use on every port that has a RoCE v2 address there; a fixed index breaks when addresses change.";
    setup.traffic_class = "NCCL_IB_TC", "-1", unless_minus_one::<0, 255>, "-1 (that of the communicator, else 0) to 255.",
        "Traffic class (DSCP and ECN) of RoCE packets.";
    setup.service_level = "NCCL_IB_SL", "-1", unless_minus_one::<0, 15>, "-1 (0) to 15.",
        "Service level, for RoCE the priority.";
    qp.flow_label = "NCCL_SPARK_FLOW_LABEL", "0", number::<u32, 0, 1_048_575>, "0 to 1048575.",
        "Flow label of every queue pair, which determines its UDP source port; 0: the driver computes one from the numbers of both queue pairs.";
    qp.timeout = "NCCL_IB_TIMEOUT", "14", number::<u8, 1, 31>, "1 to 31.",
        "How long a queue pair waits for an acknowledgement before it retransmits: 4.096 us x 2^n.";
    qp.retry_count = "NCCL_IB_RETRY_CNT", "6", number::<u8, 0, 7>, "0 to 7.",
        "How many times a queue pair retransmits before its rail counts as lost.";
    setup.qps_per_rail = "NCCL_IB_QPS_PER_CONNECTION", "", optional::<u8, 1, 16>, "1 to 16.",
        "Queue pairs per connection and rail; unset: chosen from the rails.";
    rails.relaxed_ordering = "NCCL_IB_PCI_RELAXED_ORDERING", "2", relaxed_ordering,
        "0 (off), 1 (on) or 2 (where the device supports it).",
        "PCIe relaxed ordering for bulk data; a device may ignore it.";
    rails.marks_optional = "NCCL_NET_OPTIONAL_RECV_COMPLETION", "1", switch, "0 or 1.",
        "NCCL's own setting: with 0, NCCL does not mark the receives of LL and LL128, and relaxed ordering is not used.";
    setup.interfaces = "NCCL_SOCKET_IFNAME", "", NameFilter::parse, "`[^][=]NAME,...` (at most 32 entries).",
        "Network interface for connection set-up (TCP).";
    setup.family = "NCCL_SOCKET_FAMILY", "", socket_family, "AF_INET or AF_INET6.",
        "Address family for connection set-up.";
    trace = "NCCL_DEBUG", "", is_trace, "NCCL's own values.",
        "NCCL's log level; TRACE also shows this plugin's details.";
    rails.sysfs = "NCCL_SPARK_SYSFS", "/sys", path, "A directory.",
        "Where sysfs is mounted.";
    setup.connect_timeout = "NCCL_SPARK_CONNECT_TIMEOUT_S", "120", seconds::<1, 3600>, "1 to 3600 seconds.",
        "How long a connection may take to have its first rail before it fails; also how long to wait for a link where every port is down.";
    recovery.probe_timeout = "NCCL_SPARK_PROBE_TIMEOUT_MS", "3000", millis::<100, 60_000>, "100 to 60000 milliseconds.",
        "How long a rail may take to complete its first write before a connection comes up without it; the rail joins later, once a write completes.";
    data_path.min_share_bytes = "NCCL_SPARK_MIN_SHARE_BYTES", "16384", number::<u64, 128, 1_073_741_824>,
        "128 to 1073741824 bytes.",
        "Smallest part of a message that gets a rail of its own.";
    cpu_latency = "NCCL_SPARK_CPU_LATENCY_US", "auto", latency_limit,
        "auto (20 on a GB10, else off), off, or 0 to 1000000 microseconds.",
        "CPU wake-up latency to ask the kernel for (`/dev/cpu_dma_latency`) while connections carry traffic, and a minute longer.";
    setup.ring_tcp = "NCCL_SPARK_RING_TCP", "0", switch, "0 or 1; the same on every node.",
        "Whether peers that no rail can reach (the diagonal of a ring without a switch) are connected by TCP over `NCCL_SOCKET_IFNAME`; the tuner then offers NCCL only Ring.";
    data_path.stall_warn = "NCCL_SPARK_STALL_WARN_S", "60", seconds::<1, 86_400>, "1 to 86400 seconds.",
        "How long a request may make no progress before a warning is logged.";
    recovery.stall_abort_s = "NCCL_SPARK_STALL_ABORT_S", "", optional::<u64, 1, 86_400>, "1 to 86400 seconds.",
        "How long posted requests may make no progress before the connection fails, if two answers of the peer in a row show the same cause, or if it does not answer for 10 seconds; unset: it never fails for this reason.";
    recovery.loss_timeout = "NCCL_SPARK_LOSS_TIMEOUT_S", "30", seconds::<1, 3600>, "1 to 3600 seconds.",
        "How long a connection may have no working rail before it fails.";
    tuner.mode = "NCCL_SPARK_TUNER", "auto", tuner_mode, "auto (on a GB10), on or off.",
        "Whether this plugin's tuner, instead of NCCL, chooses algorithm, protocol and channels of a collective.";
    tuner.table = "NCCL_SPARK_TUNER_TABLE", "", tuner_table,
        "`for=GPU/RAILS/NCCL;COLLECTIVE@RANKS:FROM-TO=ALGORITHM/PROTOCOL/CHANNELS;...`.",
        "The tuner's table instead of the built-in one; `nccl-spark tune collectives` writes it.";
    tuner.ll128 = "NCCL_SPARK_LL128", "1", switch, "0 or 1.",
        "Whether the tuner allows NCCL's LL128 protocol; where the tuner is off, `NCCL_PROTO=^LL128` excludes it.";
    tuner.network = "NCCL_NET", "", optional_text,
        "A network's name.",
        "The network that NCCL uses; the tuner does nothing in a job that asks for another one than Spark.";
    tuner.tuner_plugin = "NCCL_TUNER_PLUGIN", "", optional_text,
        "A tuner's name or file.",
        "The tuner that NCCL loads; this plugin's tuner acts only where it is unset or names a file with `spark` in its name.";
    counters = "NCCL_SPARK_COUNTERS", "1", switch, "0 or 1.",
        "Whether other processes can read what each rail carries (`nccl-spark top`): a memory file of the job's process, which only root and the same user can open.";
    "NCCL_SPARK_VLLM", "0", switch, "0 or 1.",
        "For the Python package: whether it sets `NCCL_NET_PLUGIN` and `NCCL_NET` in vLLM's processes where they are unset.";
}

impl Config {
    /// Reads this process's environment and settings files, and logs the settings from files.
    ///
    /// # Errors
    /// [`Error::Setting`] for the first unknown or malformed setting, with the allowed values;
    /// [`Error::Missing`] for an unreadable settings file.
    pub fn from_environment() -> Result<Config> {
        let settings = Settings::of_this_process()?;
        for line in settings.from_files().into_iter().chain(settings.ignored()) {
            tracing::info!("{line}");
        }
        for line in &settings.removed {
            tracing::warn!("{line}");
        }
        Ok(settings.config)
    }

    /// Reads the given variables, and a settings file if one of them names it.
    ///
    /// # Errors
    /// The errors of [`Config::from_environment`].
    pub fn from_variables(variables: &[(String, String)]) -> Result<Config> {
        Settings::gather(variables, &[]).map(|settings| settings.config)
    }
}

/// Source of a setting's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The default in the table of settings.
    Default,
    /// A settings file.
    File {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
    },
    /// The environment, which overrides files.
    Environment,
}

/// Setting with its value in effect.
#[derive(Debug, Clone)]
pub struct Setting {
    /// Row of the table.
    pub row: &'static SettingRow,
    /// Value as text.
    pub value: String,
    /// Source of the value.
    pub source: Source,
}

/// All settings in effect, checked.
#[derive(Debug, Clone)]
pub struct Settings {
    in_effect: Vec<Setting>,
    files: Vec<PathBuf>,
    ignored: Vec<&'static str>,
    removed: Vec<String>,
    config: Config,
}

impl Settings {
    /// Reads this process's settings.
    ///
    /// # Errors
    /// The errors of [`Config::from_environment`].
    pub fn of_this_process() -> Result<Settings> {
        let variables: Vec<(String, String)> = std::env::vars_os()
            .map(|(name, value)| {
                (
                    name.to_string_lossy().into_owned(),
                    value.to_string_lossy().into_owned(),
                )
            })
            .collect();
        Self::gather(&variables, &standard_files())
    }

    /// Reads the settings of a process with these variables. The `standard` files are read unless a
    /// variable names a file. If several files have a setting, the value in the first of these
    /// files counts.
    ///
    /// # Errors
    /// The errors of [`Config::from_environment`].
    pub fn gather(variables: &[(String, String)], standard: &[PathBuf]) -> Result<Settings> {
        let own = variables
            .iter()
            .filter(|(name, _)| name.starts_with(OWN_PREFIX));
        let (removed, own): (Vec<_>, Vec<_>) = own.partition(|(name, _)| is_removed(name));
        own.into_iter()
            .map(|(name, value)| known(name, value, name))
            .collect::<Result<Vec<_>>>()?;
        let files = read_files(variables, standard)?;
        files.iter().try_for_each(check)?;
        let in_effect: Vec<Setting> = TABLE
            .iter()
            .map(|row| Setting::of_row(row, variables, &files))
            .collect();
        let mut config = Config::default();
        in_effect
            .iter()
            .try_for_each(|one| one.row.parse(&mut config, &one.value, one.row.name))?;
        let ignored = nccl::ignored()
            .map(|(name, _)| name)
            .filter(|name| variable(variables, name).is_some())
            .collect();
        let removed = removed
            .into_iter()
            .map(|(name, _)| name.clone())
            .chain(files.iter().flat_map(removed_lines));
        let removed = removed
            .map(|shown| format!("{shown} has no effect: this version has no such setting"))
            .collect();
        let files = files.into_iter().map(|file| file.path).collect();
        Ok(Settings {
            in_effect,
            files,
            ignored,
            removed,
            config,
        })
    }

    /// Returns every setting, in the table's order.
    pub fn in_effect(&self) -> &[Setting] {
        &self.in_effect
    }

    /// Returns the settings files that were read.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Returns a line about variables of NCCL's own transports that are set but not read.
    pub fn ignored(&self) -> Option<String> {
        let names = self.ignored.join(", ");
        (!names.is_empty()).then(|| {
            format!("not used by this plugin: {names}; `nccl-spark doctor --env` says why")
        })
    }

    /// Returns a line for each settings file that was read, with its settings in effect.
    pub fn from_files(&self) -> Vec<String> {
        let line = |path: &PathBuf| {
            let here =
                |one: &&Setting| matches!(&one.source, Source::File { path: of, .. } if of == path);
            let in_effect = self
                .in_effect
                .iter()
                .filter(here)
                .map(|one| format!("{}={}", one.row.name, one.value));
            let in_effect: Vec<String> = in_effect.collect();
            let what = if in_effect.is_empty() {
                "no setting in effect".to_owned()
            } else {
                in_effect.join(", ")
            };
            format!("settings from {}: {what}", path.display())
        };
        self.files.iter().map(line).collect()
    }
}

impl Setting {
    /// Returns the setting of a row. The environment comes before the files, and the files before
    /// the default.
    fn of_row(
        row: &'static SettingRow,
        variables: &[(String, String)],
        files: &[SettingsFile],
    ) -> Self {
        if let Some(value) = variable(variables, row.name) {
            let source = Source::Environment;
            return Self { row, value, source };
        }
        let found = files
            .iter()
            .find_map(|file| Some((file, file.line(row.name)?)));
        match found {
            Some((file, line)) => Self {
                row,
                value: line.value.clone(),
                source: Source::File {
                    path: file.path.clone(),
                    line: line.number,
                },
            },
            None => Self {
                row,
                value: row.default.to_owned(),
                source: Source::Default,
            },
        }
    }
}

/// Returns the value of a variable without the spaces around it, or `None` if nothing remains.
fn variable(variables: &[(String, String)], wanted: &str) -> Option<String> {
    let (_, value) = variables.iter().find(|(name, _)| name == wanted)?;
    let value = value.trim();
    (!value.is_empty()).then(|| value.to_owned())
}

/// Reads the settings file that a variable names. If no variable names one, reads the `standard`
/// files that exist.
fn read_files(variables: &[(String, String)], standard: &[PathBuf]) -> Result<Vec<SettingsFile>> {
    if let Some(path) = variable(variables, SETTINGS_FILE) {
        return Ok(vec![SettingsFile::named(SETTINGS_FILE, &path)?]);
    }
    let found = standard
        .iter()
        .map(|path| SettingsFile::standard(path))
        .collect::<Result<Vec<_>>>()?;
    Ok(found.into_iter().flatten().collect())
}

const OWN_PREFIX: &str = "NCCL_SPARK_";
/// Settings of earlier versions, which cause only a warning.
const REMOVED: &[&str] = &["NCCL_SPARK_INFLIGHT_BYTES"];
const SETTINGS_FILE: &str = "NCCL_SPARK_SETTINGS_FILE";
const LIBRARY: &str = "NCCL_IBVERBS_LIB";
/// Settings file for all users, named like NCCL's `/etc/nccl.conf`.
const MACHINE_FILE: &str = "/etc/nccl-spark.conf";
/// Settings file in the user's home folder, named like NCCL's `~/.nccl.conf`.
const USER_FILE: &str = ".nccl-spark.conf";

/// Returns the settings files used if no variable names one: the user's, then the machine's.
pub fn standard_files() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME")
        .map(PathBuf::from)
        .filter(|home| home.is_absolute());
    home.map(|home| home.join(USER_FILE))
        .into_iter()
        .chain([PathBuf::from(MACHINE_FILE)])
        .collect()
}

fn is_removed(name: &str) -> bool {
    REMOVED.contains(&name)
}

fn removed_lines(file: &SettingsFile) -> impl Iterator<Item = String> {
    let removed = file.lines.iter().filter(|line| is_removed(&line.name));
    removed.map(|line| file::place(&file.path, line.number, &line.name))
}

/// Finds the row of the setting `name`. An error shows the setting as `shown`, which may contain
/// the place in a file.
fn known(name: &str, value: &str, shown: &str) -> Result<&'static SettingRow> {
    TABLE.iter().find(|row| row.name == name).ok_or_else(|| {
        let fault = SettingFault::Unknown {
            near: nearest(name),
        };
        Error::Setting {
            name: shown.to_owned(),
            value: value.to_owned(),
            fault,
        }
    })
}

/// Returns the setting that was probably meant by the unknown `name`. The setting's name begins
/// with `name` (mostly the unit is missing), or at most a fifth of its letters are missing, wrong
/// or swapped in `name`.
fn nearest(name: &str) -> Option<&'static str> {
    let begun = TABLE
        .iter()
        .find(|row| name.len() > OWN_PREFIX.len() && row.name.starts_with(name));
    // Only names of similar length are compared, because a line of a file may be very long.
    let candidates = TABLE
        .iter()
        .filter(|row| row.name.len().abs_diff(name.len()) <= row.name.len() / 5);
    let distances = candidates.map(|row| (strsim::damerau_levenshtein(name, row.name), row.name));
    let close = distances
        .filter(|(distance, of)| *distance <= of.len() / 5)
        .min();
    begun.map(|row| row.name).or(close.map(|(_, name)| name))
}

/// Checks every line of a file, including lines that the environment overrides.
fn check(file: &SettingsFile) -> Result<()> {
    for line in file.lines.iter().filter(|line| !is_removed(&line.name)) {
        let place = file::place(&file.path, line.number, &line.name);
        let row = known(&line.name, &line.value, &place)?;
        if row.name == SETTINGS_FILE {
            return Err(Error::Setting {
                name: place,
                value: line.value.clone(),
                fault: SettingFault::NamesAFile,
            });
        }
        if let (LIBRARY, Some(why)) = (row.name, &file.distrust) {
            let fault = SettingFault::Untrusted(why.clone());
            return Err(Error::Setting {
                name: place,
                value: line.value.clone(),
                fault,
            });
        }
        if !line.value.is_empty() {
            row.parse(&mut Config::default(), &line.value, &place)?;
        }
    }
    Ok(())
}

impl SettingRow {
    fn parse(&self, config: &mut Config, value: &str, shown: &str) -> Result<()> {
        (self.set)(config, value).map_err(|Refusal(reason)| {
            let fault = SettingFault::Value {
                reason,
                allowed: self.allowed,
            };
            Error::Setting {
                name: shown.to_owned(),
                value: value.to_owned(),
                fault,
            }
        })
    }
}

/// Returns `None` for -1, NCCL's own default (`NCCL_PARAM(IbTc, "IB_TC", -1)`, net_ib).
fn unless_minus_one<const LOW: u64, const HIGH: u64>(value: &str) -> Parsed<Option<u8>> {
    if value == "-1" {
        Ok(None)
    } else {
        number::<u8, LOW, HIGH>(value).map(Some)
    }
}

fn gid_index(value: &str) -> Parsed<Option<u16>> {
    match value.parse::<i32>().map_err(|_| Refusal::default())? {
        -1 => Ok(None),
        index @ 0..=255 => Ok(Some(index as u16)),
        _ => Err(Refusal::default()),
    }
}

fn is_trace(value: &str) -> Parsed<bool> {
    Ok(value.eq_ignore_ascii_case("TRACE"))
}

fn latency_limit(value: &str) -> Parsed<LatencyLimit> {
    match value {
        "auto" => Ok(LatencyLimit::Auto),
        "off" => Ok(LatencyLimit::Off),
        _ => number::<u32, 0, 1_000_000>(value).map(LatencyLimit::Us),
    }
}

fn tuner_mode(value: &str) -> Parsed<Mode> {
    choice(
        value,
        &[("auto", Mode::Auto), ("on", Mode::On), ("off", Mode::Off)],
    )
}

fn tuner_table(value: &str) -> Parsed<Option<Table>> {
    if value.is_empty() {
        Ok(None)
    } else {
        value
            .parse()
            .map(Some)
            .map_err(|reason: String| Refusal::because(reason))
    }
}

fn relaxed_ordering(value: &str) -> Parsed<RelaxedOrdering> {
    choice(
        value,
        &[
            ("0", RelaxedOrdering::Off),
            ("1", RelaxedOrdering::On),
            ("2", RelaxedOrdering::Auto),
        ],
    )
}

fn socket_family(value: &str) -> Parsed<SocketFamily> {
    choice(
        value,
        &[
            ("", SocketFamily::Any),
            ("AF_INET", SocketFamily::V4),
            ("AF_INET6", SocketFamily::V6),
        ],
    )
}

#[cfg(test)]
mod tests;
