//! The collectives: what each rank sends where, and how nccl-tests counts it.
//!
//! Another collective is another variant here: its figures, its parts and its schedule.

use std::ops::Range;

/// A collective over a ring of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Collective {
    /// Every rank ends with every rank's part. In place: a rank's own part already lies where it belongs.
    AllGather,
    /// Every rank sends to the next one and receives from the one before. Out of place.
    SendRecv,
}

/// How NCCL cuts a collective into messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The most bytes in a message.
    pub slice_bytes: usize,
    /// The most messages that a connection has under way in each direction.
    pub in_flight: usize,
}

/// One message of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    /// Where in the buffer it lies, in bytes.
    pub offset: usize,
    /// How long it is, in bytes.
    pub bytes: usize,
    /// The receive of the same channel that must be complete before this send may start.
    pub after: Option<usize>,
}

/// What one channel of one rank does for one collective, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Schedule {
    /// To the next rank of the ring, out of the send buffer.
    pub sends: Vec<Slice>,
    /// From the rank before, into the receive buffer.
    pub receives: Vec<Slice>,
}

/// A stretch of a buffer that holds data of one rank from its start on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Whose data.
    pub rank: usize,
    /// Where it lies, in bytes.
    pub range: Range<usize>,
}

/// Algorithm and bus bandwidth in GB/s (10^9 bytes a second).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth {
    /// Size over time.
    pub algbw: f64,
    /// What that asks of each rank's link.
    pub busbw: f64,
}

/// A channel has at least this much to do before another one gets something: splitting small messages only adds messages.
const CHANNEL_MIN_BYTES: usize = 64 << 10;
/// Parts of channels start at multiples of this, a cache line pair, as NCCL aligns what it gives to its channels.
const CHANNEL_ALIGN_BYTES: usize = 128;

impl Collective {
    /// Its name as in the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::SendRecv => "sendrecv",
        }
    }

    /// Whether the send buffer is the receive buffer.
    pub fn in_place(self) -> bool {
        self == Self::AllGather
    }

    /// The messages that NCCL makes of it: a ring keeps four slices of two 512 KiB steps, a point-to-point transfer
    /// eight steps of its chunk size, which is 128 to 256 KiB over a network.
    pub fn shape(self) -> Shape {
        match self {
            Self::AllGather => Shape { slice_bytes: 1 << 20, in_flight: 4 },
            Self::SendRecv => Shape { slice_bytes: 256 << 10, in_flight: 8 },
        }
    }

    /// How many bytes each rank contributes at a size asked for.
    ///
    /// nccl-tests would round an all-gather's part down to 16 bytes, which leaves nothing of small sizes; here every
    /// byte counts.
    pub fn count(self, size_bytes: usize, ranks: usize) -> usize {
        match self {
            Self::AllGather => size_bytes / ranks,
            Self::SendRecv => size_bytes,
        }
    }

    /// The size that the table shows, which is also how long the receive buffer is: for an all-gather what a rank ends
    /// with, for a transfer what it receives.
    pub fn size_bytes(self, count: usize, ranks: usize) -> usize {
        match self {
            Self::AllGather => count * ranks,
            Self::SendRecv => count,
        }
    }

    /// The bandwidths as nccl-tests computes them (its doc/PERFORMANCE.md).
    pub fn bandwidth(self, count: usize, ranks: usize, seconds: f64) -> Bandwidth {
        let algbw = self.size_bytes(count, ranks) as f64 / 1e9 / seconds;
        let factor = match self {
            Self::AllGather => (ranks - 1) as f64 / ranks as f64,
            Self::SendRecv => 1.0,
        };
        Bandwidth { algbw, busbw: algbw * factor }
    }

    /// What `rank` writes into its send buffer before it starts.
    pub fn contribution(self, rank: usize, count: usize) -> Part {
        match self {
            Self::AllGather => Part { rank, range: rank * count..(rank + 1) * count },
            Self::SendRecv => Part { rank, range: 0..count },
        }
    }

    /// What `rank` has in its receive buffer at the end.
    pub fn result(self, rank: usize, ranks: usize, count: usize) -> Vec<Part> {
        match self {
            Self::AllGather => (0..ranks).map(|from| self.contribution(from, count)).collect(),
            Self::SendRecv => vec![Part { rank: (rank + ranks - 1) % ranks, range: 0..count }],
        }
    }

    /// What `channel` of `rank` does.
    ///
    /// An all-gather goes round step by step: a rank passes on in one step what it received in the step before. The
    /// slices of a step do not wait for each other, so a long part keeps the connection busy throughout.
    pub fn schedule(self, rank: usize, ranks: usize, count: usize, channel: usize, channels: usize) -> Schedule {
        let pieces = slices(channel_range(count, channel, channels), self.shape().slice_bytes);
        let slice = |block: usize, piece: &Range<usize>, after| Slice {
            offset: block * count + piece.start,
            bytes: piece.len(),
            after,
        };
        let mut schedule = Schedule::default();
        let steps = match self {
            Self::AllGather => ranks - 1,
            Self::SendRecv => 1,
        };
        for step in 0..steps {
            let (sent, received) = match self {
                Self::AllGather => ((rank + ranks - step) % ranks, (rank + ranks - step - 1) % ranks),
                Self::SendRecv => (0, 0),
            };
            for (index, piece) in pieces.iter().enumerate() {
                let after = step.checked_sub(1).map(|before| before * pieces.len() + index);
                schedule.sends.push(slice(sent, piece, after));
                schedule.receives.push(slice(received, piece, None));
            }
        }
        schedule
    }
}

