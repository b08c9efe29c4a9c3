//! The dynamic loader's choice of libraries (ld.so(8)), derived from files without loading any.

use super::elf::{self, Library};
use crate::commands::doctor::place::Place;
use std::path::{Component, Path, PathBuf};

#[derive(Debug)]
pub struct Loader<'a> {
    place: &'a Place,
    library_path: Vec<String>,
    folders: Vec<String>,
}

impl<'a> Loader<'a> {
    pub fn new(place: &'a Place, library_path: &str) -> Self {
        let library_path = library_path
            .split([':', ';'])
            .filter(|folder| !folder.is_empty())
            .map(str::to_owned)
            .collect();
        let mut folders = Vec::new();
        configured(place, Path::new("/etc/ld.so.conf"), &mut folders, 0);
        let usual = ["/lib", "/usr/lib", "/lib64", "/usr/lib64"];
        let multiarch = ["aarch64-linux-gnu", "x86_64-linux-gnu"];
        let multiarch = multiarch
            .iter()
            .flat_map(|triplet| [format!("/lib/{triplet}"), format!("/usr/lib/{triplet}")]);
        folders.extend(multiarch.chain(usual.iter().map(|folder| (*folder).to_owned())));
        folders.retain(|folder| place.has(folder));
        Self {
            place,
            library_path,
            folders,
        }
    }

    pub fn folders(&self) -> &[String] {
        &self.folders
    }

    /// Finds the library `name`. `by` is the file that needs this library, if any: its path and its
    /// contents. The search path in `by` also counts.
    pub fn find(&self, name: &str, by: Option<(&Path, &Library)>) -> Option<PathBuf> {
        if name.contains('/') {
            return Some(PathBuf::from(name)).filter(|path| self.place.has(path));
        }
        let own = |list: fn(&Library) -> Option<&str>| -> Vec<String> {
            let Some((path, list)) = by.and_then(|(path, library)| Some((path, list(library)?)))
            else {
                return vec![];
            };
            let origin = path.parent().unwrap_or(Path::new("/")).to_string_lossy();
            let folders = list.split(':').filter(|folder| !folder.is_empty());
            folders
                .map(|folder| {
                    folder
                        .replace("${ORIGIN}", &origin)
                        .replace("$ORIGIN", &origin)
                })
                .collect()
        };
        let runpath = own(|library| library.runpath.as_deref());
        let rpath = own(|library| {
            library
                .rpath
                .as_deref()
                .filter(|_| library.runpath.is_none())
        });
        let folders = rpath
            .iter()
            .chain(&self.library_path)
            .chain(&runpath)
            .chain(&self.folders);
        folders
            .map(|folder| normal(&Path::new(folder).join(name)))
            .find(|path| self.place.has(path))
    }

    /// Reads the library at `path`, which may be a link.
    ///
    /// # Errors
    /// The path's links form a loop, or [`elf::read`] fails.
    pub fn read(&self, path: &Path) -> Result<Library, String> {
        let file = self
            .place
            .resolve(path)
            .ok_or("its symbolic links form a loop")?;
        elf::read(&self.place.path(file))
    }

    pub fn resolve(&self, path: &Path) -> PathBuf {
        self.place.resolve(path).unwrap_or_else(|| path.to_owned())
    }
}

fn normal(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(clean.pop()),
            Component::CurDir => {}
            other => clean.push(other),
        }
    }
    clean
}

/// Adds the folders that `file` lists, and those of the files that it includes. The first `file` is
/// /etc/ld.so.conf, from which the loader's cache is made.
fn configured(place: &Place, file: &Path, folders: &mut Vec<String>, depth: u8) {
    // Files may include each other in a cycle, so the depth is limited.
    if depth > 4 {
        return;
    }
    for line in place.text(file).unwrap_or_default().lines().map(str::trim) {
        match line.strip_prefix("include ").map(str::trim) {
            Some(pattern) => {
                let pattern = file.with_file_name(pattern);
                let folder = pattern.parent().unwrap_or(Path::new("/"));
                let suffix = pattern
                    .to_string_lossy()
                    .rsplit(['/', '*'])
                    .next()
                    .unwrap_or_default()
                    .to_owned();
                for name in place
                    .names(folder)
                    .iter()
                    .filter(|name| name.ends_with(&suffix))
                {
                    configured(place, &folder.join(name), folders, depth + 1);
                }
            }
            None if line.starts_with('/') => folders.push(line.to_owned()),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn libraries_are_looked_for_in_the_loaders_order() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n");
        write("etc/ld.so.conf.d/cuda.conf", "/usr/local/cuda/lib64\n");
        write("usr/local/cuda/lib64/liba.so", "");
        write("usr/lib/aarch64-linux-gnu/liba.so", "");
        write("usr/lib/libb.so", "");
        write("opt/x/liba.so", "");
        write("venv/nvidia/nccl/lib/liba.so", "");
        write("venv/torch/lib/libtorch.so", "");
        let place = Place::new(root.path());
        let found = |library_path: &str, name: &str, by: Option<&Library>| {
            let by = by.map(|library| (Path::new("/venv/torch/lib/libtorch.so"), library));
            Loader::new(&place, library_path)
                .find(name, by)
                .map(|path| path.to_string_lossy().into_owned())
        };
        assert_eq!(
            found("", "liba.so", None).as_deref(),
            Some("/usr/local/cuda/lib64/liba.so")
        );
        assert_eq!(
            found("", "libb.so", None).as_deref(),
            Some("/usr/lib/libb.so")
        );
        assert_eq!(
            found("/none:/opt/x", "liba.so", None).as_deref(),
            Some("/opt/x/liba.so")
        );
        let own = Some("$ORIGIN/../../nvidia/nccl/lib".to_owned());
        let old = Library {
            rpath: own.clone(),
            ..Library::default()
        };
        assert_eq!(
            found("/opt/x", "liba.so", Some(&old)).as_deref(),
            Some("/venv/nvidia/nccl/lib/liba.so")
        );
        let new = Library {
            runpath: own.clone(),
            rpath: own,
            ..Library::default()
        };
        assert_eq!(
            found("/opt/x", "liba.so", Some(&new)).as_deref(),
            Some("/opt/x/liba.so")
        );
        assert_eq!(
            found("", "liba.so", Some(&new)).as_deref(),
            Some("/venv/nvidia/nccl/lib/liba.so")
        );
        assert_eq!(
            found("", "/opt/x/liba.so", None).as_deref(),
            Some("/opt/x/liba.so")
        );
        assert_eq!(found("", "libc.so", None), None);
    }
}
