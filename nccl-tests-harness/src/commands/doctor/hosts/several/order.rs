//! The order of ranks in which each host has a cable to the next, and the last to the first. Found
//! without I/O.

use crate::commands::doctor::hosts::rail::{PairedBy, RailSheet, pairs};
use crate::commands::doctor::hosts::ssh::MOST_HOSTS;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PairCounts {
    rails: Vec<Vec<usize>>,
}

impl PairCounts {
    /// Pairs the hosts' rails by their addresses. Routes do not count, because a route between two
    /// hosts needs no cable between them.
    ///
    /// Rails with only link-local addresses pair by cable ([`PairedBy::Cable`]). Such pairs count
    /// only if there are two hosts. With more hosts, nothing shows to which of the others the
    /// rail's cable leads.
    pub fn of(hosts: &[&[RailSheet]]) -> Self {
        let is_pair = hosts.len() == 2;
        let common = |one: &[RailSheet], other: &[RailSheet]| {
            pairs(one, other, |_, _, _| false)
                .iter()
                .filter(|pair| pair.by == PairedBy::Subnet || is_pair)
                .count()
        };
        let row = |at: usize| {
            (0..hosts.len())
                .map(|to| {
                    if at == to {
                        0
                    } else {
                        common(hosts[at], hosts[to])
                    }
                })
                .collect()
        };
        Self {
            rails: (0..hosts.len()).map(row).collect(),
        }
    }

    pub fn rails(&self, one: usize, other: usize) -> usize {
        // The pairing is asymmetric if a rail serves two rails of the other host.
        self.rails[one][other].max(self.rails[other][one])
    }

    pub fn pairs_without_rails(&self) -> Vec<(usize, usize)> {
        let count = self.rails.len();
        let all = (0..count).flat_map(|one| (one + 1..count).map(move |other| (one, other)));
        all.filter(|(one, other)| self.rails(*one, *other) == 0)
            .collect()
    }

    /// Returns an order in which each host has a rail pair with the next, and the last with the
    /// first. Returns `None` if there is no such order, or for more than `MOST_HOSTS` hosts. The
    /// order starts with the first host and is the lexicographically first valid one.
    ///
    /// Searches over sets of hosts (Held and Karp): at most 2^16 sets of 16 hosts.
    pub fn order(&self) -> Option<Vec<usize>> {
        let count = self.rails.len();
        if count == 0 || count > MOST_HOSTS {
            return None;
        }
        let joins = |one: usize, other: usize| self.rails(one, other) > 0;
        let all = (1_usize << count) - 1;
        // For each set of visited hosts, one bit for each host in it. The bit is set if a path
        // leads from this host through all hosts outside the set, and back to the first host.
        let mut ends = vec![0_u32; all + 1];
        for set in (1..=all).rev() {
            for last in (0..count).filter(|at| set >> at & 1 == 1) {
                let is_end = set == all && (count == 1 || joins(last, 0));
                let goes_on = || (0..count).any(|next| is_next(&ends, set, last, next, &joins));
                if is_end || (set != all && goes_on()) {
                    ends[set] |= 1 << last;
                }
            }
        }
        if ends[1] & 1 == 0 {
            return None;
        }
        let mut order = vec![0];
        let mut set = 1;
        while set != all {
            let last = *order.last()?;
            let next = (0..count).find(|next| is_next(&ends, set, last, *next, &joins))?;
            order.push(next);
            set |= 1 << next;
        }
        Some(order)
    }
}

/// Returns true if a path from `last` through the hosts outside `set` can begin with `next`.
fn is_next(
    ends: &[u32],
    set: usize,
    last: usize,
    next: usize,
    joins: &impl Fn(usize, usize) -> bool,
) -> bool {
    set >> next & 1 == 0 && joins(last, next) && ends[set | 1 << next] >> next & 1 == 1
}

#[cfg(test)]
mod tests;
