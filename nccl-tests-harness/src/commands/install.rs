//! `nccl-spark install` and `uninstall`: this program, the plugin, the software fabric, shell completions and manual pages below one
//! prefix, where they find each other (`places`).
//!
//! Promises: nothing is written unless everything can be; a file that `install` did not put there is neither replaced nor removed, and one
//! that was changed since is not removed; each file gets its name in one step, whole; what is installed is listed in
//! `lib/nccl-spark/manifest`, so that `uninstall` needs nothing else. What a Debian or Python package put there is the package's.

mod bundle;
mod files;
mod manifest;
mod packaged;

use crate::abi;
use crate::net;
use crate::output::numbers::count;
use crate::output::{self, Verbosity};
use crate::places;
use anyhow::{Context, Result, bail, ensure};
use bundle::Item;
use clap::Args;
use files::{State, put};
use manifest::Manifest;
use nix::unistd::geteuid;
use packaged::{Package, is_of_deb};
use std::collections::BTreeSet;
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
    /// Folder that install used [default: the one that this program is installed in, else /usr/local]
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
}

const PREFIX: &str = "/usr/local";

impl Install {
    /// Installs, and says how to use it. `program` is this program's file, `path` the environment's PATH, `command_line` what
    /// completions and manual pages are made from.
    ///
    /// # Errors
    /// When something to install is missing, when a file is in the way, when the prefix cannot be written, or when a package put this
    /// program there.
    pub fn run(
        self,
        program: &Path,
        path: Option<&str>,
        command_line: &clap::Command,
        mut out: impl Write,
    ) -> Result<()> {
        if let Some(package) = Package::of(program) {
            bail!(package.no_install(program));
        }
        let prefix = std::path::absolute(&self.prefix).context("make the prefix absolute")?;
        let items = self.items(program, command_line)?;
        let old = Manifest::read(&prefix)?;
        let command = command(program, "install", &prefix);
        let folders: BTreeSet<&Path> = items.iter().filter_map(|item| Path::new(&item.path).parent()).collect();
        folders.iter().try_for_each(|folder| files::check_writable(&prefix.join(folder), &command))?;
        check_in_the_way(&prefix, old.as_ref(), &items)?;

        let is_upgrade = old.is_some();
        let new = put(&prefix, &items, old.unwrap_or_default())?;
        for kept in &new.kept {
            writeln!(out, "kept {}: it was changed since an earlier version installed it", kept.display())?;
        }
        let done = if is_upgrade { "Upgraded" } else { "Installed" };
        report(&prefix, done, &items, program, path, &mut out)
    }

    fn items(self, program: &Path, command_line: &clap::Command) -> Result<Vec<Item>> {
        let build = places::build_command();
        let Some(plugin) = self.plugin.or_else(|| places::plugin(program)) else {
            bail!("the plugin is not beside {}: build it with `{build}`, or name it with --plugin", program.display());
        };
        ensure!(plugin.is_file(), "plugin {} not found: build it with `{build}`", plugin.display());
        let plugin = plugin.canonicalize().with_context(|| format!("find {}", plugin.display()))?;
        let missing = missing_versions(&plugin)?;
        ensure!(
            missing.is_empty(),
            "{} is not this plugin: it does not export {}",
            plugin.display(),
            missing.join(", ")
        );
        let fabric = self.softverbs.unwrap_or_else(|| places::fabric(program));
        ensure!(
            fabric.is_file(),
            "software fabric {} not found: build it with `{build}`, or name it with --softverbs",
            fabric.display()
        );
        bundle::collect(program, &plugin, &fabric, command_line)
    }
}

impl Uninstall {
    /// Removes what [`Install::run`] installed. `program` is this program's file.
    ///
    /// # Errors
    /// When nothing is installed there, or it cannot be removed, or when a package put this program there and no folder is named.
    pub fn run(self, program: &Path, mut out: impl Write) -> Result<()> {
        if let (None, Some(package)) = (&self.prefix, Package::of(program)) {
            bail!(package.no_uninstall(program));
        }
        let own = places::prefix(program).filter(|prefix| prefix.join(manifest::PATH).is_file());
        let prefix = self.prefix.as_deref().or(own).unwrap_or(Path::new(PREFIX));
        let prefix = std::path::absolute(prefix).context("make the prefix absolute")?;
        let Some(manifest) = Manifest::read(&prefix)?.or_else(|| files::early_plugin(&prefix)) else {
            bail!("nothing is installed in {}: name the folder with --prefix", prefix.display());
        };
        let command = command(program, "uninstall", &prefix);
        for path in manifest.files.keys().map(|path| prefix.join(path)).filter(|path| path.symlink_metadata().is_ok()) {
            files::check_writable(path.parent().unwrap_or(&prefix), &command)?;
        }
        let (mut removed, mut kept) = (0, Vec::new());
        for path in manifest.files.keys() {
            let file = prefix.join(path);
            match files::state(&prefix, path, &manifest)? {
                State::Absent => {}
                // dpkg replaced what install had put there.
                _ if is_of_deb(&file) => kept.push((file, "it belongs to the Debian package nccl-net-spark")),
                State::Ours => {
                    fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
                    removed += 1;
                }
                State::Changed | State::Foreign => kept.push((file, "it was changed since it was installed")),
            }
        }
        files::remove_manifest(&prefix, &manifest)?;
        writeln!(out, "Removed {} that install put into {}", count(removed, "file"), prefix.display())?;
        for (file, reason) in kept {
            writeln!(out, "kept {}: {reason}", file.display())?;
        }
        Ok(writeln!(out, "Unset NCCL_NET_PLUGIN and NCCL_NET where you set them")?)
    }
}

