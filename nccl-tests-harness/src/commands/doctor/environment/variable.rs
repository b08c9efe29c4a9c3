//! What one variable does.

use super::source::{Source, Variable};
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;
use nccl_net_spark::config::Config;
use nccl_net_spark::config::fate::{Fate, fate};
use serde::Serialize;

/// A variable and what becomes of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Judged {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: String,
    /// Where it comes from.
    pub source: Source,
    /// What it does.
    pub effect: Effect,
    /// The same as a sentence, or the end of one.
    pub text: String,
}

/// What a variable does to this plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// The plugin does what it says.
    Honoured,
    /// The plugin does not read it.
    Ignored,
    /// It is set to an empty string, which counts as unset.
    Unset,
    /// It keeps NCCL from using the plugin.
    Blocks,
    /// It does not do what it is usually set for.
    Misleads,
    /// It makes the plugin slower or more fragile.
    Harms,
    /// The plugin cannot use the value, and does not start.
    Refused,
    /// NCCL itself acts on it, as without the plugin.
    Nccl,
    /// Another program's.
    Other,
}

impl Effect {
    /// The word that the text has for it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Honoured => "honoured",
            Self::Ignored => "ignored",
            Self::Unset => "unset",
            Self::Blocks => "BLOCKS",
            Self::Misleads => "MISLEADS",
            Self::Harms => "HARMS",
            Self::Refused => "REFUSED",
            Self::Nccl => "NCCL's",
            Self::Other => "other",
        }
    }
}

/// Why there is no file to load at an absolute path, as the beginning of a sentence; `None` where there is one, or nobody can tell.
pub type Lack<'a> = &'a dyn Fn(&str) -> Option<&'static str>;

pub(super) struct Verdict {
    pub(super) judged: Judged,
    pub(super) finding: Option<Finding>,
}

/// Whether a value of `NCCL_NET_PLUGIN` has this plugin in it.
pub(super) fn names_this_plugin(list: &str) -> bool {
    list.split(',').any(is_this_plugin)
}

/// As the tuner tells it from other plugins: by a file name with `spark` in it.
fn is_this_plugin(entry: &str) -> bool {
    entry.rsplit('/').next().is_some_and(|name| name.to_ascii_lowercase().contains("spark"))
}

/// Judges one variable. `lack` says what is wrong with the file at a path, if there is none that could be loaded.
pub(super) fn judge(variable: &Variable, plugin: &str, lack: Lack<'_>) -> Verdict {
    let (name, value) = (variable.name.as_str(), variable.value.trim());
    let what = match name {
        "NCCL_NET" => network(value),
        "NCCL_NET_PLUGIN" => plugins(value, plugin, lack),
        _ if value.is_empty() => What::plain(Effect::Unset, "empty, which counts as unset for NCCL and for the plugin"),
        _ => refused(variable).or_else(|| particular(name, value)).unwrap_or_else(|| general(name)),
    };
    let judged = Judged {
        name: name.to_owned(),
        value: value.to_owned(),
        source: variable.source.clone(),
        effect: what.effect,
        text: what.text.clone(),
    };
    let place = match &variable.source {
        Source::Environment => String::new(),
        Source::File(file) => format!(" (in {file})"),
    };
    let finding = what.finding.map(|(severity, id, cure)| {
        Finding::new(severity, id, format!("{name}={value}{place}: {}", what.text)).cured_by(match &variable.source {
            Source::Environment => cure,
            Source::File(file) => format!("sudo sed -i '/^{name}=/d' {file}"),
        })
    });
    Verdict { judged, finding }
}

/// What a variable does, and what is to be found in that: how bad, the id, the cure.
struct What {
    effect: Effect,
    text: String,
    finding: Option<(Severity, Id, String)>,
}

impl What {
    fn plain(effect: Effect, text: impl Into<String>) -> Self {
        Self { effect, text: text.into(), finding: None }
    }

    fn wrong(effect: Effect, severity: Severity, id: Id, text: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { effect, text: text.into(), finding: Some((severity, id, cure.into())) }
    }
}

fn network(value: &str) -> What {
    let blocks = |text: String| {
        What::wrong(Effect::Blocks, Severity::Broken, Id::NetworkNotSpark, text, "export NCCL_NET=Spark")
    };
    match value {
        _ if value.eq_ignore_ascii_case("Spark") => {
            What::plain(Effect::Nccl, "NCCL uses this plugin, and fails where it does not start")
        }
        "" => blocks("empty is a name to NCCL, and no network has it: NCCL fails".to_owned()),
        _ => blocks(format!("NCCL uses its network {value} and rejects this plugin with one INFO line")),
    }
}

/// Where the path that a cure would name has no file either.
const INSTALL: &str = "sudo apt install ./nccl-net-spark_*.deb    # and NCCL_NET_PLUGIN=spark";

