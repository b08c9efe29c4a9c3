//! Rails that go down and up, on one machine or on both.

use crate::common::mix;
use softverbs::control::{Action, control};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The rails of the profile that the bed runs on.
pub const RAILS: [&str; 4] = ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"];
/// Time in milliseconds from the start of a flap to the start of the next.
const EVERY_MS: u64 = 1000;

#[derive(Debug, Clone, Copy, Default)]
pub struct Flapped {
    pub flaps: u64,
    pub in_pairs: u64,
    pub refusals: u64,
}

pub struct Flaps {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Flapped>,
}

/// Takes rails of a fabric down and up, from outside the processes that use them.
#[derive(Clone)]
pub struct Switches {
    pub dir: PathBuf,
    pub fabric: String,
}

impl Switches {
    fn set(&self, machine: Option<usize>, rail: usize, action: Action) {
        control(
            &self.dir,
            &self.fabric,
            machine,
            RAILS[rail % RAILS.len()],
            action,
        )
        .unwrap();
    }

    pub fn mend(&self) {
        for rail in 0..RAILS.len() {
            self.set(None, rail, Action::Refuse(0));
            self.set(None, rail, Action::Up);
        }
    }
}

impl Flaps {
    pub fn start(switches: Switches, seed: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut flapped = Flapped::default();
            while !is_over.load(Ordering::Relaxed) {
                flap(&switches, mix(seed << 32 ^ flapped.flaps), &mut flapped);
            }
            switches.mend();
            flapped
        });
        Self { stop, thread }
    }

    pub fn stop(self) -> Flapped {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the flapping thread")
    }
}

/// One second of flapping: one or two rails go down for a while, on one machine or on both. The
/// first rail is the next one in turn, or a random one. Sometimes the NIC of a rail that is up
/// refuses one or two requests as invalid.
fn flap(switches: &Switches, dice: u64, flapped: &mut Flapped) {
    let one_in = |count: u64, part: u32| (dice >> part).is_multiple_of(count);
    let first = if one_in(2, 0) {
        flapped.flaps
    } else {
        dice >> 4
    } as usize
        % RAILS.len();
    let second = one_in(6, 8)
        .then_some((first + 1 + (dice >> 12) as usize % (RAILS.len() - 1)) % RAILS.len());
    let machine = [None, None, Some(0), Some(1)][(dice >> 16) as usize % 4];
    let down_ms = 50 + (dice >> 20) % 700;
    let rails = [Some(first), second];
    rails
        .into_iter()
        .flatten()
        .for_each(|rail| switches.set(machine, rail, Action::Down));
    if one_in(5, 32) {
        let up = (0..RAILS.len())
            .find(|rail| !rails.contains(&Some(*rail)))
            .expect("two of four are up");
        switches.set(None, up, Action::Refuse(1 + (dice >> 36) as u32 % 2));
        flapped.refusals += 1;
    }
    std::thread::sleep(Duration::from_millis(down_ms));
    rails
        .into_iter()
        .flatten()
        .for_each(|rail| switches.set(machine, rail, Action::Up));
    std::thread::sleep(Duration::from_millis(EVERY_MS - down_ms));
    flapped.flaps += 1;
    flapped.in_pairs += u64::from(second.is_some());
}
