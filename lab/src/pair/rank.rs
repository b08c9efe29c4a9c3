//! One rank of a pair: a process that follows the command's orders.

use super::messages::{Answer, Layout, Opened, Order};
use super::traffic::{self, Lane};
use crate::proc_status;
use anyhow::{Result, bail, ensure};
use nccl_tests_harness::net::{Context, Listener, Plugin};
use nccl_tests_harness::ranks::activity;
use nccl_tests_harness::ranks::control::Work;
use nccl_tests_harness::ranks::device;
use nccl_tests_harness::ranks::log;
use nccl_tests_harness::ranks::pattern::{Mismatch, Pattern, Sum};
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

pub struct Pair;

impl Work for Pair {
    const COMMAND: &'static str = "pair-rank";
    type Order = Order;
    type Answer = Answer;

    fn work(_: Option<&Path>, orders: &mpsc::Receiver<Order>, answer: &dyn Fn(Answer) -> Result<()>) -> Result<()> {
        let Order::Setup { rank: number, plugin, abi, job } = orders.recv()? else {
            bail!("the first order is not the set-up")
        };
        let context = Plugin::load(&plugin, abi)?.init(job)?;
        answer(Answer::Up(device::examine(&context)?, context.version()))?;
        let mut rank = Rank { number, listeners: Vec::new(), lanes: Vec::new(), context };
        loop {
            activity::stage("waiting for the next order");
            let Ok(order) = orders.recv() else { break };
            match rank.obey(order, orders, answer) {
                Ok(told) => answer(told)?,
                Err(error) => {
                    // Closes nothing. Otherwise the other rank would fail too, and its error would
                    // hide this one.
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
                Ok(Answer::Listening(handles))
            }
            Order::Connect { handles, buffer_bytes } => self.connect(handles, buffer_bytes).map(Answer::Connected),
            Order::Check { layout, iteration } => self.check(layout, iteration),
            Order::Stream { layout, messages } => {
                activity::stage(format!("streaming messages of {} bytes", layout.bytes));
                let took = traffic::stream(&mut self.lanes, layout, messages)?;
                Ok(Answer::Ran(took.as_secs_f64(), Vec::new()))
            }
            Order::PingPong { layout, messages } => {
                activity::stage(format!("running ping-pong with messages of {} bytes", layout.bytes));
                let (took, half_us) = traffic::ping_pong(&mut self.lanes, layout, messages, self.number == 0)?;
                Ok(Answer::Ran(took.as_secs_f64(), half_us))
            }
            Order::Flow { layout, window_ms } => self.flow(layout, window_ms, orders, answer),
            Order::Close => {
                activity::stage("closing connections");
                self.lanes.clear();
                Ok(Answer::Done)
            }
            other @ (Order::Setup { .. } | Order::Mark | Order::Stop | Order::Until { .. }) => {
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

    /// Sends one message from every slot (a message's place in a lane's memory) of every sending
    /// lane, and checks every byte of the receiving lanes' slots. Each slot has its own data.
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
        Ok(Answer::Checked(mismatch.wrong, first_wrong))
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
        answer(Answer::Done)?;
        let listen = || match orders.try_recv() {
            Ok(order) => Ok(Some(order)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => bail!("the command has ended"),
        };
        let window = Duration::from_millis(window_ms);
        traffic::flow(begin, &mut self.lanes, layout, window, listen, answer).map(Answer::Flowed)
    }
}

fn rss_bytes() -> Result<u64> {
    Ok(proc_status::field("VmRSS")? << 10)
}
