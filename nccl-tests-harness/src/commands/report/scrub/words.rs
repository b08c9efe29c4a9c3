//! Secrets, e-mail addresses, serial numbers, and names of hosts and users.

use super::edges::{ends_free, starts_free};
use super::identity::{Known, ORDINARY, is_secret_name};
use super::pseudonyms::{Kind, Pseudonyms};
use super::spread;
use regex::{Captures, Regex};
use std::collections::BTreeSet;
use std::sync::LazyLock;

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a constant pattern")
}

/// Tokens that show what they are.
static TOKENS: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r"hf_[A-Za-z0-9]{8,}|gh[a-z]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{16,}|glpat-[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{16,}",
        r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|A[KS]IA[A-Z0-9]{16}|eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*",
        r"|SHA256:[A-Za-z0-9+/]{43}|(?:AAAAC3Nza|AAAAB3Nza|AAAAE2Vj)[A-Za-z0-9+/=]{20,}",
        r"|(?s:-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\z))",
    ))
});
/// A name that says "secret", and its value.
static NAMED: LazyLock<Regex> = LazyLock::new(|| {
    pattern(concat!(
        r#"([A-Za-z0-9_.-]+)(\\?["']?[ \t]*[=:][ \t]*)("#,
        r#"\\"(?:[^"\\]|\\[^"])*\\"|"(?:[^"\\]|\\.)*"|'[^'\n]*'|[^\s"',;{}\[\]\\]+)"#
    ))
});
/// The same as the doctor writes it: `"name": "X_TOKEN", ..., "value": "..."`.
static NAME_AND_VALUE: LazyLock<Regex> =
    LazyLock::new(|| pattern(r#"("name":\s*")([^"\n]+)("[^{}]{0,400}?"value":\s*")((?:[^"\\]|\\.)*)""#));
static OPTION: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(--(?:token|password|passwd|secret|api-key)[ =]|[Bb]earer[ :]+)([^\s\x22',;\\]{4,})"));
static IN_URL: LazyLock<Regex> = LazyLock::new(|| pattern(r"(://)([^/\s:@\x22]+:[^/\s@\x22]+)(@)"));
static EMAIL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9][A-Za-z0-9-]*)+")
});
static UUID: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"));
static SERIAL: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r#"((?i:serial(?:[ _-]?(?:number|num|no))?|asset[ _-]?tag|\bS/N|\bSN)["']?[ \t]*[=:][ \t]*["']?)([A-Za-z0-9][A-Za-z0-9_./-]*)"#,
    )
});
static HOME: LazyLock<Regex> = LazyLock::new(|| pattern(r"(/(?:home|Users)/)([A-Za-z0-9_][A-Za-z0-9_.-]*)"));
/// Where a text names a host: NCCL's log, nccl-tests, JSON, ssh, uname.
static HOSTS: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    [
        r"(?m)(?:^|\s|n)([A-Za-z0-9][A-Za-z0-9.-]*):[0-9]+:[0-9]+ \[[0-9]+\]",
        r"Pid +[0-9]+ on +([A-Za-z0-9][A-Za-z0-9.-]*) device",
        r#""(?:host|hostname|nodename|peer)":\s*"([A-Za-z0-9][A-Za-z0-9.-]*)""#,
        r"ssh: (?:connect to host|Could not resolve hostname) ([A-Za-z0-9][A-Za-z0-9.-]*)",
        r"(?m)^Linux ([A-Za-z0-9][A-Za-z0-9.-]*) [0-9]+\.[0-9]+",
        r"\b[a-z_][a-z0-9_.-]*@([a-z0-9][a-z0-9.-]*)\b",
    ]
    .map(pattern)
    .into()
});
static AT: LazyLock<Regex> = LazyLock::new(|| pattern(r"([a-z_][a-z0-9_.-]*)@[a-z0-9]"));

/// Adds the hosts, users and secrets that a text names as such.
pub(super) fn learn(text: &str, known: &mut Known) {
    for found in NAMED.captures_iter(text).filter(|found| is_secret_name(&found[1])) {
        let value = found[3].trim_matches(['"', '\'', '\\']);
        // What may be a word or a path is hidden only where its name is.
        let is_random = value.len() >= 8 && value.bytes().any(|byte| byte.is_ascii_digit()) && !value.starts_with('/');
        if is_random && !Kind::is_pseudonym(value) {
            known.secrets.insert(value.to_owned());
        }
    }
    let is_new = |name: &str| !Kind::is_pseudonym(name.split('.').next().unwrap_or(name));
    for name in HOSTS.iter().flat_map(|one| one.captures_iter(text)).filter_map(|found| found.get(1)) {
        let name = name.as_str().trim_end_matches(['.', '-']);
        if is_new(name) {
            known.add_host(name);
        }
    }
    for found in HOME.captures_iter(text) {
        if is_new(&found[2]) {
            known.add_user(&found[2]);
        }
    }
    for name in AT.captures_iter(text).filter_map(|found| found.get(1)) {
        // `\nme@there`: the n is not of the name.
        let is_escape = text[..name.start()].ends_with('\\');
        let name = if is_escape { &name.as_str()[1..] } else { name.as_str() };
        if is_new(name) {
            known.add_user(name);
        }
    }
}

