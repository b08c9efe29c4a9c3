//! Helpers of the tests of `spark-lab`: the harness's fake plugin and fake driver, compiled here,
//! and the program under test.
#![allow(dead_code)]

#[path = "../../../tests/common/skip.rs"]
pub mod skip;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A fake of the harness in a folder that lives as long as this.
pub struct Fake(tempfile::TempDir);

impl Fake {
    /// The fake plugin.
    pub fn plugin() -> Self {
        let folder = tempfile::tempdir().unwrap();
        compile("fake_plugin.c", &folder.path().join("libfake.so"));
        Self(folder)
    }

    /// The same, and beside it a fake driver, which is found in place of any other.
    pub fn with_driver() -> Self {
        let fake = Self::plugin();
        compile("fake_cuda.c", &fake.folder().join("libcuda.so"));
        fake
    }

    pub fn library(&self) -> PathBuf {
        self.folder().join("libfake.so")
    }

    pub fn folder(&self) -> &Path {
        self.0.path()
    }
}

/// Compiles a C file with `cc`, which any machine that links Rust has, or the compiler that `CC`
/// names.
fn compile(source: &str, library: &Path) {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (source, include) = (package.join("../nccl-tests-harness/tests").join(source), package.join("../include"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut command = Command::new(compiler);
    command.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-I"]).arg(include);
    let output = command.arg("-o").arg(library).arg(source).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Output and exit status of the program.
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
pub fn spark_lab() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_spark-lab"));
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

/// Runs it to its end.
pub fn say(arguments: &[&str]) -> Said {
    spark_lab().args(arguments).output().unwrap().into()
}
