//! Writes the chosen settings into a settings file, and reports whether the plugin will use them.

use super::judge::Candidate;
use crate::output::replacement;
use anyhow::{Context, Result, anyhow};
use host::config::{Config, Settings, Source};
use nix::unistd::geteuid;
use std::fmt::Display;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Queue pairs of a connection on each rail.
pub const QPS: &str = "NCCL_IB_QPS_PER_CONNECTION";
/// Smallest part of a message that gets its own rail, in bytes.
pub const MIN_SHARE: &str = "NCCL_SPARK_MIN_SHARE_BYTES";
pub const TUNER_TABLE: &str = "NCCL_SPARK_TUNER_TABLE";
pub const SETTINGS_FILE: &str = "NCCL_SPARK_SETTINGS_FILE";

/// Settings that one command writes into the file or removes from it, always together.
#[derive(Debug)]
pub struct Part {
    remark: &'static str,
    names: &'static [&'static str],
}

pub const SHARES: Part = Part {
    remark: "# nccl-spark tune: ",
    names: &[QPS, MIN_SHARE],
};
pub const TABLE: Part = Part {
    remark: "# nccl-spark tune collectives: ",
    names: &[TUNER_TABLE],
};

pub type Pair = (&'static str, String);

impl Candidate {
    pub fn pairs(self) -> Vec<Pair> {
        vec![
            (QPS, self.qps.to_string()),
            (MIN_SHARE, self.min_share_bytes.to_string()),
        ]
    }
}

/// Returns the current settings. `named` is the file from NCCL_SPARK_SETTINGS_FILE. If this file
/// does not exist yet, returns the default settings.
///
/// # Errors
/// A setting is not valid.
pub fn settings(named: Option<&str>) -> Result<Settings> {
    match named {
        Some(path) if !Path::new(path).exists() => Ok(Settings::gather(&[], &[])?),
        _ => Ok(Settings::of_this_process()?),
    }
}

/// Returns the file that the command line gives, else the file of NCCL_SPARK_SETTINGS_FILE, else
/// the default file.
///
/// # Errors
/// There is no default file. (This does not happen, because the machine's file always is one.)
pub fn place(given: Option<PathBuf>, named: Option<String>) -> Result<PathBuf> {
    given
        .or(named.map(PathBuf::from))
        .map_or_else(|| standard_place(geteuid().is_root()), Ok)
}

/// Returns the default file. For root, this is the machine's file. For other users, it is the file
/// in the home directory, or the machine's file if HOME names no absolute path.
fn standard_place(root: bool) -> Result<PathBuf> {
    let places = host::config::standard_files();
    let place = if root { places.last() } else { places.first() };
    place
        .cloned()
        .context("this user has no home directory for a settings file: name a file with --output")
}

/// Reads and checks the settings file. Callers check before they measure, so that a file that
/// cannot take the result is found early.
///
/// # Errors
/// The file does not exist or is not a valid settings file.
pub fn check(path: &Path) -> Result<Config> {
    Ok(Config::from_variables(&[(
        SETTINGS_FILE.to_owned(),
        path.display().to_string(),
    )])?)
}

/// Writes the settings of `part` into the file, or removes them if none are chosen. Other lines
/// stay. Returns messages about what was done, and whether the plugin will use the settings.
///
/// # Errors
/// The file cannot be read or written; the error names the file and the cure.
pub fn write_settings(
    path: &Path,
    part: &Part,
    chosen: &[Pair],
    remark: &str,
) -> Result<Vec<String>> {
    let path = std::path::absolute(path).context("make the path absolute")?;
    // Replace the file, not a symbolic link to it.
    let place = path.canonicalize().unwrap_or_else(|_| path.clone());
    let old = match fs::read_to_string(&place) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error).with_context(|| format!("read {}", place.display())),
    };
    let new = revise(old.as_deref().unwrap_or_default(), part, chosen, remark);
    let shown = path.display();
    let mut lines = Vec::new();
    if new == old.as_deref().unwrap_or_default() {
        lines.push(format!("{shown} is unchanged"));
    } else {
        replace(&place, &new).map_err(|error| {
            let hint = "; name another file with --output, or run this with sudo";
            anyhow!("cannot write {shown}: {error}{hint}")
        })?;
        let pairs: Vec<String> = chosen
            .iter()
            .map(|(name, value)| short(name, value))
            .collect();
        lines.push(match chosen {
            [] => format!("removed {} from {shown}", part.names.join(" and ")),
            _ => format!("wrote {} to {shown}", pairs.join(" ")),
        });
    }
    lines.extend(effect(
        &path,
        part,
        !chosen.is_empty(),
        Settings::of_this_process(),
    ));
    Ok(lines)
}

/// Formats a setting for a message. Omits a value that would fill the screen.
fn short(name: &str, value: &str) -> String {
    if value.len() <= 40 {
        format!("{name}={value}")
    } else {
        name.to_owned()
    }
}

