//! Reads the sources and keeps the rules of ARCHITECTURE.md: who may import whom (its table of rooms is what is enforced
//! here), where `unsafe`, the environment, locks and panics may be, and how long files and functions may get.
//!
//! It works on tokens, not on syntax trees: the rules are about names, and a syntax tree leaves macro bodies opaque.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// Lines of a file, lines of a function: what fits in a head, and on a screen and a half.
const MAX_FILE_LINES: usize = 600;
const MAX_FUNCTION_LINES: usize = 70;

/// Written by a tool, so of any length.
const GENERATED: &[&str] = &["src/verbs/bindings.rs", "softverbs/src/abi/bindings.rs"];

/// Where `unsafe` may be, besides tests: C inward, C outward, CUDA's driver, the cell that hands a connection from one
/// thread to the other, the command line's loaded plugin, and the software fabric's C interface and shared memory.
const UNSAFE: &[&str] = &[
    "src/abi/",
    "src/verbs/",
    "src/rails/cuda.rs",
    "src/comm/owner.rs",
    "nccl-tests-harness/src/proofs/communicators/nccl.rs",
    "nccl-tests-harness/src/net/",
    "nccl-tests-harness/src/gpu/cuda/",
    "softverbs/src/abi/",
    "softverbs/src/os/",
];

/// Where the process's environment may be read (a build script's is cargo's).
const ENVIRONMENT: &[&str] = &["src/config.rs", "nccl-tests-harness/src/main.rs", "softverbs/src/settings.rs"];

/// What runs for each message: no lock of ours.
const DATA_PATH: &[&str] =
    &["src/flow/", "src/comm/send.rs", "src/comm/recv.rs", "src/comm/lane.rs", "src/comm/work.rs", "src/comm/owner.rs"];
const LOCKS: &[&str] = &["Mutex", "RwLock", "Condvar"];

/// Rooms that are pure state, and what would make them impure: input, output, clocks, threads.
const PURE: &[&str] = &["src/flow/", "src/tuner/", "src/wire/"];
const IMPURE: &[&str] = &[
    "std::fs",
    "std::io",
    "std::process",
    "std::thread",
    "std::os",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::net::TcpStream",
    "std::net::TcpListener",
    "std::net::UdpSocket",
    "libc",
    "nix",
    "socket2",
    "getrandom",
];

#[test]
fn the_sources_keep_the_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let architecture = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let mut sources = Vec::new();
    collect(root, root, &mut sources);
    assert!(sources.len() > 20, "only {} source files found under {}", sources.len(), root.display());
    let broken = check_all(&sources, &architecture);
    assert!(broken.is_empty(), "{} house rules broken:\n{}", broken.len(), broken.join("\n"));
}

