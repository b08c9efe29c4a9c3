//! Installing and uninstalling, in temporary folders.

mod common;

use common::{Fake, ProgramOutput, nccl_spark, say};
use nccl_abi::net::NET_VERSIONS;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAM: &str = "bin/nccl-spark";
const PLUGIN: &str = "lib/libnccl-net-spark.so";
const FABRIC: &str = "lib/nccl-spark/softverbs-ibverbs";
const MANIFEST: &str = "lib/nccl-spark/manifest";
const PAGE: &str = "share/man/man1/nccl-spark-all-gather.1";

struct Place {
    fake: Fake,
    prefix: PathBuf,
}

impl Place {
    fn new() -> Self {
        let others = NET_VERSIONS.filter(|version| *version != 11);
        let symbols: Vec<String> = others
            .map(|version| format!("-Wl,--defsym=ncclNetPlugin_v{version}=ncclNetPlugin_v11"))
            .collect();
        let fake = Fake::compile(&symbols.iter().map(String::as_str).collect::<Vec<_>>());
        fs::write(fake.folder().join("fabric"), "a software fabric").unwrap();
        let prefix = fake.folder().join("prefix");
        Self { fake, prefix }
    }

    fn file(&self, path: &str) -> PathBuf {
        self.prefix.join(path)
    }

    fn install(&self) -> ProgramOutput {
        self.install_by(nccl_spark())
    }

    fn install_by(&self, mut command: Command) -> ProgramOutput {
        command
            .args(["install", "--plugin"])
            .arg(self.fake.library());
        command
            .arg("--softverbs")
            .arg(self.fake.folder().join("fabric"))
            .arg("--prefix")
            .arg(&self.prefix);
        command.output().unwrap().into()
    }

    fn uninstall(&self) -> ProgramOutput {
        say(&["uninstall", "--prefix", self.prefix.to_str().unwrap()])
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files = Vec::new();
        collect(&self.prefix, &mut files);
        files.sort();
        files
    }
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type().unwrap().is_dir() {
            true => collect(&entry.path(), files),
            false => files.push(entry.path()),
        }
    }
}

