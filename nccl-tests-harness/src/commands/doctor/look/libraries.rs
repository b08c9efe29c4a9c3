//! The libraries of a job: which libnccl, which network plugin, libibverbs with its provider, glibc.

use super::elf::Library;
use super::loader::Loader;
use super::process::Process;
use super::python;
use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use std::path::{Path, PathBuf};

/// What decides which libraries a process loads.
#[derive(Debug, Clone, Default)]
pub struct Loaded {
    /// `LD_LIBRARY_PATH`.
    pub library_path: String,
    /// `LD_PRELOAD`.
    pub preload: String,
    /// `VLLM_NCCL_SO_PATH`.
    pub vllm_nccl: Option<String>,
    /// `NCCL_NET_PLUGIN`, where it is set.
    pub net_plugin: Option<String>,
    /// The verbs library's name.
    pub verbs_library: String,
    /// The user's home.
    pub home: Option<String>,
    /// The Python that is asked about.
    pub python: Option<PathBuf>,
    /// The program that is asked about.
    pub program: Option<PathBuf>,
    /// The plugin that belongs to this command line.
    pub own_plugin: Option<PathBuf>,
    /// The running process that is asked about.
    pub process: Option<Process>,
}

/// What was found.
#[derive(Debug, Clone, Default)]
pub struct Libraries {
    /// Every libnccl that would be loaded, or is, with how.
    pub nccl: Vec<NcclFile>,
    /// The network plugin that NCCL would load.
    pub plugin: Option<Plugin>,
    /// Every copy of this plugin, each file once.
    pub copies: Vec<Plugin>,
    /// libibverbs.
    pub verbs: Option<PathBuf>,
    /// mlx5's provider for libibverbs.
    pub mlx5_provider: Option<PathBuf>,
    /// glibc's version.
    pub glibc: Option<(u32, u32)>,
    /// The process that was asked about.
    pub process: Option<Process>,
}

/// A libnccl.
#[derive(Debug, Clone)]
pub struct NcclFile {
    /// Where it is.
    pub path: PathBuf,
    /// Who loads it: "the process", "torch", `LD_PRELOAD` ...
    pub by: String,
    /// What it says of itself, or why it cannot be read.
    pub library: Result<Library, String>,
}

/// A network plugin.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// Where it is.
    pub path: PathBuf,
    /// What it is.
    pub kind: PluginKind,
    /// Its build id.
    pub build_id: String,
    /// The glibc that it needs.
    pub glibc: Option<(u32, u32)>,
}

/// What a network plugin is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PluginKind {
    /// This one.
    Ours,
    /// HPC-X's, which NGC images have.
    HpcX,
    /// Another one.
    Other,
}

const NCCL: &str = "libnccl.so.2";

/// Looks at the libraries of a job.
pub fn libraries(place: &Place, loaded: &Loaded, not_seen: &mut Vec<NotSeen>) -> Libraries {
    let loader = Loader::new(place, &loaded.library_path);
    let verbs = match &loaded.process {
        Some(process) => process.mapped("libibverbs.so").into_iter().next(),
        None => None,
    };
    let libc = loader.find("libc.so.6", None);
    Libraries {
        nccl: nccl(place, &loader, loaded, not_seen),
        plugin: plugin(&loader, loaded),
        copies: copies(place, &loader, loaded, not_seen),
        verbs: verbs.or_else(|| loader.find(&loaded.verbs_library, None)),
        mlx5_provider: mlx5_provider(place, &loader),
        glibc: libc.and_then(|path| loader.read(&path).ok()).and_then(|library| library.libc_version()),
        process: loaded.process.clone(),
    }
}

fn nccl(place: &Place, loader: &Loader, loaded: &Loaded, not_seen: &mut Vec<NotSeen>) -> Vec<NcclFile> {
    let mut found: Vec<(PathBuf, String)> = Vec::new();
    if let Some(process) = &loaded.process {
        found.extend(process.mapped("libnccl.so").into_iter().map(|path| (path, format!("process {}", process.pid))));
    } else {
        let preloaded = loaded.preload.split([':', ' ']).filter(|name| name.contains("libnccl.so"));
        found.extend(preloaded.map(|name| (PathBuf::from(name), "LD_PRELOAD".to_owned())));
        found.extend(loaded.vllm_nccl.iter().map(|name| (PathBuf::from(name), "VLLM_NCCL_SO_PATH".to_owned())));
        if let Some(program) = &loaded.program {
            match loader.read(program) {
                Ok(library) => found.extend(
                    loader.find(NCCL, Some((program, &library))).map(|path| (path, program.display().to_string())),
                ),
                Err(why) => not_seen.push(NotSeen { what: format!("what {} would load", program.display()), why }),
            }
        } else if let Some(python) = &loaded.python {
            match python::packages(place, python, loaded.home.as_deref()) {
                Ok(folders) => found.extend(of_packages(place, loader, &folders, python)),
                Err(why) => not_seen.push(NotSeen { what: "the libnccl that Python would load".to_owned(), why }),
            }
        }
        found.extend(loader.find(NCCL, None).map(|path| (path, "the dynamic loader".to_owned())));
    }
    let mut files: Vec<NcclFile> = Vec::new();
    for (path, by) in found {
        let path = loader.resolve(&path);
        match files.iter_mut().find(|file| is_same_file(place, &file.path, &path)) {
            Some(file) => file.by = format!("{}, {by}", file.by),
            None => files.push(NcclFile { library: loader.read(&path), path, by }),
        }
    }
    files
}

