//! Tests of the rule on cycles of imports, on crates of a few lines.

use crate::cycles::check_cycles;
use crate::reading::File;

fn check(sources: &[(&str, &str)]) -> Vec<String> {
    let files: Vec<File> = sources
        .iter()
        .map(|(path, text)| File::parse(path, text))
        .collect();
    check_cycles(&files)
}

fn check_a_and_b(a: &str, b: &str, others: &[(&str, &str)]) -> Vec<String> {
    let root = ("src/lib.rs", "mod a; pub mod b;");
    check(&[&[root, ("src/a.rs", a), ("src/b.rs", b)], others].concat())
}

#[track_caller]
fn cycle(lines: &[String], expected: &str) {
    assert!(
        lines.len() == 1 && lines[0].ends_with(&format!("a cycle: {expected}")),
        "{lines:?}"
    );
}

#[track_caller]
fn none(lines: &[String]) {
    assert_eq!(lines, Vec::<String>::new());
}

const USES_A: &str = "\nuse crate::a::A; pub struct B;";
const A_AND_B: &str = "src/a.rs:1 uses src/b.rs, src/b.rs:2 uses src/a.rs";

#[test]
fn two_files_that_use_each_other() {
    none(&check_a_and_b("pub struct A;", USES_A, &[]));
    for a in [
        "use crate::b::B; pub struct A;",
        "use super::b::B; pub struct A;",
        "use crate::b; pub struct A(b::B);",
        "use crate::b as other; pub struct A(other::B);",
        "use crate::{b::{self}, c}; pub struct A(b::B);",
        "use {super::b::{B as Other}}; pub struct A;",
        "pub struct A; fn f() { crate::b::B::new() }",
        "pub struct A; fn f<'a>() -> impl Fn() + use<'a> { crate::b::f }",
        "use crate::b::B; pub struct A;\nfn f() { crate::b::f() }",
        "pub struct A; fn f() { use crate::b::B; }",
        "pub struct A; macro_rules! m { () => { $crate::b::B } }",
        "pub struct A; #[arg(value_parser = crate::b::parse)] struct C;",
        "pub struct A; fn f() { for i in 0..crate::b::LENGTH {} }",
        "pub use crate::b::B; pub struct A;",
        "pub use super::b::*; pub struct A;",
    ] {
        cycle(&check_a_and_b(a, USES_A, &[]), A_AND_B);
    }
}

#[test]
fn a_path_that_names_no_item_of_the_other_file_is_no_import() {
    for a in [
        "use crate::b; pub struct A;",
        "use ::b::B; use c::b::B; pub struct A;",
        "pub struct A; fn f(b: u8) { b::<u8>(); self.b.b(); 'b: loop {} }",
        "//! [`crate::b::B`]\npub struct A; const TEXT: &str = \"crate::b::B\";",
        "pub(in crate::b) struct A;",
        "use crate::b; pub struct A; fn f() { ::b::f(); <A>::b::f() }",
    ] {
        none(&check_a_and_b(a, USES_A, &[]));
    }
}

#[test]
fn the_report_names_a_shortest_cycle_and_counts_all_its_files() {
    let c = ("src/c.rs", "pub struct C; use crate::a::A;");
    let root = ("src/main.rs", "mod a; mod b; mod c;");
    let a = ("src/a.rs", "use crate::b::B; pub struct A;");
    let b = ("src/b.rs", "pub struct B; use crate::c::C;");
    let lines = check(&[root, a, b, c]);
    cycle(
        &lines,
        "src/a.rs:1 uses src/b.rs, src/b.rs:1 uses src/c.rs, src/c.rs:1 uses src/a.rs",
    );
    assert!(lines[0].starts_with("src/: 3 files"), "{lines:?}");
    let both = (
        "src/b.rs",
        "pub struct B; use crate::c::C;\nuse crate::a::A;",
    );
    let lines = check(&[root, a, both, c]);
    cycle(&lines, A_AND_B);
    assert!(lines[0].starts_with("src/: 3 files"), "{lines:?}");
}

#[test]
fn each_group_is_reported_once() {
    let c = ("src/c/mod.rs", "mod x; mod y;");
    let x = ("src/c/x.rs", "use super::y::Y; pub struct X;");
    let y = ("src/c/y.rs", "use super::x::X; pub struct Y;");
    let root = ("src/lib.rs", "mod a; mod b; mod c;");
    let a = ("src/a.rs", "use crate::b::B; pub struct A;");
    let b = ("src/b.rs", USES_A);
    let lines = check(&[root, a, b, c, x, y]);
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(
        lines[1].contains("src/c/x.rs:1 uses src/c/y.rs, src/c/y.rs:1 uses src/c/x.rs"),
        "{lines:?}"
    );
}

/// A child of `a` that uses `b`, so a use of it in `b` closes a cycle.
const X_USES_B: (&str, &str) = (
    "src/a/x.rs",
    "use crate::b::B; pub struct X; pub fn make() {}",
);
const X_AND_B: &str = "src/a/x.rs:1 uses src/b.rs, src/b.rs:1 uses src/a/x.rs";

