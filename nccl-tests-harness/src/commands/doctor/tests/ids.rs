//! The guide's table of findings agrees with the program.

use crate::commands::doctor::id;

/// Each id has one row with meaning and cure in docs/guide/troubleshooting.md. Other ids have none.
#[test]
fn the_guide_has_each_finding_with_its_meaning_and_a_cure() {
    let guide = include_str!("../../../../../docs/guide/troubleshooting.md");
    let section = guide
        .split("\n## What the doctor finds\n")
        .nth(1)
        .expect("the section with the findings");
    let section = section.split("\n## ").next().unwrap();
    let rows: Vec<Vec<&str>> = section
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect();
    let found: Vec<String> = rows
        .iter()
        .map(|row| format!("| {} | {} |", row[0], row[1]))
        .collect();
    let wanted: Vec<String> = id::ALL
        .iter()
        .map(|(id, meaning)| format!("| `{id}` | {meaning} |"))
        .collect();
    assert_eq!(
        found,
        wanted,
        "docs/guide/troubleshooting.md should have:\n{}",
        wanted.join("\n")
    );
    for row in &rows {
        assert!(row.len() == 3 && row[2].len() > 3, "{row:?} names no cure");
    }
}

#[test]
fn no_two_findings_have_one_id() {
    for (at, (id, _)) in id::ALL.iter().enumerate() {
        assert!(
            id::ALL[..at].iter().all(|(earlier, _)| earlier != id),
            "{id} is there twice"
        );
        assert!(
            id.chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'),
            "{id}"
        );
    }
}

#[test]
fn faults_md_has_each_finding() {
    let faults = include_str!("../faults.md");
    let missing: Vec<&str> = id::ALL
        .iter()
        .map(|(id, _)| *id)
        .filter(|id| !faults.contains(&format!("`{id}`")))
        .collect();
    assert!(
        missing.is_empty(),
        "commands/doctor/faults.md has no {missing:?}"
    );
}
