//! One rank of a collective. It connects with its peers, times the collective, and checks its data.

use super::Part;
use super::messages::{Answer, Measurement, Order, RunParameters, Setup};
use super::progress::{self, Buffers, Channel, Pauses};
use super::schedule::{self, Seat};
use crate::net::{Buffer, Plugin, RecvComm, SendComm};
use crate::ranks::activity;
use crate::ranks::control::Work;
use crate::ranks::device;
use crate::ranks::log;
use crate::ranks::pattern::{Mismatch, Pattern, Sum};
use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Instant;

/// Memory is filled and compared in stretches of this size. The rank reports progress after each
/// stretch.
const FILL_BYTES: usize = 4 << 20;

/// Longest time that the histogram of iterations can record: one hour. A longer iteration counts as
/// this time.
const LONGEST_NS: u64 = 3_600_000_000_000;

pub struct Collectives;

impl Work for Collectives {
    const COMMAND: &'static str = "rank";
    type Order = Order;
    type Answer = Answer;

    fn work(
        library: Option<&Path>,
        orders: &mpsc::Receiver<Order>,
        answer: &dyn Fn(Answer) -> Result<()>,
    ) -> Result<()> {
        let Order::Setup(setup) = orders.recv()? else {
            bail!("the first order is not the set-up")
        };
        let context = Plugin::load(library.unwrap_or(&setup.plugin), None)?.init(setup.job)?;
        let network = device::examine(&context)?;
        let RunParameters {
            collective,
            ranks,
            channels,
            ..
        } = setup.terms;
        let links = collective.links(setup.rank, ranks, channels).len();
        let (listeners, handles) = device::listen(&context, links)?;
        answer(Answer::Listening { network, handles })?;

        let Order::Connect { handles } = orders.recv()? else {
            bail!("the second order is not Connect")
        };
        let handles = device::handles(handles)?;
        activity::stage("connecting");
        ensure!(
            handles.len() == listeners.len(),
            "{} handles for {} channels",
            handles.len(),
            listeners.len()
        );
        let connected = device::connect(&context, &listeners, handles);
        let (sends, receives) =
            connected.map_err(|(channel, error)| error.context(format!("channel {channel}")))?;
        drop(listeners);
        activity::stage("registering memory");
        let mut rank = Rank::new(setup, sends.into_iter().zip(receives))?;
        answer(Answer::Connected {
            lines: log::take_rail_lines(),
        })?;

        if let Err(error) = run_orders(&mut rank, orders, answer) {
            // Close nothing: closed connections would make the other ranks fail too, and their
            // errors would hide this error.
            std::mem::forget(rank);
            return Err(error);
        }
        activity::stage("closing");
        Ok(())
    }
}

fn run_orders(
    rank: &mut Rank,
    orders: &mpsc::Receiver<Order>,
    answer: &dyn Fn(Answer) -> Result<()>,
) -> Result<()> {
    loop {
        activity::stage("waiting for the other ranks");
        match orders.recv() {
            Ok(Order::Prepare { count }) => {
                rank.prepare(count)?;
                answer(Answer::Ready)?;
            }
            Ok(Order::Go) => answer(Answer::Measured(rank.measure()?))?,
            Ok(other) => bail!("unexpected order {other:?}"),
            Err(_) => return Ok(()),
        }
    }
}

struct Rank {
    rank: usize,
    terms: RunParameters,
    channels: Vec<Channel>,
    buffers: Buffers,
    /// Number of calls of `fill`. It selects the data's pattern, and is the same in all ranks.
    iteration: u64,
    count: usize,
    pauses: Pauses,
}

