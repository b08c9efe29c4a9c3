//! The order of the messages on each connection, and the message that each of them waits for. A
//! message carries one slice of a block. The data of a collective is one block, or a block for each
//! rank. If a rank has several channels to another rank, each channel carries its own part of a
//! block.
//!
//! A ring works in steps: in each step, a rank forwards the data that it received in the previous
//! step. The slices of a step do not wait for each other, so a long part keeps the connection busy.
//! A broadcast passes the data once around the ring, up to the rank before the root. In an
//! all-to-all, no message waits for another.

use super::{Collective, ROOT};
use std::ops::Range;

/// One of a rank's two buffers, which are the same memory if a collective works in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Buffer {
    /// The rank's contribution.
    Send,
    /// The rank's result.
    Recv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slice {
    pub buffer: Buffer,
    pub offset: usize,
    pub bytes: usize,
    /// Index of the message in the other direction that must complete before this one starts.
    pub after: Option<usize>,
    /// True if the same range of the send buffer is added to the received data.
    pub add: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Schedule {
    pub sends: Vec<Slice>,
    pub receives: Vec<Slice>,
    /// Range that the rank copies from its send buffer to the same place in its receive buffer.
    pub copy: Option<Range<usize>>,
}

#[derive(Debug, Clone, Copy)]
pub struct Seat {
    pub rank: usize,
    /// Number of ranks (2 or more).
    pub ranks: usize,
    /// Index of the link in [`Collective::links`].
    pub link: usize,
    pub channels: usize,
}

/// Minimum size of a channel's part of a block. Only the last part may be smaller. Splitting a
/// small block further would only add messages.
const CHANNEL_MIN_BYTES: usize = 64 << 10;
/// The distance from the start of a block to each channel's part is a multiple of this size (two
/// cache lines), as in NCCL.
const CHANNEL_ALIGN_BYTES: usize = 128;

pub fn schedule(collective: Collective, seat: Seat, count: usize) -> Schedule {
    let mut plan = Builder::new(collective, seat, count);
    let Seat {
        rank,
        ranks,
        link,
        channels,
    } = seat;
    let back = |steps: usize| (rank + ranks - steps) % ranks;
    match collective {
        Collective::AllGather => plan.gather(),
        Collective::ReduceScatter => plan.reduce(),
        Collective::AllReduce => {
            plan.reduce();
            plan.gather();
        }
        Collective::Broadcast => {
            if rank != ROOT {
                plan.receive(0, false);
            }
            if (rank + 1) % ranks != ROOT {
                plan.send(0, Buffer::Recv);
            }
        }
        Collective::AllToAll => {
            let distance = 1 + link / channels;
            plan.send((rank + distance) % ranks, Buffer::Send);
            plan.receive(back(distance), false);
            plan.schedule.copy = (link == 0).then(|| rank * count..(rank + 1) * count);
        }
        Collective::SendRecv => {
            plan.send(0, Buffer::Send);
            plan.receive(0, false);
        }
    }
    plan.schedule
}

struct Builder {
    schedule: Schedule,
    seat: Seat,
    /// For each block, the byte ranges of the slices that this channel carries.
    pieces: Vec<Vec<Range<usize>>>,
    /// For each block, the index in `schedule.receives` of the first slice of the latest receive of
    /// this block. `None` if the block has not been received.
    received: Vec<Option<usize>>,
    /// For each block, the index in `schedule.sends` of the first slice of the latest send of this
    /// block out of the receive buffer. `None` if there was no such send.
    passed_on: Vec<Option<usize>>,
}

impl Builder {
    fn new(collective: Collective, seat: Seat, count: usize) -> Self {
        let Seat {
            ranks,
            link,
            channels,
            ..
        } = seat;
        let total = collective.size_bytes(count, ranks);
        let (blocks, share) = match collective {
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => {
                (ranks, count)
            }
            Collective::AllReduce => (ranks, count.div_ceil(ranks)),
            Collective::Broadcast | Collective::SendRecv => (1, count),
        };
        let blocks =
            (0..blocks).map(|block| (block * share).min(total)..((block + 1) * share).min(total));
        let slice_bytes = collective.shape().slice_bytes;
        let pieces = blocks.map(|block| {
            let part = channel_range(block.len(), link % channels, channels);
            slices(
                block.start + part.start..block.start + part.end,
                slice_bytes,
            )
        });
        Self {
            schedule: Schedule::default(),
            seat,
            pieces: pieces.collect(),
            received: vec![None; ranks],
            passed_on: vec![None; ranks],
        }
    }

    /// Adds the steps of a gather: a rank starts with its own block complete and ends with all
    /// blocks complete.
    fn gather(&mut self) {
        let Seat { rank, ranks, .. } = self.seat;
        for step in 0..ranks - 1 {
            self.send((rank + ranks - step) % ranks, Buffer::Recv);
            self.receive((rank + ranks - step - 1) % ranks, false);
        }
    }

    /// Adds the steps of a reduction: partial sums travel around the ring. The last step completes
    /// the rank's own block.
    fn reduce(&mut self) {
        let Seat { rank, ranks, .. } = self.seat;
        for step in 0..ranks - 1 {
            let from = if step == 0 {
                Buffer::Send
            } else {
                Buffer::Recv
            };
            self.send((rank + 2 * ranks - step - 1) % ranks, from);
            self.receive((rank + 2 * ranks - step - 2) % ranks, true);
        }
    }

    /// Adds the send of a block. If the block was received before, each slice waits until the same
    /// slice has arrived.
    fn send(&mut self, block: usize, buffer: Buffer) {
        let first = self.schedule.sends.len();
        for (index, piece) in self.pieces[block].iter().enumerate() {
            let after = self.received[block].map(|receive| receive + index);
            let offset = piece.start;
            let bytes = piece.len();
            self.schedule.sends.push(Slice {
                buffer,
                offset,
                bytes,
                after,
                add: false,
            });
        }
        if buffer == Buffer::Recv {
            self.passed_on[block] = Some(first);
        }
    }

    /// Adds the receive of a block. If the block was sent out of the receive buffer, each slice
    /// waits until the send of the same slice is complete.
    fn receive(&mut self, block: usize, add: bool) {
        let first = self.schedule.receives.len();
        for (index, piece) in self.pieces[block].iter().enumerate() {
            let after = self.passed_on[block].map(|send| send + index);
            let offset = piece.start;
            let bytes = piece.len();
            self.schedule.receives.push(Slice {
                buffer: Buffer::Recv,
                offset,
                bytes,
                after,
                add,
            });
        }
        self.received[block] = Some(first);
    }
}

fn channel_range(bytes: usize, channel: usize, channels: usize) -> Range<usize> {
    let share = bytes
        .div_ceil(channels)
        .next_multiple_of(CHANNEL_ALIGN_BYTES)
        .max(CHANNEL_MIN_BYTES);
    (channel * share).min(bytes)..((channel + 1) * share).min(bytes)
}

fn slices(range: Range<usize>, slice_bytes: usize) -> Vec<Range<usize>> {
    let end = range.end;
    range
        .step_by(slice_bytes)
        .map(|start| start..(start + slice_bytes).min(end))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Collective; 6] = [
        Collective::AllGather,
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::AllToAll,
        Collective::SendRecv,
    ];

    #[test]
    fn small_messages_stay_on_one_channel_and_large_ones_use_all() {
        let used = |count| {
            (0..4)
                .filter(|&channel| !channel_range(count, channel, 4).is_empty())
                .count()
        };
        assert_eq!(
            [used(1), used(64 << 10), used(65 << 10), used(1 << 20)],
            [1, 1, 2, 4]
        );
    }

    /// Runs the schedules of all ranks by copying bytes between buffers, once with the lowest and
    /// once with the highest rank first. Every byte of every part of the result must be in its
    /// place.
    #[test]
    fn schedules_carry_every_byte_to_its_place() {
        for collective in ALL {
            for (ranks, channels, count) in [
                (2, 1, 5),
                (5, 1, 3),
                (3, 1, (1 << 20) + 77),
                (4, 3, 70_001),
                (2, 2, 300_001),
            ] {
                for eager in [false, true] {
                    Copying::new(collective, ranks, channels, count).run(eager);
                }
            }
        }
    }

    struct Copying {
        collective: Collective,
        ranks: usize,
        count: usize,
        send: Vec<Vec<u8>>,
        recv: Vec<Vec<u8>>,
        /// Schedules by rank and link.
        plans: Vec<Vec<Schedule>>,
        /// Number of sends that have arrived, by rank and link.
        delivered: Vec<Vec<usize>>,
        /// Number of sends that the sender knows to be complete. Updated as late as possible: when
        /// no rank can receive a message.
        sent: Vec<Vec<usize>>,
        received: Vec<Vec<usize>>,
        channels: usize,
    }

    fn data(rank: usize, at: usize) -> u8 {
        (at * 31 + (at >> 8) * 7 + rank * 101 + 1) as u8
    }

    impl Copying {
        fn new(collective: Collective, ranks: usize, channels: usize, count: usize) -> Self {
            let size = collective.size_bytes(count, ranks);
            let mut send = vec![vec![0_u8; size]; ranks];
            for (rank, buffer) in send.iter_mut().enumerate() {
                if let Some(range) = collective.contribution(rank, ranks, count) {
                    for (at, byte) in buffer[range].iter_mut().enumerate() {
                        *byte = data(rank, at);
                    }
                }
            }
            let recv = if collective.in_place() {
                send.clone()
            } else {
                vec![vec![0xee; size]; ranks]
            };
            let links = collective.links(0, ranks, channels).len();
            let plan = |rank, link| {
                schedule(
                    collective,
                    Seat {
                        rank,
                        ranks,
                        link,
                        channels,
                    },
                    count,
                )
            };
            let plans = (0..ranks)
                .map(|rank| (0..links).map(|link| plan(rank, link)).collect())
                .collect();
            let zeroes = vec![vec![0; links]; ranks];
            let [delivered, sent, received] = [zeroes.clone(), zeroes.clone(), zeroes];
            Self {
                collective,
                ranks,
                count,
                send,
                recv,
                plans,
                delivered,
                sent,
                received,
                channels,
            }
        }

        fn run(mut self, eager: bool) {
            let mut seats: Vec<(usize, usize)> = (0..self.ranks)
                .flat_map(|rank| (0..self.plans[0].len()).map(move |link| (rank, link)))
                .collect();
            if eager {
                seats.reverse();
            }
            loop {
                if let Some(&(rank, link)) = seats
                    .iter()
                    .find(|&&(rank, link)| self.may_receive(rank, link))
                {
                    self.receive(rank, link);
                } else if self.sent != self.delivered {
                    self.sent.clone_from(&self.delivered);
                } else {
                    break;
                }
            }
            for (rank, link) in seats {
                let left = self.plans[rank][link].receives.len() - self.received[rank][link];
                assert!(
                    left == 0,
                    "{:?}: rank {rank}: {left} messages of link {link} never come",
                    self.collective
                );
                assert_eq!(self.sent[rank][link], self.plans[rank][link].sends.len());
                if let Some(range) = self.plans[rank][link].copy.clone() {
                    self.recv[rank][range.clone()].copy_from_slice(&self.send[rank][range]);
                }
            }
            self.check();
        }

        fn from(&self, rank: usize, link: usize) -> usize {
            self.collective.links(rank, self.ranks, self.channels)[link].from
        }

        fn may_receive(&self, rank: usize, link: usize) -> bool {
            let from = self.from(rank, link);
            let Some(receive) = self.plans[rank][link]
                .receives
                .get(self.received[rank][link])
            else {
                return false;
            };
            let Some(send) = self.plans[from][link].sends.get(self.delivered[from][link]) else {
                return false;
            };
            receive
                .after
                .is_none_or(|send| send < self.sent[rank][link])
                && send
                    .after
                    .is_none_or(|receive| receive < self.received[from][link])
        }

        fn receive(&mut self, rank: usize, link: usize) {
            let from = self.from(rank, link);
            let send = self.plans[from][link].sends[self.delivered[from][link]];
            let receive = self.plans[rank][link].receives[self.received[rank][link]];
            assert_eq!(send.bytes, receive.bytes);
            // A receive must not overwrite the data of a send in flight.
            for under_way in
                &self.plans[rank][link].sends[self.sent[rank][link]..self.delivered[rank][link]]
            {
                let apart = under_way.offset + under_way.bytes <= receive.offset
                    || receive.offset + receive.bytes <= under_way.offset;
                assert!(
                    apart || under_way.buffer == Buffer::Send,
                    "{:?}: rank {rank}: {receive:?}",
                    self.collective
                );
            }
            let source = match send.buffer {
                Buffer::Recv => &self.recv[from],
                Buffer::Send => &self.send[from],
            };
            let mut moved = source[send.offset..][..send.bytes].to_vec();
            if receive.add {
                let own = &self.send[rank][receive.offset..];
                moved
                    .iter_mut()
                    .zip(own)
                    .for_each(|(byte, own)| *byte = byte.wrapping_add(*own));
            }
            self.recv[rank][receive.offset..][..receive.bytes].copy_from_slice(&moved);
            self.delivered[from][link] += 1;
            self.received[rank][link] += 1;
        }

        fn check(&self) {
            for rank in 0..self.ranks {
                for part in self.collective.result(rank, self.ranks, self.count) {
                    for (at, found) in self.recv[rank][part.range.clone()].iter().enumerate() {
                        let sum = |sum: u8, of| sum.wrapping_add(data(of, part.data_offset + at));
                        let expected = part.of.clone().fold(0, sum);
                        assert!(
                            *found == expected,
                            "{:?} rank {rank}: byte {at} of {part:?}",
                            self.collective
                        );
                    }
                }
            }
        }
    }
}
