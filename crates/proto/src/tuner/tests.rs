use super::*;
use proptest::prelude::*;
use table::{Algorithm, Choice};

const TABLE: &str = "for=NVIDIA_GB10/4x224054/2.28.9;all_reduce@2:1000-1999=ring/ll/2;all_reduce@2:2000-4000=ring/ll128/3;\
                     all_gather@2:1-100=tree/simple/4;all_reduce@3:1-1000000=ring/simple/8";

struct Facts {
    config: TunerConfig,
    ring_tcp: bool,
    host: Fingerprint,
}

impl Facts {
    fn policy(self) -> (Policy, Vec<String>) {
        Policy::new(self.config, self.ring_tcp, &self.host)
    }
}

fn facts() -> Facts {
    let table: Table = TABLE.parse().unwrap();
    let host = table.fingerprint().unwrap().clone();
    let config = TunerConfig {
        mode: Mode::Auto,
        table: Some(table),
        ll128: true,
        network: None,
        tuner_plugin: None,
    };
    Facts {
        config,
        ring_tcp: false,
        host,
    }
}

fn policy(change: impl FnOnce(&mut Facts)) -> Policy {
    let mut facts = facts();
    change(&mut facts);
    facts.policy().0
}

fn reason(tuner: &Tuner) -> &str {
    match tuner {
        Tuner::Inert { reason } => reason,
        Tuner::Acting(_) => "acts",
    }
}

#[test]
fn the_tuner_acts_only_where_it_is_switched_on() {
    let told = |policy: &Policy| policy.to_string();
    assert!(told(&policy(|_| ())).starts_with("learned table of 4 rows, hash "));
    assert_eq!(
        told(&policy(|facts| facts.config.mode = Mode::Off)),
        "off: NCCL_SPARK_TUNER=off"
    );
    let other_gpu = |facts: &mut Facts| facts.host.gpu = "NVIDIA_H200".to_owned();
    assert!(told(&policy(other_gpu)).starts_with("off: the GPU is NVIDIA_H200, not a GB10"));
    for (name, words) in [
        ("none", "off: NCCL_TUNER_PLUGIN=none"),
        ("/x/libnccl-net-spark.so", "learned"),
    ] {
        let named = policy(|facts| facts.config.tuner_plugin = Some(name.to_owned()));
        assert!(told(&named).starts_with(words), "{named}");
    }
    let socket = |facts: &mut Facts| facts.config.network = Some("Socket".to_owned());
    assert!(told(&policy(socket)).contains("NCCL_NET=Socket"));
    assert!(
        told(&policy(
            |facts| facts.config.network = Some("spark".to_owned())
        ))
        .starts_with("learned")
    );
}

#[test]
fn a_table_of_another_machine_is_not_used_and_a_log_line_says_so() {
    let other = Fingerprint {
        nccl: "2.30.7".to_owned(),
        ..facts().host
    };
    let (policy, warnings) = Facts {
        host: other,
        ..facts()
    }
    .policy();
    assert!(policy.to_string().starts_with("shipped table"), "{policy}");
    let told =
        "was learned on NVIDIA_GB10/4x224054/2.28.9, this host is NVIDIA_GB10/4x224054/2.30.7";
    assert!(
        warnings.len() == 1 && warnings[0].contains(told),
        "{warnings:?}"
    );
    // A host with a port down is the same machine, so its hash must equal its peers'.
    let (fewer_rails, warnings) = Facts {
        host: Fingerprint {
            rails: "3x168040".to_owned(),
            ..facts().host
        },
        ..facts()
    }
    .policy();
    assert_eq!(fewer_rails.hash(), facts().policy().0.hash());
    assert!(
        warnings.len() == 1 && warnings[0].contains("used, although the rails differ"),
        "{warnings:?}"
    );
    let mut any = facts();
    any.config.table = Some("for=*;all_reduce@2:1-2=ring/ll/1".parse().unwrap());
    assert!(any.policy().1.is_empty());
}

