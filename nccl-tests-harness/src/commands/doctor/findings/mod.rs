//! Makes findings from facts, without I/O.

pub(super) mod counters;
mod cures;
pub(super) mod functions;
pub(super) mod libraries;
pub(super) mod machine;
pub(super) mod qos;
pub(super) mod rails;
pub(super) mod sockets;

pub use cures::JobFacts;
pub use rails::{MTU_FOR_GOOD, arp_cure};

use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::look::{Facts, Libraries};

pub fn machine(facts: &Facts, job_facts: &JobFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    machine::judge(facts, job_facts, &mut found);
    rails::judge(facts, &mut found);
    sockets::judge(facts, job_facts, &mut found);
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
