//! One rank: a process of its own that loads the plugin and follows the command's orders.

use crate::activity;
use crate::bench;
use crate::collective::{Collective, Part};
use crate::control::{self, FromRank, Measurement, Network, Sender, Setup, ToRank};
use crate::log::{self, Level};
use crate::memory;
use crate::net::{Buffer, Context, Handle, Listener, Plugin, RecvComm, SendComm};
use crate::pattern::{Mismatch, Pattern, Sum};
use crate::progress::{self, Buffers, Channel};
use crate::schedule::{self, Seat};
use anyhow::{Context as _, Result, bail, ensure};
use nccl_net_spark::abi::types::HANDLE_BYTES;
use nix::sys::{prctl, signal};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The device that NCCL would use first, and of this plugin the only one.
pub const DEVICE: i32 = 0;
/// How often a rank reports to the command.
const BEAT: Duration = Duration::from_millis(250);
/// Memory is filled and compared in parts of this size, so that the rank can report progress in between.
const FILL_BYTES: usize = 4 << 20;
/// How long a launched rank outlives the command: launchers end a job when a rank dies, and the first to die should be the one that
/// has the error.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How a rank was started.
#[derive(Debug, Clone)]
pub struct Start {
    /// How much of the plugin's log is shown.
    pub level: Level,
    /// The plugin's library, where it is not the one that the command names.
    pub plugin: Option<PathBuf>,
    /// By a launcher, and not by the command, which may be on another machine.
    pub launched: bool,
}

/// Runs a rank whose standard input is the socket to the command.
///
/// # Errors
/// When that socket fails; other errors go over the socket, and the command ends this process.
pub fn run(start: Start) -> Result<()> {
    let patience = match start.launched {
        true => LAST_WORDS,
        false => Duration::ZERO,
    };
    if !start.launched {
        prctl::set_pdeathsig(signal::Signal::SIGKILL).context("ask to be killed with the parent")?;
    }
    let stream = std::io::stdin().as_fd().try_clone_to_owned().context("duplicate the control socket")?;
    let (sender, mut receiver) = control::split(stream)?;
    let sender = Arc::new(sender);
    let (commands_in, commands) = mpsc::channel();
    std::thread::spawn(move || {
        while let Ok(Some(command)) = receiver.receive::<ToRank>() {
            let _ = commands_in.send(command);
        }
        die(patience);
    });
    let beats = Arc::clone(&sender);
    std::thread::spawn(move || {
        let mut observer = activity::Observer::default();
        loop {
            let (ticks, doing) = observer.look();
            if beats.send(&FromRank::Beat { ticks, doing }).is_err() {
                die(patience);
            }
            std::thread::sleep(BEAT);
        }
    });
    if let Err(error) = work(start, &commands, &sender) {
        sender.send(&FromRank::Failed { reason: format!("{error:#}") })?;
        // The command ends this process once it has the other ranks' errors.
        loop {
            std::thread::park();
        }
    }
    Ok(())
}

/// The command has ended, so errors have nowhere to go; the working thread may be anywhere in the plugin.
fn die(patience: Duration) {
    std::thread::sleep(patience);
    let _ = signal::raise(signal::Signal::SIGKILL);
}

fn work(start: Start, commands: &mpsc::Receiver<ToRank>, sender: &Sender) -> Result<()> {
    activity::stage("starting");
    let setup = match commands.recv()? {
        ToRank::Setup(setup) => setup,
        ToRank::Bench(setup) => {
            log::start(setup.rank, start.level);
            return bench::rank::work(&setup, start.plugin.as_ref().unwrap_or(&setup.plugin), commands, sender);
        }
        ToRank::Memory(setup) => {
            log::start(0, start.level);
            return memory::rank::work(&setup, start.plugin.as_ref().unwrap_or(&setup.plugin), commands, sender);
        }
        _ => bail!("the first message is not the set-up"),
    };
    log::start(setup.rank, start.level);
    let context = Plugin::load(start.plugin.as_ref().unwrap_or(&setup.plugin), None)?.init(setup.job)?;
    let network = look_at(&context)?;
    let links = setup.collective.links(setup.rank, setup.ranks, setup.channels);
    let (listeners, handles): (Vec<_>, Vec<_>) =
        links.iter().map(|_| context.listen(DEVICE)).collect::<Result<Vec<_>>>()?.into_iter().unzip();
    let handles = handles.iter().map(|handle| handle.to_vec()).collect();
    sender.send(&FromRank::Listening { network, handles })?;

    let ToRank::Connect { handles } = commands.recv()? else { bail!("the second message is not Connect") };
    let handles = handles.into_iter().map(Handle::try_from).collect::<Result<Vec<_>, _>>();
    let Ok(handles) = handles else { bail!("a handle does not have {HANDLE_BYTES} bytes") };
    activity::stage("connecting");
    let connections = connect(&context, &listeners, handles)?;
    drop(listeners);
    activity::stage("registering memory");
    let mut rank = Rank::new(setup, connections)?;
    sender.send(&FromRank::Connected { lines: log::take_rail_lines() })?;

    if let Err(error) = obey(&mut rank, commands, sender) {
        // Nothing is closed: the other ranks would fail too, and their errors would hide this one.
        std::mem::forget(rank);
        return Err(error);
    }
    activity::stage("closing");
    Ok(())
}

fn obey(rank: &mut Rank, commands: &mpsc::Receiver<ToRank>, sender: &Sender) -> Result<()> {
    loop {
        activity::stage("waiting for the other ranks");
        match commands.recv()? {
            ToRank::Prepare { count } => {
                rank.prepare(count)?;
                sender.send(&FromRank::Ready)?;
            }
            ToRank::Go => sender.send(&FromRank::Measured(rank.measure()?))?,
            ToRank::Finish => return Ok(()),
            other => bail!("unexpected command {other:?}"),
        }
    }
}

