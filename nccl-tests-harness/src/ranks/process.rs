//! The process of a rank: it follows the command's orders, reports what it is doing, and ends with the command. What a rank of each
//! kind does is in `collectives::rank`, `bench::rank` and `memory::rank`.

use crate::commands::collectives;
use crate::proofs::bench;
use crate::proofs::memory;
use crate::ranks::activity;
use crate::ranks::control::{self, FromRank, Sender, ToRank};
use crate::ranks::log::{self, Level};
use anyhow::{Context, Result, bail};
use nix::sys::{prctl, signal};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// How often a rank reports to the command.
const BEAT: Duration = Duration::from_millis(250);
/// How long a launched rank outlives the command: launchers end a job when a rank dies, and the first to die should be the one that
/// has the error.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The arguments of the hidden command that starts a rank.
#[derive(Debug, clap::Args)]
pub struct Start {
    /// Its number, for whoever lists processes.
    number: usize,
    /// The plugin's library on this machine.
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// Started by a launcher.
    #[arg(long)]
    launched: bool,
}

/// Runs a rank whose standard input is the socket to the command. `level` is how much of the plugin's log is shown.
///
/// # Errors
/// When that socket fails; other errors go over the socket, and the command ends this process.
pub fn run(start: &Start, level: Level) -> Result<()> {
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
            log::show_old_warning();
            let (ticks, doing) = observer.look();
            if beats.send(&FromRank::Beat { ticks, doing }).is_err() {
                die(patience);
            }
            std::thread::sleep(BEAT);
        }
    });
    if let Err(error) = work(start, level, &commands, &sender) {
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

fn work(start: &Start, level: Level, commands: &mpsc::Receiver<ToRank>, sender: &Sender) -> Result<()> {
    activity::stage("starting");
    match commands.recv()? {
        ToRank::Setup(setup) => {
            log::start(setup.rank, level);
            collectives::rank::work(setup, start.plugin.as_deref(), commands, sender)
        }
        ToRank::Bench(setup) => {
            log::start(setup.rank, level);
            bench::rank::work(&setup, start.plugin.as_ref().unwrap_or(&setup.plugin), commands, sender)
        }
        ToRank::Memory(setup) => {
            log::start(0, level);
            memory::rank::work(&setup, start.plugin.as_ref().unwrap_or(&setup.plugin), commands, sender)
        }
        _ => bail!("the first message is not the set-up"),
    }
}
