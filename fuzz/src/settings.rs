//! Settings: a settings file, and the process's variables.
//!
//! Input: the file's bytes, then a byte 0 and variables, one `NAME=value` on each line.

use crate::target::Seeds;
use host::config::{Config, Settings, Source, table};
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The setting that the target leaves out, because its value could name any file.
const EXCLUDED_SETTING: &str = "NCCL_SPARK_SETTINGS_FILE";

thread_local! {
    static SCRATCH: OnceCell<Scratch> = const { OnceCell::new() };
}

/// A file of this thread, removed when the thread ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let process = std::process::id();
        let thread = std::thread::current().id();
        // In a memory file system if possible, because the file is written for every input.
        let folder = if Path::new("/dev/shm").is_dir() {
            PathBuf::from("/dev/shm")
        } else {
            std::env::temp_dir()
        };
        Self(folder.join(format!("nccl-net-spark-fuzz-{process}-{thread:?}.conf")))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Fails if the file was never written. A file that stays behind does no harm, because its
        // folder is for temporary files.
        _ = std::fs::remove_file(&self.0);
    }
}

/// Checks a file and variables.
pub fn check(data: &[u8]) -> bool {
    let (file, variables) = match data.iter().position(|byte| *byte == 0) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &[][..]),
    };
    let variables = String::from_utf8_lossy(variables);
    let variables: Vec<(String, String)> = variables
        .lines()
        .filter_map(|line| line.split_once('='))
        .filter(|(name, _)| *name != EXCLUDED_SETTING)
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    SCRATCH.with(|scratch| {
        let path = &scratch.get_or_init(Scratch::new).0;
        std::fs::write(path, file).expect("the scratch file is written");
        check_file(data.len(), path, &variables)
    })
}

fn check_file(bytes: usize, path: &Path, variables: &[(String, String)]) -> bool {
    let standard = [path.to_owned()];
    let settings = match Settings::gather(variables, &standard) {
        Ok(settings) => settings,
        Err(error) => {
            // The error may quote the text, escaped, and the names of all settings.
            let text = error.to_string();
            assert!(!text.is_empty() && text.len() < 16 * bytes + 4096, "{text}");
            return false;
        }
    };
    assert_eq!(settings.files(), standard);
    assert_eq!(settings.from_files().len(), 1);
    assert_eq!(settings.in_effect().len(), table().len());
    for (held, row) in settings.in_effect().iter().zip(table()) {
        assert_eq!(
            (held.row.name, held.value.trim()),
            (row.name, held.value.as_str())
        );
        match &held.source {
            Source::Default => assert_eq!(held.value, row.default),
            Source::File { path: of, line } => {
                assert!(of == path && *line > 0 && !held.value.is_empty())
            }
            Source::Environment => {
                assert!(
                    variables
                        .iter()
                        .any(|(name, value)| { name == row.name && value.trim() == held.value })
                )
            }
        }
    }
    // Written into one file, all settings keep their values. Skipped if a file would read part of a
    // variable's value as a comment.
    let is_comment = |value: &str| {
        value.match_indices('#').any(|(at, _)| {
            value[..at]
                .chars()
                .next_back()
                .is_none_or(char::is_whitespace)
        })
    };
    if settings
        .in_effect()
        .iter()
        .any(|held| held.source == Source::Environment && is_comment(&held.value))
    {
        check_values(&settings);
        return true;
    }
    let set = settings
        .in_effect()
        .iter()
        .filter(|held| held.source != Source::Default);
    let lines: String = set
        .map(|held| format!("{} = {}\n", held.row.name, held.value))
        .collect();
    std::fs::write(path, &lines).expect("the scratch file is written");
    let again =
        Settings::gather(&[], &standard).unwrap_or_else(|error| panic!("{error}, in {lines}"));
    for (before, after) in settings.in_effect().iter().zip(again.in_effect()) {
        assert_eq!(before.value, after.value, "{}", before.row.name);
    }
    check_values(&settings);
    true
}

/// Checks the ranges that the rest of the plugin relies on.
fn check_values(settings: &Settings) {
    let held = settings
        .in_effect()
        .iter()
        .map(|held| (held.row.name.to_owned(), held.value.clone()));
    // All values are passed as variables, because the table's ranges are the same for each source.
    let variables: Vec<_> = held.filter(|(name, _)| name != EXCLUDED_SETTING).collect();
    let config = Config::from_variables(&variables).expect("what holds is allowed");
    assert!(config.rails.gid_index.is_none_or(|index| index <= 255));
    assert!(
        config.setup.service_level.is_none_or(|level| level <= 15)
            && (1..=31).contains(&config.qp.timeout)
            && config.qp.retry_count <= 7
    );
    assert!(
        config
            .setup
            .qps_per_rail
            .is_none_or(|count| (1..=16).contains(&count))
    );
    assert!((128..=1 << 30).contains(&config.data_path.min_share_bytes));
    let seconds =
        |time: Duration, most| (1..=most).contains(&time.as_secs()) && time.subsec_nanos() == 0;
    assert!(
        seconds(config.setup.connect_timeout, 3600) && seconds(config.recovery.loss_timeout, 3600)
    );
    assert!(seconds(config.data_path.stall_warn, 86_400));
    assert!((100..=60_000).contains(&config.recovery.probe_timeout.as_millis()));
    for filter in [&config.rails.hca, &config.setup.interfaces] {
        // No interface has this name: a list of exclusions admits it, a list of names does not.
        let nobody = "/: no name begins so";
        assert_eq!(filter.admits(nobody, Some(1)), !filter.names_something());
    }
}

/// Each grammar of the settings table, in the file and as variables, and other allowed spellings.
pub fn seeds() -> Seeds {
    let file = "# all of it\n\nNCCL_IB_TC=106 # DSCP 26\nNCCL_IB_HCA = ^=mlx5_0:1,mlx5_1:\r\nNCCL_IB_GID_INDEX=-1\nNCCL_IB_QPS_PER_CONNECTION=4\n\
        NCCL_SOCKET_IFNAME=enp1s0f0np0\nNCCL_SOCKET_FAMILY=AF_INET6\nNCCL_SPARK_PROBE_TIMEOUT_MS=100\nNCCL_IB_SL=\nNCCL_IBVERBS_LIB=#\n";
    let ranges: String = table()
        .iter()
        .filter(|row| row.name != EXCLUDED_SETTING && !row.default.is_empty())
        .map(|row| format!("{}={}\n", row.name, row.default))
        .collect();
    let both = "NCCL_IB_TC=1\nNCCL_IB_TIMEOUT=20\n\0NCCL_IB_TC= 255 \nNCCL_SPARK_MIN_SHARE_BYTES=128\nNCCL_ALGO=Ring\n\
        NCCL_IB_SL=\nNCCL_DEBUG=TRACE\nNCCL_IB_PCI_RELAXED_ORDERING=1\nNCCL_SPARK_CONNECT_TIMEOUT_S=3600\n";
    let variables = "\0NCCL_IB_HCA=mlx5_0:1:0:3,roce\nNCCL_IB_GID_INDEX=255\nNCCL_IB_RETRY_CNT=0\nNCCL_SPARK_STALL_WARN_S=86400\n";
    vec![
        ("file", file.as_bytes().to_vec()),
        ("defaults", ranges.into_bytes()),
        ("both", both.as_bytes().to_vec()),
        ("variables", variables.as_bytes().to_vec()),
    ]
}
