//! `nccl-spark env`: the variables that make a job use the plugin, for a shell, docker or Ray.

use crate::places;
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use nccl_net_spark::rails::RailQos;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of env.
#[derive(Debug, Args)]
pub struct Options {
    /// The program that reads the variables.
    #[arg(long = "for", value_name = "WHO", value_enum, default_value = "shell")]
    reader: Reader,
    /// Plugin's library [default: the one that belongs to this program]
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
}

/// The reader of the variables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Reader {
    /// A POSIX shell: export lines.
    Shell,
    /// Options of docker run, in one line.
    Docker,
    /// Ray: a runtime environment, in JSON.
    Ray,
    /// systemd: a unit that puts RoCE on a priority with PFC at boot. It has no variables.
    Systemd,
}

/// The device that `NCCL_SPARK_CPU_LATENCY_US` needs. Docker gets it only if it exists, because
/// docker refuses a device that the host does not have.
const LATENCY_DEVICE: &str = "/dev/cpu_dma_latency";
/// Name of the plugin's network. With it in `NCCL_NET`, NCCL fails if the plugin does not start.
const NETWORK: &str = "Spark";

impl Options {
    /// Prints the variables or the unit.
    ///
    /// # Errors
    /// The plugin is not found, its path does not suit the reader, or `out` cannot be written.
    pub fn run(self, program: &Path, mut out: impl Write) -> Result<()> {
        let plugin = places::found_plugin(self.plugin, program)?;
        let plugin = plugin.to_str().with_context(|| format!("the path {} is not UTF-8", plugin.display()))?;
        Ok(writeln!(out, "{}", text(self.reader, plugin, Path::new(LATENCY_DEVICE).exists())?)?)
    }
}

fn text(reader: Reader, plugin: &str, has_latency_device: bool) -> Result<String> {
    Ok(match reader {
        Reader::Shell => {
            let quoted = plugin.replace('\'', r"'\''");
            format!("export NCCL_NET_PLUGIN='{quoted}'\nexport NCCL_NET={NETWORK}")
        }
        Reader::Docker => {
            // In `docker run $(nccl-spark env --for docker) IMAGE`, the shell splits at white
            // space, and docker splits the mount at colons.
            ensure!(
                !plugin.contains(|letter: char| letter.is_whitespace() || ":*?[\\".contains(letter)),
                "the path {plugin} has a character that docker run cannot take: copy the plugin, and name the copy with --plugin"
            );
            let latency = if has_latency_device { format!(" --device {LATENCY_DEVICE}") } else { String::new() };
            format!(
                "--network host --ipc host --device /dev/infiniband{latency} --ulimit memlock=-1 -v {plugin}:{plugin}:ro \
                 -e NCCL_NET_PLUGIN={plugin} -e NCCL_NET={NETWORK}"
            )
        }
        Reader::Systemd => unit(&nccl_net_spark::plugin::survey()?.qos().0)?,
        Reader::Ray => {
            let variables = serde_json::json!({"env_vars": {"NCCL_NET": NETWORK, "NCCL_NET_PLUGIN": plugin}});
            variables.to_string()
        }
    })
}

