//! Findings about the RDMA functions: about each alone, and about their differences.

use super::cures::{each, group_by_key, list, singular_or_plural};
use crate::commands::doctor::finding::Finding;
use crate::commands::doctor::finding::{Kind, kinds};
use crate::commands::doctor::look::{Facts, Function, PcieErrorCounts};
use host::nic::{NICS, Nic};
use host::rails::PciFunction;

kinds! {
    PCIE_PAYLOAD = Slow "pcie-payload": "PCIe transactions are smaller than on other Sparks", "a BIOS update";
    PCIE_READ_REQUEST = Slow "pcie-read-request": "PCIe read requests are smaller than on other Sparks", "a BIOS update";
    PCIE_UNCORRECTED = Fragile "pcie-uncorrected": "a PCIe link has had errors that were not corrected", "power off, re-seat the cable; else the hardware";
    PCIE_CORRECTED = Fragile "pcie-corrected": "a PCIe link has corrected many errors", "as for `pcie-uncorrected`";
    PCIE_LOG = Fragile "pcie-log": "the kernel log has lines about uncorrected PCIe errors of the NIC or of the ports above it", "reboot, then as for `pcie-uncorrected`";
    NO_PAUSE = Fragile "no-pause": "pause frames are off", "[switches.md](switches.md#pause-or-pfc)";
    FIRMWARE_DIFFERS = Fragile "firmware-differs": "the functions run different firmware", "`fwupdmgr update`, then the power cable out for a minute";
    FUNCTIONS_ABSENT = Note "functions-absent": "functions of a Spark's NIC are absent", "nothing if a port has no cable; else `lspci -d 15b3:`, `hotplug`";
}

pub(super) fn judge(facts: &Facts, found: &mut Vec<Finding>) {
    let rails: Vec<&Function> = facts
        .functions
        .iter()
        .filter(|function| function.is_rail)
        .collect();
    let nic = spark_nic(facts);
    if let Some(nic) = nic {
        transactions(nic, &rails, found);
    }
    pcie_errors(facts, found);
    pause(facts, &rails, found);
    firmware(&facts.functions, found);
    if let Some(nic) = nic {
        absent(nic, facts, found);
    }
}

