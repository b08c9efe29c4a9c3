//! `nccl-spark env`: the variables that make a job use the plugin, for a shell, docker or Ray.

use crate::places;
use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use host::rails::RailQos;
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
    /// sudo sh: a program that installs a systemd unit for PFC. It has no variables.
    Systemd,
}

/// The device that `NCCL_SPARK_CPU_LATENCY_US` needs. Docker gets it only if it exists, because
/// docker refuses a device that the host does not have.
const LATENCY_DEVICE: &str = "/dev/cpu_dma_latency";
/// Name of the plugin's network. With it in `NCCL_NET`, NCCL fails if the plugin does not start.
const NETWORK: &str = "Spark";

/// Script `/usr/local/sbin/nccl-spark-qos`, which sets the priorities of one interface.
/// `@MAPPINGS@` and `@PRIORITY@` are placeholders.
const QOS_SCRIPT: &str = include_str!("env/qos.sh");
/// Unit `nccl-spark-qos@.service`, with one instance for each interface. systemd starts an instance
/// whenever its interface appears. The services in `Before=` start jobs; at boot they wait for the
/// interface, at most 30 s.
const QOS_UNIT: &str = "\
[Unit]
Description=PFC for RoCE on %I
BindsTo=sys-subsystem-net-devices-%i.device
After=sys-subsystem-net-devices-%i.device
Before=docker.service containerd.service kubelet.service slurmd.service
JobTimeoutSec=30

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=60
ExecStart=/usr/local/sbin/nccl-spark-qos %I

[Install]
WantedBy=sys-subsystem-net-devices-%i.device multi-user.target
";
/// Shell program that installs [`QOS_SCRIPT`] and [`QOS_UNIT`]. Its commands are in functions, so
/// that `sh` changes nothing if the text ends early. It restarts the units, because a start does
/// not run a new script in a unit that is active.
const QOS_INSTALLER: &str = r#"# Puts RoCE of this host on priority @PRIORITY@ with PFC, now and at each boot. To run:
#   nccl-spark env --for systemd | sudo sh
# Never run it during a job: a change of PFC takes the link down for seconds.
# The job needs NCCL_IB_TC=@TRAFFIC_CLASS@ on every host, and the switch PFC on the same priority.
# With DESTDIR, the program only writes the files, below that folder.
set -eu
umask 022
root="${DESTDIR:-}"
units="$root/etc/systemd/system"

main() {
  write 755 "$root/usr/local/sbin/nccl-spark-qos" <<'END_OF_SCRIPT'
@SCRIPT@END_OF_SCRIPT
  write 644 "$units/nccl-spark-qos@.service" <<'END_OF_UNIT'
@UNIT@END_OF_UNIT
  remove_old_unit
  [ -z "$root" ] || return 0
  systemctl daemon-reload
  # shellcheck disable=SC2046 # one word for each instance
  set -- $(systemd-escape --template=nccl-spark-qos@.service -- @INTERFACES@)
  systemctl enable "$@"
  systemctl restart "$@"
}

# write MODE FILE: writes standard input to the file.
write() {
  mkdir -p "$(dirname "$2")"
  cat >"$2.new"
  chmod "$1" "$2.new"
  mv "$2.new" "$2"
}

# Earlier versions had one unit for all interfaces. It set PFC without need.
remove_old_unit() {
  [ -e "$units/nccl-spark-qos.service" ] || return 0
  [ -n "$root" ] || systemctl disable --now nccl-spark-qos.service
  rm "$units/nccl-spark-qos.service"
}

main"#;

impl Options {
    /// Prints the variables or the program.
    ///
    /// # Errors
    /// The plugin is not found, its path does not suit the reader, or `out` cannot be written.
    pub fn run(self, program: &Path, mut out: impl Write) -> Result<()> {
        let plugin = places::found_plugin(self.plugin, program)?;
        let plugin = plugin
            .to_str()
            .with_context(|| format!("the path {} is not UTF-8", plugin.display()))?;
        Ok(writeln!(
            out,
            "{}",
            text(self.reader, plugin, Path::new(LATENCY_DEVICE).exists())?
        )?)
    }
}

