//! Puts the chosen settings into a settings file, and says what the plugin makes of it.

use super::judge::Candidate;
use anyhow::{Context, Result, anyhow};
use nccl_net_spark::config::{Config, Settings, Source};
use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The setting for queue pairs of a connection on each rail.
pub const QPS: &str = "NCCL_IB_QPS_PER_CONNECTION";
/// The setting for the smallest part of a message that gets a rail of its own.
pub const MIN_SHARE: &str = "NCCL_SPARK_MIN_SHARE_BYTES";
/// The setting that names a settings file.
pub const SETTINGS_FILE: &str = "NCCL_SPARK_SETTINGS_FILE";
/// What is told about the settings stands behind this.
const REMARK: &str = "# nccl-spark tune: ";

impl Candidate {
    /// The settings as names and values.
    pub fn pairs(self) -> [(&'static str, String); 2] {
        [(QPS, self.qps.to_string()), (MIN_SHARE, self.min_share_bytes.to_string())]
    }
}

/// Where the file is unless the command line or a variable says so: the machine's for root, the user's own for others.
///
/// # Errors
/// When the user has no home.
pub fn standard_place(root: bool) -> Result<PathBuf> {
    let places = nccl_net_spark::config::standard_files();
    let place = if root { places.last() } else { places.first() };
    place.cloned().context("there is no place for a settings file: name one with --output")
}

/// Whether the file, if there is one, can be added to: it would be a pity to find that out after the measuring.
///
/// # Errors
/// When it is there and is no settings file.
pub fn check(path: &Path) -> Result<()> {
    if path.exists() {
        Config::from_variables(&[(SETTINGS_FILE.to_owned(), path.display().to_string())])?;
    }
    Ok(())
}

/// Writes the settings into the file, or takes them out of it where the defaults are best (none). Other lines stay. What was
/// done, and what the plugin makes of it, in lines.
///
/// # Errors
/// When the file cannot be read or written.
pub fn keep(path: &Path, chosen: Option<Candidate>, remark: &str) -> Result<Vec<String>> {
    let path = std::path::absolute(path).context("make the path absolute")?;
    // Behind a link lies the file to replace.
    let place = path.canonicalize().unwrap_or_else(|_| path.clone());
    let old = match fs::read_to_string(&place) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("read {}", place.display())),
    };
    let new = revise(old.as_deref().unwrap_or_default(), chosen, remark);
    let shown = path.display();
    let mut lines = Vec::new();
    if new == old.as_deref().unwrap_or_default() {
        lines.push(format!("{shown} is left as it is"));
    } else {
        replace(&place, &new).map_err(|error| {
            let hint = "; name another place with --output, or run this with sudo";
            anyhow!("cannot write {shown}: {error}{hint}")
        })?;
        let pairs = chosen.map(|chosen| chosen.pairs().map(|(name, value)| format!("{name}={value}")).join(" "));
        lines.push(match pairs {
            Some(pairs) => format!("wrote {pairs} to {shown}"),
            None => format!("took {QPS} and {MIN_SHARE} out of {shown}"),
        });
    }
    lines.extend(effect(&path, chosen, Settings::of_this_process()));
    Ok(lines)
}

/// The file's text with the settings in place of those that it had.
fn revise(old: &str, chosen: Option<Candidate>, remark: &str) -> String {
    let owned = |line: &str| {
        let name = line.split('=').next().unwrap_or_default().trim();
        line.starts_with(REMARK.trim_end()) || line.contains('=') && [QPS, MIN_SHARE].contains(&name)
    };
    let mut block = String::new();
    if let Some(chosen) = chosen {
        block = format!("{REMARK}{remark}\n");
        for (name, value) in chosen.pairs() {
            block += &format!("{name}={value}\n");
        }
    }
    let (mut text, mut placed) = (String::new(), false);
    for line in old.lines() {
        match owned(line) {
            true if !placed => {
                text += &block;
                placed = true;
            }
            true => {}
            false => text += &format!("{line}\n"),
        }
    }
    if !placed {
        text += &block;
    }
    // A file that has nothing to change stays as it is, to the last byte.
    if chosen.is_none() && !old.lines().any(owned) { old.to_owned() } else { text }
}

