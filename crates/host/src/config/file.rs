//! Settings files: lines of `NAME=value`, as in `nccl.conf`. `#` starts a comment at the beginning
//! of a line or after white space.

use crate::error::{Error, Missing, Result, SettingFault};
use nix::unistd::geteuid;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(super) struct SettingsFile {
    pub(super) path: PathBuf,
    pub(super) lines: Vec<SettingLine>,
    /// The reason why the file may not name a library, if another user can change it.
    pub(super) distrust: Option<String>,
}

#[derive(Debug)]
pub(super) struct SettingLine {
    /// Line number, from 1.
    pub(super) number: usize,
    pub(super) name: String,
    /// An empty value counts as unset, as in the environment.
    pub(super) value: String,
}

const MOST_BYTES: u64 = 1 << 20;

impl SettingsFile {
    /// Reads the file at `path`, the value of `variable`. The file must exist.
    ///
    /// # Errors
    /// [`Error::Setting`] if the file cannot be read, if a line is not `NAME=value`, or if two
    /// lines have the same name.
    pub(super) fn named(variable: &str, path: &str) -> Result<Self> {
        let (text, distrust) = read(Path::new(path)).map_err(|error| Error::Setting {
            name: variable.to_owned(),
            value: path.to_owned(),
            fault: SettingFault::Unreadable(error.to_string()),
        })?;
        Ok(Self {
            distrust,
            ..Self::parse(path.into(), &text)?
        })
    }

    /// Like [`SettingsFile::named`], for a file in a standard place. `None` if the file does not
    /// exist. If it exists and cannot be read, the error is [`Error::Missing`].
    pub(super) fn standard(path: &Path) -> Result<Option<Self>> {
        // If this user may not enter the folder (in containers, another user's HOME), there is no
        // file for this user.
        let absent = [
            ErrorKind::NotFound,
            ErrorKind::NotADirectory,
            ErrorKind::PermissionDenied,
        ];
        if fs::metadata(path).is_err_and(|error| absent.contains(&error.kind())) {
            return Ok(None);
        }
        let unreadable = |error: io::Error| Missing::SettingsFile {
            path: path.to_owned(),
            why: error.to_string(),
        };
        let (text, distrust) = read(path).map_err(unreadable)?;
        Ok(Some(Self {
            distrust,
            ..Self::parse(path.to_owned(), &text)?
        }))
    }

    fn parse(path: PathBuf, text: &str) -> Result<Self> {
        let mut lines: Vec<SettingLine> = Vec::new();
        for (index, text) in text.lines().enumerate() {
            let number = index + 1;
            let text = without_comment(text).trim();
            if text.is_empty() {
                continue;
            }
            let wrong = |name: &str, value: &str, fault| Error::Setting {
                name: place(&path, number, name),
                value: value.to_owned(),
                fault,
            };
            let Some((name, value)) = text.split_once('=') else {
                return Err(wrong("the line", text, SettingFault::NotALine));
            };
            // White space around `=` has no meaning: `NAME=#x` equals `NAME= #x`.
            let name = name.trim().to_owned();
            let value = without_comment(value).trim().to_owned();
            if let Some(first) = lines.iter().find(|line| line.name == name) {
                return Err(wrong(&name, &value, SettingFault::SetBefore(first.number)));
            }
            lines.push(SettingLine {
                number,
                name,
                value,
            });
        }
        Ok(Self {
            path,
            lines,
            distrust: None,
        })
    }

    pub(super) fn line(&self, name: &str) -> Option<&SettingLine> {
        self.lines
            .iter()
            .find(|line| line.name == name && !line.value.is_empty())
    }
}

/// Cuts text at a `#` that starts it or follows white space.
fn without_comment(line: &str) -> &str {
    let starts = |at: usize| {
        line[..at]
            .chars()
            .next_back()
            .is_none_or(char::is_whitespace)
    };
    let comment = line
        .match_indices('#')
        .map(|(at, _)| at)
        .find(|at| starts(*at));
    &line[..comment.unwrap_or(line.len())]
}

pub(super) fn place(path: &Path, line: usize, name: &str) -> String {
    format!("{}, line {line}: {name}", path.display())
}

