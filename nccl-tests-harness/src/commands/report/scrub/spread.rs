//! Secrets that have blanks in them: what shows them may fold them, so that a run of blanks stands for any other.

/// The text with something else in place of a secret, as it is or as JSON has it.
pub(super) fn replaced(text: &str, secret: &str, replacement: &mut dyn FnMut() -> String) -> String {
    let words: Vec<&str> = secret.split(is_blank).filter(|word| !word.is_empty()).collect();
    let quoted: Vec<String> = words.iter().map(|word| in_json(word)).collect();
    let quoted: Vec<&str> = quoted.iter().map(String::as_str).collect();
    let text = one_form(text, &words, replacement);
    if quoted == words { text } else { one_form(&text, &quoted, replacement) }
}

fn is_blank(c: char) -> bool {
    c.is_whitespace() || c.is_control()
}

fn in_json(word: &str) -> String {
    let quoted = serde_json::Value::from(word).to_string();
    quoted.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(&quoted).to_owned()
}

fn one_form(text: &str, words: &[&str], replacement: &mut dyn FnMut() -> String) -> String {
    let Some((first, others)) = words.split_first() else { return text.to_owned() };
    let mut result = String::with_capacity(text.len());
    let mut done = 0;
    for (at, _) in text.match_indices(first) {
        if at < done {
            continue;
        }
        if let Some(end) = end_of(text, at + first.len(), others) {
            result.push_str(&text[done..at]);
            result.push_str(&replacement());
            done = end;
        }
    }
    result.push_str(&text[done..]);
    result
}

/// Where the words end that follow each other from here on, with blanks before each.
fn end_of(text: &str, from: usize, words: &[&str]) -> Option<usize> {
    words.iter().try_fold(from, |mut at, word| {
        loop {
            at += blank(&text[at..])?;
            if text[at..].starts_with(word) {
                return Some(at + word.len());
            }
        }
    })
}

/// The length of the blank or control character that a text begins with, also as an escape of JSON.
fn blank(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    if is_blank(first) {
        return Some(first.len_utf8());
    }
    let escape = text.strip_prefix('\\')?;
    if escape.starts_with(['n', 'r', 't', 'b', 'f']) {
        return Some(2);
    }
    let digits = escape.strip_prefix('u')?.get(..4)?;
    let number = u32::from_str_radix(digits, 16).ok()?;
    char::from_u32(number).filter(|c| is_blank(*c)).map(|_| 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_found_however_its_blanks_are_written() {
        for (text, expected) in [
            ("<a bc d>", "<X>"),
            ("<a\n      bc   d> a bc", "<X> a bc"),
            (r"<a\n  bc\td> a\u000abc\u0020d", "<X> X"),
            ("a a bc d bc d", "a X bc d"),
            ("abc d a\\bc d", "abc d a\\bc d"),
            ("a\u{a0}bc d\u{e9}", "X\u{e9}"),
        ] {
            assert_eq!(replaced(text, " a bc\td", &mut || "X".to_owned()), expected, "{text}");
        }
        assert_eq!(replaced(r#"p\"q \\n p"q \n"#, r#"p"q \n"#, &mut || "X".to_owned()), "X X");
        assert_eq!(replaced("a", " ", &mut || "X".to_owned()), "a");
    }
}
