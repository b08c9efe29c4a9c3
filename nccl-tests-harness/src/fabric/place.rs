//! The place of a rank in a software fabric, as rank 0 sends it to the ranks of other processes.

use crate::output;
use crate::places;
use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use softverbs::profile::MAX_NODES;
use softverbs::{control, own_folder, settings};
use std::path::{Component, Path, PathBuf};

/// The place of a rank in a software fabric. The profile and its scale are in the fabric's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SoftPlace {
    /// Folder of all fabrics of rank 0's user.
    pub(super) dir: PathBuf,
    /// Name of the fabric.
    pub(super) fabric: String,
    /// Number of the rank's node.
    pub(super) node: usize,
}

impl SoftPlace {
    /// Returns the environment of the rank, which loads `library`.
    pub(super) fn environment(&self, library: &Path) -> Vec<(String, String)> {
        let Self { dir, fabric, node } = self;
        let mut environment = control::environment(dir, fabric);
        for (_, root) in environment
            .iter_mut()
            .filter(|(name, _)| name == "NCCL_SPARK_SYSFS")
        {
            *root = control::sysfs_of_node(root, *node);
        }
        let own = [
            ("NCCL_IBVERBS_LIB", library.display().to_string()),
            ("SOFTVERBS_NODE", node.to_string()),
        ];
        environment.extend(own.map(|(name, value)| (name.to_owned(), value)));
        environment
    }

    /// Returns the environment of `rank` in a fabric of another process. `library` is the software
    /// fabric's library, found by this process.
    ///
    /// # Errors
    /// Fails when `library` does not exist, or a field is not allowed: the folder must be this
    /// process's own choice or closed to other users, and each rank is its own node.
    pub fn environment_for_guest(
        &self,
        rank: usize,
        library: &Path,
    ) -> Result<Vec<(String, String)>> {
        self.check(rank)
            .context("rank 0 sent a place in the software fabric that is not allowed")?;
        Ok(self.environment(&self::library(library)?))
    }

    fn check(&self, rank: usize) -> Result<()> {
        let Self { dir, fabric, node } = self;
        let shown = output::plain(&dir.display().to_string());
        let is_plain = dir
            .components()
            .all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        ensure!(
            dir.is_absolute() && is_plain && shown == dir.display().to_string(),
            "folder {shown}"
        );
        if settings::dir().as_ref() != Ok(dir) {
            own_folder::check(dir).map_err(|error| anyhow!(error))?;
        }
        parse_fabric_name(fabric).map_err(|error| anyhow!("name of the fabric: {error}"))?;
        ensure!(
            *node == rank && rank < MAX_NODES,
            "node {node} for rank {rank}"
        );
        Ok(())
    }
}

/// Returns the full path of the software fabric's library.
pub(super) fn library(path: &Path) -> Result<PathBuf> {
    path.canonicalize().with_context(|| {
        format!(
            "software fabric {} not found: build it with `{}`, or name it with --softverbs",
            path.display(),
            places::build_command()
        )
    })
}

/// Parses the name of a software fabric. The error names the allowed names.
pub(crate) fn parse_fabric_name(text: &str) -> Result<String, String> {
    let plain = text
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    match plain && (1..=64).contains(&text.len()) {
        true => Ok(text.to_owned()),
        false => Err("must be at most 64 letters, digits, - and _".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    fn place(dir: &Path) -> SoftPlace {
        SoftPlace {
            dir: dir.to_owned(),
            fabric: "bed".to_owned(),
            node: 1,
        }
    }

    #[test]
    fn a_place_is_checked_before_it_becomes_an_environment() {
        let folder = tempfile::tempdir().unwrap();
        let good = place(folder.path());
        let environment = good
            .environment_for_guest(1, Path::new("/dev/null"))
            .unwrap();
        let names: Vec<&str> = environment.iter().map(|(name, _)| name.as_str()).collect();
        let expected = [
            "SOFTVERBS_DIR",
            "SOFTVERBS_FABRIC",
            "NCCL_SPARK_SYSFS",
            "NCCL_IBVERBS_LIB",
            "SOFTVERBS_NODE",
        ];
        assert_eq!(names, expected);
        assert!(environment.contains(&("NCCL_IBVERBS_LIB".to_owned(), "/dev/null".to_owned())));
        let below = folder
            .path()
            .join("..")
            .join(folder.path().file_name().unwrap());
        for (bad, why) in [
            (place(Path::new("relative")), "folder relative"),
            (place(&below), "folder "),
            (place(Path::new("/tmp/\u{1b}[2J")), "folder /tmp/?[2J"),
            (place(Path::new("/no/folder")), "/no/folder: No such file"),
            (
                SoftPlace {
                    fabric: "../x".to_owned(),
                    ..good.clone()
                },
                "name of the fabric: must be at most 64 letters",
            ),
            (
                SoftPlace {
                    node: 0,
                    ..good.clone()
                },
                "node 0 for rank 1",
            ),
        ] {
            let error = format!(
                "{:#}",
                bad.environment_for_guest(1, Path::new("/dev/null"))
                    .unwrap_err()
            );
            assert!(error.contains(why), "{error}");
        }
        let error = good
            .environment_for_guest(1, Path::new("/no/library"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("software fabric /no/library not found"),
            "{error}"
        );
    }

    #[test]
    fn a_folder_that_others_control_is_refused() {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("folder");
        let link = outer.path().join("link");
        fs::create_dir(&folder).unwrap();
        symlink(&folder, &link).unwrap();
        let refused = |dir: &Path| format!("{:#}", place(dir).check(1).unwrap_err());
        assert!(refused(&link).contains("is a symbolic link of "));
        fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
        assert!(refused(&folder).contains("is writable by others (mode 0777)"));
        // Only root can give files away.
        if chown(&folder, Some(65534), None).is_ok() {
            assert!(refused(&folder).contains("uid 65534), not to "));
        }
    }
}