#[test]
fn only_communicators_over_this_network_with_one_rank_a_node_are_tuned() {
    let policy = policy(|_| ());
    assert!(matches!(policy.tuner(2, 2, true), Tuner::Acting(_)));
    for (ranks, nodes, is_ours, words) in [
        (2, 2, false, "uses another network"),
        (2, 1, true, "on one node"),
        (1, 1, true, "on one node"),
        (4, 2, true, "more than one rank"),
        (4, 4, true, "no row for 4 ranks"),
    ] {
        let tuner = policy.tuner(ranks, nodes, is_ours);
        assert!(
            reason(&tuner).contains(words),
            "{ranks} ranks: {}",
            reason(&tuner)
        );
        let mut costs = [1.0; ALGORITHMS * PROTOCOLS];
        assert_eq!(tuner.decide(4, 1500, 1, &mut costs), None);
        assert_eq!(costs, [1.0; ALGORITHMS * PROTOCOLS]);
    }
    let off = Policy::Inert {
        reason: "no".to_owned(),
    };
    assert_eq!(reason(&off.tuner(2, 2, true)), "no");
}

#[test]
fn a_row_applies_only_to_its_sizes() {
    let tuner = policy(|_| ()).tuner(2, 2, true);
    let ring = Algorithm::Ring as usize * PROTOCOLS;
    for (collective, bytes, expected) in [
        (4, 999, None),
        (4, 1000, Some((ring, 2))),
        (4, 1999, Some((ring, 2))),
        (4, 2000, Some((ring + 1, 3))),
        (4, 4000, Some((ring + 1, 3))),
        (4, 4001, None),
        (2, 0, None),
        (2, 100, Some((2, 4))),
        (2, 101, None),
        (3, 1500, None),
        (5, 1500, None),
        (-1, 1500, None),
    ] {
        let mut costs = [7.0; ALGORITHMS * PROTOCOLS];
        assert_eq!(
            tuner.decide(collective, bytes, 1, &mut costs),
            expected.map(|(_, channels)| channels)
        );
        let changed: Vec<usize> = (0..costs.len()).filter(|at| costs[*at] != 7.0).collect();
        assert_eq!(
            changed,
            expected
                .map(|(place, _)| place)
                .into_iter()
                .collect::<Vec<_>>(),
            "{collective} {bytes}"
        );
    }
    let mut of_three = [7.0; ALGORITHMS * PROTOCOLS];
    assert_eq!(
        policy(|_| ())
            .tuner(3, 3, true)
            .decide(4, 1500, 1, &mut of_three),
        Some(8)
    );
    let mut of_group = [7.0; ALGORITHMS * PROTOCOLS];
    assert_eq!(
        (tuner.decide(4, 1500, 2, &mut of_group), of_group),
        (None, [7.0; ALGORITHMS * PROTOCOLS])
    );
}

#[test]
fn ll128_is_the_last_resort_where_it_is_not_wanted() {
    let policy = policy(|facts| facts.config.ll128 = false);
    assert!(
        policy.to_string().contains("of 3 rows, no LL128"),
        "{policy}"
    );
    let tuner = policy.tuner(2, 2, true);
    let mut costs = [7.0; ALGORITHMS * PROTOCOLS];
    costs[Protocol::Ll128 as usize] = -1.0;
    assert_eq!(tuner.decide(4, 3000, 1, &mut costs), None);
    for (place, cost) in costs.iter().enumerate() {
        let expected = match (place, place % PROTOCOLS) {
            (1, _) => -1.0,
            (_, 1) => LAST_RESORT_US,
            _ => 7.0,
        };
        assert_eq!(*cost, expected, "entry {place}");
    }
}

