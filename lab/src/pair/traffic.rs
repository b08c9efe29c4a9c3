//! Messages over the connections of one rank, driven by one thread as NCCL's proxy drives them.
//! Each pass posts as much as possible, then tests the oldest request of each connection. No pass
//! waits.

use super::messages::{Answer, Flowed, Layout, Order};
use anyhow::{Context, Result, bail, ensure};
use nccl_tests_harness::net::{Buffer, RecvComm, Registration, Request, SendComm};
use nccl_tests_harness::ranks::activity;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// One direction of a rank's traffic on one connection.
pub struct Lane {
    // Dropped in the order in which NCCL gives them back: requests, registration, comm.
    requests: VecDeque<Request>,
    memory: Rc<Registration>,
    buffer: Rc<Buffer>,
    end: End,
    posted: u64,
    done: u64,
}

enum End {
    Send(SendComm),
    Recv(RecvComm),
}

/// Places of messages in a lane's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slots {
    count: u64,
    stride_bytes: usize,
}

/// Every message has the same tag: a connection has one stream.
const TAG: i32 = 0;
/// Slots begin at multiples of this, as NCCL aligns its own.
const ALIGN_BYTES: usize = 128;

impl Slots {
    fn of(layout: Layout, buffer_bytes: usize) -> Self {
        let count = (buffer_bytes / layout.bytes).clamp(1, layout.in_flight);
        let room = buffer_bytes / count;
        let aligned = room / ALIGN_BYTES * ALIGN_BYTES;
        Self { count: count as u64, stride_bytes: if aligned >= layout.bytes { aligned } else { layout.bytes } }
    }

    fn offset(self, message: u64) -> usize {
        (message % self.count) as usize * self.stride_bytes
    }
}

impl Lane {
    pub fn sending(comm: SendComm, buffer_bytes: usize) -> Result<Self> {
        let buffer = Buffer::new(buffer_bytes)?;
        Ok(Self::new(comm.register(&buffer)?, buffer, End::Send(comm)))
    }

    pub fn receiving(comm: RecvComm, buffer_bytes: usize) -> Result<Self> {
        let buffer = Buffer::new(buffer_bytes)?;
        Ok(Self::new(comm.register(&buffer)?, buffer, End::Recv(comm)))
    }

    fn new(memory: Rc<Registration>, buffer: Rc<Buffer>, end: End) -> Self {
        Self { requests: VecDeque::new(), memory, buffer, end, posted: 0, done: 0 }
    }

    pub fn sends(&self) -> bool {
        matches!(self.end, End::Send(_))
    }

    /// Returns the number of message buffers that fit into the memory, but not more than there may
    /// be messages in flight.
    pub fn slots(&self, layout: Layout) -> u64 {
        Slots::of(layout, self.buffer.bytes()).count
    }

    /// Calls `work` with the number and memory of each slot. Fails while requests are in flight.
    pub fn with_slots(&self, layout: Layout, mut work: impl FnMut(u64, &mut [u8])) -> Result<()> {
        let slots = Slots::of(layout, self.buffer.bytes());
        self.buffer.with_bytes(|bytes| {
            for slot in 0..slots.count {
                let start = slots.offset(slot);
                work(slot, &mut bytes[start..start + layout.bytes]);
                activity::tick();
            }
        })
    }

    /// Posts the next message. Returns false if the plugin cannot take it yet.
    fn post(&mut self, layout: Layout) -> Result<bool> {
        let offset = Slots::of(layout, self.buffer.bytes()).offset(self.posted);
        let request = match &self.end {
            End::Send(comm) => comm.isend(&self.memory, offset, layout.bytes, TAG)?,
            End::Recv(comm) => comm.irecv(&self.memory, offset, layout.bytes, TAG)?,
        };
        let Some(request) = request else { return Ok(false) };
        self.requests.push_back(request);
        self.posted += 1;
        Ok(true)
    }

