//! The files below a prefix: which of them may be replaced or removed, and how that is done.

use super::manifest::{self, FOLDER, Manifest, digest};
use super::packaged::is_of_deb;
use crate::output::replacement;
use anyhow::{Context, Result, bail, ensure};
use nix::unistd::{AccessFlags, eaccess, geteuid};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A file to install.
pub struct Item {
    /// Path below the prefix.
    pub path: String,
    /// The whole content.
    pub content: Vec<u8>,
    /// File mode, as in chmod(2).
    pub mode: u32,
}

/// Fails unless files can be made in `folder`, or `folder` in the nearest existing folder above it.
/// `command` is this command line.
///
/// # Errors
/// Names the folder, the reason and the cure.
pub fn check_writable(folder: &Path, command: &str) -> Result<()> {
    let existing = folder.ancestors().find_map(|folder| Some((folder, fs::metadata(folder).ok()?)));
    let Some((existing, about)) = existing else { bail!("cannot write to {}: no such folder", folder.display()) };
    if !about.is_dir() {
        bail!("cannot write to {}: {} is not a folder", folder.display(), existing.display());
    }
    let Err(error) = eaccess(existing, AccessFlags::W_OK | AccessFlags::X_OK) else { return Ok(()) };
    let advice = match geteuid().is_root() {
        true => "choose another folder with --prefix".to_owned(),
        false => format!("run it as root: sudo {command}"),
    };
    bail!("cannot write to {}: {}; {advice}", existing.display(), error.desc().to_lowercase())
}

/// Puts the items into `prefix`, and removes files of `old` that are no longer among them. Returns
/// a line for each of these that stays.
///
/// The list has old and new digests until all files have their names, so that an installation that
/// ends in the middle can be repeated or removed.
///
/// # Errors
/// Names the files in the way, or the file that cannot be written.
pub fn put(prefix: &Path, items: &[Item], old: &Manifest) -> Result<Vec<String>> {
    let mut in_the_way = Vec::new();
    for item in items {
        let reason = obstacle(prefix, &item.path, old, Some(&item.content))?;
        in_the_way.extend(reason.map(|reason| format!("{} {reason}", prefix.join(&item.path).display())));
    }
    let cure = "nothing was installed: move what is in the way, or choose another folder with --prefix";
    ensure!(in_the_way.is_empty(), "{}\n{cure}", in_the_way.join("\n"));

    let mut new: Manifest = items.iter().map(|item| (item.path.clone(), digest(&item.content))).collect();
    let mut both = old | &new;
    let paths = items.iter().map(|item| item.path.as_str());
    paths.chain([manifest::PATH]).try_for_each(|path| make_folder(prefix, path, &mut both))?;
    write_list(prefix, &both)?;
    let written = items.iter().map(|Item { path, content, mode }| {
        let path = prefix.join(path);
        let file = replacement::written(&path, content, Permissions::from_mode(*mode));
        file.with_context(|| format!("write {}", path.display())).map(|file| (file, path))
    });
    // A running job keeps the file that it has mapped: the new one takes over its name alone.
    for (file, path) in written.collect::<Result<Vec<_>>>()? {
        file.persist(&path).map_err(|error| error.error).with_context(|| format!("replace {}", path.display()))?;
    }
    let mut gone = files(old);
    gone.retain(|path| !items.iter().any(|item| item.path == *path));
    let (_, kept) = remove_files(prefix, gone, old)?;
    new.extend(both.into_iter().filter(|(_, mark)| mark == FOLDER));
    write_list(prefix, &new)?;
    Ok(kept)
}

