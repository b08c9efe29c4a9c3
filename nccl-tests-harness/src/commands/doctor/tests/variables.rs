//! Tests the doctor's verdict for the variables that each known launcher (a program or script that
//! starts jobs) sets, and the effect of single variables.

use crate::commands::doctor::finding::{Finding, Severity, Verdict};
use crate::commands::doctor::findings::variables::{self, Effect, Verdicts};
use crate::commands::doctor::look::variables::{Source, Variable};

const PLUGIN: &str = "/usr/local/lib/libnccl-net-spark.so";

pub(super) fn variables(text: &str) -> Vec<Variable> {
    let pairs = text
        .split_whitespace()
        .map(|pair| pair.split_once('=').unwrap());
    pairs
        .map(|(name, value)| Variable {
            name: name.into(),
            value: value.into(),
            source: Source::Environment,
        })
        .collect()
}

fn judge(text: &str) -> Verdicts {
    variables::judge(&variables(text), PLUGIN, &|_| None)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LetsIn {
    Named,
    /// No variable keeps the plugin out, and none names it.
    NotNamed,
    KeptOut,
}

fn lets_in(verdicts: &Verdicts) -> LetsIn {
    match () {
        () if verdicts
            .variables
            .iter()
            .any(|one| one.effect == Effect::Blocks) =>
        {
            LetsIn::KeptOut
        }
        () if verdicts
            .findings
            .iter()
            .any(|one| one.id == "plugin-not-named") =>
        {
            LetsIn::NotNamed
        }
        () => LetsIn::Named,
    }
}

fn ids(verdicts: &Verdicts) -> Vec<&str> {
    let worse = verdicts
        .findings
        .iter()
        .filter(|finding| finding.severity != Severity::Note);
    worse.map(|finding| &*finding.id).collect()
}

fn effect(verdicts: &Verdicts, name: &str) -> Effect {
    verdicts
        .variables
        .iter()
        .find(|one| one.name == name)
        .unwrap_or_else(|| panic!("no {name}"))
        .effect
}

/// For each launcher: name, variables (from its sources and its users' posts), the effect on the
/// plugin's loading, the ids of the findings, and the verdict.
const LAUNCHERS: &[(&str, &str, LetsIn, &[&str], Verdict)] = &[
    (
        "spark-vllm-docker, two functions up",
        "NCCL_IGNORE_CPU_AFFINITY=1 NCCL_IB_DISABLE=0 NCCL_SOCKET_IFNAME=enp1s0f1np1 NCCL_IB_HCA=rocep1s0f1,roceP2p1s0f1 \
         UCX_NET_DEVICES=enp1s0f1np1 GLOO_SOCKET_IFNAME=enp1s0f1np1 TP_SOCKET_IFNAME=enp1s0f1np1",
        LetsIn::NotNamed,
        &[],
        Verdict::Good,
    ),
    (
        "spark-vllm-docker, four functions up",
        "NCCL_IGNORE_CPU_AFFINITY=1 NCCL_IB_DISABLE=0 NCCL_SOCKET_IFNAME=enP7s7 \
         NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0,rocep1s0f1,roceP2p1s0f1 UCX_NET_DEVICES=enP7s7 GLOO_SOCKET_IFNAME=enP7s7 \
         TP_SOCKET_IFNAME=enP7s7 NCCL_NET_PLUGIN=none NCCL_IB_SUBNET_AWARE_ROUTING=1 NCCL_IB_MERGE_NICS=0",
        LetsIn::KeptOut,
        &["plugin-kept-out"],
        Verdict::Broken,
    ),
    (
        "spark-vllm-docker, ring of four",
        "NCCL_IGNORE_CPU_AFFINITY=1 NCCL_IB_DISABLE=0 NCCL_SOCKET_IFNAME=enP7s7 NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0 \
         UCX_NET_DEVICES=enP7s7 NCCL_NET_PLUGIN=none NCCL_IB_SUBNET_AWARE_ROUTING=1 NCCL_IB_MERGE_NICS=0 NCCL_ALGO=Ring",
        LetsIn::KeptOut,
        &["plugin-kept-out"],
        Verdict::Broken,
    ),
    (
        "sparkrun",
        "NCCL_IGNORE_CPU_AFFINITY=1 NCCL_NET=IB NCCL_IB_DISABLE=0 NCCL_CROSS_NIC=1 NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0 NCCL_IB_GID_INDEX=3",
        LetsIn::KeptOut,
        &["network-not-spark", "gid-index-pinned"],
        Verdict::Broken,
    ),
    (
        "sparkrun, ring",
        "NCCL_NET=IB NCCL_CROSS_NIC=1 NCCL_IB_HCA=rocep1s0f0 NCCL_NET_PLUGIN=none NCCL_IB_SUBNET_AWARE_ROUTING=1 NCCL_IB_MERGE_NICS=0",
        LetsIn::KeptOut,
        &["network-not-spark", "plugin-kept-out"],
        Verdict::Broken,
    ),
    (
        "sparkrun's Atlas runtime",
        "NCCL_IB_GID_INDEX= NCCL_CROSS_NIC= NCCL_DEBUG=INFO NCCL_IB_DISABLE=0 NCCL_IB_ROCE_VERSION_NUM=2 NCCL_IB_ADDR_FAMILY=AF_INET \
         NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7 NCCL_NET_GDR_LEVEL=0 NCCL_PROTO=Simple NCCL_ALGO=Ring NCCL_BUFFSIZE=33554432 \
         NCCL_MIN_NCHANNELS=1 NCCL_MAX_NCHANNELS=2",
        LetsIn::NotNamed,
        &["slow-failover"],
        Verdict::Impaired,
    ),
    (
        "a MiaAI-Lab recipe",
        "NCCL_NET=IB NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_CROSS_NIC=1 NCCL_IB_ROCE_VERSION_NUM=2 NCCL_IB_GID_INDEX=5 \
         NCCL_IB_HCA=rocep1s0f0,roceP2p1s0f0",
        LetsIn::KeptOut,
        &["network-not-spark", "gid-index-pinned"],
        Verdict::Broken,
    ),
    (
        "sparkring",
        "NCCL_NET=IB NCCL_IB_MERGE_NICS=0 NCCL_SKIP_TREE_CONNECT=1",
        LetsIn::KeptOut,
        &["network-not-spark"],
        Verdict::Broken,
    ),
    (
        "NVIDIA's script for a ring",
        "NCCL_IB_MERGE_NICS=0 NCCL_NET_PLUGIN=none",
        LetsIn::KeptOut,
        &["plugin-kept-out"],
        Verdict::Broken,
    ),
    (
        "an image's leftover /etc/nccl.conf",
        "NCCL_IB_USE_INLINE=1 NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS=1",
        LetsIn::NotNamed,
        &[],
        Verdict::Good,
    ),
];

#[test]
fn every_launcher_is_recognised_and_judged() {
    for (name, text, wanted, found, verdict) in LAUNCHERS {
        let verdicts = judge(text);
        assert_eq!(lets_in(&verdicts), *wanted, "{name}");
        assert_eq!(ids(&verdicts), *found, "{name}: {:#?}", verdicts.findings);
        assert_eq!(Verdict::of(&verdicts.findings), *verdict, "{name}");
        let launcher = verdicts
            .findings
            .iter()
            .find(|finding| finding.id == "launcher");
        let launcher = launcher.unwrap_or_else(|| panic!("{name} is not recognised"));
        assert!(
            launcher
                .text
                .starts_with(&format!("these variables are as {name} sets them: ")),
            "{name}: {}",
            launcher.text
        );
        let change = launcher.cure.as_ref().unwrap();
        assert!(
            !change.contains('{') && (change.contains(PLUGIN) || change.contains("nccl.conf")),
            "{name}: {change}"
        );
        assert_eq!(
            verdicts.variables.len(),
            text.split_whitespace().count(),
            "{name}: one line for each variable"
        );
    }
}

#[test]
fn with_the_proposed_variables_every_launcher_lets_the_plugin_in() {
    for (name, text, ..) in LAUNCHERS {
        let keep = |pair: &&str| {
            let name = pair.split('=').next().unwrap();
            ![
                "NCCL_NET",
                "NCCL_NET_PLUGIN",
                "NCCL_IB_GID_INDEX",
                "NCCL_IB_TIMEOUT",
                "NCCL_IB_RETRY_CNT",
            ]
            .contains(&name)
        };
        let kept: Vec<&str> = text.split_whitespace().filter(keep).collect();
        let verdicts = judge(&format!(
            "{} NCCL_NET=Spark NCCL_NET_PLUGIN={PLUGIN}",
            kept.join(" ")
        ));
        assert_eq!(lets_in(&verdicts), LetsIn::Named, "{name}");
        assert_eq!(ids(&verdicts), [""; 0], "{name}");
    }
}

/// A variable, its effect, and the ids of the findings.
const EFFECTS: &[(&str, Effect, &[&str])] = &[
    ("NCCL_NET=Spark", Effect::Nccl, &[]),
    ("NCCL_NET=spark", Effect::Nccl, &[]),
    ("NCCL_NET=Socket", Effect::Blocks, &["network-not-spark"]),
    ("NCCL_NET=", Effect::Blocks, &["network-not-spark"]),
    ("NCCL_NET_PLUGIN=spark", Effect::Nccl, &[]),
    (
        "NCCL_NET_PLUGIN=/opt/lib/libnccl_net_spark.so",
        Effect::Nccl,
        &[],
    ),
    (
        "NCCL_NET_PLUGIN=/opt/hpcx/libnccl-net.so,spark",
        Effect::Harms,
        &["plugin-not-first"],
    ),
    (
        "NCCL_NET_PLUGIN=/home/spark/libnccl-net.so",
        Effect::Blocks,
        &["plugin-kept-out"],
    ),
    ("NCCL_NET_PLUGIN=", Effect::Blocks, &["plugin-kept-out"]),
    ("NCCL_NET_PLUGIN=NONE", Effect::Blocks, &["plugin-kept-out"]),
    ("NCCL_IB_DISABLE=1", Effect::Misleads, &["ib-disable"]),
    ("NCCL_IB_DISABLE=0", Effect::Ignored, &[]),
    ("NCCL_IB_GID_INDEX=-1", Effect::Honoured, &[]),
    ("NCCL_IB_GID_INDEX=3", Effect::Harms, &["gid-index-pinned"]),
    ("NCCL_IB_GID_INDEX=", Effect::Unset, &[]),
    ("NCCL_IB_TIMEOUT=22", Effect::Harms, &["slow-failover"]),
    ("NCCL_IB_TIMEOUT=14", Effect::Honoured, &[]),
    ("NCCL_IB_RETRY_CNT=1", Effect::Harms, &["slow-failover"]),
    ("NCCL_IB_TIMEOUT=32", Effect::Refused, &["setting-refused"]),
    ("NCCL_IB_TC=-1", Effect::Honoured, &[]),
    ("NCCL_IB_TC=-2", Effect::Refused, &["setting-refused"]),
    (
        "NCCL_SPARK_TUNNER=on",
        Effect::Refused,
        &["setting-refused"],
    ),
    ("NCCL_SPARK_TUNER=on", Effect::Honoured, &[]),
    (
        "NCCL_IB_ROCE_VERSION_NUM=1",
        Effect::Misleads,
        &["roce-version"],
    ),
    ("NCCL_IB_ROCE_VERSION_NUM=2", Effect::Ignored, &[]),
    ("NCCL_IB_MERGE_NICS=0", Effect::Ignored, &[]),
    ("NCCL_IB_QPS_PER_CONNECTION=4", Effect::Honoured, &[]),
    ("NCCL_PROTO=Simple", Effect::Nccl, &[]),
    ("NCCL_BUFFSIZE=4194304", Effect::Nccl, &[]),
    ("UCX_TLS=rc", Effect::Other, &[]),
    ("GLOO_SOCKET_IFNAME=lo", Effect::Other, &[]),
    ("TP_SOCKET_IFNAME=lo", Effect::Other, &[]),
];

#[test]
fn single_variables_have_their_documented_effect() {
    for (text, wanted, found) in EFFECTS {
        let verdicts = judge(text);
        let name = text.split('=').next().unwrap();
        assert_eq!(effect(&verdicts, name), *wanted, "{text}");
        assert_eq!(ids(&verdicts), *found, "{text}: {:#?}", verdicts.findings);
        assert!(
            verdicts
                .findings
                .iter()
                .all(|finding| finding.cure.is_some()),
            "{text}: {:#?}",
            verdicts.findings
        );
    }
}

#[test]
fn variables_that_restrict_the_tuner_are_noted() {
    for (text, note) in [
        ("NCCL_TUNER_PLUGIN=libnccl-tuner.so", "other-tuner"),
        ("NCCL_MAX_NCHANNELS=2", "few-channels"),
    ] {
        let verdicts = judge(text);
        assert_eq!(verdicts.variables[0].effect, Effect::Harms, "{text}");
        let is_it = |one: &Finding| {
            (one.severity, &*one.id) == (Severity::Note, note) && one.cure.is_some()
        };
        assert!(
            verdicts.findings.iter().any(is_it),
            "{text}: {:#?}",
            verdicts.findings
        );
    }
}

#[test]
fn without_nccl_net_plugin_nccl_finds_no_network_named_spark() {
    let is_noted = |text: &str| {
        judge(text)
            .findings
            .iter()
            .any(|one| one.id == "plugin-not-named")
    };
    assert!(
        is_noted("NCCL_NET=Spark")
            && is_noted("")
            && !is_noted("NCCL_NET=Spark NCCL_NET_PLUGIN=spark")
    );
    let late = judge("NCCL_IB_TIMEOUT=22");
    assert!(
        late.variables[0].text.contains("120.3s"),
        "{:?}",
        late.variables[0]
    );
}

/// `NCCL_NET_PLUGIN` can list several plugins. If the file of one is missing, NCCL takes the next.
#[test]
fn a_missing_plugin_is_not_loaded() {
    let missing_reason = |path: &str| path.starts_with("/none/").then_some("file not found:");
    let blocked = ("plugin-kept-out", Effect::Blocks);
    for (value, wanted) in [
        ("/none/libnccl-net-spark.so", Some(blocked)),
        (
            "/none/libnccl-net-spark.so,/opt/libnccl-net.so",
            Some(blocked),
        ),
        ("/none/libnccl-net-spark.so,/opt/libnccl-net-spark.so", None),
        (
            "/none/libnccl-net-spark.so,x,spark",
            Some(("plugin-not-first", Effect::Harms)),
        ),
        ("/opt/libnccl-net-spark.so,/none/libnccl-net-spark.so", None),
        ("none/libnccl-net-spark.so", None),
    ] {
        let verdicts = variables::judge(
            &variables(&format!("NCCL_NET_PLUGIN={value}")),
            PLUGIN,
            &missing_reason,
        );
        let found = verdicts
            .findings
            .first()
            .map(|finding| (&*finding.id, verdicts.variables[0].effect));
        assert_eq!(found, wanted, "{value}");
    }
    let verdicts = variables::judge(
        &variables("NCCL_NET_PLUGIN=/none/spark.so"),
        PLUGIN,
        &missing_reason,
    );
    assert_eq!(lets_in(&verdicts), LetsIn::KeptOut);
    assert_eq!(
        verdicts.variables[0].text,
        "file not found: /none/spark.so, so NCCL does not load this plugin"
    );
    assert_eq!(
        verdicts.findings[0].cure.as_deref(),
        Some(&*format!("export NCCL_NET_PLUGIN={PLUGIN}"))
    );
    let verdicts = variables::judge(
        &variables("NCCL_NET_PLUGIN=/none/spark.so"),
        "/none/spark.so",
        &missing_reason,
    );
    assert!(
        verdicts.findings[0]
            .cure
            .as_ref()
            .unwrap()
            .starts_with("sudo apt install ")
    );
}

#[test]
fn the_cure_for_a_variable_of_nccls_file_names_that_file() {
    let source = Source::File("/etc/nccl.conf".into());
    let variable = Variable {
        name: "NCCL_NET".into(),
        value: "IB".into(),
        source,
    };
    let verdicts = variables::judge(&[variable], PLUGIN, &|_| None);
    let finding = &verdicts.findings[0];
    assert!(
        finding
            .text
            .starts_with("NCCL_NET=IB (in /etc/nccl.conf): "),
        "{}",
        finding.text
    );
    assert_eq!(
        finding.cure.as_deref(),
        Some("sudo sed -i '/^NCCL_NET=/d' /etc/nccl.conf")
    );
}
