//! docs/guide/messages.md lists every text of the sources that a user may read, and no others.
//!
//! A text is a string literal of two or more words in `src/`: a log line, an error, or a reason
//! that becomes part of another text. Literals in comments, in tests and in the macros of
//! `SKIPPED_MACROS` do not count. A pair of braces is a placeholder, whatever its content; the
//! document writes `<name>` in its place. In the document each text is in backticks in a list item.
//! Backticks that the text itself contains are left out there.
//!
//! Not checked: texts of fewer than two words (`lost`, `{what}: {why}`); texts of other crates and
//! of the kernel; values of placeholders; `debug!` and `trace!`, which NCCL shows only under
//! `NCCL_DEBUG=TRACE`; the level of a text outside the macro that logs it.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use std::collections::BTreeMap;
use std::path::Path;

const DOCUMENT: &str = "docs/guide/messages.md";

/// Files without messages: test code, and the output of `nccl-spark rails`.
const FILES_WITHOUT_MESSAGES: &[&str] = &["tests.rs", "fake.rs", "testbed.rs", "rails/report.rs"];

/// Macros whose texts are not messages. Most have texts for developers. `settings` and `ignored`
/// define tables of variables, whose texts the command line prints.
const SKIPPED_MACROS: &[&str] = &["debug", "trace", "assert", "assert_eq", "unreachable", "asm", "settings", "ignored"];

#[test]
fn messages_md_lists_every_message_and_no_others() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut in_sources = BTreeMap::new();
    read_folder(&root.join("src"), &mut in_sources);
    assert!(in_sources.len() > 100, "only {} messages found", in_sources.len());
    let in_document = read_document(&std::fs::read_to_string(root.join(DOCUMENT)).unwrap());
    let missing = in_sources.iter().filter(|(text, _)| !in_document.contains_key(*text));
    let mut wrong: Vec<String> = missing.map(|(text, found)| format!("missing: `{text}` ({})", found.file)).collect();
    let gone = in_document.keys().filter(|text| !in_sources.contains_key(*text));
    wrong.extend(gone.map(|text| format!("not in src/: `{text}`")));
    for (text, found) in &in_sources {
        if let (Some(level), Some(said)) = (found.level, in_document.get(text))
            && said != level
        {
            wrong.push(format!("`{text}` is of level {level}, not {said:?}"));
        }
    }
    assert!(wrong.is_empty(), "{DOCUMENT} and src/ differ in {} texts:\n{}", wrong.len(), wrong.join("\n"));
}

#[derive(Debug, Default)]
struct Found {
    file: String,
    /// WARN or INFO, if the text is inside the macro that logs it.
    level: Option<&'static str>,
}

fn read_folder(folder: &Path, texts: &mut BTreeMap<String, Found>) {
    let mut entries: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        let name = path.to_string_lossy().into_owned();
        if path.is_dir() {
            if !path.ends_with("tests") {
                read_folder(&path, texts);
            }
        } else if name.ends_with(".rs") && !FILES_WITHOUT_MESSAGES.iter().any(|end| name.ends_with(end)) {
            let mut found = Vec::new();
            read_tokens(std::fs::read_to_string(&path).unwrap().parse().unwrap(), None, &mut found);
            for (text, level) in found {
                let file = name.rsplit_once("/src/").map_or(name.clone(), |(_, file)| file.to_owned());
                let known = texts.entry(text).or_insert_with(|| Found { file, level });
                known.level = known.level.or(level);
            }
        }
    }
}

/// Collects texts, also those inside groups (of parentheses, brackets or braces). `level` is the
/// level of the first literal outside groups. Other literals have a level only if they are inside a
/// macro that logs.
fn read_tokens(tokens: TokenStream, mut level: Option<&'static str>, found: &mut Vec<(String, Option<&'static str>)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at..] {
            [TokenTree::Punct(hash), TokenTree::Punct(_), TokenTree::Group(_), ..] if hash.as_char() == '#' => at += 2,
            [TokenTree::Punct(hash), TokenTree::Group(attribute), ..] if hash.as_char() == '#' => {
                let words = attribute.stream().to_string();
                at += 1;
                if words.starts_with("error") {
                    read_tokens(attribute.stream(), None, found);
                } else if words.replace(' ', "") == "cfg(test)" {
                    // The item that the attribute applies to ends in braces or with a semicolon.
                    let is_end = |token: &TokenTree| match token {
                        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                        TokenTree::Punct(punct) => punct.as_char() == ';',
                        _ => false,
                    };
                    at = tokens.iter().skip(at).position(is_end).map_or(tokens.len(), |length| at + length);
                }
            }
            [TokenTree::Ident(name), TokenTree::Punct(bang), TokenTree::Group(inside), ..] if bang.as_char() == '!' => {
                read_macro(&name.to_string(), inside, found);
                at += 2;
            }
            [TokenTree::Group(group), ..] => read_tokens(group.stream(), None, found),
            [TokenTree::Literal(literal), ..] => {
                let (text, level) = (literal.to_string(), level.take());
                if text.ends_with(['"', '#']) && !text.starts_with(['b', 'c']) {
                    let text = plain(&text);
                    found.extend(is_prose(&text).then_some((text, level)));
                }
            }
            _ => {}
        }
        at += 1;
    }
}

