//! Makes findings from facts, without I/O.

pub mod counters;
mod cures;
pub mod functions;
pub mod libraries;
pub mod machine;
pub mod qos;
pub mod rails;
pub mod silence;
pub mod sockets;
pub mod variables;

pub use cures::JobFacts;
pub use rails::{MTU_FOR_GOOD, arp_cure};

use crate::commands::doctor::finding::{Finding, Kind};
use crate::commands::doctor::look::silence::Silence;
use crate::commands::doctor::look::{Facts, Libraries};
use variables::variable::PLUGIN_KEPT_OUT;

/// Findings that another one explains: a cause, and what follows from it.
const EXPLAINS: &[(&Kind, &[&Kind])] = &[
    (rails::HCA_FILTER_EMPTY, &[rails::NO_RAIL]),
    (rails::BOND, &[functions::FUNCTIONS_ABSENT]),
    (
        rails::DUPLICATE_ADDRESS,
        &[rails::SUBNET_CLASH, rails::SHARED_SUBNET],
    ),
    (functions::PCIE_LOG, &[functions::PCIE_UNCORRECTED]),
    (PLUGIN_KEPT_OUT, &[libraries::OTHER_PLUGIN]),
    (libraries::OTHER_PLUGIN, &[variables::PLUGIN_NOT_NAMED]),
];

/// Drops the findings that another one explains. The cause gets the worst of their severities.
pub fn take_in(findings: &mut Vec<Finding>) {
    for (cause, effects) in EXPLAINS {
        let Some(at) = findings.iter().position(|one| one.id == cause.id) else {
            continue;
        };
        let is_effect = |one: &Finding| effects.iter().any(|effect| one.id == effect.id);
        let worst = findings
            .iter()
            .filter(|one| is_effect(one))
            .map(|one| one.severity)
            .min();
        findings[at].severity = worst.map_or(findings[at].severity, |worst| {
            worst.min(findings[at].severity)
        });
        findings.retain(|one| !is_effect(one));
    }
}

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

/// Judges the measured times to report a silent peer.
pub fn silence(measured: &Silence) -> Vec<Finding> {
    let mut found = Vec::new();
    silence::judge(measured, &mut found);
    found
}

/// Judges the libraries of a job. `has_mlx5` is true if a device needs libibverbs' provider for
/// mlx5.
pub fn libraries(found: &Libraries, job_facts: &JobFacts, has_mlx5: bool) -> Vec<Finding> {
    libraries::judge(found, job_facts, has_mlx5)
}
