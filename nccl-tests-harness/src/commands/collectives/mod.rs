//! Definitions of the collectives: the ranks that exchange messages, the expected results, and
//! counts and bandwidths as nccl-tests computes them. `schedule` has the order of the messages.
//!
//! A collective that works in place uses one buffer on each rank. Otherwise a rank has a send
//! buffer and a receive buffer.
//!
//! Elements are bytes. A sum of bytes wraps around, so it does not depend on the order of its
//! terms, and every byte of a result can be checked exactly.

pub mod lead;
pub mod messages;
pub mod options;
mod progress;
pub mod rank;
pub mod report;
mod schedule;
mod table;

use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Collective {
    /// Every rank ends with the parts of all ranks. In place: the receive buffer has the rank's own
    /// part from the start.
    AllGather,
    /// Every rank ends with the sum of all ranks' data. Out of place.
    AllReduce,
    /// Every rank ends with its own part of the sum of all ranks' data. Out of place.
    ReduceScatter,
    /// Every rank ends with the data of [`ROOT`]. In place.
    Broadcast,
    /// Every rank sends one part to every rank. Out of place.
    #[serde(rename = "alltoall")]
    AllToAll,
    /// Every rank sends to the next one and receives from the one before. Out of place.
    #[serde(rename = "sendrecv")]
    SendRecv,
}

pub const ROOT: usize = 0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Maximum bytes of a message.
    pub slice_bytes: usize,
    /// Maximum messages in flight on a connection in each direction.
    pub in_flight: usize,
}

/// Two connections of a rank: one sends to the rank `to`, the other receives from the rank `from`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    pub to: usize,
    pub from: usize,
}

/// A stretch of the result that a rank must end with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Ranks whose data is added up to give this part. A single rank if nothing is added up.
    pub of: Range<usize>,
    /// Position of the first byte within the data of each of these ranks.
    pub data_offset: usize,
    /// Range of the receive buffer, in bytes, in which the part must be.
    pub range: Range<usize>,
}

/// Algorithm and bus bandwidth in GB/s (10^9 bytes a second).
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Bandwidth {
    #[serde(rename = "algbw_gb_s")]
    pub algbw: f64,
    /// Bandwidth that the collective needs on each rank's link.
    #[serde(rename = "busbw_gb_s")]
    pub busbw: f64,
}

