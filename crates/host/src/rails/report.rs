//! The survey as text in 80 columns: the verdict (the merged rails, or why there are none), the
//! warnings, then every port and link.

use super::text::{gbps, list};
use super::{Limit, Obstacle, PciFunction, PcieLink, Rail, RailAddress, Refused, Survey};
use std::net::{IpAddr, Ipv6Addr};

/// Returns the page. It begins with the merged rails and their expected rate, or with the reasons
/// why no port is usable. The warnings follow, then all ports, then the PCIe links. A port that is
/// not used has the reason beside it.
pub fn report(survey: &Survey) -> String {
    if survey.rails.is_empty() && survey.refused.is_empty() {
        let text = "No rail is usable: no RDMA device is visible. In a container: --device /dev/infiniband and --network host.";
        return folded("", text);
    }
    let mut page = if survey.rails.is_empty() {
        nothing_usable(survey)
    } else {
        merged(survey)
    };
    for warning in &survey.warnings {
        page += &folded("  ", &format!("WARNING: {warning}"));
    }
    page.push('\n');
    for rail in &survey.rails {
        page += &rail_text(rail, survey);
    }
    for refused in &survey.refused {
        page += &refused_text(refused);
    }
    if !survey.links.is_empty() {
        page.push('\n');
    }
    for (at, link) in survey.links.iter().enumerate() {
        page += &folded("  ", &link_text(at, link));
    }
    page
}

fn merged(survey: &Survey) -> String {
    let names: Vec<String> = survey
        .rails
        .iter()
        .map(|rail| format!("{}:{}", rail.device, rail.port))
        .collect();
    let verdict = match names.as_slice() {
        [name] => format!("1 rail is usable: {name}"),
        _ => format!(
            "{} rails are merged into one device: {}",
            names.len(),
            names.join(", ")
        ),
    };
    let payload = survey.payload();
    let limit = match payload.limit {
        Limit::Nothing => "no port",
        Limit::Cables => "the cables",
        Limit::PcieLinks => "the PCIe links",
    };
    let rate = gbps(payload.mbps);
    let bytes_rate = f64::from(payload.mbps) / 8_000.0;
    let expected =
        format!("expected payload: {rate} ({bytes_rate:.1} GB/s) each way, limited by {limit}");
    let announced = format!(
        "announced to NCCL: one device of {} Mb/s",
        survey.speed_mbps
    );
    [verdict, expected, announced]
        .iter()
        .map(|line| folded("  ", line))
        .collect()
}

fn nothing_usable(survey: &Survey) -> String {
    let mut obstacles: Vec<(&Obstacle, Vec<String>)> = Vec::new();
    for Refused {
        device,
        port,
        obstacle,
        ..
    } in &survey.refused
    {
        let name = format!("{device}:{port}");
        match obstacles.iter_mut().find(|(known, _)| *known == obstacle) {
            Some((_, names)) => names.push(name),
            None => obstacles.push((obstacle, vec![name])),
        }
    }
    let mut page = "No rail is usable:\n".to_owned();
    for (obstacle, names) in obstacles {
        page += &folded(
            "    ",
            &format!("  {}: {obstacle}", list(names.iter().map(String::as_str))),
        );
    }
    page
}

fn rail_text(rail: &Rail, survey: &Survey) -> String {
    let twin = rail
        .twin
        .map(|at| format!(", twin of {}", survey.rails[at].device))
        .unwrap_or_default();
    let addresses: Vec<String> = rail.addresses.iter().map(address_text).collect();
    let mut parts = place(
        rail.netdev.as_deref(),
        rail.phys_port.as_deref(),
        rail.pci.as_ref(),
    );
    parts.push(gbps(rail.speed_mbps));
    parts.push(format!("path MTU {}", rail.path_mtu_bytes));
    let cable = survey.cable_name(rail);
    let head = format!(
        "{}:{}  used: cable {cable}, PCIe link {}{twin}",
        rail.device, rail.port, rail.link
    );
    [
        folded("    ", &head),
        indented(&parts.join(", ")),
        indented(&addresses.join(", ")),
    ]
    .concat()
}