/// Returns a systemd unit that puts RoCE of all rails on the lossless priority of the first rail,
/// or on the usual priority if the first rail has no lossless priority.
fn unit(rails: &[RailQos]) -> Result<String> {
    /// DSCP and priority of congestion notifications, by convention.
    const NOTIFICATIONS: &str = "48:6";
    let first = &rails.first().context("no rail of this host has an interface with priorities (DCB)")?.port;
    let (dscp, priority) = (first.lossless_dscp(), first.lossless());
    let mut text = format!(
        "# RoCE in priority {priority}, with PFC. The job needs NCCL_IB_TC={} on every host, and the switch the same priority.\n\
         [Unit]\nDescription=PFC for RoCE\nWants=network-online.target\nAfter=network-online.target\n\n\
         [Service]\nType=oneshot\nRemainAfterExit=yes\n",
        first.lossless_traffic_class()
    );
    for RailQos { netdev, .. } in rails {
        text += &format!(
            "ExecStart=dcb app replace dev {netdev} dscp-prio {dscp}:{priority} {NOTIFICATIONS}\n\
             ExecStart=dcb pfc set dev {netdev} prio-pfc all:off {priority}:on\n\
             ExecStart=-ethtool -A {netdev} rx off tx off\n"
        );
    }
    Ok(text + "\n[Install]\nWantedBy=multi-user.target")
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_net_spark::rails::PortQos;
    use std::process::Command;

    #[test]
    fn a_quoted_path_survives_the_shell() {
        let path = "/opt/it's here/lib $x.so";
        let script =
            format!("{}\nprintf '%s %s' \"$NCCL_NET\" \"$NCCL_NET_PLUGIN\"", text(Reader::Shell, path, true).unwrap());
        let said = Command::new("sh").args(["-c", &script]).output().unwrap().stdout;
        assert_eq!(String::from_utf8(said).unwrap(), format!("Spark {path}"));
    }

    #[test]
    fn docker_gets_one_line_or_an_error() {
        let line = text(Reader::Docker, "/usr/local/lib/libnccl-net-spark.so", true).unwrap();
        assert!(line.contains(" --device /dev/infiniband --device /dev/cpu_dma_latency --ulimit "), "{line}");
        let without = text(Reader::Docker, "/usr/local/lib/libnccl-net-spark.so", false).unwrap();
        assert!(without.contains(" --device /dev/infiniband --ulimit "), "{without}");
        assert!(
            line.contains("-v /usr/local/lib/libnccl-net-spark.so:/usr/local/lib/libnccl-net-spark.so:ro "),
            "{line}"
        );
        assert!(!line.contains('\n'));
        for path in ["/a b.so", "/a:b.so", "/a*.so"] {
            let error = text(Reader::Docker, path, true).unwrap_err().to_string();
            assert!(error.contains(path) && error.contains("--plugin"), "{error}");
        }
    }

    #[test]
    fn a_unit_has_the_commands_of_each_rail_and_keeps_the_owners_priority() {
        let rail = |netdev: &str, pfc| RailQos {
            device: "x".to_owned(),
            netdev: netdev.to_owned(),
            port: PortQos { dscp: None, pfc },
        };
        let unit = |pfc| super::unit(&[rail("eth0", pfc), rail("eth1", pfc)]).unwrap();
        let text = unit(0);
        for netdev in ["eth0", "eth1"] {
            let commands = format!(
                "ExecStart=dcb app replace dev {netdev} dscp-prio 26:3 48:6\nExecStart=dcb pfc set dev {netdev} prio-pfc all:off 3:on\n"
            );
            assert!(text.contains(&commands), "{text}");
        }
        assert!(
            text.contains("NCCL_IB_TC=106 ") && text.ends_with("\n[Install]\nWantedBy=multi-user.target"),
            "{text}"
        );
        assert!(unit(1 << 5).contains("prio-pfc all:off 5:on\n"));
        assert!(super::unit(&[]).unwrap_err().to_string().contains("DCB"));
    }

    #[test]
    fn ray_gets_json() {
        let json: serde_json::Value = serde_json::from_str(&text(Reader::Ray, "/a \"b\".so", true).unwrap()).unwrap();
        assert_eq!(json["env_vars"]["NCCL_NET_PLUGIN"], "/a \"b\".so");
        assert_eq!(json["env_vars"]["NCCL_NET"], "Spark");
    }

    #[test]
    fn the_plugin_beside_the_program_is_named_by_its_whole_path() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(places::PROGRAM);
        let run = |plugin: Option<PathBuf>| {
            let mut out = Vec::new();
            Options { reader: Reader::Ray, plugin }.run(&program, &mut out).map(|()| String::from_utf8(out).unwrap())
        };
        assert!(run(None).unwrap_err().to_string().contains("name it with --plugin"));
        assert!(run(Some("/no/where.so".into())).unwrap_err().to_string().contains("/no/where.so not found"));
        let plugin = folder.path().join(places::PLUGIN);
        std::fs::create_dir_all(plugin.parent().unwrap()).unwrap();
        std::fs::write(&plugin, "").unwrap();
        assert!(run(None).unwrap().contains(plugin.canonicalize().unwrap().to_str().unwrap()));
    }
}
