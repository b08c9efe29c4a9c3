//! Makes findings from facts, without I/O.

mod counters;
mod cures;
mod functions;
mod libraries;
mod machine;
mod qos;
mod rails;

pub use cures::JobFacts;

use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::look::{Facts, Libraries};

pub fn machine(facts: &Facts, job_facts: &JobFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    machine::judge(facts, job_facts, &mut found);
    rails::judge(facts, job_facts, &mut found);
    functions::judge(facts, &mut found);
    qos::judge(facts, &mut found);
    counters::judge(facts, &mut found);
    found
}

/// Judges the libraries of a job. `has_mlx5` is true if a device needs libibverbs' provider for
/// mlx5.
pub fn libraries(found: &Libraries, job_facts: &JobFacts, has_mlx5: bool) -> Vec<Finding> {
    libraries::judge(found, job_facts, has_mlx5)
}
