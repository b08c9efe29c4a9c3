//! Runs a collective's messages over the channels of one rank, as NCCL's proxy thread does: post what may be posted, test
//! what is under way, never wait in one place.

use crate::activity;
use crate::collective::{Schedule, Shape, Slice};
use crate::net::{RecvComm, Registration, Request, SendComm};
use anyhow::{Context, Result, ensure};
use std::collections::VecDeque;
use std::rc::Rc;

/// One connection to the next rank and one from the rank before.
pub struct Channel {
    // In the order in which NCCL gives them back: requests, registrations, comms.
    sends: Lane,
    receives: Lane,
    send_memory: Rc<Registration>,
    recv_memory: Rc<Registration>,
    send: SendComm,
    recv: RecvComm,
    /// NCCL uses the sender's rank as the tag.
    send_tag: i32,
    recv_tag: i32,
}

/// One direction of a channel.
#[derive(Default)]
struct Lane {
    slices: Vec<Slice>,
    posted: usize,
    done: usize,
    requests: VecDeque<Request>,
}

impl Channel {
    /// Registers the memory with both comms. `rank` is this rank, `prior` the one before it.
    ///
    /// # Errors
    /// The plugin's.
    pub fn new(
        send: SendComm,
        recv: RecvComm,
        memory: &crate::rank::Buffers,
        rank: usize,
        prior: usize,
    ) -> Result<Self> {
        Ok(Self {
            sends: Lane::default(),
            receives: Lane::default(),
            send_memory: send.register(&memory.send)?,
            recv_memory: recv.register(&memory.recv)?,
            send,
            recv,
            send_tag: i32::try_from(rank)?,
            recv_tag: i32::try_from(prior)?,
        })
    }

    /// What the channel does at each [`run`] from now on.
    pub fn plan(&mut self, schedule: Schedule) {
        self.sends.slices = schedule.sends;
        self.receives.slices = schedule.receives;
    }

    fn restart(&mut self) {
        (self.sends.posted, self.sends.done) = (0, 0);
        (self.receives.posted, self.receives.done) = (0, 0);
    }

    fn is_done(&self) -> bool {
        self.sends.done == self.sends.slices.len() && self.receives.done == self.receives.slices.len()
    }

    /// One round of posting and testing; whether anything moved.
    fn progress(&mut self, in_flight: usize) -> Result<bool> {
        let mut moved = false;
        while let Some(slice) = self.receives.next(in_flight, usize::MAX) {
            let request = self.recv.irecv(&self.recv_memory, slice.offset, slice.bytes, self.recv_tag)?;
            let Some(request) = request else { break };
            moved |= self.receives.started(request);
        }
        while let Some(slice) = self.sends.next(in_flight, self.receives.done) {
            let request = self.send.isend(&self.send_memory, slice.offset, slice.bytes, self.send_tag)?;
            let Some(request) = request else { break };
            moved |= self.sends.started(request);
        }
        moved |= self.receives.test().context("receive")?;
        moved |= self.sends.test().context("send")?;
        Ok(moved)
    }
}

impl Lane {
    /// The slice to post now: the next one, when there is room and the receive that it waits for is complete.
    fn next(&self, in_flight: usize, receives_done: usize) -> Option<Slice> {
        let slice = self.slices.get(self.posted).filter(|_| self.requests.len() < in_flight)?;
        slice.after.is_none_or(|receive| receive < receives_done).then_some(*slice)
    }

    fn started(&mut self, request: Request) -> bool {
        self.requests.push_back(request);
        self.posted += 1;
        true
    }

    /// Completes from the oldest request on, in order, as NCCL does.
    fn test(&mut self) -> Result<bool> {
        let before = self.done;
        while let Some(request) = self.requests.front_mut() {
            let Some(bytes) = request.test()? else { break };
            let expected = self.slices[self.done].bytes;
            ensure!(bytes == expected, "message {} has {bytes} bytes instead of {expected}", self.done);
            self.requests.pop_front();
            self.done += 1;
            activity::tick();
        }
        Ok(self.done > before)
    }
}

/// Runs the planned messages of all channels once.
///
/// # Errors
/// The plugin's, with the channel's number.
pub fn run(channels: &mut [Channel], shape: Shape) -> Result<()> {
    channels.iter_mut().for_each(Channel::restart);
    let messages = |channel: &Channel| channel.sends.slices.len() + channel.receives.slices.len();
    activity::start_messages(channels.iter().map(messages).sum());
    loop {
        let (mut moved, mut done) = (false, true);
        for (number, channel) in channels.iter_mut().enumerate().filter(|(_, channel)| !channel.is_done()) {
            moved |= channel.progress(shape.in_flight).with_context(|| format!("channel {number}"))?;
            done &= channel.is_done();
        }
        if done {
            return Ok(());
        }
        if !moved {
            // NCCL's proxy yields too: ranks that share cores would otherwise wait out each other's time slices.
            std::thread::yield_now();
        }
    }
}
