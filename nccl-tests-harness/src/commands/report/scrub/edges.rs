//! Where words begin and end, also in JSON.

/// Whether a word may begin here: nothing that belongs to it is before, or an escape of JSON (`\n`) is.
pub(super) fn starts_free(text: &str, at: usize) -> bool {
    let before = &text.as_bytes()[..at];
    let Some((last, rest)) = before.split_last() else { return true };
    if !last.is_ascii_alphanumeric() {
        return true;
    }
    let is_escaped = |before: &[u8]| before.iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
    if matches!(last, b'n' | b'r' | b't' | b'b' | b'f') && is_escaped(rest) {
        return true;
    }
    let unicode = before.len().checked_sub(5).map(|from| before.split_at(from));
    unicode.is_some_and(|(rest, end)| end[0] == b'u' && end[1..].iter().all(u8::is_ascii_hexdigit) && is_escaped(rest))
}

/// Whether a word may end here.
pub(super) fn ends_free(text: &str, at: usize) -> bool {
    !text.as_bytes().get(at).is_some_and(u8::is_ascii_alphanumeric)
}
