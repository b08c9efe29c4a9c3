//! The fake plugin, the fake CUDA driver, and runs of programs. The tests of the crate `lab` use
//! them too.

use super::skip;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub struct Fake {
    folder: tempfile::TempDir,
}

impl Fake {
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

/// A fake plugin, and a fake CUDA driver beside it. If `LD_LIBRARY_PATH` is their folder, the
/// loader finds this driver before any other.
pub struct Fakes {
    pub plugin: Fake,
}

impl Fakes {
    pub fn new() -> Self {
        let plugin = Fake::compile(&[]);
        shared_object("fake_cuda.c", &plugin.folder().join("libcuda.so"), &[]);
        Self { plugin }
    }

    pub fn folder(&self) -> &Path {
        self.plugin.folder()
    }
}

/// Compiles a C file of the tests with the compiler that the variable `CC` names, else with `cc`.
/// Any machine that links Rust programs has `cc`.
pub fn shared_object(source: &str, library: &Path, defines: &[&str]) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = package.join("../nccl-tests-harness/tests").join(source);
    let include = package.join("../include");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command
        .args([
            "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-I",
        ])
        .arg(include);
    let output = command
        .arg("-o")
        .arg(library)
        .args(defines)
        .arg(source)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[derive(Debug)]
pub struct ProgramOutput {
    pub status: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for ProgramOutput {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            status: output.status.code(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}

/// Returns `program` without environment variables that could change its behaviour.
pub fn clean(program: &str) -> Command {
    let mut command = Command::new(program);
    for name in [
        "NCCL_DEBUG",
        "NCCL_IBVERBS_LIB",
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ] {
        command.env_remove(name);
    }
    for (name, _) in std::env::vars() {
        if ["OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    command
}

/// Returns the plugin that cargo built last, beside `program` or in `deps`, if the software fabric
/// is built too; otherwise prints that the test is skipped.
#[track_caller]
pub fn built_beside(program: &str) -> Option<PathBuf> {
    let beside = |name: &str| Path::new(program).with_file_name(name);
    let candidates = ["libnccl_net_spark.so", "deps/libnccl_net_spark.so"].map(beside);
    let built = candidates
        .into_iter()
        .filter_map(|path| Some((path.metadata().ok()?.modified().ok()?, path)))
        .max();
    let plugin = built
        .map(|(_, path)| path)
        .filter(|_| beside("softverbs-ibverbs").exists());
    if plugin.is_none() {
        skip::missing(
            "the plugin and softverbs-ibverbs are not both built (cargo build --workspace)",
        );
    }
    plugin
}
