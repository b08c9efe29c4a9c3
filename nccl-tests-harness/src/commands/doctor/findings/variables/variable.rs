//! The effect of a single variable.

use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::finding::{Kind, kinds};
use crate::commands::doctor::look::variables::{Source, Variable};
use Effect::{Blocks, Harms, Honoured, Ignored, Misleads, Nccl, Other, Refused, Unset};
use host::config::Config;
use host::config::fate::{Fate, fate};
use serde::Serialize;

kinds! {
    NETWORK_NOT_SPARK = Broken "network-not-spark": "`NCCL_NET` names another network", "`NCCL_NET=Spark`";
    PLUGIN_KEPT_OUT = Broken "plugin-kept-out": "`NCCL_NET_PLUGIN` keeps NCCL from loading the plugin", "as for `other-plugin`; [launchers.md](launchers.md)";
    PLUGIN_NOT_FIRST = Fragile "plugin-not-first": "`NCCL_NET_PLUGIN` names another plugin first", "put this plugin first, or name only this plugin";
    SETTING_REFUSED = Broken "setting-refused": "a setting has a value with which the plugin does not start", "[settings.md](settings.md#the-table)";
    IB_DISABLE = Fragile "ib-disable": "`NCCL_IB_DISABLE=1`, and RDMA is used all the same", "`NCCL_NET=Socket` if sockets are wanted";
    GID_INDEX_PINNED = Fragile "gid-index-pinned": "`NCCL_IB_GID_INDEX` is fixed", "unset it: the index is looked up at each connect";
    ROCE_VERSION = Fragile "roce-version": "`NCCL_IB_ROCE_VERSION_NUM` asks for another RoCE than v2", "unset it";
    OTHER_TUNER = Note "other-tuner": "another tuner takes the place of the plugin's", "unset `NCCL_TUNER_PLUGIN`";
    FEW_CHANNELS = Note "few-channels": "`NCCL_MAX_NCHANNELS` leaves the tuner too few channels", "unset it";
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Judged {
    pub name: String,
    pub value: String,
    pub source: Source,
    pub effect: Effect,
    /// The effect in words: a sentence, or the end of one.
    pub text: String,
    #[serde(skip)]
    pub finding: Option<Finding>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    Honoured,
    /// The plugin does not read the variable.
    Ignored,
    /// The value is empty, which counts as unset.
    Unset,
    /// The variable makes NCCL skip the plugin.
    Blocks,
    /// The variable has another effect than its users expect.
    Misleads,
    /// The variable makes the plugin slower or more fragile.
    Harms,
    /// The plugin refuses the value and does not start.
    Refused,
    /// NCCL itself reads the variable, as it does without the plugin.
    Nccl,
    /// Another program reads the variable.
    Other,
}

impl Effect {
    pub fn word(self) -> &'static str {
        match self {
            Honoured => "honoured",
            Ignored => "ignored",
            Unset => "unset",
            Blocks => "BLOCKS",
            Misleads => "MISLEADS",
            Harms => "HARMS",
            Refused => "REFUSED",
            Nccl => "NCCL's",
            Other => "other",
        }
    }
}

/// Checks an absolute path. Returns the reason why no file can be loaded from it, as in "file not
/// found:". The doctor's texts have the path after the reason. Returns `None` if the path has a
/// file or cannot be examined.
pub type MissingReason<'a> = &'a dyn Fn(&str) -> Option<&'static str>;

/// Returns true if this value of `NCCL_NET_PLUGIN` lists this plugin.
pub(super) fn names_this_plugin(list: &str) -> bool {
    list.split(',').any(is_this_plugin)
}

/// Returns true if an entry of `NCCL_NET_PLUGIN` is this plugin: its file name contains `spark`.
/// The tuner tests `NCCL_TUNER_PLUGIN` in a similar way.
fn is_this_plugin(entry: &str) -> bool {
    entry
        .rsplit('/')
        .next()
        .is_some_and(|name| name.to_ascii_lowercase().contains("spark"))
}