#[test]
fn hosts_that_decide_differently_have_other_hashes() {
    let mut hashes = vec![
        policy(|_| ()).hash(),
        policy(|facts| facts.config.mode = Mode::Off).hash(),
        policy(|facts| facts.config.ll128 = false).hash(),
        policy(|facts| facts.ring_tcp = true).hash(),
        policy(|facts| (facts.ring_tcp, facts.host.gpu) = (true, "NVIDIA_H200".to_owned())).hash(),
        policy(|facts| {
            facts.config.table = Some("for=*;all_reduce@2:1000-1999=ring/ll/2".parse().unwrap())
        })
        .hash(),
        policy(|facts| {
            facts.config.table = Some("for=*;all_reduce@2:1000-1999=ring/ll/3".parse().unwrap())
        })
        .hash(),
    ];
    let anywhere: Table = TABLE
        .replace("NVIDIA_GB10/4x224054/2.28.9", "*")
        .parse()
        .unwrap();
    assert_eq!(
        policy(|facts| facts.config.table = Some(anywhere)).hash(),
        hashes[0]
    );
    assert_eq!(hashes[1], 0);
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 7);
}

#[test]
fn only_ring_remains_where_some_peers_are_reached_by_tcp() {
    let policy = policy(|facts| facts.ring_tcp = true);
    assert!(
        policy.to_string().contains("Ring only above two nodes"),
        "{policy}"
    );
    let is_ring = |place: usize| place / PROTOCOLS == Algorithm::Ring as usize;
    let decided = |tuner: &Tuner, collective, before: Costs| {
        let mut costs = before;
        (tuner.decide(collective, 1500, 1, &mut costs), costs)
    };
    // No row is for 4 ranks. With 8 ranks, a node has two. No row can be for collective 7.
    for (ranks, nodes) in [(4, 4), (8, 4)] {
        let Tuner::Acting(acting) = policy.tuner(ranks, nodes, true) else {
            panic!("{ranks} ranks")
        };
        assert!(acting.is_ring_only());
        for collective in [4, 7] {
            let mut before = [7.0; ALGORITHMS * PROTOCOLS];
            before[0] = -1.0;
            let (channels, costs) = decided(&policy.tuner(ranks, nodes, true), collective, before);
            assert_eq!(channels, None);
            for (place, cost) in costs.iter().enumerate() {
                let expected = match place {
                    0 => -1.0,
                    place if is_ring(place) => 7.0,
                    _ => NOT_RING_US,
                };
                assert_eq!(*cost, expected, "entry {place}");
            }
        }
    }
    let no_ring: Costs = std::array::from_fn(|place| if is_ring(place) { -1.0 } else { 7.0 });
    assert_eq!(
        decided(&policy.tuner(4, 4, true), 4, no_ring),
        (None, no_ring)
    );
    let two = [7.0; ALGORITHMS * PROTOCOLS];
    let (channels, costs) = decided(&policy.tuner(2, 2, true), 2, two);
    assert_eq!((channels, costs), (None, two));
    assert!(matches!(policy.tuner(4, 2, true), Tuner::Inert { .. }));
    assert!(matches!(policy.tuner(4, 4, false), Tuner::Inert { .. }));
}

#[test]
fn a_row_for_tree_does_not_hold_where_ring_alone_does() {
    let tree = "for=*;all_reduce@3:1-9=tree/simple/8;all_reduce@3:10-19=ring/simple/4";
    let of = |ring_tcp| {
        policy(|facts| {
            (facts.config.table, facts.ring_tcp) = (Some(tree.parse().unwrap()), ring_tcp)
        })
    };
    let decide = |ring_tcp, bytes| {
        let mut costs = [7.0; ALGORITHMS * PROTOCOLS];
        (
            of(ring_tcp)
                .tuner(3, 3, true)
                .decide(4, bytes, 1, &mut costs),
            costs[2],
        )
    };
    assert_eq!(
        (decide(false, 5), decide(true, 5)),
        ((Some(8), 0.0), (None, NOT_RING_US))
    );
    assert_eq!(
        (decide(false, 15), decide(true, 15)),
        ((Some(4), 7.0), (Some(4), NOT_RING_US))
    );
}

