//! Installing and taking away, in folders of the test's own.

mod common;

use common::{Fake, say};
use std::fs;
use std::os::unix::fs::MetadataExt;

fn install(library: &std::path::Path, prefix: &std::path::Path) -> common::Said {
    say(&["install", "--plugin", library.to_str().unwrap(), "--prefix", prefix.to_str().unwrap()])
}

#[test]
fn the_library_is_put_in_place_whole_and_taken_away() {
    let fake = Fake::compile(&["-DFAKE_ALL_VERSIONS"]);
    let prefix = fake.folder().join("prefix");
    let target = prefix.join("lib/libnccl-net-spark.so");
    let said = install(&fake.library(), &prefix);
    assert_eq!((said.status, said.err.as_str()), (Some(0), ""), "{said:?}");
    assert_eq!(fs::read(&target).unwrap(), fs::read(fake.library()).unwrap());
    let variable = format!("export NCCL_NET_PLUGIN={}\n", target.display());
    assert!(said.out.contains(&variable) && said.out.contains("export NCCL_NET=Spark\n"), "{said:?}");
    assert!(said.out.contains(&format!("nccl-spark uninstall --prefix {}", prefix.display())), "{said:?}");

    // Over an older one: a new file under the name, so that a job which has the old one mapped keeps it.
    let before = fs::metadata(&target).unwrap().ino();
    let old = fs::File::open(&target).unwrap();
    assert_eq!(install(&fake.library(), &prefix).status, Some(0));
    assert_ne!(fs::metadata(&target).unwrap().ino(), before);
    drop(old);
    assert_eq!(fs::read_dir(prefix.join("lib")).unwrap().count(), 1, "something is left over");

    let prefix = prefix.to_str().unwrap();
    assert_eq!(say(&["uninstall", "--prefix", prefix]).status, Some(0));
    assert!(!target.exists());
    let again = say(&["uninstall", "--prefix", prefix]);
    assert!(again.status == Some(1) && again.err.contains("nothing is installed at"), "{again:?}");
}

#[test]
fn a_library_that_lacks_versions_is_refused() {
    let fake = Fake::compile(&[]);
    let prefix = fake.folder().join("prefix");
    let said = install(&fake.library(), &prefix);
    let missing = "does not export ncclNetPlugin_v8, ncclNetPlugin_v9, ncclNetPlugin_v10, ncclNetPlugin_v12";
    assert!(said.status == Some(1) && said.err.contains(missing), "{said:?}");
    assert!(!prefix.exists());
    let said = install(&fake.folder().join("none.so"), &prefix);
    assert!(said.status == Some(1) && said.err.contains("is no file"), "{said:?}");
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let fake = Fake::compile(&["-DFAKE_ALL_VERSIONS"]);
    let file = fake.folder().join("file");
    fs::write(&file, "").unwrap();
    let said = install(&fake.library(), &file);
    assert_eq!((said.status, said.err.lines().count()), (Some(1), 1), "{said:?}");
    assert!(said.err.starts_with(&format!("nccl-spark: cannot write {}/lib/", file.display())), "{said:?}");
}

#[test]
fn settings_are_listed_with_their_defaults() {
    let said = say(&["settings"]);
    assert!(said.status == Some(0) && said.out.contains("NCCL_IB_HCA [default: "), "{said:?}");
}
