//! The libraries of a job: libnccl, the network plugin, libibverbs with its provider, and glibc.

use super::elf::Library;
use super::loader::Loader;
use super::process::Process;
use super::python;
use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use host::nic::PROVIDER;
use std::path::{Path, PathBuf};

/// The facts that decide which libraries a job loads.
pub struct Job<'a> {
    /// Returns the value of a variable, from the environment or NCCL's files.
    pub value: &'a dyn Fn(&str) -> Option<String>,
    pub python: Option<PathBuf>,
    pub program: Option<PathBuf>,
    /// The plugin that belongs to nccl-spark itself, if found. (`program` is the job's program.)
    pub own_plugin: Option<PathBuf>,
    pub process: Option<Process>,
}

#[derive(Debug, Clone, Default)]
pub struct Libraries {
    pub nccl: Vec<NcclFile>,
    pub plugin: Option<Plugin>,
    pub copies: Vec<Plugin>,
    pub verbs: Option<PathBuf>,
    pub mlx5_provider: Option<PathBuf>,
    pub glibc: Option<(u32, u32)>,
    pub process: Option<Process>,
}

#[derive(Debug, Clone)]
pub struct NcclFile {
    pub path: PathBuf,
    /// The programs and variables that load the file, as in `process 4711` or `LD_PRELOAD`.
    pub by: String,
    pub library: Result<Library, String>,
}

#[derive(Debug, Clone)]
pub struct Plugin {
    pub path: PathBuf,
    pub library: Library,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginKind {
    Ours,
    /// The plugin of HPC-X, included in NGC images.
    HpcX,
    Other,
}

impl Plugin {
    pub fn kind(&self) -> PluginKind {
        let has = |mark: &str| self.library.texts.iter().any(|text| text.starts_with(mark));
        match () {
            () if has("spark-rails") => PluginKind::Ours,
            () if has("IBext") || self.path.to_string_lossy().contains("hpcx") => PluginKind::HpcX,
            () => PluginKind::Other,
        }
    }

    fn read(loader: &Loader, path: PathBuf) -> Option<Self> {
        Some(Self {
            library: loader.read(&path).ok()?,
            path,
        })
    }
}

const NCCL: &str = "libnccl.so.2";

pub fn libraries(place: &Place, job: Job<'_>, not_seen: &mut Vec<NotSeen>) -> Libraries {
    let loader = Loader::new(place, &job.text("LD_LIBRARY_PATH"));
    let mapped = job
        .process
        .as_ref()
        .and_then(|process| process.mapped("libibverbs.so").into_iter().next());
    let verbs = job
        .filled("NCCL_IBVERBS_LIB")
        .unwrap_or_else(|| "libibverbs.so.1".to_owned());
    let libc = loader.find("libc.so.6", None);
    Libraries {
        nccl: nccl(place, &loader, &job, not_seen),
        plugin: plugin(&loader, &job),
        copies: copies(place, &loader, &job, not_seen),
        verbs: mapped.or_else(|| loader.find(&verbs, None)),
        mlx5_provider: mlx5_provider(place, &loader),
        glibc: libc
            .and_then(|path| loader.read(&path).ok())
            .and_then(|library| library.libc_version()),
        process: job.process,
    }
}

impl Job<'_> {
    fn text(&self, name: &str) -> String {
        (self.value)(name).unwrap_or_default()
    }

    fn filled(&self, name: &str) -> Option<String> {
        (self.value)(name).filter(|value| !value.is_empty())
    }

    fn packages(&self, place: &Place, python: &Path) -> Result<Vec<PathBuf>, String> {
        python::packages(place, python, (self.value)("HOME").as_deref())
    }
}

fn nccl(place: &Place, loader: &Loader, job: &Job, not_seen: &mut Vec<NotSeen>) -> Vec<NcclFile> {
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    if let Some(process) = &job.process {
        found.extend(
            process
                .mapped("libnccl.so")
                .into_iter()
                .map(|path| (path, format!("process {}", process.pid))),
        );
    } else {
        let preload = job.text("LD_PRELOAD");
        let preloaded = preload
            .split([':', ' '])
            .filter(|name| name.contains("libnccl.so"));
        found.extend(preloaded.map(|name| (PathBuf::from(name), "LD_PRELOAD".to_owned())));
        found.extend(
            job.filled("VLLM_NCCL_SO_PATH")
                .map(|name| (name.into(), "VLLM_NCCL_SO_PATH".to_owned())),
        );
        if let Some(program) = &job.program {
            let shown = program.display().to_string();
            match loader.read(program) {
                Ok(library) => found.extend(
                    loader
                        .find(NCCL, Some((program, &library)))
                        .map(|path| (path, shown)),
                ),
                Err(why) => not_seen.push(NotSeen::new(format!("what {shown} would load"), why)),
            }
        } else if let Some(python) = &job.python {
            match job.packages(place, python) {
                Ok(folders) => found.extend(of_packages(place, loader, &folders, python)),
                Err(why) => not_seen.push(NotSeen::new("the libnccl that Python would load", why)),
            }
        }
        found.extend(
            loader
                .find(NCCL, None)
                .map(|path| (path, "the dynamic loader".to_owned())),
        );
    }
    let mut files: Vec<NcclFile> = Vec::new();
    for (path, by) in found {
        let path = loader.resolve(&path);
        match files.iter_mut().find(|file| file.path == path) {
            Some(file) => file.by = format!("{}, {by}", file.by),
            None => files.push(NcclFile {
                library: loader.read(&path),
                path,
                by,
            }),
        }
    }
    files
}