fn collect(root: &Path, folder: &Path, sources: &mut Vec<(String, String)>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() {
            // Build folders carry the tag that cargo leaves for back-up programs, whatever their name.
            if !name.starts_with('.') && name != "target" && !path.join("CACHEDIR.TAG").exists() {
                collect(root, &path, sources);
            }
        } else if name.ends_with(".rs") {
            let relative = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            sources.push((relative, std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// Every broken rule as a line `path:line: what`.
fn check_all(sources: &[(String, String)], architecture: &str) -> Vec<String> {
    let rooms = rooms(architecture);
    let files: Vec<File> = sources.iter().map(|(path, text)| File::read(path, text)).collect();
    let test_files: BTreeSet<String> = files.iter().flat_map(|file| file.test_files.iter().cloned()).collect();
    let mut broken = Vec::new();
    for list in [GENERATED, UNSAFE, ENVIRONMENT, DATA_PATH, PURE] {
        for path in list.iter().filter(|path| !path.starts_with("softverbs/")) {
            if !files.iter().any(|file| within(&file.path, &[path])) {
                broken.push(format!("{path}: named in tests/house_rules.rs, and there is no such file"));
            }
        }
    }
    for file in &files {
        let tests_only = test_files.contains(&file.path) || file.is_test_code();
        broken.extend(check_file(file, tests_only, &rooms).into_iter().map(|line| format!("{}:{line}", file.path)));
    }
    broken
}

fn check_file(file: &File, tests_only: bool, rooms: &Rooms) -> Vec<String> {
    let mut broken = Vec::new();
    check_sizes(file, &mut broken);
    for token in &file.words {
        let word = token.text.as_str();
        if token.is_macro && ["todo", "unimplemented", "dbg"].contains(&word) {
            broken.push(format!("{}: `{word}!`", token.line));
        }
        if file.is_test_code() {
            continue;
        }
        if word == "unsafe" && !token.is_type && !within(&file.path, UNSAFE) {
            broken.push(format!("{}: `unsafe` has no place here", token.line));
        }
        if LOCKS.contains(&word) && within(&file.path, DATA_PATH) && !token.in_test {
            broken.push(format!("{}: `{word}` on the data path", token.line));
        }
        if !token.in_test && !tests_only && file.path.starts_with("src/") {
            if token.is_call && ["unwrap", "expect", "unwrap_err", "expect_err"].contains(&word) {
                broken.push(format!("{}: `{word}()` outside tests", token.line));
            }
            if token.is_macro && word == "panic" {
                broken.push(format!("{}: `panic!` outside tests", token.line));
            }
        }
    }
    for path in &file.paths {
        let text = path.segments.join("::");
        let exempt = file.is_test_code() || file.path.ends_with("build.rs");
        if !exempt && starts_with(&path.segments, "std::env") && !within(&file.path, ENVIRONMENT) {
            broken.push(format!("{}: `{text}`: only {} read the environment", path.line, ENVIRONMENT.join(" and ")));
        }
        if within(&file.path, PURE) && !path.in_test && IMPURE.iter().any(|name| starts_with(&path.segments, name)) {
            broken.push(format!("{}: `{text}` in a room that is pure state", path.line));
        }
        if !tests_only
            && !path.in_test
            && let Some(wrong) = rooms.wrong_import(&file.path, path)
        {
            broken.push(format!("{}: {wrong}", path.line));
        }
    }
    broken
}

fn check_sizes(file: &File, broken: &mut Vec<String>) {
    if GENERATED.contains(&file.path.as_str()) {
        return;
    }
    if file.lines >= MAX_FILE_LINES {
        broken.push(format!("{}: the file has {} lines; under {MAX_FILE_LINES} is the rule", file.lines, file.lines));
    }
    for function in &file.functions {
        let lines = function.last_line - function.first_line + 1;
        if lines >= MAX_FUNCTION_LINES {
            let (line, name) = (function.first_line, &function.name);
            broken.push(format!("{line}: `fn {name}` has {lines} lines; under {MAX_FUNCTION_LINES} is the rule"));
        }
    }
}

/// Whether `path` is one of `places`, or inside one that ends with a slash.
fn within(path: &str, places: &[&str]) -> bool {
    places.iter().any(|place| path == *place || (place.ends_with('/') && path.starts_with(place)))
}

fn starts_with(segments: &[String], prefix: &str) -> bool {
    let prefix: Vec<&str> = prefix.split("::").collect();
    segments.len() >= prefix.len() && segments.iter().zip(&prefix).all(|(a, b)| a == b)
}

/// Which room may import which, and which of them the command line may, from the table in ARCHITECTURE.md.
struct Rooms {
    may_import: BTreeMap<String, BTreeSet<String>>,
}

/// Reads the rows that begin with a path in `src/` or with the command line's crate: the first column names the room, the
/// third what it may import.
fn rooms(architecture: &str) -> Rooms {
    const LEAVES: [&str; 3] = ["error", "config", "telemetry"];
    let mut may_import = BTreeMap::new();
    let is_row = |line: &&str| line.starts_with("| `src/") || line.starts_with("| `nccl-tests-harness/");
    for line in architecture.lines().filter(is_row) {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').collect();
        let room = cells[0].trim().trim_matches('`').trim_start_matches("src/").trim_end_matches(".rs");
        let mut allowed: BTreeSet<String> = cells[2].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        if cells[2].contains("leaves") {
            allowed.extend(LEAVES.map(str::to_owned));
        }
        may_import.insert(room.trim_end_matches('/').to_owned(), allowed);
    }
    Rooms { may_import }
}

impl Rooms {
    fn wrong_import(&self, file: &str, path: &PathUse) -> Option<String> {
        if file.starts_with("nccl-tests-harness/src/") && path.segments[0] == "nccl_net_spark" {
            return self.wrong("nccl-tests-harness", path, 1);
        }
        let modules = file.strip_prefix("src/")?.trim_end_matches(".rs");
        let mut modules: Vec<&str> = modules.split('/').collect();
        let room = modules[0];
        if ["mod", "lib"].contains(modules.last()?) {
            modules.pop();
        }
        let supers = path.segments.iter().take_while(|segment| *segment == "super").count();
        // `super` in a module in the file itself leads out of that module first.
        let root = match path.segments[0].as_str() {
            "crate" => 1,
            "super" if supers == modules.len() + path.inline_modules => supers,
            _ => return None,
        };
        self.wrong(room, path, root)
    }

    /// What is wrong with `room` using `path`, whose segment `root` is a room's name.
    fn wrong(&self, room: &str, path: &PathUse, root: usize) -> Option<String> {
        let target = path.segments.get(root)?;
        let Some(allowed) = self.may_import.get(room) else {
            return Some(format!("ARCHITECTURE.md has no room `src/{room}`"));
        };
        let wrong = target != room && !allowed.contains(target);
        wrong.then(|| format!("`{room}` may not import `{target}` ({})", path.segments.join("::")))
    }
}

/// A source file as the rules see it.
struct File {
    path: String,
    lines: usize,
    words: Vec<Word>,
    paths: Vec<PathUse>,
    functions: Vec<Function>,
    /// Files that this one declares as modules for tests alone.
    test_files: Vec<String>,
}

/// An identifier or keyword.
struct Word {
    text: String,
    line: usize,
    in_test: bool,
    /// Followed by `!`.
    is_macro: bool,
    /// After a dot or `::`, with arguments.
    is_call: bool,
    /// Begins a function pointer's type, as in `unsafe extern "C" fn(u8)`: names a danger and does nothing.
    is_type: bool,
}

/// A path of two or more segments; those of a `use` with braces are taken apart.
#[derive(Debug, PartialEq)]
struct PathUse {
    segments: Vec<String>,
    line: usize,
    in_test: bool,
    inline_modules: usize,
}

struct Function {
    name: String,
    first_line: usize,
    last_line: usize,
}

/// What surrounds the tokens at hand.
#[derive(Clone, Copy, Default)]
struct Place {
    in_test: bool,
    inline_modules: usize,
}

impl File {
    fn read(path: &str, text: &str) -> File {
        let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut file = File {
            path: path.to_owned(),
            lines: text.lines().count(),
            words: Vec::new(),
            paths: Vec::new(),
            functions: Vec::new(),
            test_files: Vec::new(),
        };
        file.walk(&tokens.into_iter().collect::<Vec<_>>(), Place::default());
        file
    }

    /// Integration tests, benches, fuzz targets, examples: of any member.
    fn is_test_code(&self) -> bool {
        self.path.split('/').any(|part| ["tests", "benches", "fuzz", "examples"].contains(&part))
    }

    fn walk(&mut self, tokens: &[TokenTree], place: Place) {
        let mut at = 0;
        // Up to which token the item behind a `#[cfg(test)]` reaches.
        let mut test_until = 0;
        while at < tokens.len() {
            if is_test_attribute(&tokens[at..]) {
                test_until = test_until.max(item_end(tokens, at));
            }
            let here = Place { in_test: place.in_test || at < test_until, ..place };
            match &tokens[at] {
                TokenTree::Ident(_) => at = self.walk_ident(tokens, at, here),
                TokenTree::Group(group) => {
                    self.walk(&group.stream().into_iter().collect::<Vec<_>>(), here);
                    at += 1;
                }
                _ => at += 1,
            }
        }
    }

    /// Takes the identifier at `at` with the path that it begins, and returns where to go on.
    fn walk_ident(&mut self, tokens: &[TokenTree], at: usize, place: Place) -> usize {
        let text = tokens[at].to_string();
        let line = tokens[at].span().start().line;
        let next_ident = tokens.get(at + 1).filter(|token| matches!(token, TokenTree::Ident(_)));
        if let (true, Some(name)) = (text == "fn" || text == "mod", next_ident) {
            let end = item_end(tokens, at);
            let TokenTree::Group(body) = &tokens[end - 1] else {
                self.declare_module(&text, &name.to_string(), place);
                return at + 1;
            };
            if text == "fn" {
                let last_line = body.span_close().end().line;
                self.functions.push(Function { name: name.to_string(), first_line: line, last_line });
            } else {
                let inner = Place { inline_modules: place.inline_modules + 1, ..place };
                self.walk(&body.stream().into_iter().collect::<Vec<_>>(), inner);
                return end;
            }
        }
        let after_colons = at >= 2 && is_colons(&tokens[at - 2..]);
        let after_dot = at >= 1 && is_punct(tokens.get(at - 1), '.');
        let arguments =
            matches!(tokens.get(at + 1), Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis);
        self.words.push(Word {
            text,
            line,
            in_test: place.in_test,
            is_macro: is_punct(tokens.get(at + 1), '!') && matches!(tokens.get(at + 2), Some(TokenTree::Group(_))),
            is_call: after_dot && arguments || after_colons,
            is_type: is_function_type(&tokens[at..]),
        });
        if after_colons || !is_colons(&tokens[at + 1..]) {
            return at + 1;
        }
        self.take_path(tokens, at, &[], place);
        // The words of the path are still to be seen; a group that ends it belongs to it.
        let mut end = at + 1;
        while is_colons(&tokens[end..]) && matches!(tokens.get(end + 2), Some(TokenTree::Ident(_))) {
            end += 3;
        }
        if is_colons(&tokens[end..]) && matches!(tokens.get(end + 2), Some(TokenTree::Group(_))) {
            for token in flatten(&tokens[at + 1..end + 3]) {
                let (text, line) = (token.to_string(), token.span().start().line);
                self.words.push(Word {
                    text,
                    line,
                    in_test: place.in_test,
                    is_macro: false,
                    is_call: false,
                    is_type: false,
                });
            }
            return end + 3;
        }
        at + 1
    }

    /// Records the path that begins at `at`, behind `prefix`; the braces of a `use` give one path for each name.
    fn take_path(&mut self, tokens: &[TokenTree], mut at: usize, prefix: &[String], place: Place) {
        let mut segments = prefix.to_vec();
        let line = tokens[at].span().start().line;
        while let Some(TokenTree::Ident(ident)) = tokens.get(at) {
            segments.push(ident.to_string());
            at += 1;
            if !is_colons(&tokens[at..]) {
                break;
            }
            at += 2;
        }
        match tokens.get(at) {
            Some(TokenTree::Group(group)) if at >= 2 && is_colons(&tokens[at - 2..]) => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for name in inner.split(|token| is_punct(Some(token), ',')).filter(|name| !name.is_empty()) {
                    self.take_path(name, 0, &segments, place);
                }
            }
            _ => {
                let Place { in_test, inline_modules } = place;
                self.paths.push(PathUse { segments, line, in_test, inline_modules });
            }
        }
    }

    fn declare_module(&mut self, keyword: &str, name: &str, place: Place) {
        if keyword != "mod" || !place.in_test {
            return;
        }
        let (folder, file) = self.path.rsplit_once('/').unwrap_or(("", &self.path));
        let mut folder = folder.to_owned();
        if !["mod.rs", "lib.rs", "main.rs"].contains(&file) {
            let _ = write!(folder, "/{}", file.trim_end_matches(".rs"));
        }
        self.test_files.push(format!("{folder}/{name}.rs"));
        self.test_files.push(format!("{folder}/{name}/mod.rs"));
    }
}

/// `#[cfg(test)]`, `#[cfg(all(test, ...))]` or `#[test]`.
fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let Some(TokenTree::Group(attribute)) = tokens.get(1) else { return false };
    if !is_punct(tokens.first(), '#') || attribute.delimiter() != Delimiter::Bracket {
        return false;
    }
    let text: String = attribute.stream().to_string().split_whitespace().collect();
    text == "test" || text.starts_with("cfg(test)") || text.starts_with("cfg(all(test,")
}

/// Past the item that `at` is in the head of: its first brace group or semicolon.
fn item_end(tokens: &[TokenTree], at: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        other => is_punct(Some(other), ';'),
    };
    tokens[at..].iter().position(ends).map_or(tokens.len(), |found| at + found + 1)
}

/// `unsafe extern "C" fn(` or `unsafe fn(`: no name before the arguments.
fn is_function_type(tokens: &[TokenTree]) -> bool {
    let keyword = tokens.iter().take(4).position(|token| token.to_string() == "fn");
    let argument = keyword.and_then(|at| tokens.get(at + 1));
    matches!(argument, Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis)
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

fn is_colons(tokens: &[TokenTree]) -> bool {
    is_punct(tokens.first(), ':') && is_punct(tokens.get(1), ':')
}

/// All identifiers in there, at any depth.
fn flatten(tokens: &[TokenTree]) -> Vec<TokenTree> {
    let mut flat = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Group(group) => flat.extend(flatten(&group.stream().into_iter().collect::<Vec<_>>())),
            TokenTree::Ident(_) => flat.push(token.clone()),
            _ => {}
        }
    }
    flat
}

