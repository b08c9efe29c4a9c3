//! Launchers that set NCCL's variables. Each is recognised by the variables that it sets. Each
//! entry has a cure: the smallest change with which NCCL loads the plugin or, for a leftover
//! `/etc/nccl.conf`, the removal of this file.
//!
//! The variables come from the launchers' sources (spark-vllm-docker's launch-cluster.sh,
//! run-cluster-node.sh and cluster_topology.py, sparkrun's orchestration/infiniband.py,
//! orchestration/executor.py and runtimes/atlas.py) and from their users' posts.

use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::finding::kinds;
use crate::commands::doctor::look::variables::Variable;

kinds! {
    LAUNCHER = Note "launcher": "the variables are as a known launcher sets them", "[launchers.md](launchers.md)";
}

struct Launcher {
    name: &'static str,
    /// Variables that identify the launcher, separated by blanks: NAME, or NAME=VALUE where the
    /// value matters. The first launcher with all its marks set is chosen, so more specific
    /// launchers come first.
    marks: &'static str,
    /// The harm that these variables do, in most cases the reason why the plugin is not used. Empty
    /// if they do none.
    trouble: &'static str,
    /// The cure. `{plugin}` is replaced by the plugin's path.
    change: &'static str,
}

const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "sparkring",
        marks: "NCCL_NET=IB NCCL_IB_MERGE_NICS=0 NCCL_SKIP_TREE_CONNECT=1",
        trouble: "NCCL_NET=IB rejects the plugin, and LD_PRELOAD puts a patched NCCL in place of the image's",
        change: "export NCCL_NET=Spark NCCL_NET_PLUGIN={plugin}; unset LD_PRELOAD VLLM_NCCL_SO_PATH NCCL_SKIP_TREE_CONNECT NCCL_IB_MERGE_NICS",
    },
    Launcher {
        name: "sparkrun's Atlas runtime",
        marks: "NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7 NCCL_BUFFSIZE=33554432",
        trouble: "its time-outs see a lost rail after 17 s and more, and its two channels and NCCL_ALGO leave the tuner nothing",
        change: "sparkrun run RECIPE -o env.NCCL_NET=Spark -o env.NCCL_NET_PLUGIN={plugin} -o env.NCCL_IB_TIMEOUT=14 -o env.NCCL_IB_RETRY_CNT=6",
    },
    Launcher {
        name: "sparkrun, ring",
        marks: "NCCL_NET=IB NCCL_NET_PLUGIN=none NCCL_CROSS_NIC=1",
        trouble: "NCCL_NET=IB and NCCL_NET_PLUGIN=none both keep the plugin out",
        change: "sparkrun run RECIPE -o env.NCCL_NET=Spark -o env.NCCL_NET_PLUGIN={plugin}",
    },
    Launcher {
        name: "a MiaAI-Lab recipe",
        marks: "NCCL_NET=IB NCCL_CROSS_NIC=1 NCCL_IB_ROCE_VERSION_NUM=2",
        trouble: "NCCL_NET=IB rejects the plugin, and a fixed GID index fails when addresses change",
        change: "export NCCL_NET=Spark NCCL_NET_PLUGIN={plugin}; unset NCCL_IB_GID_INDEX",
    },
    Launcher {
        name: "sparkrun",
        marks: "NCCL_NET=IB NCCL_CROSS_NIC=1 NCCL_IB_HCA",
        trouble: "NCCL_NET=IB rejects the plugin",
        change: "sparkrun run RECIPE -o env.NCCL_NET=Spark -o env.NCCL_NET_PLUGIN={plugin} -o env.NCCL_IB_GID_INDEX=",
    },
    Launcher {
        name: "spark-vllm-docker, ring of four",
        marks: "NCCL_NET_PLUGIN=none NCCL_ALGO=Ring NCCL_IGNORE_CPU_AFFINITY=1",
        trouble: "NCCL_NET_PLUGIN=none keeps NCCL from loading the plugin, and the script refuses another value from -e, .env and export lines",
        change: "./launch-cluster.sh exec env NCCL_NET_PLUGIN={plugin} NCCL_NET=Spark vllm serve ...",
    },
    Launcher {
        name: "spark-vllm-docker, four functions up",
        marks: "NCCL_NET_PLUGIN=none NCCL_IB_MERGE_NICS=0 NCCL_IGNORE_CPU_AFFINITY=1",
        trouble: "NCCL_NET_PLUGIN=none keeps NCCL from loading the plugin",
        change: "./launch-cluster.sh -e NCCL_NET_PLUGIN={plugin} -e NCCL_NET=Spark ...",
    },
    Launcher {
        name: "NVIDIA's script for a ring",
        marks: "NCCL_NET_PLUGIN=none NCCL_IB_MERGE_NICS=0",
        trouble: "NCCL_NET_PLUGIN=none keeps NCCL from loading the plugin",
        change: "mpirun ... -x NCCL_NET_PLUGIN={plugin} -x NCCL_NET=Spark ...",
    },
    Launcher {
        name: "NVIDIA's script for a ring, since October 2026,",
        marks: "NCCL_NET_PLUGIN=none NCCL_IB_SUBNET_AWARE_ROUTING=1",
        trouble: "NCCL_NET_PLUGIN=none, by mpirun's -x, keeps NCCL from loading the plugin",
        change: "mpirun ... -x NCCL_NET_PLUGIN={plugin} -x NCCL_NET=Spark ...    # in place of the script's -x NCCL_NET_PLUGIN=none",
    },
    Launcher {
        name: "spark-vllm-docker, two functions up",
        marks: "NCCL_IGNORE_CPU_AFFINITY=1 UCX_NET_DEVICES NCCL_IB_HCA",
        trouble: "",
        change: "./launch-cluster.sh -e NCCL_NET_PLUGIN={plugin} -e NCCL_NET=Spark ...",
    },
    Launcher {
        name: "an image's leftover /etc/nccl.conf",
        marks: "NCCL_IB_USE_INLINE=1 NCCL_IB_PREPOST_RECEIVE_WORK_REQUESTS=1",
        trouble: "it has frozen NCCL's own IB transport; this plugin ignores both",
        change: "sudo mv /etc/nccl.conf /etc/nccl.conf.off",
    },
];

/// Returns a finding about the launcher that sets these variables, or `None` if it is unknown.
pub fn recognised(variables: &[Variable], plugin: &str) -> Option<Finding> {
    let is_set = |mark: &str| {
        let (name, wanted) = mark
            .split_once('=')
            .map_or((mark, None), |(name, value)| (name, Some(value)));
        variables
            .iter()
            .any(|one| one.name == name && wanted.is_none_or(|wanted| one.value.trim() == wanted))
    };
    let launcher = LAUNCHERS
        .iter()
        .find(|launcher| launcher.marks.split(' ').all(is_set))?;
    let trouble = match launcher.trouble {
        "" => "nothing in them keeps NCCL from loading the plugin, once NCCL_NET_PLUGIN names it",
        trouble => trouble,
    };
    let text = format!(
        "these variables are as {} sets them: {trouble}",
        launcher.name
    );
    // An export in the shell does not reach a variable that the launcher sets.
    Some(
        LAUNCHER
            .finding(text)
            .cured_by(launcher.change.replace("{plugin}", plugin)),
    )
}
