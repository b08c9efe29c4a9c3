use super::*;
use crate::commands::top::look::{self, FileId};
use host::counters::layout::{Counters, Counts};

const SECOND: u64 = 1_000_000_000;

/// Makes a flow of one connection that moved `bytes` in the last interval, and the same number of
/// bytes before that interval.
pub fn flow(rail: &str, peer: &str, direction: Direction, bytes: u64) -> Flow {
    let since_last = Counts {
        bytes,
        writes: 1,
        timed_writes: 4,
        timed_ns: 100_000,
        longest_ns: 50_000,
        ..Counts::default()
    };
    Flow {
        rail: rail.to_owned(),
        peer: peer.to_owned(),
        direction,
        side: Side {
            total: rates::sum(&since_last, &since_last),
            since_last: Some(since_last),
            bits_per_s: 112_000_000_000,
            connections: 1,
            carrying: 1,
            ..Side::default()
        },
    }
}

pub fn job(pid: u32, flows: Vec<Flow>) -> Job {
    let file = FileId::default();
    let counters = Counters::default();
    let seen = look::Job {
        pid,
        command: "python3".to_owned(),
        rank: None,
        file,
        at_ns: 0,
        counters,
        pinned_bytes: None,
        holds_cpu_latency: None,
    };
    Job {
        seen,
        elapsed_ns: Some(SECOND),
        flows,
    }
}

pub fn port(per_s: f64) -> rates::Port {
    let name = || "packet_seq_err".to_owned();
    let counters = [(name(), 4830)].into();
    let per_s = Some([(name(), per_s)].into());
    rates::Port {
        rail: "r0".to_owned(),
        counters,
        per_s,
    }
}

fn subjects(rows: &[Row]) -> Vec<String> {
    let name = |row: &Row| match (&row.peer, &row.rail) {
        (None, None) => "job".to_owned(),
        (Some(name), None) | (None, Some(name)) => name.clone(),
        (Some(peer), Some(rail)) => format!("{peer}/{rail}"),
    };
    rows.iter().map(name).collect()
}

#[test]
fn rails_are_summed_over_peers_unless_they_are_split() {
    let flows = vec![
        flow("r0", "b", Direction::Send, 300),
        flow("r0", "c", Direction::Receive, 200),
        flow("r1", "b", Direction::Send, 100),
    ];
    let job = job(1, flows);
    let rows = of_job(&job, false);
    assert_eq!(subjects(&rows), ["job", "r0", "r1"]);
    assert_eq!(
        (rows[0].sent.bytes_per_s, rows[0].received.bytes_per_s),
        (Some(400.0), Some(200.0))
    );
    assert_eq!(
        (rows[1].sent.share_percent, rows[1].received.share_percent),
        (Some(75.0), Some(100.0))
    );
    assert_eq!(
        (rows[1].share_percent.map(f64::round), rows[1].connections()),
        (Some(83.0), (2, 2))
    );
    assert_eq!(
        (
            rows[2].received.bytes_per_s,
            rows[2].mean_latency_us,
            rows[2].sent.bytes
        ),
        (Some(0.0), Some(25.0), 200)
    );
    let rows = of_job(&job, true);
    assert_eq!(subjects(&rows), ["job", "b", "b/r0", "b/r1", "c", "c/r0"]);
    assert_eq!(
        (rows[1].sent.bytes_per_s, rows[5].received.share_percent),
        (Some(400.0), Some(100.0))
    );
    assert_eq!(
        rows.iter()
            .map(|row| row.stalls.is_some())
            .collect::<Vec<_>>(),
        [true, true, false, false, true, false]
    );
}

#[test]
fn the_first_reading_has_no_rates() {
    let mut first = flow("r0", "b", Direction::Send, 5);
    first.side.since_last = None;
    let job = Job {
        elapsed_ns: None,
        ..job(1, vec![first])
    };
    let row = &of_job(&job, false)[1];
    assert_eq!(
        (row.sent.bytes_per_s, row.share_percent, row.mean_latency_us),
        (None, None, None)
    );
    assert_eq!(row.sent.bytes, 10);
    assert_eq!(
        of_job(
            &Job {
                flows: Vec::new(),
                ..job
            },
            true
        )
        .len(),
        1
    );
}

#[test]
fn a_rail_below_half_the_busiest_rails_load_is_slow() {
    let gigabyte = 1_000_000_000;
    let sending_flow = |rail: &str, bytes| flow(rail, "b", Direction::Send, bytes);
    let conditions = |flows| {
        of_job(&job(1, flows), false)
            .iter()
            .map(|row| row.condition)
            .collect::<Vec<_>>()
    };
    use Condition::{Good, Lost, Slow};
    assert_eq!(
        conditions(vec![
            sending_flow("r0", 10 * gigabyte),
            sending_flow("r1", 6 * gigabyte)
        ]),
        [Good, Good, Good]
    );
    assert_eq!(
        conditions(vec![
            sending_flow("r0", 10 * gigabyte),
            sending_flow("r1", 4 * gigabyte)
        ]),
        [Good, Good, Slow]
    );
    // The second rail has a lower rate, and both rails carry a similar share of their own rate.
    let mut narrow = sending_flow("r1", 4 * gigabyte);
    narrow.side.bits_per_s = 40_000_000_000;
    assert_eq!(
        conditions(vec![sending_flow("r0", 10 * gigabyte), narrow]),
        [Good, Good, Good]
    );
    // At a hundredth of the load above, rails are compared only if messages are large. Large
    // messages use all rails, but small messages may use one rail.
    let writes = |mut flow: Flow, bytes: u64| {
        flow.side.since_last = flow.side.since_last.map(|since_last| Counts {
            writes: since_last.bytes / bytes,
            ..since_last
        });
        flow
    };
    let scaled = |write_bytes| {
        let sending_flow = |rail: &str, bytes| writes(sending_flow(rail, bytes), write_bytes);
        conditions(vec![
            sending_flow("r0", gigabyte / 10),
            sending_flow("r1", gigabyte / 30),
        ])
    };
    assert_eq!(
        (scaled(64 << 10), scaled(63 << 10)),
        (vec![Good, Good, Slow], vec![Good; 3])
    );
    assert_eq!(
        scaled(u64::MAX),
        [Good; 3],
        "a rail with bytes but no counted write is not compared"
    );
    let mut lost = sending_flow("r1", 0);
    lost.side.carrying = 0;
    assert_eq!(
        conditions(vec![sending_flow("r0", 10 * gigabyte), lost]),
        [Lost, Good, Lost]
    );
}
