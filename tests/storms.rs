//! Storms: two processes with many connections, used as NCCL's proxy thread uses them, while
//! functions, ports and whole NICs of one node or both go and return, again and again, during
//! traffic and during the recovery from the event before. Every byte is checked, and each run must
//! end.
//!
//! `SPARK_STORM_SEED=N` repeats the run of a seed, `SPARK_STORM_RUNS=5000` sets the number of runs,
//! and both together begin at a seed. `every_run_ends` plays in virtual time. `in_real_time` uses
//! two real processes, and is ignored by default: tests/long/storms.sh runs it.

#![allow(unsafe_code)]

mod common;
mod sim;
mod storm;

use sim::Dice;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use storm::caller::Terms;
use storm::events::{Event, Storm, What};
use storm::{bed, live};

/// Time in which a run must end after its last event, in real time.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn every_run_ends() {
    let mut bed = bed::Bed::new();
    let (mut messages, mut events) = (0, 0);
    for seed in seeds(20) {
        let mut dice = Dice::new(seed);
        let count = 1 + dice.below(5);
        let storm = Storm::draw(&mut dice, count);
        let channels = draw_channels(&mut dice, &[16, 128, 1024], 3);
        events += count;
        let played = catch_unwind(AssertUnwindSafe(|| bed::Run::new(&mut bed, storm, &channels, dice).play()));
        match played {
            Ok(Ok(count)) => messages += count,
            Ok(Err(why)) => panic!("seed {seed} (SPARK_STORM_SEED={seed} repeats it): {why}"),
            Err(_) => panic!("seed {seed} (SPARK_STORM_SEED={seed} repeats it)"),
        }
    }
    println!("{events} events, {messages} messages");
}

#[test]
#[ignore = "minutes in real time: tests/long/storms.sh"]
fn in_real_time() {
    let (mut messages, mut events) = (0, 0);
    for seed in seeds(5) {
        let mut dice = Dice::new(seed);
        let count = 1 + dice.below(5);
        let storm = Storm::draw(&mut dice, count);
        let channels = draw_channels(&mut dice, &[512, 16 << 10, 64 << 10], 6);
        events += count;
        println!("seed {seed}: {} channels\n{storm}", channels.len());
        match live::Bed::new().play(&storm, &channels, PATIENCE) {
            Ok(count) => messages += count,
            Err(why) => panic!("seed {seed} (SPARK_STORM_SEED={seed} repeats it): {why}\n{storm}"),
        }
    }
    println!("{events} events, {messages} messages");
}

/// All functions of node 0 leave and return, then those of both nodes.
fn twice() -> Storm {
    let event = |after_ms, nodes| Event { after_ms, what: What::Function, nodes, rails: 15, away_ms: 2000, stagger_ms: 25 };
    Storm(vec![event(0, 1), event(5000, 3)])
}

#[test]
#[ignore = "real time"]
fn twice_in_real_time() {
    for lead in [Some(1), Some(4), None, Some(8)] {
        for low_latency in [false, true] {
            let terms = |number| Terms { number, place_words: 64 << 10, parts: 1, lead, low_latency };
            let channels: Vec<Terms> = (0..18).map(terms).collect();
            match live::Bed::new().play(&twice(), &channels, PATIENCE) {
                Ok(count) => println!("{lead:?} {low_latency}: {count}"),
                Err(why) => println!("{lead:?} {low_latency}: {why}"),
            }
        }
    }
}

#[test]
#[ignore = "the other tests' process"]
fn one_of_two_processes() {
    live::run_process();
}

fn seeds(otherwise: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let (first, runs) = (number("SPARK_STORM_SEED"), number("SPARK_STORM_RUNS"));
    if first.is_some() && runs.is_none() {
        common::captured_log::show();
    }
    let (first, runs) = (first.unwrap_or(0), runs.unwrap_or(if first.is_some() { 1 } else { otherwise }));
    first..first + runs
}

/// Channels of one or two communicators. All channels of a communicator are used alike.
fn draw_channels(dice: &mut Dice, place_words: &[usize; 3], most: u64) -> Vec<Terms> {
    let mut channels = Vec::new();
    for communicator in 0..1 + dice.below(2) {
        let low_latency = dice.one_in(3);
        let parts = if !low_latency && dice.one_in(4) { 2 + dice.below(3) as usize } else { 1 };
        let terms = Terms {
            number: communicator << 8,
            place_words: place_words[dice.below(3) as usize],
            parts,
            lead: [Some(1), Some(4), None][dice.below(3) as usize],
            low_latency,
        };
        channels.extend((0..1 + dice.below(most)).map(|channel| Terms { number: terms.number + channel, ..terms }));
    }
    channels
}
