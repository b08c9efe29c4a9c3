//! The list of files that `install` wrote below a prefix. `sha256sum` can check its lines.

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Component, Path};

pub const PATH: &str = "lib/nccl-spark/manifest";
/// Pairs of a path below the prefix and a SHA-256 digest. A file has two entries while its content
/// is being replaced.
pub type Manifest = BTreeSet<(String, String)>;

/// Reads the list in `prefix`, if there is one.
///
/// # Errors
/// The list cannot be read, or has an invalid line. The error names the list and the line.
pub fn read(prefix: &Path) -> Result<Option<Manifest>> {
    let path = prefix.join(PATH);
    let list = match fs::read_to_string(&path) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(None);
        }
        text => text.map_err(Into::into).and_then(|text| parse(&text)),
    };
    list.map(Some)
        .with_context(|| format!("read {}", path.display()))
}

fn parse(text: &str) -> Result<Manifest> {
    // `install` writes no path that leads out of the prefix.
    let is_below = |path: &str| {
        Path::new(path)
            .components()
            .all(|part| matches!(part, Component::Normal(_)))
    };
    let entry = |(number, line): (usize, &str)| {
        let entry = line
            .split_once("  ")
            .filter(|(_, path)| is_below(path) && !path.is_empty());
        let wrong = || format!("line {}: {line:?}: not a path below the prefix", number + 1);
        entry
            .map(|(digest, path)| (path.to_owned(), digest.to_owned()))
            .with_context(wrong)
    };
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.starts_with('#'))
        .map(entry)
        .collect()
}

pub fn text(manifest: &Manifest) -> String {
    format!(
        "# Installed by nccl-spark {}; `nccl-spark uninstall` removes these files.\n\
         # `sha256sum -c {PATH}` checks them, in the folder that `install --prefix` named.\n{}",
        env!("PROGRAM_VERSION"),
        manifest
            .iter()
            .map(|(path, digest)| format!("{digest}  {path}\n"))
            .collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::sha256;

    #[test]
    fn written_tables_are_read_back() {
        let row = |path: &str, mark: &str| (path.to_owned(), mark.to_owned());
        let old_and_new = [
            row("bin/nccl-spark", &sha256(b"old")),
            row("bin/nccl-spark", &sha256(b"new")),
        ];
        let manifest = old_and_new
            .into_iter()
            .chain([row("lib/a b", &sha256(b""))]);
        let manifest: Manifest = manifest.collect();
        let text = text(&manifest);
        assert!(text.starts_with("# Installed by nccl-spark "), "{text}");
        assert_eq!((parse(&text).unwrap(), manifest.len()), (manifest, 3));
        // The digest of no bytes, from NIST's SHA256ShortMsg.rsp.
        assert!(
            text.contains(
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  lib/a b\n"
            ),
            "{text}"
        );
    }

    #[test]
    fn paths_that_lead_out_of_the_prefix_are_refused() {
        for line in [
            "00  /etc/passwd",
            "00  ../x",
            "00  lib/../../x",
            "00  ",
            "00 x",
        ] {
            let error = format!("{:#}", parse(line).unwrap_err());
            assert!(error.starts_with("line 1: "), "{line}: {error}");
        }
    }
}
