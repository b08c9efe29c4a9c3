//! Judges the effect of a job's variables on this plugin: of each variable alone (`variable`), and
//! of some variables together. `launchers` recognises the launcher that set the variables. Judging
//! reads no file: the caller passes a function that checks whether a file exists.

pub mod launchers;
pub mod variable;

pub use launchers::recognised;
pub use variable::{Effect, Judged, MissingReason};

use crate::commands::doctor::finding::{Finding, kinds};
use crate::commands::doctor::look::variables::{Source, Variable};
use host::config::Config;
use variable::{NETWORK_NOT_SPARK, PLUGIN_KEPT_OUT};

kinds! {
    PLUGIN_NOT_NAMED = Note "plugin-not-named": "no variable names the plugin", "as for `other-plugin`";
    SLOW_FAILOVER = Fragile "slow-failover": "the plugin notices a dead rail late, or gives a rail up after few lost packets", "unset `NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`";
}

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
        findings.push(PLUGIN_NOT_NAMED.finding(text).cured_by(cure));
    }
    if let Some(launcher) = recognised(variables, plugin) {
        // What the launcher sets, an export in a shell does not change.
        for finding in &mut findings {
            if [PLUGIN_KEPT_OUT, NETWORK_NOT_SPARK]
                .iter()
                .any(|kind| finding.id == kind.id)
            {
                finding.cure.clone_from(&launcher.cure);
            }
        }
        findings.push(launcher);
    }
    Verdicts {
        variables: judged,
        findings,
    }
}

/// Returns a cure that also removes variables which one of NCCL's files sets: there, `unset NAME`
/// alone has no effect.
pub fn at_its_source(cure: &str, variables: &[Variable]) -> String {
    let (commands, remark) = cure
        .split_once('#')
        .map_or((cure, None), |(all, rest)| (all, Some(rest)));
    let Some(names) = commands.strip_prefix("unset ") else {
        return cure.to_owned();
    };
    let mut set = Vec::new();
    let mut removed = Vec::new();
    for name in names.split_whitespace() {
        match variables
            .iter()
            .find(|one| one.name == name)
            .map(|one| &one.source)
        {
            Some(Source::File(file)) => removed.push(format!("sudo sed -i '/^{name}=/d' {file}")),
            Some(Source::Environment) | None => set.push(name),
        }
    }
    if removed.is_empty() {
        return cure.to_owned();
    }
    if !set.is_empty() {
        removed.insert(0, format!("unset {}", set.join(" ")));
    }
    let remark = remark.map(|remark| format!("    #{remark}"));
    removed.join(" && ") + &remark.unwrap_or_default()
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
        SLOW_FAILOVER
            .finding(text)
            .cured_by(format!("unset {}", names.join(" ")))
    };
    config.qp.warnings().into_iter().map(finding).collect()
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::faults::{faults, one, with};

    faults! {
        "a variable of /etc/nccl.conf": with(one(), |bed| {
            bed.write("etc/nccl.conf", "NCCL_IB_TIMEOUT=22\n");
        }) => Fragile "slow-failover" ["NCCL_IB_TIMEOUT=22"] "unset";
    }
}
