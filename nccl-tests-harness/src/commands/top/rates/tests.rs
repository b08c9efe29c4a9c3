use super::*;
use crate::commands::top::look;
use host::counters::layout::Counters;
use proptest::prelude::*;

fn record(index: usize, bytes: u64) -> Record {
    Record {
        index,
        sequence: 2,
        state: State::Carries,
        direction: Direction::Send,
        connection: 1,
        bits_per_s: 100,
        rail: format!("rail{index}"),
        peer_rail: "there".to_owned(),
        peer: "b".to_owned(),
        path_mtu_bytes: 4096,
        stall: None,
        counts: Counts {
            bytes,
            writes: bytes / 10,
            timed_writes: 2,
            timed_ns: bytes,
            ..Counts::default()
        },
    }
}

fn reading_at(at_ns: u64, records: Vec<Record>) -> Reading {
    let counters = Counters {
        records,
        ..Counters::default()
    };
    let job = look::Job {
        pid: 7,
        command: "x".to_owned(),
        rank: None,
        file: FileId::default(),
        at_ns,
        counters,
        pinned_bytes: None,
        holds_cpu_latency: None,
    };
    Reading {
        jobs: vec![job],
        ..Reading::default()
    }
}

fn flow(snapshot: &Snapshot) -> &Side {
    &snapshot.jobs[0].flows[0].side
}

fn bytes_gained(rates: &mut Rates, at_ns: u64, record: Record) -> Option<u64> {
    flow(&rates.take(reading_at(at_ns, vec![record])))
        .since_last
        .map(|since_last| since_last.bytes)
}

#[test]
fn two_looks_make_a_rate_and_one_does_not() {
    let mut rates = Rates::default();
    let first = rates.take(reading_at(5, vec![record(0, 1000)]));
    assert_eq!(
        (
            first.jobs[0].elapsed_ns,
            flow(&first).since_last,
            flow(&first).total.bytes
        ),
        (None, None, 1000)
    );
    let second = rates.take(reading_at(2_000_000_005, vec![record(0, 4000)]));
    let since_last = flow(&second).since_last.unwrap();
    assert_eq!(
        (
            since_last.bytes,
            since_last.writes,
            flow(&second).total.bytes
        ),
        (3000, 300, 4000)
    );
    assert_eq!(
        per_second(since_last.bytes, second.jobs[0].elapsed_ns.unwrap()),
        Some(1500.0)
    );
    // `since_last` has no new timed write. Two writes in 3,000 ns take 1.5 us each.
    assert_eq!(
        (
            mean_us(&since_last),
            mean_us(&Counts {
                timed_writes: 2,
                timed_ns: 3000,
                ..since_last
            })
        ),
        (None, Some(1.5))
    );
}

#[test]
fn a_row_without_time_or_bytes_has_no_bandwidth() {
    assert_eq!(
        (per_second(5, 0), percent(0, 0), percent(1, 4)),
        (None, None, Some(25.0))
    );
    let mut rates = Rates::default();
    rates.take(reading_at(9, vec![record(0, 1)]));
    assert_eq!(
        rates.take(reading_at(3, vec![record(0, 2)])).jobs[0].elapsed_ns,
        Some(0),
        "a clock that went back"
    );
}

#[test]
fn a_lost_lane_keeps_its_rates_and_a_new_sequence_starts_again() {
    let mut rates = Rates::default();
    bytes_gained(&mut rates, 0, record(0, 1000));
    let lost = Record {
        state: State::Lost,
        ..record(0, 1500)
    };
    assert_eq!(bytes_gained(&mut rates, 1, lost), Some(500));
    let another = Record {
        sequence: 4,
        connection: 2,
        ..record(0, 1800)
    };
    let snapshot = rates.take(reading_at(2, vec![another]));
    assert_eq!(
        (
            flow(&snapshot).since_last.unwrap().bytes,
            flow(&snapshot).total.bytes
        ),
        (1800, 3300)
    );
}

#[test]
fn decreasing_counters_mean_a_restart() {
    let mut rates = Rates::default();
    bytes_gained(&mut rates, 0, record(0, 1000));
    assert_eq!(bytes_gained(&mut rates, 1, record(0, 400)), Some(400));
    let longest = |bytes, longest_ns| Record {
        counts: Counts {
            longest_ns,
            ..record(0, bytes).counts
        },
        ..record(0, bytes)
    };
    bytes_gained(&mut rates, 2, longest(500, 9));
    assert_eq!(bytes_gained(&mut rates, 3, longest(600, 8)), Some(600));
}

#[test]
fn new_objects_count_unless_they_may_have_existed_before() {
    let mut rates = Rates::default();
    rates.take(reading_at(0, vec![record(0, 10)]));
    let snapshot = rates.take(reading_at(1, vec![record(0, 10), record(1, 70)]));
    assert_eq!(snapshot.jobs[0].flows[1].side.since_last.unwrap().bytes, 70);
    // This reading passes over one record, because the record was being changed.
    let mut torn = reading_at(2, vec![record(0, 10)]);
    torn.jobs[0].counters.passed_over = 1;
    rates.take(torn);
    let snapshot = rates.take(reading_at(3, vec![record(0, 10), record(1, 90)]));
    assert_eq!(snapshot.jobs[0].flows[1].side.since_last.unwrap().bytes, 0);
}

