//! Replaces and removes files below a prefix, after a check that `install` wrote them.

use super::manifest::{self, Manifest};
use super::packaged::is_of_deb;
use crate::digest::sha256;
use crate::output::replacement;
use anyhow::{Context, Result, bail, ensure};
use nix::unistd::{AccessFlags, eaccess, geteuid};
use std::collections::BTreeSet;
use std::fs::{self, Metadata, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

pub struct Item {
    /// Path below the prefix.
    pub path: String,
    pub content: Vec<u8>,
    pub mode: u32,
}

enum Present {
    Nothing,
    Ours,
    /// A file that must stay, for this reason.
    Others(&'static str),
}

/// Checks that files can be created in `folder`. If `folder` does not exist, checks its nearest
/// existing parent. `command` is the command line that the error proposes with sudo.
///
/// # Errors
/// The folder cannot be written. The error names the folder, the reason and the cure.
pub fn check_writable(folder: &Path, command: &str) -> Result<()> {
    let existing = folder
        .ancestors()
        .find(|folder| folder.exists())
        .unwrap_or(folder);
    ensure!(
        existing.is_dir(),
        "cannot write to {}: {} is not a folder",
        folder.display(),
        existing.display()
    );
    let Err(error) = eaccess(existing, AccessFlags::W_OK | AccessFlags::X_OK) else {
        return Ok(());
    };
    let advice = if geteuid().is_root() {
        "choose another folder with --prefix"
    } else {
        "run it as root: sudo "
    };
    let command = if geteuid().is_root() { "" } else { command };
    bail!(
        "cannot write to {}: {}; {advice}{command}",
        existing.display(),
        error.desc().to_lowercase()
    )
}

/// Writes the items below `prefix`, and removes the files of `old` that are not among the items.
/// Returns a line of text for each old file that stays.
///
/// Until all files are in place, the manifest has their old and new digests. An interrupted
/// installation can therefore be repeated or removed.
///
/// # Errors
/// Other files are in the way, or a file cannot be written. The error names these files.
pub fn put(prefix: &Path, items: &[Item], old: &Manifest) -> Result<Vec<String>> {
    let mut in_the_way = Vec::new();
    for item in items {
        if let Present::Others(reason) = present(prefix, &item.path, old, Some(&item.content))? {
            in_the_way.push(format!("{} {reason}", prefix.join(&item.path).display()));
        }
    }
    let cure =
        "nothing was installed: move what is in the way, or choose another folder with --prefix";
    ensure!(in_the_way.is_empty(), "{}\n{cure}", in_the_way.join("\n"));
    if geteuid().is_root() && !old.is_empty() {
        check_only_root_can_replace(prefix, old)?;
    }

    let new: Manifest = items
        .iter()
        .map(|item| (item.path.clone(), sha256(&item.content)))
        .collect();
    let list = |manifest: &Manifest| {
        let content = manifest::text(manifest).into_bytes();
        [Item {
            path: manifest::PATH.to_owned(),
            content,
            mode: 0o644,
        }]
    };
    write(prefix, &list(&(old | &new)))?;
    write(prefix, items)?;
    let mut gone = paths(old);
    gone.retain(|path| !items.iter().any(|item| item.path == *path));
    let (_, kept) = remove_files(prefix, gone, old)?;
    write(prefix, &list(&new))?;
    Ok(kept)
}

/// Removes the files of the manifest, the manifest itself, and folders that become empty. Returns
/// the number of removed files, and a line of text for each file that stays. `command` is the
/// command line that an error proposes with sudo.
///
/// # Errors
/// A file or folder cannot be changed; the error names it. Folders are checked before anything is
/// removed. For root, a folder that another user can replace is an error, too.
pub fn remove(prefix: &Path, manifest: &Manifest, command: &str) -> Result<(usize, Vec<String>)> {
    if geteuid().is_root() {
        check_only_root_can_replace(prefix, manifest)?;
    }
    for path in paths(manifest) {
        if !matches!(present(prefix, path, manifest, None)?, Present::Nothing) {
            check_writable(prefix.join(path).parent().unwrap_or(prefix), command)?;
        }
    }
    let outcome = remove_files(prefix, paths(manifest), manifest)?;
    let list = prefix.join(manifest::PATH);
    fs::remove_file(&list).with_context(|| format!("remove {}", list.display()))?;
    for path in paths(manifest).into_iter().chain([manifest::PATH]) {
        let folders = Path::new(path)
            .ancestors()
            .skip(1)
            .map(|folder| prefix.join(folder));
        // A folder with other files stays. Below /usr, only folders named nccl-spark are removed.
        let own =
            folders.filter(|folder| !prefix.starts_with("/usr") || folder.ends_with("nccl-spark"));
        own.for_each(|folder| drop(fs::remove_dir(folder.components().as_path())));
    }
    Ok(outcome)
}

/// Checks that only root can replace the folders of the manifest's files, and the folders above
/// them. Another user could put a link in the place of one while root changes files below it.
fn check_only_root_can_replace(prefix: &Path, manifest: &Manifest) -> Result<()> {
    let files: Vec<PathBuf> = paths(manifest)
        .into_iter()
        .chain([manifest::PATH])
        .map(|path| prefix.join(path))
        .collect();
    let mut folders: BTreeSet<PathBuf> = BTreeSet::new();
    for folder in files.iter().filter_map(|file| file.parent()) {
        let target = folder.canonicalize();
        folders.extend(
            [Some(folder), target.as_deref().ok()]
                .into_iter()
                .flatten()
                .flat_map(Path::ancestors)
                .map(Into::into),
        );
    }
    for folder in &folders {
        // A link can be replaced by its owner, and its target by those who may write there.
        let found = [fs::symlink_metadata(folder), fs::metadata(folder)];
        let Some(open) = found
            .iter()
            .flatten()
            .find(|found| others_can_change(found))
        else {
            continue;
        };
        let shown = folder.display();
        let cure = match open.uid() {
            0 => format!("chmod go-w {shown}"),
            _ => "run this as the user who installed it".to_owned(),
        };
        bail!(
            "{shown} can be changed by other users (uid {}, gid {}, mode {:04o}), so root changes nothing below it: {cure}",
            open.uid(),
            open.gid(),
            open.mode() & 0o7777
        );
    }
    Ok(())
}

/// Returns true if users other than root can replace root's files in a folder. With the sticky bit,
/// as in `/tmp`, they cannot. The mode of a link has no meaning.
fn others_can_change(found: &Metadata) -> bool {
    const STICKY: u32 = 0o1000;
    const BY_GROUP: u32 = 0o020;
    const BY_OTHERS: u32 = 0o002;
    let mode = found.mode();
    let is_link = found.is_symlink();
    let is_open = mode & BY_OTHERS != 0 || (mode & BY_GROUP != 0 && found.gid() != 0);
    found.uid() != 0 || (is_open && mode & STICKY == 0 && !is_link)
}

fn paths(manifest: &Manifest) -> BTreeSet<&str> {
    manifest.iter().map(|(path, _)| path.as_str()).collect()
}

fn remove_files(
    prefix: &Path,
    paths: BTreeSet<&str>,
    manifest: &Manifest,
) -> Result<(usize, Vec<String>)> {
    let mut removed = 0;
    let mut kept = Vec::new();
    for path in paths {
        let file = prefix.join(path);
        match present(prefix, path, manifest, None)? {
            Present::Nothing => {}
            Present::Others(reason) => kept.push(format!("kept {}: it {reason}", file.display())),
            Present::Ours => {
                fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
                removed += 1;
            }
        }
    }
    Ok((removed, kept))
}

/// Examines a file or link. A file is ours if its digest is in `manifest` or its content is `new`,
/// unless the Debian package lists it.
fn present(prefix: &Path, path: &str, manifest: &Manifest, new: Option<&[u8]>) -> Result<Present> {
    let file = prefix.join(path);
    let is_file = match file.symlink_metadata() {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(Present::Nothing);
        }
        about => about
            .with_context(|| format!("look at {}", file.display()))?
            .is_file(),
    };
    // dpkg may have replaced a file that `install` wrote.
    if is_of_deb(&file) {
        return Ok(Present::Others(
            "belongs to the Debian package nccl-net-spark",
        ));
    }
    // `install` creates no links, so a link is not ours.
    if is_file {
        let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        if new == Some(&content) || manifest.contains(&(path.to_owned(), sha256(&content))) {
            return Ok(Present::Ours);
        }
    }
    let is_listed = paths(manifest).contains(path);
    Ok(Present::Others(if is_listed {
        "was changed since it was installed"
    } else {
        "was not installed by nccl-spark"
    }))
}

/// Writes all items to temporary files first, then renames these files. A rename does not change
/// the old file, so a running job keeps the old file mapped.
fn write(prefix: &Path, items: &[Item]) -> Result<()> {
    let written = items.iter().map(
        |Item {
             path,
             content,
             mode,
         }| {
            let path = prefix.join(path);
            make_folder(path.parent().unwrap_or(prefix))?;
            let file = replacement::written(&path, content, Permissions::from_mode(*mode));
            file.with_context(|| format!("write {}", path.display()))
                .map(|file| (file, path))
        },
    );
    for (file, path) in written.collect::<Result<Vec<_>>>()? {
        file.persist(&path)
            .map_err(|error| error.error)
            .with_context(|| format!("replace {}", path.display()))?;
    }
    Ok(())
}

/// Creates a folder and its parents, readable for all users regardless of the umask.
fn make_folder(folder: &Path) -> Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    folder.parent().map_or(Ok(()), make_folder)?;
    let made = fs::create_dir(folder)
        .and_then(|()| fs::set_permissions(folder, Permissions::from_mode(0o755)));
    made.with_context(|| format!("make {}", folder.display()))
}
