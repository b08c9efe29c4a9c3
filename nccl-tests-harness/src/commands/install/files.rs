//! Whose a file is, and replacing it in one step.

use super::bundle::Item;
use super::manifest::{self, Manifest, digest};
use crate::places;
use anyhow::{Context, Result, bail};
use nix::unistd::{AccessFlags, eaccess, geteuid};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Whose a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// There is none.
    Absent,
    /// Listed, and as it was installed.
    Ours,
    /// Listed, and not as it was installed.
    Changed,
    /// Not listed.
    Foreign,
}

/// What [`put`] did.
pub struct Put {
    /// Files of the earlier version that this one does not have, and that were changed.
    pub kept: Vec<PathBuf>,
}

const FOLDER_MODE: u32 = 0o755;
/// Names that the plugin has and no other library: of a version of NCCL's interface, and of a setting.
const PLUGIN_MARKS: [&[u8]; 2] = [b"ncclNetPlugin_v8", b"NCCL_SPARK_SETTINGS_FILE"];

/// Whose the file `path` of `prefix` is, by what `manifest` lists.
pub fn state(prefix: &Path, path: &str, manifest: &Manifest) -> Result<State> {
    let file = prefix.join(path);
    let about = match file.symlink_metadata() {
        Ok(about) => about,
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(State::Absent);
        }
        Err(error) => return Err(error).with_context(|| format!("look at {}", file.display())),
    };
    if !manifest.files.contains_key(path) {
        return Ok(State::Foreign);
    }
    // A link is not what was installed, whatever it leads to.
    if !about.is_file() {
        return Ok(State::Changed);
    }
    let content = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
    Ok(if manifest.has(path, &digest(&content)) { State::Ours } else { State::Changed })
}

/// Whether the file has the content that is to be installed: nothing is lost then.
pub fn is_same(file: &Path, item: &Item) -> bool {
    let is_file = file.symlink_metadata().is_ok_and(|about| about.is_file());
    is_file && fs::read(file).is_ok_and(|content| content == item.content)
}

/// What `install` put into `prefix` before it kept a list: the plugin alone. The file counts as that if it has the names that only this
/// plugin has.
pub fn early_plugin(prefix: &Path) -> Option<Manifest> {
    let file = prefix.join(places::PLUGIN);
    let is_file = file.symlink_metadata().is_ok_and(|about| about.is_file());
    let content = fs::read(&file).ok().filter(|_| is_file && !prefix.join(manifest::PATH).exists())?;
    let has = |mark: &[u8]| content.windows(mark.len()).any(|part| part == mark);
    if !PLUGIN_MARKS.into_iter().all(has) {
        return None;
    }
    let mut manifest = Manifest::default();
    manifest.add(places::PLUGIN, &digest(&content));
    Some(manifest)
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

/// Puts the items into `prefix`, and removes files of `old` that are no longer among them.
///
/// Every file is first written whole under another name. The list then has old and new digests until all have their names, so that an
/// installation that ends in the middle can be repeated or removed.
pub fn put(prefix: &Path, items: &[Item], old: Manifest) -> Result<Put> {
    let mut new = Manifest { folders: old.folders.clone(), ..Manifest::default() };
    let mut staged = stage(prefix, items, &mut new).inspect_err(|_| {
        for folder in new.folders.iter().rev().filter(|folder| !old.folders.contains(*folder)) {
            let _ = fs::remove_dir(below(prefix, folder));
        }
    })?;
    let mut both = new.clone();
    for (path, digests) in &old.files {
        digests.iter().for_each(|digest| both.add(path, digest));
    }
    write_manifest(prefix, &mut both)?;
    staged.name_all()?;
    let mut kept = Vec::new();
    for path in old.files.keys().filter(|path| !new.files.contains_key(*path)) {
        let file = prefix.join(path);
        match state(prefix, path, &old)? {
            State::Ours => fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?,
            State::Absent => {}
            State::Changed | State::Foreign => kept.push(file),
        }
    }
    new.folders = both.folders;
    write_manifest(prefix, &mut new)?;
    Ok(Put { kept })
}

fn stage(prefix: &Path, items: &[Item], new: &mut Manifest) -> Result<Staged> {
    let mut staged = Staged::default();
    for item in items {
        staged.write(prefix, &item.path, &item.content, item.mode, new)?;
        new.add(&item.path, &digest(&item.content));
    }
    Ok(staged)
}

fn write_manifest(prefix: &Path, manifest: &mut Manifest) -> Result<()> {
    let mut staged = Staged::default();
    make_folder(prefix, manifest::PATH, manifest)?;
    let text = manifest.text(env!("PROGRAM_VERSION"));
    staged.write(prefix, manifest::PATH, text.as_bytes(), 0o644, manifest)?;
    staged.name_all()
}

/// Removes the list, and the folders that were made if nothing else is in them.
pub fn remove_manifest(prefix: &Path, manifest: &Manifest) -> Result<()> {
    let file = prefix.join(manifest::PATH);
    match fs::remove_file(&file) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("remove {}", file.display()));
        }
        _ => {}
    }
    // The deepest first: a folder comes before those in it.
    for folder in manifest.folders.iter().rev() {
        // One that is not empty stays.
        let _ = fs::remove_dir(below(prefix, folder));
    }
    Ok(())
}

