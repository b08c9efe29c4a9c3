//! Storms: two processes with many connections, used as NCCL's proxy thread uses them, while
//! functions, ports, addresses and whole NICs of one node or both go and return, again and again,
//! during traffic and during the recovery from the event before. All bytes are checked; runs in
//! virtual time end with all rails in use.
//!
//! The tests without an attribute play in virtual time. In a quarter of their runs the NICs need
//! four seconds to report a silent peer, not half a second. In a third, some rails get their first
//! link during the run. `SPARK_STORM_RUNS` sets the number of runs, and `SPARK_STORM_SEED` the
//! first seed. With a seed alone, a test plays one run and shows the plugin's log; a failed run
//! prints that command. tests/long/storms.sh runs the ignored tests: the same storms with two
//! processes in real time, and storms around real NCCL.

#![allow(unsafe_code)]

mod common;
mod sim;
mod storm;

use sim::Dice;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use storm::caller::Terms;
use storm::events::{ALL_RAILS, Event, Storm, What};
use storm::{bed, live};

/// Time in which a run must end after its last event, in real time.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn every_storm_ends() {
    let mut messages = 0;
    let mut events = 0;
    for seed in seeds(20) {
        let mut dice = Dice::new(seed);
        let count = 1 + dice.below(5);
        let storm = Storm::draw(&mut dice, count);
        let channels = draw_channels(&mut dice, &[16, 128, 1024], 3);
        events += count;
        messages += play("every_storm_ends", seed, storm, &channels, dice);
    }
    println!("{events} events, {messages} messages");
}

/// DGX OS removes all functions of a NIC when a cable is pulled or the peer reboots, so the whole
/// NICs of one node and then of both may leave and return in one job.
#[test]
fn whole_nics_may_leave_and_return_twice() {
    let mut messages = 0;
    for seed in seeds(12) {
        let mut dice = Dice::new(seed);
        let storm = twice(before(seed), &mut dice);
        let channels = draw_channels(&mut dice, &[16, 128, 1024], 3);
        messages += play(
            "whole_nics_may_leave_and_return_twice",
            seed,
            storm,
            &channels,
            dice,
        );
    }
    println!("{messages} messages");
}

/// The first link of a rail disturbs no message, also where both ends get it.
#[test]
fn late_rails_join_without_a_loss() {
    let mut messages = 0;
    for seed in seeds(36).filter(|seed| late(*seed) != [0; 2]) {
        let mut dice = Dice::new(seed);
        let channels = draw_channels(&mut dice, &[16, 128, 1024], 3);
        let calm = Storm(Vec::new());
        messages += play(
            "late_rails_join_without_a_loss",
            seed,
            calm,
            &channels,
            dice,
        );
    }
    assert!(messages > 0, "none of these seeds has late rails");
    println!("{messages} messages");
}

#[test]
#[ignore = "minutes in real time: tests/long/storms.sh"]
fn in_real_time() {
    let mut messages = 0;
    let mut events = 0;
    for seed in seeds(5) {
        let mut dice = Dice::new(seed);
        let count = 1 + dice.below(5);
        let storm = if seed % 4 == 0 {
            twice(before(seed / 4), &mut dice)
        } else {
            Storm::draw(&mut dice, count)
        };
        let channels = draw_channels(&mut dice, &[512, 16 << 10, 64 << 10], 6);
        events += storm.0.len();
        println!("seed {seed}: {} channels\n{storm}", channels.len());
        match live::Bed::new().play(&storm, &channels, PATIENCE) {
            Ok(count) => messages += count,
            Err(why) => panic!(
                "SPARK_STORM_SEED={seed} SPARK_STORM_RUNS=1 tests/long/storms.sh repeats this run: {why}\n{storm}"
            ),
        }
    }
    println!("{events} events, {messages} messages");
}

/// Lets a storm rage in a fabric that another program uses, for example real NCCL. The variables
/// are `SOFTVERBS_DIR`, `SOFTVERBS_FABRIC`, `SPARK_STORM_SEED` and `SPARK_STORM_SECONDS`. The
/// seconds may be `twice`: then the storm is that of [`whole_nics_may_leave_and_return_twice`].
#[test]
#[ignore = "for a job that runs: tests/long/storms.sh"]
fn rage_in_a_fabric() {
    let given = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let seed = given("SPARK_STORM_SEED").parse().expect("a seed");
    let seconds = given("SPARK_STORM_SECONDS");
    let mut dice = Dice::new(seed);
    let switches = live::Switches::new(given("SOFTVERBS_DIR").into(), given("SOFTVERBS_FABRIC"));
    if seconds == "twice" {
        switches.play(&twice(before(seed), &mut dice));
    } else {
        let end = Instant::now() + Duration::from_secs(seconds.parse().expect("seconds, or twice"));
        while Instant::now() < end {
            switches.play(&Storm::draw(&mut dice, 1));
        }
    }
    switches.mend();
}

