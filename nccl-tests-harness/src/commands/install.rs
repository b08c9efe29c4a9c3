//! `nccl-spark install` and `uninstall`. `install` puts this program, the plugin, the software
//! fabric, shell completions and manual pages below one prefix. The program finds the other files
//! there (`places`).
//!
//! Promises:
//! - `install` first replaces the manifest by one that lists the old and the new files. Then it
//!   writes all new files under temporary names. Only after that does it replace installed files.
//! - `install` replaces, and `uninstall` removes, only files that `install` wrote and that have not
//!   changed since.
//! - Each file appears under its name with its full content.
//! - `lib/nccl-spark/manifest` lists the installed files, and `uninstall` needs only this list.
//! - Files of a Debian or Python package are neither replaced nor removed.

mod files;
mod manifest;
mod packaged;

use crate::commands::manual;
use crate::output::numbers::count;
use crate::output::{self, Verbosity};
use crate::{net, places};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use files::Item;
use nccl_abi::net::NET_VERSIONS;
use nix::unistd::geteuid;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of install.
#[derive(Debug, Args)]
pub struct Install {
    /// Folder to install into: DIR/bin, DIR/lib and DIR/share
    #[arg(long, value_name = "DIR", default_value = PREFIX)]
    prefix: PathBuf,
    /// Plugin's library [default: the one that belongs to this program]
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// Software fabric's library [default: the one that belongs to this program]
    #[arg(long, value_name = "PATH")]
    softverbs: Option<PathBuf>,
}

/// Options of uninstall.
#[derive(Debug, Args)]
pub struct Uninstall {
    /// Folder that install used [default: the one that this program is installed in, else
    /// /usr/local]
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
}

const PREFIX: &str = "/usr/local";
/// Path of the udev rule, relative to a prefix. udev reads it below `/usr/local` (udev(7)).
const UDEV_RULE: &str = "lib/udev/rules.d/60-nccl-spark.rules";

impl Install {
    /// Installs the files, and prints how to use the plugin. Completions and manual pages are made
    /// from `command_line`. `path` is the environment's PATH.
    ///
    /// # Errors
    /// A file to install is missing, a file is in the way, the prefix cannot be written, or a
    /// package installed this program.
    pub fn run(
        self,
        program: &Path,
        path: Option<&str>,
        command_line: &clap::Command,
        mut out: impl Write,
    ) -> Result<()> {
        if let Some((package, _)) = packaged::package_of(program) {
            let cure = "there is nothing to install; `nccl-spark env` prints the variables to set";
            bail!(
                "{} belongs to the {package} nccl-net-spark: {cure}",
                program.display()
            );
        }
        let prefix = std::path::absolute(&self.prefix).context("make the prefix absolute")?;
        let items = self.items(program, command_line)?;
        let old = manifest::read(&prefix)?;
        let done = if old.is_some() {
            "Upgraded"
        } else {
            "Installed"
        };
        let command = command(program, "install", &prefix);
        for item in &items {
            files::check_writable(
                prefix.join(&item.path).parent().unwrap_or(&prefix),
                &command,
            )?;
        }
        let kept = files::put(&prefix, &items, &old.unwrap_or_default())?;
        kept.iter().try_for_each(|kept| writeln!(out, "{kept}"))?;
        if output::verbosity() == Verbosity::Quiet {
            return Ok(());
        }
        writeln!(
            out,
            "{done} nccl-spark {} in {}:",
            env!("PROGRAM_VERSION"),
            prefix.display()
        )?;
        report(&prefix, &items, path, out)
    }

    /// Reads all files before any is written, because this program's own file may be replaced.
    fn items(self, program: &Path, command_line: &clap::Command) -> Result<Vec<Item>> {
        let plugin = places::found_plugin(self.plugin, program)?;
        let fabric = self.softverbs.unwrap_or_else(|| places::fabric(program));
        let cure = format!(
            "build it with `{}`, or name it with --softverbs",
            places::build_command()
        );
        ensure!(
            fabric.is_file(),
            "software fabric {} not found: {cure}",
            fabric.display()
        );
        let present = net::exported_versions(&plugin, NET_VERSIONS)?;
        let missing = NET_VERSIONS.filter(|version| !present.contains(version));
        let missing: Vec<String> = missing
            .map(|version| format!("ncclNetPlugin_v{version}"))
            .collect();
        let missing = missing.join(", ");
        ensure!(
            missing.is_empty(),
            "{} is not this plugin: it does not export {missing}",
            plugin.display()
        );

        let mut files = Vec::new();
        for (path, file) in [
            (places::PROGRAM, program),
            (places::PLUGIN, &plugin),
            (places::FABRIC, &fabric),
        ] {
            let content = fs::read(file).with_context(|| format!("read {}", file.display()))?;
            files.push((path.to_owned(), content));
        }
        files.push((
            UDEV_RULE.to_owned(),
            include_bytes!("install/60-nccl-spark.rules").to_vec(),
        ));
        files.extend(manual::files(command_line).context("write the manual pages")?);
        let mode = |path: &str| {
            if path == places::PROGRAM {
                0o755
            } else {
                0o644
            }
        };
        Ok(files
            .into_iter()
            .map(|(path, content)| Item {
                mode: mode(&path),
                path,
                content,
            })
            .collect())
    }
}