fn read_macro(name: &str, inside: &Group, found: &mut Vec<(String, Option<&'static str>)>) {
    let level = match name {
        "warn" | "error" => Some("WARN"),
        "info" => Some("INFO"),
        _ if SKIPPED_MACROS.contains(&name) => return,
        _ => None,
    };
    read_tokens(inside.stream(), level, found);
}

/// Returns a literal in the document's form: one line, `<>` for each placeholder.
fn plain(literal: &str) -> String {
    let inside = literal.trim_matches(['r', '#']).trim_start_matches('"').trim_end_matches('"');
    let (mut text, mut chars, mut depth) = (String::new(), inside.chars().peekable(), 0);
    while let Some(next) = chars.next() {
        match next {
            '\\' => match chars.next() {
                Some('\n') => while chars.next_if(|after| after.is_whitespace()).is_some() {},
                Some('n' | 't') => text.push(' '),
                Some(other) => text.push(other),
                None => {}
            },
            '{' if depth == 0 => {
                depth = 1;
                text.push_str("<>");
            }
            '}' => depth = 0,
            // The document puts backticks around the text, so it leaves out those in the text.
            '`' => {}
            _ if depth == 0 => text.push(next),
            _ => {}
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn is_prose(text: &str) -> bool {
    let is_word = |word: &&str| word.chars().filter(char::is_ascii_alphabetic).count() >= 2;
    text.replace("<>", "").split_whitespace().filter(is_word).count() >= 2
}

/// Reads the texts in backticks in the document's list items, each with its level. Where an item
/// has a level, as in "`text` (WARN): meaning", only the backticks before the level are texts.
fn read_document(document: &str) -> BTreeMap<String, String> {
    let mut items: Vec<String> = Vec::new();
    let mut is_item = false;
    for line in document.lines() {
        if line.starts_with("- ") {
            items.push(line.to_owned());
            is_item = true;
        } else if let Some(item) = items.last_mut().filter(|_| is_item && line.starts_with("  ")) {
            *item += &line[1..];
        } else {
            is_item = false;
        }
    }
    let mut texts = BTreeMap::new();
    for item in &items {
        let mut levels = ["WARN", "INFO", "error"].into_iter();
        let (place, level) = levels
            .find_map(|level| item.split_once(&format!("` ({level}):")).map(|(place, _)| (place, level)))
            .unwrap_or((item, ""));
        for text in place.split('`').skip(1).step_by(2) {
            let text = without_names(text);
            if is_prose(&text) {
                texts.insert(text, level.to_owned());
            }
        }
    }
    texts
}

fn without_names(text: &str) -> String {
    let mut plain = String::new();
    for (at, part) in text.split('<').enumerate() {
        let rest = if at == 0 { part } else { part.split_once('>').map_or(part, |(_, rest)| rest) };
        plain.push_str(if at == 0 { "" } else { "<>" });
        plain.push_str(rest);
    }
    plain
}

#[test]
fn every_text_that_a_user_may_read_is_found() {
    let source = r##"
        //! A comment "of words".
        /// A "doc comment" too.
        #[error("no {what} here: {0}")]
        struct One;
        #[doc = "also a comment"]
        fn two() {
            tracing::warn!("rail {} to {peer:?} lost: \
                            {why}", "its port is down");
            debug!("nobody reads this");
            let (short, bytes) = ("lost", b"two words");
            Err(format!("it's {n} bytes, `at` most"))
        }
        #[cfg(test)]
        mod tests { fn three() { four("of a test") } }
        const LAST: &str = "the last text";
    "##;
    let mut found = Vec::new();
    read_tokens(source.parse().unwrap(), None, &mut found);
    let expected = [
        ("no <> here: <>", None),
        ("rail <> to <> lost: <>", Some("WARN")),
        ("its port is down", None),
        ("it's <> bytes, at most", None),
        ("the last text", None),
    ];
    assert_eq!(found, expected.map(|(text, level)| (text.to_owned(), level)));
    let document = "# `no message`\n- `rail <rail> lost: <why>` (WARN): see\n  `a port` there\n\nno `list item`\n\
                    - Of `NAME`: `one thing`,\n  `it is <n>`\n";
    let expected = [("it is <>", ""), ("one thing", ""), ("rail <> lost: <>", "WARN")];
    assert_eq!(read_document(document), expected.map(|(text, level)| (text.to_owned(), level.to_owned())).into());
}
