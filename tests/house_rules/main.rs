//! Rules that clippy cannot check: what each room (a file or folder of `src/`) may import
//! (`rooms.toml`), import cycles and the width of comments. All other rules are lints in Cargo.toml
//! and clippy.toml.
//!
//! The checker reads tokens, because a syntax tree does not show the names inside macros.

mod cycles;
mod modules;
mod reading;
mod rooms;
mod scopes;
mod the_checker;
mod the_cycles;
mod tokens;

use cycles::check_cycles;
use reading::File;
use rooms::Rooms;
use std::collections::BTreeSet;
use std::path::Path;

const MAX_COMMENT_COLUMNS: usize = 100;

/// Files that a tool writes. Their comments may have any width.
const GENERATED: &[&str] = &["verbs-sys/src/bindings.rs"];

#[test]
fn the_sources_keep_the_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rooms = Rooms::read(include_str!("rooms.toml"));
    let mut sources = Vec::new();
    collect(root, root, &mut sources);
    assert!(
        sources.len() > 20,
        "only {} source files found under {}",
        sources.len(),
        root.display()
    );
    let broken = check_all(&sources, &rooms);
    assert!(
        broken.is_empty(),
        "{} house rules broken:\n{}",
        broken.len(),
        broken.join("\n")
    );
}

fn collect(root: &Path, folder: &Path, sources: &mut Vec<(String, String)>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            // cargo marks build folders, whatever their name, with a file for back-up programs.
            if !name.starts_with('.') && name != "target" && !path.join("CACHEDIR.TAG").exists() {
                collect(root, &path, sources);
            }
        } else if name.ends_with(".rs") {
            let relative = path
                .strip_prefix(root)
                .unwrap()
                .to_string_lossy()
                .into_owned();
            sources.push((relative, std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Returns every broken rule as a line `path:line: reason`.
fn check_all(sources: &[(String, String)], rooms: &Rooms) -> Vec<String> {
    let files: Vec<File> = sources
        .iter()
        .map(|(path, text)| File::parse(path, text))
        .collect();
    let test_files: BTreeSet<String> = files
        .iter()
        .flat_map(|file| file.test_files.iter().cloned())
        .collect();
    let mut broken = rooms.check_names(&files.iter().map(|file| file.path.as_str()).collect());
    for file in &files {
        let is_test_code = test_files.contains(&file.path) || file.is_test_code();
        broken.extend(
            check_file(file, is_test_code, rooms)
                .into_iter()
                .map(|line| format!("{}:{line}", file.path)),
        );
    }
    for (path, text) in sources
        .iter()
        .filter(|(path, _)| !GENERATED.contains(&path.as_str()))
    {
        let wide = wide_comments(text).into_iter();
        broken.extend(wide.map(|line| {
            format!("{path}:{line}: a comment wider than {MAX_COMMENT_COLUMNS} columns")
        }));
    }
    broken.extend(check_cycles(&files));
    broken
}

fn check_file(file: &File, is_test_code: bool, rooms: &Rooms) -> Vec<String> {
    if is_test_code {
        return Vec::new();
    }
    let mut broken = Vec::new();
    for path in file.paths.iter().filter(|path| !path.in_test) {
        let wrong = rooms.check(&file.path, path);
        broken.extend(wrong.map(|wrong| format!("{}: {wrong}", path.line)));
    }
    broken
}

/// Returns the numbers of lines whose comment is too wide. Code blocks in comments may be wider.
fn wide_comments(text: &str) -> Vec<usize> {
    let mut wide = Vec::new();
    let mut is_code_block = false;
    for (number, line) in (1..)
        .zip(text.lines())
        .filter(|(_, line)| line.trim_start().starts_with("//"))
    {
        is_code_block ^= line.contains("```");
        if !is_code_block && line.chars().count() > MAX_COMMENT_COLUMNS {
            wide.push(number);
        }
    }
    wide
}