/// Reads a file. Also returns the value of [`SettingsFile::distrust`].
fn read(path: &Path) -> io::Result<(String, Option<String>)> {
    let mut text = String::new();
    let file = File::open(path)?;
    let distrust = distrust(&file.metadata()?);
    file.take(MOST_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MOST_BYTES {
        true => Err(io::Error::new(
            ErrorKind::FileTooLarge,
            format!("more than {MOST_BYTES} bytes"),
        )),
        false => Ok((text, distrust)),
    }
}

/// Returns the reason why a user other than root and this process's user can change a file.
fn distrust(file: &Metadata) -> Option<String> {
    const BY_GROUP: u32 = 0o020;
    const BY_OTHERS: u32 = 0o002;
    let owner = file.uid();
    let mode = file.mode();
    // Where each user has an own group of the same number (Debian, Ubuntu), files are writable by
    // that group.
    let is_own_group = file.gid() == 0 || (file.gid() == owner && owner == geteuid().as_raw());
    if ![0, geteuid().as_raw()].contains(&owner) {
        return Some(format!("belongs to uid {owner}"));
    }
    let is_open = mode & BY_OTHERS != 0 || (mode & BY_GROUP != 0 && !is_own_group);
    is_open.then(|| format!("has mode {:04o}", mode & 0o7777))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SettingsFile> {
        SettingsFile::parse("/etc/x.conf".into(), text)
    }

    #[test]
    fn a_line_is_a_setting_a_comment_or_nothing() {
        let file = parse(
            "# a comment\n\n NCCL_IB_TC = 106 \r\nNCCL_IB_HCA==mlx5_0\n  # more\nNCCL_IB_SL=\n",
        )
        .unwrap();
        let value = |name| {
            file.line(name)
                .map(|line| (line.number, line.value.as_str()))
        };
        assert_eq!(
            (value("NCCL_IB_TC"), value("NCCL_IB_HCA")),
            (Some((3, "106")), Some((4, "=mlx5_0")))
        );
        assert_eq!((value("NCCL_IB_SL"), file.lines.len()), (None, 3));
    }

    #[test]
    fn a_comment_begins_a_line_or_a_value_or_follows_white_space() {
        let file =
            parse("A=106 # DSCP 26\nB=2\t#x\nC=a#b # c#d\nD= # unset\n\t# E=1\nF=#1\n").unwrap();
        let values: Vec<_> = file
            .lines
            .iter()
            .map(|line| (line.name.as_str(), line.value.as_str()))
            .collect();
        assert_eq!(
            values,
            [("A", "106"), ("B", "2"), ("C", "a#b"), ("D", ""), ("F", "")]
        );
        assert!(
            parse("NCCL_IB_TC # =106")
                .unwrap_err()
                .to_string()
                .contains("NAME=value")
        );
    }

    #[test]
    fn a_line_that_is_no_setting_is_named() {
        let error = parse("\nexport\n").unwrap_err().to_string();
        assert!(
            error.starts_with("/etc/x.conf, line 2: the line=\"export\"")
                && error.contains("NAME=value"),
            "{error}"
        );
        let error = parse("NCCL_IB_TC=1\nNCCL_IB_TC=2").unwrap_err().to_string();
        assert!(
            error.starts_with("/etc/x.conf, line 2: NCCL_IB_TC=\"2\"")
                && error.contains("line 1 already sets it"),
            "{error}"
        );
    }

    #[test]
    fn a_named_settings_file_must_exist_and_a_standard_one_need_not() {
        let folder = tempfile::tempdir().unwrap();
        let gone = folder.path().join("gone");
        assert!(SettingsFile::standard(&gone).unwrap().is_none());
        let error = SettingsFile::named("A_NAME", gone.to_str().unwrap())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("A_NAME=") && error.contains("No such file"),
            "{error}"
        );
        let error = SettingsFile::standard(folder.path())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(folder.path().to_str().unwrap()) && error.contains("directory"),
            "{error}"
        );
        let garbled = folder.path().join("garbled");
        fs::write(&garbled, [0xff, 0xfe]).unwrap();
        assert!(
            SettingsFile::standard(&garbled)
                .unwrap_err()
                .to_string()
                .contains("UTF-8")
        );
        fs::write(&garbled, vec![b'\n'; MOST_BYTES as usize + 1]).unwrap();
        assert!(
            SettingsFile::standard(&garbled)
                .unwrap_err()
                .to_string()
                .contains("more than 1048576 bytes")
        );
        assert!(
            SettingsFile::named("A_NAME", "/dev/null")
                .unwrap()
                .lines
                .is_empty()
        );
    }
}
