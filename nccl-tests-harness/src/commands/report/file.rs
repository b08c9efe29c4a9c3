//! How a report reads: a summary, then a section for each part.

use super::parts::{Order, Part};
use super::run::{Done, Fate};
use super::scrub::Keep;
use crate::date;
use std::fmt::Write;
use std::path::Path;

/// More of a part's JSON is left out.
const MOST_BYTES: u64 = 4 << 20;

/// The parts with their commands and limits, and which are not run.
pub(super) fn dry_run(parts: &[Part], folder: &Path) -> String {
    let line = |part: &Part| {
        let what = match &part.order {
            Order::Not(why) => format!("not run: {why}"),
            order => format!("at most {} s: {}", part.limit.as_secs(), command(order, folder)),
        };
        format!("{}: {what}\n", part.title)
    };
    parts.iter().map(line).collect()
}

/// The whole report, with everything in it.
pub(super) fn text(parts: &[Part], done: &[Done], folder: &Path, keep: Keep, was_interrupted: bool) -> String {
    let mut text = format!("# nccl-spark report\n\n{}, nccl-spark {}.", date::today(), env!("PROGRAM_VERSION"));
    text += &left_out(keep);
    if was_interrupted {
        text += " **It was interrupted: what comes after that is missing.**";
    }
    text += "\n\n| part | result | seconds | why |\n|---|---|---|---|\n";
    for (part, done) in parts.iter().zip(done) {
        let took = match done.fate {
            Fate::NotRun(_) => String::new(),
            _ => format!("{:.1}", done.took.as_secs_f64()),
        };
        let cells = [part.title.clone(), done.result(), took, done.reason()].map(|cell| in_cell(&cell));
        text += &format!("| {} |\n", cells.join(" | "));
    }
    for (part, done) in parts.iter().zip(done) {
        text += &section(part, done, folder);
    }
    text
}

fn left_out(keep: Keep) -> String {
    let all = [("names", keep.names), ("addresses", keep.addresses), ("serial numbers", keep.serials)];
    let mut out: Vec<&str> = all.iter().filter(|(_, is_kept)| !is_kept).map(|(what, _)| *what).collect();
    out.push("tokens");
    let (last, others) = out.split_last().map_or(("", String::new()), |(last, others)| (*last, others.join(", ")));
    let list = if others.is_empty() { last.to_owned() } else { format!("{others} and {last}") };
    format!(" Left out: {list}; equal ones have equal pseudonyms, as in mac-1.")
}

fn section(part: &Part, done: &Done, folder: &Path) -> String {
    let mut text = format!("\n## {}\n\n", part.title);
    if let Fate::NotRun(why) = &done.fate {
        return text + &format!("Not run: {}\n", printable(why));
    }
    let how = match done.reason() {
        why if why.is_empty() => done.result(),
        why => format!("{}: {why}", done.result()),
    };
    let took = done.took.as_secs_f64();
    // Writing into a String cannot fail.
    let _ = writeln!(text, "{}\n{took:.1} s, {}", fenced("sh", &command(&part.order, folder)), printable(&how));
    if !done.output.is_empty() {
        text += &format!("\n{}", fenced("text", &done.output));
    }
    if let Order::Run { json: Some(path), .. } = &part.order {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        text += &match std::fs::metadata(path) {
            Ok(about) if about.len() > MOST_BYTES => format!("\n{name} has {} bytes and is left out.\n", about.len()),
            Ok(_) => match std::fs::read(path) {
                Ok(bytes) => format!("\n{name}:\n\n{}", fenced("json", &String::from_utf8_lossy(&bytes))),
                Err(error) => format!("\n{name} cannot be read: {error}\n"),
            },
            Err(_) => format!("\nIt left no {name}.\n"),
        };
    }
    text
}

/// A part's command as a shell takes it; files of the report by their names alone.
fn command(order: &Order, folder: &Path) -> String {
    let Order::Run { program, arguments, .. } = order else { return "# read from files".to_owned() };
    let quoted = |word: String| {
        let is_plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c));
        if is_plain { word } else { format!("'{}'", word.replace('\'', r"'\''")) }
    };
    let own = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let below = format!("{}/", folder.display());
    let words = arguments.iter().map(|word| quoted(word.replace(&below, "")));
    [own].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

/// A block that nothing in it ends.
fn fenced(language: &str, text: &str) -> String {
    let text = printable(text);
    let longest = text.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    let fence = "`".repeat(longest.max(2) + 1);
    format!("{fence}{language}\n{}\n{fence}\n", text.trim_end_matches('\n'))
}

fn in_cell(text: &str) -> String {
    printable(text).replace('|', r"\|").replace('\n', " ")
}

/// Without control characters and colours, in which a word may hide from a reader and from the scrubber.
fn printable(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\n' | '\t' => result.push(c),
            '\x1b' if rest.next_if_eq(&'[').is_some() => {
                while rest.next_if(|c| matches!(c, '0'..='?')).is_some() {}
                rest.next();
                // What was before and after it are two words.
                result.push(' ');
            }
            c if c.is_control() => result.push(' '),
            c => result.push(c),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_and_control_characters_hide_no_word() {
        assert_eq!(printable("a\x1b[1;31mspark-1\x1b[0m\0b\tc\nd"), "a spark-1  b\tc\nd");
    }

    #[test]
    fn nothing_in_a_block_ends_it_and_nothing_in_a_cell_the_row() {
        assert_eq!(fenced("text", "a\n```\nb\n"), "````text\na\n```\nb\n````\n");
        assert_eq!(in_cell("a|b\nc"), r"a\|b c");
    }
}