#[test]
fn a_reexport_counts_as_a_use_of_the_defining_file() {
    for a in [
        "mod x; pub use x::X;",
        "mod x; pub(crate) use self::x::{X as Y, X};",
        "mod x; pub use x::*;",
    ] {
        for b in [
            "use crate::a::X; pub struct B;",
            "pub struct B; fn f() { super::a::X::new() }",
        ] {
            cycle(&check_a_and_b(a, b, &[X_USES_B]), X_AND_B);
        }
    }
    // Through two re-exports.
    let y = ("src/a/y.rs", "pub use super::x::X;");
    cycle(
        &check_a_and_b(
            "mod x; mod y; pub use y::X;",
            "use crate::a::X; pub struct B;",
            &[X_USES_B, y],
        ),
        X_AND_B,
    );
}

#[test]
fn with_a_glob_import_only_the_reexported_names_in_use_count() {
    let facade = "mod x; pub use x::{X, make};";
    for b in [
        "use crate::a::*; pub struct B(X);",
        "use crate::a::*; pub struct B; fn f() { make() }",
        "use crate::a::*; pub struct B(X); fn f() { struct X; }",
    ] {
        cycle(&check_a_and_b(facade, b, &[X_USES_B]), X_AND_B);
    }
    none(&check_a_and_b(
        facade,
        "use crate::a::*; pub struct B; fn f(make: u8) { self.make() }",
        &[X_USES_B],
    ));
    none(&check_a_and_b(
        "pub use crate::b::B;",
        "use crate::a::*; pub struct B;",
        &[],
    ));
}

#[test]
fn a_reexported_name_that_no_file_defines_belongs_to_the_file_that_is_named() {
    // Two re-exports that refer to each other.
    cycle(
        &check_a_and_b("pub use crate::b::X;", "\npub use crate::a::X;", &[]),
        A_AND_B,
    );
    // A re-export from another crate.
    cycle(
        &check_a_and_b(
            "pub use libc::c_int; use crate::b::B;",
            "\nuse crate::a::c_int; pub struct B;",
            &[],
        ),
        A_AND_B,
    );
    // A name that a macro defines.
    cycle(
        &check_a_and_b("make! { A } use crate::b::B;", USES_A, &[]),
        A_AND_B,
    );
}

#[test]
fn a_parent_that_only_declares_and_reexports_uses_no_child() {
    let child = (
        "src/a/child.rs",
        "use super::{A, f}; pub struct C; pub fn run() {}",
    );
    for a in [
        "pub mod child; pub struct A; pub fn f() {}",
        "mod child; pub use child::{C, run}; pub struct A; pub fn f() {}",
        "mod child; pub(crate) use child::{C, run}; pub struct A; pub fn f() {}",
        "mod child; pub use child::*; pub struct A; pub fn f() {}",
        "mod child; pub use child::{C, run}; pub struct A; pub fn f(run: u8) { self.run() }",
        "mod child; pub use child::{C, run}; pub struct A; pub fn f(a: &'run (u8, u8)) {}",
    ] {
        none(&check_a_and_b(a, "use crate::a::{A, C};", &[child]));
    }
    let child_of = ("src/a/child.rs", "pub mod grand;");
    let grand = ("src/a/child/grand.rs", "use crate::a::A; pub struct G;");
    none(&check_a_and_b(
        "mod child; pub use child::grand::G; pub struct A;",
        "",
        &[child_of, grand],
    ));
    for a in [
        "mod child; use child::C; pub struct A; pub fn f() {}",
        "mod child; pub struct A; pub fn f() { child::run() }",
        "mod child; pub use child::C; pub struct A(C); pub fn f() {}",
        "mod child; pub use child::run; pub struct A; pub fn f() { run() }",
        "mod child; pub use child::*; pub struct A; pub fn f() { C::new() }",
        "mod child; pub use child::C; pub struct A; pub fn f() {} mod inner { type D = super::C; }",
    ] {
        cycle(
            &check_a_and_b(a, "", &[child]),
            "src/a.rs:1 uses src/a/child.rs, src/a/child.rs:1 uses src/a.rs",
        );
    }
}

#[test]
fn children_that_import_each_other_through_the_parent_form_a_cycle_without_it() {
    let facade = ("src/a/mod.rs", "mod x; mod y; pub use x::X; pub use y::Y;");
    let root = ("src/lib.rs", "mod a;");
    let x = ("src/a/x.rs", "pub struct X;");
    let y = ("src/a/y.rs", "use super::X; pub struct Y;");
    none(&check(&[root, facade, x, y]));
    let x = ("src/a/x.rs", "use super::Y; pub struct X;");
    cycle(
        &check(&[root, facade, x, y]),
        "src/a/x.rs:1 uses src/a/y.rs, src/a/y.rs:1 uses src/a/x.rs",
    );
}

