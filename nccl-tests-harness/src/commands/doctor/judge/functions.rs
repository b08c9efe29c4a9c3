//! Findings about the RDMA functions: about each alone, and about their differences.

use super::cures::{group_by_key, list, singular_or_plural};
use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::id::Id;
use crate::commands::doctor::look::{Facts, Function, PcieErrorCounts};
use nccl_net_spark::rails::PciFunction;

pub(super) fn judge(facts: &Facts, found: &mut Vec<Finding>) {
    let rails: Vec<&Function> = facts
        .functions
        .iter()
        .filter(|function| function.is_rail)
        .collect();
    transactions(&rails, found);
    pcie_errors(facts, found);
    pause(facts, &rails, found);
    firmware(&facts.functions, found);
    absent(facts, found);
}

/// Maximum PCIe payload on every Spark that was examined (16 machines of four makers). The maximum
/// read request has the same size on all of them.
const USUAL_TRANSACTION_BYTES: u32 = 512;

fn transactions(rails: &[&Function], found: &mut Vec<Finding>) {
    type Size = fn(&PciFunction) -> Option<u32>;
    let kinds: [(&str, Id, Size); 2] = [
        ("payload", Id::PciePayload, |pci| pci.max_payload_bytes),
        ("read request", Id::PcieReadRequest, |pci| {
            pci.max_read_request_bytes
        }),
    ];
    let own = || rails.iter().filter(|rail| rail.is_mellanox());
    for (name, id, size) in kinds {
        for (bytes, devices) in group_by_key(
            own().filter_map(|rail| Some((size(rail.pci.as_ref()?), rail.device.as_str()))),
        ) {
            let Some(bytes) = bytes.filter(|bytes| *bytes < USUAL_TRANSACTION_BYTES) else {
                continue;
            };
            let text = format!(
                "the largest PCIe {name} of {} is {bytes} bytes, where Sparks have {USUAL_TRANSACTION_BYTES}: each transaction's header \
                 costs more",
                list(&devices)
            );
            found.push(
                id.finding(text)
                    .cured_by("sudo fwupdmgr update && sudo reboot"),
            );
        }
    }
}

fn pcie_errors(facts: &Facts, found: &mut Vec<Finding>) {
    let rails = facts.functions.iter().filter(|function| function.is_rail);
    for (rail, pci) in rails.filter_map(|rail| Some((rail, rail.pci.as_ref()?))) {
        counted(
            &format!("{} ({})", rail.device, pci.address),
            rail.aer,
            found,
        );
    }
    for port in &facts.ports {
        let below = match port.devices.is_empty() {
            true => "without an RDMA device below it".to_owned(),
            false => format!("above {}", list(&port.devices)),
        };
        counted(
            &format!("the PCIe port {} ({below})", port.address),
            port.aer,
            found,
        );
    }
    if let Some(last) = facts.pcie_log.last() {
        let count = facts.pcie_log.len();
        let lines = singular_or_plural(&facts.pcie_log, "line", "lines");
        let text = format!(
            "the kernel log has {count} {lines} about uncorrected PCIe errors of the NIC, the last: {last}"
        );
        let cure = "sudo reboot    # if they come back: power off, re-seat the cable; then it is the hardware";
        found.push(Id::PcieLog.finding(text).cured_by(cure));
    }
}

/// Finds PCIe errors of one device. Corrected errors cost bandwidth; a few are ordinary at
/// power-up. An uncorrected error has aborted a transfer.
fn counted(device: &str, aer: Option<PcieErrorCounts>, found: &mut Vec<Finding>) {
    const ORDINARY: u64 = 100;
    let Some(aer) = aer else { return };
    let cure = "sudo dmesg | grep -i aer    # then power off, re-seat the cable; if they come back: the hardware";
    let (id, count) = if aer.fatal + aer.nonfatal > 0 {
        (
            Id::PcieUncorrected,
            format!("{} fatal and {} other uncorrected", aer.fatal, aer.nonfatal),
        )
    } else if aer.correctable > ORDINARY {
        (Id::PcieCorrected, format!("{} corrected", aer.correctable))
    } else {
        return;
    };
    let text = format!("{device} has had {count} PCIe errors since boot");
    found.push(id.finding(text).cured_by(cure));
}

