//! The order of ranks in which each neighbour, and the first of the last, has a cable. Pure.

use crate::commands::doctor::rail::{RailSheet, pairs};

/// The most hosts that an order is looked for.
pub const MOST: usize = 16;

/// Which hosts have rails in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reach {
    /// For each host by its number, and each other one: how many pairs of rails they have.
    rails: Vec<Vec<usize>>,
}

impl Reach {
    /// By the addresses of the hosts' rails. A pair that only names suggest (both rails have nothing but link-local addresses) counts for
    /// two hosts and for no more: where there are three, such a rail may lead to either of the others.
    pub fn of(hosts: &[&[RailSheet]]) -> Self {
        let is_pair = hosts.len() == 2;
        let common = |one: &[RailSheet], other: &[RailSheet]| {
            pairs(one, other).iter().filter(|pair| pair.shares_subnet || is_pair).count()
        };
        let row =
            |at: usize| (0..hosts.len()).map(|to| if at == to { 0 } else { common(hosts[at], hosts[to]) }).collect();
        Self { rails: (0..hosts.len()).map(row).collect() }
    }

    /// How many pairs of rails two hosts have.
    pub fn rails(&self, one: usize, other: usize) -> usize {
        // Pairing is asked both ways: a rail that serves two is counted from either side.
        self.rails[one][other].max(self.rails[other][one])
    }

    /// The pairs of hosts that have none.
    pub fn apart(&self) -> Vec<(usize, usize)> {
        let count = self.rails.len();
        let all = (0..count).flat_map(|one| (one + 1..count).map(move |other| (one, other)));
        all.filter(|(one, other)| self.rails(*one, *other) == 0).collect()
    }

    /// An order of all hosts in which each has rails in common with the next, and the last with the first: as near to the given order as
    /// there is, beginning with the first host. `None` where there is none.
    ///
    /// By sets of hosts (Held and Karp): at most 2^16 sets of 16 hosts.
    pub fn order(&self) -> Option<Vec<usize>> {
        let count = self.rails.len();
        if count == 0 || count > MOST {
            return None;
        }
        let joins = |one: usize, other: usize| self.rails(one, other) > 0;
        let all = (1_usize << count) - 1;
        // For each set of hosts that were passed: those from which the way through the others ends at the first.
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
        let (mut order, mut set) = (vec![0], 1);
        while set != all {
            let last = *order.last()?;
            let next = (0..count).find(|next| is_next(&ends, set, last, *next, &joins))?;
            order.push(next);
            set |= 1 << next;
        }
        Some(order)
    }
}

/// Whether the way from `last`, with the hosts of `set` behind it, can go on by `next`.
fn is_next(ends: &[u32], set: usize, last: usize, next: usize, joins: &impl Fn(usize, usize) -> bool) -> bool {
    set >> next & 1 == 0 && joins(last, next) && ends[set | 1 << next] >> next & 1 == 1
}

#[cfg(test)]
mod tests;
