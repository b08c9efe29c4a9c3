//! The list of what `install` put into a folder: the path of each file with a digest of its content, and the folders that were made
//! for them. The lines are those of `sha256sum`, which can check them.

use anyhow::{Context, Result, ensure};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Component, Path};
use std::{fs, io};

/// Where the list is, within the prefix.
pub const PATH: &str = "lib/nccl-spark/manifest";

const FOLDER: &str = "# folder ";

/// What is installed. Paths are relative to the prefix.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The digests that a file may have: two while one replaces the other.
    pub files: BTreeMap<String, BTreeSet<String>>,
    /// The folders that were made.
    pub folders: BTreeSet<String>,
}

impl Manifest {
    /// The list in `prefix`, if there is one.
    ///
    /// # Errors
    /// When it cannot be read, or is not such a list.
    pub fn read(prefix: &Path) -> Result<Option<Self>> {
        let path = prefix.join(PATH);
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text).map(Some).with_context(|| format!("read {}", path.display())),
            Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let mut manifest = Self::default();
        for (number, line) in text.lines().enumerate() {
            let context = || format!("line {}: {line:?}", number + 1);
            if let Some(folder) = line.strip_prefix(FOLDER) {
                check(folder).with_context(context)?;
                manifest.folders.insert(folder.to_owned());
            } else if !line.starts_with('#') && !line.is_empty() {
                let (digest, path) = line.split_once("  ").with_context(context)?;
                check(path).with_context(context)?;
                manifest.add(path, digest);
            }
        }
        Ok(manifest)
    }

    /// One more file, or one more digest of a file.
    pub fn add(&mut self, path: &str, digest: &str) {
        self.files.entry(path.to_owned()).or_default().insert(digest.to_owned());
    }

    /// Whether this file, with this content, was installed.
    pub fn has(&self, path: &str, digest: &str) -> bool {
        self.files.get(path).is_some_and(|digests| digests.contains(digest))
    }

    /// The text of the list; `version` is of the program that writes it.
    pub fn text(&self, version: &str) -> String {
        let mut text = format!(
            "# Installed by nccl-spark {version}; `nccl-spark uninstall` removes these files.\n\
             # `sha256sum -c {PATH}` checks them, in the folder that `install --prefix` named.\n"
        );
        for folder in &self.folders {
            let _ = writeln!(text, "{FOLDER}{folder}");
        }
        for (path, digests) in &self.files {
            for digest in digests {
                let _ = writeln!(text, "{digest}  {path}");
            }
        }
        text
    }
}

/// A path that leads out of the prefix is none of ours. The prefix itself is `.`.
fn check(path: &str) -> Result<()> {
    let is_inside = path == "." || Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    ensure!(is_inside && !path.is_empty(), "not a path below the prefix");
    Ok(())
}

/// The SHA-256 of `bytes`, in hexadecimal.
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let mut manifest = Manifest::default();
        manifest.add("bin/nccl-spark", &digest(b"old"));
        manifest.add("bin/nccl-spark", &digest(b"new"));
        manifest.add("lib/a b", &digest(b""));
        manifest.folders.insert("lib/nccl-spark".to_owned());
        let text = manifest.text("0.1.0 (abc)");
        assert!(text.starts_with("# Installed by nccl-spark 0.1.0 (abc);"), "{text}");
        assert_eq!(Manifest::parse(&text).unwrap(), manifest);
        assert!(manifest.has("bin/nccl-spark", &digest(b"old")) && !manifest.has("bin/nccl-spark", &digest(b"x")));
        // FIPS 180-2.
        assert!(text.contains("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  lib/a b\n"), "{text}");
    }

    #[test]
    fn paths_that_lead_out_of_the_prefix_are_refused() {
        for line in ["00  /etc/passwd", "00  ../x", "00  lib/../../x", "00  ", "00 x", "# folder ..", "# folder /etc"] {
            let error = format!("{:#}", Manifest::parse(line).unwrap_err());
            assert!(error.starts_with("line 1: "), "{line}: {error}");
        }
    }
}