fn transactions(nic: &Nic, rails: &[&Function], found: &mut Vec<Finding>) {
    let usual_bytes = nic.transaction_bytes;
    type Size = fn(&PciFunction) -> Option<u32>;
    let kinds: [(&str, &'static Kind, Size); 2] = [
        ("payload", PCIE_PAYLOAD, |pci| pci.max_payload_bytes),
        ("read request", PCIE_READ_REQUEST, |pci| {
            pci.max_read_request_bytes
        }),
    ];
    let own = || rails.iter().filter(|rail| rail.is_mellanox());
    for (name, id, size) in kinds {
        for (bytes, devices) in group_by_key(
            own().filter_map(|rail| Some((size(rail.pci.as_ref()?), rail.device.as_str()))),
        ) {
            let Some(bytes) = bytes.filter(|bytes| *bytes < usual_bytes) else {
                continue;
            };
            let text = format!(
                "the largest PCIe {name} of {} is {bytes} bytes, where Sparks have {usual_bytes}: each transaction's header \
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
    let log = &facts.kernel_log.pcie;
    if let Some(last) = log.last() {
        let count = log.len();
        let lines = singular_or_plural(log, "line", "lines");
        let text = format!(
            "the kernel log has {count} {lines} about uncorrected PCIe errors of the NIC, the last: {last}"
        );
        let cure = "sudo reboot    # if they come back: power off, re-seat the cable; then it is the hardware";
        found.push(PCIE_LOG.finding(text).cured_by(cure));
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
            PCIE_UNCORRECTED,
            format!("{} fatal and {} other uncorrected", aer.fatal, aer.nonfatal),
        )
    } else if aer.correctable > ORDINARY {
        (PCIE_CORRECTED, format!("{} corrected", aer.correctable))
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
        let on = each(&netdevs, |(netdev, _)| {
            format!("sudo ethtool -A {netdev} rx on tx on")
        });
        let finding = NO_PAUSE
            .finding(text)
            .cured_by("nccl-spark env --for systemd | sudo sh    # PFC in their place, on both hosts; not during a job")
            .until_boot_by(on);
        found.push(finding);
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
        found.push(FIRMWARE_DIFFERS.finding(text).cured_by(cure));
    }
}

/// Finds a Spark without some functions of its NIC. The functions of a port without a cable may be
/// absent.
fn absent(nic: &Nic, facts: &Facts, found: &mut Vec<Finding>) {
    let count = facts
        .functions
        .iter()
        .filter(|one| one.is_mellanox())
        .count();
    if (1..nic.functions).contains(&count) {
        let text = format!(
            "{count} of the {} functions of a Spark's NIC are there; those of a port without a cable may be absent",
            nic.functions
        );
        found.push(FUNCTIONS_ABSENT.finding(text).cured_by("lspci -d 15b3:"));
    }
}

/// Returns the model of this Spark's NIC; `None` if the machine is no Spark.
pub(super) fn spark_nic(facts: &Facts) -> Option<&'static Nic> {
    let has_board = |nic: &&Nic| {
        let mut functions = facts.functions.iter();
        functions.any(|one| one.board.as_deref() == Some(nic.board_id))
    };
    let product = facts.machine.product.as_deref();
    let is_spark = product.is_some_and(|product| product.contains("Spark"));
    let known = NICS.iter().find(has_board);
    known.or_else(|| NICS.first().filter(|_| is_spark))
}

/// Each row plants one fault in a healthy machine: name, how, severity, id, words of the finding,
/// and a part of its commands.
#[cfg(test)]
pub mod faults {
    use crate::commands::doctor::tests::bed::KERNEL_LOG;
    use crate::commands::doctor::tests::faults::{faults, one, with};

    faults! {
        "a PCIe payload of 128 bytes": with(one(), |bed| bed.transactions("rocep1s0f0", 0, 2)) => Slow "pcie-payload" ["rocep1s0f0", "128"] "fwupdmgr";
        "a PCIe read request of 256 bytes": with(one(), |bed| bed.transactions("rocep1s0f0", 2, 1)) =>
            Slow "pcie-read-request" ["rocep1s0f0", "256"] "fwupdmgr";
        "corrected PCIe errors": with(one(), |bed| bed.pci("rocep1s0f0", "aer_dev_correctable", "TOTAL_ERR_COR 5000\n")) =>
            Fragile "pcie-corrected" ["rocep1s0f0 (0000:01:00.0)", "5000 corrected"] "dmesg";
        "an uncorrected PCIe error at the root port": with(one(), |bed| {
            bed.write("sys/devices/pci0002:00/0002:00:00.0/aer_dev_nonfatal", "TOTAL_ERR_NONFATAL 1\n");
        }) => Fragile "pcie-uncorrected" ["port 0002:00:00.0", "above roceP2p1s0f0 and roceP2p1s0f1", "0 fatal and 1 other"] "dmesg";
        "a fatal PCIe error of a function": with(one(), |bed| bed.pci("rocep1s0f0", "aer_dev_fatal", "TOTAL_ERR_FATAL 1\n")) =>
            Fragile "pcie-uncorrected" ["rocep1s0f0 (0000:01:00.0)", "1 fatal"] "dmesg";
        "fatal PCIe errors in the kernel log": with(one(), |bed| bed.write("dev/kmsg", &format!("{KERNEL_LOG}\
3,993,9134567,-;pcieport 0000:00:00.0: AER: Uncorrectable (Fatal) error message received from 0000:01:00.0
 SUBSYSTEM=pci
3,994,9134600,-;mlx5_core 0000:01:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer, (Requester ID)
3,999,9934567,-;pcieport 0000:00:00.0: AER: device recovery failed
"))) => Fragile "pcie-log" ["3 lines", "pcieport 0000:00:00.0: AER: device recovery failed"] "reboot";
        "pause frames off": with(one(), |bed| bed.replace("answers/ethtool-a/enp1s0f0np0", "RX:\t\ton\nTX:\t\ton", "RX:\t\toff\nTX:\t\toff")) =>
            Fragile "no-pause" ["enp1s0f0np0"] "ethtool -A enp1s0f0np0 rx on tx on";
        "one function with other firmware": with(one(), |bed| bed.write("sys/class/infiniband/rocep1s0f1/fw_ver", "28.43.1000\n")) =>
            Fragile "firmware-differs" ["28.43.1000 (rocep1s0f1)"] "fwupdmgr";
        "functions that are absent": with(one(), |bed| {
            for path in ["sys/class/infiniband/rocep1s0f1", "sys/class/infiniband/roceP2p1s0f1"] {
                bed.remove(path);
            }
        }) => Note "functions-absent" ["2 of the 4"] "lspci";
    }
}
