//! What a fuzz target is.

/// Seeds of a target: file name and content.
pub type Seeds = Vec<(&'static str, Vec<u8>)>;

/// A fuzz target.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name: that of its program and of its folder of seeds.
    pub name: &'static str,
    /// Asserts what must hold; whether the input said something valid, so that a seed which goes nowhere can be told.
    pub check: fn(&[u8]) -> bool,
    /// What to begin with.
    pub seeds: fn() -> Seeds,
}
