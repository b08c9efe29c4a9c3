//! `spark-lab one-version`: copies the plugin so that only one version of NCCL's interface is
//! found. Without the copy, NCCL takes the newest version that it knows.
//!
//! The copy is the same machine code. Only the names of the other versions' tables change, in place
//! and at the same length. So the loader's tables stay valid, and a look-up by the true name finds
//! nothing.

use anyhow::{Context, Result, ensure};
use clap::Args;
use nccl_tests_harness::places::PluginOption;
use nccl_tests_harness::{abi, net};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Options of one-version.
#[derive(Debug, Args)]
pub struct Options {
    /// Version of the interface, 8 to 12.
    #[arg(value_parser = abi::version_parser())]
    version: u32,
    /// Folder for the copy.
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    #[command(flatten)]
    plugin: PluginOption,
}

impl Options {
    /// Makes the copy and prints its path. `program` is this program's file. Fails when the plugin
    /// has no table of the chosen version, or cannot be copied.
    pub fn run(self, program: &Path, mut out: impl Write) -> Result<()> {
        let copy = copy(&self.plugin.library(program)?, self.version, &self.out)?;
        Ok(writeln!(out, "{}", copy.display())?)
    }
}

fn copy(plugin: &Path, version: u32, folder: &Path) -> Result<PathBuf> {
    let mut library = fs::read(plugin).with_context(|| format!("read {}", plugin.display()))?;
    for other in abi::VERSIONS.filter(|other| *other != version) {
        spoil(&mut library, &format!("ncclNetPlugin_v{other}"));
    }
    let path = folder.join(format!("libnccl-net-spark-v{version}.so"));
    fs::write(&path, library).with_context(|| format!("write {}", path.display()))?;
    let shown = net::exported_versions(&path, abi::VERSIONS)?;
    ensure!(shown == [version], "{} has no table of version {version} to show", plugin.display());
    Ok(path)
}

/// Changes the first letter of `name` wherever it is a complete string.
fn spoil(library: &mut [u8], name: &str) {
    let whole = format!("\0{name}\0");
    let mut from = 0;
    while let Some(at) = library[from..].windows(whole.len()).position(|bytes| bytes == whole.as_bytes()) {
        library[from + at + 1] = b'-';
        from += at + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_names_are_replaced() {
        let mut bytes = *b"\0Plugin_v1\0Plugin_v10\0aPlugin_v1\0Plugin_v1\0";
        spoil(&mut bytes, "Plugin_v1");
        assert_eq!(&bytes, b"\0-lugin_v1\0Plugin_v10\0aPlugin_v1\0-lugin_v1\0");
    }
}