    /// Tests the oldest message. Returns true if it is done.
    fn complete(&mut self, layout: Layout) -> Result<bool> {
        let Some(request) = self.requests.front_mut() else { return Ok(false) };
        let Some(bytes) = request.test()? else { return Ok(false) };
        ensure!(bytes == layout.bytes, "message {} has {bytes} bytes instead of {}", self.done, layout.bytes);
        self.requests.pop_front();
        self.done += 1;
        activity::tick();
        Ok(true)
    }

    /// Posts as many messages as possible, up to a total of `end`, then tests until the oldest is
    /// not done. Returns the number of completed messages, and true if any message was posted.
    fn progress(&mut self, layout: Layout, end: u64) -> Result<(u64, bool)> {
        let mut begun = false;
        while self.requests.len() < layout.in_flight && self.posted < end && self.post(layout)? {
            begun = true;
        }
        let before = self.done;
        while self.complete(layout)? {}
        Ok((self.done - before, begun))
    }

    fn name(&self) -> &'static str {
        if self.sends() { "send" } else { "receive" }
    }
}

/// Sends or receives `messages` on each lane. Returns the time taken.
pub fn stream(lanes: &mut [Lane], layout: Layout, messages: u64) -> Result<Duration> {
    start(lanes);
    activity::start_messages(lanes.len() * usize::try_from(messages)?);
    let begin = Instant::now();
    while lanes.iter().any(|lane| lane.done < messages) {
        if pass(lanes, layout, messages)?.1 {
            rest(layout);
        }
    }
    Ok(begin.elapsed())
}

/// Yields as NCCL's proxy does when nothing moved, or sleeps if the layout says so. Ranks that
/// share cores would otherwise use up each other's time slices.
fn rest(layout: Layout) {
    match layout.rest_us {
        0 => std::thread::yield_now(),
        us => std::thread::sleep(Duration::from_micros(u64::from(us))),
    }
}

fn start(lanes: &mut [Lane]) {
    lanes.iter_mut().for_each(|lane| (lane.posted, lane.done) = (0, 0));
}

/// Calls [`Lane::progress`] once on each lane that has not completed `end` messages. Returns the
/// number of messages completed now, and true if no message was posted or completed.
fn pass(lanes: &mut [Lane], layout: Layout, end: u64) -> Result<(u64, bool)> {
    let (mut completed, mut begun) = (0, false);
    for (number, lane) in lanes.iter_mut().enumerate().filter(|(_, lane)| lane.done < end) {
        let name = lane.name();
        let (more, some) = lane.progress(layout, end).with_context(|| format!("connection {number}: {name}"))?;
        completed += more;
        begun |= some;
    }
    Ok((completed, completed == 0 && !begun))
}

/// Runs a ping-pong of `messages` over one lane of each direction. Posts as many receives ahead as
/// may be in flight, as NCCL does. If `leads` is true, this rank sends first. Returns the time
/// taken and, on the rank that leads, half a round trip in microseconds: median, 99th percentile,
/// shortest.
pub fn ping_pong(lanes: &mut [Lane], layout: Layout, messages: u64, leads: bool) -> Result<(Duration, Vec<f64>)> {
    start(lanes);
    activity::start_messages(2 * usize::try_from(messages)?);
    let (send, recv) = both(lanes)?;
    let mut half_us = Vec::with_capacity(usize::try_from(messages)?);
    let begin = Instant::now();
    for turn in 0..messages {
        ahead(recv, layout, messages)?;
        let sent = Instant::now();
        if leads {
            turn_to(send, layout)?;
        }
        while !recv.complete(layout).context("receive")? {
            // Receives that the plugin refused before are posted now, or the peer would wait
            // forever. The send is tested too, because some plugins move a message only while it is
            // tested.
            ahead(recv, layout, messages)?;
            send.complete(layout).context("send")?;
            rest(layout);
        }
        if leads {
            half_us.push(sent.elapsed().as_secs_f64() * 1e6 / 2.0);
        } else {
            turn_to(send, layout)?;
        }
        while send.done <= turn {
            if !send.complete(layout).context("send")? {
                ahead(recv, layout, messages)?;
                rest(layout);
            }
        }
    }
    let seconds = begin.elapsed();
    half_us.sort_unstable_by(f64::total_cmp);
    // Only the rank that leads has measured round trips. The other rank returns none.
    let place = |part: f64| ((half_us.len() as f64 * part).ceil() as usize).saturating_sub(1);
    let quantile = |part: f64| half_us.get(place(part)).copied();
    Ok((seconds, [0.50, 0.99, 0.0].into_iter().filter_map(quantile).collect()))
}