fn plugins(value: &str, plugin: &str, lack: Lack<'_>) -> What {
    let missing = |entry: &&str| lack(entry).filter(|_| entry.starts_with('/') && is_this_plugin(entry));
    // NCCL goes on to the next one of the list.
    let there: Vec<&str> = value.split(',').filter(|entry| missing(entry).is_none()).collect();
    let lacks = value.split(',').find_map(|entry| missing(&entry).map(|why| format!("{why} {entry}")));
    let is_cured = lacks.is_none() || lack(plugin).is_none();
    let cure = if is_cured { format!("export NCCL_NET_PLUGIN={plugin}") } else { INSTALL.to_owned() };
    let blocks = |text: String| What::wrong(Effect::Blocks, Severity::Broken, Id::PluginKeptOut, text, cure.clone());
    match there.iter().position(|entry| is_this_plugin(entry)) {
        Some(0) => What::plain(Effect::Nccl, "NCCL loads this plugin"),
        Some(_) => What::wrong(
            Effect::Harms,
            Severity::Fragile,
            Id::PluginNotFirst,
            "NCCL takes the first plugin of the list that starts, and this one is not the first",
            cure.clone(),
        ),
        None if lacks.is_some() => blocks(format!("{}, so NCCL does not load this plugin", lacks.unwrap_or_default())),
        None if value.is_empty() => blocks("empty, unlike unset, makes NCCL load no plugin".to_owned()),
        None if value.eq_ignore_ascii_case("none") => blocks("NCCL loads no plugin".to_owned()),
        None => blocks(format!("NCCL loads {value} and not this plugin")),
    }
}

/// A value that keeps the plugin from starting.
fn refused(variable: &Variable) -> Option<What> {
    let own = variable.name.starts_with("NCCL_SPARK_");
    let is_setting = matches!(fate(&variable.name), Some(Fate::Honoured(_)));
    if !own && !is_setting {
        return None;
    }
    let error = Config::from_variables(&[(variable.name.clone(), variable.value.clone())]).err()?;
    let text = format!("the plugin does not start: {error}");
    Some(What::wrong(Effect::Refused, Severity::Broken, Id::SettingRefused, text, format!("unset {}", variable.name)))
}

/// Values that deserve more than the general word.
fn particular(name: &str, value: &str) -> Option<What> {
    let unset = format!("unset {name}");
    let is_one = value.parse::<i64>().is_ok_and(|number| number != 0);
    Some(match name {
        "NCCL_IB_DISABLE" if is_one => What::wrong(
            Effect::Misleads,
            Severity::Fragile,
            Id::IbDisable,
            "RDMA is still used: it turns off NCCL's own IB transport, not plugins",
            "export NCCL_NET=Socket    # if sockets are wanted; else unset NCCL_IB_DISABLE",
        ),
        "NCCL_IB_GID_INDEX" if value != "-1" => What::wrong(
            Effect::Harms,
            Severity::Fragile,
            Id::GidIndexPinned,
            "every port has to have its RoCE v2 address at this index, which differs from function to function and moves when addresses \
             change; unset, the plugin looks it up at each connect",
            unset,
        ),
        "NCCL_IB_ROCE_VERSION_NUM" if value != "2" => What::wrong(
            Effect::Misleads,
            Severity::Fragile,
            Id::RoceVersion,
            "the plugin uses RoCE v2 alone, whatever this says",
            unset,
        ),
        "NCCL_IB_TIMEOUT" | "NCCL_IB_RETRY_CNT" => {
            // What both make together is one finding, made where both are known.
            let alone = Config::from_variables(&[(name.to_owned(), value.to_owned())]).ok()?;
            let warnings = alone.acknowledgement_warnings();
            let effect = if warnings.is_empty() { Effect::Honoured } else { Effect::Harms };
            let text = format!("a rail that falls silent counts as lost after {:.1?} or more", alone.silence_limit());
            What::plain(effect, text)
        }
        "NCCL_ALGO" | "NCCL_PROTO" => {
            What::plain(Effect::Nccl, "NCCL keeps to it; the tuner leaves the collectives that it restricts to NCCL")
        }
        "NCCL_TUNER_PLUGIN" if !value.to_ascii_lowercase().contains("spark") => What::wrong(
            Effect::Harms,
            Severity::Note,
            Id::OtherTuner,
            "NCCL takes this tuner, and this plugin's does nothing",
            unset,
        ),
        "NCCL_MAX_NCHANNELS" if value.parse::<u32>().is_ok_and(|channels| channels < FEW_CHANNELS) => What::wrong(
            Effect::Harms,
            Severity::Note,
            Id::FewChannels,
            "the tuner cannot take more channels than this, and large messages want more",
            unset,
        ),
        _ => return None,
    })
}

/// Fewer leave a stream over four rails without a connection for each of them.
const FEW_CHANNELS: u32 = 4;

fn general(name: &str) -> What {
    match fate(name) {
        Some(Fate::Honoured(row)) => What::plain(Effect::Honoured, row.doc),
        Some(Fate::Ignored(why)) => What::plain(Effect::Ignored, why),
        None if name.starts_with("NCCL_") => What::plain(Effect::Nccl, "NCCL acts on it as without the plugin"),
        None if name.starts_with("UCX_") => {
            What::plain(Effect::Other, "UCX's (MPI); neither NCCL nor the plugin reads it")
        }
        None if name.starts_with("GLOO_") => {
            What::plain(Effect::Other, "Gloo's (PyTorch's CPU collectives); NCCL does not read it")
        }
        None => What::plain(Effect::Other, "TensorPipe's (PyTorch's RPC); NCCL does not read it"),
    }
}
