//! The guide's table of findings is that of the program.

use crate::commands::doctor::kinds;
use std::path::Path;

/// docs/guide/troubleshooting.md has one row for each kind of finding. With `SPARK_UPDATE_DOCS=1`
/// the test writes the table.
#[test]
#[allow(clippy::disallowed_methods)]
fn the_guide_has_each_finding_with_its_meaning_and_a_cure() {
    const HEAD: &str = "| id | what it means | what helps |\n|---|---|---|\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide/troubleshooting.md");
    let guide = std::fs::read_to_string(&path).unwrap();
    let start = guide.find(HEAD).expect("the table of findings") + HEAD.len();
    let length = guide[start..].find("\n\n").expect("a section after it") + 1;
    let rows: Vec<String> = kinds()
        .map(|kind| format!("| `{}` | {} | {} |\n", kind.id, kind.meaning, kind.help))
        .collect();
    let table = rows.concat();
    if std::env::var("SPARK_UPDATE_DOCS").is_ok() {
        let updated = [&guide[..start], &table, &guide[start + length..]].concat();
        std::fs::write(&path, updated).unwrap();
    } else {
        let hint = "SPARK_UPDATE_DOCS=1 cargo test -p nccl-tests-harness --lib the_guide_has_each_finding writes the table";
        assert!(guide[start..start + length] == table, "{hint}");
    }
}

#[test]
fn no_two_findings_have_one_id() {
    let ids: Vec<&str> = kinds().map(|kind| kind.id).collect();
    for (at, id) in ids.iter().enumerate() {
        assert!(!ids[..at].contains(id), "{id} is there twice");
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        assert!(id.chars().all(is_plain), "{id}");
    }
}
