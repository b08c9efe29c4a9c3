//! The list of what `install` put into a folder. The lines of files are those of `sha256sum`, which
//! can check them.

use anyhow::{Context, Result};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Component, Path};
use std::{fs, io};

/// Path of the list below the prefix.
pub const PATH: &str = "lib/nccl-spark/manifest";
/// The mark of a folder.
pub const FOLDER: &str = "# folder";

/// Paths below the prefix, each with its mark: the SHA-256 of a file's content, or [`FOLDER`] for a
/// folder that was made. The prefix itself is `.`. A file has two digests while one content
/// replaces the other.
pub type Manifest = BTreeSet<(String, String)>;

/// Returns the list in `prefix`, if there is one.
///
/// # Errors
/// Names the list and the line that is not valid.
pub fn read(prefix: &Path) -> Result<Option<Manifest>> {
    let path = prefix.join(PATH);
    match fs::read_to_string(&path) {
        Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) => Ok(None),
        text => text.map_err(Into::into).and_then(|text| parse(&text)).map(Some),
    }
    .with_context(|| format!("read {}", path.display()))
}

fn parse(text: &str) -> Result<Manifest> {
    let mut manifest = Manifest::new();
    for (number, line) in text.lines().enumerate() {
        let folder = line.strip_prefix(FOLDER).map(|path| (FOLDER, path.trim_start()));
        if folder.is_none() && line.starts_with('#') {
            continue;
        }
        // Install writes no path that leads out of the prefix.
        let is_below = |path: &str| Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
        let entry = folder.or_else(|| line.split_once("  "));
        let entry = entry.filter(|(_, path)| *path == "." || is_below(path) && !path.is_empty());
        let (mark, path) =
            entry.with_context(|| format!("line {}: {line:?}: not a path below the prefix", number + 1))?;
        manifest.insert((path.to_owned(), mark.to_owned()));
    }
    Ok(manifest)
}

/// Returns the text of a list.
pub fn text(manifest: &Manifest) -> String {
    let mut text = format!(
        "# Installed by nccl-spark {}; `nccl-spark uninstall` removes these files.\n\
         # `sha256sum -c {PATH}` checks them, in the folder that `install --prefix` named.\n",
        env!("PROGRAM_VERSION")
    );
    for (path, mark) in manifest {
        let gap = if mark == FOLDER { " " } else { "  " };
        let _ = writeln!(text, "{mark}{gap}{path}");
    }
    text
}

/// Returns the SHA-256 of `bytes` in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let of = |path: &str, mark: &str| (path.to_owned(), mark.to_owned());
        let old_and_new = [of("bin/nccl-spark", &digest(b"old")), of("bin/nccl-spark", &digest(b"new"))];
        let manifest = old_and_new.into_iter().chain([of("lib/a b", &digest(b"")), of("lib", FOLDER), of(".", FOLDER)]);
        let manifest: Manifest = manifest.collect();
        let text = text(&manifest);
        assert!(text.starts_with("# Installed by nccl-spark "), "{text}");
        assert_eq!((parse(&text).unwrap(), manifest.len()), (manifest, 5));
        // FIPS 180-2.
        assert!(text.contains("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  lib/a b\n"), "{text}");
    }

    #[test]
    fn paths_that_lead_out_of_the_prefix_are_refused() {
        for line in ["00  /etc/passwd", "00  ../x", "00  lib/../../x", "00  ", "00 x", "# folder ..", "# folder /etc"] {
            let error = format!("{:#}", parse(line).unwrap_err());
            assert!(error.starts_with("line 1: "), "{line}: {error}");
        }
    }
}
