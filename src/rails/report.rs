//! The survey as a page for a person.

use super::advice::gbps;
use super::pcie::ASSUMED_MAX_PAYLOAD_BYTES;
use super::{Limit, PciFunction, PcieLink, Rail, RailAddress, Refused, Survey};
use std::fmt::Write;
use std::net::{IpAddr, Ipv6Addr};

/// All ports in a table with the reason why each is in or out, the PCIe links, the rate to expect and what limits it,
/// and the warnings.
pub fn report(survey: &Survey) -> String {
    let mut page = String::new();
    let rails = survey.rails.iter().map(|rail| rail_row(rail, survey));
    let rows: Vec<Row> = rails.chain(survey.refused.iter().map(refused_row)).collect();
    if rows.is_empty() {
        return "No RDMA device is visible. In a container: --device /dev/infiniband, and --network host.\n".to_owned();
    }
    table(&mut page, &rows);
    page.push('\n');
    for (at, link) in survey.links.iter().enumerate() {
        line(&mut page, format_args!("{}", link_text(at, link, survey)));
    }
    expected(&mut page, survey);
    if !survey.warnings.is_empty() {
        page.push('\n');
    }
    for warning in &survey.warnings {
        line(&mut page, format_args!("WARNING: {warning}"));
    }
    page
}

const COLUMNS: usize = 9;
const HEADINGS: [&str; COLUMNS] =
    ["DEVICE", "PORT", "NETDEV", "PHYSICAL", "PCI", "LINK", "MTU", "SPEED", "ADDRESSES (GID INDEX)"];

struct Row {
    cells: [String; COLUMNS],
    verdict: String,
}

fn rail_row(rail: &Rail, survey: &Survey) -> Row {
    let twin = rail.twin.map(|at| format!(", twin of {}", survey.rails[at].device)).unwrap_or_default();
    let addresses: Vec<String> = rail.addresses.iter().map(address_text).collect();
    Row {
        cells: [
            rail.device.clone(),
            rail.port.to_string(),
            or_dash(rail.netdev.clone()),
            or_dash(rail.phys_port.clone()),
            pci_text(rail.pci.as_ref()),
            or_dash(rail.pci.as_ref().and_then(|pci| pci.current).map(|rate| rate.to_string())),
            rail.path_mtu_bytes.to_string(),
            gbps(rail.speed_mbps),
            addresses.join(" "),
        ],
        verdict: format!("in: cable {}, link {}{twin}", rail.cable, rail.link),
    }
}

fn refused_row(refused: &Refused) -> Row {
    let dash = || "-".to_owned();
    Row {
        cells: [
            refused.device.clone(),
            refused.port.to_string(),
            or_dash(refused.netdev.clone()),
            or_dash(refused.phys_port.clone()),
            pci_text(refused.pci.as_ref()),
            or_dash(refused.pci.as_ref().and_then(|pci| pci.current).map(|rate| rate.to_string())),
            dash(),
            dash(),
            dash(),
        ],
        verdict: format!("out: {}", refused.reason),
    }
}

fn pci_text(pci: Option<&PciFunction>) -> String {
    match pci {
        Some(pci) if pci.is_virtual => format!("{} (VF of {}.{})", pci.address, pci.slot, pci.function),
        Some(pci) => pci.address.clone(),
        None => "none".to_owned(),
    }
}

fn address_text(address: &RailAddress) -> String {
    let ip: IpAddr = Ipv6Addr::from(address.gid).to_canonical();
    let prefix = address.prefix.map(|prefix| format!("/{prefix}")).unwrap_or_default();
    format!("{ip}{prefix} ({})", address.gid_index)
}

fn or_dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn table(page: &mut String, rows: &[Row]) {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row.cells[column].len());
        cells.chain([HEADINGS[column].len()]).max().unwrap_or(0)
    };
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut put = |cells: [&str; COLUMNS], verdict: &str| {
        for (cell, width) in cells.iter().zip(widths) {
            page.push_str(cell);
            page.extend(std::iter::repeat_n(' ', width - cell.len() + 2));
        }
        page.push_str(verdict);
        page.push('\n');
    };
    put(HEADINGS, "VERDICT");
    for row in rows {
        put(std::array::from_fn(|column| row.cells[column].as_str()), &row.verdict);
    }
}

fn link_text(at: usize, link: &PcieLink, survey: &Survey) -> String {
    let (Some(slot), Some(rate), Some(payload_mbps)) = (&link.slot, link.rate, link.payload_mbps) else {
        return format!("link {at}: {}, no PCIe link known: the port's speed counts", link.devices.join(" "));
    };
    let function = survey.rails.iter().find(|rail| rail.link == at).and_then(|rail| rail.pci.as_ref());
    let size = match function.and_then(|function| function.max_payload_bytes) {
        Some(bytes) => format!("{bytes} bytes"),
        None => format!("{ASSUMED_MAX_PAYLOAD_BYTES} bytes, assumed (its setting is readable as root)"),
    };
    let shared = if link.devices.len() > 1 { ", shared by" } else { ":" };
    format!(
        "link {at}: {slot} {rate}{shared} {}; carries {} of payload in transactions of {size}",
        link.devices.join(" "),
        gbps(payload_mbps),
    )
}

fn expected(page: &mut String, survey: &Survey) {
    let payload = survey.payload();
    let limit = match payload.limit {
        Limit::Nothing => {
            line(page, format_args!("expected: nothing, no port is usable"));
            return;
        }
        Limit::Cables => "the cables, less RoCE framing",
        Limit::PcieLinks => "PCIe",
    };
    line(
        page,
        format_args!(
            "expected: {} ({:.1} GB/s) each way over {} rail{}, limited by {limit}",
            gbps(payload.mbps),
            f64::from(payload.mbps) / 8_000.0,
            survey.rails.len(),
            if survey.rails.len() == 1 { "" } else { "s" },
        ),
    );
    line(page, format_args!("announced to NCCL: one device, speed {} Mb/s", survey.speed_mbps));
}

fn line(page: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(page, "{text}");
}