impl Collective {
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "alltoall",
            Self::SendRecv => "sendrecv",
        }
    }

    pub fn in_place(self) -> bool {
        matches!(self, Self::AllGather | Self::Broadcast)
    }

    /// Returns true if a rank forwards received data from its receive buffer.
    pub fn passes_on(self) -> bool {
        !matches!(self, Self::AllToAll | Self::SendRecv)
    }

    pub fn operation(self) -> &'static str {
        match self {
            Self::AllReduce | Self::ReduceScatter => "sum",
            _ => "none",
        }
    }

    /// Returns the root as nccl-tests shows it: -1 for none.
    pub fn root(self) -> i32 {
        match self {
            Self::Broadcast => ROOT as i32,
            _ => -1,
        }
    }

    /// Returns the maximum size of a message and the maximum number of messages in flight, as in
    /// NCCL. A ring has four slices in flight, each of two steps of 512 KiB. A point-to-point
    /// transfer has eight steps in flight. Each of these eight steps is one chunk. NCCL's chunks
    /// have 128 to 256 KiB over a network; here they have 256 KiB.
    pub fn shape(self) -> Shape {
        match self {
            Self::AllToAll | Self::SendRecv => Shape {
                slice_bytes: 256 << 10,
                in_flight: 8,
            },
            _ => Shape {
                slice_bytes: 1 << 20,
                in_flight: 4,
            },
        }
    }

    /// Returns the connections of `rank`: `channels` links to each rank that `rank` sends to. Link
    /// `i` of a rank sends to link `i` of the rank `to`.
    pub fn links(self, rank: usize, ranks: usize, channels: usize) -> Vec<Link> {
        let distances = match self {
            Self::AllToAll => 1..ranks,
            _ => 1..2,
        };
        let link = |distance| Link {
            to: (rank + distance) % ranks,
            from: (rank + ranks - distance) % ranks,
        };
        distances
            .flat_map(|distance| std::iter::repeat_n(link(distance), channels))
            .collect()
    }

    /// Returns the number of elements that nccl-tests shows for a size. If the collective has a
    /// part for each rank, this is the number of elements of one part. nccl-tests rounds a part
    /// down to a multiple of 16 bytes, so a part of a small size would be empty. Here a part may
    /// have any number of bytes.
    pub fn count(self, size_bytes: usize, ranks: usize) -> usize {
        size_bytes / self.parts(ranks)
    }

    /// Returns the size that the table shows, which is also the length of each buffer.
    pub fn size_bytes(self, count: usize, ranks: usize) -> usize {
        count * self.parts(ranks)
    }

    fn parts(self, ranks: usize) -> usize {
        match self {
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => ranks,
            Self::AllReduce | Self::Broadcast | Self::SendRecv => 1,
        }
    }

    /// Returns the bandwidths as nccl-tests computes them (its doc/PERFORMANCE.md).
    pub fn bandwidth(self, count: usize, ranks: usize, seconds: f64) -> Bandwidth {
        let algbw = self.size_bytes(count, ranks) as f64 / 1e9 / seconds;
        let others = (ranks - 1) as f64 / ranks as f64;
        let factor = match self {
            Self::AllGather | Self::ReduceScatter | Self::AllToAll => others,
            Self::AllReduce => 2.0 * others,
            Self::Broadcast | Self::SendRecv => 1.0,
        };
        Bandwidth {
            algbw,
            busbw: algbw * factor,
        }
    }

    /// Returns the range of the send buffer that `rank` fills before the start, if any.
    pub fn contribution(self, rank: usize, ranks: usize, count: usize) -> Option<Range<usize>> {
        match self {
            Self::AllGather => Some(rank * count..(rank + 1) * count),
            Self::Broadcast if rank != ROOT => None,
            _ => Some(0..self.size_bytes(count, ranks)),
        }
    }

    /// Returns the expected contents of the receive buffer of `rank` after the collective.
    pub fn result(self, rank: usize, ranks: usize, count: usize) -> Vec<Part> {
        let block = |index: usize| index * count..(index + 1) * count;
        let part = |of, data_offset, range| Part {
            of,
            data_offset,
            range,
        };
        let one = |from, data_offset, range| part(from..from + 1, data_offset, range);
        match self {
            Self::AllGather => (0..ranks).map(|from| one(from, 0, block(from))).collect(),
            Self::AllReduce => vec![part(0..ranks, 0, 0..count)],
            Self::ReduceScatter => vec![part(0..ranks, rank * count, block(rank))],
            Self::Broadcast => vec![one(ROOT, 0, 0..count)],
            Self::AllToAll => (0..ranks)
                .map(|from| one(from, rank * count, block(from)))
                .collect(),
            Self::SendRecv => vec![one((rank + ranks - 1) % ranks, 0, 0..count)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed by hand: 1 GB gathered by 4 ranks in 0.1 s is an algbw of 10 GB/s, and three
    /// quarters of that as busbw.
    #[test]
    fn bandwidths_are_those_of_nccl_tests() {
        let gather = Collective::AllGather.bandwidth(250_000_000, 4, 0.1);
        assert!(
            (gather.algbw - 10.0).abs() < 1e-9 && (gather.busbw - 7.5).abs() < 1e-9,
            "{gather:?}"
        );
        let pair = Collective::AllGather.bandwidth(4 << 20, 2, 411e-6);
        assert!(
            (pair.algbw - 20.410).abs() < 1e-3 && (pair.busbw - 10.205).abs() < 1e-3,
            "{pair:?}"
        );
        let transfer = Collective::SendRecv.bandwidth(1_000_000, 3, 1e-3);
        assert_eq!(
            transfer,
            Bandwidth {
                algbw: 1.0,
                busbw: 1.0
            }
        );
        assert_eq!(
            Collective::Broadcast.bandwidth(1_000_000, 3, 1e-3),
            transfer
        );
        for (collective, count, factor) in [
            (Collective::ReduceScatter, 250_000_000, 0.75),
            (Collective::AllToAll, 250_000_000, 0.75),
            (Collective::AllReduce, 1_000_000_000, 1.5),
        ] {
            let bandwidth = collective.bandwidth(count, 4, 0.1);
            assert!(
                (bandwidth.algbw - 10.0).abs() < 1e-9,
                "{collective:?}: {bandwidth:?}"
            );
            assert!(
                (bandwidth.busbw - 10.0 * factor).abs() < 1e-9,
                "{collective:?}: {bandwidth:?}"
            );
        }
    }

    #[test]
    fn a_size_is_the_sum_of_all_parts_or_of_what_one_rank_sends() {
        for collective in [
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::AllToAll,
        ] {
            assert_eq!(
                (collective.count(1024, 3), collective.size_bytes(341, 3)),
                (341, 1023)
            );
        }
        for collective in [
            Collective::SendRecv,
            Collective::AllReduce,
            Collective::Broadcast,
        ] {
            assert_eq!(
                (collective.count(1024, 3), collective.size_bytes(1024, 3)),
                (1024, 1024)
            );
        }
    }

    #[test]
    fn both_ends_of_a_link_agree() {
        for collective in [Collective::AllGather, Collective::AllToAll] {
            for (ranks, channels) in [(2, 1), (5, 3)] {
                let links: Vec<_> = (0..ranks)
                    .map(|rank| collective.links(rank, ranks, channels))
                    .collect();
                for (rank, links_of_rank) in links.iter().enumerate() {
                    for (index, link) in links_of_rank.iter().enumerate() {
                        assert_eq!(
                            (links[link.to][index].from, links[link.from][index].to),
                            (rank, rank)
                        );
                    }
                }
            }
        }
        assert_eq!(
            Collective::AllToAll
                .links(1, 4, 1)
                .iter()
                .map(|link| link.to)
                .collect::<Vec<_>>(),
            [2, 3, 0]
        );
        assert_eq!(Collective::AllReduce.links(1, 4, 2).len(), 2);
    }
}
