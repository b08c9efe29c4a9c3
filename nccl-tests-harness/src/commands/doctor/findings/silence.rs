//! Findings about the time that the NICs need to report a peer that no longer answers.

use super::cures::{list, singular_or_plural};
use crate::commands::doctor::finding::{Finding, kinds};
use crate::commands::doctor::look::silence::{Outcome, RailSilence, Silence};
use crate::unique::unique;
use host::config::ENOUGH_RETRIES;

kinds! {
    LATE_REPORT = Fragile "late-report": "a NIC needs more than 2 s to report a peer that does not answer (`--silence`)", "[failover.md](failover.md#silent-peers)";
}

/// A NIC that needs longer than this stalls jobs for too long.
const ENOUGH_S: f64 = 2.0;

pub(super) fn judge(silence: &Silence, found: &mut Vec<Finding>) {
    let late: Vec<&RailSilence> = silence.rails.iter().filter(|rail| is_late(rail)).collect();
    if late.is_empty() {
        return;
    }
    let names: Vec<&str> = late.iter().map(|rail| rail.rail.as_str()).collect();
    let times: Vec<String> = late.iter().map(|rail| rail.outcome.to_string()).collect();
    let text = format!(
        "{} {} a silent peer late ({}; by the specification {:.1} s): a cable pulled at the far side of a switch, or a \
         peer that dies, stalls a job for that long",
        list(&names),
        singular_or_plural(&late, "reports", "report"),
        list(&unique(times)),
        silence.specified_s,
    );
    found.push(cured(LATE_REPORT.finding(text), silence));
}

/// Adds a command, if there is one. It is not sure to help, because the NIC's firmware decides. So
/// it says how to find out.
fn cured(finding: Finding, silence: &Silence) -> Finding {
    if silence.specified_s > ENOUGH_S {
        finding.cured_by("unset NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT    # then measure again")
    } else if silence.retry_count > ENOUGH_RETRIES {
        finding.cured_by(format!(
            "NCCL_IB_RETRY_CNT={ENOUGH_RETRIES} nccl-spark doctor --silence    # if that is shorter, export it on every host"
        ))
    } else {
        finding
    }
}

fn is_late(rail: &RailSilence) -> bool {
    match rail.outcome {
        Outcome::ReportedS(seconds) => seconds > ENOUGH_S,
        Outcome::SilentS(seconds) => seconds > ENOUGH_S,
        Outcome::Failed(_) => false,
    }
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::bed::Bed;
    use crate::commands::doctor::tests::faults::{faults, one, with};

    fn late(seconds: [&str; 2]) -> Bed {
        with(one(), |bed| bed.measure_silence(seconds))
    }

    faults! {
        "a NIC whose profile decides when a silent peer is reported": late(["3.125", "0.5"]) =>
            Fragile "late-report" ["rocep1s0f0:1 reports", "(after 3.1 s; by the specification 0.5 s)"] "NCCL_IB_RETRY_CNT=3 nccl-spark doctor --silence";
        "a NIC that reports nothing": late([">60", "3"]) =>
            Fragile "late-report" ["rocep1s0f0:1 and roceP2p1s0f0:1 report", "not within 60.0 s and after 3.0 s"] "NCCL_IB_RETRY_CNT=3";
        "settings with which a silent peer is reported late": with(late(["59.8", "59.8"]), |bed| bed.set("NCCL_IB_TIMEOUT", "20")) =>
            Fragile "late-report" ["(after 59.8 s; by the specification 30.1 s)"] "unset NCCL_IB_TIMEOUT";
        "a late report with few retries": with(late(["3.125", "3.125"]), |bed| bed.set("NCCL_IB_RETRY_CNT", "3")) =>
            Fragile "late-report" ["after 3.1 s"] "";
    }
}
