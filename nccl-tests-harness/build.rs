//! Embeds the commit that the program was built from, for `nccl-spark --version`. The build time is
//! not embedded, so two builds of one commit are the same.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let commit = commit().unwrap_or_default();
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let text = if commit.is_empty() {
        version
    } else {
        format!("{version} ({commit})")
    };
    // The name does not begin with NCCL_SPARK_: Cargo also sets the variable in the environment of
    // the tests that it runs, and there the plugin rejects unknown NCCL_SPARK_ variables.
    println!("cargo:rustc-env=PROGRAM_VERSION={text}");
}

/// The commit that is checked out. `None` without git, or if this is not a checkout of this
/// project: a source archive may be unpacked inside another project's checkout, whose commit says
/// nothing about this one.
fn commit() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()?
        .canonicalize()
        .ok()?;
    let top = git(&root, &["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != root {
        return None;
    }
    let commit = git(&root, &["rev-parse", "--short=12", "HEAD"])?;
    let branch = git(&root, &["symbolic-ref", "--quiet", "HEAD"]);
    // A new commit changes the branch's ref file or, if there is no such file yet, HEAD's reflog.
    for name in ["HEAD", "logs/HEAD", "packed-refs"]
        .into_iter()
        .chain(branch.as_deref())
    {
        let Some(path) = git(&root, &["rev-parse", "--git-path", name]) else {
            continue;
        };
        let path = root.join(path);
        // Cargo treats a missing file as changed, and would run this script on every build.
        if path.exists() {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    Some(commit)
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git")
        .arg("-C")
        .arg(folder)
        .args(arguments)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| output.status.success() && !text.is_empty())
}