impl Uninstall {
    /// Removes the files that [`Install::run`] listed in the manifest.
    ///
    /// # Errors
    /// Nothing is installed below the prefix, or a file cannot be removed. Without `--prefix` it is
    /// also an error if a package installed this program.
    pub fn run(self, program: &Path, mut out: impl Write) -> Result<()> {
        if let (None, Some((package, removal))) = (&self.prefix, packaged::package_of(program)) {
            let cure = format!(
                "remove it with `{removal}`; --prefix names a folder that `nccl-spark install` used"
            );
            bail!(
                "{} belongs to the {package} nccl-net-spark: {cure}",
                program.display()
            );
        }
        let own = places::prefix(program).filter(|prefix| prefix.join(manifest::PATH).is_file());
        let prefix = self.prefix.as_deref().or(own).unwrap_or(Path::new(PREFIX));
        let prefix = std::path::absolute(prefix).context("make the prefix absolute")?;
        let Some(manifest) = manifest::read(&prefix)? else {
            bail!(
                "nothing is installed in {}: name the folder with --prefix",
                prefix.display()
            );
        };
        let (removed, kept) =
            files::remove(&prefix, &manifest, &command(program, "uninstall", &prefix))?;
        writeln!(
            out,
            "Removed {} that install put into {}",
            count(removed, "file"),
            prefix.display()
        )?;
        kept.iter().try_for_each(|kept| writeln!(out, "{kept}"))?;
        Ok(writeln!(
            out,
            "Unset NCCL_NET_PLUGIN and NCCL_NET where you set them"
        )?)
    }
}

/// Prints the installed files, and how to use and remove them. `path` is the environment's PATH.
fn report(prefix: &Path, items: &[Item], path: Option<&str>, mut out: impl Write) -> Result<()> {
    let (shared, others): (Vec<&Item>, Vec<&Item>) = items
        .iter()
        .partition(|item| item.path.starts_with("share/"));
    others
        .iter()
        .try_for_each(|item| writeln!(out, "  {}", prefix.join(&item.path).display()))?;
    let share = prefix.join("share");
    writeln!(
        out,
        "  shell completions and manual pages ({}) in {}",
        count(shared.len(), "file"),
        share.display()
    )?;
    let bin = prefix.join("bin");
    if !path
        .unwrap_or_default()
        .split(':')
        .any(|folder| Path::new(folder) == bin)
    {
        writeln!(
            out,
            "Put the command into your PATH:\n  export PATH={}:$PATH",
            bin.display()
        )?;
    }
    if cfg!(debug_assertions) {
        writeln!(
            out,
            "This is a debug build, which is slow: build the one to use with `cargo build --release`"
        )?;
    }
    let plugin = prefix.join(places::PLUGIN);
    writeln!(
        out,
        "To use the plugin, set for a job:\n  export NCCL_NET_PLUGIN={}",
        plugin.display()
    )?;
    writeln!(out, "  export NCCL_NET=Spark")?;
    writeln!(
        out,
        "Do not set NCCL_NET in a login script: NCCL fails with it on a machine that has no usable rail."
    )?;
    if prefix == Path::new(PREFIX) {
        writeln!(
            out,
            "A udev rule lets members of the group rdma ask for short CPU wake-up times, as the plugin does on a GB10. It takes effect \
             at the next boot, or with\n  sudo udevadm control --reload && sudo udevadm trigger --name-match=cpu_dma_latency\n\
             To add the job's user to the group:\n  sudo usermod -aG rdma USER"
        )?;
    }
    // Only root can remove files that root has installed.
    let sudo = if geteuid().is_root() { "sudo " } else { "" };
    Ok(writeln!(
        out,
        "To remove it:\n  {sudo}{}",
        command(&prefix.join(places::PROGRAM), "uninstall", prefix)
    )?)
}

fn command(program: &Path, command: &str, prefix: &Path) -> String {
    let prefix = if prefix == Path::new(PREFIX) {
        String::new()
    } else {
        format!(" --prefix {}", prefix.display())
    };
    format!("{} {command}{prefix}", program.display())
}
