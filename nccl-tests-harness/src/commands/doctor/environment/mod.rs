//! What the variables of a job do to this plugin: each one by itself, all of them together, and which launcher sets such ones. Pure:
//! variables in, verdicts and findings out; whether a file is there is asked of the caller.

mod launchers;
mod source;
mod variable;

pub use launchers::recognised;
#[cfg(test)]
pub use source::Source;
pub use source::{Variable, of_process, passing, with_files};
pub use variable::{Effect, Judged, Lack};

use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use nccl_net_spark::config::Config;

/// What some variables amount to.
#[derive(Debug, Clone, Default)]
pub struct Verdicts {
    /// Each variable.
    pub variables: Vec<Judged>,
    /// What is wrong with them.
    pub findings: Vec<Finding>,
    /// Whether NCCL takes this plugin with them.
    pub lets_in: LetsIn,
}

/// Whether NCCL takes this plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LetsIn {
    /// The variables name it.
    Named,
    /// Nothing keeps it out; NCCL looks for `libnccl-net.so`, which this plugin need not be.
    #[default]
    NotNamed,
    /// They keep it out.
    KeptOut,
}

/// Judges the variables of a job. `plugin` is the plugin's file, for cures; `lack` says where there is no file to load.
pub fn judge(variables: &[Variable], plugin: &str, lack: Lack<'_>) -> Verdicts {
    let judged: Vec<variable::Verdict> = variables.iter().map(|one| variable::judge(one, plugin, lack)).collect();
    let mut verdicts = Verdicts::default();
    let value = |name: &str| variables.iter().find(|one| one.name == name).map(|one| one.value.trim());
    verdicts.lets_in = match value("NCCL_NET_PLUGIN") {
        _ if judged.iter().any(|verdict| verdict.judged.effect == Effect::Blocks) => LetsIn::KeptOut,
        Some(list) if variable::names_this_plugin(list) => LetsIn::Named,
        _ => LetsIn::NotNamed,
    };
    for verdict in judged {
        verdicts.variables.push(verdict.judged);
        verdicts.findings.extend(verdict.finding);
    }
    verdicts.findings.extend(acknowledgement(variables));
    if verdicts.lets_in == LetsIn::NotNamed {
        verdicts.findings.push(
            Finding::new(
                Severity::Note,
                Id::PluginNotNamed,
                "NCCL_NET_PLUGIN is not set, so NCCL loads whatever libnccl-net.so it finds, and this plugin only if it has that name",
            )
            .cured_by(format!("export NCCL_NET_PLUGIN={plugin} NCCL_NET=Spark")),
        );
    }
    verdicts.findings.extend(recognised(variables, plugin));
    verdicts
}

/// What time-out and retries make of a lost rail, together.
fn acknowledgement(variables: &[Variable]) -> Vec<Finding> {
    let names = ["NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"];
    let set = variables.iter().filter(|one| names.contains(&one.name.as_str()));
    let set: Vec<(String, String)> = set.map(|one| (one.name.clone(), one.value.clone())).collect();
    // Values that are not usable have findings of their own.
    let Ok(config) = Config::from_variables(&set) else { return Vec::new() };
    let warnings = config.acknowledgement_warnings().into_iter();
    let finding =
        |text| Finding::new(Severity::Fragile, Id::SlowFailover, text).cured_by(format!("unset {}", names.join(" ")));
    warnings.map(finding).collect()
}
