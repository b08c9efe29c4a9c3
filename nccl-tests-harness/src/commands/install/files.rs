//! The files below a prefix: which of them may be replaced or removed, and how that is done.

use super::manifest::{self, FOLDER, Manifest, digest};
use super::packaged::is_of_deb;
use crate::output::replacement;
use anyhow::{Context, Result, bail, ensure};
use nix::unistd::{AccessFlags, eaccess, geteuid};
use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file to install.
pub struct Item {
    /// Below the prefix.
    pub path: String,
    /// All of it.
    pub content: Vec<u8>,
    /// Its permissions.
    pub mode: u32,
}

/// Fails unless files can be made in `folder`, or in the folder above it in which it would be made. `command` is this command line.
///
/// # Errors
/// Says what to do.
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

/// Puts the items into `prefix`, and removes files of `old` that are no longer among them. Returns a line for each of these that stays.
///
/// The list has old and new digests until all files have their names, so that an installation that ends in the middle can be
/// repeated or removed.
///
/// # Errors
/// When a file is in the way, or one cannot be written.
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
    let written = items.iter().map(|item| write(&prefix.join(&item.path), &item.content, item.mode));
    written.collect::<Result<Vec<_>>>()?.into_iter().try_for_each(Written::name)?;
    let gone = files(old).into_iter().filter(|path| !items.iter().any(|item| item.path == *path));
    let (_, kept) = remove_files(prefix, gone, old)?;
    new.extend(both.into_iter().filter(|(_, mark)| mark == FOLDER));
    write_list(prefix, &new)?;
    Ok(kept)
}

/// Removes the files of the list, the list, and the folders that were made where nothing else is in them. Returns the number of
/// files that were removed, and a line for each that stays. `command` is this command line.
///
/// # Errors
/// When one cannot be removed; nothing is removed where that is known before.
pub fn remove(prefix: &Path, manifest: &Manifest, command: &str) -> Result<(usize, Vec<String>)> {
    for file in files(manifest).into_iter().map(|path| prefix.join(path)).filter(|file| file.symlink_metadata().is_ok())
    {
        check_writable(file.parent().unwrap_or(prefix), command)?;
    }
    let outcome = remove_files(prefix, files(manifest), manifest)?;
    remove_file(&prefix.join(manifest::PATH))?;
    // A folder comes before those in it. The path of the prefix itself ends in `.`, which rmdir(2) refuses.
    for (folder, _) in manifest.iter().rev().filter(|(_, mark)| mark == FOLDER) {
        // One that is not empty stays.
        let _ = fs::remove_dir(prefix.join(folder).components().collect::<PathBuf>());
    }
    Ok(outcome)
}

fn files(manifest: &Manifest) -> BTreeSet<&str> {
    manifest.iter().filter(|(_, mark)| mark != FOLDER).map(|(path, _)| path.as_str()).collect()
}

fn remove_files<'a>(
    prefix: &Path,
    paths: impl IntoIterator<Item = &'a str>,
    manifest: &Manifest,
) -> Result<(usize, Vec<String>)> {
    let (mut removed, mut kept) = (0, Vec::new());
    for path in paths {
        let file = prefix.join(path);
        match obstacle(prefix, path, manifest, None)? {
            Some(reason) => kept.push(format!("kept {}: it {reason}", file.display())),
            None => removed += usize::from(remove_file(&file)?),
        }
    }
    Ok((removed, kept))
}

/// False where there is no such file.
fn remove_file(file: &Path) -> Result<bool> {
    match fs::remove_file(file) {
        Err(error) if is_absent(&error) => Ok(false),
        other => other.map(|()| true).with_context(|| format!("remove {}", file.display())),
    }
}

/// Returns the reason why a file may be neither replaced nor removed. There is none where the file is absent, or has content that
/// `manifest` lists or that is to be installed.
fn obstacle(prefix: &Path, path: &str, manifest: &Manifest, new: Option<&[u8]>) -> Result<Option<&'static str>> {
    let file = prefix.join(path);
    let about = match file.symlink_metadata() {
        Err(error) if is_absent(&error) => return Ok(None),
        about => about.with_context(|| format!("look at {}", file.display()))?,
    };
    // dpkg may have replaced the file that install had put there.
    if is_of_deb(&file) {
        return Ok(Some("belongs to the Debian package nccl-net-spark"));
    }
    // Install puts no links there, whatever they lead to.
    if about.is_file() {
        let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        if new == Some(&content) || manifest.contains(&(path.to_owned(), digest(&content))) {
            return Ok(None);
        }
    }
    let is_listed = files(manifest).contains(path);
    Ok(Some(if is_listed { "was changed since it was installed" } else { "was not installed by nccl-spark" }))
}

fn is_absent(error: &io::Error) -> bool {
    [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind())
}

fn write_list(prefix: &Path, manifest: &Manifest) -> Result<()> {
    write(&prefix.join(manifest::PATH), manifest::text(manifest).as_bytes(), 0o644)?.name()
}

/// A file that is written and does not have its name yet. Dropping it removes it.
struct Written(NamedTempFile, PathBuf);

fn write(path: &Path, content: &[u8], mode: u32) -> Result<Written> {
    let write = || -> io::Result<NamedTempFile> {
        let mut file = replacement::beside(path)?;
        file.write_all(content)?;
        file.as_file().set_permissions(Permissions::from_mode(mode))?;
        file.as_file().sync_all()?;
        Ok(file)
    };
    let file = write().with_context(|| format!("write {}", path.display()))?;
    Ok(Written(file, path.to_owned()))
}

impl Written {
    /// A running job keeps the file that it has mapped: the new one takes over its name alone.
    fn name(self) -> Result<()> {
        self.0
            .persist(&self.1)
            .map_err(|error| error.error)
            .with_context(|| format!("replace {}", self.1.display()))?;
        Ok(())
    }
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