/// What PyTorch's library asks for, by its own search path; NVIDIA's wheel where there is no PyTorch.
fn of_packages(place: &Place, loader: &Loader, folders: &[PathBuf], python: &Path) -> Option<(PathBuf, String)> {
    let torch = folders.iter().map(|folder| folder.join("torch/lib/libtorch_cuda.so")).find(|path| place.has(path));
    if let Some(torch) = torch {
        let library = loader.read(&torch).ok()?;
        return Some((loader.find(NCCL, Some((&torch, &library)))?, format!("PyTorch of {}", python.display())));
    }
    let wheel = folders.iter().map(|folder| folder.join("nvidia/nccl/lib").join(NCCL)).find(|path| place.has(path))?;
    Some((wheel, format!("NVIDIA's wheel of {}", python.display())))
}

/// The plugin that NCCL loads: the first of the list that is there (`openPluginLib` in NCCL's plugin_open.cc).
fn plugin(loader: &Loader, loaded: &Loaded) -> Option<Plugin> {
    if let Some(process) = &loaded.process {
        let mapped = process.maps.iter().filter(|path| {
            path.file_name().is_some_and(|name| {
                name.to_string_lossy().starts_with("libnccl") && name.to_string_lossy().contains("net")
            })
        });
        return mapped.filter_map(|path| identify(loader, path)).next();
    }
    let list = loaded.net_plugin.as_deref().unwrap_or("libnccl-net.so");
    list.split(',').filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("none")).find_map(|name| {
        let long = format!("libnccl-net-{name}.so");
        let path = loader.find(name, None).or_else(|| loader.find(&long, None))?;
        identify(loader, &path)
    })
}

fn identify(loader: &Loader, path: &Path) -> Option<Plugin> {
    let library = loader.read(path).ok()?;
    let has = |mark: &str| library.texts.iter().any(|text| text.starts_with(mark));
    let kind = match () {
        () if has("spark-rails") => PluginKind::Ours,
        () if has("IBext") || path.to_string_lossy().contains("hpcx") => PluginKind::HpcX,
        () => PluginKind::Other,
    };
    Some(Plugin { path: path.to_owned(), kind, build_id: library.build_id, glibc: library.glibc })
}

/// Where installation, packages and wheels put this plugin, and where the job's variables name it.
fn copies(place: &Place, loader: &Loader, loaded: &Loaded, not_seen: &mut Vec<NotSeen>) -> Vec<Plugin> {
    const NAME: &str = "libnccl-net-spark.so";
    let mut candidates: Vec<PathBuf> = loaded.own_plugin.iter().cloned().collect();
    candidates.extend(
        loaded.net_plugin.iter().flat_map(|list| list.split(',')).filter(|name| name.contains('/')).map(PathBuf::from),
    );
    candidates.push(PathBuf::from("/usr/local/lib").join(NAME));
    let folders = loader.folders().iter().map(String::as_str).chain(loaded.library_path.split(':'));
    candidates.extend(folders.flat_map(|folder| [NAME, "libnccl-net.so"].map(|name| Path::new(folder).join(name))));
    let packages = loaded
        .python
        .iter()
        .flat_map(|python| python::packages(place, python, loaded.home.as_deref()).unwrap_or_default());
    candidates.extend(packages.map(|folder| folder.join("nccl_net_spark/lib").join(NAME)));
    let mut found: Vec<Plugin> = Vec::new();
    for candidate in candidates.iter().filter(|path| path.is_absolute() && place.has(path)) {
        let path = loader.resolve(candidate);
        if found.iter().any(|known| is_same_file(place, &known.path, &path)) {
            continue;
        }
        match identify(loader, &path) {
            Some(plugin) if plugin.kind == PluginKind::Ours => found.push(plugin),
            Some(_) => {}
            None => not_seen
                .push(NotSeen { what: path.display().to_string(), why: "it is not a readable ELF file".to_owned() }),
        }
    }
    found
}

/// True for two paths to one file, as where /lib is a link to /usr/lib.
fn is_same_file(place: &Place, one: &Path, other: &Path) -> bool {
    one == other || place.identity(one).is_some_and(|identity| place.identity(other) == Some(identity))
}

/// `libibverbs/libmlx5-rdmav*.so` beside libibverbs' own folder (rdma-core's `providers`).
fn mlx5_provider(place: &Place, loader: &Loader) -> Option<PathBuf> {
    let folders = loader.folders().iter().map(|folder| Path::new(folder).join("libibverbs"));
    folders
        .flat_map(|folder| place.names(&folder).into_iter().map(move |name| folder.join(name)))
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libmlx5-rdmav")))
}