fn text(reader: Reader, plugin: &str, has_latency_device: bool) -> Result<String> {
    Ok(match reader {
        Reader::Shell => format!(
            "export NCCL_NET_PLUGIN={}\nexport NCCL_NET={NETWORK}",
            quoted(plugin)
        ),
        Reader::Docker => {
            // In `docker run $(nccl-spark env --for docker) IMAGE`, the shell splits at white
            // space, and docker splits the mount at colons.
            ensure!(
                !plugin
                    .contains(|letter: char| letter.is_whitespace() || ":*?[\\".contains(letter)),
                "the path {plugin} has a character that docker run cannot take: copy the plugin, and name the copy with --plugin"
            );
            let latency = if has_latency_device {
                format!(" --device {LATENCY_DEVICE}")
            } else {
                String::new()
            };
            format!(
                "--network host --ipc host --device /dev/infiniband{latency} --ulimit memlock=-1 -v {plugin}:{plugin}:ro \
                 -e NCCL_NET_PLUGIN={plugin} -e NCCL_NET={NETWORK}"
            )
        }
        Reader::Systemd => qos_installer(&verbs::survey()?.qos().0)?,
        Reader::Ray => {
            let variables =
                serde_json::json!({"env_vars": {"NCCL_NET": NETWORK, "NCCL_NET_PLUGIN": plugin}});
            variables.to_string()
        }
    })
}