/// The folder of the list; `.` is the prefix.
fn below(prefix: &Path, folder: &str) -> PathBuf {
    if folder == "." { prefix.to_owned() } else { prefix.join(folder) }
}

/// Files that are written and do not have their names yet. Dropping it removes them.
#[derive(Default)]
struct Staged(Vec<(PathBuf, PathBuf)>);

impl Staged {
    fn write(&mut self, prefix: &Path, path: &str, content: &[u8], mode: u32, manifest: &mut Manifest) -> Result<()> {
        make_folder(prefix, path, manifest)?;
        let target = prefix.join(path);
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let part = target.with_file_name(format!(".{name}.{}", std::process::id()));
        self.0.push((part.clone(), target));
        let write = || -> io::Result<()> {
            let mut file = File::create(&part)?;
            file.write_all(content)?;
            file.set_permissions(Permissions::from_mode(mode))?;
            file.sync_all()
        };
        write().with_context(|| format!("write {}", part.display()))
    }

    /// A running job keeps the file that it has mapped: the new one takes over its name alone.
    fn name_all(&mut self) -> Result<()> {
        while let Some((part, target)) = self.0.first() {
            fs::rename(part, target).with_context(|| format!("replace {}", target.display()))?;
            self.0.remove(0);
        }
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        for (part, _) in &self.0 {
            let _ = fs::remove_file(part);
        }
    }
}

/// Makes the folder of the file `path`, and notes what had to be made for it.
fn make_folder(prefix: &Path, path: &str, manifest: &mut Manifest) -> Result<()> {
    let folder = Path::new(path).parent().unwrap_or(Path::new(""));
    if prefix.join(folder).is_dir() {
        return Ok(());
    }
    if let Some(above) = prefix.parent() {
        fs::create_dir_all(above).with_context(|| format!("make {}", above.display()))?;
    }
    let mut relative: Vec<&Path> = folder.ancestors().collect();
    relative.reverse();
    for folder in relative {
        let whole = prefix.join(folder);
        match DirBuilder::new().create(&whole) {
            Ok(()) => {
                // Whatever the umask of root's shell is: the files are for everybody.
                let mode = Permissions::from_mode(FOLDER_MODE);
                fs::set_permissions(&whole, mode).with_context(|| format!("make {}", whole.display()))?;
                let name = if folder.as_os_str().is_empty() { "." } else { folder.to_str().unwrap_or(".") };
                manifest.folders.insert(name.to_owned());
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| format!("make {}", whole.display())),
        }
    }
    Ok(())
}
