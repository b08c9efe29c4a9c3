//! Recognises files of packages. The package's tool must remove them, not `uninstall`.

use std::fs;
use std::path::Path;

/// dpkg's list of the package's files, relative to the folder that contains `usr`.
const LIST: &str = "var/lib/dpkg/info/nccl-net-spark.list";
/// Name of the wheel's folder in site-packages, and of a file in the wheel's folder. Other folders
/// named `nccl_net_spark` lack this file.
const WHEEL: (&str, &str) = ("nccl_net_spark", "__init__.py");

/// Returns the kind of package that installed `program`, and the command that removes the package.
pub fn package_of(program: &Path) -> Option<(&'static str, &'static str)> {
    if is_of_deb(program) {
        return Some(("Debian package", "sudo apt remove nccl-net-spark"));
    }
    let folder = program.parent()?.parent()?;
    let is_wheel = folder.ends_with(WHEEL.0) && folder.join(WHEEL.1).is_file();
    is_wheel.then_some(("Python package", "pip uninstall nccl-net-spark"))
}

pub fn is_of_deb(file: &Path) -> bool {
    // dpkg's list has paths without links (/usr/bin, never /bin), so the folder's links are
    // resolved.
    let folder = file.parent().and_then(|folder| folder.canonicalize().ok());
    let (Some(folder), Some(name)) = (folder, file.file_name()) else {
        return false;
    };
    let file = folder.join(name);
    let mut roots = file
        .ancestors()
        .filter(|folder| folder.ends_with("usr"))
        .filter_map(Path::parent);
    roots.any(|root| {
        let list = fs::read_to_string(root.join(LIST)).unwrap_or_default();
        list.lines()
            .any(|line| root.join(line.trim_start_matches('/')) == file)
    })
}
