//! Makes findings from facts, without I/O.

mod counters;
mod cures;
mod functions;
mod libraries;
mod machine;
mod qos;
mod rails;

pub use cures::Cures;

use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::look::{Facts, Libraries};

pub fn machine(facts: &Facts, cures: &Cures) -> Vec<Finding> {
    let mut found = Vec::new();
    machine::judge(facts, cures, &mut found);
    rails::judge(facts, cures, &mut found);
    functions::judge(facts, &mut found);
    qos::judge(facts, &mut found);
    counters::judge(facts, &mut found);
    found
}

pub fn libraries(found: &Libraries, cures: &Cures, has_mlx5: bool) -> Vec<Finding> {
    libraries::judge(found, cures, has_mlx5)
}
