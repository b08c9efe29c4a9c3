//! What gets installed: the files with their content.

use crate::commands::manual;
use crate::places;
use anyhow::{Context, Result};
use clap::Command;
use std::fs;
use std::path::Path;

/// A file to install.
pub struct Item {
    /// Below the prefix.
    pub path: String,
    /// All of it.
    pub content: Vec<u8>,
    /// Its permissions.
    pub mode: u32,
}

const PROGRAM_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o644;

/// All files, read before any is written: the program may be the one that is replaced. `command_line` is what completions and manual
/// pages are made from.
pub fn collect(program: &Path, plugin: &Path, fabric: &Path, command_line: &Command) -> Result<Vec<Item>> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("read {}", path.display()));
    let mut items = vec![
        Item { path: places::PROGRAM.to_owned(), content: read(program)?, mode: PROGRAM_MODE },
        Item { path: places::PLUGIN.to_owned(), content: read(plugin)?, mode: FILE_MODE },
        Item { path: places::FABRIC.to_owned(), content: read(fabric)?, mode: FILE_MODE },
    ];
    let shared = |(path, content): (String, Vec<u8>)| Item { path: format!("share/{path}"), content, mode: FILE_MODE };
    items.extend(
        manual::Shell::ALL.map(|shell| (shell.file().to_owned(), manual::completions(command_line, shell))).map(shared),
    );
    let pages = manual::pages(command_line).context("write the manual pages")?;
    items.extend(pages.into_iter().map(|(name, text)| shared((format!("man/man1/{name}"), text))));
    Ok(items)
}
