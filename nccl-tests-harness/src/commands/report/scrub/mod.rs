//! Leaves out of a text what tells who made it: names, addresses, serial numbers, tokens. Equal things get equal pseudonyms, so that
//! pairs and subnets can still be told apart.
//!
//! Promises: no I/O; the same value has the same pseudonym as long as the [`Scrubber`] lives; what is scrubbed already stays as it is.
//! `scrubber` has their order, `words` and `numbers` are the rules, by form; `identity` is what the machine itself says of its identity, which is found in any
//! surroundings. `spread` finds a secret over several lines. `check` looks for the known things once more, by other means than the rules. Where it is not sure what something is
//! (a version of four numbers, a date with dashes like a MAC), it is left out.

mod check;
mod edges;
mod identity;
mod numbers;
mod pseudonyms;
mod scrubber;
mod spread;
#[cfg(test)]
mod tests;
mod words;

pub use identity::{Keep, Known};
pub use scrubber::Scrubber;
