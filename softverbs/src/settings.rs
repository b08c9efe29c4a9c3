//! The settings, from the environment; read once, when a process joins a fabric.

#![allow(
    clippy::disallowed_methods,
    reason = "the one file that reads the environment"
)]

use crate::own_folder;
use std::path::{Path, PathBuf};

/// Parameters with which a process joins a fabric.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `SOFTVERBS_DIR`: folder of all fabrics; default `$XDG_RUNTIME_DIR/softverbs` or
    /// `/dev/shm/softverbs-UID`.
    pub dir: PathBuf,
    /// `SOFTVERBS_FABRIC`: the fabric's name; default "default".
    pub fabric: String,
    /// `SOFTVERBS_NODE`: this process's machine, 0 to 15; default: the lowest machine without a
    /// process.
    pub node: Option<usize>,
    /// `SOFTVERBS_PROFILE`: a built-in profile or a file; default "spark-1cable".
    pub profile: String,
    /// `SOFTVERBS_SCALE`: factor on all rates of the profile; default 1.
    pub scale: f64,
    /// `SOFTVERBS_THREADS`: number of engine threads, 1 to 16; default: a quarter of the number of
    /// processors. There is always at least one thread, and at most one for each rail.
    pub threads: Option<usize>,
    /// `SOFTVERBS_ADVERSARY`: a seed for an adversary. With an adversary, polls return fewer
    /// completions than they could, queue pairs are served out of turn, and bytes arrive late.
    pub adversary: Option<u64>,
}

impl Settings {
    /// Reads the settings. The error names the wrong variable, and lists the allowed values.
    pub(crate) fn from_environment() -> Result<Self, String> {
        let known = [
            "DIR",
            "FABRIC",
            "NODE",
            "PROFILE",
            "SCALE",
            "THREADS",
            "ADVERSARY",
        ];
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if let Some(rest) = name.strip_prefix("SOFTVERBS_")
                && !known.contains(&rest)
            {
                return Err(format!(
                    "{name}: no such setting; the settings: SOFTVERBS_{}",
                    known.join(", SOFTVERBS_")
                ));
            }
        }
        Ok(Self {
            dir: dir()?,
            fabric: fabric()?,
            node: number(read("SOFTVERBS_NODE"), "SOFTVERBS_NODE", 0, 15)?,
            profile: read("SOFTVERBS_PROFILE").unwrap_or_else(|| "spark-1cable".to_owned()),
            scale: scale(read("SOFTVERBS_SCALE"))?,
            threads: number(read("SOFTVERBS_THREADS"), "SOFTVERBS_THREADS", 1, 16)?,
            adversary: number(
                read("SOFTVERBS_ADVERSARY"),
                "SOFTVERBS_ADVERSARY",
                0,
                usize::MAX,
            )?
            .map(|seed| seed as u64),
        })
    }
}

/// Returns the name in `SOFTVERBS_FABRIC`, or the default. The error describes the allowed names.
pub fn fabric() -> Result<String, String> {
    named(read("SOFTVERBS_FABRIC"))
}

fn read(name: &str) -> Option<String> {
    std::env::var(name)
        .ok()
        .map(|value| value.trim().to_owned())
        .filter(|value| !value.is_empty())
}

/// Returns the folder of all fabrics: `SOFTVERBS_DIR`, or this user's own folder, which is created
/// if it is missing. The error says why a folder under that name cannot be used.
pub fn dir() -> Result<PathBuf, String> {
    let text = std::env::var_os("SOFTVERBS_DIR").unwrap_or_default();
    match text.to_str().map(str::trim) {
        Some("") => own_folder::create(read("XDG_RUNTIME_DIR").as_deref().map(Path::new)),
        given => {
            let given = given.map_or_else(|| PathBuf::from(&text), PathBuf::from);
            // An absolute path, because ranks may run in other directories, and because the links
            // in the fabric's folder are full paths.
            Ok(std::path::absolute(&given).unwrap_or(given))
        }
    }
}

fn named(value: Option<String>) -> Result<String, String> {
    let name = value.unwrap_or_else(|| "default".to_owned());
    let plain = name.len() <= 64
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    if plain {
        Ok(name)
    } else {
        Err(format!(
            "SOFTVERBS_FABRIC={name:?}: must be at most 64 letters, digits, '-' and '_'"
        ))
    }
}

fn number(
    value: Option<String>,
    name: &str,
    low: usize,
    high: usize,
) -> Result<Option<usize>, String> {
    let Some(text) = value else { return Ok(None) };
    match text.parse() {
        Ok(n) if (low..=high).contains(&n) => Ok(Some(n)),
        _ => Err(format!("{name}={text:?}: must be {low} to {high}")),
    }
}

/// Allowed factors on a profile's rates.
pub const SCALES: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

fn scale(value: Option<String>) -> Result<f64, String> {
    let Some(text) = value else { return Ok(1.0) };
    match text.parse::<f64>() {
        Ok(factor) if SCALES.contains(&factor) => Ok(factor),
        _ => Err(format!(
            "SOFTVERBS_SCALE={text:?}: must be {} to {}",
            SCALES.start(),
            SCALES.end()
        )),
    }
}
