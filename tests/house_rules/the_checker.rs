//! Tests of the checker, on sources that break one rule each.

use crate::reading::File;
use crate::rooms::Rooms;
use crate::{check_all, check_file, wide_comments};

const ROOMS: &str = r#"
[rooms]
lib = ["abi"]
abi = ["config", "error", "plugin"]
comm = ["error", "flow"]
flow = []
[comm]
layers = [["setup"], ["datapath"], ["log", "rail"]]
"#;

fn verdict(path: &str, text: &str) -> Vec<String> {
    check_file(&File::parse(path, text), false, &Rooms::read(ROOMS))
}

#[track_caller]
fn broken(path: &str, text: &str, expected: &str) {
    let verdict = verdict(path, text);
    assert!(
        verdict.len() == 1 && verdict[0].contains(expected),
        "{path}: {text}: {verdict:?}"
    );
}

#[track_caller]
fn kept(path: &str, text: &str) {
    assert_eq!(verdict(path, text), Vec::<String>::new(), "{path}: {text}");
}

#[test]
fn a_room_imports_only_the_rooms_that_rooms_toml_lists_for_it() {
    kept(
        "src/comm/datapath/send.rs",
        "use crate::flow::Plan; use crate::comm::rail::x; use crate::error::{Error, Result};",
    );
    broken(
        "src/comm/datapath/send.rs",
        "\nuse crate::rails::Rail;",
        "2: `comm` may not import `rails`",
    );
    broken(
        "src/comm/datapath/send.rs",
        "use crate::{flow::Plan, rails};",
        "`rails`",
    );
    broken(
        "src/comm/datapath/send.rs",
        "use crate::abi::Handle;",
        "`abi`",
    );
    broken(
        "src/cellar.rs",
        "use crate::error::Error;",
        "no room `cellar`",
    );
}

#[test]
fn a_path_inside_a_function_or_a_macro_is_an_import() {
    broken(
        "src/flow/plan.rs",
        "fn f() { let x = crate::verbs::X; }",
        "`flow` may not import `verbs`",
    );
    broken(
        "src/flow/plan.rs",
        "fn f() { log!(\"{}\", crate::verbs::X); }",
        "`verbs`",
    );
}

#[test]
fn a_path_of_supers_is_followed_to_its_room() {
    kept(
        "src/abi/mod.rs",
        "fn f() { crate::plugin::init() } mod a { use super::super::config; }",
    );
    broken(
        "src/comm/datapath/send.rs",
        "use super::super::super::rails::Rail;",
        "`rails`",
    );
    broken(
        "src/comm/datapath/send.rs",
        "use super::super::{super::rails::Rail, log};",
        "`rails`",
    );
    broken("src/comm/mod.rs", "use super::rails::Rail;", "`rails`");
    broken(
        "src/comm/mod.rs",
        "mod a { fn f() { super::super::rails::g() } }",
        "`rails`",
    );
    kept(
        "src/comm/datapath/send.rs",
        "pub(crate) fn f() {} /// See `crate::rails`.\nfn g() { super::rails::h() }",
    );
}

#[test]
fn a_module_for_tests_may_import_any_room() {
    kept(
        "src/comm/datapath/send.rs",
        "#[cfg(test)]\nmod tests { use crate::rails::Rail; }",
    );
}

#[test]
fn a_room_inside_comm_imports_only_what_is_below_it() {
    kept(
        "src/comm/setup/listen.rs",
        "use super::finish; use crate::comm::datapath::Lane; use crate::comm::log::Once;",
    );
    kept(
        "src/comm/rail.rs",
        "use crate::comm::log::Once; use self::registration::Keys; use super::log::Once;",
    );
    kept(
        "src/comm/rail/registration.rs",
        "use super::Rail; use super::super::log::Once;",
    );
    kept(
        "src/comm/datapath/send.rs",
        "#[cfg(test)] mod tests { use crate::comm::setup::listen; }",
    );
    broken(
        "src/comm/datapath/send.rs",
        "use crate::comm::setup::listen;",
        "`datapath` is below `setup`",
    );
    broken(
        "src/comm/datapath/send.rs",
        "fn f() { super::super::setup::listen() }",
        "`datapath` is below `setup`",
    );
    broken(
        "src/comm/rail.rs",
        "use super::datapath::Lane;",
        "`rail` is below `datapath`",
    );
    broken(
        "src/comm/rail/registration.rs",
        "use super::super::datapath::Lane;",
        "`rail` is below `datapath`",
    );
    broken(
        "src/comm/setup/listen.rs",
        "use crate::comm::SendComm;",
        "named by its room",
    );
    broken(
        "src/comm/cellar.rs",
        "use crate::comm::rail::Rail;",
        "no room `cellar` inside comm",
    );
}

#[test]
fn a_module_for_tests_in_its_own_file_is_test_code() {
    let declared = File::parse(
        "src/comm/datapath/send.rs",
        "#[cfg(test)] mod tests; mod real;",
    )
    .test_files;
    assert_eq!(
        declared,
        [
            "src/comm/datapath/send/tests.rs",
            "src/comm/datapath/send/tests/mod.rs"
        ]
    );
    let declared = File::parse("src/comm/mod.rs", "#[cfg(test)]\nmod fixtures;").test_files;
    assert_eq!(declared[0], "src/comm/fixtures.rs");
}

#[test]
fn a_comment_has_at_most_100_columns_outside_of_code_blocks() {
    let comment = |columns: usize| format!("    // {}\n", "x".repeat(columns - 7));
    assert!(wide_comments(&comment(100)).is_empty());
    assert_eq!(wide_comments(&(comment(100) + &comment(101))), [2]);
    assert!(wide_comments(&format!("//! ```sh\n{}//! ```\n", comment(101))).is_empty());
    assert!(wide_comments(&format!("let text = \"{}\";\n", "x".repeat(101))).is_empty());
}

#[test]
fn a_missing_room_is_reported() {
    let sources =
        ["src/abi/mod.rs", "src/comm/log.rs"].map(|path| (path.to_owned(), String::new()));
    let broken = check_all(&sources, &Rooms::read(ROOMS));
    for (place, is_reported) in [
        ("src/abi", false),
        ("src/flow", true),
        ("src/comm/log", false),
        ("src/comm/rail", true),
    ] {
        assert_eq!(
            broken
                .iter()
                .any(|line| line.starts_with(&format!("{place}: named"))),
            is_reported,
            "{place}: {broken:?}"
        );
    }
}