fn refused_text(refused: &Refused) -> String {
    let head = format!(
        "{}:{}  not used: {}",
        refused.device, refused.port, refused.obstacle
    );
    let parts = place(
        refused.netdev.as_deref(),
        refused.phys_port.as_deref(),
        refused.pci.as_ref(),
    );
    folded("    ", &head) + &indented(&parts.join(", "))
}

fn place(netdev: Option<&str>, phys_port: Option<&str>, pci: Option<&PciFunction>) -> Vec<String> {
    let physical = phys_port
        .map(|name| format!(" ({name})"))
        .unwrap_or_default();
    let mut parts = vec![format!(
        "{}{physical}",
        netdev.unwrap_or("no visible interface")
    )];
    parts.extend(pci.map(|pci| match pci.is_virtual {
        true => format!("PCI {} (VF of {}.{})", pci.address, pci.slot, pci.function),
        false => format!("PCI {}", pci.address),
    }));
    parts.extend(pci.and_then(|pci| pci.current).map(|rate| rate.to_string()));
    parts
}

fn address_text(address: &RailAddress) -> String {
    let ip: IpAddr = Ipv6Addr::from(address.gid).to_canonical();
    let prefix = address
        .prefix
        .map(|prefix| format!("/{prefix}"))
        .unwrap_or_default();
    format!("{ip}{prefix} (GID {})", address.gid_index)
}

fn link_text(at: usize, link: &PcieLink) -> String {
    let devices = link.devices.join(", ");
    let (Some(slot), Some(rate), Some(payload_mbps)) = (&link.slot, link.rate, link.payload_mbps)
    else {
        return format!("PCIe link {at}: unknown, so the port's speed counts; {devices}");
    };
    let shared = if link.devices.len() > 1 {
        "shared by "
    } else {
        ""
    };
    format!(
        "PCIe link {at}: {slot} {rate}, carries {}; {shared}{devices}",
        gbps(payload_mbps)
    )
}

/// Width of the narrowest supported terminal.
const COLUMNS: usize = 80;

fn indented(text: &str) -> String {
    folded("    ", &format!("    {text}"))
}

fn folded(indent: &str, text: &str) -> String {
    wrapped(COLUMNS, indent, text)
}

/// Wraps `text` at `columns`. Later lines begin with `indent`. Words are never cut.
pub fn wrapped(columns: usize, indent: &str, text: &str) -> String {
    let mut page = String::new();
    let mut line = text.chars().take_while(|c| *c == ' ').collect::<String>();
    let mut is_empty = true;
    // Two spaces in a row give an empty word, so both spaces are kept.
    for word in text.trim_start().split(' ') {
        let width = line.chars().count() + usize::from(!is_empty) + word.chars().count();
        if !is_empty && width > columns {
            page += line.trim_end();
            page.push('\n');
            line = indent.to_owned();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line += word;
        is_empty = false;
    }
    page + line.trim_end() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_folded_between_words() {
        let words = "word ".repeat(30);
        let text = folded("    ", &format!("  {words}"));
        assert!(
            text.lines().count() == 2 && text.lines().all(|line| line.len() <= COLUMNS),
            "{text}"
        );
        assert!(
            text.starts_with("  word word") && text.lines().nth(1).unwrap().starts_with("    word"),
            "{text}"
        );
        assert_eq!(text.split_whitespace().count(), 30);
        let long = "x".repeat(100);
        assert_eq!(
            folded("  ", &format!("a {long} b")),
            format!("a\n  {long}\n  b\n")
        );
        assert_eq!(folded("", "a:1  used"), "a:1  used\n");
        assert_eq!(wrapped(10, "  ", "one two three"), "one two\n  three\n");
    }
}
