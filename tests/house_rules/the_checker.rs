//! The checker itself, on sources that break one rule each.

use crate::reading::File;
use crate::rooms::rooms;
use crate::{check_all, check_file};

const ARCHITECTURE: &str = "\
| room | what it is | may import | may not |
|---|---|---|---|
| `src/lib.rs` | symbols | `abi` | |
| `src/abi/` | C inward (`handles.rs`) | `plugin`, leaves | |
| `src/comm/` | joins | `flow`, leaves | `rails` |
| `src/flow/` | pure | | `verbs` |
| `nccl-tests-harness/` | the `nccl-spark` command line | `rails` as a crate | |

### Inside comm

| room | what it is |
|---|---|
| `setup/` | makes connections |
| `datapath/` | moves bytes |
| `rail.rs`, `rail/`, `log/` | a rail; log lines |

## Words

| `datapath/` | not a room |
";

/// What the rules say of one file.
fn verdict(path: &str, text: &str) -> Vec<String> {
    check_file(&File::read(path, text), false, &rooms(ARCHITECTURE))
}

#[track_caller]
fn broken(path: &str, text: &str, expected: &str) {
    let verdict = verdict(path, text);
    assert!(verdict.len() == 1 && verdict[0].contains(expected), "{path}: {text}: {verdict:?}");
}

#[track_caller]
fn kept(path: &str, text: &str) {
    assert_eq!(verdict(path, text), Vec::<String>::new(), "{path}: {text}");
}

#[test]
fn imports_follow_the_table() {
    kept(
        "src/comm/datapath/send.rs",
        "use crate::flow::Plan; use crate::comm::rail::x; use crate::error::{Error, Result};",
    );
    kept("src/abi/mod.rs", "fn f() { crate::plugin::init() } mod a { use super::super::config; }");
    broken("src/comm/datapath/send.rs", "\nuse crate::rails::Rail;", "2: `comm` may not import `rails`");
    broken("src/comm/datapath/send.rs", "use crate::{flow::Plan, rails};", "`rails`");
    broken("src/comm/datapath/send.rs", "use super::super::super::rails::Rail;", "`rails`");
    broken("src/comm/datapath/send.rs", "use super::super::{super::rails::Rail, log};", "`rails`");
    broken("src/comm/mod.rs", "use super::rails::Rail;", "`rails`");
    broken("src/comm/mod.rs", "mod a { fn f() { super::super::rails::g() } }", "`rails`");
    broken("src/flow/plan.rs", "fn f() { let x = crate::verbs::X; }", "`flow` may not import `verbs`");
    broken("src/flow/plan.rs", "fn f() { log!(\"{}\", crate::verbs::X); }", "`verbs`");
    broken("src/comm/datapath/send.rs", "use crate::abi::Handle;", "`abi`");
    broken("src/cellar.rs", "use crate::error::Error;", "no room `src/cellar`");
    kept("nccl-tests-harness/src/main.rs", "use nccl_net_spark::rails::report; use crate::verbs::X;");
    broken("nccl-tests-harness/src/main.rs", "use nccl_net_spark::{comm, rails};", "`comm`");
    kept("src/comm/datapath/send.rs", "#[cfg(test)]\nmod tests { use crate::rails::Rail; }");
    kept("src/comm/datapath/send.rs", "pub(crate) fn f() {} /// See `crate::rails`.\nfn g() { super::rails::h() }");
}

#[test]
fn a_room_inside_comm_imports_only_what_is_below_it() {
    kept("src/comm/setup/listen.rs", "use super::finish; use crate::comm::datapath::Lane; use crate::comm::log::Once;");
    kept("src/comm/rail.rs", "use crate::comm::log::Once; use self::registration::Keys; use super::log::Once;");
    kept("src/comm/rail/registration.rs", "use super::Rail; use super::super::log::Once;");
    kept("src/comm/datapath/send.rs", "#[cfg(test)] mod tests { use crate::comm::setup::listen; }");
    broken("src/comm/datapath/send.rs", "use crate::comm::setup::listen;", "`datapath` is below `setup`");
    broken("src/comm/datapath/send.rs", "fn f() { super::super::setup::listen() }", "`datapath` is below `setup`");
    broken("src/comm/rail.rs", "use super::datapath::Lane;", "`rail` is below `datapath`");
    broken("src/comm/rail/registration.rs", "use super::super::datapath::Lane;", "`rail` is below `datapath`");
    broken("src/comm/setup/listen.rs", "use crate::comm::SendComm;", "named by its room");
    broken("src/comm/cellar.rs", "use crate::comm::rail::Rail;", "no room `cellar` inside comm");
}

