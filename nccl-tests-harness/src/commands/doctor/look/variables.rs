//! Variables from an environment and from NCCL's own files. Only variables of NCCL, the plugin and
//! related programs are kept, because others may be secrets.

use crate::commands::doctor::place::Place;
use serde::Serialize;
use std::io;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    pub name: String,
    pub value: String,
    pub source: Source,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Environment,
    File(String),
}

const PREFIXES: [&str; 4] = ["NCCL_", "UCX_", "GLOO_", "TP_"];
/// Variables that decide which libraries are loaded. They are read, but not shown.
const LOADER_VARIABLES: [&str; 6] = [
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "VLLM_NCCL_SO_PATH",
    "VIRTUAL_ENV",
    "PATH",
    "HOME",
];

pub fn known_variables(variables: &[(String, String)]) -> Vec<Variable> {
    let shown = variables
        .iter()
        .filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix)));
    let mut shown: Vec<Variable> = shown
        .map(|(name, value)| Variable {
            name: name.clone(),
            value: value.clone(),
            source: Source::Environment,
        })
        .collect();
    shown.sort_by(|one, other| one.name.cmp(&other.name));
    shown
}

/// Reads the environment that process `pid` was started with, limited to `PREFIXES` and
/// `LOADER_VARIABLES`.
///
/// # Errors
/// The process belongs to another user, or does not exist.
pub fn of_process(place: &Place, pid: u32) -> io::Result<Vec<(String, String)>> {
    let bytes = std::fs::read(place.path(format!("/proc/{pid}/environ")))?;
    let entries = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let pairs = entries.filter_map(|entry| {
        entry
            .split_once('=')
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
    });
    let taken = |name: &str| {
        LOADER_VARIABLES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    Ok(pairs.filter(|(name, _)| taken(name)).collect())
}

/// Adds the variables of NCCL's files: `NCCL_CONF_FILE` (or else `~/.nccl.conf`), then
/// `/etc/nccl.conf`. A variable that is already set keeps its value (`initEnv` in NCCL's param.cc).
pub fn with_files(
    mut variables: Vec<Variable>,
    home: Option<&str>,
    place: &Place,
) -> Vec<Variable> {
    let named = variables
        .iter()
        .find(|one| one.name == "NCCL_CONF_FILE" && !one.value.is_empty());
    let first = named
        .map(|one| one.value.clone())
        .or_else(|| home.map(|home| format!("{home}/.nccl.conf")));
    for file in first.into_iter().chain(["/etc/nccl.conf".to_owned()]) {
        let text = place.text(&file).unwrap_or_default();
        let lines = text
            .lines()
            .map(str::trim_end)
            .filter(|line| !line.starts_with('#'));
        for (name, value) in lines.filter_map(|line| line.split_once('=')) {
            if !variables.iter().any(|one| one.name == name)
                && PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            {
                let name = name.to_owned();
                let value = value.to_owned();
                variables.push(Variable {
                    name,
                    value,
                    source: Source::File(file.clone()),
                });
            }
        }
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_prefixes_are_taken() {
        let pairs = [
            ("NCCL_NET", "IB"),
            ("HF_TOKEN", "secret"),
            ("UCX_NET_DEVICES", "x"),
            ("TPU_KEY", "secret"),
            ("PATH", "/bin"),
        ];
        let pairs: Vec<_> = pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let names: Vec<_> = known_variables(&pairs)
            .into_iter()
            .map(|one| one.name)
            .collect();
        assert_eq!(names, ["NCCL_NET", "UCX_NET_DEVICES"]);
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/7")).unwrap();
        let environ: Vec<String> = pairs
            .iter()
            .map(|(name, value)| format!("{name}={value}\0"))
            .collect();
        std::fs::write(root.path().join("proc/7/environ"), environ.concat()).unwrap();
        let taken = of_process(&Place::new(root.path()), 7).unwrap();
        assert!(
            taken.iter().all(|(_, value)| value != "secret"),
            "{taken:?}"
        );
        assert_eq!(taken.len(), 3);
        assert!(of_process(&Place::new(root.path()), 8).is_err());
    }

    #[test]
    fn nccls_files_fill_in_what_is_unset() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "etc/nccl.conf",
            "# all\nNCCL_NET=IB\nNCCL_IB_TC=3\nPASSWORD=secret\nNCCL_NET_PLUGIN=none\r\n",
        );
        write("home/me/.nccl.conf", "NCCL_IB_TC=4\n");
        write("other.conf", "NCCL_IB_TC=5\n");
        let place = Place::new(root.path());
        let set = |name: &str, value: &str| Variable {
            name: name.into(),
            value: value.into(),
            source: Source::Environment,
        };
        let value = |all: &[Variable], name: &str| {
            all.iter()
                .find(|one| one.name == name)
                .map(|one| one.value.clone())
        };
        let all = with_files(vec![set("NCCL_NET", "Spark")], Some("/home/me"), &place);
        assert_eq!(value(&all, "NCCL_NET").as_deref(), Some("Spark"));
        assert_eq!(value(&all, "NCCL_IB_TC").as_deref(), Some("4"));
        assert_eq!(value(&all, "NCCL_NET_PLUGIN").as_deref(), Some("none"));
        assert_eq!(value(&all, "PASSWORD"), None);
        let all = with_files(
            vec![set("NCCL_CONF_FILE", "/other.conf")],
            Some("/home/me"),
            &place,
        );
        assert_eq!(value(&all, "NCCL_IB_TC").as_deref(), Some("5"));
    }
}
