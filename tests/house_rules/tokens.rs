//! What a run of tokens is.

use proc_macro2::{Delimiter, TokenTree};

/// `#[cfg(test)]`, `#[cfg(all(test, ...))]` or `#[test]`.
pub fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let Some(TokenTree::Group(attribute)) = tokens.get(1) else { return false };
    if !is_punct(tokens.first(), '#') || attribute.delimiter() != Delimiter::Bracket {
        return false;
    }
    let text: String = attribute.stream().to_string().split_whitespace().collect();
    text == "test" || text.starts_with("cfg(test)") || text.starts_with("cfg(all(test,")
}

/// Past the item that `at` is in the head of: its first brace group or semicolon.
pub fn item_end(tokens: &[TokenTree], at: usize) -> usize {
    let ends = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        other => is_punct(Some(other), ';'),
    };
    tokens[at..].iter().position(ends).map_or(tokens.len(), |found| at + found + 1)
}

/// `unsafe extern "C" fn(` or `unsafe fn(`: no name before the arguments.
pub fn is_function_type(tokens: &[TokenTree]) -> bool {
    let keyword = tokens.iter().take(4).position(|token| token.to_string() == "fn");
    let argument = keyword.and_then(|at| tokens.get(at + 1));
    matches!(argument, Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis)
}

pub fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

pub fn is_colons(tokens: &[TokenTree]) -> bool {
    is_punct(tokens.first(), ':') && is_punct(tokens.get(1), ':')
}

/// All identifiers in there, at any depth.
pub fn flatten(tokens: &[TokenTree]) -> Vec<TokenTree> {
    let mut flat = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Group(group) => flat.extend(flatten(&group.stream().into_iter().collect::<Vec<_>>())),
            TokenTree::Ident(_) => flat.push(token.clone()),
            _ => {}
        }
    }
    flat
}
