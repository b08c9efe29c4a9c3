//! The launchers that set NCCL's variables, by what they set, and the smallest change to each that lets the plugin in.
//!
//! What they set was read in their sources (spark-vllm-docker's launch-cluster.sh, run-cluster-node.sh and cluster_topology.py,
//! sparkrun's orchestration/infiniband.py, orchestration/executor.py and runtimes/atlas.py) and in their users' posts.

use super::source::Variable;
use crate::commands::doctor::finding::{Finding, Severity};
use crate::commands::doctor::id::Id;

/// A launcher.
struct Launcher {
    name: &'static str,
    /// Variables that it sets, with the value where the launcher alone decides it. More specific launchers stand first.
    marks: &'static [(&'static str, Option<&'static str>)],
    /// Why the plugin is not used as it is; `None` where nothing keeps it out.
    trouble: Option<&'static str>,
    /// The smallest change. `{plugin}` stands for the plugin's path.
    change: &'static str,
}

const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "sparkring",
        marks: &[("NCCL_NET", Some("IB")), ("NCCL_IB_MERGE_NICS", Some("0")), ("NCCL_SKIP_TREE_CONNECT", Some("1"))],
        trouble: Some("NCCL_NET=IB rejects the plugin, and LD_PRELOAD puts a patched NCCL in place of the image's"),
        change: "export NCCL_NET=Spark NCCL_NET_PLUGIN={plugin}; unset LD_PRELOAD VLLM_NCCL_SO_PATH NCCL_SKIP_TREE_CONNECT NCCL_IB_MERGE_NICS",
    },
    Launcher {
        name: "sparkrun's Atlas runtime",
        marks: &[
            ("NCCL_IB_TIMEOUT", Some("22")),
            ("NCCL_IB_RETRY_CNT", Some("7")),
            ("NCCL_BUFFSIZE", Some("33554432")),
        ],
        trouble: Some(
            "its time-outs see a lost rail after 17 s and more, and its two channels and NCCL_ALGO leave the tuner nothing",
        ),
        change: "sparkrun run RECIPE -o env.NCCL_NET=Spark -o env.NCCL_NET_PLUGIN={plugin} -o env.NCCL_IB_TIMEOUT=14 -o env.NCCL_IB_RETRY_CNT=6",
    },
    Launcher {
        name: "sparkrun, ring",
        marks: &[("NCCL_NET", Some("IB")), ("NCCL_NET_PLUGIN", Some("none")), ("NCCL_CROSS_NIC", Some("1"))],
        trouble: Some("NCCL_NET=IB and NCCL_NET_PLUGIN=none both keep the plugin out"),
        change: "sparkrun run RECIPE -o env.NCCL_NET=Spark -o env.NCCL_NET_PLUGIN={plugin}",
    },
    Launcher {
        name: "a MiaAI-Lab recipe",
        marks: &[("NCCL_NET", Some("IB")), ("NCCL_CROSS_NIC", Some("1")), ("NCCL_IB_ROCE_VERSION_NUM", Some("2"))],
        trouble: Some("NCCL_NET=IB rejects the plugin, and a fixed GID index fails when addresses change"),
        change: "export NCCL_NET=Spark NCCL_NET_PLUGIN={plugin}; unset NCCL_IB_GID_INDEX",
    },
    Launcher {
        name: "sparkrun",
        marks: &[("NCCL_NET", Some("IB")), ("NCCL_CROSS_NIC", Some("1")), ("NCCL_IB_HCA", None)],
        trouble: Some("NCCL_NET=IB rejects the plugin"),
        change: "sparkrun run RECIPE -o env.NCCL_NET=Spark -o env.NCCL_NET_PLUGIN={plugin} -o env.NCCL_IB_GID_INDEX=",
    },
    Launcher {
        name: "spark-vllm-docker, ring of four",
        marks: &[
            ("NCCL_NET_PLUGIN", Some("none")),
            ("NCCL_ALGO", Some("Ring")),
            ("NCCL_IGNORE_CPU_AFFINITY", Some("1")),
        ],
        trouble: Some(
            "NCCL_NET_PLUGIN=none keeps the plugin out, and the script refuses another value from -e, .env and export lines",
        ),
        change: "./launch-cluster.sh exec env NCCL_NET_PLUGIN={plugin} NCCL_NET=Spark vllm serve ...",
    },
    Launcher {
        name: "spark-vllm-docker, four functions up",
        marks: &[
            ("NCCL_NET_PLUGIN", Some("none")),
            ("NCCL_IB_MERGE_NICS", Some("0")),
            ("NCCL_IGNORE_CPU_AFFINITY", Some("1")),
        ],
        trouble: Some("NCCL_NET_PLUGIN=none keeps the plugin out"),
        change: "./launch-cluster.sh -e NCCL_NET_PLUGIN={plugin} -e NCCL_NET=Spark ...",
    },
    Launcher {
        name: "NVIDIA's script for a ring",
        marks: &[("NCCL_NET_PLUGIN", Some("none")), ("NCCL_IB_MERGE_NICS", Some("0"))],
        trouble: Some("NCCL_NET_PLUGIN=none keeps the plugin out"),
        change: "mpirun ... -x NCCL_NET_PLUGIN={plugin} -x NCCL_NET=Spark ...",
    },
    Launcher {
        name: "spark-vllm-docker, two functions up",
        marks: &[("NCCL_IGNORE_CPU_AFFINITY", Some("1")), ("UCX_NET_DEVICES", None), ("NCCL_IB_HCA", None)],
        trouble: None,
        change: "./launch-cluster.sh -e NCCL_NET_PLUGIN={plugin} -e NCCL_NET=Spark ...",
    },
    Launcher {
        name: "an image's leftover /etc/nccl.conf",
        marks: &[("NCCL_IB_USE_INLINE", Some("1")), ("NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS", Some("1"))],
        trouble: Some("it has frozen NCCL's own IB transport; this plugin ignores both"),
        change: "sudo mv /etc/nccl.conf /etc/nccl.conf.off",
    },
];

/// Which launcher sets such variables, with the smallest change to it; `None` for none that is known, and where the plugin is named.
pub fn recognised(variables: &[Variable], plugin: &str) -> Option<Finding> {
    let value = |name: &str| variables.iter().find(|one| one.name == name).map(|one| one.value.trim());
    let launcher = LAUNCHERS.iter().find(|launcher| {
        launcher.marks.iter().all(|(name, wanted)| match (value(name), wanted) {
            (Some(value), Some(wanted)) => value == *wanted,
            (Some(_), None) => true,
            (None, _) => false,
        })
    })?;
    let trouble = launcher.trouble.unwrap_or("nothing in them keeps the plugin out, once NCCL_NET_PLUGIN names it");
    let text = format!("these variables are as {} sets them: {trouble}", launcher.name);
    Some(Finding::new(Severity::Note, Id::Launcher, text).cured_by(launcher.change.replace("{plugin}", plugin)))
}