/// Finds rails that do not both obey and send pause frames. Without pause frames the receiving NIC,
/// here or at the peer, drops packets that its PCIe link does not take in time. Each loss costs a
/// retransmission. PFC on RoCE's priority replaces pause frames.
fn pause(facts: &Facts, rails: &[&Function], found: &mut Vec<Finding>) {
    let has_pfc = |device: &str| {
        let qos = facts.qos.rails.iter().find(|qos| qos.device == device);
        qos.is_some_and(|qos| {
            qos.port.has_pfc(
                qos.port
                    .priority(facts.qos.roce.traffic_class, facts.qos.roce.service_level),
            )
        })
    };
    let without = rails
        .iter()
        .filter(|rail| !has_pfc(&rail.device))
        .filter_map(|rail| {
            let pause = rail.pause.filter(|pause| !pause.rx || !pause.tx)?;
            Some((
                (pause.rx, pause.tx),
                (rail.netdev.as_deref()?, rail.device.as_str()),
            ))
        });
    for (takes_and_sends, netdevs) in group_by_key(without) {
        let does = |one, several| singular_or_plural(&netdevs, one, several);
        let which = match takes_and_sends {
            (false, false) => does("neither takes nor sends", "neither take nor send"),
            (false, true) => does("does not take", "do not take"),
            _ => does("does not send", "do not send"),
        };
        let names: Vec<String> = netdevs
            .iter()
            .map(|(netdev, device)| format!("{netdev} ({device})"))
            .collect();
        let text = format!(
            "{} {which} pause frames: what the peer's link cannot take in time is dropped",
            list(&names)
        );
        let cures: Vec<String> = netdevs
            .iter()
            .map(|(netdev, _)| format!("sudo ethtool -A {netdev} rx on tx on"))
            .collect();
        found.push(Id::NoPause.finding(text).cured_by(cures.join(" && ")));
    }
}

fn firmware(functions: &[Function], found: &mut Vec<Finding>) {
    let own = functions.iter().filter(|one| one.is_mellanox());
    let versions =
        group_by_key(own.filter_map(|one| Some((one.firmware.as_deref()?, one.device.as_str()))));
    if versions.len() > 1 {
        let texts: Vec<String> = versions
            .iter()
            .map(|(version, devices)| format!("{version} ({})", list(devices)))
            .collect();
        let text = format!("the functions run different firmware: {}", list(&texts));
        let cure =
            "sudo fwupdmgr update && sudo poweroff    # then the power cable out for a minute";
        found.push(Id::FirmwareDiffers.finding(text).cured_by(cure));
    }
}

/// Finds a Spark with fewer than four functions of its NIC. The functions of a port without a cable
/// may be absent.
fn absent(facts: &Facts, found: &mut Vec<Finding>) {
    let is_spark = facts
        .machine
        .product
        .as_deref()
        .is_some_and(|product| product.contains("Spark"))
        || facts
            .functions
            .iter()
            .any(|one| one.board.as_deref() == Some(SPARK_BOARD));
    let count = facts
        .functions
        .iter()
        .filter(|one| one.is_mellanox())
        .count();
    if is_spark && (1..4).contains(&count) {
        let text = format!(
            "{count} of the 4 functions of a Spark's NIC are there; those of a port without a cable may be absent"
        );
        found.push(Id::FunctionsAbsent.finding(text).cured_by("lspci -d 15b3:"));
    }
}

/// Board id of a Spark's ConnectX-7, from owners' `ibstat` output.
const SPARK_BOARD: &str = "NVD0000000087";