#[test]
fn unsafe_stays_in_its_places() {
    kept("src/abi/handles.rs", "fn f() { unsafe { g() } }");
    kept("tests/abi_drive.rs", "fn f() { unsafe { g() } }");
    kept("src/flow/plan.rs", "#![forbid(unsafe_code)] // unsafe\n/// unsafe\nconst A: &str = \"unsafe\";");
    broken("src/comm/datapath/send.rs", "fn f() { unsafe { g() } }", "`unsafe`");
    broken("src/comm/datapath/send.rs", "fn f() { warn!(\"{}\", unsafe { g() }) }", "`unsafe`");
    kept("src/comm/datapath/send.rs", "type A = Option<unsafe extern \"C\" fn(u8)>; type B = unsafe fn(u8);");
    broken("src/comm/datapath/send.rs", "unsafe extern \"C\" fn f(a: u8) {}", "`unsafe`");
    broken("src/comm/datapath/try_cell_of.rs", "unsafe impl Send for X {}", "`unsafe`");
    broken("src/wire/cts.rs", "#[cfg(test)] mod tests { fn f() { unsafe { g() } } }", "`unsafe`");
}

#[test]
fn the_environment_is_read_in_one_file() {
    kept("src/config.rs", "fn f() { std::env::var(\"A\"); }");
    kept("src/comm/datapath/send.rs", "const A: &str = env!(\"CARGO_PKG_VERSION\");");
    broken("src/comm/datapath/send.rs", "fn f() { std::env::var(\"A\"); }", "std::env::var");
    broken("src/comm/datapath/send.rs", "use std::{io, env::var_os};", "std::env::var_os");
    broken("nccl-tests-harness/src/ring.rs", "use std::env;", "std::env");
}

#[test]
fn the_data_path_has_no_locks_and_pure_rooms_no_world() {
    broken("src/flow/plan.rs", "struct A { b: Mutex<u8> }", "`Mutex`");
    broken("src/comm/datapath/recv.rs", "use std::sync::{Arc, RwLock};", "`RwLock`");
    kept("src/comm/setup/service.rs", "use std::sync::{Arc, Mutex};");
    kept("src/flow/plan.rs", "use std::time::Duration;");
    broken("src/flow/plan.rs", "use std::time::{Duration, Instant};", "std::time::Instant");
    broken("src/wire/cts.rs", "fn f() -> libc::c_int { 0 }", "libc::c_int");
}

#[test]
fn nothing_panics_on_purpose_outside_tests() {
    kept("src/comm/datapath/send.rs", "fn f() { a.unwrap_or(1); a.unwrap_or_default(); expect(b); unwrap(); }");
    kept("src/comm/datapath/send.rs", "#[cfg(test)] mod tests { fn f() { a.unwrap(); panic!(); } }");
    kept("src/comm/datapath/send.rs", "#[cfg(all(test, unix))] use a::b; #[test] fn f() { a.unwrap(); }");
    kept("nccl-tests-harness/src/ring.rs", "fn f() { a.unwrap(); }");
    broken("src/comm/datapath/send.rs", "fn f() { a.unwrap(); }", "`unwrap()`");
    broken("src/comm/datapath/send.rs", "fn f() { a.map(Option::unwrap); }", "`unwrap()`");
    broken("src/comm/datapath/send.rs", "fn f() { info!(\"{}\", a.expect(\"b\")); }", "`expect()`");
    broken("src/comm/datapath/send.rs", "fn f() { panic!(\"b\"); }", "`panic!`");
    broken("src/comm/datapath/send.rs", "#[cfg(test)] use a::b; fn f() { a.unwrap(); }", "`unwrap()`");
    broken("src/comm/datapath/send.rs", "#[cfg(not(test))] mod a { fn f() { a.unwrap(); } }", "`unwrap()`");
    broken("tests/abi_drive.rs", "fn f() { todo!() }", "`todo!`");
    broken("nccl-tests-harness/src/ring.rs", "fn f() { dbg!(1); }", "`dbg!`");
}

#[test]
fn a_module_for_tests_in_its_own_file_is_test_code() {
    let declared = File::read("src/comm/datapath/send.rs", "#[cfg(test)] mod tests; mod real;").test_files;
    assert_eq!(declared, ["src/comm/datapath/send/tests.rs", "src/comm/datapath/send/tests/mod.rs"]);
    let declared = File::read("src/comm/mod.rs", "#[cfg(test)]\nmod fixtures;").test_files;
    assert_eq!(declared[0], "src/comm/fixtures.rs");
}

#[test]
fn files_and_functions_have_a_limit() {
    let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
    kept("src/comm/datapath/send.rs", &function(69));
    broken("src/comm/datapath/send.rs", &function(70), "`fn f` has 70 lines");
    broken("src/comm/datapath/send.rs", &format!("impl A {{\n{}}}", function(80)), "`fn f` has 80 lines");
    kept("src/comm/datapath/send.rs", &"const A: u8 = 1;\n".repeat(599));
    broken("src/comm/datapath/send.rs", &"const A: u8 = 1;\n".repeat(600), "600 lines");
    kept("verbs-sys/src/bindings.rs", &"const A: u8 = 1;\n".repeat(900));
}

#[test]
fn a_place_that_is_gone_is_told() {
    let told = check_all(&[("src/config.rs".to_owned(), String::new())], ARCHITECTURE);
    assert!(told.iter().any(|line| line.starts_with("src/comm/datapath/try_cell.rs: named")), "{told:?}");
    assert!(!told.iter().any(|line| line.starts_with("src/config.rs: named")), "{told:?}");
}