/// Tokens, passwords, keys.
pub(super) fn secrets(text: &str, known: &Known, pseudonyms: &mut Pseudonyms) -> String {
    let mut longest: Vec<&String> = known.secrets.iter().collect();
    longest.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
    let mut text = text.to_owned();
    for secret in longest {
        text = spread::replaced(&text, secret, &mut || pseudonyms.of(Kind::Token, secret));
    }
    let text = TOKENS.replace_all(&text, |found: &Captures| pseudonyms.of(Kind::Token, &found[0]));
    let text = NAME_AND_VALUE.replace_all(&text, |found: &Captures| {
        let value = if is_secret_name(&found[2]) { hidden(&found[4], pseudonyms) } else { found[4].to_owned() };
        format!("{}{}{}{value}\"", &found[1], &found[2], &found[3])
    });
    let text = NAMED.replace_all(&text, |found: &Captures| {
        // `"token": {` and `--token-file x` are none; a path says where the secret is.
        let is_option = found[1].ends_with("-file") || found[1].ends_with("_file") || found[1].ends_with("_FILE");
        if !is_secret_name(&found[1]) || is_option {
            return found[0].to_owned();
        }
        format!("{}{}{}", &found[1], &found[2], hidden(&found[3], pseudonyms))
    });
    let text = OPTION.replace_all(&text, |found: &Captures| format!("{}{}", &found[1], hidden(&found[2], pseudonyms)));
    let text = IN_URL.replace_all(&text, |found: &Captures| format!("://{}@", hidden(&found[2], pseudonyms)));
    text.into_owned()
}

/// The pseudonym of a value, in the quotes that it had.
fn hidden(value: &str, pseudonyms: &mut Pseudonyms) -> String {
    let bare = value.trim_matches(['"', '\'', '\\']);
    if bare.is_empty() || Kind::is_pseudonym(bare) {
        return value.to_owned();
    }
    let at = value.find(bare).unwrap_or(0);
    format!("{}{}{}", &value[..at], pseudonyms.of(Kind::Token, bare), &value[at + bare.len()..])
}

/// E-mail addresses.
pub(super) fn emails(text: &str, pseudonyms: &mut Pseudonyms) -> String {
    let replace = |found: &Captures| {
        let range = found.get(0).map_or(0..0, |all| all.range());
        let is_escape = text[..range.start].ends_with('\\');
        let (start, address) = found[0].split_at(usize::from(is_escape));
        let (local, domain) = address.split_once('@').unwrap_or((address, ""));
        if Kind::is_pseudonym(domain.split('.').next().unwrap_or_default())
            || Kind::is_pseudonym(local)
            || local.is_empty()
        {
            return found[0].to_owned();
        }
        format!("{start}{}", pseudonyms.of(Kind::Email, &address.to_ascii_lowercase()))
    };
    let mut replace = replace;
    EMAIL.replace_all(text, |found: &Captures| replace(found)).into_owned()
}

/// Serial numbers: known ones anywhere, others where a text says so, and everything in a UUID's form.
pub(super) fn serials(text: &str, known: &Known, pseudonyms: &mut Pseudonyms) -> String {
    let mut text = text.to_owned();
    for serial in longest_first(&known.serials) {
        text = anywhere(&text, serial, &mut |found| pseudonyms.of(Kind::Serial, &found.to_ascii_lowercase()));
    }
    let text = UUID.replace_all(&text, |found: &Captures| pseudonyms.of(Kind::Serial, &found[0].to_ascii_lowercase()));
    let text = SERIAL.replace_all(&text, |found: &Captures| {
        let value = &found[2];
        if Kind::is_pseudonym(value) || !value.bytes().any(|byte| byte.is_ascii_digit()) || value.len() < 4 {
            return found[0].to_owned();
        }
        format!("{}{}", &found[1], pseudonyms.of(Kind::Serial, &value.to_ascii_lowercase()))
    });
    text.into_owned()
}

/// Hosts, domains and users, and what is a home directory.
pub(super) fn names(text: &str, known: &Known, pseudonyms: &mut Pseudonyms) -> String {
    let text = HOME.replace_all(text, |found: &Captures| {
        let name = found[2].trim_end_matches(['.', '-']);
        if Kind::is_pseudonym(name) {
            return found[0].to_owned();
        }
        let lower = name.to_ascii_lowercase();
        let kind = if known.hosts.contains(&lower) { Kind::Host } else { Kind::User };
        format!("{}{}{}", &found[1], pseudonyms.of(kind, &lower), &found[2][name.len()..])
    });
    let mut text = text.into_owned();
    let all: BTreeSet<String> = known.hosts.union(&known.users).cloned().collect();
    let lower = text.to_ascii_lowercase();
    for name in longest_first(&all).filter(|name| !ORDINARY.contains(&name.as_str()) && lower.contains(name.as_str())) {
        let kind = if known.hosts.contains(name) { Kind::Host } else { Kind::User };
        text = anywhere(&text, name, &mut |_| pseudonyms.of(kind, name));
    }
    text
}

fn longest_first(all: &BTreeSet<String>) -> impl Iterator<Item = &String> {
    let mut sorted: Vec<&String> = all.iter().collect();
    sorted.sort_by_key(|one| std::cmp::Reverse(one.len()));
    sorted.into_iter()
}

/// Replaces a word wherever it is one, in capitals or not.
fn anywhere(text: &str, word: &str, replacement: &mut dyn FnMut(&str) -> String) -> String {
    let (lower, word) = (text.to_ascii_lowercase(), word.to_ascii_lowercase());
    let mut result = String::with_capacity(text.len());
    let mut done = 0;
    for (at, _) in lower.match_indices(&word) {
        let end = at + word.len();
        if starts_free(text, at) && ends_free(text, end) {
            result.push_str(&text[done..at]);
            result.push_str(&replacement(&text[at..end]));
            done = end;
        }
    }
    result.push_str(&text[done..]);
    result
}