/// Nothing is replaced that `install` did not put there.
fn check_in_the_way(prefix: &Path, old: Option<&Manifest>, items: &[Item]) -> Result<()> {
    let none = Manifest::default();
    let known = old.unwrap_or(&none);
    let early = files::early_plugin(prefix).unwrap_or_default();
    let mut in_the_way = Vec::new();
    for item in items {
        let path = prefix.join(&item.path);
        let file = path.display();
        match files::state(prefix, &item.path, known)? {
            _ if is_of_deb(&path) => in_the_way.push(format!("{file} belongs to the Debian package nccl-net-spark")),
            State::Absent | State::Ours => {}
            State::Changed => in_the_way.push(format!("{file} was changed since it was installed")),
            State::Foreign if early.files.contains_key(&item.path) => {}
            State::Foreign if files::is_same(&prefix.join(&item.path), item) => {}
            State::Foreign => in_the_way.push(format!("{file} was not installed by nccl-spark")),
        }
    }
    ensure!(
        in_the_way.is_empty(),
        "{}\nnothing was installed: move what is in the way, or choose another folder with --prefix",
        in_the_way.join("\n")
    );
    Ok(())
}

fn report(
    prefix: &Path,
    done: &str,
    items: &[Item],
    program: &Path,
    path: Option<&str>,
    out: &mut impl Write,
) -> Result<()> {
    let shared = items.iter().filter(|item| item.path.starts_with("share/")).count();
    if output::verbosity() == Verbosity::Quiet {
        return Ok(());
    }
    let (plugin, prefix_text) = (prefix.join(places::PLUGIN), prefix.display());
    writeln!(out, "{done} nccl-spark {} in {prefix_text}:", env!("PROGRAM_VERSION"))?;
    for item in items.iter().filter(|item| !item.path.starts_with("share/")) {
        writeln!(out, "  {}", prefix.join(&item.path).display())?;
    }
    writeln!(out, "  shell completions and manual pages ({}) in {prefix_text}/share", count(shared, "file"))?;
    let bin = prefix.join("bin");
    if !path.unwrap_or_default().split(':').any(|folder| Path::new(folder) == bin) {
        writeln!(out, "Put the command into your PATH:\n  export PATH={}:$PATH", bin.display())?;
    }
    if cfg!(debug_assertions) {
        writeln!(out, "This is a debug build, which is slow: build the one to use with `cargo build --release`")?;
    }
    writeln!(out, "To use the plugin, set for a job:")?;
    writeln!(out, "  export NCCL_NET_PLUGIN={}", plugin.display())?;
    writeln!(out, "  export NCCL_NET=Spark")?;
    writeln!(out, "Do not set NCCL_NET in a login script: NCCL fails with it on a machine that has no usable rail.")?;
    let installed = prefix.join(places::PROGRAM);
    let program = if bin.is_dir() { installed.as_path() } else { program };
    // What root installed only root removes.
    let sudo = if geteuid().is_root() { "sudo " } else { "" };
    Ok(writeln!(out, "To remove it:\n  {sudo}{}", command(program, "uninstall", prefix))?)
}

/// The command line that does this as root or, where no root is needed, as it is.
fn command(program: &Path, command: &str, prefix: &Path) -> String {
    let prefix = if prefix == Path::new(PREFIX) { String::new() } else { format!(" --prefix {}", prefix.display()) };
    format!("{} {command}{prefix}", program.display())
}

fn missing_versions(library: &Path) -> Result<Vec<String>> {
    let present = net::exported_versions(library, abi::VERSIONS)?;
    Ok(abi::VERSIONS
        .filter(|version| !present.contains(version))
        .map(|version| format!("ncclNetPlugin_v{version}"))
        .collect())
}