fn revise(old: &str, part: &Part, chosen: &[Pair], remark: &str) -> String {
    let owned = |line: &str| {
        let name = line.split('=').next().unwrap_or_default().trim();
        line.starts_with(part.remark.trim_end()) || line.contains('=') && part.names.contains(&name)
    };
    let mut block = String::new();
    if !chosen.is_empty() {
        block = format!("{}{remark}\n", part.remark);
    }
    for (name, value) in chosen {
        block += &format!("{name}={value}\n");
    }
    let mut text = String::new();
    let mut placed = false;
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
    // If there is nothing to remove, the text keeps every byte.
    if chosen.is_empty() && !old.lines().any(owned) {
        old.to_owned()
    } else {
        text
    }
}

/// Replaces a file and keeps its permissions. A new file is readable for all users.
fn replace(place: &Path, text: &str) -> io::Result<()> {
    let permissions = match fs::metadata(place) {
        Ok(metadata) if !metadata.is_file() => {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        Ok(metadata) => metadata.permissions(),
        Err(_) => Permissions::from_mode(0o644),
    };
    replacement::written(place, text.as_bytes(), permissions)?.persist(place)?;
    Ok(())
}

/// Reports whether the plugin reads the file, and which of the current `settings` override it.
fn effect(
    path: &Path,
    part: &Part,
    is_written: bool,
    settings: Result<Settings, impl Display>,
) -> Vec<String> {
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => {
            return vec![format!(
                "but the plugin would not start with the current settings: {error}"
            )];
        }
    };
    let is_it = |other: &Path| {
        other == path
            || other
                .canonicalize()
                .ok()
                .is_some_and(|it| path.canonicalize().ok() == Some(it))
    };
    let read = settings.files().iter().any(|file| is_it(file));
    let mut lines = Vec::new();
    for held in settings
        .in_effect()
        .iter()
        .filter(|held| part.names.contains(&held.row.name))
    {
        let from = match &held.source {
            Source::Default => continue,
            Source::File { path, .. } if is_it(path) => continue,
            Source::File { path, line } => format!("from {}, line {line}", path.display()),
            Source::Environment => "from the environment".to_owned(),
        };
        lines.push(format!(
            "but {} {from} overrides it: remove that",
            short(held.row.name, &held.value)
        ));
    }
    match (is_written, read, lines.is_empty()) {
        (true, true, true) => lines.push("the plugin reads it when a job starts".to_owned()),
        (true, false, _) => lines.push(format!(
            "the plugin reads it with: export {SETTINGS_FILE}={}",
            path.display()
        )),
        _ => {}
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: Candidate = Candidate {
        qps: 4,
        min_share_bytes: 32768,
    };

    fn write_settings(path: &Path, chosen: Option<Candidate>, remark: &str) -> Result<Vec<String>> {
        super::write_settings(
            path,
            &SHARES,
            &chosen.map(Candidate::pairs).unwrap_or_default(),
            remark,
        )
    }

    fn revise(old: &str, chosen: Option<Candidate>, remark: &str) -> String {
        super::revise(
            old,
            &SHARES,
            &chosen.map(Candidate::pairs).unwrap_or_default(),
            remark,
        )
    }

    #[test]
    fn each_part_keeps_the_others_lines() {
        let shares = revise("NCCL_IB_TC=106\n", Some(FOUR), "+10 %");
        let table = |text: &str| [(TUNER_TABLE, format!("for=*;all_reduce@2:{text}=ring/ll/2"))];
        let both = super::revise(&shares, &TABLE, &table("1-9"), "1.1 times");
        let block = "# nccl-spark tune collectives: 1.1 times\nNCCL_SPARK_TUNER_TABLE=for=*;all_reduce@2:1-9=ring/ll/2\n";
        assert_eq!(both, format!("{shares}{block}"));
        assert_eq!(
            super::revise(&both, &TABLE, &table("2-8"), "1.1 times"),
            both.replace("1-9", "2-8")
        );
        assert_eq!(super::revise(&both, &TABLE, &[], ""), shares);
        assert_eq!(revise(&both, None, ""), format!("NCCL_IB_TC=106\n{block}"));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.conf");
        let lines = super::write_settings(&file, &TABLE, &table("1-9"), "").unwrap();
        assert!(
            lines[0].starts_with("wrote NCCL_SPARK_TUNER_TABLE=for=*;")
                && lines[0].ends_with("a.conf"),
            "{lines:?}"
        );
        let long = [(
            TUNER_TABLE,
            format!("{};all_gather@2:1-9=ring/ll128/16", table("1-9")[0].1),
        )];
        let lines = super::write_settings(&file, &TABLE, &long, "").unwrap();
        assert!(
            lines[0].starts_with("wrote NCCL_SPARK_TUNER_TABLE to "),
            "{lines:?}"
        );
    }

    #[test]
    fn own_lines_are_replaced_and_others_are_kept() {
        let new = revise("", Some(FOUR), "+10 %");
        let block = "# nccl-spark tune: +10 %\nNCCL_IB_QPS_PER_CONNECTION=4\nNCCL_SPARK_MIN_SHARE_BYTES=32768\n";
        assert_eq!(new, block);
        assert_eq!(
            revise("# mine\nNCCL_IB_TC=106", Some(FOUR), "+10 %"),
            format!("# mine\nNCCL_IB_TC=106\n{block}")
        );
        let old = format!("NCCL_IB_TC=106\n{block}# NCCL_SPARK_MIN_SHARE_BYTES=1 is too small\n");
        let two = Candidate { qps: 2, ..FOUR };
        let expected = old
            .replace("CONNECTION=4", "CONNECTION=2")
            .replace("10 %", "5 %");
        assert_eq!(revise(&old, Some(two), "+5 %"), expected);
        let bare = "NCCL_IB_TC=106\n# NCCL_SPARK_MIN_SHARE_BYTES=1 is too small\n";
        assert_eq!(revise(&old, None, ""), bare);
        assert_eq!(revise("# no end", None, ""), "# no end");
        assert_eq!(revise(" NCCL_IB_QPS_PER_CONNECTION = 9\n", None, ""), "");
    }

    #[test]
    fn a_file_is_replaced_atomically_and_keeps_its_permissions() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.conf");
        let link = folder.path().join("b.conf");
        fs::write(&file, "NCCL_IB_TC=106\n").unwrap();
        fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let lines = write_settings(&link, Some(FOUR), "+10 %").unwrap();
        assert!(
            lines[0].starts_with(&format!("wrote {QPS}=4 {MIN_SHARE}=32768 to ")),
            "{lines:?}"
        );
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(
            fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let text = fs::read_to_string(&file).unwrap();
        assert!(
            text.starts_with("NCCL_IB_TC=106\n# nccl-spark tune: +10 %\n"),
            "{text}"
        );
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            2,
            "something is left over"
        );
        check(&file).unwrap();
        assert!(write_settings(&file, None, "").unwrap()[0].starts_with("removed "));
        assert_eq!(fs::read_to_string(&file).unwrap(), "NCCL_IB_TC=106\n");
        let none = folder.path().join("none.conf");
        assert!(
            write_settings(&none, None, "").unwrap()[0].contains("is unchanged") && !none.exists()
        );
    }

    #[test]
    fn an_unwritable_file_is_named() {
        let error = |path: &str| {
            format!(
                "{:#}",
                write_settings(Path::new(path), Some(FOUR), "").unwrap_err()
            )
        };
        let text = error("/no/where/a.conf");
        assert!(
            text.contains("cannot write /no/where/a.conf") && text.contains("--output"),
            "{text}"
        );
        assert!(error("/dev/null").contains("not a regular file"));
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("broken");
        fs::write(&broken, "x\n").unwrap();
        assert!(check(&broken).unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn settings_that_override_the_file_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let ours = file("ours", &revise("", Some(FOUR), ""));
        let users = file("users", "NCCL_IB_QPS_PER_CONNECTION=1\n");
        let effect_of = |variables: &[(&str, &str)], standard: &[PathBuf]| {
            let variables: Vec<_> = variables
                .iter()
                .map(|(name, value)| ((*name).into(), (*value).into()))
                .collect();
            effect(&ours, &SHARES, true, Settings::gather(&variables, standard)).join("; ")
        };
        assert_eq!(
            effect_of(&[], std::slice::from_ref(&ours)),
            "the plugin reads it when a job starts"
        );
        let export = format!(
            "the plugin reads it with: export NCCL_SPARK_SETTINGS_FILE={}",
            ours.display()
        );
        assert_eq!(effect_of(&[], &[]), export);
        let above = effect_of(&[], &[users.clone(), ours.clone()]);
        assert!(
            above.contains(&format!(
                "{QPS}=1 from {}, line 1 overrides it",
                users.display()
            )),
            "{above}"
        );
        let above = effect_of(&[(MIN_SHARE, "4096")], std::slice::from_ref(&ours));
        assert!(
            above.contains("4096 from the environment overrides it"),
            "{above}"
        );
        assert!(effect_of(&[(MIN_SHARE, "x")], &[]).contains("would not start"));
    }

    #[test]
    fn the_standard_place_is_the_machines_for_root_and_the_users_for_others() {
        assert_eq!(
            standard_place(true).unwrap(),
            Path::new("/etc/nccl-spark.conf")
        );
        assert_eq!(
            standard_place(false).unwrap(),
            host::config::standard_files()[0]
        );
    }
}
