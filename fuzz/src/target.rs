//! The type of a fuzz target.

/// Seeds of a target: file name and content.
pub type Seeds = Vec<(&'static str, Vec<u8>)>;

/// A fuzz target.
#[derive(Clone, Copy)]
pub struct Target {
    /// Name of the program, and of its folder of seeds.
    pub name: &'static str,
    /// Asserts the invariants. Returns true for a valid input, so that a test finds useless seeds.
    pub check: fn(&[u8]) -> bool,
    /// Inputs to begin with. They are valid, except those whose name begins with `refused`.
    pub seeds: fn() -> Seeds,
}
