//! Checks that each room imports only what `rooms.toml` allows it to import.

use crate::reading::PathUse;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

type Names = BTreeSet<String>;

pub struct Rooms {
    /// For each room of `src/`, the rooms that it may import.
    rooms: BTreeMap<String, Names>,
    /// The rooms inside `comm`, by layer, with the top layer first. A room may import rooms of its
    /// own layer and of lower layers.
    layers: Vec<Names>,
}

impl Rooms {
    pub fn read(text: &str) -> Self {
        let data: Value =
            basic_toml::from_str(text).unwrap_or_else(|error| panic!("rooms.toml: {error}"));
        let rooms = data["rooms"]
            .as_object()
            .expect("rooms.toml: a table [rooms]");
        let layers = data["comm"]["layers"]
            .as_array()
            .expect("rooms.toml: [comm] has layers");
        Self {
            rooms: rooms
                .iter()
                .map(|(name, list)| (name.clone(), names(list)))
                .collect(),
            layers: layers.iter().map(names).collect(),
        }
    }

    /// Returns a line for each name in `rooms.toml` for which there is no file or folder. `paths`
    /// are the paths of all sources.
    pub fn check_names(&self, paths: &BTreeSet<&str>) -> Vec<String> {
        let exists = |place: &str| paths.iter().any(|path| is_in(path, place));
        let inside_comm = self
            .layers
            .iter()
            .flatten()
            .map(|room| format!("src/comm/{room}"));
        let rooms = self.rooms.keys().map(|room| format!("src/{room}"));
        let missing = rooms.chain(inside_comm).filter(|place| !exists(place));
        missing
            .map(|place| {
                format!("{place}: named in rooms.toml, and there is no such file or folder")
            })
            .collect()
    }

    pub fn check(&self, file: &str, path: &PathUse) -> Option<String> {
        let text = path.segments.join("::");
        let mut modules: Vec<&str> = file
            .strip_prefix("src/")?
            .trim_end_matches(".rs")
            .split('/')
            .collect();
        let room = modules[0];
        if ["mod", "lib"].contains(modules.last()?) {
            modules.pop();
        }
        let target = absolute(&modules, path)?;
        let target: Vec<&str> = target.iter().map(String::as_str).collect();
        let Some(allowed) = self.rooms.get(room) else {
            return Some(format!("rooms.toml has no room `{room}`"));
        };
        match (&modules[..], &target[..]) {
            (["comm", from, ..], ["comm", to, ..]) => self.check_layer(from, to, &text),
            (_, [to, ..]) if *to != room && !allowed.contains(*to) => {
                Some(format!("`{room}` may not import `{to}` ({text})"))
            }
            _ => None,
        }
    }

    fn check_layer(&self, from: &str, to: &str, text: &str) -> Option<String> {
        let layer = |room: &str| self.layers.iter().position(|layer| layer.contains(room));
        match (layer(from), layer(to)) {
            (None, _) => Some(format!("rooms.toml has no room `{from}` inside comm")),
            (_, None) => Some(format!("inside comm `{to}` is named by its room ({text})")),
            (Some(at), Some(of)) => {
                (of < at).then(|| format!("`{from}` is below `{to}` inside comm ({text})"))
            }
        }
    }
}

/// Returns the segments of `path` from the crate's root. `modules` is the module path of the file
/// in which `path` stands. Returns `None` if `path` starts with neither `crate` nor `super`.
fn absolute(modules: &[&str], path: &PathUse) -> Option<Vec<String>> {
    let supers = path
        .segments
        .iter()
        .take_while(|segment| *segment == "super")
        .count();
    let rest = path.segments.iter().skip(supers.max(1)).cloned();
    match path.segments[0].as_str() {
        "crate" => Some(rest.collect()),
        // In an inline module, the first `super` only leaves that module.
        "super" => {
            let outer = (modules.len() + path.inline_modules).checked_sub(supers)?;
            Some(
                modules
                    .iter()
                    .take(outer)
                    .map(|module| (*module).to_owned())
                    .chain(rest)
                    .collect(),
            )
        }
        _ => None,
    }
}

fn is_in(path: &str, place: &str) -> bool {
    path.strip_prefix(place)
        .is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
}

fn names(list: &Value) -> Names {
    let list = list
        .as_array()
        .unwrap_or_else(|| panic!("rooms.toml: {list} is no list"));
    list.iter()
        .map(|name| {
            name.as_str()
                .expect("rooms.toml: lists have names")
                .to_owned()
        })
        .collect()
}
