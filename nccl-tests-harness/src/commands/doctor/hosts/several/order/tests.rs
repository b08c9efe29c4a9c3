//! Orders of ranks for various cablings.

use super::*;
use std::net::Ipv4Addr;

fn host(number: u8, subnets: &[u8]) -> Vec<RailSheet> {
    let rail = |(at, subnet): (usize, &u8)| RailSheet {
        name: format!("mlx5_{at}:1"),
        netdev: None,
        phys_port: Some(format!("p{}", at / 2)),
        link: (at % 2) as u8,
        link_mbps: 112_000,
        cable: (at / 2) as u8,
        port_mbps: 200_000,
        share_mbps: 56_000,
        mtu_bytes: 4096,
        addresses: vec![(
            Ipv4Addr::new(192, 168, *subnet, number).to_ipv6_mapped(),
            Some(24),
        )],
    };
    subnets.iter().enumerate().map(rail).collect()
}

fn pair_counts(hosts: &[Vec<RailSheet>]) -> PairCounts {
    PairCounts::of(&hosts.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

#[test]
fn two_hosts_with_one_cable_or_two() {
    let one = pair_counts(&[host(1, &[100, 101]), host(2, &[100, 101])]);
    assert_eq!(
        (one.rails(0, 1), one.order(), one.pairs_without_rails()),
        (2, Some(vec![0, 1]), vec![])
    );
    let two = pair_counts(&[
        host(1, &[100, 101, 102, 103]),
        host(2, &[100, 101, 102, 103]),
    ]);
    assert_eq!((two.rails(0, 1), two.rails(1, 0)), (4, 4));
    let apart = pair_counts(&[host(1, &[100]), host(2, &[200])]);
    assert_eq!(
        (apart.order(), apart.pairs_without_rails()),
        (None, vec![(0, 1)])
    );
}

#[test]
fn a_triangle_has_every_order() {
    let found = pair_counts(&[
        host(1, &[1, 2, 3, 4]),
        host(2, &[1, 2, 5, 6]),
        host(3, &[3, 4, 5, 6]),
    ]);
    assert_eq!(
        (found.order(), found.pairs_without_rails()),
        (Some(vec![0, 1, 2]), vec![])
    );
    assert_eq!(
        [(0, 1), (1, 2), (2, 0)].map(|(one, other)| found.rails(one, other)),
        [2; 3]
    );
}

/// The cabling is a-c-b-d: a is opposite b, and c is opposite d.
#[test]
fn a_ring_of_four_is_put_in_the_order_of_its_cables() {
    let a = host(1, &[1, 2, 7, 8]);
    let b = host(2, &[3, 4, 5, 6]);
    let c = host(3, &[1, 2, 3, 4]);
    let d = host(4, &[5, 6, 7, 8]);
    let found = pair_counts(&[a, b, c, d]);
    assert_eq!(found.order(), Some(vec![0, 2, 1, 3]));
    assert_eq!(found.pairs_without_rails(), [(0, 1), (2, 3)]);
}

#[test]
fn a_switch_keeps_the_given_order_and_a_line_has_none() {
    let switch: Vec<_> = (1..=16)
        .map(|number| host(number, &[100, 101, 102, 103]))
        .collect();
    assert_eq!(pair_counts(&switch).order(), Some((0..16).collect()));
    let line = pair_counts(&[host(1, &[1]), host(2, &[1, 2]), host(3, &[2])]);
    assert_eq!(
        (line.order(), line.pairs_without_rails()),
        (None, vec![(0, 2)])
    );
    let islands = pair_counts(&[host(1, &[1]), host(2, &[1]), host(3, &[2]), host(4, &[2])]);
    assert_eq!(
        (islands.order(), islands.pairs_without_rails().len()),
        (None, 4)
    );
    assert_eq!(pair_counts(&[host(1, &[1])]).order(), Some(vec![0]));
}

#[test]
fn link_local_addresses_join_two_hosts_and_decide_nothing_for_three() {
    let local = |number: u8| {
        let mut rails = host(number, &[1]);
        rails[0].addresses = vec![(format!("fe80::{number}").parse().unwrap(), Some(64))];
        rails
    };
    assert_eq!(pair_counts(&[local(1), local(2)]).order(), Some(vec![0, 1]));
    assert_eq!(pair_counts(&[local(1), local(2), local(3)]).order(), None);
}

/// Checks every graph of five hosts: `None` means that no permutation is valid.
#[test]
fn the_first_of_all_valid_orders_is_chosen() {
    fn permutations(rest: &[usize]) -> Vec<Vec<usize>> {
        if rest.is_empty() {
            return vec![Vec::new()];
        }
        let with = |at: usize| {
            let mut others = rest.to_vec();
            let first = others.remove(at);
            permutations(&others)
                .into_iter()
                .map(move |tail| [vec![first], tail].concat())
        };
        (0..rest.len()).flat_map(with).collect()
    }
    let edges: Vec<(usize, usize)> = (0..5)
        .flat_map(|one| (one + 1..5).map(move |other| (one, other)))
        .collect();
    for graph in 0..1 << edges.len() {
        let mut rails = vec![vec![0; 5]; 5];
        for (_, (one, other)) in edges
            .iter()
            .enumerate()
            .filter(|(bit, _)| graph >> bit & 1 == 1)
        {
            (rails[*one][*other], rails[*other][*one]) = (1, 1);
        }
        let found = PairCounts { rails };
        let is_ring =
            |order: &Vec<usize>| (0..5).all(|at| found.rails(order[at], order[(at + 1) % 5]) > 0);
        let all = permutations(&[1, 2, 3, 4])
            .into_iter()
            .map(|tail| [vec![0], tail].concat());
        let first = all.filter(is_ring).min();
        assert_eq!(found.order(), first, "{graph:#b}");
    }
}
