//! The rule against import cycles: in a crate, no file may use itself through other files.
//!
//! File A uses file B when A's code outside tests names an item that B defines. The modules on the
//! path to the item do not count:
//! - A `mod.rs` that declares its children and re-exports their items (`pub use child::Item`) uses
//!   none of them. A file that names the item through the `mod.rs` uses the child's file.
//! - A `mod.rs` whose own code names a child's item uses that child. The child may then use nothing
//!   that the `mod.rs` defines: what both need belongs in a file of its own.
//! - `use module` alone uses nothing; `module::item` does.
//! - `use module::*` uses the module's file, if that file defines anything. It also uses the files
//!   that define the names that the module re-exports and the importing file uses.
//!
//! The rule does not see a macro that is called without a path. It also does not see methods and
//! fields, if the file does not name their type.

use crate::modules::{Found, Id, Modules, Want};
use crate::reading::File;
use crate::scopes::{Kind, Scope};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Maps each file to the files that it uses, each with the line of the first use.
pub type Uses<'a> = BTreeMap<&'a str, BTreeMap<&'a str, usize>>;

/// Returns a line for each group of files that use each other, with a shortest cycle of the group.
pub fn check_cycles(files: &[File]) -> Vec<String> {
    let mut broken = Vec::new();
    for (folder, crate_modules) in crates(files) {
        let uses = uses(&crate_modules);
        let mut groups = groups(&uses);
        // A cycle of files included from another crate (`#[path]`) is reported for that crate.
        groups.retain(|group| group.iter().any(|file| file.starts_with(&folder)));
        broken.extend(groups.iter().map(|group| describe(&folder, group, &uses)));
    }
    broken
}

pub fn crates(files: &[File]) -> Vec<(String, Modules)> {
    let by_path: BTreeMap<&str, &File> = files
        .iter()
        .map(|file| (file.path.as_str(), file))
        .collect();
    let mut crates = Vec::new();
    for path in by_path.keys() {
        let folder = path
            .strip_suffix("lib.rs")
            .or_else(|| path.strip_suffix("main.rs"));
        if let Some(folder) = folder.filter(|folder| *folder == "src/" || folder.ends_with("/src/"))
        {
            crates.push((folder.to_owned(), Modules::of_crate(path, &by_path)));
        }
    }
    crates
}

pub fn uses(modules: &Modules) -> Uses<'_> {
    let mut uses = Uses::new();
    for (id, module) in modules.all.iter().enumerate() {
        for (defined_in, line) in used_by_module(modules, id, &module.scope) {
            let from = module.file.as_str();
            let to = modules.all[defined_in].file.as_str();
            if from != to {
                let first = uses.entry(from).or_default().entry(to).or_insert(line);
                *first = line.min(*first);
            }
        }
    }
    uses
}

fn used_by_module(modules: &Modules, id: Id, scope: &Scope) -> Vec<(Id, usize)> {
    let mut used = Vec::new();
    let mut take = |segments: &[String], line: usize| {
        if let Some(Found::Item(defined_in)) = modules.resolve(id, segments, Want::Item) {
            used.push((defined_in, line));
        }
    };
    scope
        .paths
        .iter()
        .for_each(|path| take(&path.segments, path.line));
    scope
        .words
        .iter()
        .for_each(|(word, line)| take(std::slice::from_ref(word), *line));
    for import in &scope.imports {
        // If a module and an item share the name, the import counts as an import of the module.
        // Where the item is used, the paths and words above show it.
        let defined_in = match modules.resolve(id, &import.segments, Want::Module) {
            Some(Found::Item(defined_in)) => defined_in,
            Some(Found::Module(all_of))
                if import.kind == Kind::Glob && modules.defines_any(all_of) =>
            {
                all_of
            }
            _ => continue,
        };
        // A re-export of a child's item is no use. Other uses of the item are among the paths and
        // words above.
        if !(import.is_reexport && modules.is_within(defined_in, id)) {
            used.push((defined_in, import.line));
        }
    }
    used
}

/// Returns the largest sets of two or more files in which each file reaches all others.
pub fn groups<'a>(uses: &Uses<'a>) -> Vec<BTreeSet<&'a str>> {
    let reached: BTreeMap<&str, BTreeSet<&str>> = uses
        .keys()
        .map(|file| (*file, reached_from(file, uses)))
        .collect();
    let mut groups: Vec<BTreeSet<&str>> = Vec::new();
    for (file, all) in &reached {
        if all.contains(file) && !groups.iter().any(|group| group.contains(file)) {
            groups.push(
                all.iter()
                    .copied()
                    .filter(|other| reached.get(other).is_some_and(|r| r.contains(file)))
                    .collect(),
            );
        }
    }
    groups
}

/// Returns the files that `file` uses, directly or through others. If `file` is in a cycle, the
/// result includes `file` itself.
fn reached_from<'a>(file: &str, uses: &Uses<'a>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut ahead = vec![file];
    while let Some(used) = ahead.pop().map(|next| uses.get(next)) {
        ahead.extend(
            used.into_iter()
                .flatten()
                .filter_map(|(other, _)| reached.insert(*other).then_some(*other)),
        );
    }
    reached
}

fn describe(folder: &str, group: &BTreeSet<&str>, uses: &Uses) -> String {
    let shortest = group
        .iter()
        .map(|file| cycle_from(file, uses))
        .min_by_key(Vec::len)
        .unwrap_or_default();
    let next = shortest.iter().cycle().skip(1);
    let edges: Vec<String> = shortest
        .iter()
        .zip(next)
        .map(|(from, to)| format!("{from}:{} uses {to}", uses[from][to]))
        .collect();
    format!(
        "{folder}: {} files import each other in a cycle: {}",
        group.len(),
        edges.join(", ")
    )
}

fn cycle_from<'a>(file: &'a str, uses: &Uses<'a>) -> Vec<&'a str> {
    let mut routes = VecDeque::from([vec![file]]);
    let mut seen = BTreeSet::new();
    while let Some(route) = routes.pop_front() {
        for other in route
            .last()
            .and_then(|last| uses.get(last))
            .into_iter()
            .flat_map(BTreeMap::keys)
        {
            if *other == file {
                return route;
            }
            if seen.insert(*other) {
                routes.push_back([route.as_slice(), &[*other]].concat());
            }
        }
    }
    Vec::new()
}
