//! The guide says what the program says.

use nccl_net_spark::config;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn the_table_of_settings_is_the_programs() {
    let mut expected = String::from("| variable | default | meaning |\n|---|---|---|\n");
    for row in config::table() {
        let default = if row.default.is_empty() { String::new() } else { format!("`{}`", row.default) };
        expected += &format!("| `{}` | {default} | {} |\n", row.name, row.doc);
    }
    let guide = include_str!("../docs/guide/settings.md");
    let after = guide.split("<!-- settings-table -->\n").nth(1).expect("the mark before the table");
    let rest = after.trim_start().strip_prefix(&expected);
    let rest = rest.unwrap_or_else(|| panic!("docs/guide/settings.md's table should be:\n{expected}"));
    assert!(rest.starts_with("\n## "), "something is left behind the table: {:.60}", rest);
}

/// Every relative link in README.md and docs/ leads to a file.
#[test]
fn links_lead_to_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages = vec![root.join("README.md"), root.join("ARCHITECTURE.md")];
    pages_under(&root.join("docs"), &mut pages);
    assert!(pages.len() > 10, "{pages:?}");
    let mut broken = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page).unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let file = target.split('#').next().unwrap();
            let is_remote = target.contains("://") || target.starts_with('#');
            if !is_remote && !page.parent().unwrap().join(file).exists() {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

fn pages_under(folder: &Path, pages: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages_under(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}
