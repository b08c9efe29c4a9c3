//! A drawing of the rails: PCIe links on the left, cables on the right, and the total rate.

use crate::commands::doctor::hosts::rail::name;
use host::rails::{Limit, PcieLink, Rail, Survey, gbps};

/// Returns the lines of the drawing, or none if there is no rail.
pub fn picture(survey: &Survey) -> Vec<String> {
    if survey.rails.is_empty() {
        return Vec::new();
    }
    let width = survey
        .rails
        .iter()
        .map(|rail| name(rail).len())
        .max()
        .unwrap_or(0);
    let left = survey
        .rails
        .iter()
        .map(|rail| link_text(rail, survey).len())
        .max()
        .unwrap_or(0);
    let mut lines = Vec::new();
    for (at, rail) in survey.rails.iter().enumerate() {
        let on_cable: Vec<usize> = (0..survey.rails.len())
            .filter(|other| survey.rails[*other].cable == rail.cable)
            .collect();
        let is_first = on_cable.first() == Some(&at);
        let is_last = on_cable.last() == Some(&at);
        let bracket = match (is_first, is_last) {
            (true, true) => "---",
            (true, false) => "-.",
            (false, true) => "-'",
            (false, false) => "-|",
        };
        let cable = if is_first {
            cable_text(rail, on_cable.len(), survey)
        } else {
            String::new()
        };
        let line = format!(
            "  {:<left$} -- {:<width$} {bracket:<3} {cable}",
            link_text(rail, survey),
            name(rail)
        );
        lines.push(line.trim_end().to_owned());
    }
    let payload = survey.payload();
    let limit = match payload.limit {
        Limit::Nothing => "nothing",
        Limit::Cables => "the cables",
        Limit::PcieLinks => "the PCIe links",
    };
    let bytes = f64::from(payload.mbps) / 8_000.0;
    lines.push(format!(
        "  together: {} ({bytes:.1} GB/s) each way, limited by {limit}",
        gbps(payload.mbps)
    ));
    lines
}

fn link_text(rail: &Rail, survey: &Survey) -> String {
    match survey.links.get(rail.link) {
        Some(PcieLink {
            slot: Some(slot),
            rate: Some(rate),
            payload_mbps: Some(payload),
            ..
        }) => {
            format!("PCIe {slot} {rate} {}", gbps(*payload))
        }
        _ => "PCIe link unknown".to_owned(),
    }
}

fn cable_text(rail: &Rail, rails: usize, survey: &Survey) -> String {
    let alone = if rails == 1 && rail.twin.is_none() {
        " (one rail)"
    } else {
        ""
    };
    format!(
        "cable {}, {}{alone}",
        survey.cable_name(rail),
        gbps(rail.speed_mbps)
    )
}