fn channel_range(count: usize, channel: usize, channels: usize) -> Range<usize> {
    let share = count.div_ceil(channels).next_multiple_of(CHANNEL_ALIGN_BYTES).max(CHANNEL_MIN_BYTES);
    (channel * share).min(count)..((channel + 1) * share).min(count)
}

fn slices(range: Range<usize>, slice_bytes: usize) -> Vec<Range<usize>> {
    let end = range.end;
    range.step_by(slice_bytes).map(|start| start..(start + slice_bytes).min(end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hand figures: 1 GB gathered by 4 ranks in 0.1 s is 10 GB/s of algbw, three quarters of it on the bus.
    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let gather = Collective::AllGather.bandwidth(250_000_000, 4, 0.1);
        assert!((gather.algbw - 10.0).abs() < 1e-9 && (gather.busbw - 7.5).abs() < 1e-9, "{gather:?}");
        let pair = Collective::AllGather.bandwidth(4 << 20, 2, 411e-6);
        assert!((pair.algbw - 20.410).abs() < 1e-3 && (pair.busbw - 10.205).abs() < 1e-3, "{pair:?}");
        let transfer = Collective::SendRecv.bandwidth(1_000_000, 3, 1e-3);
        assert_eq!(transfer, Bandwidth { algbw: 1.0, busbw: 1.0 });
    }

    #[test]
    fn a_size_is_all_that_is_gathered_or_what_one_rank_sends() {
        assert_eq!(Collective::AllGather.count(1024, 3), 341);
        assert_eq!(Collective::AllGather.size_bytes(341, 3), 1023);
        assert_eq!(Collective::SendRecv.count(1024, 3), 1024);
        assert_eq!(Collective::SendRecv.size_bytes(1024, 3), 1024);
    }

    #[test]
    fn small_messages_stay_on_one_channel_and_large_ones_use_all() {
        let used = |count| (0..4).filter(|&channel| !channel_range(count, channel, 4).is_empty()).count();
        assert_eq!([used(1), used(64 << 10), used(65 << 10), used(1 << 20)], [1, 1, 2, 4]);
    }

    /// Runs the schedules of all ranks by copying, as slowly and in as many orders as the dependencies allow, and looks
    /// at the result: every byte of every part must be where it belongs.
    #[test]
    fn schedules_carry_every_byte_to_its_place() {
        for collective in [Collective::AllGather, Collective::SendRecv] {
            for (ranks, channels, count) in [(2, 1, 5), (3, 1, (2 << 20) + 77), (4, 3, 300_001), (2, 4, 9 << 20)] {
                run_by_copying(collective, ranks, channels, count);
            }
        }
    }

    fn run_by_copying(collective: Collective, ranks: usize, channels: usize, count: usize) {
        let mut sources = vec![vec![0_u8; collective.size_bytes(count, ranks)]; ranks];
        for (rank, buffer) in sources.iter_mut().enumerate() {
            let part = collective.contribution(rank, count);
            for (at, byte) in buffer[part.range].iter_mut().enumerate() {
                *byte = (at * 31 + rank * 101 + 1) as u8;
            }
        }
        let mut results = match collective.in_place() {
            true => sources.clone(),
            false => vec![vec![0; count]; ranks],
        };
        for channel in 0..channels {
            let plans: Vec<_> =
                (0..ranks).map(|rank| collective.schedule(rank, ranks, count, channel, channels)).collect();
            let mut done = vec![0; ranks];
            while let Some(rank) = (0..ranks).find(|&rank| {
                let prior = (rank + ranks - 1) % ranks;
                let next = plans[prior].sends.get(done[rank]);
                next.is_some_and(|send| send.after.is_none_or(|receive| receive < done[prior]))
            }) {
                let prior = (rank + ranks - 1) % ranks;
                let (send, receive) = (plans[prior].sends[done[rank]], plans[rank].receives[done[rank]]);
                assert_eq!(send.bytes, receive.bytes);
                let from = if collective.in_place() { &results[prior] } else { &sources[prior] };
                let moved = from[send.offset..][..send.bytes].to_vec();
                results[rank][receive.offset..][..receive.bytes].copy_from_slice(&moved);
                done[rank] += 1;
            }
            assert!((0..ranks).all(|rank| done[rank] == plans[rank].receives.len()), "a send waits for ever");
        }
        for (rank, result) in results.iter().enumerate() {
            for part in collective.result(rank, ranks, count) {
                let sent = &sources[part.rank][collective.contribution(part.rank, count).range];
                assert!(result[part.range] == *sent, "{collective:?} rank {rank}: wrong part of rank {}", part.rank);
            }
        }
    }
}
