//! Runs a collective's messages over the channels of one rank, as NCCL's proxy thread does: posts
//! all messages that may start, tests those in flight, and never blocks on one channel.

use super::schedule::{Buffer, Schedule, Slice};
use super::{Collective, Link, Shape};
use crate::net::{self, RecvComm, Registration, Request, SendComm};
use crate::ranks::activity;
use anyhow::{Context, Result, ensure};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Memory that a rank sends from and receives into. If the collective works in place, both fields
/// are the same buffer.
#[derive(Clone)]
pub struct Buffers {
    pub send: Rc<net::Buffer>,
    pub recv: Rc<net::Buffer>,
}

/// The two connections of a [`Link`], with the memory and the messages that they carry.
pub struct Channel {
    // Rust drops fields from the top, here in the order in which NCCL closes them: requests,
    // registrations, comms.
    sends: Queue,
    receives: Queue,
    /// Registration of the send buffer with the sending comm; `None` if the collective works in
    /// place.
    send_memory: Option<Rc<Registration>>,
    /// Registration of the receive buffer with the sending comm, if the rank forwards data.
    pass_on_memory: Option<Rc<Registration>>,
    recv_memory: Rc<Registration>,
    buffers: Buffers,
    send: SendComm,
    recv: RecvComm,
    copy: Option<Range<usize>>,
    /// The tag of a message is the sender's rank, as in NCCL.
    send_tag: i32,
    recv_tag: i32,
}

#[derive(Default)]
struct Queue {
    slices: Vec<Slice>,
    posted: usize,
    done: usize,
    requests: VecDeque<Request>,
}

impl Channel {
    /// Makes a channel, and registers with both comms the memory that `collective` needs. `rank` is
    /// this rank.
    pub fn new(
        (send, recv): (SendComm, RecvComm),
        buffers: &Buffers,
        collective: Collective,
        rank: usize,
        link: Link,
    ) -> Result<Self> {
        Ok(Self {
            sends: Queue::default(),
            receives: Queue::default(),
            send_memory: (!collective.in_place())
                .then(|| send.register(&buffers.send))
                .transpose()?,
            pass_on_memory: collective
                .passes_on()
                .then(|| send.register(&buffers.recv))
                .transpose()?,
            recv_memory: recv.register(&buffers.recv)?,
            buffers: buffers.clone(),
            send,
            recv,
            copy: None,
            send_tag: i32::try_from(rank)?,
            recv_tag: i32::try_from(link.from)?,
        })
    }

    pub fn plan(&mut self, schedule: Schedule) {
        self.sends.slices = schedule.sends;
        self.receives.slices = schedule.receives;
        self.copy = schedule.copy;
    }

    fn start(&mut self) -> Result<()> {
        self.sends.posted = 0;
        self.sends.done = 0;
        self.receives.posted = 0;
        self.receives.done = 0;
        let Some(range) = self.copy.clone() else {
            return Ok(());
        };
        self.buffers
            .recv
            .combine(&self.buffers.send, range, |into, from| {
                into.copy_from_slice(from)
            })
    }

    fn is_done(&self) -> bool {
        self.sends.done == self.sends.slices.len()
            && self.receives.done == self.receives.slices.len()
    }

    /// Posts and tests messages once. Returns true if a message was posted or completed.
    fn progress(&mut self, in_flight: usize) -> Result<bool> {
        let mut moved = false;
        while let Some(slice) = self.receives.next(in_flight, self.sends.done) {
            let request =
                self.recv
                    .irecv(&self.recv_memory, slice.offset, slice.bytes, self.recv_tag)?;
            let Some(request) = request else { break };
            moved |= self.receives.started(request);
        }
        while let Some(slice) = self.sends.next(in_flight, self.receives.done) {
            let memory = match slice.buffer {
                Buffer::Send => &self.send_memory,
                Buffer::Recv => &self.pass_on_memory,
            };
            let memory = memory
                .as_ref()
                .context("a message from memory that is not registered")?;
            let request = self
                .send
                .isend(memory, slice.offset, slice.bytes, self.send_tag)?;
            let Some(request) = request else { break };
            moved |= self.sends.started(request);
        }
        while let Some(slice) = self.receives.test().context("receive")? {
            if slice.add {
                self.add(slice)?;
            }
            moved = true;
        }
        while self.sends.test().context("send")?.is_some() {
            moved = true;
        }
        Ok(moved)
    }

    fn add(&self, slice: Slice) -> Result<()> {
        self.buffers.recv.combine(
            &self.buffers.send,
            slice.offset..slice.offset + slice.bytes,
            |into, from| {
                into.iter_mut()
                    .zip(from)
                    .for_each(|(sum, own)| *sum = sum.wrapping_add(*own));
            },
        )
    }
}

impl Queue {
    /// Returns the next slice if it may be posted now: fewer than `in_flight` requests are open,
    /// and the message that the slice waits for is complete. `others_done` is the number of
    /// complete messages in the other direction.
    fn next(&self, in_flight: usize, others_done: usize) -> Option<Slice> {
        let slice = self
            .slices
            .get(self.posted)
            .filter(|_| self.requests.len() < in_flight)?;
        slice
            .after
            .is_none_or(|other| other < others_done)
            .then_some(*slice)
    }

    fn started(&mut self, request: Request) -> bool {
        self.requests.push_back(request);
        self.posted += 1;
        true
    }

    /// Tests only the oldest request, because NCCL completes requests in order. Returns the
    /// request's slice if it is complete.
    fn test(&mut self) -> Result<Option<Slice>> {
        let Some(request) = self.requests.front_mut() else {
            return Ok(None);
        };
        let Some(bytes) = request.test()? else {
            return Ok(None);
        };
        let slice = self.slices[self.done];
        ensure!(
            bytes == slice.bytes,
            "message {} has {bytes} bytes instead of {}",
            self.done,
            slice.bytes
        );
        self.requests.pop_front();
        self.done += 1;
        activity::tick();
        Ok(Some(slice))
    }
}

#[derive(Debug, Default)]
pub struct Pauses {
    since: Option<Instant>,
    pub longest: Duration,
}

impl Pauses {
    fn note(&mut self, moved: bool) {
        match (moved, self.since) {
            (false, None) => self.since = Some(Instant::now()),
            (true, Some(since)) => {
                self.longest = self.longest.max(since.elapsed());
                self.since = None;
            }
            _ => {}
        }
    }
}

pub fn run(channels: &mut [Channel], shape: Shape, pauses: &mut Pauses) -> Result<()> {
    channels.iter_mut().try_for_each(Channel::start)?;
    let messages = |channel: &Channel| channel.sends.slices.len() + channel.receives.slices.len();
    activity::start_messages(channels.iter().map(messages).sum());
    loop {
        let mut moved = false;
        let mut done = true;
        for (number, channel) in channels
            .iter_mut()
            .enumerate()
            .filter(|(_, channel)| !channel.is_done())
        {
            moved |= channel
                .progress(shape.in_flight)
                .with_context(|| format!("channel {number}"))?;
            done &= channel.is_done();
        }
        pauses.note(moved);
        if done {
            return Ok(());
        }
        if !moved {
            // NCCL's proxy yields too. Otherwise ranks that share cores would use up each other's
            // time slices.
            std::thread::yield_now();
        }
    }
}
