//! The files of fabrics: finding out whether a fabric is in use, removing unused fabrics, and
//! reporting a fabric's status.

mod common;

use common::*;
use softverbs::control::{
    Action, RailStatus, control, is_used, prepare, remove_unused, status, used,
};
use softverbs::path::{PathFault, PathFaults};
use softverbs::profile::Profile;
use std::path::Path;

#[test]
fn a_fabric_in_use_is_not_taken_over() {
    let name = format!("test-prepared-{}", std::process::id());
    let (dir, folder) = (dir(), dir().join(&name));
    let one = Profile::load("spark-1cable", 1.0).unwrap();
    let two = Profile::load("spark-2cable", 1.0).unwrap();
    let prepared = prepare(&dir, &name, &one, 2).unwrap();
    let refused = prepare(&dir, &name, &two, 2).unwrap_err();
    assert!(
        refused.contains("in use") && refused.contains(&name),
        "{refused}"
    );
    // As if the run that made the fabric had been killed: another run may then take the name, and
    // gets its own profile.
    drop(prepared);
    assert!(folder.join("fabric").exists() && !is_used(&dir, &name));
    let again = prepare(&dir, &name, &two, 2).unwrap();
    assert_eq!(
        Profile::load(&folder.join("profile").display().to_string(), 1.0)
            .unwrap()
            .rails
            .len(),
        4
    );
    again.remove();
    assert!(!folder.exists());
}

#[test]
fn a_folder_with_foreign_files_is_neither_used_nor_deleted() {
    let name = format!("test-foreign-{}", std::process::id());
    let (dir, folder) = (dir(), dir().join(&name));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("letter.txt"), "").unwrap();
    let refused = prepare(&dir, &name, &Profile::load("unpaced", 1.0).unwrap(), 2).unwrap_err();
    assert!(refused.contains("letter.txt"), "{refused}");
    remove_unused(&dir, |found| found == name);
    assert!(folder.join("letter.txt").exists());
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn only_fabrics_that_no_process_uses_are_removed_and_only_used_ones_are_named() {
    let profile = Profile::load("unpaced", 1.0).unwrap();
    let make = |what: &str| {
        prepare(
            &dir(),
            &format!("test-{what}-{}", std::process::id()),
            &profile,
            1,
        )
        .unwrap()
    };
    let alive = make("alive");
    let dead = make("dead");
    let kept = make("kept");
    let alive_at = alive.folder().to_owned();
    let dead_at = dead.folder().to_owned();
    let kept_at = kept.folder().to_owned();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    drop((dead, kept));
    let named = used(&dir());
    assert!(
        named.contains(&name(&alive_at)) && !named.contains(&name(&dead_at)),
        "{named:?}"
    );
    let error = control(&dir(), &name(&dead_at), None, "rocep1s0f0", Action::Down).unwrap_err();
    assert!(
        error.contains("runs in") && error.contains(&name(&alive_at)),
        "{error}"
    );
    remove_unused(&dir(), |found| {
        [name(&alive_at), name(&dead_at)].contains(&found.to_owned())
    });
    assert!(alive_at.exists() && !dead_at.exists() && kept_at.exists());
    alive.remove();
    std::fs::remove_dir_all(kept_at).unwrap();
}

#[test]
fn the_status_shows_nodes_rates_and_faults() {
    let name = format!("test-status-{}", std::process::id());
    let profile = Profile::load("spark-1cable", 0.5).unwrap();
    let prepared = prepare(&dir(), &name, &profile, 2).unwrap();
    for (node, rail, action) in [
        (1, "rocep1s0f0", Action::Slow(0.25)),
        (1, "roceP2p1s0f0", Action::Down),
        (0, "roceP2p1s0f0", Action::Refuse(3)),
        (0, "rocep1s0f0", Action::Path(PathFault::Silent, true)),
        (0, "rocep1s0f0", Action::Unresolved(2)),
        (0, "roceP2p1s0f0", Action::Addresses(false)),
    ] {
        control(&dir(), &name, Some(node), rail, action).unwrap();
    }
    let told = status(&dir(), &name).unwrap();
    assert_eq!(
        (told.name.as_str(), told.folder.as_path()),
        (name.as_str(), prepared.folder())
    );
    assert_eq!(
        told.nodes
            .iter()
            .map(|node| (node.node, node.pids.len()))
            .collect::<Vec<_>>(),
        [(0, 0), (1, 0)]
    );
    let dead = RailStatus {
        unanswered: 2,
        path: PathFaults::default().with(PathFault::Silent, true),
        ..unhurt("rocep1s0f0")
    };
    assert_eq!(
        told.nodes[0].rails,
        [
            dead,
            RailStatus {
                refusals: 3,
                is_without_address: true,
                ..unhurt("roceP2p1s0f0")
            }
        ]
    );
    let slow = RailStatus {
        now_mbps: Some(14_000.0),
        ..unhurt("rocep1s0f0")
    };
    assert_eq!(
        told.nodes[1].rails,
        [
            slow,
            RailStatus {
                now_mbps: Some(0.0),
                is_down: true,
                ..unhurt("roceP2p1s0f0")
            }
        ]
    );
    prepared.remove();
}

/// A rail without a fault, with the PCIe link's 112 Gb/s at half scale.
fn unhurt(device: &str) -> RailStatus {
    RailStatus {
        device: device.to_owned(),
        full_mbps: Some(56_000.0),
        now_mbps: Some(56_000.0),
        is_down: false,
        is_without_address: false,
        is_unplugged: false,
        refusals: 0,
        unanswered: 0,
        path: PathFaults::default(),
        sent_bytes: 0,
    }
}

#[test]
fn a_node_that_the_fabric_does_not_have_is_refused() {
    let name = format!("test-no-node-{}", std::process::id());
    let profile = Profile::load("spark-1cable", 0.5).unwrap();
    let prepared = prepare(&dir(), &name, &profile, 2).unwrap();
    let error = control(&dir(), &name, Some(7), "rocep1s0f0", Action::Up).unwrap_err();
    assert!(error.ends_with("has no node 7; its nodes: 0, 1"), "{error}");
    prepared.remove();
}

#[test]
fn an_unprepared_fabric_shows_the_nodes_that_have_processes() {
    let bed = Bed::new();
    let told = status(&bed.settings.dir, &bed.settings.fabric).unwrap();
    let nodes: Vec<_> = told
        .nodes
        .iter()
        .map(|node| (node.node, node.pids.as_slice()))
        .collect();
    assert_eq!(
        nodes,
        [(0, &[std::process::id()][..]), (1, &[std::process::id()])]
    );
}
