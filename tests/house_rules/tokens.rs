//! Functions that classify tokens.

use proc_macro2::{Delimiter, TokenTree};

/// True for `#[cfg(test)]`, `#[cfg(all(test, ...))]` and `#[test]`.
pub fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let Some(TokenTree::Group(attribute)) = tokens.get(1) else {
        return false;
    };
    if !is_punct(tokens.first(), '#') || attribute.delimiter() != Delimiter::Bracket {
        return false;
    }
    let text: String = attribute.stream().to_string().split_whitespace().collect();
    text == "test" || text.starts_with("cfg(test)") || text.starts_with("cfg(all(test,")
}

/// Returns the place after the item whose head contains `at`: past its first braces or semicolon.
pub fn item_end(tokens: &[TokenTree], at: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        other => is_punct(Some(other), ';'),
    };
    tokens[at..]
        .iter()
        .position(ends)
        .map_or(tokens.len(), |found| at + found + 1)
}

pub fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

pub fn is_colons(tokens: &[TokenTree]) -> bool {
    is_punct(tokens.first(), ':') && is_punct(tokens.get(1), ':')
}
