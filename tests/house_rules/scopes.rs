//! The names that a module uses and defines, without its test code.

use crate::tokens::{is_colons, is_punct, is_test_attribute, item_end};
use proc_macro2::{Delimiter, TokenTree};
use std::collections::{BTreeMap, BTreeSet};

/// Names in the code of one module, which is a file or an inline module.
#[derive(Default)]
pub struct Scope {
    /// Functions, types, constants and macros that the module's own code defines. Items that come
    /// from the call of a macro are not included.
    pub items: BTreeSet<String>,
    pub files: Vec<Declared>,
    pub inline: Vec<(String, Scope)>,
    /// Every `use`, also those inside functions.
    pub imports: Vec<Import>,
    pub paths: Vec<Named>,
    /// Single words that may be imported names, each with the line of its first use. A lower-case
    /// word counts only if it is called, because otherwise it may be a variable that has the name
    /// of a function.
    pub words: BTreeMap<String, usize>,
}

/// A module declared as `mod name;`.
pub struct Declared {
    pub name: String,
    pub path: Option<String>,
}

pub struct Import {
    pub segments: Vec<String>,
    pub kind: Kind,
    /// True for `pub use` and `pub(...) use`.
    pub is_reexport: bool,
    pub line: usize,
}

#[derive(Clone, PartialEq)]
pub enum Kind {
    Name(String),
    Glob,
}

pub struct Named {
    pub segments: Vec<String>,
    pub line: usize,
}

impl Scope {
    pub fn read(tokens: &[TokenTree]) -> Scope {
        let mut scope = Scope::default();
        scope.walk(tokens, true);
        scope
    }

