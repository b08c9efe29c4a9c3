//! Puts the plugin where NCCL finds it, and takes it away.

use crate::net;
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The name under which NCCL looks for `NCCL_NET_PLUGIN=spark`.
const NAME: &str = "libnccl-net-spark.so";
/// The versions of the interface that the plugin has: NCCL 2.20 (8) to 2.30 (12).
const VERSIONS: std::ops::RangeInclusive<u32> = 8..=12;

/// Copies `library` to `prefix`/lib and prints how to use it.
///
/// # Errors
/// When the library is not whole, or the place cannot be written.
pub fn install(library: &Path, prefix: &Path, mut out: impl Write) -> Result<()> {
    let prefix = std::path::absolute(prefix).context("make the prefix absolute")?;
    ensure!(library.is_file(), "{} is no file: build it first, or name it with --plugin", library.display());
    let library = library.canonicalize().with_context(|| format!("find {}", library.display()))?;
    let missing = missing_versions(&library)?;
    ensure!(missing.is_empty(), "{} is not this plugin: it does not export {}", library.display(), missing.join(", "));
    let target = place(&prefix);
    put(&library, &target).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "; run it with sudo, or name a place of your own with --prefix"
            }
            _ => "",
        };
        anyhow::anyhow!("cannot write {}: {error}{hint}", target.display())
    })?;
    let (target, prefix) = (target.display(), prefix.display());
    writeln!(out, "installed {target}")?;
    writeln!(out, "use it:")?;
    writeln!(out, "  export NCCL_NET_PLUGIN={target}")?;
    writeln!(out, "  export NCCL_NET=Spark")?;
    writeln!(out, "undo it:")?;
    writeln!(out, "  nccl-spark uninstall --prefix {prefix}")?;
    writeln!(out, "  unset NCCL_NET_PLUGIN NCCL_NET")?;
    Ok(())
}

/// Takes away what [`install`] put there.
///
/// # Errors
/// When there is nothing, or it cannot be taken away.
pub fn uninstall(prefix: &Path, mut out: impl Write) -> Result<()> {
    let target = place(&std::path::absolute(prefix).context("make the prefix absolute")?);
    match fs::remove_file(&target) {
        Ok(()) => writeln!(out, "removed {}\nunset NCCL_NET_PLUGIN and NCCL_NET where you set them", target.display())?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("nothing is installed at {}: name the place with --prefix", target.display())
        }
        Err(error) => bail!("cannot remove {}: {error}", target.display()),
    }
    Ok(())
}

fn place(prefix: &Path) -> PathBuf {
    prefix.join("lib").join(NAME)
}

fn missing_versions(library: &Path) -> Result<Vec<String>> {
    let present = net::exported_versions(library, VERSIONS)?;
    Ok(VERSIONS
        .filter(|version| !present.contains(version))
        .map(|version| format!("ncclNetPlugin_v{version}"))
        .collect())
}

/// A running job keeps the file that it has mapped: the new one takes its name in one step, whole.
fn put(library: &Path, target: &Path) -> io::Result<()> {
    let folder = target.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    let part = folder.join(format!(".{NAME}.{}", std::process::id()));
    let written = fs::copy(library, &part).and_then(|_| File::open(&part)?.sync_all());
    written.and_then(|()| fs::rename(&part, target)).inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })
}
