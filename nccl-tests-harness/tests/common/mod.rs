//! Common parts of the command line's tests: the fake plugin, compiled here, and the program under
//! test.
#![allow(dead_code)]

#[path = "../../../tests/common/skip.rs"]
pub mod skip;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The fake plugin, in a folder that is deleted with this value.
pub struct Fake {
    folder: tempfile::TempDir,
}

impl Fake {
    /// Compiles it with these macros.
    pub fn compile(defines: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        shared_object("fake_plugin.c", &folder.path().join("libfake.so"), defines);
        Self { folder }
    }

    pub fn library(&self) -> PathBuf {
        self.folder.path().join("libfake.so")
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

/// A fake plugin, and a fake driver beside it, which is found before any other.
pub struct Fakes {
    plugin: Fake,
}

impl Fakes {
    pub fn new() -> Self {
        let plugin = Fake::compile(&[]);
        shared_object("fake_cuda.c", &plugin.folder().join("libcuda.so"), &[]);
        Self { plugin }
    }

    /// The folder of the fake driver, for `LD_LIBRARY_PATH`.
    pub fn folder(&self) -> &Path {
        self.plugin.folder()
    }

    /// Runs memory with `arguments` and `environment`, in the form "FAKE_GPUS=2".
    pub fn run(&self, arguments: &str, environment: &str) -> Said {
        let mut command = nccl_spark();
        command.args(["memory", "--fabric", "verbs", "--plugin"]).arg(self.plugin.library());
        command.args(arguments.split_whitespace()).env("LD_LIBRARY_PATH", self.plugin.folder());
        command.envs(environment.split_whitespace().filter_map(|one| one.split_once('=')));
        command.output().unwrap().into()
    }
}

/// The plugin that cargo built last, if the software fabric is built too: beside the program after
/// `cargo build`, in `deps` after `cargo test`.
pub fn built() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_BIN_EXE_nccl-spark")).parent()?;
    folder.join("softverbs-ibverbs").exists().then_some(())?;
    let candidates = [folder.join("libnccl_net_spark.so"), folder.join("deps/libnccl_net_spark.so")];
    let built = candidates.into_iter().filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)));
    built.max().map(|(_, path)| path)
}

/// Compiles a C file of the tests with `cc` (or what `CC` names), which any machine that links Rust
/// has.
pub fn shared_object(source: &str, library: &Path, defines: &[&str]) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (source, include) = (package.join("tests").join(source), package.join("../include"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-I"]).arg(include);
    let output = command.arg("-o").arg(library).args(defines).arg(source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[derive(Debug)]
pub struct Said {
    pub status: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { status: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }
}

/// The program under test, without an environment that could change what it does.
pub fn nccl_spark() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nccl-spark"));
    for name in ["NCCL_DEBUG", "NCCL_IBVERBS_LIB", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    for (name, _) in std::env::vars() {
        if ["OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name);
        }
    }
    command
}

pub fn say(arguments: &[&str]) -> Said {
    nccl_spark().args(arguments).output().unwrap().into()
}

/// The plugin that cargo built last: beside the program after `cargo build`, in `deps` after `cargo
/// test`.
pub fn plugin() -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_BIN_EXE_nccl-spark"));
    let folder = program.parent()?;
    let candidates = [folder.join("libnccl_net_spark.so"), folder.join("deps/libnccl_net_spark.so")];
    let built = candidates.into_iter().filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)));
    built.max().map(|(_, path)| path)
}

/// True if the plugin and the software fabric are built, as part of the whole workspace.
pub fn is_built() -> bool {
    let is_built = built().is_some();
    if !is_built {
        not_built();
    }
    is_built
}

/// Skips a test whose build is missing, with a message.
#[track_caller]
pub fn not_built() {
    skip::missing("the plugin and softverbs-ibverbs are not both built (cargo build)");
}

/// True if mpirun is installed; otherwise prints that the test is skipped.
#[track_caller]
pub fn has_mpirun() -> bool {
    let is_there = Command::new("mpirun").arg("--version").output().is_ok();
    if !is_there {
        skip::missing("there is no mpirun (Debian's openmpi-bin)");
    }
    is_there
}