/// The checker itself, on sources that break one rule each.
mod the_checker {
    use super::*;

    const ARCHITECTURE: &str = "\
| room | what it is | may import | may not |
|---|---|---|---|
| `src/lib.rs` | symbols | `abi` | |
| `src/abi/` | C inward (`handles.rs`) | `plugin`, leaves | |
| `src/comm/` | joins | `flow`, leaves | `rails` |
| `src/flow/` | pure | | `verbs` |
| `nccl-tests-harness/` | the `nccl-spark` command line | `rails` as a crate | |
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
        kept("src/comm/send.rs", "use crate::flow::Plan; use crate::comm::x; use crate::error::{Error, Result};");
        kept("src/abi/mod.rs", "fn f() { crate::plugin::init() } mod a { use super::super::config; }");
        broken("src/comm/send.rs", "\nuse crate::rails::Rail;", "2: `comm` may not import `rails`");
        broken("src/comm/send.rs", "use crate::{flow::Plan, rails};", "`rails`");
        broken("src/comm/send.rs", "use super::super::rails::Rail;", "`rails`");
        broken("src/comm/send.rs", "use super::{super::rails::Rail, work};", "`rails`");
        broken("src/comm/mod.rs", "use super::rails::Rail;", "`rails`");
        broken("src/comm/mod.rs", "mod a { fn f() { super::super::rails::g() } }", "`rails`");
        broken("src/flow/plan.rs", "fn f() { let x = crate::verbs::X; }", "`flow` may not import `verbs`");
        broken("src/flow/plan.rs", "fn f() { log!(\"{}\", crate::verbs::X); }", "`verbs`");
        broken("src/comm/send.rs", "use crate::abi::Handle;", "`abi`");
        broken("src/cellar.rs", "use crate::error::Error;", "no room `src/cellar`");
        kept("nccl-tests-harness/src/main.rs", "use nccl_net_spark::rails::report; use crate::verbs::X;");
        broken("nccl-tests-harness/src/main.rs", "use nccl_net_spark::{comm, rails};", "`comm`");
        kept("src/comm/send.rs", "#[cfg(test)]\nmod tests { use crate::rails::Rail; }");
        kept("src/comm/send.rs", "pub(crate) fn f() {} /// See `crate::rails`.\nfn g() { super::rails::h() }");
    }

    #[test]
    fn unsafe_stays_in_its_places() {
        kept("src/abi/handles.rs", "fn f() { unsafe { g() } }");
        kept("tests/abi_drive.rs", "fn f() { unsafe { g() } }");
        kept("src/flow/plan.rs", "#![forbid(unsafe_code)] // unsafe\n/// unsafe\nconst A: &str = \"unsafe\";");
        broken("src/comm/send.rs", "fn f() { unsafe { g() } }", "`unsafe`");
        broken("src/comm/send.rs", "fn f() { warn!(\"{}\", unsafe { g() }) }", "`unsafe`");
        kept("src/comm/send.rs", "type A = Option<unsafe extern \"C\" fn(u8)>; type B = unsafe fn(u8);");
        broken("src/comm/send.rs", "unsafe extern \"C\" fn f(a: u8) {}", "`unsafe`");
        broken("src/comm/owner_of.rs", "unsafe impl Send for X {}", "`unsafe`");
        broken("src/wire/cts.rs", "#[cfg(test)] mod tests { fn f() { unsafe { g() } } }", "`unsafe`");
    }

    #[test]
    fn the_environment_is_read_in_one_file() {
        kept("src/config.rs", "fn f() { std::env::var(\"A\"); }");
        kept("src/comm/send.rs", "const A: &str = env!(\"CARGO_PKG_VERSION\");");
        broken("src/comm/send.rs", "fn f() { std::env::var(\"A\"); }", "std::env::var");
        broken("src/comm/send.rs", "use std::{io, env::var_os};", "std::env::var_os");
        broken("nccl-tests-harness/src/ring.rs", "use std::env;", "std::env");
    }

    #[test]
    fn the_data_path_has_no_locks_and_pure_rooms_no_world() {
        broken("src/flow/plan.rs", "struct A { b: Mutex<u8> }", "`Mutex`");
        broken("src/comm/recv.rs", "use std::sync::{Arc, RwLock};", "`RwLock`");
        kept("src/comm/service.rs", "use std::sync::{Arc, Mutex};");
        kept("src/flow/plan.rs", "use std::time::Duration;");
        broken("src/flow/plan.rs", "use std::time::{Duration, Instant};", "std::time::Instant");
        broken("src/wire/cts.rs", "fn f() -> libc::c_int { 0 }", "libc::c_int");
    }

    #[test]
    fn nothing_panics_on_purpose_outside_tests() {
        kept("src/comm/send.rs", "fn f() { a.unwrap_or(1); a.unwrap_or_default(); expect(b); unwrap(); }");
        kept("src/comm/send.rs", "#[cfg(test)] mod tests { fn f() { a.unwrap(); panic!(); } }");
        kept("src/comm/send.rs", "#[cfg(all(test, unix))] use a::b; #[test] fn f() { a.unwrap(); }");
        kept("nccl-tests-harness/src/ring.rs", "fn f() { a.unwrap(); }");
        broken("src/comm/send.rs", "fn f() { a.unwrap(); }", "`unwrap()`");
        broken("src/comm/send.rs", "fn f() { a.map(Option::unwrap); }", "`unwrap()`");
        broken("src/comm/send.rs", "fn f() { info!(\"{}\", a.expect(\"b\")); }", "`expect()`");
        broken("src/comm/send.rs", "fn f() { panic!(\"b\"); }", "`panic!`");
        broken("src/comm/send.rs", "#[cfg(test)] use a::b; fn f() { a.unwrap(); }", "`unwrap()`");
        broken("src/comm/send.rs", "#[cfg(not(test))] mod a { fn f() { a.unwrap(); } }", "`unwrap()`");
        broken("tests/abi_drive.rs", "fn f() { todo!() }", "`todo!`");
        broken("nccl-tests-harness/src/ring.rs", "fn f() { dbg!(1); }", "`dbg!`");
    }

    #[test]
    fn a_module_for_tests_in_its_own_file_is_test_code() {
        let declared = File::read("src/comm/send.rs", "#[cfg(test)] mod tests; mod real;").test_files;
        assert_eq!(declared, ["src/comm/send/tests.rs", "src/comm/send/tests/mod.rs"]);
        let declared = File::read("src/comm/mod.rs", "#[cfg(test)]\nmod fixtures;").test_files;
        assert_eq!(declared[0], "src/comm/fixtures.rs");
    }

    #[test]
    fn files_and_functions_have_a_limit() {
        let function = |lines: usize| format!("fn f() {{\n{}}}\n", "    g();\n".repeat(lines - 2));
        kept("src/comm/send.rs", &function(69));
        broken("src/comm/send.rs", &function(70), "`fn f` has 70 lines");
        broken("src/comm/send.rs", &format!("impl A {{\n{}}}", function(80)), "`fn f` has 80 lines");
        kept("src/comm/send.rs", &"const A: u8 = 1;\n".repeat(599));
        broken("src/comm/send.rs", &"const A: u8 = 1;\n".repeat(600), "600 lines");
        kept("src/verbs/bindings.rs", &"const A: u8 = 1;\n".repeat(900));
    }

    #[test]
    fn a_place_that_is_gone_is_told() {
        let told = check_all(&[("src/config.rs".to_owned(), String::new())], ARCHITECTURE);
        assert!(told.iter().any(|line| line.starts_with("src/comm/owner.rs: named")), "{told:?}");
        assert!(!told.iter().any(|line| line.starts_with("src/config.rs: named")), "{told:?}");
    }
}
