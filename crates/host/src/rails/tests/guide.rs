//! The guide's table of topologies and its netplan files are those of `crates/host/topologies`.

use super::topology::{Topology, interfaces};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const HEAD: &str =
    "| cabling | addresses | a connection of two hosts has | notes |\n|---|---|---|---|\n";

/// With `SPARK_UPDATE_DOCS=1` the test writes the table and the netplan files.
#[test]
#[allow(clippy::disallowed_methods)]
fn the_guide_has_each_topology() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide");
    let guide = fs::read_to_string(folder.join("topologies.md")).unwrap();
    let start = guide.find(HEAD).expect("the table of topologies") + HEAD.len();
    let length = guide[start..].find("\n\n").expect("a section after it") + 1;
    let topologies = Topology::all();
    let rows: String = topologies.iter().filter_map(row).collect();
    let page = [&guide[..start], &rows, &guide[start + length..]].concat();
    let mut files = BTreeMap::from([("topologies.md".to_owned(), page)]);
    files.extend(topologies.iter().flat_map(netplan_files));
    let hint = "SPARK_UPDATE_DOCS=1 cargo test -p spark-host the_guide_has_each_topology writes it";
    for (name, text) in &files {
        let path = folder.join(name);
        if std::env::var("SPARK_UPDATE_DOCS").is_ok() {
            fs::write(&path, text).unwrap();
        }
        let is_same = fs::read_to_string(path).is_ok_and(|now| now == *text);
        assert!(is_same, "{name}: {hint}");
    }
    for entry in fs::read_dir(folder.join("netplan")).unwrap() {
        let name = format!("netplan/{}", entry.unwrap().file_name().to_str().unwrap());
        assert!(files.contains_key(&name), "{name} has no topology");
    }
}

fn row(topology: &Topology) -> Option<String> {
    let guide = topology.guide.as_ref()?;
    let links = netplan_files(topology).into_iter().map(|(path, _)| {
        let name = &path["netplan/".len()..];
        format!("[{name}]({path})")
    });
    let notes: Vec<String> = links.chain(guide.notes.clone()).collect();
    let connection = connection(topology);
    let cells = [
        &guide.cabling,
        &guide.addresses,
        &connection,
        &notes.join(", "),
    ];
    Some(format!("| {} |\n", cells.map(String::as_str).join(" | ")))
}

/// Returns the guide's words for the connection of two hosts that have pairs.
fn connection(topology: &Topology) -> String {
    let mut rails = BTreeMap::<[String; 2], usize>::new();
    for pair in topology.pairs() {
        let mut hosts = pair.map(|end| end.split(' ').next().unwrap().to_owned());
        hosts.sort();
        *rails.entry(hosts).or_default() += 1;
    }
    let count = *rails.values().next().unwrap();
    assert!(
        rails.values().all(|other| *other == count),
        "{}",
        topology.name
    );
    let mut text = ["one rail", "two rails", "three rails", "four rails"][count - 1].to_owned();
    if let Some(rate_mbps) = topology.rate_mbps {
        text += &format!(", {} Gb/s", rate_mbps / 1000);
    }
    let hosts = topology.hosts.len();
    if rails.len() < hosts * (hosts - 1) / 2 {
        text += "; none without a cable";
    }
    text
}

/// Returns the path below docs/guide and the text of each netplan file.
fn netplan_files(topology: &Topology) -> Vec<(String, String)> {
    let guide = topology.guide.as_ref();
    let Some(comment) = guide.and_then(|guide| guide.netplan.as_ref()) else {
        return Vec::new();
    };
    let file = |host: &String| {
        let number = host.strip_prefix("spark-").unwrap();
        let path = format!("netplan/{}-{number}.yaml", topology.name);
        let comment = comment.replace('\n', "\n# ");
        let mut text = format!(
            "# /etc/netplan/40-cx7.yaml of {host}.\n# {comment}\nnetwork:\n  version: 2\n  ethernets:\n"
        );
        for port in ["p0", "p1"] {
            let peer = topology.far_end(host, port).unwrap();
            let (peer, its_port) = peer.split_once('.').unwrap();
            text += &format!("    # {port}, to {its_port} of {peer}\n");
            for interface in interfaces(port) {
                let address = &topology.hosts[host][&interface];
                text += &format!("    {interface}:\n      addresses: [{address}]\n");
                text += "      mtu: 9000\n      optional: true\n";
            }
        }
        (path, text)
    };
    topology.hosts.keys().map(file).collect()
}