/// Removes the files of the list, the list, and the folders that were made where nothing else is in
/// them. Returns the number of files that were removed, and a line for each that stays. `command`
/// is this command line.
///
/// # Errors
/// Names a file or folder that cannot be changed. Folders are checked before anything is removed.
pub fn remove(prefix: &Path, manifest: &Manifest, command: &str) -> Result<(usize, Vec<String>)> {
    for file in files(manifest).into_iter().map(|path| prefix.join(path)) {
        if is_there(&file)? {
            check_writable(file.parent().unwrap_or(prefix), command)?;
        }
    }
    let outcome = remove_files(prefix, files(manifest), manifest)?;
    let list = prefix.join(manifest::PATH);
    fs::remove_file(&list).with_context(|| format!("remove {}", list.display()))?;
    // A folder comes before those in it. The path of the prefix itself ends in `.`, which rmdir(2)
    // refuses.
    for (folder, _) in manifest.iter().rev().filter(|(_, mark)| mark == FOLDER) {
        // One that is not empty stays.
        let _ = fs::remove_dir(prefix.join(folder).components().collect::<PathBuf>());
    }
    Ok(outcome)
}

fn files(manifest: &Manifest) -> BTreeSet<&str> {
    manifest.iter().filter(|(_, mark)| mark != FOLDER).map(|(path, _)| path.as_str()).collect()
}

/// True for a file, and for a link wherever it leads.
fn is_there(file: &Path) -> Result<bool> {
    match file.symlink_metadata() {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => Ok(false),
        about => about.map(|_| true).with_context(|| format!("look at {}", file.display())),
    }
}

fn remove_files(prefix: &Path, paths: BTreeSet<&str>, manifest: &Manifest) -> Result<(usize, Vec<String>)> {
    let (mut removed, mut kept) = (0, Vec::new());
    for path in paths {
        let file = prefix.join(path);
        if let Some(reason) = obstacle(prefix, path, manifest, None)? {
            kept.push(format!("kept {}: it {reason}", file.display()));
        } else if is_there(&file)? {
            fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
            removed += 1;
        }
    }
    Ok((removed, kept))
}

/// Returns the reason why a file may be neither replaced nor removed. There is none where the file
/// is absent, or has content that `manifest` lists or that is to be installed.
fn obstacle(prefix: &Path, path: &str, manifest: &Manifest, new: Option<&[u8]>) -> Result<Option<&'static str>> {
    let file = prefix.join(path);
    if !is_there(&file)? {
        return Ok(None);
    }
    // dpkg may have replaced the file that install had put there.
    if is_of_deb(&file) {
        return Ok(Some("belongs to the Debian package nccl-net-spark"));
    }
    // Install puts no links there, whatever they lead to.
    if !file.is_symlink() && file.is_file() {
        let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        if new == Some(&content) || manifest.contains(&(path.to_owned(), digest(&content))) {
            return Ok(None);
        }
    }
    let is_listed = files(manifest).contains(path);
    Ok(Some(if is_listed { "was changed since it was installed" } else { "was not installed by nccl-spark" }))
}

fn write_list(prefix: &Path, manifest: &Manifest) -> Result<()> {
    let path = prefix.join(manifest::PATH);
    let list = replacement::written(&path, manifest::text(manifest).as_bytes(), Permissions::from_mode(0o644));
    list.and_then(|file| Ok(file.persist(&path)?)).with_context(|| format!("write {}", path.display()))?;
    Ok(())
}

/// Makes the folder of the file `path`, and lists the folders that had to be made below the prefix.
fn make_folder(prefix: &Path, path: &str, manifest: &mut Manifest) -> Result<()> {
    if let Some(above) = prefix.parent() {
        fs::create_dir_all(above).with_context(|| format!("make {}", above.display()))?;
    }
    let folders = Path::new(path).ancestors().skip(1).filter(|folder| !prefix.join(folder).is_dir());
    for folder in folders.collect::<Vec<_>>().into_iter().rev() {
        let whole = prefix.join(folder);
        // The files are for everybody, whatever the umask of root's shell.
        let made = fs::create_dir(&whole).and_then(|()| fs::set_permissions(&whole, Permissions::from_mode(0o755)));
        made.with_context(|| format!("make {}", whole.display()))?;
        let name = folder.to_str().filter(|name| !name.is_empty()).unwrap_or(".");
        manifest.insert((name.to_owned(), FOLDER.to_owned()));
    }
    Ok(())
}