#[test]
fn open_lanes_of_a_rail_and_peer_form_one_flow() {
    let lane = |index: usize, state| Record {
        index,
        state,
        connection: index as u64,
        rail: "r".to_owned(),
        ..record(index, 5)
    };
    let snapshot = Rates::default().take(reading_at(
        0,
        vec![
            lane(0, State::Carries),
            lane(1, State::Lost),
            lane(2, State::Closed),
        ],
    ));
    assert_eq!(snapshot.jobs[0].flows.len(), 1);
    assert_eq!(
        (
            flow(&snapshot).connections,
            flow(&snapshot).carrying,
            flow(&snapshot).total.bytes
        ),
        (2, 1, 15)
    );
}

#[test]
fn a_process_that_was_missing_in_between_is_new() {
    let mut rates = Rates::default();
    rates.take(reading_at(0, vec![record(0, 10)]));
    rates.take(Reading::default());
    assert!(rates.jobs.is_empty());
    assert_eq!(bytes_gained(&mut rates, 2, record(0, 20)), None);
}

#[test]
fn sums_saturate() {
    let full = Record {
        counts: Counts {
            bytes: u64::MAX,
            timed_ns: u64::MAX,
            ..Counts::default()
        },
        ..record(0, 0)
    };
    let mut rates = Rates::default();
    rates.take(reading_at(
        0,
        vec![
            full.clone(),
            Record {
                index: 1,
                ..full.clone()
            },
        ],
    ));
    let again = Record {
        connection: 2,
        sequence: 4,
        ..full
    };
    assert_eq!(
        flow(&rates.take(reading_at(1, vec![again]))).total.bytes,
        u64::MAX
    );
}

prop_compose! {
    fn any_counts()(words in proptest::array::uniform10(prop_oneof![0..50_u64, any::<u64>()])) -> Counts {
        let [bytes, writes, timed_writes, timed_ns, longest_ns, losses, recoveries, lost_ns, stalls, stalled_ns] = words;
        Counts { bytes, writes, timed_writes, timed_ns, longest_ns, losses, recoveries, lost_ns, stalls, stalled_ns }
    }
}

prop_compose! {
    fn any_record()(
        index in 0..6_usize, sequence in prop_oneof![2..6_u64, any::<u64>()], connection in 0..3_u64, rail in 0..3_u8,
        (is_out, state) in (any::<bool>(), 0..3_u8), bits_per_s in any::<u64>(), counts in any_counts(),
    ) -> Record {
        Record {
            index, sequence, connection, bits_per_s, counts,
            state: [State::Carries, State::Lost, State::Closed][usize::from(state)],
            direction: if is_out { Direction::Send } else { Direction::Receive },
            rail: format!("r{rail}"), ..record(index, 0)
        }
    }
}

proptest! {
    /// For any data, sums never fall while a flow exists, and no bytes or flows are invented.
    #[test]
    fn totals_never_fall_and_grow_by_the_difference(
        readings in proptest::collection::vec((any::<u64>(), proptest::collection::vec(any_record(), 0..8), 0..2_usize), 1..8)
    ) {
        let mut rates = Rates::default();
        let mut before: BTreeMap<Key, u64> = BTreeMap::new();
        for (at_ns, mut records, passed_over) in readings {
            records.sort_by_key(|record| record.index);
            records.dedup_by_key(|record| record.index);
            let (count, open) = (records.len(), records.iter().filter(|record| record.state != State::Closed).count());
            let mut reading = reading_at(at_ns, records);
            reading.jobs[0].counters.passed_over = passed_over;
            let snapshot = rates.take(reading);
            let flows = &snapshot.jobs[0].flows;
            prop_assert!(flows.len() <= count);
            prop_assert_eq!(flows.iter().map(|flow| flow.side.connections).sum::<usize>(), open);
            let mut now = BTreeMap::new();
            for flow in flows {
                let key = (flow.rail.clone(), flow.peer.clone(), flow.direction);
                let old = before.get(&key).copied().unwrap_or(0);
                prop_assert!(flow.side.carrying <= flow.side.connections && flow.side.total.bytes >= old);
                if let Some(since_last) = flow.side.since_last {
                    prop_assert_eq!(flow.side.total.bytes, old.saturating_add(since_last.bytes));
                }
                now.insert(key, flow.side.total.bytes);
            }
            before = now;
        }
    }

    /// If a lane's counters only grow, its gains over all intervals add up to its bytes.
    #[test]
    fn an_honest_lane_is_counted_to_the_byte(steps in proptest::collection::vec(0..1_u64 << 50, 1..20)) {
        let mut rates = Rates::default();
        let (mut bytes, mut seen) = (0_u64, 0_u64);
        bytes_gained(&mut rates, 0, record(0, 0));
        for (at, step) in steps.into_iter().enumerate() {
            bytes += step;
            seen += bytes_gained(&mut rates, at as u64 + 1, record(0, bytes)).unwrap();
        }
        prop_assert_eq!(seen, bytes);
    }
}
