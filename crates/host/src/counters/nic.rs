//! Readings of the counters of a NIC's port. Their names are in [`crate::nic`].
//!
//! Reading a counter can block in the device's driver, so the service thread reads none. Counters
//! that a driver lacks are left out.

use crate::error::grouped;
use crate::nic::{Meaning, watched_counters};
use std::collections::BTreeMap;
use std::path::Path;

/// Values of a port's counters, by name.
pub type PortCounters = BTreeMap<String, u64>;

/// One lost packet in this number of packets is tolerable. More losses slow a rail down: each loss
/// costs a retransmission of about 100 us, on a link that sends 3 million packets of 4 KiB a
/// second.
pub const TOLERATED_LOSS_ONE_IN: u64 = 100_000;
/// Fewer lost packets than this are not reported, because they are too few to compute a loss rate.
const MIN_LOST: u64 = 10;

/// Returns true for a counter of errors or congestion.
pub fn is_error(name: &str) -> bool {
    let mut known = watched_counters();
    known.any(|one| one.name == name && !PACKETS.contains(&one.meaning))
}

/// Returns true for a counter of errors, congestion or packets.
pub fn is_known(name: &str) -> bool {
    watched_counters().any(|known| known.name == name)
}

const PACKETS: [Meaning; 2] = [Meaning::PacketsSent, Meaning::PacketsReceived];

/// The reason why a port has no counters.
pub const NONE: &str = "sysfs has them only in the host's network namespace (docker run --network host, hostNetwork: true)";

/// Returns true if sysfs shows the port, but no counter. The kernel makes counters only in the
/// first network namespace (`is_full_dev` in drivers/infiniband/core/sysfs.c).
pub fn has_none(sysfs: &Path, device: &str, port: u8) -> bool {
    let port = sysfs
        .join("class/infiniband")
        .join(device)
        .join("ports")
        .join(port.to_string());
    port.exists() && !port.join("counters").exists() && !port.join("hw_counters").exists()
}

/// Reads those counters of a port whose names `wanted` accepts. `sysfs` is the mount point of
/// sysfs.
pub fn read(sysfs: &Path, device: &str, port: u8, wanted: impl Fn(&str) -> bool) -> PortCounters {
    let port = sysfs
        .join("class/infiniband")
        .join(device)
        .join("ports")
        .join(port.to_string());
    let folders = ["counters", "hw_counters"].map(|kind| std::fs::read_dir(port.join(kind)));
    let value = |entry: std::fs::DirEntry| {
        let name = entry
            .file_name()
            .into_string()
            .ok()
            .filter(|name| wanted(name))?;
        // mlx5 refuses to read a counter that its firmware does not have.
        Some((
            name,
            std::fs::read_to_string(entry.path())
                .ok()?
                .trim()
                .parse()
                .ok()?,
        ))
    };
    folders
        .into_iter()
        .flatten()
        .flatten()
        .flatten()
        .filter_map(value)
        .collect()
}

/// Returns the growth of each counter that has grown since `start`. A counter below its value in
/// `start` began again at 0, because its device left and returned. A counter that `start` lacks is
/// left out.
pub fn growth(start: &PortCounters, now: &PortCounters) -> PortCounters {
    let gained = |(name, value): (&String, &u64)| {
        let start = start.get(name)?;
        Some((name.clone(), value.checked_sub(*start).unwrap_or(*value)))
    };
    now.iter()
        .filter_map(gained)
        .filter(|(_, gained)| *gained > 0)
        .collect()
}

