//! The files of a machine below a root folder: `/` for this machine, or a folder with a copy of
//! another machine's files. Some facts of a live machine are in no file, such as its addresses and
//! CUDA's attributes. A copy has these facts in files below `answers`.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

#[derive(Debug, Clone)]
pub struct Place {
    root: PathBuf,
}

/// Maximum number of bytes that are read of a file. The files that the doctor reads as text are
/// shorter.
const MOST_BYTES: u64 = 1 << 20;

impl Place {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn is_live(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Returns the location of an absolute path below the root.
    pub fn path(&self, absolute: impl AsRef<Path>) -> PathBuf {
        let path = absolute.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Reads a file and trims its text. Returns `None` for an absent or empty file.
    ///
    /// # Errors
    /// The file exists but cannot be read.
    pub fn read(&self, absolute: impl AsRef<Path>) -> io::Result<Option<String>> {
        let mut bytes = Vec::new();
        match fs::File::open(self.path(absolute))
            .and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes))
        {
            Ok(_) => Ok(Some(String::from_utf8_lossy(&bytes).trim().to_owned())
                .filter(|text| !text.is_empty())),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads a file like [`Self::read`], but returns `None` for an error.
    pub fn text(&self, absolute: impl AsRef<Path>) -> Option<String> {
        self.read(absolute).ok().flatten()
    }

    pub fn number(&self, absolute: impl AsRef<Path>) -> Option<u64> {
        self.text(absolute)?.parse().ok()
    }

    /// Returns the sorted names in a folder. Empty if the folder cannot be read.
    pub fn names(&self, absolute: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(absolute))
            .into_iter()
            .flatten()
            .flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    /// Returns true if the path leads to an existing file or folder. Follows links.
    pub fn has(&self, absolute: impl AsRef<Path>) -> bool {
        self.resolve(absolute.as_ref())
            .is_some_and(|path| self.path(path).exists())
    }

    /// Follows the symbolic links of a path. Every link leads to a path below the root, also an
    /// absolute link. Returns `None` for a loop.
    pub fn resolve(&self, absolute: &Path) -> Option<PathBuf> {
        // Linux follows at most 40 links (path_resolution(7)).
        self.followed(absolute, 40)
    }

    fn followed(&self, absolute: &Path, links_left: u32) -> Option<PathBuf> {
        let mut path = PathBuf::from("/");
        for part in absolute.components() {
            path = match part {
                Component::ParentDir => path.parent().unwrap_or(Path::new("/")).to_owned(),
                other => path.join(other),
            };
            if let Ok(target) = fs::read_link(self.path(&path)) {
                // In a copy, the target of a link may begin with the path of the copy's root
                // folder.
                let target = match target.strip_prefix(&self.root) {
                    Ok(inside) => Path::new("/").join(inside),
                    Err(_) => path.parent().unwrap_or(Path::new("/")).join(target),
                };
                path = self.followed(&target, links_left.checked_sub(1)?)?;
            }
        }
        Some(path)
    }

    /// Returns the reason why no library can be loaded from this path, as in `file not found:`.
    /// The doctor's texts have the path after the reason. Returns `None` if the path has a file or
    /// cannot be examined.
    pub fn missing_reason(&self, absolute: impl AsRef<Path>) -> Option<&'static str> {
        match fs::metadata(self.path(self.resolve(absolute.as_ref())?)) {
            Ok(data) if data.is_file() => None,
            Ok(_) => Some("not a regular file:"),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Some("file not found:")
            }
            Err(_) => None,
        }
    }

    /// Opens a device file for reading and writing, as libibverbs does, and closes it.
    ///
    /// # Errors
    /// The file cannot be opened. For a copied machine, `answers/open/NAME` has the error: `EACCES`
    /// or `EPERM`.
    pub fn try_device(&self, absolute: &Path) -> io::Result<()> {
        if !self.is_live() {
            let name = absolute.file_name().unwrap_or_default();
            match self.text(Path::new("/answers/open").join(name)).as_deref() {
                Some("EACCES") => return Err(io::Error::from_raw_os_error(nix::libc::EACCES)),
                Some("EPERM") => return Err(io::Error::from_raw_os_error(nix::libc::EPERM)),
                _ => {}
            }
        }
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path(absolute))
            .map(drop)
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
        assert_eq!(
            place.resolve(Path::new("/x")),
            Some("/usr/lib/libx.so.2.1".into())
        );
        assert_eq!(place.text("/usr/lib/libx.so.2.1").as_deref(), Some("x"));
        assert!(place.has("/x") && !place.has("/y") && !place.has("/loop"));
        assert_eq!(place.resolve(Path::new("/loop")), None);
        assert!(place.read("/usr/lib").is_err());
        symlink("/usr", root.path().join("opt")).unwrap();
        assert_eq!(place.missing_reason("/opt/lib/../lib/libx.so.2"), None);
        let linked = Path::new("/opt/lib/libx.so.2");
        let direct = Path::new("/usr/lib/libx.so.2.1");
        assert_eq!(place.resolve(linked).as_deref(), Some(direct));
        assert!(
            place
                .missing_reason("/opt/lib/liby.so")
                .unwrap()
                .contains("not found")
        );
        assert!(
            place
                .missing_reason("/opt/lib")
                .unwrap()
                .contains("regular file")
        );
        assert_eq!(place.missing_reason("/loop"), None);
        assert!(place.read("/none").unwrap().is_none());
    }
}
