//! Findings about the variables that choose the sockets of a job's start: NCCL's and Gloo's.

use super::cures::{JobFacts, list};
use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::look::Facts;
use host::interfaces::Interface;

kinds! {
    SOCKET_IFNAME = Broken "socket-ifname": "`NCCL_SOCKET_IFNAME` or `GLOO_SOCKET_IFNAME` leaves no interface that other hosts reach", "unset it, or name an interface that is up";
}

pub(super) fn judge(facts: &Facts, job_facts: &JobFacts, found: &mut Vec<Finding>) {
    let usable: Vec<&Interface> = facts
        .interfaces
        .iter()
        .filter(|one| one.is_up && !one.addresses.is_empty())
        .collect();
    if let Some(wanted) = &job_facts.gloo_interfaces {
        gloo(wanted, &usable, found);
    }
    let Some(wanted) = &job_facts.socket_interfaces else {
        return;
    };
    let pair = [("NCCL_SOCKET_IFNAME".to_owned(), wanted.clone())];
    let Ok(config) = host::config::Config::from_variables(&pair) else {
        return;
    };
    if usable.is_empty() {
        return;
    }
    // NCCL takes the first interface that the list admits (`findInterfaces` in NCCL's socket.cc),
    // and the kernel lists the loopback first.
    let admitted = usable
        .iter()
        .filter(|one| config.setup.interfaces.admits(&one.name, None));
    match admitted.min_by_key(|one| one.index) {
        Some(first) if first.is_loopback && wanted.starts_with('^') => {
            let text = format!(
                "NCCL_SOCKET_IFNAME={wanted} does not exclude {}, which NCCL then takes: other hosts cannot reach this one there",
                first.name
            );
            let mark = if wanted.starts_with("^=") { "^=" } else { "^" };
            let rest = wanted.trim_start_matches(['^', '=']);
            let cure = format!("export NCCL_SOCKET_IFNAME={mark}{},{rest}", first.name);
            found.push(SOCKET_IFNAME.finding(text).cured_by(cure));
            return;
        }
        Some(_) => return,
        None => {}
    }
    let names: Vec<&str> = usable.iter().map(|one| one.name.as_str()).collect();
    let text = format!(
        "NCCL_SOCKET_IFNAME={wanted} matches none of the interfaces that are up ({})",
        list(&names)
    );
    found.push(
        SOCKET_IFNAME
            .finding(text)
            .cured_by("unset NCCL_SOCKET_IFNAME"),
    );
}

/// Finds names in `GLOO_SOCKET_IFNAME` that no interface has. PyTorch separates the names at commas
/// and gives each to Gloo, which knows neither prefixes nor exclusions.
fn gloo(wanted: &str, usable: &[&Interface], found: &mut Vec<Finding>) {
    let is_here = |name: &&str| usable.iter().any(|one| one.name == **name);
    let Some(missing) = wanted.split(',').find(|name| !is_here(name)) else {
        return;
    };
    let names = usable.iter().filter(|one| !one.is_loopback);
    let names: Vec<&str> = names.map(|one| one.name.as_str()).collect();
    let Some(first) = names.first() else {
        return;
    };
    let text = format!(
        "GLOO_SOCKET_IFNAME={wanted}: no interface that is up has the name {missing}, so PyTorch's Gloo stops (Unable to find address for: {missing}). \
         Unlike NCCL, Gloo takes whole names alone; here are {}",
        list(&names)
    );
    let cure =
        format!("export GLOO_SOCKET_IFNAME={first}    # or another of them that all hosts reach");
    found.push(SOCKET_IFNAME.finding(text).cured_by(cure));
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::faults::{faults, one, with};

    faults! {
        // aws/aws-ofi-nccl 803: "Bootstrap : Using lo:127.0.0.1"; horovod/horovod 700.
        "NCCL_SOCKET_IFNAME that leaves the loopback": with(one(), |bed| bed.set("NCCL_SOCKET_IFNAME", "^docker0")) =>
            Broken "socket-ifname" ["does not exclude lo"] "export NCCL_SOCKET_IFNAME=^lo,docker0";
        // aws-samples/aws-do-eks 51: NCCL's syntax, given to Gloo.
        "GLOO_SOCKET_IFNAME with an exclusion": with(one(), |bed| bed.set("GLOO_SOCKET_IFNAME", "^lo,docker,veth,eni")) =>
            Broken "socket-ifname" ["the name ^lo", "whole names alone"] "export GLOO_SOCKET_IFNAME=enP7s7";
        // tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark 13.
        "GLOO_SOCKET_IFNAME of another machine": with(one(), |bed| bed.set("GLOO_SOCKET_IFNAME", "enP9s9")) =>
            Broken "socket-ifname" ["the name enP9s9"] "export GLOO_SOCKET_IFNAME=enP7s7";
        "NCCL_SOCKET_IFNAME that no interface has": with(one(), |bed| bed.set("NCCL_SOCKET_IFNAME", "eth0")) =>
            Broken "socket-ifname" ["NCCL_SOCKET_IFNAME=eth0", "enP7s7"] "unset NCCL_SOCKET_IFNAME";
    }
}
