//! Files that a package put where they are: its tool removes them, not `uninstall`.

use std::fs;
use std::path::Path;

/// dpkg's list of the package's files, in the root folder that has the /usr with them.
const LIST: &str = "var/lib/dpkg/info/nccl-net-spark.list";
/// The folder that the wheel puts into a Python's site-packages, and a file that no other folder of that name has.
const WHEEL: (&str, &str) = ("nccl_net_spark", "__init__.py");

/// A package that has this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Package {
    Deb,
    Wheel,
}

impl Package {
    /// The package that put `program` there.
    pub fn of(program: &Path) -> Option<Self> {
        if is_of_deb(program) {
            return Some(Self::Deb);
        }
        let folder = program.parent()?.parent()?;
        let is_wheel = folder.ends_with(WHEEL.0) && folder.join(WHEEL.1).is_file();
        is_wheel.then_some(Self::Wheel)
    }

    /// Why `install` refuses, and what to do.
    pub fn no_install(self, program: &Path) -> String {
        format!("{}: there is nothing to install; `nccl-spark env` prints the variables to set", self.owner_of(program))
    }

    /// Why `uninstall` refuses, and what to do.
    pub fn no_uninstall(self, program: &Path) -> String {
        let command = match self {
            Self::Deb => "sudo apt remove nccl-net-spark",
            Self::Wheel => "pip uninstall nccl-net-spark",
        };
        let owner = self.owner_of(program);
        format!("{owner}: remove it with `{command}`; --prefix names a folder that `nccl-spark install` used")
    }

    fn owner_of(self, program: &Path) -> String {
        let package = match self {
            Self::Deb => "Debian package",
            Self::Wheel => "Python package",
        };
        format!("{} belongs to the {package} nccl-net-spark", program.display())
    }
}

/// Whether the Debian package has the file.
pub fn is_of_deb(file: &Path) -> bool {
    // dpkg's list has no path with a link in it, such as /bin for /usr/bin.
    let folder = file.parent().and_then(|folder| folder.canonicalize().ok());
    let (Some(folder), Some(name)) = (folder, file.file_name()) else { return false };
    let file = folder.join(name);
    let mut roots = file.ancestors().filter(|folder| folder.ends_with("usr")).filter_map(Path::parent);
    roots.any(|root| {
        let list = fs::read_to_string(root.join(LIST)).unwrap_or_default();
        list.lines().any(|line| root.join(line.trim_start_matches('/')) == file)
    })
}