/// Quotes a word for a POSIX shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Returns a shell program that puts RoCE of all rails on the lossless priority of the first rail,
/// or on the usual priority if the first rail has no lossless priority.
fn qos_installer(rails: &[RailQos]) -> Result<String> {
    // Conventional values for congestion notifications.
    const NOTIFICATIONS_DSCP: u8 = 48;
    const NOTIFICATIONS_PRIORITY: u8 = 6;
    let first = &rails
        .first()
        .context("no rail of this host has an interface with priorities (DCB)")?
        .port;
    let dscp = first.lossless_dscp();
    let priority = first.lossless();
    let mut mappings = format!("{dscp}:{priority}");
    if dscp != NOTIFICATIONS_DSCP {
        mappings += &format!(" {NOTIFICATIONS_DSCP}:{NOTIFICATIONS_PRIORITY}");
    }
    let interfaces: Vec<String> = rails.iter().map(|rail| quoted(&rail.netdev)).collect();
    Ok(QOS_INSTALLER
        .replace("@SCRIPT@", QOS_SCRIPT)
        .replace("@UNIT@", QOS_UNIT)
        .replace("@MAPPINGS@", &mappings)
        .replace("@PRIORITY@", &priority.to_string())
        .replace(
            "@TRAFFIC_CLASS@",
            &first.lossless_traffic_class().to_string(),
        )
        .replace("@INTERFACES@", &interfaces.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::interfaces::qos::PortQos;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    #[test]
    fn a_quoted_path_survives_the_shell() {
        let path = "/opt/it's here/lib $x.so";
        let script = format!(
            "{}\nprintf '%s %s' \"$NCCL_NET\" \"$NCCL_NET_PLUGIN\"",
            text(Reader::Shell, path, true).unwrap()
        );
        let output = Command::new("sh")
            .args(["-c", &script])
            .output()
            .unwrap()
            .stdout;
        assert_eq!(String::from_utf8(output).unwrap(), format!("Spark {path}"));
    }

    #[test]
    fn docker_gets_one_line_or_an_error() {
        let line = text(Reader::Docker, "/usr/local/lib/libnccl-net-spark.so", true).unwrap();
        assert!(
            line.contains(" --device /dev/infiniband --device /dev/cpu_dma_latency --ulimit "),
            "{line}"
        );
        let without = text(Reader::Docker, "/usr/local/lib/libnccl-net-spark.so", false).unwrap();
        assert!(
            without.contains(" --device /dev/infiniband --ulimit "),
            "{without}"
        );
        assert!(
            line.contains(
                "-v /usr/local/lib/libnccl-net-spark.so:/usr/local/lib/libnccl-net-spark.so:ro "
            ),
            "{line}"
        );
        assert!(!line.contains('\n'));
        for path in ["/a b.so", "/a:b.so", "/a*.so"] {
            let error = text(Reader::Docker, path, true).unwrap_err().to_string();
            assert!(
                error.contains(path) && error.contains("--plugin"),
                "{error}"
            );
        }
    }

    fn installer(netdevs: &[&str], port: &PortQos) -> Result<String> {
        let rail = |netdev: &&str| RailQos {
            device: "x".to_owned(),
            netdev: (*netdev).to_owned(),
            port: port.clone(),
        };
        qos_installer(&netdevs.iter().map(rail).collect::<Vec<_>>())
    }

    #[test]
    fn the_installer_has_all_rails_and_keeps_the_owners_priority() {
        let text = |port: &PortQos| installer(&["eth0", "it's-1"], port).unwrap();
        let fresh = text(&PortQos { dscp: None, pfc: 0 });
        for part in [
            "NCCL_IB_TC=106 ",
            "mappings='26:3 48:6'",
            "priority='3'",
            r"-- 'eth0' 'it'\''s-1')",
        ] {
            assert!(fresh.contains(part), "{part}: {fresh}");
        }
        let without_placeholders = fresh.replace("qos@", "").replace("$@", "");
        assert!(!without_placeholders.contains('@'), "{fresh}");
        let own = text(&PortQos {
            dscp: None,
            pfc: 1 << 5,
        });
        assert!(
            own.contains("mappings='26:5 48:6'") && own.contains("priority='5'"),
            "{own}"
        );
        // RoCE on the DSCP of notifications.
        let map = std::array::from_fn(|dscp| if dscp == 48 { 3 } else { 0 });
        let shared = text(&PortQos {
            dscp: Some(map),
            pfc: 1 << 3,
        });
        assert!(shared.contains("mappings='48:3'"), "{shared}");
        assert!(
            installer(&[], &PortQos { dscp: None, pfc: 0 })
                .unwrap_err()
                .to_string()
                .contains("DCB")
        );
    }

    const SCRIPT_PATH: &str = "usr/local/sbin/nccl-spark-qos";
    const UNIT_FOLDER: &str = "etc/systemd/system";

    /// Runs the printed program with `DESTDIR`, as `| sudo sh` does.
    fn install_below(root: &Path) {
        let text = installer(&["eth0"], &PortQos { dscp: None, pfc: 0 }).unwrap();
        let mut shell = Command::new("sh")
            .env("DESTDIR", root)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        shell
            .stdin
            .take()
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
        assert!(shell.wait().unwrap().success());
    }

    #[test]
    fn the_installer_writes_the_files_and_removes_the_old_unit() {
        let root = tempfile::tempdir().unwrap();
        let units = root.path().join(UNIT_FOLDER);
        fs::create_dir_all(&units).unwrap();
        fs::write(units.join("nccl-spark-qos.service"), "").unwrap();
        install_below(root.path());
        install_below(root.path());
        for (path, mode) in [
            (root.path().join(SCRIPT_PATH), 0o755),
            (units.join("nccl-spark-qos@.service"), 0o644),
        ] {
            assert_eq!(
                fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
                mode,
                "{}",
                path.display()
            );
        }
        assert_eq!(
            fs::read_to_string(units.join("nccl-spark-qos@.service")).unwrap(),
            QOS_UNIT
        );
        assert_eq!(
            fs::read_dir(&units).unwrap().count(),
            1,
            "the old unit or a temporary file is left"
        );
    }

    #[test]
    fn systemd_accepts_the_unit() {
        if Command::new("systemd-analyze")
            .arg("--version")
            .output()
            .is_err()
        {
            return crate::skip::missing("there is no systemd-analyze (Debian's systemd)");
        }
        let root = tempfile::tempdir().unwrap();
        install_below(root.path());
        // systemd-analyze checks that the program exists.
        let template = root
            .path()
            .join(UNIT_FOLDER)
            .join("nccl-spark-qos@.service");
        let text = QOS_UNIT.replace(
            "/usr/local",
            &format!("{}/usr/local", root.path().display()),
        );
        fs::write(&template, text).unwrap();
        for instance in ["enp1s0f0np0", r"my\x2dif"] {
            let unit = template.with_file_name(format!("nccl-spark-qos@{instance}.service"));
            let output = Command::new("systemd-analyze")
                .args(["verify", "--man=no"])
                .arg(unit)
                .output()
                .unwrap();
            let messages = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && !messages.contains("nccl-spark"),
                "{messages}"
            );
        }
    }

    /// Replaces dcb, ethtool and sleep; `$0` says which. Keeps the state of interface eth0 in
    /// files, and logs all commands except queries. A change of PFC removes the carrier. If there
    /// is a cable, the carrier returns with the third call of sleep.
    const STUB: &str = r#"#!/bin/sh
cd "$STATE" || exit
command="${0##*/} $*"
case $command in
  'dcb pfc show dev eth0'*) cat pfc; exit ;;
  'dcb -N app show dev eth0 dscp-prio') cat dscp; exit ;;
  'ethtool -a eth0') cat pause; exit ;;
