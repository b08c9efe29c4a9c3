//! Totals of closed connections for each rail, for the log.

use super::layout::Direction;
use std::collections::BTreeMap;
use std::time::Duration;

/// Totals of one lane when its connection ends.
#[derive(Debug, Clone, Copy)]
pub struct Carried {
    pub direction: Direction,
    /// Payload bytes.
    pub bytes: u64,
    pub losses: u64,
    pub recoveries: u64,
    pub lost: Duration,
    /// Number of stalls of the connection, in the totals of its first lane. 0 for the other lanes.
    pub stalls: u64,
    /// Total duration of these stalls.
    pub stalled: Duration,
}

/// Totals of closed connections. Sums of counts wrap around, and sums of durations stop at the
/// maximum, because other processes can write any value into the counters.
#[derive(Debug, Default)]
pub struct Summary {
    rails: BTreeMap<String, OfRail>,
    stalls: u64,
    stalled: Duration,
}

#[derive(Debug, Default)]
struct OfRail {
    sent_bytes: u64,
    received_bytes: u64,
    /// The number of losses of the lane with the most losses. A sum over all lanes would count one
    /// failure of the rail once for each connection.
    losses: u64,
    /// The number of recoveries of the lane with the most recoveries.
    recoveries: u64,
    /// The longest total time for which a lane was lost.
    lost: Duration,
}

impl Summary {
    pub fn add(&mut self, rail: &str, carried: Carried) {
        let of_rail = self.rails.entry(rail.to_owned()).or_default();
        let bytes = match carried.direction {
            Direction::Send => &mut of_rail.sent_bytes,
            Direction::Receive => &mut of_rail.received_bytes,
        };
        *bytes = bytes.wrapping_add(carried.bytes);
        of_rail.losses = of_rail.losses.max(carried.losses);
        of_rail.recoveries = of_rail.recoveries.max(carried.recoveries);
        of_rail.lost = of_rail.lost.max(carried.lost);
        self.stalls = self.stalls.wrapping_add(carried.stalls);
        self.stalled = self.stalled.saturating_add(carried.stalled);
    }

    /// Returns the lines for the log: one with the totals, and one for each rail. Returns no lines
    /// if no bytes were transferred by rails and no messages by TCP.
    pub fn lines(&self, (tcp_bytes, tcp_messages): (u64, u64)) -> Vec<String> {
        let sum = |of: fn(&OfRail) -> u64| {
            self.rails
                .values()
                .fold(0_u64, |sum, rail| sum.wrapping_add(of(rail)))
        };
        let sent = sum(|rail| rail.sent_bytes);
        let received = sum(|rail| rail.received_bytes);
        if (sent, received, tcp_messages) == (0, 0, 0) {
            return Vec::new();
        }
        let mut first =
            format!("connections closed: {sent} bytes sent and {received} received by rails");
        if tcp_messages > 0 {
            first += &format!(
                ", {tcp_bytes} bytes sent by TCP in {tcp_messages} messages (NCCL_SPARK_RING_TCP)"
            );
        }
        first += &match self.stalls {
            0 => "; no stall of a second or more".to_owned(),
            stalls => format!(
                "; {stalls} stalls of a second or more, {:.1} s in all",
                self.stalled.as_secs_f64()
            ),
        };
        let rail = |(name, rail): (&String, &OfRail)| {
            let OfRail {
                sent_bytes,
                received_bytes,
                losses,
                recoveries,
                lost,
            } = rail;
            let sent = percent(*sent_bytes, sent);
            let received = percent(*received_bytes, received);
            let outages = match losses {
                0 => "never lost".to_owned(),
                _ => format!(
                    "lost {}, recovered {}, unusable for {:.1} s",
                    times(*losses),
                    times(*recoveries),
                    lost.as_secs_f64()
                ),
            };
            format!(
                "rail {name}: {sent_bytes} bytes sent ({sent:.1} %), {received_bytes} received ({received:.1} %); {outages}"
            )
        };
        std::iter::once(first)
            .chain(self.rails.iter().map(rail))
            .collect()
    }
}

fn times(count: u64) -> String {
    format!("{count} time{}", if count == 1 { "" } else { "s" })
}

fn percent(part: u64, all: u64) -> f64 {
    if all == 0 {
        0.0
    } else {
        part as f64 * 100.0 / all as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SENT: Carried = Carried {
        direction: Direction::Send,
        bytes: 30,
        losses: 0,
        recoveries: 0,
        lost: Duration::ZERO,
        stalls: 0,
        stalled: Duration::ZERO,
    };

    #[test]
    fn the_block_adds_up_and_omits_nothing() {
        let mut summary = Summary::default();
        assert!(summary.lines((0, 0)).is_empty());
        summary.add("b:1", Carried { bytes: 0, ..SENT });
        assert!(summary.lines((0, 0)).is_empty());
        summary.add("a:1", SENT);
        summary.add("b:1", Carried { bytes: 10, ..SENT });
        let lost = Duration::from_millis(2500);
        let received = Carried {
            direction: Direction::Receive,
            bytes: 7,
            losses: 2,
            recoveries: 1,
            lost,
            ..SENT
        };
        summary.add(
            "a:1",
            Carried {
                stalls: 3,
                stalled: Duration::from_millis(4200),
                ..received
            },
        );
        // The same outage in another connection.
        summary.add(
            "a:1",
            Carried {
                bytes: 0,
                ..received
            },
        );
        assert_eq!(
            summary.lines((0, 0)),
            [
                "connections closed: 40 bytes sent and 7 received by rails; 3 stalls of a second or more, 4.2 s in all",
                "rail a:1: 30 bytes sent (75.0 %), 7 received (100.0 %); lost 2 times, recovered 1 time, unusable for 2.5 s",
                "rail b:1: 10 bytes sent (25.0 %), 0 received (0.0 %); never lost",
            ]
        );
        let by_tcp = Summary::default().lines((7, 3));
        let line = "connections closed: 0 bytes sent and 0 received by rails, 7 bytes sent by TCP in 3 messages (NCCL_SPARK_RING_TCP); no stall of a second or more";
        assert_eq!(by_tcp, [line]);
    }

    #[test]
    fn foreign_values_in_the_counters_do_not_overflow() {
        let mut summary = Summary::default();
        let most = Duration::from_nanos(u64::MAX);
        let wild = Carried {
            bytes: u64::MAX,
            losses: u64::MAX,
            recoveries: u64::MAX,
            lost: most,
            stalls: u64::MAX,
            stalled: most,
            ..SENT
        };
        for _ in 0..3 {
            summary.add("a:1", wild);
            summary.add("b:1", wild);
        }
        assert_eq!(summary.lines((1, 1)).len(), 3);
    }
}
