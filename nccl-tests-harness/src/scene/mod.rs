//! The environment in which real NCCL runs: the network (the plugin or one of NCCL's own), the
//! fabric (the devices that carry the messages), the variables for network and fabric, and the file
//! for the output.
//!
//! [`Scene::environment`] returns the variables that a scene sets for all ranks. The commands
//! nccl-tests and communicators show them to the user. Commands may set more variables, such as
//! each rank's `NCCL_HOSTID`. A run's files are removed with its scene.

pub mod network;

use crate::fabric::options::FabricOptions;
use crate::fabric::{self, Fabric, FabricRequest};
use crate::output;
use crate::places::PluginOption;
use anyhow::{Context, Result};
use clap::Args;
use network::Network;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Options of commands that run NCCL.
#[derive(Debug, Args)]
pub struct SceneOptions {
    /// Seconds that one run or scenario may take.
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    /// Writes the output of all ranks, with NCCL's log, to FILE.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    #[command(flatten)]
    plugin: PluginOption,
    #[command(flatten)]
    fabric: FabricOptions,
}

/// Checked options of a scene.
#[derive(Debug)]
pub struct Setting {
    /// Time limit of one run or scenario.
    pub timeout: Duration,
    log: Option<PathBuf>,
    plugin: PathBuf,
    fabric: FabricRequest,
}

impl SceneOptions {
    /// Checks the options. `program` is this program's file.
    ///
    /// # Errors
    /// Fails when options contradict each other, or the plugin does not exist.
    pub fn setting(self, program: &Path) -> Result<Setting> {
        Ok(Setting {
            timeout: Duration::from_secs(self.timeout),
            log: self.log,
            plugin: self.plugin.library(program)?,
            fabric: self.fabric.request(program)?,
        })
    }
}

/// The environment of runs. Dropping it removes their files.
pub struct Scene {
    /// Fabric that carries the messages.
    pub fabric: Fabric,
    plugin: PathBuf,
    folder: TempDir,
    log: Option<File>,
}

impl Scene {
    /// Makes the scene for `ranks` ranks of this machine. `lookup` returns an environment variable.
    ///
    /// # Errors
    /// Fails when a part of the scene does not exist or cannot be made.
    pub fn set(
        setting: &Setting,
        ranks: usize,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let create = |path: &PathBuf| {
            File::create(path).with_context(|| format!("--log {}", path.display()))
        };
        let log = setting.log.as_ref().map(create).transpose()?;
        let fabric = fabric::set_up(
            &setting.fabric,
            ranks,
            lookup("NCCL_IBVERBS_LIB").as_deref(),
        )?;
        let folder = tempfile::tempdir().context("make a folder for the runs")?;
        Ok(Self {
            fabric,
            plugin: setting.plugin.clone(),
            folder,
            log,
        })
    }

    /// Returns a folder for the runs' files, on this machine.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Writes "`who`: `line`" into the log file, if there is one. `who` names the run or the rank
    /// that printed the line. If the user wants to see NCCL's log, also writes NCCL's lines to
    /// standard error.
    pub fn log(&self, who: &str, line: &str) -> Result<()> {
        if output::nccl_debug().is_some() && line.contains(" NCCL ") {
            writeln!(output::error(), "{who}: {line}")?;
        }
        let Some(mut file) = self.log.as_ref() else {
            return Ok(());
        };
        writeln!(file, "{who}: {line}").context("--log")
    }

    /// Makes a folder in which the plugin has the name that NCCL loads by default, libnccl-net.so.
    /// Returns the folder.
    pub fn plugin_by_its_usual_name(&self) -> Result<PathBuf> {
        let folder = self.folder.path().join("lib");
        let link = folder.join("libnccl-net.so");
        if link.symlink_metadata().is_err() {
            let made = fs::create_dir_all(&folder).and_then(|()| symlink(&self.plugin, &link));
            made.with_context(|| format!("make {}", link.display()))?;
        }
        Ok(folder)
    }

    /// Returns the variables of a run over `network`, the same for all ranks. `is_here` is true if
    /// all ranks run on this machine. `lookup` returns an environment variable.
    ///
    /// # Errors
    /// Fails when the software fabric's library cannot be linked under the names that NCCL's own
    /// transport loads.
    pub fn environment(
        &self,
        network: Network,
        is_here: bool,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Vec<(String, String)>> {
        let mut environment = network.environment(&self.plugin);
        let mut set = |name: &str, value: String| environment.push((name.to_owned(), value));
        if !lookup("NCCL_DEBUG").is_some_and(|level| level.eq_ignore_ascii_case("TRACE")) {
            set(
                "NCCL_DEBUG",
                output::nccl_debug().unwrap_or("INFO").to_owned(),
            );
        }
        if let Some(chosen) = lookup("NCCL_DEBUG_SUBSYS") {
            set("NCCL_DEBUG_SUBSYS", subsystems(&chosen));
        }
        if is_here && lookup("NCCL_SOCKET_IFNAME").is_none() {
            set("NCCL_SOCKET_IFNAME", "lo".to_owned());
        }
        if network == Network::Ib
            && let Some(folder) = self.fabric.verbs_names()?
        {
            set("LD_LIBRARY_PATH", loader_path(&folder, lookup));
            // Without this index, NCCL looks up the type of each GID in /sys/class/infiniband,
            // which does not have the software fabric's devices.
            if lookup("NCCL_IB_GID_INDEX").is_none() {
                set("NCCL_IB_GID_INDEX", "1".to_owned());
            }
        }
        if network != Network::Socket {
            environment.extend(self.fabric.shared_environment().iter().cloned());
        }
        Ok(environment)
    }
}

/// Returns the subsystems of NCCL's log (`NCCL_DEBUG_SUBSYS`): the user's choice and those that
/// this program reads. This program reads INIT (networks, channels), which is one of NCCL's
/// defaults, and NET. A list after `^` names excluded subsystems.
fn subsystems(chosen: &str) -> String {
    const READ: [&str; 2] = ["INIT", "NET"];
    let Some(left_out) = chosen.strip_prefix('^') else {
        return format!("{chosen},{}", READ.join(","));
    };
    let is_read = |name: &str| {
        READ.into_iter()
            .chain(["ALL"])
            .any(|read| name.trim().eq_ignore_ascii_case(read))
    };
    let kept: Vec<&str> = left_out.split(',').filter(|name| !is_read(name)).collect();
    if kept.is_empty() {
        "ALL".to_owned()
    } else {
        format!("^{}", kept.join(","))
    }
}

/// Returns the `LD_LIBRARY_PATH` that searches `folder` before the user's own folders.
pub fn loader_path(folder: &Path, lookup: &dyn Fn(&str) -> Option<String>) -> String {
    let rest = lookup("LD_LIBRARY_PATH")
        .map(|path| format!(":{path}"))
        .unwrap_or_default();
    format!("{}{rest}", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reading_is_logged_whatever_the_user_chose() {
        assert_eq!(subsystems("TUNING"), "TUNING,INIT,NET");
        assert_eq!(subsystems("^COLL,init,P2P"), "^COLL,P2P");
        assert_eq!(subsystems("^NET"), "ALL");
        assert_eq!(subsystems("^ALL,GRAPH"), "^GRAPH");
    }
}
