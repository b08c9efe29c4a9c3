//! Finds the modules of a crate from its root file, as the compiler does, and resolves paths to the
//! modules that define the named items.

use crate::reading::File;
use crate::scopes::{Declared, Kind, Scope};
use std::collections::{BTreeMap, BTreeSet};

/// Index of a module in [`Modules::all`].
pub type Id = usize;

/// The modules of one crate except those for tests, each after its parent.
pub struct Modules {
    pub all: Vec<Module>,
}

pub struct Module {
    pub file: String,
    pub scope: Scope,
    parent: Option<Id>,
    children: BTreeMap<String, Id>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Found {
    Module(Id),
    /// An item that this module defines.
    Item(Id),
}

/// Meaning to prefer if a module and an item share a name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Want {
    Module,
    Item,
}

/// Names that the current search has visited. Two `use` declarations may refer to each other.
type Seen = BTreeSet<(Id, String, Want)>;

impl Modules {
    pub fn of_crate(root: &str, files: &BTreeMap<&str, &File>) -> Modules {
        let mut modules = Modules { all: Vec::new() };
        modules.add_file(root, true, None, files);
        modules
    }

    fn add_file(
        &mut self,
        path: &str,
        names_folder: bool,
        parent: Option<Id>,
        files: &BTreeMap<&str, &File>,
    ) -> Id {
        let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
        let mut below = folder.to_owned();
        if !names_folder && file != "mod.rs" {
            below = format!("{folder}/{}", file.trim_end_matches(".rs"));
        }
        self.add(
            Scope::read(&files[path].tokens),
            path,
            folder,
            &below,
            parent,
            files,
        )
    }

    /// Adds a module and its inner modules. The module's file is in `folder`, and the files of its
    /// children are in `below`.
    fn add(
        &mut self,
        mut scope: Scope,
        file: &str,
        folder: &str,
        below: &str,
        parent: Option<Id>,
        files: &BTreeMap<&str, &File>,
    ) -> Id {
        let inline = std::mem::take(&mut scope.inline);
        let declared = std::mem::take(&mut scope.files);
        let id = self.all.len();
        self.all.push(Module {
            file: file.to_owned(),
            scope,
            parent,
            children: BTreeMap::new(),
        });
        for (name, scope) in inline {
            let child = self.add(
                scope,
                file,
                folder,
                &format!("{below}/{name}"),
                Some(id),
                files,
            );
            self.all[id].children.insert(name, child);
        }
        for declared in declared {
            if let Some(path) = file_of(&declared, folder, below, files) {
                let child = self.add_file(&path, declared.path.is_some(), Some(id), files);
                self.all[id].children.insert(declared.name, child);
            }
        }
        id
    }

    /// Resolves a path that stands in `module`, and follows re-exports. Returns the module that the
    /// path names, or the module that defines the named item. Returns `None` if the path begins
    /// with a name of another crate or of the language.
    pub fn resolve(&self, module: Id, segments: &[String], want: Want) -> Option<Found> {
        self.follow(module, segments, want, &mut Seen::new())
    }

    /// True if `module` is `ancestor`, or in it at any depth.
    pub fn is_within(&self, module: Id, ancestor: Id) -> bool {
        module == ancestor
            || self.all[module]
                .parent
                .is_some_and(|parent| self.is_within(parent, ancestor))
    }

    /// True if the module defines an item. Declarations of modules and re-exports do not count.
    pub fn defines_any(&self, module: Id) -> bool {
        !self.all[module].scope.items.is_empty()
    }

    fn follow(
        &self,
        module: Id,
        segments: &[String],
        want: Want,
        seen: &mut Seen,
    ) -> Option<Found> {
        let want_at = |at: usize| {
            if at + 1 == segments.len() {
                want
            } else {
                Want::Module
            }
        };
        let mut found = match segments.first()?.as_str() {
            "crate" => Found::Module(0),
            "self" => Found::Module(module),
            "super" => Found::Module(self.all[module].parent?),
            name => self.look_up(module, name, want_at(0), seen)?,
        };
        for (at, segment) in segments.iter().enumerate().skip(1) {
            let Found::Module(inside) = found else {
                return Some(found);
            };
            found = match segment.as_str() {
                "self" => found,
                "super" => Found::Module(self.all[inside].parent?),
                // If a name is not found, a macro defines it, or it is a re-export from another
                // crate. It counts as an item of `inside`.
                name => self
                    .look_up(inside, name, want_at(at), seen)
                    .unwrap_or(Found::Item(inside)),
            };
        }
        Some(found)
    }

    fn look_up(&self, module: Id, name: &str, want: Want, seen: &mut Seen) -> Option<Found> {
        let key = (module, name.to_owned(), want);
        if !seen.insert(key.clone()) {
            return None;
        }
        let Module {
            scope, children, ..
        } = &self.all[module];
        let mut all: Vec<Found> = children
            .get(name)
            .map(|child| Found::Module(*child))
            .into_iter()
            .collect();
        all.extend(scope.items.contains(name).then_some(Found::Item(module)));
        let imports = scope
            .imports
            .iter()
            .filter(|import| import.kind == Kind::Name(name.to_owned()));
        all.extend(imports.filter_map(|import| self.follow(module, &import.segments, want, seen)));
        let is_wanted =
            |found: &&Found| matches!(found, Found::Module(_)) == (want == Want::Module);
        let mut found = all.iter().find(is_wanted).or(all.first()).copied();
        for import in scope
            .imports
            .iter()
            .filter(|import| import.kind == Kind::Glob)
        {
            if found.is_none()
                && let Some(Found::Module(from)) =
                    self.follow(module, &import.segments, Want::Module, seen)
            {
                found = self.look_up(from, name, want, seen);
            }
        }
        seen.remove(&key);
        found
    }
}

fn file_of(
    declared: &Declared,
    folder: &str,
    below: &str,
    files: &BTreeMap<&str, &File>,
) -> Option<String> {
    let name = &declared.name;
    let candidates = match &declared.path {
        Some(path) => vec![joined(folder, path)],
        None => vec![
            format!("{below}/{name}.rs"),
            format!("{below}/{name}/mod.rs"),
        ],
    };
    candidates
        .into_iter()
        .find(|path| files.contains_key(path.as_str()))
}

/// Returns `folder/path`, with each `..` resolved.
fn joined(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in path.split('/') {
        match part {
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}