#[track_caller]
fn assert_fails(output: &ProgramOutput, parts: &[&str]) {
    assert_eq!(
        (output.status, output.out.as_str()),
        (Some(1), ""),
        "{output:?}"
    );
    for part in parts {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
}

#[test]
fn install_copies_the_files_and_prints_the_variables_to_set() {
    let place = Place::new();
    let output = place.install();
    assert_eq!(
        (output.status, output.err.as_str()),
        (Some(0), ""),
        "{output:?}"
    );
    assert_eq!(
        fs::read(place.file(PLUGIN)).unwrap(),
        fs::read(place.fake.library()).unwrap()
    );
    assert_eq!(fs::read(place.file(FABRIC)).unwrap(), b"a software fabric");
    assert_eq!(
        fs::metadata(place.file(PROGRAM)).unwrap().mode() & 0o7777,
        0o755
    );
    for path in [
        "bash-completion/completions/nccl-spark",
        "zsh/site-functions/_nccl-spark",
        "fish/vendor_completions.d/nccl-spark.fish",
        "man/man1/nccl-spark.1",
    ] {
        assert_eq!(
            fs::metadata(place.file("share").join(path)).unwrap().mode() & 0o7777,
            0o644,
            "{path}"
        );
    }
    let variable = format!("export NCCL_NET_PLUGIN={}\n", place.file(PLUGIN).display());
    assert!(
        output.out.contains(&variable) && output.out.contains("export NCCL_NET=Spark\n"),
        "{output:?}"
    );
    assert!(
        output.out.contains("not set NCCL_NET in a login script"),
        "{output:?}"
    );
    assert!(
        output.out.contains(&format!(
            "export PATH={}:$PATH",
            place.file("bin").display()
        )),
        "{output:?}"
    );
}

#[test]
fn the_installed_program_replaces_and_removes_itself() {
    let place = Place::new();
    assert_eq!(place.install().status, Some(0));
    // The installed program writes a new file, so that a job that has mapped the old one keeps it.
    let files = place.files();
    let before = fs::metadata(place.file(PLUGIN)).unwrap().ino();
    let old = fs::File::open(place.file(PLUGIN)).unwrap();
    let output = place.install_by(Command::new(place.file(PROGRAM)));
    assert!(
        output.status == Some(0) && output.out.starts_with("Upgraded "),
        "{output:?}"
    );
    assert_ne!(fs::metadata(place.file(PLUGIN)).unwrap().ino(), before);
    drop(old);
    assert_eq!(place.files(), files, "something is left over");

    // Uninstalling needs neither the folder of the build nor the prefix's name.
    let output = ProgramOutput::from(
        Command::new(place.file(PROGRAM))
            .arg("uninstall")
            .output()
            .unwrap(),
    );
    assert!(
        output.status == Some(0)
            && output
                .out
                .contains(&format!("Removed {} files", files.len() - 1)),
        "{output:?}"
    );
    assert!(!place.prefix.exists(), "{:?}", place.files());
    assert_fails(&place.uninstall(), &["nothing is installed in", "--prefix"]);
}

#[test]
fn foreign_files_are_neither_replaced_nor_removed() {
    for path in [PROGRAM, PLUGIN, PAGE] {
        let place = Place::new();
        fs::create_dir_all(place.file(path).parent().unwrap()).unwrap();
        fs::write(place.file(path), "somebody's").unwrap();
        assert_fails(
            &place.install(),
            &[
                &format!("{} was not installed by", place.file(path).display()),
                "--prefix",
            ],
        );
        assert_eq!(place.files(), [place.file(path)]);
        assert_eq!(fs::read(place.file(path)).unwrap(), b"somebody's");
    }
    let place = Place::new();
    fs::create_dir_all(place.file("lib")).unwrap();
    symlink(place.fake.library(), place.file(PLUGIN)).unwrap();
    assert_fails(&place.install(), &[PLUGIN, "was not installed by"]);

    let place = Place::new();
    assert_eq!(place.install().status, Some(0));
    fs::write(place.file("bin/other"), "").unwrap();
    assert_eq!(place.uninstall().status, Some(0));
    assert_eq!(place.files(), [place.file("bin/other")]);
}

#[test]
fn a_file_that_was_changed_is_kept_and_named() {
    let place = Place::new();
    assert_eq!(place.install().status, Some(0));
    fs::write(place.file(PAGE), "my own").unwrap();
    let changed = format!(
        "{} was changed since it was installed",
        place.file(PAGE).display()
    );
    assert_fails(&place.install(), &[&changed, "nothing was installed"]);
    let output = place.uninstall();
    let kept = format!("kept {}: it was changed", place.file(PAGE).display());
    assert!(
        output.status == Some(0) && output.out.contains(&kept),
        "{output:?}"
    );
    assert_eq!(place.files(), [place.file(PAGE)]);
    assert_eq!(fs::read(place.file(PAGE)).unwrap(), b"my own");
}

#[test]
fn an_upgrade_removes_what_the_new_version_does_not_have() {
    let place = Place::new();
    assert_eq!(place.install().status, Some(0));
    let list = fs::read_to_string(place.file(MANIFEST)).unwrap();
    let sum = ProgramOutput::from(
        Command::new("sha256sum")
            .args(["-c", MANIFEST])
            .current_dir(&place.prefix)
            .output()
            .unwrap(),
    );
    assert_eq!(sum.status, Some(0), "{sum:?}");
    // The state that an older version leaves: other content, and two more files.
    let page = list.lines().find(|line| line.ends_with(PAGE)).unwrap();
    let old = sha256("old");
    let older = list.replace(
        page,
        &format!("{old}  {PAGE}\n{old}  share/gone.1\n{old}  share/changed.1"),
    );
    fs::write(place.file(MANIFEST), older).unwrap();
    for (path, text) in [
        (PAGE, "old"),
        ("share/gone.1", "old"),
        ("share/changed.1", "mine"),
    ] {
        fs::write(place.file(path), text).unwrap();
    }
    let output = place.install();
    assert_eq!(output.status, Some(0), "{output:?}");
    assert!(
        output
            .out
            .contains(&format!("kept {}", place.file("share/changed.1").display())),
        "{output:?}"
    );
    assert!(!place.file("share/gone.1").exists());
    assert_ne!(fs::read(place.file(PAGE)).unwrap(), b"old");
    assert_eq!(fs::read_to_string(place.file(MANIFEST)).unwrap(), list);
}

fn sha256(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("text"), text).unwrap();
    let output = ProgramOutput::from(
        Command::new("sha256sum")
            .arg(folder.path().join("text"))
            .output()
            .unwrap(),
    );
    output.out.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn the_installed_program_needs_only_its_prefix() {
    if !common::is_built() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let fabric = Path::new(env!("CARGO_BIN_EXE_nccl-spark")).with_file_name("softverbs-ibverbs");
    let mut command = nccl_spark();
    command
        .args(["install", "--plugin"])
        .arg(common::built().unwrap())
        .arg("--softverbs")
        .arg(fabric);
    let output = ProgramOutput::from(command.arg("--prefix").arg(folder.path()).output().unwrap());
    assert_eq!(output.status, Some(0), "{output:?}");
    // A copy elsewhere finds no plugin. So the plugin that the installed program finds is the
    // prefix's.
    let run = |program: &Path| -> ProgramOutput {
        let mut command = Command::new(program);
        command.args([
            "all_gather",
            "--fabric",
            "soft",
            "--profile",
            "unpaced",
            "-b",
            "8",
            "-e",
            "1M",
            "-f",
            "512",
        ]);
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .current_dir("/")
            .output()
            .unwrap()
            .into()
    };
    let copy = folder.path().join("nccl-spark");
    fs::copy(folder.path().join(PROGRAM), &copy).unwrap();
    let alone = run(&copy);
    assert!(
        alone.status == Some(1) && alone.err.contains("build it with `cargo build"),
        "{alone:?}"
    );
    let output = run(&folder.path().join(PROGRAM));
    assert_eq!(
        (output.status, output.err.as_str()),
        (Some(0), ""),
        "{output:?}"
    );
    assert!(
        output.out.contains("# Out of bounds values : 0 OK")
            && output.out.contains("network Spark"),
        "{output:?}"
    );
}

#[test]
fn a_library_that_lacks_versions_is_refused() {
    let fake = Fake::compile(&[]);
    let prefix = fake.folder().join("prefix");
    let install = |library: &Path| {
        say(&[
            "install",
            "--plugin",
            library.to_str().unwrap(),
            "--prefix",
            prefix.to_str().unwrap(),
        ])
    };
    let missing =
        "does not export ncclNetPlugin_v8, ncclNetPlugin_v9, ncclNetPlugin_v10, ncclNetPlugin_v12";
    assert_fails(&install(&fake.library()), &[missing]);
    assert_fails(
        &install(&fake.folder().join("none.so")),
        &["none.so not found: build it with `cargo build"],
    );
    assert!(!prefix.exists());
}

#[test]
fn an_unwritable_place_is_named_before_anything_is_written() {
    let mut place = Place::new();
    let file = place.fake.folder().join("file");
    fs::write(&file, "").unwrap();
    place.prefix = file.clone();
    let output = place.install();
    assert_fails(
        &output,
        &[&format!(
            "cannot write to {}/bin: {} is not a folder",
            file.display(),
            file.display()
        )],
    );

    // As a user who is not root: `nobody`, or the test's own user.
    let place = Place::new();
    let program = place.fake.folder().join("nccl-spark");
    fs::copy(env!("CARGO_BIN_EXE_nccl-spark"), &program).unwrap();
    fs::create_dir(&place.prefix).unwrap();
    for (path, mode) in [(place.fake.folder(), 0o755), (&place.prefix, 0o555)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
    let user = || {
        let mut command = Command::new(&program);
        if nix::unistd::geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
        command
    };
    let output = place.install_by(user());
    let prefix = place.prefix.display();
    let advice = format!(
        "run it as root: sudo {} install --prefix {prefix}",
        program.display()
    );
    assert_fails(
        &output,
        &[
            &format!("cannot write to {prefix}: permission denied"),
            &advice,
        ],
    );
    assert_eq!(
        (output.err.lines().count(), place.files().len()),
        (1, 0),
        "{output:?}"
    );

    fs::set_permissions(&place.prefix, Permissions::from_mode(0o755)).unwrap();
    assert_eq!(place.install().status, Some(0));
    fs::set_permissions(place.file("bin"), Permissions::from_mode(0o555)).unwrap();
    let files = place.files();
    let output = ProgramOutput::from(
        user()
            .args(["uninstall", "--prefix"])
            .arg(&place.prefix)
            .output()
            .unwrap(),
    );
    assert_fails(&output, &["permission denied", "sudo"]);
    assert_eq!(place.files(), files, "nothing is removed unless all can be");
    fs::set_permissions(place.file("bin"), Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn root_removes_nothing_below_a_folder_that_another_user_can_replace() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    const NOBODY: u32 = 65534;
    let place = Place::new();
    assert_eq!(place.install().status, Some(0));
    let folder = place.fake.folder().to_owned();
    let bin = place.file("bin");
    let files = place.files();
    let refused = |open: &Path, because: &str| {
        let cure = if because.contains("uid") {
            "as the user who installed it"
        } else {
            "chmod go-w"
        };
        assert_fails(&place.uninstall(), &[open.to_str().unwrap(), because, cure]);
        assert_fails(&place.install(), &[open.to_str().unwrap(), because, cure]);
        assert_eq!(place.files(), files, "nothing is removed");
    };
    for open in [&folder, &place.prefix, &bin] {
        chown(open, Some(NOBODY), None).unwrap();
        refused(open, "uid 65534");
        chown(open, Some(0), None).unwrap();
    }
    fs::set_permissions(&bin, Permissions::from_mode(0o757)).unwrap();
    refused(&bin, "mode 0757");
    fs::set_permissions(&bin, Permissions::from_mode(0o775)).unwrap();
    chown(&bin, None, Some(NOBODY)).unwrap();
    refused(&bin, "gid 65534");
    // A group of root's, and a folder where others cannot replace root's files.
    chown(&bin, None, Some(0)).unwrap();
    fs::set_permissions(&place.prefix, Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(place.uninstall().status, Some(0));
}

/// Makes a root folder with the program as in the Debian package, and dpkg's list of that package.
fn debian_root() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for folder in ["usr/bin", "var/lib/dpkg/info"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    fs::copy(
        env!("CARGO_BIN_EXE_nccl-spark"),
        root.path().join("usr").join(PROGRAM),
    )
    .unwrap();
    let list =
        "/.\n/usr\n/usr/bin\n/usr/bin/nccl-spark\n/usr/share/man/man1/nccl-spark-all-gather.1\n";
    fs::write(
        root.path().join("var/lib/dpkg/info/nccl-net-spark.list"),
        list,
    )
    .unwrap();
    root
}

fn by(program: &Path, arguments: &[&str]) -> ProgramOutput {
    Command::new(program)
        .args(arguments)
        .output()
        .unwrap()
        .into()
}

#[test]
fn a_packaged_program_names_the_command_that_installs_and_removes_it() {
    let debian = debian_root();
    let site = tempfile::tempdir().unwrap();
    let wheel = site.path().join("nccl_net_spark");
    fs::create_dir_all(wheel.join("bin")).unwrap();
    fs::write(wheel.join("__init__.py"), "").unwrap();
    fs::copy(env!("CARGO_BIN_EXE_nccl-spark"), wheel.join(PROGRAM)).unwrap();
    let packages = [
        (
            debian.path().join("usr").join(PROGRAM),
            "Debian package",
            "`sudo apt remove nccl-net-spark`",
        ),
        (
            wheel.join(PROGRAM),
            "Python package",
            "`pip uninstall nccl-net-spark`",
        ),
    ];
    for (program, package, remove) in packages {
        let owner = format!(
            "{} belongs to the {package} nccl-net-spark",
            program.display()
        );
        let output = by(&program, &["install"]);
        assert_fails(&output, &[&owner, "nothing to install", "`nccl-spark env`"]);
        assert_eq!(output.err.lines().count(), 1, "{output:?}");
        let output = by(&program, &["uninstall"]);
        assert_fails(&output, &[&owner, remove, "--prefix"]);
        assert_eq!(output.err.lines().count(), 1, "{output:?}");
        assert!(program.exists());

        // Files that `nccl-spark install` put in another place earlier are removed as usual.
        let place = Place::new();
        assert_eq!(place.install().status, Some(0));
        assert_eq!(
            by(
                &program,
                &["uninstall", "--prefix", place.prefix.to_str().unwrap()]
            )
            .status,
            Some(0)
        );
        assert_eq!(place.files(), Vec::<PathBuf>::new());
    }
    // Without dpkg's list, or without the wheel's own file, the program is a copy like any other.
    fs::remove_file(debian.path().join("var/lib/dpkg/info/nccl-net-spark.list")).unwrap();
    fs::remove_file(wheel.join("__init__.py")).unwrap();
    for program in [debian.path().join("usr").join(PROGRAM), wheel.join(PROGRAM)] {
        assert_fails(&by(&program, &["install"]), &["the plugin is not beside"]);
    }
}

#[test]
fn files_of_the_debian_package_are_neither_replaced_nor_removed() {
    let debian = debian_root();
    let mut place = Place::new();
    place.prefix = debian.path().join("usr");
    // The file belongs to the package, even if it has the same content.
    let owned = format!(
        "{} belongs to the Debian package nccl-net-spark",
        place.file(PROGRAM).display()
    );
    assert_fails(&place.install(), &[&owned, "nothing was installed"]);
    assert_eq!(place.files(), [place.file(PROGRAM)]);

    // Here `nccl-spark install` runs first. Then the package is installed, and dpkg replaces files
    // without asking.
    let list = debian.path().join("var/lib/dpkg/info/nccl-net-spark.list");
    let text = fs::read(&list).unwrap();
    fs::remove_file(&list).unwrap();
    assert_eq!(place.install().status, Some(0));
    fs::write(&list, text).unwrap();
    let output = place.uninstall();
    let kept = format!(
        "kept {}: it belongs to the Debian package nccl-net-spark",
        place.file(PROGRAM).display()
    );
    assert!(
        output.status == Some(0) && output.out.contains(&kept),
        "{output:?}"
    );
    assert_eq!(place.files(), [place.file(PROGRAM), place.file(PAGE)]);
}

#[test]
fn settings_are_listed_with_their_defaults() {
    let output = say(&["settings"]);
    assert!(
        output.status == Some(0) && output.out.contains("NCCL_IB_HCA [default: "),
        "{output:?}"
    );
}
