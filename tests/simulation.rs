//! Both ends of a connection on the software fabric in virtual time, controlled by a seed. Rails
//! fail and return at any step, before or after any other event. Connections start without some or
//! all rails, over paths with the faults of new installations. Control frames arrive late, twice or
//! never, and polls are late. The data paths and drivers are the shipped ones. The oracle is a
//! separate model of bytes and completions.
//!
//! After each run, every request has completed exactly once, and every byte is correct. No buffer
//! was written after it was handed back. Every slot, request and rail can be used again, and the
//! connection's end was reported.
//!
//! `SPARK_SIM_RUNS=100000 cargo test --release --test simulation`. `SPARK_SIM_SEED=N` repeats one
//! run and shows the log. With both variables, N is the first seed of the runs, so that several
//! processes can share the seeds.

#![allow(unsafe_code)]

mod common;
mod sim;

use sim::fabric::Fabric;
use sim::run::Run;
use sim::threads;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn no_message_is_lost_or_duplicated_whatever_happens_to_the_rails() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().expect("a number"))
    };
    // The shortest limit, so that stalls are examined too.
    let mut fabric = Fabric::with_settings(&[("NCCL_SPARK_STALL_WARN_S", "1")]);
    let first = number("SPARK_SIM_SEED");
    let runs = number("SPARK_SIM_RUNS");
    if first.is_some() && runs.is_none() {
        common::captured_log::show();
    }
    let (first, runs) = (
        first.unwrap_or(0),
        runs.unwrap_or(if first.is_some() { 1 } else { 2000 }),
    );
    let seeds = first..first + runs;
    let mut losses = 0;
    let mut messages = 0;
    for seed in seeds.clone() {
        let result = catch_unwind(AssertUnwindSafe(|| Run::new(&mut fabric, seed).play()));
        let Ok(tally) = result else {
            panic!("seed {seed} (SPARK_SIM_SEED={seed} repeats it)")
        };
        losses += tally.losses;
        messages += tally.messages;
    }
    let runs = seeds.end - seeds.start;
    let hung = threads::total();
    println!(
        "{runs} runs, {messages} messages, {losses} times a rail was lost, {hung} times a call hung"
    );
}
