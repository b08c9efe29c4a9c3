//! netplan accepts the guide's examples, and generates the configuration that the guide describes.
//! `crates/host/topologies` has the rails that hosts with these addresses have in common.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

#[test]
fn netplan_takes_the_guides_examples() {
    if Command::new("netplan").arg("--help").output().is_err() {
        return common::skip::missing("netplan is not installed (package netplan.io)");
    }
    let mut files: Vec<_> = fs::read_dir(common::repository("docs/guide/netplan"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        let generated = generate(&file);
        let text = fs::read_to_string(&file).unwrap();
        let addresses: Vec<&str> = text
            .split("addresses: [")
            .skip(1)
            .map(|rest| rest.split(']').next().unwrap())
            .collect();
        assert_eq!(
            (addresses.len(), generated.len()),
            (4, 4),
            "{}",
            file.display()
        );
        for (interface, network) in &generated {
            assert!(
                text.contains(&format!("    {interface}:\n")),
                "{}: {interface}",
                file.display()
            );
            let own: Vec<&&str> = addresses
                .iter()
                .filter(|address| network.contains(&format!("Address={address}\n")))
                .collect();
            assert_eq!(own.len(), 1, "{}: {network}", file.display());
            assert!(
                network.contains("MTUBytes=9000\n")
                    && network.contains("LinkLocalAddressing=ipv6\n"),
                "{network}"
            );
        }
    }
}

/// Returns each interface with its generated systemd-networkd configuration.
fn generate(file: &Path) -> Vec<(String, String)> {
    let root = tempfile::tempdir().unwrap();
    let place = root.path().join("etc/netplan/40-cx7.yaml");
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::copy(file, &place).unwrap();
    fs::set_permissions(&place, fs::Permissions::from_mode(0o600)).unwrap();
    let output = Command::new("netplan")
        .args(["generate", "--root-dir"])
        .arg(root.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && stderr.is_empty(),
        "{}: {stderr}",
        file.display()
    );
    let networks = fs::read_dir(root.path().join("run/systemd/network"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let networks = networks.filter(|path| {
        path.extension()
            .is_some_and(|extension| extension == "network")
    });
    let name = |path: &Path| {
        path.file_stem()
            .unwrap()
            .to_str()
            .unwrap()
            .replace("10-netplan-", "")
    };
    networks
        .map(|path| (name(&path), fs::read_to_string(&path).unwrap()))
        .collect()
}
