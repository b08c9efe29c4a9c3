//! The places of the plugin and the software fabric. Installed files are below the program's prefix
//! (the folder above `bin`). The Debian package has libraries in the architecture's folder below
//! `lib`. Built files are beside the program.

use crate::usage::wrong;
use anyhow::{Context, bail, ensure};
use clap::Args;
use std::path::{Path, PathBuf};

/// Path of the program, relative to a prefix.
pub(crate) const PROGRAM: &str = "bin/nccl-spark";
/// Path of the plugin, relative to a prefix. With `NCCL_NET_PLUGIN=spark`, NCCL looks for a library
/// of this name.
pub(crate) const PLUGIN: &str = "lib/libnccl-net-spark.so";
pub(crate) const FABRIC: &str = "lib/nccl-spark/softverbs-ibverbs";

const BUILT_PLUGIN: &str = "libnccl_net_spark.so";
const BUILT_FABRIC: &str = "softverbs-ibverbs";

const PACKAGE_LIB: &str = if cfg!(target_arch = "aarch64") {
    "lib/aarch64-linux-gnu/"
} else {
    "lib/x86_64-linux-gnu/"
};

pub(crate) fn prefix(program: &Path) -> Option<&Path> {
    program.parent()?.parent()
}

pub(crate) fn plugin(program: &Path) -> Option<PathBuf> {
    installed(program, PLUGIN)
        .or_else(|| Some(program.with_file_name(BUILT_PLUGIN)).filter(|path| path.is_file()))
}

/// Returns the absolute path of the plugin: `given`, or the one that belongs to `program`.
///
/// # Errors
/// Fails when the file is missing. The error names the command that builds it.
pub fn found_plugin(given: Option<PathBuf>, program: &Path) -> anyhow::Result<PathBuf> {
    let build = build_command();
    let Some(plugin) = given.or_else(|| plugin(program)) else {
        bail!(
            "the plugin is not beside {}: build it with `{build}`, or name it with --plugin",
            program.display()
        );
    };
    ensure!(
        plugin.is_file(),
        "plugin {} not found: build it with `{build}`",
        plugin.display()
    );
    plugin
        .canonicalize()
        .with_context(|| format!("find {}", plugin.display()))
}

/// The option `--plugin` of commands whose ranks load the plugin as NCCL does.
#[derive(Debug, Default, Args)]
pub struct PluginOption {
    /// The plugin's library [default: libnccl_net_spark.so beside this program, else
    /// libnccl-net-spark.so on the loader's path].
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
}

impl PluginOption {
    /// Returns the option's library, else the library that belongs to `program`, else a name
    /// without a folder, which the loader looks for.
    ///
    /// # Errors
    /// Fails when the option's file does not exist.
    pub fn library(self, program: &Path) -> Result<PathBuf, clap::Error> {
        match self.plugin {
            Some(path) => existing("--plugin", &path),
            None => Ok(plugin(program).unwrap_or_else(|| "libnccl-net-spark.so".into())),
        }
    }
}

/// Returns the absolute path of a library that `option` names. Given a path without a slash, the
/// loader would look for the library in its own directories.
pub fn existing(option: &str, path: &Path) -> Result<PathBuf, clap::Error> {
    path.canonicalize()
        .map_err(|error| wrong(format!("{option} {}: {error}", path.display())))
}

/// Returns the software fabric's library for `program`; the file may not exist.
pub(crate) fn fabric(program: &Path) -> PathBuf {
    installed(program, FABRIC).unwrap_or_else(|| program.with_file_name(BUILT_FABRIC))
}

/// Returns the command that builds the workspace in the profile of this program.
pub(crate) fn build_command() -> &'static str {
    if cfg!(debug_assertions) {
        "cargo build"
    } else {
        "cargo build --release"
    }
}

pub(crate) fn in_path(name: &str, path: &str, is_there: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let folders = path.split(':').filter(|folder| !folder.is_empty());
    folders
        .map(|folder| Path::new(folder).join(name))
        .find(|file| is_there(file))
}

/// Finds an installed file: below the prefix, or in the architecture's folder of a Debian package.
fn installed(program: &Path, path: &str) -> Option<PathBuf> {
    let prefix = prefix(program)?;
    let of_package = path.replacen("lib/", PACKAGE_LIB, 1);
    [prefix.join(path), prefix.join(of_package)]
        .into_iter()
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn installed_files_come_before_those_built_beside_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join(PROGRAM);
        fs::create_dir_all(folder.path().join("lib/nccl-spark")).unwrap();
        fs::create_dir(folder.path().join("bin")).unwrap();
        assert_eq!(plugin(&program), None);
        let built = folder.path().join("bin").join(BUILT_PLUGIN);
        fs::write(&built, "").unwrap();
        assert_eq!(
            (plugin(&program), fabric(&program)),
            (Some(built), folder.path().join("bin/softverbs-ibverbs"))
        );
        let package = folder.path().join(PACKAGE_LIB);
        fs::create_dir_all(package.join("nccl-spark")).unwrap();
        for path in ["libnccl-net-spark.so", "nccl-spark/softverbs-ibverbs"] {
            fs::write(package.join(path), "").unwrap();
        }
        assert_eq!(plugin(&program), Some(package.join("libnccl-net-spark.so")));
        assert_eq!(
            fabric(&program),
            package.join("nccl-spark/softverbs-ibverbs")
        );
        for path in [PLUGIN, FABRIC] {
            fs::write(folder.path().join(path), "").unwrap();
        }
        assert_eq!(plugin(&program), Some(folder.path().join(PLUGIN)));
        assert_eq!(fabric(&program), folder.path().join(FABRIC));
    }
}
