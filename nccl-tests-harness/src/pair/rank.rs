//! One rank of a pair: follows the command's orders, in a process of its own.

use super::messages::{Answer, Layout, Opened, Order};
use super::traffic::{self, Lane, Word};
use crate::net::{Context, Listener, Plugin};
use crate::ranks::activity;
use crate::ranks::control::Work;
use crate::ranks::device;
use crate::ranks::log;
use crate::ranks::pattern::{Mismatch, Pattern, Sum};
use anyhow::{Context as _, Result, bail, ensure};
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

/// The work of a pair of ranks.
pub struct Pair;

impl Work for Pair {
    const COMMAND: &'static str = "pair-rank";
    type Order = Order;
    type Answer = Answer;

    fn work(
        library: Option<&Path>,
        orders: &mpsc::Receiver<Order>,
        answer: &dyn Fn(Answer) -> Result<()>,
    ) -> Result<()> {
        let Order::Setup(setup) = orders.recv()? else { bail!("the first order is not the set-up") };
        let context = Plugin::load(library.unwrap_or(&setup.plugin), setup.abi)?.init(setup.job)?;
        let network = device::examine(&context)?;
        answer(Answer::Up { network, abi: context.version() })?;
        let mut rank = Rank { number: setup.rank, listeners: Vec::new(), lanes: Vec::new(), context };
        loop {
            activity::stage("waiting for the next order");
            let Ok(order) = orders.recv() else { break };
            match rank.obey(order, orders, answer) {
                Ok(told) => answer(told)?,
                Err(error) => {
                    // Nothing is closed: the other rank would fail too, and its error would hide this one.
                    std::mem::forget(rank);
                    return Err(error);
                }
            }
        }
        activity::stage("closing");
        Ok(())
    }
}

struct Rank {
    number: usize,
    // In the order in which they are closed.
    lanes: Vec<Lane>,
    listeners: Vec<Listener>,
    context: Rc<Context>,
}

impl Rank {
    fn obey(
        &mut self,
        order: Order,
        orders: &mpsc::Receiver<Order>,
        answer: &dyn Fn(Answer) -> Result<()>,
    ) -> Result<Answer> {
        match order {
            Order::Listen { connections } => {
                activity::stage("listening");
                let (listeners, handles) = device::listen(&self.context, connections)?;
                self.listeners = listeners;
                Ok(Answer::Listening { handles })
            }
            Order::Connect { handles, buffer_bytes } => self.connect(handles, buffer_bytes).map(Answer::Connected),
            Order::Check { layout, iteration } => self.check(layout, iteration),
            Order::Stream { layout, messages } => {
                activity::stage(format!("streaming messages of {} bytes", layout.bytes));
                let took = traffic::stream(&mut self.lanes, layout, messages)?;
                Ok(Answer::Streamed { seconds: took.as_secs_f64() })
            }
            Order::PingPong { layout, messages } => {
                activity::stage(format!("running ping-pong with messages of {} bytes", layout.bytes));
                let (took, half_trip) = traffic::ping_pong(&mut self.lanes, layout, messages, self.number == 0)?;
                Ok(Answer::PingPonged { seconds: took.as_secs_f64(), half_trip })
            }
            Order::Flow { layout, window_ms } => self.flow(layout, window_ms, orders, answer),
            Order::Close => {
                activity::stage("closing connections");
                self.lanes.clear();
                Ok(Answer::Closed)
            }
            other @ (Order::Setup(_) | Order::Mark | Order::Stop | Order::Until { .. }) => {
                bail!("unexpected order {other:?}")
            }
        }
    }

    fn connect(&mut self, handles: Vec<Vec<u8>>, buffer_bytes: usize) -> Result<Opened> {
        activity::stage("connecting");
        let handles = device::handles(handles)?;
        let rss_before_bytes = rss_bytes()?;
        let begin = Instant::now();
        let connected = device::connect(&self.context, &self.listeners, handles);
        let (sends, receives) = connected.map_err(|(number, error)| error.context(format!("connection {number}")))?;
        let seconds = begin.elapsed().as_secs_f64();
        let rss_after_bytes = rss_bytes()?;
        self.listeners.clear();
        activity::stage("registering memory");
        for send in sends {
            self.lanes.push(Lane::sending(send, buffer_bytes)?);
        }
        for recv in receives {
            self.lanes.push(Lane::receiving(recv, buffer_bytes)?);
        }
        Ok(Opened { seconds, rss_before_bytes, rss_after_bytes, lines: log::take_rail_lines() })
    }

    /// Each slot of each lane has data of its own.
    fn check(&mut self, layout: Layout, iteration: u64) -> Result<Answer> {
        activity::stage(format!("checking messages of {} bytes", layout.bytes));
        let Some(slots) = self.lanes.first().map(|lane| lane.slots(layout)) else { bail!("nothing is connected") };
        let peer = 1 - self.number;
        let place = |lane: usize, slot: u64| (lane * slots as usize + slot as usize) * layout.bytes;
        let mine = Pattern::new(self.number, iteration);
        let ours = self.lanes.iter().filter(|lane| lane.sends()).enumerate();
        for (number, lane) in ours {
            lane.with_slots(layout, |slot, bytes| mine.fill(place(number, slot), bytes))?;
        }
        traffic::stream(&mut self.lanes, layout, slots)?;
        let theirs = Sum::new(peer..peer + 1, iteration);
        let mut mismatch = Mismatch::default();
        for (number, lane) in self.lanes.iter().filter(|lane| !lane.sends()).enumerate() {
            lane.with_slots(layout, |slot, bytes| mismatch.add(theirs.compare(place(number, slot), bytes)))?;
        }
        let first_wrong = mismatch.first.map(|byte| {
            let (message, at) = (byte.offset / layout.bytes, byte.offset % layout.bytes);
            format!("byte {at} of message {message} is {:#04x} instead of {:#04x}", byte.found, byte.sent)
        });
        Ok(Answer::Checked { wrong: mismatch.wrong, first_wrong })
    }

    fn flow(
        &mut self,
        layout: Layout,
        window_ms: u64,
        orders: &mpsc::Receiver<Order>,
        answer: &dyn Fn(Answer) -> Result<()>,
    ) -> Result<Answer> {
        activity::stage(format!("streaming messages of {} bytes while a rail is slowed", layout.bytes));
        ensure!(window_ms > 0, "a window of 0 ms");
        let begin = Instant::now();
        answer(Answer::Flowing)?;
        let listen = || match orders.try_recv() {
            Ok(Order::Mark) => Ok(Some(Word::Mark)),
            Ok(Order::Stop) => Ok(Some(Word::Stop)),
            Ok(Order::Until { messages }) => Ok(Some(Word::Until(messages))),
            Ok(other) => bail!("unexpected order {other:?} in a flow"),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => bail!("the command has ended"),
        };
        let tell = |word, messages| match word {
            Word::Mark => answer(Answer::Marked),
            Word::Stop | Word::Until(_) => answer(Answer::Stopped { messages }),
        };
        let window = Duration::from_millis(window_ms);
        traffic::flow(begin, &mut self.lanes, layout, window, listen, tell).map(Answer::Flowed)
    }
}

/// This process's resident memory.
fn rss_bytes() -> Result<u64> {
    const STATUS: &str = "/proc/self/status";
    let text = std::fs::read_to_string(STATUS).with_context(|| format!("read {STATUS}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.with_context(|| format!("{STATUS} has no VmRSS"))? << 10)
}