/// Returns the growth of the counters of errors and congestion as text:
/// "12 out_of_sequence, 4,830 packet_seq_err". `None` if none of these counters has grown.
pub fn errors_text(growth: &PortCounters) -> Option<String> {
    let errors = growth.iter().filter(|(name, _)| is_error(name));
    let texts: Vec<String> = errors
        .map(|(name, count)| format!("{} {name}", grouped(*count)))
        .collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// Returns the lost packets as "4,830 of 1,000,000 sent packets", for each direction in which more
/// than one packet in [`TOLERATED_LOSS_ONE_IN`] was lost, and at least `MIN_LOST` packets. `None`
/// if there is no such direction.
pub fn losses_text(growth: &PortCounters) -> Option<String> {
    let sum = |meaning| {
        watched_counters()
            .filter(|counter| counter.meaning == meaning)
            .filter_map(|counter| growth.get(counter.name))
            .fold(0, |sum: u64, n| sum.saturating_add(*n))
    };
    let text = |(direction, lost, packets): (&str, Meaning, Meaning)| {
        let (lost, packets) = (sum(lost), sum(packets));
        let is_too_high =
            lost >= MIN_LOST && packets > 0 && lost.saturating_mul(TOLERATED_LOSS_ONE_IN) > packets;
        is_too_high.then(|| {
            format!(
                "{} of {} {direction} packets",
                grouped(lost),
                grouped(packets)
            )
        })
    };
    let directions = [
        ("sent", Meaning::LostSent, Meaning::PacketsSent),
        ("received", Meaning::LostReceived, Meaning::PacketsReceived),
    ];
    let texts: Vec<String> = directions.into_iter().filter_map(text).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// File names of a port's counters, by driver and kernel version. mlx5's names are from the
    /// tables of counters.c, and from `port_attrs` in drivers/infiniband/core/sysfs.c. Optional
    /// counters (`IB_STAT_FLAG_OPTIONAL`) have no file. Linux 6.11 added two counters. soft-RoCE's
    /// (rxe's) names are from rxe_hw_counters.c. Its ports lack a performance management agent
    /// (PMA), so they have no folder `counters`.
    const MLX5_PORT: &str = "excessive_buffer_overrun_errors link_downed link_error_recovery \
        local_link_integrity_errors multicast_rcv_packets multicast_xmit_packets port_rcv_constraint_errors \
        port_rcv_data port_rcv_errors port_rcv_packets port_rcv_remote_physical_errors port_rcv_switch_relay_errors \
        port_xmit_constraint_errors port_xmit_data port_xmit_discards port_xmit_packets port_xmit_wait symbol_error \
        unicast_rcv_packets unicast_xmit_packets VL15_dropped";
    const MLX5_6_1: &str = "duplicate_request implied_nak_seq_err lifespan local_ack_timeout_err \
        np_cnp_sent np_ecn_marked_roce_packets out_of_buffer out_of_sequence packet_seq_err req_cqe_error \
        req_cqe_flush_error req_remote_access_errors req_remote_invalid_request resp_cqe_error resp_cqe_flush_error \
        resp_local_length_error resp_remote_access_errors rnr_nak_retry_err roce_adp_retrans roce_adp_retrans_to \
        roce_slow_restart roce_slow_restart_cnps roce_slow_restart_trans rp_cnp_handled rp_cnp_ignored \
        rx_atomic_requests rx_dct_connect rx_icrc_encapsulated rx_read_requests rx_write_requests";
    const MLX5_6_11_ADDS: &str = " req_transport_retries_exceeded req_rnr_retries_exceeded";
    const RXE: &str = "ack_deferred completer_retry_err duplicate_request lifespan link_downed out_of_seq_request \
        rcvd_pkts rcvd_rnr_err rcvd_seq_err rdma_recvs rdma_sends retry_exceeded_err retry_rnr_exceeded_err send_err \
        send_rnr_err sent_pkts";

    /// Writes the files of a port. The value of each counter is its index in the list plus `add`.
    fn port(folders: [(&str, &str); 2], add: u64) -> tempfile::TempDir {
        let sysfs = tempfile::tempdir().unwrap();
        for (folder, names) in folders.into_iter().filter(|(_, names)| !names.is_empty()) {
            let folder = sysfs
                .path()
                .join("class/infiniband/d0/ports/1")
                .join(folder);
            std::fs::create_dir_all(&folder).unwrap();
            for (at, name) in names.split_whitespace().enumerate() {
                std::fs::write(folder.join(name), format!("{}\n", at as u64 + add)).unwrap();
            }
        }
        sysfs
    }

    fn known(sysfs: &tempfile::TempDir) -> PortCounters {
        read(sysfs.path(), "d0", 1, is_known)
    }

    #[test]
    fn each_drivers_counters_are_found_by_their_names() {
        let names = |hw: &str| {
            known(&port([("counters", MLX5_PORT), ("hw_counters", hw)], 0))
                .into_keys()
                .collect::<Vec<_>>()
                .join(" ")
        };
        let mlx5 = "implied_nak_seq_err local_ack_timeout_err np_cnp_sent out_of_sequence packet_seq_err port_rcv_errors \
            port_rcv_packets port_xmit_discards port_xmit_packets rnr_nak_retry_err rp_cnp_handled rx_icrc_encapsulated";
        assert_eq!(names(MLX5_6_1), mlx5);
        assert_eq!(names(&(MLX5_6_1.to_owned() + MLX5_6_11_ADDS)), mlx5);
        let rxe = port([("counters", ""), ("hw_counters", RXE)], 0);
        let expected =
            "completer_retry_err out_of_seq_request rcvd_pkts rcvd_rnr_err rcvd_seq_err sent_pkts";
        assert_eq!(
            known(&rxe).into_keys().collect::<Vec<_>>().join(" "),
            expected
        );
    }

    #[test]
    fn unreadable_counters_are_left_out() {
        let sysfs = port(
            [
                ("counters", ""),
                ("hw_counters", "packet_seq_err out_of_sequence np_cnp_sent"),
            ],
            5,
        );
        let folder = sysfs.path().join("class/infiniband/d0/ports/1/hw_counters");
        std::fs::write(folder.join("out_of_sequence"), "N/A\n").unwrap();
        std::fs::remove_file(folder.join("np_cnp_sent")).unwrap();
        std::fs::create_dir(folder.join("np_cnp_sent")).unwrap();
        assert_eq!(
            known(&sysfs),
            PortCounters::from([("packet_seq_err".to_owned(), 5)])
        );
        assert!(
            read(sysfs.path(), "d0", 2, is_known).is_empty()
                && read(sysfs.path(), "d1", 1, |_| true).is_empty()
        );
    }

    #[test]
    fn errors_text_lists_counters_that_grew() {
        let counters = |values: [u64; 3]| {
            let names = ["packet_seq_err", "out_of_sequence", "port_xmit_packets"];
            names
                .map(str::to_owned)
                .into_iter()
                .zip(values)
                .collect::<PortCounters>()
        };
        let grown = |start, now| growth(&counters(start), &counters(now));
        let text = errors_text(&grown([10, 7, 0], [4_840, 7, 9_000_000]));
        assert_eq!(text.as_deref(), Some("4,830 packet_seq_err"));
        assert_eq!(
            errors_text(&grown([1, 1, 1], [1, 1, 500])),
            None,
            "packet counters are not errors"
        );
        // The device left and returned, so its counter began again at 0.
        assert_eq!(
            errors_text(&grown([100, 0, 0], [3, 0, 0])).as_deref(),
            Some("3 packet_seq_err")
        );
        let new = growth(&PortCounters::new(), &counters([5, 5, 5]));
        assert!(
            new.is_empty(),
            "without a start value, the growth is not known"
        );
        assert_eq!(
            [999, 1_000, 1_234_567].map(grouped),
            ["999", "1,000", "1,234,567"]
        );
    }

    #[test]
    fn losses_above_one_in_100_000_are_reported() {
        let text = |names: [&str; 2], values: [u64; 2]| {
            losses_text(
                &names
                    .map(str::to_owned)
                    .into_iter()
                    .zip(values)
                    .collect::<PortCounters>(),
            )
        };
        let sent = |values| text(["packet_seq_err", "port_xmit_packets"], values);
        assert_eq!(
            sent([10, 999_999]).as_deref(),
            Some("10 of 999,999 sent packets")
        );
        assert_eq!(
            (sent([10, 1_000_000]), sent([9, 100]), sent([50, 0])),
            (None, None, None)
        );
        assert_eq!(
            sent([u64::MAX, 1]).as_deref(),
            Some("18,446,744,073,709,551,615 of 1 sent packets")
        );
        let received = text(["out_of_seq_request", "rcvd_pkts"], [11, 50_000]);
        assert_eq!(received.as_deref(), Some("11 of 50,000 received packets"));
        // A pulled cable causes timeouts, which do not count as losses.
        assert_eq!(
            text(["local_ack_timeout_err", "port_xmit_packets"], [100, 1_000]),
            None
        );
    }
}