#[test]
fn a_ring_needs_no_gb10_and_is_logged_where_the_tuner_is_off() {
    let elsewhere =
        |facts: &mut Facts| (facts.ring_tcp, facts.host.gpu) = (true, "NVIDIA_H200".to_owned());
    let told = policy(elsewhere).to_string();
    assert!(
        told.starts_with("empty table of 0 rows, Ring only above two nodes"),
        "{told}"
    );
    assert!(matches!(
        policy(elsewhere).tuner(2, 2, true),
        Tuner::Inert { .. }
    ));
    let mut off = Facts {
        ring_tcp: true,
        ..facts()
    };
    off.config.mode = Mode::Off;
    let (policy, warnings) = off.policy();
    assert_eq!(policy.hash(), 0);
    assert!(
        warnings.len() == 1 && warnings[0].contains("set NCCL_ALGO=Ring"),
        "{warnings:?}"
    );
}

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let row = (
        0..5i32,
        2..4usize,
        0..1000u64,
        0..500u64,
        0..2usize,
        0..3usize,
        1..=64u32,
    );
    let row = row.prop_map(
        |(collective, ranks, from_bytes, more, algorithm, protocol, channels)| Row {
            collective: Collective::from_repr(collective).unwrap(),
            ranks,
            from_bytes,
            to_bytes: from_bytes + more,
            choice: Choice {
                algorithm: Algorithm::VARIANTS[algorithm].parse().unwrap(),
                protocol: Protocol::VARIANTS[protocol].parse().unwrap(),
                channels,
            },
        },
    );
    prop::collection::vec(row, 0..6)
}

proptest! {
    /// For all tables and costs: at most one entry becomes 0, disabled entries do not change, and
    /// two hosts with the same rules decide the same.
    #[test]
    fn a_decision_changes_only_the_costs_it_may_change(
        rows in rows(), ll128: bool, ring_tcp: bool, ranks in 2..4usize, collective in -1..7i32, bytes in 0..2000u64,
        costs in prop::collection::vec(prop_oneof![Just(-1.0f32), 0.5..1000.0f32], ALGORITHMS * PROTOCOLS),
    ) {
        let Ok(table) = Table::new(None, rows) else { return Ok(()) };
        let facts = || {
            let config = TunerConfig { table: Some(table.clone()), ll128, ..facts().config };
            Facts { config, ring_tcp, ..facts() }
        };
        let decide = || {
            let mut changed: Costs = costs.clone().try_into().unwrap();
            (facts().policy().0.tuner(ranks, ranks, true).decide(collective, bytes, 1, &mut changed), changed)
        };
        let (channels, changed) = decide();
        prop_assert_eq!(decide(), (channels, changed));
        let ring = Algorithm::Ring as usize;
        let has_ring = costs[ring * PROTOCOLS..][..PROTOCOLS].iter().any(|cost| *cost >= 0.0);
        let is_ring_only = ring_tcp && ranks > 2 && has_ring;
        let mut chosen = 0;
        for (place, (before, after)) in costs.iter().zip(changed).enumerate() {
            if *before < 0.0 {
                prop_assert_eq!(*before, after);
            } else if after == 0.0 {
                chosen += 1;
            } else {
                let is_raised = !ll128 && place % PROTOCOLS == Protocol::Ll128 as usize;
                let is_other = is_ring_only && place / PROTOCOLS != ring;
                let expected = if is_other { NOT_RING_US } else if is_raised { LAST_RESORT_US } else { *before };
                prop_assert_eq!(after, expected);
            }
        }
        prop_assert_eq!(chosen, usize::from(channels.is_some()));
        let row = table.rows().iter().find(|row| {
            row.ranks == ranks && row.collective as i32 == collective && (row.from_bytes..=row.to_bytes).contains(&bytes)
        });
        let is_wanted = row.is_some_and(|row| {
            (ll128 || row.choice.protocol != Protocol::Ll128) && (!is_ring_only || row.choice.algorithm == Algorithm::Ring)
        });
        let is_free = |row: &Row| costs[row.choice.algorithm as usize * PROTOCOLS + row.choice.protocol as usize] >= 0.0;
        prop_assert_eq!(channels, row.filter(|row| is_wanted && is_free(row)).map(|row| row.choice.channels));
    }
}