/// Finds the libnccl that PyTorch loads, by the search path in PyTorch's library. Without PyTorch,
/// finds the libnccl of NVIDIA's wheel.
fn of_packages(
    place: &Place,
    loader: &Loader,
    folders: &[PathBuf],
    python: &Path,
) -> Option<(PathBuf, String)> {
    let torch = folders
        .iter()
        .map(|folder| folder.join("torch/lib/libtorch_cuda.so"))
        .find(|path| place.has(path));
    if let Some(torch) = torch {
        let library = loader.read(&torch).ok()?;
        return Some((
            loader.find(NCCL, Some((&torch, &library)))?,
            format!("PyTorch of {}", python.display()),
        ));
    }
    let wheel = folders
        .iter()
        .map(|folder| folder.join("nvidia/nccl/lib").join(NCCL))
        .find(|path| place.has(path))?;
    Some((wheel, format!("NVIDIA's wheel of {}", python.display())))
}

/// Finds the network plugin that a process has mapped, or that NCCL would load. NCCL loads the
/// first existing file that `NCCL_NET_PLUGIN` names, or `libnccl-net.so` if this variable is not
/// set (`openPluginLib` in NCCL's plugin_open.cc).
fn plugin(loader: &Loader, job: &Job) -> Option<Plugin> {
    if let Some(process) = &job.process {
        let is_network = |path: &PathBuf| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().contains("net"))
        };
        let mapped = process.mapped("libnccl").into_iter().filter(is_network);
        return mapped.filter_map(|path| Plugin::read(loader, path)).next();
    }
    let list = (job.value)("NCCL_NET_PLUGIN").unwrap_or_else(|| "libnccl-net.so".to_owned());
    list.split(',')
        .filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("none"))
        .find_map(|name| {
            let long = format!("libnccl-net-{name}.so");
            Plugin::read(
                loader,
                loader
                    .find(name, None)
                    .or_else(|| loader.find(&long, None))?,
            )
        })
}

/// Finds copies of our plugin ([`PluginKind::Ours`]): beside nccl-spark, in the loader's folders
/// and Python's packages, and at paths that the job's variables name.
fn copies(place: &Place, loader: &Loader, job: &Job, not_seen: &mut Vec<NotSeen>) -> Vec<Plugin> {
    const NAME: &str = "libnccl-net-spark.so";
    let list = job.text("NCCL_NET_PLUGIN");
    let library_path = job.text("LD_LIBRARY_PATH");
    let mut candidates: Vec<PathBuf> = job.own_plugin.iter().cloned().collect();
    candidates.extend(
        list.split(',')
            .filter(|name| name.contains('/'))
            .map(PathBuf::from),
    );
    candidates.push(PathBuf::from("/usr/local/lib").join(NAME));
    let folders = loader
        .folders()
        .iter()
        .map(String::as_str)
        .chain(library_path.split(':'));
    candidates.extend(
        folders
            .flat_map(|folder| [NAME, "libnccl-net.so"].map(|name| Path::new(folder).join(name))),
    );
    let packages = job
        .python
        .iter()
        .flat_map(|python| job.packages(place, python).unwrap_or_default());
    candidates.extend(packages.map(|folder| folder.join("nccl_net_spark/lib").join(NAME)));
    let mut found: Vec<Plugin> = Vec::new();
    for candidate in candidates
        .iter()
        .filter(|path| path.is_absolute() && place.has(path))
    {
        let path = loader.resolve(candidate);
        if found.iter().any(|known| known.path == path) {
            continue;
        }
        let shown = path.display().to_string();
        match Plugin::read(loader, path) {
            Some(plugin) if plugin.kind() == PluginKind::Ours => found.push(plugin),
            Some(_) => {}
            None => not_seen.push(NotSeen::new(shown, "it is not a readable ELF file")),
        }
    }
    found
}

/// Finds the NIC's [`PROVIDER`] where rdma-core installs it: in `libibverbs` below the loader's
/// folders.
fn mlx5_provider(place: &Place, loader: &Loader) -> Option<PathBuf> {
    let folders = loader
        .folders()
        .iter()
        .map(|folder| Path::new(folder).join("libibverbs"));
    folders
        .flat_map(|folder| {
            place
                .names(&folder)
                .into_iter()
                .map(move |name| folder.join(name))
        })
        .find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(PROVIDER))
        })
}
