//! The package folders of a Python, derived from files without starting Python.

use crate::commands::doctor::place::Place;
use crate::unique::unique;
use std::path::{Path, PathBuf};

/// Returns the package folders of the Python at `python` in search order, the user's own first.
///
/// # Errors
/// The file does not exist, or is a script that starts another Python.
pub fn packages(place: &Place, python: &Path, home: Option<&str>) -> Result<Vec<PathBuf>, String> {
    let shown = python.display();
    if !place.has(python) {
        return Err(format!("{shown} is not there"));
    }
    if place
        .resolve(python)
        .is_some_and(|file| place.text(file).is_some_and(|text| text.starts_with("#!")))
    {
        return Err(format!(
            "{shown} is a script that starts another Python; name that one with --python"
        ));
    }
    let bin = python.parent().unwrap_or(Path::new("/"));
    let prefix = bin.parent().unwrap_or(Path::new("/"));
    let mut folders = Vec::new();
    let environment = place.text(prefix.join("pyvenv.cfg"));
    if environment.is_none() {
        folders.extend(
            home.into_iter()
                .flat_map(|home| below(place, &Path::new(home).join(".local"))),
        );
    }
    folders.extend(below(place, prefix));
    let setting = |name: &str| {
        let mut lines = environment
            .iter()
            .flat_map(|text| text.lines())
            .filter_map(|line| line.split_once('='));
        lines
            .find(|(key, _)| key.trim() == name)
            .map(|(_, value)| value.trim())
    };
    let base = match (&environment, setting("include-system-site-packages")) {
        (None, _) => Some(prefix),
        (Some(_), Some("true")) => setting("home").and_then(|home| Path::new(home).parent()),
        (Some(_), _) => None,
    };
    if let Some(base) = base {
        // Debian's Python also looks below /usr/local.
        folders.extend(below(place, &base.join("local")));
        folders.extend(below(place, base));
    }
    Ok(unique(folders))
}

fn below(place: &Place, prefix: &Path) -> Vec<PathBuf> {
    let lib = prefix.join("lib");
    let versions = place
        .names(&lib)
        .into_iter()
        .filter(|name| name.starts_with("python3"));
    let folders = versions.flat_map(|version| {
        ["site-packages", "dist-packages"].map(|kind| lib.join(&version).join(kind))
    });
    folders.filter(|folder| place.has(folder)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_virtual_environment_sees_system_packages_only_if_configured() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for path in ["venv/bin/python3", "usr/bin/python3"] {
            write(path, "\u{7f}ELF");
        }
        write(
            "venv/pyvenv.cfg",
            "home = /usr/bin\ninclude-system-site-packages = false\n",
        );
        write("venv/lib/python3.12/site-packages/torch/x", "");
        write("usr/lib/python3/dist-packages/x", "");
        write("usr/local/lib/python3.12/dist-packages/x", "");
        write("home/me/.local/lib/python3.12/site-packages/x", "");
        write("shims/python3", "#!/bin/sh\n");
        let place = Place::new(root.path());
        let found = |python: &str| packages(&place, Path::new(python), Some("/home/me"));
        let names = |python: &str| -> Vec<String> {
            found(python)
                .unwrap()
                .iter()
                .map(|path| path.to_string_lossy().into_owned())
                .collect()
        };
        let venv = "/venv/lib/python3.12/site-packages";
        let local = "/usr/local/lib/python3.12/dist-packages";
        let system = "/usr/lib/python3/dist-packages";
        assert_eq!(names("/venv/bin/python3"), [venv]);
        let own = "/home/me/.local/lib/python3.12/site-packages";
        assert_eq!(names("/usr/bin/python3"), [own, system, local]);
        write(
            "venv/pyvenv.cfg",
            "home = /usr/bin\ninclude-system-site-packages = true\n",
        );
        assert_eq!(names("/venv/bin/python3"), [venv, local, system]);
        assert!(found("/shims/python3").unwrap_err().contains("--python"));
        assert!(found("/none").unwrap_err().contains("/none is not there"));
    }
}
