//! Where the doctor looks: one root, below which the files of a machine lie. For this machine it is `/`. For another one it is a folder
//! with a copy of its files, and what no file says on a live machine (addresses, CUDA's attributes) lies below `answers` there.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// The files of one machine.
#[derive(Debug, Clone)]
pub struct Place {
    root: PathBuf,
}

/// More of a file is not read: everything that the doctor reads as text is small.
const MOST_BYTES: u64 = 1 << 20;

impl Place {
    /// A machine whose files lie below `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Whether it is this machine, of which more can be asked than its files say.
    pub fn is_live(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Where the file of this absolute path is.
    pub fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let path = absolute.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// What a file says, without white space around it; `None` where it is not there or empty.
    ///
    /// # Errors
    /// When it is there and cannot be read.
    pub fn read(&self, absolute: impl AsRef<Path>) -> io::Result<Option<String>> {
        let mut bytes = Vec::new();
        match fs::File::open(self.path(absolute)).and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes)) {
            Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).trim().to_owned()).filter(|text| !text.is_empty())),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What a file says, where it can be read.
    pub fn text(&self, absolute: impl AsRef<Path>) -> Option<String> {
        self.read(absolute).ok().flatten()
    }

    /// The number in a file, where it can be read.
    pub fn number(&self, absolute: impl AsRef<Path>) -> Option<u64> {
        self.text(absolute)?.parse().ok()
    }

    /// The names in a folder, sorted; none where it cannot be read.
    pub fn names(&self, absolute: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(absolute)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// Whether something of this path is there.
    pub fn has(&self, absolute: impl AsRef<Path>) -> bool {
        self.resolve(absolute.as_ref()).is_some_and(|path| self.path(path).exists())
    }

    /// Follows the symbolic links of a path, all below the root; `None` for a loop.
    pub fn resolve(&self, absolute: &Path) -> Option<PathBuf> {
        let mut path = absolute.to_owned();
        // As many as Linux follows (path_resolution(7)).
        for _ in 0..40 {
            let Ok(target) = fs::read_link(self.path(&path)) else { return Some(path) };
            // A copy may have links that name the place where it lies now.
            path = match target.strip_prefix(&self.root) {
                Ok(inside) => Path::new("/").join(inside),
                Err(_) => path.parent().unwrap_or(Path::new("/")).join(target),
            };
        }
        None
    }

    /// Why no library can be loaded from this path, as the beginning of a sentence; `None` where one may be there, or that cannot be
    /// seen.
    pub fn lack(&self, absolute: impl AsRef<Path>) -> Option<&'static str> {
        const NONE: &str = "there is no such file as";
        match fs::metadata(self.path(self.followed(absolute.as_ref())?)) {
            Ok(data) if data.is_file() => None,
            Ok(_) => Some("there is something else than a regular file at"),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Some(NONE),
            Err(_) => None,
        }
    }

    /// Device and inode of the file that a path leads to; `None` where there is none, or it cannot
    /// be seen.
    pub fn identity(&self, absolute: &Path) -> Option<(u64, u64)> {
        let data = fs::metadata(self.path(self.followed(absolute)?)).ok()?;
        Some((data.dev(), data.ino()))
    }

    /// A path without the symbolic links of its folders, which lead to places below the root; `None` for a loop.
    fn followed(&self, absolute: &Path) -> Option<PathBuf> {
        let mut path = PathBuf::from("/");
        for part in absolute.components() {
            path = match part {
                Component::ParentDir => path.parent().unwrap_or(Path::new("/")).to_owned(),
                other => self.resolve(&path.join(other))?,
            };
        }
        Some(path)
    }

    /// Opens a device file for reading and writing, as a program that uses it does, and closes it.
    ///
    /// # Errors
    /// Why it cannot be opened. Of a copied machine that is what `answers/open/NAME` says: `EACCES` or `EPERM`.
    pub fn try_device(&self, absolute: &Path) -> io::Result<()> {
        if !self.is_live() {
            let name = absolute.file_name().unwrap_or_default();
            match self.text(Path::new("/answers/open").join(name)).as_deref() {
                Some("EACCES") => return Err(io::Error::from_raw_os_error(nix::libc::EACCES)),
                Some("EPERM") => return Err(io::Error::from_raw_os_error(nix::libc::EPERM)),
                _ => {}
            }
        }
        fs::OpenOptions::new().read(true).write(true).open(self.path(absolute)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_followed_below_the_root() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::new(root.path());
        fs::create_dir_all(root.path().join("usr/lib")).unwrap();
        fs::write(root.path().join("usr/lib/libx.so.2.1"), "x\n").unwrap();
        symlink("libx.so.2.1", root.path().join("usr/lib/libx.so.2")).unwrap();
        symlink("/usr/lib/libx.so.2", root.path().join("x")).unwrap();
        symlink("loop", root.path().join("loop")).unwrap();
        assert_eq!(place.resolve(Path::new("/x")), Some("/usr/lib/libx.so.2.1".into()));
        assert_eq!(place.text("/usr/lib/libx.so.2.1").as_deref(), Some("x"));
        assert!(place.has("/x") && !place.has("/y") && !place.has("/loop"));
        assert_eq!(place.resolve(Path::new("/loop")), None);
        assert!(place.read("/usr/lib").is_err());
        symlink("/usr", root.path().join("opt")).unwrap();
        assert_eq!(place.lack("/opt/lib/../lib/libx.so.2"), None);
        let identity = |path: &str| place.identity(Path::new(path));
        assert_eq!(identity("/opt/lib/libx.so.2"), identity("/usr/lib/libx.so.2.1"));
        assert!(identity("/x").is_some() && identity("/y").is_none() && identity("/loop").is_none());
        assert!(place.lack("/opt/lib/liby.so").unwrap().contains("no such file"));
        assert!(place.lack("/opt/lib").unwrap().contains("regular file"));
        assert_eq!(place.lack("/loop"), None);
        assert!(place.read("/none").unwrap().is_none());
    }
}
