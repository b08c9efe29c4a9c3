//! Runs `drive` under callgrind in a child process, and reads callgrind's dumps.

use crate::drive::{Phase, Plan};
use crate::profile::Dump;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub const DRIVE: &str = "drive";

/// The rails of the fabric's machine, `spark-2cable`. With `--rails N` a connection uses the first
/// N.
const RAILS: [&str; 4] = ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"];
const PROFILE: &str = "spark-2cable";

pub struct Run<'a> {
    pub plugin: &'a Path,
    pub softverbs: &'a Path,
    pub rails: usize,
    pub plan: &'a Plan,
    /// Folder for callgrind's files; it is created.
    pub folder: PathBuf,
}

impl Run<'_> {
    /// Returns each phase with its counts. Fails if valgrind is missing, the plugin fails, or the
    /// dumps do not match the phases.
    pub fn start(&self) -> Result<Vec<(Phase, Dump)>, String> {
        let said = |error: std::io::Error| format!("{}: {error}", self.folder.display());
        std::fs::create_dir_all(&self.folder).map_err(said)?;
        let fabric = self.folder.join("fabric");
        let output = self
            .command(&fabric)?
            .output()
            .map_err(|error| format!("valgrind: {error}"))?;
        let _ = std::fs::remove_dir_all(&fabric);
        if !output.status.success() {
            return Err(format!(
                "{} under valgrind: {}",
                self.plugin.display(),
                output.status
            ));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        // The plugin may print lines too.
        let phases: Vec<Phase> = text
            .lines()
            .filter(|line| line.starts_with("phase "))
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let read = |(at, phase): (usize, Phase)| -> Result<(Phase, Dump), String> {
            let path = self.folder.join(format!("out.{}", at + 1));
            let text = std::fs::read_to_string(&path)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            let dump =
                Dump::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?;
            Ok((phase, dump))
        };
        phases.into_iter().enumerate().map(read).collect()
    }

    fn command(&self, fabric: &Path) -> Result<Command, String> {
        let own = std::env::current_exe()
            .map_err(|error| format!("the path of this program: {error}"))?;
        let list = |numbers: &[usize]| {
            numbers
                .iter()
                .map(usize::to_string)
                .collect::<Vec<_>>()
                .join(",")
        };
        let mut command = Command::new("valgrind");
        command
            .args([
                "--tool=callgrind",
                "-q",
                "--compress-strings=no",
                "--compress-pos=no",
            ])
            .args([
                "--collect-atstart=no",
                "--toggle-collect=cost_counted",
                "--dump-before=cost_phase_ends",
            ])
            .arg(format!(
                "--callgrind-out-file={}",
                self.folder.join("out").display()
            ))
            .arg(own)
            .args([DRIVE.as_ref(), self.plugin.as_os_str()])
            .args([
                list(&self.plan.sizes),
                list(&self.plan.windows),
                self.plan.messages.to_string(),
            ])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            // Resolves symbols at load time, so that first calls cost as much as later ones.
            .env("LD_BIND_NOW", "1")
            .env("NCCL_IBVERBS_LIB", self.softverbs)
            .env("NCCL_IB_HCA", format!("={}", RAILS[..self.rails].join(",")))
            // The index of the RoCE v2 GID on each rail. Other plugins would look for it in /sys,
            // where the fabric has no GIDs.
            .env("NCCL_IB_GID_INDEX", "1")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_SPARK_SYSFS", fabric.join("cost/sys"))
            .env("SOFTVERBS_DIR", fabric)
            .env("SOFTVERBS_FABRIC", "cost")
            .env("SOFTVERBS_NODE", "0")
            .env("SOFTVERBS_PROFILE", PROFILE);
        Ok(command)
    }
}