    /// Reads tokens. `is_top` is true outside functions and blocks.
    fn walk(&mut self, tokens: &[TokenTree], is_top: bool) {
        let mut at = 0;
        let mut path_attribute = None;
        while at < tokens.len() {
            if is_test_attribute(&tokens[at..]) {
                at = item_end(tokens, at);
                continue;
            }
            match &tokens[at] {
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    path_attribute = path_value(&inner).or(path_attribute);
                    self.walk(&inner, false);
                    at += 1;
                }
                TokenTree::Ident(word) => {
                    at = self.walk_word(&word.to_string(), tokens, at, is_top, &mut path_attribute)
                }
                _ => at += 1,
            }
        }
    }

    /// Reads the item or path that begins at `at`. Returns the place after it.
    fn walk_word(
        &mut self,
        word: &str,
        tokens: &[TokenTree],
        at: usize,
        is_top: bool,
        path_attribute: &mut Option<String>,
    ) -> usize {
        let next = match tokens.get(at + 1) {
            Some(TokenTree::Ident(next)) => Some(next.to_string()),
            _ => None,
        };
        match (word, next) {
            // The `use<'a>` of a type is no import.
            ("use", _) if !is_punct(tokens.get(at + 1), '<') => return self.walk_use(tokens, at),
            ("mod", Some(name)) => {
                if let Some(TokenTree::Group(body)) = tokens.get(at + 2) {
                    self.inline.push((
                        name,
                        Scope::read(&body.stream().into_iter().collect::<Vec<_>>()),
                    ));
                } else {
                    self.files.push(Declared {
                        name,
                        path: path_attribute.take(),
                    });
                }
                return at + 3;
            }
            (
                "fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static",
                Some(name),
            ) => {
                if is_top {
                    self.items.insert(name);
                }
                return at + if word == "const" { 1 } else { 2 };
            }
            ("macro_rules", _) => {
                if let (true, Some(TokenTree::Ident(name))) = (is_top, tokens.get(at + 2)) {
                    self.items.insert(name.to_string());
                }
                return at + 3;
            }
            _ => {}
        }
        self.walk_path(tokens, at)
    }

    fn walk_use(&mut self, tokens: &[TokenTree], at: usize) -> usize {
        let end = item_semicolon(tokens, at);
        let is_public =
            |token: &TokenTree| matches!(token, TokenTree::Ident(word) if word == "pub");
        let is_reexport = match at.checked_sub(1).map(|before| &tokens[before]) {
            Some(TokenTree::Group(_)) => at >= 2 && is_public(&tokens[at - 2]),
            Some(before) => is_public(before),
            None => false,
        };
        self.take_use(&tokens[at + 1..end], &[], is_reexport);
        end
    }

    /// Records the names that a `use` imports, with `prefix` put before their segments. Braces give
    /// one record for each name.
    fn take_use(&mut self, tokens: &[TokenTree], prefix: &[String], is_reexport: bool) {
        let mut segments = prefix.to_vec();
        let mut at = 0;
        while let Some(TokenTree::Ident(segment)) = tokens.get(at) {
            segments.push(segment.to_string());
            at += 1;
            if !is_colons(&tokens[at..]) {
                break;
            }
            at += 2;
        }
        let kind = match tokens.get(at) {
            Some(TokenTree::Group(names)) => {
                let names: Vec<TokenTree> = names.stream().into_iter().collect();
                for name in names
                    .split(|token| is_punct(Some(token), ','))
                    .filter(|name| !name.is_empty())
                {
                    self.take_use(name, &segments, is_reexport);
                }
                return;
            }
            Some(token) if is_punct(Some(token), '*') => Kind::Glob,
            // `::name` is a name of another crate.
            Some(TokenTree::Punct(_)) => return,
            after => {
                if segments.len() > 1 && segments.last().is_some_and(|last| last == "self") {
                    segments.pop();
                }
                let renamed = after.and(tokens.get(at + 1)).map(TokenTree::to_string);
                let Some(name) = renamed.or_else(|| segments.last().cloned()) else {
                    return;
                };
                Kind::Name(name)
            }
        };
        let line = tokens[0].span().start().line;
        self.imports.push(Import {
            segments,
            kind,
            is_reexport,
            line,
        });
    }

    fn walk_path(&mut self, tokens: &[TokenTree], at: usize) -> usize {
        let before = |back: usize| at.checked_sub(back).and_then(|place| tokens.get(place));
        // These words do not start a path: a field or method after one dot (two dots are a range),
        // a lifetime, and `name` in `<T>::name`.
        let is_member = is_punct(before(1), '.') && !is_punct(before(2), '.');
        let is_other =
            is_member || is_punct(before(1), '\'') || at >= 2 && is_colons(&tokens[at - 2..]);
        let line = tokens[at].span().start().line;
        let mut segments = vec![tokens[at].to_string()];
        let mut end = at + 1;
        while let (true, Some(TokenTree::Ident(segment))) =
            (is_colons(&tokens[end..]), tokens.get(end + 2))
        {
            segments.push(segment.to_string());
            end += 3;
        }
        if is_other {
            return end;
        }
        if segments.len() > 1 {
            self.paths.push(Named { segments, line });
            return end;
        }
        let word = segments.remove(0);
        let arguments = matches!(tokens.get(end), Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis);
        let is_called = arguments || is_punct(tokens.get(end), '!') || is_colons(&tokens[end..]);
        if is_called || word.starts_with(char::is_uppercase) {
            self.words.entry(word).or_insert(line);
        }
        end
    }
}

fn path_value(attribute: &[TokenTree]) -> Option<String> {
    match attribute {
        [TokenTree::Ident(name), equals, TokenTree::Literal(value)]
            if name == "path" && is_punct(Some(equals), '=') =>
        {
            Some(value.to_string().trim_matches('"').to_owned())
        }
        _ => None,
    }
}

fn item_semicolon(tokens: &[TokenTree], at: usize) -> usize {
    let found = tokens[at..]
        .iter()
        .position(|token| is_punct(Some(token), ';'));
    found.map_or(tokens.len(), |found| at + found)
}