esac
echo "$command" >>log
case $command in
  'dcb pfc set dev eth0 prio-pfc 3:on')
    echo 'prio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off ' >pfc
    echo 0 >class/net/eth0/carrier ;;
  'dcb app replace dev eth0 dscp-prio '*)
    read -r known <dscp || known=dscp-prio
    echo "$known $6 " >dscp ;;
  'ethtool -A eth0 rx off tx off') printf 'Autonegotiate:\toff\nRX:\t\toff\nTX:\t\toff\n' >pause ;;
  'sleep 1') if [ -e cable ] && [ "$(grep -c sleep log)" = 3 ]; then echo 1 >class/net/eth0/carrier; fi ;;
  *) echo 'Attribute read: Operation not supported' >&2; exit 1 ;;
esac
"#;

    /// A shell makes the stubs: exec fails while another thread's child still has a file open that
    /// this process has written.
    const SET_UP: &str = r#"
mkdir -p bin state/class/net/eth0
for name in dcb ethtool sleep; do printf %s "$STUB" >bin/$name; done
chmod 755 bin/*
for name in cat grep; do ln -s "$(command -v $name)" bin/; done
"#;

    /// A host with the installed script, and with stubs for the programs that the script runs.
    struct Host(tempfile::TempDir);

    impl Host {
        /// Makes a host with a cable, without PFC and with global pause.
        fn new() -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            install_below(host.0.path());
            let mut shell = Command::new("sh");
            shell
                .args(["-ec", SET_UP])
                .env("STUB", STUB)
                .current_dir(host.0.path());
            assert!(shell.status().unwrap().success());
            host.set(
                "pfc",
                "prio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:off 7:off \n",
            );
            host.set("dscp", "");
            host.set("pause", "Autonegotiate:\toff\nRX:\t\ton\nTX:\t\toff\n");
            host.set("cable", "");
            host.set("class/net/eth0/carrier", "1\n");
            host
        }

        fn path(&self, below: &str) -> PathBuf {
            self.0.path().join(below)
        }

        fn set(&self, name: &str, text: &str) {
            fs::write(self.path("state").join(name), text).unwrap();
        }

        /// Runs the script. Returns the logged commands, the exit status and standard error.
        fn run(&self, interface: &str) -> (Vec<String>, Option<i32>, String) {
            self.set("log", "");
            let mut script = Command::new(self.path(SCRIPT_PATH));
            script.arg(interface).env("PATH", self.path("bin"));
            let output = script
                .env("STATE", self.path("state"))
                .env("SYSFS", self.path("state"))
                .output()
                .unwrap();
            let log = fs::read_to_string(self.path("state/log")).unwrap();
            let errors = String::from_utf8(output.stderr).unwrap();
            (
                log.lines().map(str::to_owned).collect(),
                output.status.code(),
                errors,
            )
        }
    }

    const SET_DSCP: [&str; 2] = [
        "dcb app replace dev eth0 dscp-prio 26:3",
        "dcb app replace dev eth0 dscp-prio 48:6",
    ];
    const SET_PFC: &str = "dcb pfc set dev eth0 prio-pfc 3:on";
    const SET_PAUSE: &str = "ethtool -A eth0 rx off tx off";
    const PFC_ON_4: &str = "prio-pfc 0:off 1:off 2:off 3:off 4:on 5:off 6:off 7:off \n";

    #[test]
    fn the_script_sets_only_what_differs() {
        let host = Host::new();
        let run = || {
            let (log, status, errors) = host.run("eth0");
            assert_eq!((status, errors.as_str()), (Some(0), ""));
            log
        };
        let all = [
            SET_DSCP[0],
            SET_DSCP[1],
            SET_PFC,
            SET_PAUSE,
            "sleep 1",
            "sleep 1",
            "sleep 1",
        ];
        assert_eq!(run(), all);
        assert_eq!(run(), [""; 0]);
        host.set("pause", "Autonegotiate:\toff\nRX:\t\toff\nTX:\t\ton\n");
        assert_eq!(run(), [SET_PAUSE]);
        host.set("dscp", "dscp-prio 26:0 48:6 \n");
        assert_eq!(run(), [SET_DSCP[0]]);
        host.set("pfc", PFC_ON_4);
        assert_eq!(run()[0], SET_PFC);
    }

    #[test]
    fn the_script_warns_of_a_link_that_does_not_return_and_does_not_wait_without_a_cable() {
        let host = Host::new();
        fs::remove_file(host.path("state/cable")).unwrap();
        let (log, status, errors) = host.run("eth0");
        let sleeps = log.iter().filter(|line| *line == "sleep 1").count();
        assert_eq!((sleeps, status), (15, Some(0)), "{errors}");
        assert!(
            errors.starts_with("eth0: no carrier 15 s after"),
            "{errors}"
        );
        host.set("pfc", PFC_ON_4);
        assert_eq!(
            host.run("eth0"),
            (vec![SET_PFC.to_owned()], Some(0), String::new())
        );
    }

    #[test]
    fn the_script_names_what_is_missing() {
        let host = Host::new();
        let (_, status, errors) = host.run("vf0");
        assert_eq!((status, errors.lines().count()), (Some(1), 1), "{errors}");
        assert!(
            errors.starts_with("vf0: PFC not set: ") && errors.contains("virtual functions"),
            "{errors}"
        );
        fs::remove_file(host.path("bin/ethtool")).unwrap();
        let (log, status, errors) = host.run("eth0");
        assert!(
            status == Some(0) && log.contains(&SET_PFC.to_owned()),
            "{errors}"
        );
        assert!(errors.contains("package ethtool"), "{errors}");
        fs::remove_file(host.path("bin/dcb")).unwrap();
        let (_, status, errors) = host.run("eth0");
        assert_eq!((status, errors.lines().count()), (Some(1), 1), "{errors}");
        assert!(errors.contains("package iproute2"), "{errors}");
    }

    #[test]
    fn ray_gets_json() {
        let json: serde_json::Value =
            serde_json::from_str(&text(Reader::Ray, "/a \"b\".so", true).unwrap()).unwrap();
        assert_eq!(json["env_vars"]["NCCL_NET_PLUGIN"], "/a \"b\".so");
        assert_eq!(json["env_vars"]["NCCL_NET"], "Spark");
    }

    #[test]
    fn the_plugin_beside_the_program_is_named_by_its_whole_path() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(places::PROGRAM);
        let run = |plugin: Option<PathBuf>| {
            let mut out = Vec::new();
            Options {
                reader: Reader::Ray,
                plugin,
            }
            .run(&program, &mut out)
            .map(|()| String::from_utf8(out).unwrap())
        };
        assert!(
            run(None)
                .unwrap_err()
                .to_string()
                .contains("name it with --plugin")
        );
        assert!(
            run(Some("/no/where.so".into()))
                .unwrap_err()
                .to_string()
                .contains("/no/where.so not found")
        );
        let plugin = folder.path().join(places::PLUGIN);
        std::fs::create_dir_all(plugin.parent().unwrap()).unwrap();
        std::fs::write(&plugin, "").unwrap();
        assert!(
            run(None)
                .unwrap()
                .contains(plugin.canonicalize().unwrap().to_str().unwrap())
        );
    }
}