#[test]
#[ignore = "the other tests' process"]
fn one_of_two_processes() {
    live::run_process();
}

/// Returns the time in which the NICs of a run report a silent peer, if not that of the settings.
/// With adaptive retransmission it can be seconds (docs/mlx5.md).
fn silence(seed: u64) -> Option<Duration> {
    (seed % 4 == 3).then_some(Duration::from_secs(4))
}

/// Returns the late rails of a run. A third of the runs has some, on one node or on both, and at
/// least one rail that is there from the start.
fn late(seed: u64) -> bed::LateRails {
    let rails = 1 + (seed / 3 % u64::from(ALL_RAILS - 1)) as u8;
    let nodes = 1 + seed % 7 % 3;
    [1, 2].map(|node| {
        if seed % 3 == 1 && nodes & node != 0 {
            rails
        } else {
            0
        }
    })
}

/// Plays one run of a test in virtual time, and returns its number of messages.
fn play(test: &str, seed: u64, storm: Storm, channels: &[Terms], dice: Dice) -> u64 {
    // A process has one fabric in virtual time, so the tests take turns.
    static BED: Mutex<Option<bed::Bed>> = Mutex::new(None);
    let mut bed = BED.lock().unwrap_or_else(PoisonError::into_inner);
    let bed = bed.get_or_insert_with(bed::Bed::new);
    let text = storm.to_string();
    let played = catch_unwind(AssertUnwindSafe(|| {
        bed::Run::new(bed, storm, (silence(seed), late(seed)), channels, dice).play()
    }));
    let why = match played {
        Ok(Ok(count)) => return count,
        Ok(Err(why)) => why,
        Err(_) => format!("a panic, see above\n{text}"),
    };
    panic!("SPARK_STORM_SEED={seed} cargo test --test storms {test} repeats this run: {why}");
}

fn seeds(otherwise: u64) -> std::ops::Range<u64> {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().expect("a number"))
    };
    let first = number("SPARK_STORM_SEED");
    let runs = number("SPARK_STORM_RUNS");
    if first.is_some() && runs.is_none() {
        common::captured_log::show();
    }
    let (first, runs) = (
        first.unwrap_or(0),
        runs.unwrap_or(if first.is_some() { 1 } else { otherwise }),
    );
    first..first + runs
}

/// Returns the events before [`twice`]: none, all ports, or single ports, three, and all.
fn before(seed: u64) -> Vec<Event> {
    let ports = |after_ms, nodes, rails, away_ms| {
        let stagger_ms = 0;
        Event {
            after_ms,
            what: What::Port,
            nodes,
            rails,
            away_ms,
            stagger_ms,
            by_rail: false,
        }
    };
    match seed % 3 {
        0 => Vec::new(),
        1 => vec![ports(0, 3, ALL_RAILS, 3000)],
        _ => {
            let single = (0..8).map(|turn| ports(1000, 1 + turn / 4, 1 << (turn % 4), 500));
            single
                .chain([ports(1000, 3, 7, 500), ports(1500, 3, ALL_RAILS, 1000)])
                .collect()
        }
    }
}

/// Returns a storm that ends with the NIC of node 0 and then those of both nodes.
fn twice(before: Vec<Event>, dice: &mut Dice) -> Storm {
    let stagger_ms = [0, 5, 25, 100, 400][dice.below(5) as usize];
    let by_rail = dice.one_in(2);
    let away_ms = 1000 + dice.below(2000);
    let whole = |after_ms, nodes| Event {
        after_ms,
        what: What::Function,
        nodes,
        rails: ALL_RAILS,
        away_ms,
        stagger_ms,
        by_rail,
    };
    let first_ms = if before.is_empty() { 0 } else { 4000 };
    Storm(
        before
            .into_iter()
            .chain([whole(first_ms, 1), whole(away_ms + dice.below(5000), 3)])
            .collect(),
    )
}

/// Channels of one or two communicators. All channels of a communicator are used alike.
fn draw_channels(dice: &mut Dice, place_words: &[usize; 3], max_channels: u64) -> Vec<Terms> {
    let mut channels = Vec::new();
    for communicator in 0..1 + dice.below(2) {
        let low_latency = dice.one_in(3);
        let parts = if !low_latency && dice.one_in(4) {
            2 + dice.below(3) as usize
        } else {
            1
        };
        let terms = Terms {
            number: communicator << 8,
            place_words: place_words[dice.below(3) as usize],
            parts,
            lead: [Some(1), Some(4), None][dice.below(3) as usize],
            low_latency,
            operation_steps: 1 << dice.below(9),
        };
        channels.extend((0..1 + dice.below(max_channels)).map(|channel| Terms {
            number: terms.number + channel,
            ..terms
        }));
    }
    channels
}
