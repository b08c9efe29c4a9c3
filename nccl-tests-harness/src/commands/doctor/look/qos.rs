//! Priorities (PFC and trust mode) of the rails' ports, and the file that sets them at boot.

use crate::commands::doctor::finding::NotSeen;
use crate::commands::doctor::place::Place;
use host::config::Config;
use host::interfaces::qos::PortQos;
use host::rails::{RailQos, Survey};
use proto::wire::fields::Priority;
use std::path::Path;

#[derive(Debug, Default)]
pub struct Qos {
    pub roce: Priority,
    /// Priorities of the rails whose drivers report them.
    pub rails: Vec<RailQos>,
    /// Congestion control (ECN) for the job's priority, by interface, if the driver reports it. The
    /// first value is true if the port answers marked packets (`roce_np`), the second if the port
    /// slows down when notified (`roce_rp`).
    pub ecn: Vec<(String, [bool; 2])>,
    pub at_boot: Option<String>,
}

pub(super) fn qos(
    place: &Place,
    config: &Config,
    survey: &Survey,
    not_seen: &mut Vec<NotSeen>,
) -> Qos {
    let roce = Priority {
        traffic_class: config.setup.traffic_class.unwrap_or(0),
        service_level: config.setup.service_level.unwrap_or(0),
    };
    let rails = if place.is_live() {
        live(config, survey, not_seen)
    } else {
        of_copy(place, survey)
    };
    let ecn = |rail: &RailQos| {
        let folder = format!("/sys/class/net/{}/ecn", rail.netdev);
        let is_on = |part: &str| {
            let value = place.number(format!(
                "{folder}/{part}/enable/{}",
                rail.port.priority(roce.traffic_class, roce.service_level)
            ));
            value.map(|value| value != 0)
        };
        Some((rail.netdev.clone(), [is_on("roce_np")?, is_on("roce_rp")?]))
    };
    Qos {
        roce,
        ecn: rails.iter().filter_map(ecn).collect(),
        at_boot: at_boot(place),
        rails,
    }
}

/// Reads the priorities. Empty on the software fabric, whose interfaces the kernel does not have.
fn live(config: &Config, survey: &Survey, not_seen: &mut Vec<NotSeen>) -> Vec<RailQos> {
    if config.rails.sysfs != Path::new("/sys") {
        return Vec::new();
    }
    let (rails, errors) = survey.qos();
    not_seen.extend(
        errors.iter().map(|(netdev, error)| {
            NotSeen::new(format!("priorities of {netdev}"), error.to_string())
        }),
    );
    rails
}

/// Parses the output of `mlnx_qos -i NETDEV` in `answers/mlnx_qos/NETDEV`.
fn of_copy(place: &Place, survey: &Survey) -> Vec<RailQos> {
    let rails = survey.rails.iter().filter_map(|rail| {
        let netdev = rail.netdev.clone()?;
        let port = of_mlnx_qos(&place.text(format!("/answers/mlnx_qos/{netdev}"))?)?;
        Some(RailQos {
            device: rail.device.clone(),
            netdev,
            port,
        })
    });
    rails.collect()
}

fn of_mlnx_qos(text: &str) -> Option<PortQos> {
    let lines = || text.lines().map(str::trim);
    let trust = lines().find_map(|line| line.strip_prefix("Priority trust state: "))?;
    let enabled = lines().find_map(|line| line.strip_prefix("enabled"))?;
    let pfc = enabled
        .split_whitespace()
        .enumerate()
        .filter(|(_, one)| *one == "1")
        .map(|(at, _)| 1 << at)
        .sum();
    let mut map = host::interfaces::qos::default_map();
    for (priority, dscps) in
        lines().filter_map(|line| line.strip_prefix("prio:")?.split_once(" dscp:"))
    {
        for dscp in dscps
            .split(',')
            .filter_map(|dscp| dscp.parse::<usize>().ok())
        {
            *map.get_mut(dscp)? = priority.parse().ok()?;
        }
    }
    Some(PortQos {
        dscp: (trust == "dscp").then_some(map),
        pfc,
    })
}

/// Returns the name of a unit's file. Instances of a template (`name@instance.service`) share one
/// file.
fn file_of(unit: &str) -> String {
    let template = unit
        .split_once('@')
        .and_then(|(name, rest)| Some((name, rest.rsplit_once('.')?.1)));
    template.map_or_else(|| unit.to_owned(), |(name, kind)| format!("{name}@.{kind}"))
}

/// Texts that identify a command that sets priorities.
const COMMANDS: [&str; 4] = ["mlnx_qos", "dcb pfc", "dcb app", "lldptool"];
/// Folders of scripts and rules that run at boot or when an interface comes up.
const SCRIPTS: [&str; 6] = [
    "/etc/NetworkManager/dispatcher.d",
    "/etc/networkd-dispatcher/routable.d",
    "/etc/network/if-up.d",
    "/etc/udev/rules.d",
    "/etc/cron.d",
    "/etc/init.d",
];
const UNITS: [&str; 2] = ["/etc/systemd/system", "/usr/local/lib/systemd/system"];

/// Finds what sets priorities at boot: a script, an enabled unit, or an enabled unit that starts
/// such a script. Returns the path of the script or unit.
fn at_boot(place: &Place) -> Option<String> {
    let sets = |text: &str| COMMANDS.iter().any(|command| text.contains(command));
    let below = |folder: &str| {
        place
            .names(folder)
            .into_iter()
            .map(|name| format!("{folder}/{name}"))
            .collect::<Vec<_>>()
    };
    let mut scripts = SCRIPTS
        .iter()
        .flat_map(|folder| below(folder))
        .chain(["/etc/rc.local".to_owned()]);
    if let Some(script) = scripts.find(|script| place.text(script).is_some_and(|text| sets(&text)))
    {
        return Some(script);
    }
    let wanted = below(UNITS[0])
        .into_iter()
        .filter(|folder| folder.ends_with(".wants"));
    let enabled: Vec<String> = wanted
        .flat_map(|folder| place.names(folder))
        .map(|name| file_of(&name))
        .collect();
    let mut units = UNITS
        .iter()
        .flat_map(|folder| enabled.iter().map(move |name| format!("{folder}/{name}")));
    units.find(|unit| {
        let text = place.text(unit).unwrap_or_default();
        let commands = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("ExecStart="));
        let mut files = commands
            .flat_map(str::split_whitespace)
            .filter(|word| word.starts_with('/'));
        let is_script = |text: &String| text.starts_with("#!") && sets(text);
        sets(&text) || files.any(|file| place.text(file).as_ref().is_some_and(is_script))
    })
}
