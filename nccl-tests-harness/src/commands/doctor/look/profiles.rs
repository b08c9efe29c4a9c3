//! NetworkManager's automatic profiles, read with `nmcli`.
//!
//! The files of NetworkManager are not enough: only root can read the profiles, and the state files
//! do not name a profile that still asks for an address.

use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use std::process::Command;

/// An automatic profile that is active on an interface and asks for a DHCP address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AutomaticProfile {
    pub netdev: String,
    /// "Wired connection 1", or its translation.
    pub name: String,
    pub uuid: String,
}

/// Priority of automatic profiles, the lowest possible one (`new_default_connection` in
/// NetworkManager's nm-device-ethernet.c). The priority identifies automatic profiles, because
/// their names depend on the language.
const AUTOMATIC_PRIORITY: &str = "-999";

pub(super) fn automatic_profiles(
    place: &Place,
    netdevs: &[&str],
    not_seen: &mut Vec<NotSeen>,
) -> Vec<AutomaticProfile> {
    if netdevs.is_empty() {
        return Vec::new();
    }
    read(place, netdevs).unwrap_or_else(|why| {
        not_seen.push(NotSeen::new("NetworkManager's profiles", why));
        Vec::new()
    })
}

fn read(place: &Place, netdevs: &[&str]) -> Result<Vec<AutomaticProfile>, String> {
    const ACTIVE: &str = "DEVICE,AUTOCONNECT-PRIORITY,UUID,NAME";
    let active = nmcli(
        place,
        &[
            "--terse",
            "--escape",
            "no",
            "--fields",
            ACTIVE,
            "connection",
            "show",
            "--active",
        ],
        "active",
    )?;
    let mut found = Vec::new();
    for line in active.lines() {
        // A name may have colons.
        let fields: Vec<&str> = line.splitn(4, ':').collect();
        let [netdev, AUTOMATIC_PRIORITY, uuid, name] = fields[..] else {
            continue;
        };
        if !netdevs.contains(&netdev) {
            continue;
        }
        // If the owner has given the profile an address, the method is not "auto".
        let method = nmcli(
            place,
            &["--get-values", "ipv4.method", "connection", "show", uuid],
            uuid,
        )?;
        if method.trim() == "auto" {
            let [netdev, name, uuid] = [netdev, name, uuid].map(str::to_owned);
            found.push(AutomaticProfile { netdev, name, uuid });
        }
    }
    Ok(found)
}

/// Returns the output of `nmcli`, or `answers/nmcli/NAME` of a copied machine. The output is empty
/// if `nmcli` is not installed or NetworkManager does not run.
fn nmcli(place: &Place, arguments: &[&str], name: &str) -> Result<String, String> {
    /// Exit status of `timeout` after it has ended the program.
    const TIMED_OUT: i32 = 124;
    /// Exit status of nmcli(1) if NetworkManager does not run.
    const NOT_RUNNING: i32 = 8;
    const NO_PROGRAM: i32 = 127;
    if !place.is_live() {
        return Ok(place
            .text(format!("/answers/nmcli/{name}"))
            .unwrap_or_default());
    }
    let Ok(output) = Command::new("timeout")
        .args(["5", "nmcli"])
        .args(arguments)
        .env("LC_ALL", "C")
        .output()
    else {
        return Ok(String::new());
    };
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Some(NOT_RUNNING | NO_PROGRAM) => Ok(String::new()),
        Some(TIMED_OUT) => Err("nmcli did not answer within 5 s".to_owned()),
        _ => Err(format!(
            "nmcli: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}