/// Whoever reads the file finds the old one or the new one, whole.
fn replace(place: &Path, text: &str) -> io::Result<()> {
    let permissions = match fs::metadata(place) {
        Ok(metadata) if !metadata.is_file() => return Err(io::Error::new(ErrorKind::InvalidInput, "it is no file")),
        Ok(metadata) => Some(metadata.permissions()),
        Err(_) => None,
    };
    let (Some(folder), Some(name)) = (place.parent(), place.file_name()) else {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is no file"));
    };
    let part = folder.join(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let written = OpenOptions::new().write(true).create(true).truncate(true).open(&part).and_then(|mut file: File| {
        file.write_all(text.as_bytes())?;
        permissions.map_or(Ok(()), |permissions| file.set_permissions(permissions))?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&part, place)).inspect_err(|_| {
        let _ = fs::remove_file(&part);
    })
}

/// Whether the plugin reads the file, and what stands above it; `settings` are those that hold now.
fn effect(path: &Path, chosen: Option<Candidate>, settings: Result<Settings, impl Display>) -> Vec<String> {
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => return vec![format!("but the plugin would not start: {error}")],
    };
    let is_it = |other: &Path| {
        other == path || other.canonicalize().ok().is_some_and(|it| path.canonicalize().ok() == Some(it))
    };
    let read = settings.files().iter().any(|file| is_it(file));
    let mut lines = Vec::new();
    for held in settings.held().iter().filter(|held| [QPS, MIN_SHARE].contains(&held.row.name)) {
        let from = match &held.source {
            Source::Default => continue,
            Source::File { path, .. } if is_it(path) => continue,
            Source::File { path, line } => format!("from {}, line {line}", path.display()),
            Source::Environment => "from the environment".to_owned(),
        };
        lines.push(format!("but {}={} {from} stands above it: take it away", held.row.name, held.value));
    }
    match (chosen.is_some(), read, lines.is_empty()) {
        (true, true, true) => lines.push("the plugin reads it whenever a job starts".to_owned()),
        (true, false, _) => lines.push(format!("the plugin reads it with: export {SETTINGS_FILE}={}", path.display())),
        _ => {}
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: Candidate = Candidate { qps: 4, min_share_bytes: 32768 };

    #[test]
    fn its_own_lines_are_replaced_and_others_stay() {
        let new = revise("", Some(FOUR), "+10 %");
        let block = "# nccl-spark tune: +10 %\nNCCL_IB_QPS_PER_CONNECTION=4\nNCCL_SPARK_MIN_SHARE_BYTES=32768\n";
        assert_eq!(new, block);
        assert_eq!(revise("# mine\nNCCL_IB_TC=106", Some(FOUR), "+10 %"), format!("# mine\nNCCL_IB_TC=106\n{block}"));
        let old = format!("NCCL_IB_TC=106\n{block}# NCCL_SPARK_MIN_SHARE_BYTES=1 is too small\n");
        let two = Candidate { qps: 2, ..FOUR };
        let expected = old.replace("CONNECTION=4", "CONNECTION=2").replace("10 %", "5 %");
        assert_eq!(revise(&old, Some(two), "+5 %"), expected);
        let bare = "NCCL_IB_TC=106\n# NCCL_SPARK_MIN_SHARE_BYTES=1 is too small\n";
        assert_eq!(revise(&old, None, ""), bare);
        assert_eq!(revise("# no end", None, ""), "# no end");
        assert_eq!(revise(" NCCL_IB_QPS_PER_CONNECTION = 9\n", None, ""), "");
    }

    #[test]
    fn a_file_is_replaced_whole_and_keeps_its_permissions() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("a.conf"), folder.path().join("b.conf"));
        fs::write(&file, "NCCL_IB_TC=106\n").unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let lines = keep(&link, Some(FOUR), "+10 %").unwrap();
        assert!(lines[0].starts_with(&format!("wrote {QPS}=4 {MIN_SHARE}=32768 to ")), "{lines:?}");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("NCCL_IB_TC=106\n# nccl-spark tune: +10 %\n"), "{text}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "something is left over");
        check(&file).unwrap();
        assert!(keep(&file, None, "").unwrap()[0].starts_with("took "));
        assert_eq!(fs::read_to_string(&file).unwrap(), "NCCL_IB_TC=106\n");
        let none = folder.path().join("none.conf");
        assert!(keep(&none, None, "").unwrap()[0].contains("is left as it is") && !none.exists());
    }

    #[test]
    fn what_cannot_be_written_is_named() {
        let error = |path: &str| format!("{:#}", keep(Path::new(path), Some(FOUR), "").unwrap_err());
        let text = error("/no/where/a.conf");
        assert!(text.contains("cannot write /no/where/a.conf") && text.contains("--output"), "{text}");
        assert!(error("/dev/null").contains("it is no file"));
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("broken");
        fs::write(&broken, "x\n").unwrap();
        assert!(check(&broken).unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn what_stands_above_the_file_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let ours = file("ours", &revise("", Some(FOUR), ""));
        let users = file("users", "NCCL_IB_QPS_PER_CONNECTION=1\n");
        let told = |variables: &[(&str, &str)], standard: &[PathBuf]| {
            let variables: Vec<_> = variables.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
            effect(&ours, Some(FOUR), Settings::gather(&variables, standard)).join("; ")
        };
        assert_eq!(told(&[], std::slice::from_ref(&ours)), "the plugin reads it whenever a job starts");
        let export = format!("the plugin reads it with: export NCCL_SPARK_SETTINGS_FILE={}", ours.display());
        assert_eq!(told(&[], &[]), export);
        let above = told(&[], &[users.clone(), ours.clone()]);
        assert!(above.contains(&format!("{QPS}=1 from {}, line 1 stands above", users.display())), "{above}");
        let above = told(&[(MIN_SHARE, "4096")], std::slice::from_ref(&ours));
        assert!(above.contains("4096 from the environment stands above"), "{above}");
        assert!(told(&[(MIN_SHARE, "x")], &[]).contains("would not start"));
    }

    #[test]
    fn the_standard_place_is_the_machines_for_root_and_the_users_for_others() {
        assert_eq!(standard_place(true).unwrap(), Path::new("/etc/nccl-spark.conf"));
        assert_eq!(standard_place(false).unwrap(), nccl_net_spark::config::standard_files()[0]);
    }
}