impl Rank {
    fn new(setup: Setup, connections: impl Iterator<Item = (SendComm, RecvComm)>) -> Result<Self> {
        let Setup { rank, terms, .. } = setup;
        let RunParameters {
            collective, ranks, ..
        } = terms;
        let bytes = collective.size_bytes(setup.max_count, ranks);
        let recv = Buffer::new(bytes)?;
        let send = match collective.in_place() {
            true => Rc::clone(&recv),
            false => Buffer::new(bytes)?,
        };
        let buffers = Buffers { send, recv };
        let links = collective.links(rank, ranks, terms.channels);
        let channels = connections.zip(links);
        let channels = channels
            .map(|(connection, link)| Channel::new(connection, &buffers, collective, rank, link));
        let channels = channels.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            rank,
            terms,
            channels,
            buffers,
            iteration: 0,
            count: 0,
            pauses: Pauses::default(),
        })
    }

    fn prepare(&mut self, count: usize) -> Result<()> {
        let RunParameters {
            collective,
            ranks,
            channels,
            ..
        } = self.terms;
        let rank = self.rank;
        self.count = count;
        for (link, channel) in self.channels.iter_mut().enumerate() {
            channel.plan(schedule::schedule(
                collective,
                Seat {
                    rank,
                    ranks,
                    link,
                    channels,
                },
                count,
            ));
        }
        if self.terms.check_iters > 0 {
            self.fill()?;
        }
        for _ in 0..self.terms.warmup_iters {
            self.stage("warming up");
            self.run()?;
        }
        Ok(())
    }

    /// Times the iterations. Unless checks are off, also checks the result of the last timed
    /// iteration, then runs the checked iterations, each with new data.
    fn measure(&mut self) -> Result<Measurement> {
        self.stage("timing");
        self.pauses = Pauses::default();
        let mut times =
            Histogram::<u64>::new_with_bounds(1, LONGEST_NS, 3).context("make a histogram")?;
        let start = Instant::now();
        let mut last = start;
        for _ in 0..self.terms.iters {
            self.run()?;
            let now = Instant::now();
            times.saturating_record(u64::try_from((now - last).as_nanos()).unwrap_or(LONGEST_NS));
            last = now;
        }
        let quantile_s = |quantile: f64| times.value_at_quantile(quantile) as f64 / 1e9;
        let timed = Measurement {
            seconds: (last - start).as_secs_f64(),
            p50_s: quantile_s(0.50),
            p99_s: quantile_s(0.99),
            longest_pause_s: self.pauses.longest.as_secs_f64(),
            wrong: None,
            first_wrong: None,
        };
        if self.terms.check_iters == 0 {
            return Ok(timed);
        }
        let (mut wrong, mut first_wrong) = self.compare()?;
        for _ in 0..self.terms.check_iters {
            self.fill()?;
            self.stage("checking");
            self.run()?;
            let (more, first) = self.compare()?;
            wrong += more;
            first_wrong = first_wrong.or(first);
        }
        Ok(Measurement {
            wrong: Some(wrong),
            first_wrong,
            ..timed
        })
    }

    fn run(&mut self) -> Result<()> {
        progress::run(
            &mut self.channels,
            self.terms.collective.shape(),
            &mut self.pauses,
        )
    }

    /// Writes new data into the range of the send buffer that this rank contributes. All other
    /// memory keeps its old data, so that missing data fails the check.
    fn fill(&mut self) -> Result<()> {
        self.stage("filling");
        self.iteration += 1;
        let RunParameters {
            collective, ranks, ..
        } = self.terms;
        let Some(range) = collective.contribution(self.rank, ranks, self.count) else {
            return Ok(());
        };
        let pattern = Pattern::new(self.rank, self.iteration);
        self.buffers.send.with_bytes(|bytes| {
            for (index, stretch) in bytes[range].chunks_mut(FILL_BYTES).enumerate() {
                pattern.fill(index * FILL_BYTES, stretch);
                activity::tick();
            }
        })
    }

    /// Returns the number of wrong bytes of the result, and a description of the first wrong byte.
    fn compare(&self) -> Result<(u64, Option<String>)> {
        self.stage("comparing");
        let RunParameters {
            collective, ranks, ..
        } = self.terms;
        let mut wrong = 0;
        let mut first_wrong = None;
        for Part {
            of,
            data_offset,
            range,
        } in collective.result(self.rank, ranks, self.count)
        {
            let sum = Sum::new(of.clone(), self.iteration);
            let mut mismatch = Mismatch::default();
            self.buffers.recv.with_bytes(|bytes| {
                for (index, stretch) in bytes[range].chunks(FILL_BYTES).enumerate() {
                    mismatch.add(sum.compare(data_offset + index * FILL_BYTES, stretch));
                    activity::tick();
                }
            })?;
            wrong += mismatch.wrong;
            first_wrong = first_wrong.or(mismatch.first.map(|byte| {
                let offset = byte.offset;
                let found = byte.found;
                let sent = byte.sent;
                let whose = match of.len() {
                    1 => format!("rank {}'s data", of.start),
                    _ => "the sum".to_owned(),
                };
                format!("byte {offset} of {whose} is {found:#04x} instead of {sent:#04x}")
            }));
        }
        Ok((wrong, first_wrong))
    }

    fn stage(&self, what: &str) {
        activity::stage(format!(
            "{what} {} bytes",
            self.terms
                .collective
                .size_bytes(self.count, self.terms.ranks)
        ));
    }
}
