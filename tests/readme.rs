//! README.md says what the program says.

use nccl_net_spark::config;

#[test]
fn the_table_of_settings_is_the_programs() {
    let mut expected = String::from("| variable | default | meaning |\n|---|---|---|\n");
    for row in config::table() {
        let default = if row.default.is_empty() { String::new() } else { format!("`{}`", row.default) };
        expected += &format!("| `{}` | {default} | {} |\n", row.name, row.doc);
    }
    let readme = include_str!("../README.md");
    let after = readme.split("<!-- settings-table -->\n").nth(1).expect("the mark before the table");
    let rest = after.trim_start().strip_prefix(&expected);
    let rest = rest.unwrap_or_else(|| panic!("README.md's table of settings should be:\n{expected}"));
    assert!(rest.starts_with("\n## "), "something is left behind the table: {:.60}", rest);
}
