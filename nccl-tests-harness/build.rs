//! Gives the program the commit that it was built from, for `nccl-spark --version`. No time: two
//! builds of one commit are the same.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let commit = commit().unwrap_or_default();
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let text = if commit.is_empty() { version } else { format!("{version} ({commit})") };
    // Cargo sets it for tests that it runs too, where the plugin refuses unknown names that begin
    // with NCCL_SPARK_.
    println!("cargo:rustc-env=PROGRAM_VERSION={text}");
}

/// The commit that is checked out; none where there is no git, or no checkout of this project: a
/// source archive may lie in the checkout of another one, whose commit says nothing here.
fn commit() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?.canonicalize().ok()?;
    let top = git(&root, &["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != root {
        return None;
    }
    let commit = git(&root, &["rev-parse", "--short=12", "HEAD"])?;
    let branch = git(&root, &["symbolic-ref", "--quiet", "HEAD"]);
    // A commit changes the branch's file or, where there is none yet, the log of HEAD.
    for name in ["HEAD", "logs/HEAD", "packed-refs"].into_iter().chain(branch.as_deref()) {
        let Some(path) = git(&root, &["rev-parse", "--git-path", name]) else { continue };
        let path = root.join(path);
        // Cargo takes a file that is missing for one that has changed, and would run this each
        // time.
        if path.exists() {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    Some(commit)
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| output.status.success() && !text.is_empty())
}
