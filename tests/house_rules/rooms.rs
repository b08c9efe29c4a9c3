//! The table of rooms in ARCHITECTURE.md: who may import whom.

use crate::reading::PathUse;
use std::collections::{BTreeMap, BTreeSet};

/// Which room may import which, and which of them the command line may, from the table in ARCHITECTURE.md.
pub struct Rooms {
    may_import: BTreeMap<String, BTreeSet<String>>,
    /// The rooms inside `comm`, from the top; each may import those of its own layer and below.
    layers: Vec<BTreeSet<String>>,
}

/// Reads the rows that begin with a path in `src/` or with the command line's crate: the first column names the room, the
/// third what it may import.
pub fn rooms(architecture: &str) -> Rooms {
    const LEAVES: [&str; 4] = ["error", "config", "interfaces", "counters"];
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
    Rooms { may_import, layers: layers(architecture) }
}

/// Reads the first column of the table under the heading "Inside comm".
fn layers(architecture: &str) -> Vec<BTreeSet<String>> {
    let section = architecture.split("\n### ").find(|section| section.starts_with("Inside comm")).unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let names = |row: &str| {
        let first = row.split('|').nth(1).unwrap_or_default();
        let name = |text: &str| text.trim_end_matches(".rs").trim_end_matches('/').to_owned();
        first.split('`').skip(1).step_by(2).map(name).collect()
    };
    rows.map(names).collect()
}

impl Rooms {
    pub fn wrong_import(&self, file: &str, path: &PathUse) -> Option<String> {
        if file.starts_with("nccl-tests-harness/src/") && path.segments[0] == "nccl_net_spark" {
            return self.wrong("nccl-tests-harness", path, 1);
        }
        let modules = file.strip_prefix("src/")?.trim_end_matches(".rs");
        let mut modules: Vec<&str> = modules.split('/').collect();
        let room = modules[0];
        if ["mod", "lib"].contains(modules.last()?) {
            modules.pop();
        }
        if let Some(wrong) = self.wrong_layer(&modules, path) {
            return Some(wrong);
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

    /// What is wrong with a file of `comm`, which is the module `modules`, using `path`.
    fn wrong_layer(&self, modules: &[&str], path: &PathUse) -> Option<String> {
        let ["comm", room, ..] = modules else { return None };
        let supers = path.segments.iter().take_while(|segment| *segment == "super").count();
        let rest = path.segments.iter().skip(supers.max(1)).map(String::as_str);
        let target: Vec<&str> = match path.segments[0].as_str() {
            "crate" => rest.collect(),
            "super" => {
                let outer = (modules.len() + path.inline_modules).checked_sub(supers)?;
                modules.iter().take(outer).copied().chain(rest).collect()
            }
            _ => return None,
        };
        let ["comm", name, ..] = target[..] else { return None };
        let text = path.segments.join("::");
        let layer = |room: &str| self.layers.iter().position(|layer| layer.contains(room));
        match (layer(room), layer(name)) {
            (None, _) => Some(format!("ARCHITECTURE.md has no room `{room}` inside comm")),
            (_, None) => Some(format!("inside comm `{name}` is named by its room ({text})")),
            (Some(from), Some(to)) => (to < from).then(|| format!("`{room}` is below `{name}` inside comm ({text})")),
        }
    }
}
