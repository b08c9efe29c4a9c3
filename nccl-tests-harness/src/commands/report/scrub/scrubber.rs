//! The order in which things are left out.

use super::identity::{Keep, Known};
use super::pseudonyms::Pseudonyms;
use super::{check, numbers, words};

/// Leaves things out.
#[derive(Debug)]
pub struct Scrubber {
    known: Known,
    keep: Keep,
    pseudonyms: Pseudonyms,
}

impl Scrubber {
    /// For a machine that is `known`.
    pub fn new(known: Known, keep: Keep) -> Self {
        let pseudonyms = Pseudonyms::new(&known);
        Self { known, keep, pseudonyms }
    }

    /// The text without what identifies its maker.
    pub fn scrub(&mut self, text: &str) -> String {
        words::learn(text, &mut self.known);
        self.pseudonyms.avoid(&self.known);
        self.pseudonyms.learn_subnets(&self.known, text);
        // Secrets first: they may hold anything. Names last: they may be a part of anything.
        let mut text = words::secrets(text, &self.known, &mut self.pseudonyms);
        if !self.keep.names {
            text = words::emails(&text, &mut self.pseudonyms);
        }
        if !self.keep.serials {
            text = words::serials(&text, &self.known, &mut self.pseudonyms);
        }
        if !self.keep.addresses {
            text = numbers::all(&text, &self.known, &mut self.pseudonyms);
        }
        if !self.keep.names {
            text = words::names(&text, &self.known, &mut self.pseudonyms);
        }
        text
    }

    /// What kinds of known things are in a text that was scrubbed: none, or the scrubber is wrong.
    pub fn survivors(&self, text: &str) -> Vec<&'static str> {
        check::survivors(text, &self.known, self.keep)
    }
}