fn both(lanes: &mut [Lane]) -> Result<(&mut Lane, &mut Lane)> {
    let (mut sends, mut receives): (Vec<_>, Vec<_>) = lanes.iter_mut().partition(|lane| lane.sends());
    let both = sends.pop().zip(receives.pop());
    both.context("a ping-pong needs a connection in each direction")
}

fn ahead(recv: &mut Lane, layout: Layout, messages: u64) -> Result<()> {
    while recv.requests.len() < layout.in_flight && recv.posted < messages && recv.post(layout).context("receive")? {}
    Ok(())
}

/// Sends one message. Retries until the peer, which waits for the message, has posted a receive.
fn turn_to(send: &mut Lane, layout: Layout) -> Result<()> {
    while !send.post(layout).context("send")? {
        rest(layout);
    }
    Ok(())
}

/// Sends or receives on all lanes until the end that [`Order::Until`] names. All times are since
/// `begin`. `listen` returns the next order, if any. `answer` is called with the answer to each
/// order. Unexpected orders are errors.
pub fn flow(
    begin: Instant,
    lanes: &mut [Lane],
    layout: Layout,
    window: Duration,
    listen: impl Fn() -> Result<Option<Order>>,
    answer: impl Fn(Answer) -> Result<()>,
) -> Result<Flowed> {
    start(lanes);
    let mut flowed = Flowed::default();
    let window_at = || (begin.elapsed().as_nanos() / window.as_nanos()) as usize;
    let (mut end, mut ends) = (u64::MAX, false);
    while !(ends && lanes.iter().all(|lane| lane.done == end)) {
        let (completed, idle) = pass(lanes, layout, end)?;
        if completed > 0 {
            let at = window_at();
            flowed.windows_bytes.resize(flowed.windows_bytes.len().max(at + 1), 0);
            flowed.windows_bytes[at] += completed * layout.bytes as u64;
        }
        if let Some(order) = listen()? {
            let begun = lanes.iter().map(|lane| lane.posted).max().unwrap_or(0);
            match order {
                Order::Mark => flowed.marks_s.push(begin.elapsed().as_secs_f64()),
                Order::Stop => end = begun,
                Order::Until { messages } => (end, ends) = (messages.max(begun), true),
                other => bail!("unexpected order {other:?} in a flow"),
            }
            // Windows in which no message completed are listed too, with 0 bytes.
            flowed.windows_bytes.resize(flowed.windows_bytes.len().max(window_at() + 1), 0);
            answer(if end == u64::MAX { Answer::Done } else { Answer::Stopped(end) })?;
        }
        if idle {
            rest(layout);
        }
    }
    Ok(flowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_buffers_as_fit() {
        let layout = |bytes| Layout { bytes, in_flight: 8, rest_us: 0 };
        assert_eq!(Slots::of(layout(8), 8 << 10), Slots { count: 8, stride_bytes: 1024 });
        assert_eq!(Slots::of(layout(1 << 20), 3 << 20), Slots { count: 3, stride_bytes: 1 << 20 });
        assert_eq!(Slots::of(layout(1 << 20), 1 << 20), Slots { count: 1, stride_bytes: 1 << 20 });
        // 1000 bytes: an aligned stride would be too small.
        assert_eq!(Slots::of(layout(1000), 8000), Slots { count: 8, stride_bytes: 1000 });
        let slots = Slots::of(layout(8), 8 << 10);
        assert_eq!((slots.offset(7), slots.offset(8), slots.offset(17)), (7168, 0, 1024));
    }
}