#[test]
fn a_glob_import_of_the_parent_uses_the_parent() {
    let child = ("src/a/child.rs", "use super::*; pub fn run() {}");
    let a = "mod child; use crate::b::B; pub fn f() { child::run() }";
    cycle(
        &check_a_and_b(a, "pub struct B;", &[child]),
        "src/a.rs:1 uses src/a/child.rs, src/a/child.rs:1 uses src/a.rs",
    );
    // The child also uses its parent's imports.
    let child = ("src/a/child.rs", "use super::*; pub fn run(b: B) {}");
    let b = "pub struct B; fn f() { crate::a::child::run() }";
    cycle(
        &check_a_and_b("pub mod child; use crate::b::B;", b, &[child]),
        "src/a/child.rs:1 uses src/b.rs, src/b.rs:1 uses src/a/child.rs",
    );
}

#[test]
fn test_code_is_not_checked() {
    let tests = ("src/a/tests.rs", "use crate::b::B;");
    for a in [
        "pub struct A; #[cfg(test)] mod tests { use crate::b::B; }",
        "pub struct A; #[cfg(test)] mod tests;",
        "pub struct A; #[cfg(test)] use crate::b::{B, C}; #[cfg(all(test, unix))] use crate::b::B;",
        "pub struct A; #[test] fn f() { crate::b::f() }",
    ] {
        none(&check_a_and_b(a, USES_A, &[tests]));
    }
    cycle(
        &check_a_and_b(
            "pub struct A; #[cfg(not(test))] use crate::b::B;",
            USES_A,
            &[],
        ),
        A_AND_B,
    );
    cycle(
        &check_a_and_b(
            "#[cfg(test)] use crate::b::B; pub struct A; fn f() { crate::b::f() }",
            USES_A,
            &[],
        ),
        A_AND_B,
    );
    let of_three =
        "src/a.rs:1 uses src/a/tests.rs, src/a/tests.rs:1 uses src/b.rs, src/b.rs:2 uses src/a.rs";
    cycle(
        &check_a_and_b(
            "pub struct A; mod tests; fn f() { tests::f() }",
            USES_A,
            &[tests],
        ),
        of_three,
    );
}

#[test]
fn an_inline_module_belongs_to_its_file() {
    none(&check_a_and_b(
        "mod inner { use super::A; pub struct I; } pub struct A(inner::I);",
        USES_A,
        &[],
    ));
    for a in [
        "pub struct A; mod inner { use super::super::b::B; }",
        "pub struct A; mod inner { mod more { fn f() { super::super::super::b::f() } } }",
        "pub struct A; mod inner { pub use crate::b; } fn f() { self::inner::b::f() }",
        "use super::b; pub struct A; mod inner { fn f() { super::b::f() } }",
    ] {
        cycle(&check_a_and_b(a, USES_A, &[]), A_AND_B);
    }
    // An inline module's children are in a folder of its name.
    let child = ("src/a/inner/child.rs", "use super::super::super::b::B;");
    let a = "pub struct A; mod inner { pub mod child; } pub fn f() { inner::child::f() }";
    let three = "src/a.rs:1 uses src/a/inner/child.rs, src/a/inner/child.rs:1 uses src/b.rs, src/b.rs:2 uses src/a.rs";
    cycle(&check_a_and_b(a, USES_A, &[child]), three);
}

#[test]
fn a_module_and_a_function_of_one_name() {
    let root = ("src/lib.rs", "mod a; pub mod b; use a::A; fn b(a: A) {}");
    let a = ("src/a.rs", "use crate::b; pub struct A; fn f() { b::g() }");
    none(&check(&[root, a, ("src/b.rs", "pub fn g() {}")]));
    let a = ("src/a.rs", "use crate::b; pub struct A; fn f() { b(A) }");
    let expected = "src/a.rs:1 uses src/lib.rs, src/lib.rs:1 uses src/a.rs";
    cycle(&check(&[root, a, ("src/b.rs", "pub fn g() {}")]), expected);
}

#[test]
fn crates_are_checked_separately() {
    let a = "use crate::b::B; pub struct A;";
    let b = "\nuse crate::a::A; pub struct B;";
    let root = "#[path = \"../../src/a.rs\"] mod a; #[path = \"../../src/b.rs\"] mod b;";
    let both = [
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", a),
        ("src/b.rs", b),
        ("bed/src/lib.rs", root),
    ];
    // Only the crate that the files belong to reports the cycle.
    cycle(&check(&both), A_AND_B);
    // A crate's own file and an included file make a cycle of that crate.
    let root = "#[path = \"../../src/a.rs\"] mod a; mod b;";
    let bed = [
        ("src/lib.rs", "mod a;"),
        ("src/a.rs", a),
        ("bed/src/lib.rs", root),
        ("bed/src/b.rs", b),
    ];
    cycle(
        &check(&bed),
        "bed/src/b.rs:2 uses src/a.rs, src/a.rs:1 uses bed/src/b.rs",
    );
}