pub(super) fn judge(
    variable: &Variable,
    plugin: &str,
    missing_reason: MissingReason<'_>,
) -> Judged {
    let name = variable.name.as_str();
    let value = variable.value.trim();
    let (effect, text, fault) = match name {
        "NCCL_NET" => network(value),
        "NCCL_NET_PLUGIN" => plugins(value, plugin, missing_reason),
        _ if value.is_empty() => harmless(
            Unset,
            "empty, which counts as unset for NCCL and for the plugin",
        ),
        _ => refused(variable)
            .or_else(|| particular(name, value))
            .unwrap_or_else(|| general(name)),
    };
    let finding = fault.map(|(id, cure)| match &variable.source {
        Source::Environment => id.finding(format!("{name}={value}: {text}")).cured_by(cure),
        Source::File(file) => {
            let cure = format!("sudo sed -i '/^{name}=/d' {file}");
            id.finding(format!("{name}={value} (in {file}): {text}"))
                .cured_by(cure)
        }
    });
    Judged {
        name: name.to_owned(),
        value: value.to_owned(),
        source: variable.source.clone(),
        effect,
        text,
        finding,
    }
}

/// The effect, the effect in words, and for a fault the id and the cure of its finding.
type Rule = (Effect, String, Option<(&'static Kind, String)>);

fn harmless(effect: Effect, text: impl Into<String>) -> Rule {
    (effect, text.into(), None)
}

fn wrong(
    effect: Effect,
    id: &'static Kind,
    text: impl Into<String>,
    cure: impl Into<String>,
) -> Rule {
    (effect, text.into(), Some((id, cure.into())))
}

fn network(value: &str) -> Rule {
    if value.eq_ignore_ascii_case("Spark") {
        return harmless(
            Nccl,
            "NCCL uses this plugin, and fails where it does not start",
        );
    }
    let text = match value {
        "" => "empty is a name to NCCL, and no network has it: NCCL fails".to_owned(),
        _ => format!("NCCL uses its network {value} and rejects this plugin with one INFO line"),
    };
    wrong(Blocks, NETWORK_NOT_SPARK, text, "export NCCL_NET=Spark")
}

/// Cure if a file that `NCCL_NET_PLUGIN` names is missing, and the path that the cure would name
/// has no file either.
const INSTALL: &str = "sudo apt install ./nccl-net-spark_*.deb    # and NCCL_NET_PLUGIN=spark";

fn plugins(value: &str, plugin: &str, missing_reason: MissingReason<'_>) -> Rule {
    let missing = |entry: &&str| {
        missing_reason(entry).filter(|_| entry.starts_with('/') && is_this_plugin(entry))
    };
    // If a file is missing, NCCL tries the next entry of the list.
    let mut there = value.split(',').filter(|entry| missing(entry).is_none());
    let lacks = value
        .split(',')
        .find_map(|entry| missing(&entry).map(|why| format!("{why} {entry}")));
    let is_cured = lacks.is_none() || missing_reason(plugin).is_none();
    let cure = if is_cured {
        format!("export NCCL_NET_PLUGIN={plugin}")
    } else {
        INSTALL.to_owned()
    };
    let text = match (there.position(is_this_plugin), lacks) {
        (Some(0), _) => return harmless(Nccl, "NCCL loads this plugin"),
        (Some(_), _) => {
            let text = "NCCL takes the first plugin of the list that starts, and this one is not the first";
            return wrong(Harms, PLUGIN_NOT_FIRST, text, cure);
        }
        (None, Some(lacks)) => format!("{lacks}, so NCCL does not load this plugin"),
        (None, None) if value.is_empty() => {
            "empty, unlike unset, makes NCCL load no plugin".to_owned()
        }
        (None, None) if value.eq_ignore_ascii_case("none") => "NCCL loads no plugin".to_owned(),
        (None, None) => format!("NCCL loads {value} and not this plugin"),
    };
    wrong(Blocks, PLUGIN_KEPT_OUT, text, cure)
}

fn refused(variable: &Variable) -> Option<Rule> {
    let name = &variable.name;
    if !name.starts_with("NCCL_SPARK_") && !matches!(fate(name), Some(Fate::Honoured(_))) {
        return None;
    }
    let error = Config::from_variables(&[(name.clone(), variable.value.clone())]).err()?;
    let text = format!("the plugin does not start: {error}");
    Some(wrong(
        Refused,
        SETTING_REFUSED,
        text,
        format!("unset {name}"),
    ))
}

fn particular(name: &str, value: &str) -> Option<Rule> {
    let harms = |id, text: &str| Some(wrong(Harms, id, text, format!("unset {name}")));
    let is_one = value.parse::<i64>().is_ok_and(|number| number != 0);
    match name {
        "NCCL_IB_DISABLE" if is_one => {
            let text = "RDMA is still used: it turns off NCCL's own IB transport, not plugins";
            let cure =
                "export NCCL_NET=Socket    # if sockets are wanted; else unset NCCL_IB_DISABLE";
            Some(wrong(Misleads, IB_DISABLE, text, cure))
        }
        "NCCL_IB_GID_INDEX" if value != "-1" => harms(
            GID_INDEX_PINNED,
            "every port has to have its RoCE v2 address at this index, which differs from function to function and moves when addresses \
             change; unset, the plugin looks it up at each connect",
        ),
        "NCCL_IB_ROCE_VERSION_NUM" if value != "2" => {
            let text = "the plugin uses RoCE v2 alone, whatever this says";
            Some(wrong(Misleads, ROCE_VERSION, text, format!("unset {name}")))
        }
        "NCCL_IB_TIMEOUT" | "NCCL_IB_RETRY_CNT" => {
            // `acknowledgement` makes the finding for both variables together.
            let alone = Config::from_variables(&[(name.to_owned(), value.to_owned())])
                .ok()?
                .qp;
            let effect = if alone.warnings().is_empty() {
                Honoured
            } else {
                Harms
            };
            let text = format!(
                "a rail that falls silent counts as lost after {:.1?} or more",
                alone.silence_limit()
            );
            Some(harmless(effect, text))
        }
        "NCCL_ALGO" | "NCCL_PROTO" => {
            let text =
                "NCCL keeps to it; the tuner leaves the collectives that it restricts to NCCL";
            Some(harmless(Nccl, text))
        }
        "NCCL_TUNER_PLUGIN" if !value.to_ascii_lowercase().contains("spark") => harms(
            OTHER_TUNER,
            "NCCL takes this tuner, and this plugin's does nothing",
        ),
        "NCCL_MAX_NCHANNELS"
            if value
                .parse::<u32>()
                .is_ok_and(|channels| channels < ENOUGH_CHANNELS) =>
        {
            harms(
                FEW_CHANNELS,
                "the tuner cannot take more channels than this, and large messages want more",
            )
        }
        _ => None,
    }
}

/// A `NCCL_MAX_NCHANNELS` below this number gets a finding. A Spark has up to four rails, and each
/// channel has its own connection to a peer. With fewer channels, there are fewer connections to a
/// peer than rails.
const ENOUGH_CHANNELS: u32 = 4;

fn general(name: &str) -> Rule {
    match (
        fate(name),
        name.split_once('_').map_or(name, |(program, _)| program),
    ) {
        (Some(Fate::Honoured(row)), _) => harmless(Honoured, row.doc),
        (Some(Fate::Ignored(why)), _) => harmless(Ignored, why),
        (None, "NCCL") => harmless(Nccl, "NCCL acts on it as without the plugin"),
        (None, "UCX") => harmless(Other, "UCX's (MPI); neither NCCL nor the plugin reads it"),
        (None, "GLOO") => harmless(
            Other,
            "Gloo's (PyTorch's CPU collectives); NCCL does not read it",
        ),
        (None, _) => harmless(Other, "TensorPipe's (PyTorch's RPC); NCCL does not read it"),
    }
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::faults::{faults, one, with};

    faults! {
        "NCCL_NET_PLUGIN names a file that is not there": with(one(), |bed| bed.remove("usr/local/lib/libnccl-net-spark.so")) =>
            Broken "plugin-kept-out" ["file not found: /usr/local/lib/libnccl-net-spark.so"] "apt install";
    }
}