/// The network as NCCL would see it.
///
/// # Errors
/// When the plugin has no device that takes host memory.
pub fn look_at(context: &Context) -> Result<Network> {
    let devices = context.devices()?;
    ensure!(devices > 0, "the plugin has no device");
    let properties = context.properties(DEVICE)?;
    ensure!(properties.host_memory, "device {} does not take host memory", properties.name);
    Ok(Network {
        name: context.network(),
        device: properties.name,
        devices,
        speed_mbps: properties.speed_mbps,
        rails: log::take_rail_lines(),
    })
}

/// Connects and accepts all channels at the same time, as NCCL does: neither end may wait for the other.
fn connect(
    context: &Rc<Context>,
    listeners: &[Listener],
    mut handles: Vec<Handle>,
) -> Result<Vec<(SendComm, RecvComm)>> {
    ensure!(handles.len() == listeners.len(), "{} handles for {} channels", handles.len(), listeners.len());
    let mut pairs: Vec<(Option<SendComm>, Option<RecvComm>)> = listeners.iter().map(|_| (None, None)).collect();
    while pairs.iter().any(|(send, recv)| send.is_none() || recv.is_none()) {
        for (channel, (send, recv)) in pairs.iter_mut().enumerate() {
            if send.is_none() {
                *send = context.connect(DEVICE, &mut handles[channel]).with_context(|| format!("channel {channel}"))?;
                send.iter().for_each(|_| activity::tick());
            }
            if recv.is_none() {
                *recv = listeners[channel].accept().with_context(|| format!("channel {channel}"))?;
                recv.iter().for_each(|_| activity::tick());
            }
        }
        std::thread::yield_now();
    }
    Ok(pairs.into_iter().filter_map(|(send, recv)| send.zip(recv)).collect())
}

struct Rank {
    setup: Setup,
    channels: Vec<Channel>,
    buffers: Buffers,
    /// Of the data: all ranks count it in the same way.
    iteration: u64,
    /// How many elements the size at hand has.
    count: usize,
}

impl Rank {
    fn new(setup: Setup, connections: Vec<(SendComm, RecvComm)>) -> Result<Self> {
        let Setup { collective, rank, ranks, .. } = setup;
        let bytes = collective.size_bytes(setup.max_count, ranks);
        let recv = Buffer::new(bytes)?;
        let send = match collective.in_place() {
            true => Rc::clone(&recv),
            false => Buffer::new(bytes)?,
        };
        let buffers = Buffers { send, recv };
        let links = collective.links(rank, ranks, setup.channels);
        let channels = connections.into_iter().zip(links);
        let channels = channels.map(|(connection, link)| Channel::new(connection, &buffers, collective, rank, link));
        let channels = channels.collect::<Result<Vec<_>>>()?;
        Ok(Self { setup, channels, buffers, iteration: 0, count: 0 })
    }

    /// Plans the size, fills, and runs the warm-up.
    fn prepare(&mut self, count: usize) -> Result<()> {
        let Setup { collective, rank, ranks, channels, .. } = self.setup;
        self.count = count;
        for (link, channel) in self.channels.iter_mut().enumerate() {
            channel.plan(schedule::schedule(collective, Seat { rank, ranks, link, channels }, count));
        }
        if self.setup.check_iters > 0 {
            self.fill()?;
        }
        for _ in 0..self.setup.warmup_iters {
            self.stage("warming up");
            self.run()?;
        }
        Ok(())
    }

    /// Times the iterations, checks what the last of them left, then runs the checked ones, each with data of its own.
    fn measure(&mut self) -> Result<Measurement> {
        self.stage("timing");
        let start = Instant::now();
        for _ in 0..self.setup.iters {
            self.run()?;
        }
        let seconds = start.elapsed().as_secs_f64();
        if self.setup.check_iters == 0 {
            return Ok(Measurement { seconds, wrong: None, first_wrong: None });
        }
        let (mut wrong, mut first_wrong) = self.compare()?;
        for _ in 0..self.setup.check_iters {
            self.fill()?;
            self.stage("checking");
            self.run()?;
            let (more, first) = self.compare()?;
            wrong += more;
            first_wrong = first_wrong.or(first);
        }
        Ok(Measurement { seconds, wrong: Some(wrong), first_wrong })
    }

    fn run(&mut self) -> Result<()> {
        progress::run(&mut self.channels, self.setup.collective.shape())
    }

    /// Writes new data into the send buffer. The receive buffer keeps its old data, which must not pass the check.
    fn fill(&mut self) -> Result<()> {
        self.stage("filling");
        self.iteration += 1;
        let Setup { collective, rank, ranks, .. } = self.setup;
        let Some(Part { range, .. }) = collective.contribution(rank, ranks, self.count) else { return Ok(()) };
        let pattern = Pattern::new(rank, self.iteration);
        self.buffers.send.with_bytes(|bytes| {
            for (index, stretch) in bytes[range].chunks_mut(FILL_BYTES).enumerate() {
                pattern.fill(index * FILL_BYTES, stretch);
                activity::tick();
            }
        })
    }

    /// Compares every byte of the result: how many are wrong, and a description of the first.
    fn compare(&self) -> Result<(u64, Option<String>)> {
        self.stage("comparing");
        let (mut wrong, mut first_wrong) = (0, None);
        for Part { of, data_offset, range } in self.collective().result(self.setup.rank, self.setup.ranks, self.count) {
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
                let (offset, found, sent) = (byte.offset, byte.found, byte.sent);
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
        activity::stage(format!("{what} {} bytes", self.collective().size_bytes(self.count, self.setup.ranks)));
    }

    fn collective(&self) -> Collective {
        self.setup.collective
    }
}
