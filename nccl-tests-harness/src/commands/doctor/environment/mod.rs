//! Judges the effect of a job's variables on this plugin: of each variable alone (`variable`), and
//! of some variables together. `launchers` recognises the launcher that set the variables. `source`
//! reads the variables. Judging reads no file: the caller passes a function that checks whether a
//! file exists.

mod launchers;
mod source;
mod variable;

pub use launchers::recognised;
#[cfg(test)]
pub use source::Source;
pub use source::{Variable, known_variables, of_process, with_files};
pub use variable::{Effect, Judged, MissingReason};

use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::id::Id;
use nccl_net_spark::config::Config;

#[derive(Debug, Clone)]
pub struct Verdicts {
    pub variables: Vec<Judged>,
    pub findings: Vec<Finding>,
}

pub fn judge(variables: &[Variable], plugin: &str, missing_reason: MissingReason<'_>) -> Verdicts {
    let judged: Vec<Judged> = variables
        .iter()
        .map(|one| variable::judge(one, plugin, missing_reason))
        .collect();
    let list = variables
        .iter()
        .find(|one| one.name == "NCCL_NET_PLUGIN")
        .map(|one| one.value.trim());
    let is_kept_out = judged.iter().any(|one| one.effect == Effect::Blocks);
    let mut findings: Vec<Finding> = judged
        .iter()
        .filter_map(|one| one.finding.clone())
        .collect();
    findings.extend(acknowledgement(variables));
    if !is_kept_out && !list.is_some_and(variable::names_this_plugin) {
        let text = "NCCL_NET_PLUGIN is not set, so NCCL loads whatever libnccl-net.so it finds, and this plugin only if it has that name";
        let cure = format!("export NCCL_NET_PLUGIN={plugin} NCCL_NET=Spark");
        findings.push(Id::PluginNotNamed.finding(text).cured_by(cure));
    }
    findings.extend(recognised(variables, plugin));
    Verdicts {
        variables: judged,
        findings,
    }
}

/// Judges the time-out and the retry count, which together decide when a rail counts as lost.
fn acknowledgement(variables: &[Variable]) -> Vec<Finding> {
    let names = ["NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"];
    let set = variables
        .iter()
        .filter(|one| names.contains(&one.name.as_str()));
    let set: Vec<(String, String)> = set
        .map(|one| (one.name.clone(), one.value.clone()))
        .collect();
    // A refused value has its own finding.
    let Ok(config) = Config::from_variables(&set) else {
        return Vec::new();
    };
    let finding = |text| {
        Id::SlowFailover
            .finding(text)
            .cured_by(format!("unset {}", names.join(" ")))
    };
    config.qp.warnings().into_iter().map(finding).collect()
}
