//! The guide agrees with the program, and links in all documents lead to files.

use host::config;
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn the_table_of_settings_is_the_programs() {
    let mut expected = String::from("| variable | default | meaning |\n|---|---|---|\n");
    for row in config::table() {
        let default = if row.default.is_empty() {
            String::new()
        } else {
            format!("`{}`", row.default)
        };
        expected += &format!("| `{}` | {default} | {} |\n", row.name, row.doc);
    }
    let guide = include_str!("../docs/guide/settings.md");
    let after = guide
        .split("<!-- settings-table -->\n")
        .nth(1)
        .expect("the mark before the table");
    let rest = after.trim_start().strip_prefix(&expected);
    let rest =
        rest.unwrap_or_else(|| panic!("docs/guide/settings.md's table should be:\n{expected}"));
    assert!(
        rest.starts_with("\n## "),
        "something is left behind the table: {:.60}",
        rest
    );
}

#[test]
fn the_table_of_ignored_variables_is_the_programs() {
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for (name, why) in config::nccl::ignored() {
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, names)) => names.push(format!("`{name}`")),
            None => reasons.push((why, vec![format!("`{name}`")])),
        }
    }
    let rows = reasons
        .iter()
        .map(|(why, names)| format!("| {} | {why} |\n", names.join(", ")));
    let expected = format!(
        "| variable | why |\n|---|---|\n{}",
        rows.collect::<String>()
    );
    let guide = include_str!("../docs/guide/settings.md");
    let after = guide
        .split("<!-- ignored-table -->\n")
        .nth(1)
        .expect("the mark before the table");
    let rest = after.trim_start().strip_prefix(&expected);
    let rest = rest.unwrap_or_else(|| {
        panic!("docs/guide/settings.md's table of ignored variables should be:\n{expected}")
    });
    assert!(
        rest.starts_with("\n## "),
        "something is left behind the table: {:.60}",
        rest
    );
}

/// Checks that each link's file exists, and its heading if the link names one.
#[test]
fn links_lead_to_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages: Vec<PathBuf> = [
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ]
    .map(|page| root.join(page))
    .into();
    pages_under(&root.join("docs"), &mut pages);
    assert!(pages.len() > 10, "{pages:?}");
    let mut broken = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page).unwrap();
        for target in text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next())
        {
            let (file, heading) = target
                .split_once('#')
                .map_or((target, None), |(file, heading)| (file, Some(heading)));
            let path = if file.is_empty() {
                page.clone()
            } else {
                page.parent().unwrap().join(file)
            };
            let is_there = || match heading
                .filter(|_| path.extension().is_some_and(|extension| extension == "md"))
            {
                Some(heading) => fs::read_to_string(&path)
                    .is_ok_and(|text| anchors(&text).iter().any(|one| one == heading)),
                None => path.exists(),
            };
            if !target.contains("://") && !is_there() {
                broken.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// Returns the names that a page's headings have in links on GitHub.
fn anchors(text: &str) -> Vec<String> {
    let mut is_code = false;
    let headings = text.lines().filter(|line| {
        is_code ^= line.starts_with("```");
        !is_code && line.starts_with('#')
    });
    headings
        .map(|line| {
            let kept = line.trim_start_matches('#').trim().to_lowercase();
            kept.chars()
                .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
                .collect::<String>()
                .replace(' ', "-")
        })
        .collect()
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
