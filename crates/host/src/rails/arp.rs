//! Warns if a peer's ARP request for a rail's IPv4 address may get another rail's answer, or none.
//!
//! An ARP request is a broadcast, so all functions on one wire receive it. Linux answers the
//! request on every interface for every address of the host, unless `arp_ignore` is set or
//! `rp_filter` rejects the answer. The peer's kernel puts the hardware address of one answer into
//! the QP and never changes it (`rdma_addr_find_l2_eth_by_grh`). With a wrong hardware address,
//! packets reach a function that does not have the QP.
//!
//! A switch with all rails in one subnet works: the kernel resolves the address of a QP's peer
//! through the interface of the QP's own address, whatever the routes are. So rails in one subnet
//! cause a warning only if their ARP settings are not known to be right.
//!
//! The table shows which interfaces answered, measured on Linux 6.18 with two interfaces in one
//! namespace and on one bridge. "Right" is the interface that has the requested address:
//!
//! | `rp_filter` | `arp_ignore` | one subnet | a subnet for each |
//! |---|---|---|---|
//! | 0, 2 | 0 | both, for either address | both, for either address |
//! | 0, 2 | 1 | the right one | the right one |
//! | 1 | 0 | the first, for either address | the right one |
//! | 1 | 1 | the first for its own address; none for the second | the right one |

use super::port::ipv4_subnet;
use super::text::list;
use super::{Rail, Warning, WarningKind};
use crate::interfaces::ARP_FIX_COMMAND;
use std::path::Path;

pub(super) struct Arp<'a> {
    known: Vec<(&'a Rail, ArpSettings)>,
}

impl<'a> Arp<'a> {
    /// Reads the ARP settings of the rails. `proc_sys` is the folder of the kernel's settings
    /// ("/proc/sys").
    pub(super) fn read(proc_sys: &Path, rails: &'a [Rail]) -> Self {
        Self {
            known: rails
                .iter()
                .filter_map(|rail| Some((rail, ArpSettings::read(proc_sys, rail)?)))
                .collect(),
        }
    }

    /// Returns one warning for the whole host, with the cure. Returns `None` if every rail's
    /// settings are right or cannot be read.
    pub(super) fn warning(&self) -> Option<Warning> {
        let found: Vec<&(&Rail, ArpSettings)> = self
            .known
            .iter()
            .filter(|one| self.has_ambiguous_answers(one))
            .collect();
        if found.is_empty() {
            return None;
        }
        let devices: Vec<&str> = found.iter().map(|(rail, _)| rail.device.as_str()).collect();
        let rails = list(devices.iter().copied());
        // The kernel compares the interface's value with the value of `all`, and uses the larger.
        // So 2 for `all` replaces an interface's strict 1.
        let is_strict = found.iter().any(|(_, settings)| settings.is_strict());
        let loosened = if is_strict {
            " net.ipv4.conf.all.rp_filter=2"
        } else {
            ""
        };
        let text = format!(
            "an ARP request for the address of one of {rails} may be answered by another of them, or not at all (arp_ignore, rp_filter), and \
             packets to that address are lost; run {ARP_FIX_COMMAND}{loosened} on this host, and write the same settings into a file in \
             /etc/sysctl.d to keep them."
        );
        Some(Warning::new(WarningKind::Arp { is_strict }, devices, text))
    }

    /// Returns true if each rail's addresses are known to be answered by the rail's own interface
    /// and by no other.
    pub(super) fn is_right(&self, rails: &[&Rail]) -> bool {
        let is_well = |rail: &&Rail| {
            let known = self
                .known
                .iter()
                .find(|(other, _)| std::ptr::eq(*other, *rail));
            known.is_some_and(|one| !self.has_ambiguous_answers(one))
        };
        rails.iter().all(is_well)
    }

    fn has_ambiguous_answers(&self, (one, settings): &(&Rail, ArpSettings)) -> bool {
        self.known.iter().any(|(other, others)| {
            !std::ptr::eq(*one, *other)
                && may_answer_for_each_other((one, settings), (other, others))
        })
    }
}

#[derive(Debug, Clone, Copy)]
struct ArpSettings {
    arp_ignore: u32,
    rp_filter: u32,
}

impl ArpSettings {
    /// Reads the settings of a rail's interface. Each is the larger of the interface's value and
    /// the value of `all`, because the kernel uses the larger (`arp_ignore` and `rp_filter` in
    /// Linux' `ip-sysctl` documentation).
    fn read(proc_sys: &Path, rail: &Rail) -> Option<Self> {
        let netdev = rail.netdev.as_deref()?;
        let one = |folder: &str, name: &str| -> Option<u32> {
            let path = proc_sys.join("net/ipv4/conf").join(folder).join(name);
            let text = std::fs::read_to_string(&path).inspect_err(|error| {
                tracing::debug!("{}: ARP settings not known: {error}", path.display())
            });
            text.ok()?.trim().parse().ok()
        };
        let larger = |name| Some(one("all", name)?.max(one(netdev, name)?));
        Some(Self {
            arp_ignore: larger("arp_ignore")?,
            rp_filter: larger("rp_filter")?,
        })
    }

    /// Returns true if the kernel drops a packet unless it arrives on the interface that leads to
    /// the packet's sender (RFC 3704, 2.2).
    fn is_strict(self) -> bool {
        self.rp_filter == 1
    }
}

/// Returns true if a request for an address of rail `one` may get the other rail's answer, or none.
fn may_answer_for_each_other(
    (one, its): (&Rail, &ArpSettings),
    (other, others): (&Rail, &ArpSettings),
) -> bool {
    let either = |holds: fn(ArpSettings) -> bool| holds(*its) || holds(*others);
    let subnets = |rail: &Rail| {
        rail.addresses
            .iter()
            .filter_map(ipv4_subnet)
            .collect::<Vec<_>>()
    };
    let here = subnets(one);
    let there = subnets(other);
    if here.is_empty() || there.is_empty() {
        return false;
    }
    if here.iter().any(|subnet| there.contains(subnet)) {
        return either(|settings| settings.arp_ignore == 0 || settings.is_strict());
    }
    one.cable == other.cable && either(|settings| settings.arp_ignore == 0 && !settings.is_strict())
}
