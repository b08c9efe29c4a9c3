//! The process of a rank: follows the command's orders, reports activity, ends with the command.

use crate::ranks::activity;
use crate::ranks::control::{self, FromRank, Sender, ToRank, Work};
use crate::ranks::log::{self, Level};
use anyhow::{Context, Result};
use nix::sys::{prctl, signal};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Interval of a rank's reports to the command.
const BEAT: Duration = Duration::from_millis(250);
/// Time for which a launcher's rank outlives the command. Launchers end a job when one of its
/// processes dies. The command, which prints the error, should die first.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The arguments of a hidden command that starts a rank.
#[derive(Debug, clap::Args)]
pub struct Start {
    /// Number of this rank.
    number: usize,
    /// The plugin's library on this machine.
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// Started by a launcher.
    #[arg(long)]
    launched: bool,
}

/// Runs a rank whose standard input is the socket to the command. `nccl_debug` is the value of
/// `NCCL_DEBUG`, the level of the plugin's log that is shown.
///
/// # Errors
/// Fails when that socket fails. Other errors go over the socket, and the command ends this
/// process.
pub fn run<W: Work>(start: &Start, nccl_debug: Option<&str>) -> Result<()> {
    let patience = match start.launched {
        true => LAST_WORDS,
        false => Duration::ZERO,
    };
    if !start.launched {
        prctl::set_pdeathsig(signal::Signal::SIGKILL)
            .context("ask to be killed with the parent")?;
    }
    log::start(start.number, Level::of_nccl_debug(nccl_debug));
    let stream = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("duplicate the control socket")?;
    let (sender, mut receiver) = control::split(stream)?;
    let sender = Arc::new(sender);
    let (orders_in, orders) = mpsc::channel();
    // Dropping `orders_in` ends the orders.
    let mut orders_in = Some(orders_in);
    std::thread::spawn(move || {
        while let Ok(Some(message)) = receiver.receive::<ToRank<W::Order>>() {
            match message {
                // Sending fails once the work has ended.
                ToRank::Order(order) => _ = orders_in.as_ref().map(|orders| orders.send(order)),
                ToRank::Finish => orders_in = None,
            }
        }
        die(patience);
    });
    let beats = Arc::clone(&sender);
    std::thread::spawn(move || beat(&beats, patience));
    activity::stage("starting");
    let answer = |answer: W::Answer| sender.send(&FromRank::Answer(answer));
    if let Err(error) = W::work(start.plugin.as_deref(), &orders, &answer) {
        sender.send(&FromRank::<W::Answer>::Failed {
            reason: format!("{error:#}"),
        })?;
        // The command ends this process once it has the other ranks' errors.
        loop {
            std::thread::park();
        }
    }
    Ok(())
}

fn beat(sender: &Sender, patience: Duration) {
    let mut observer = activity::Observer::default();
    loop {
        log::show_old_warning();
        let (ticks, doing) = observer.look();
        if sender.send(&FromRank::<()>::Beat { ticks, doing }).is_err() {
            die(patience);
        }
        std::thread::sleep(BEAT);
    }
}

/// Kills this process after `patience`. The command has ended, so nothing would receive an error.
/// The working thread may be inside the plugin, so it cannot be asked to end.
fn die(patience: Duration) {
    std::thread::sleep(patience);
    let _ = signal::raise(signal::Signal::SIGKILL);
}
