//! A parsed source file: the Rust paths (`a::b`) in it, and the test modules that it declares.

use crate::tokens::{is_colons, is_punct, is_test_attribute, item_end};
use proc_macro2::{TokenStream, TokenTree};
use std::fmt::Write as _;

pub struct File {
    pub path: String,
    pub paths: Vec<PathUse>,
    pub tokens: Vec<TokenTree>,
    /// Files that may contain the modules that this file declares only for tests.
    pub test_files: Vec<String>,
}

/// A Rust path of two or more segments; a `use` with braces gives one path for each name.
#[derive(Debug, PartialEq)]
pub struct PathUse {
    pub segments: Vec<String>,
    pub line: usize,
    pub in_test: bool,
    /// Number of inline modules (`mod name { .. }`) around the path.
    pub inline_modules: usize,
}

#[derive(Clone, Copy, Default)]
struct Context {
    in_test: bool,
    inline_modules: usize,
}

impl File {
    pub fn parse(path: &str, text: &str) -> File {
        let tokens: TokenStream = text
            .parse()
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut file = File {
            path: path.to_owned(),
            paths: Vec::new(),
            tokens: Vec::new(),
            test_files: Vec::new(),
        };
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        file.walk(&tokens, Context::default());
        file.tokens = tokens;
        file
    }

    pub fn is_test_code(&self) -> bool {
        self.path
            .split('/')
            .any(|part| ["tests", "benches", "fuzz", "examples"].contains(&part))
    }

    fn walk(&mut self, tokens: &[TokenTree], context: Context) {
        let mut at = 0;
        // Index after the last item that has a test attribute (`#[cfg(test)]` or `#[test]`).
        let mut test_until = 0;
        while at < tokens.len() {
            if is_test_attribute(&tokens[at..]) {
                test_until = test_until.max(item_end(tokens, at));
            }
            let here = Context {
                in_test: context.in_test || at < test_until,
                ..context
            };
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

    /// Reads what the identifier at `at` begins: a module, a path, or nothing of interest. Returns
    /// the index of the token at which [`File::walk`] continues.
    fn walk_ident(&mut self, tokens: &[TokenTree], at: usize, context: Context) -> usize {
        if tokens[at].to_string() == "mod"
            && let Some(TokenTree::Ident(name)) = tokens.get(at + 1)
        {
            let end = item_end(tokens, at);
            let TokenTree::Group(body) = &tokens[end - 1] else {
                self.declare_module(&name.to_string(), context);
                return at + 1;
            };
            let inner = Context {
                inline_modules: context.inline_modules + 1,
                ..context
            };
            self.walk(&body.stream().into_iter().collect::<Vec<_>>(), inner);
            return end;
        }
        let is_after_colons = at >= 2 && is_colons(&tokens[at - 2..]);
        if is_after_colons || !is_colons(&tokens[at + 1..]) {
            return at + 1;
        }
        self.take_path(tokens, at, &[], context);
        // `take_path` has read the braces at the end of the path, so skip them.
        let mut end = at + 1;
        while is_colons(&tokens[end..]) && matches!(tokens.get(end + 2), Some(TokenTree::Ident(_)))
        {
            end += 3;
        }
        let ends_in_braces =
            is_colons(&tokens[end..]) && matches!(tokens.get(end + 2), Some(TokenTree::Group(_)));
        if ends_in_braces { end + 3 } else { at + 1 }
    }

    /// Records the path that begins at `at`, with `prefix` put before its segments. The braces of a
    /// `use` give one path for each name.
    fn take_path(
        &mut self,
        tokens: &[TokenTree],
        mut at: usize,
        prefix: &[String],
        context: Context,
    ) {
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
                for name in inner
                    .split(|token| is_punct(Some(token), ','))
                    .filter(|name| !name.is_empty())
                {
                    self.take_path(name, 0, &segments, context);
                }
            }
            _ => {
                let Context {
                    in_test,
                    inline_modules,
                } = context;
                self.paths.push(PathUse {
                    segments,
                    line,
                    in_test,
                    inline_modules,
                });
            }
        }
    }

    /// Records the two files that may contain the module `name`, if the module is declared only for
    /// tests.
    fn declare_module(&mut self, name: &str, context: Context) {
        if !context.in_test {
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
