//! Storms of events around several connections of two processes, in virtual time (`bed/`): every
//! rail comes back into use on both sides, no connection fails, and nothing is resent before both
//! sides have stopped the rail.
//!
//! `SPARK_STORM_SEED` and `SPARK_STORM_RUNS` choose the storms.

mod bed;

use bed::nic::Phase;
use bed::{Bed, RAILS};

/// Time in which everything returns after a storm: the longest pause between two searches for a
/// device, the longest pauses of attempts and of dead paths, and their attempts.
const CALM_MS: u64 = 150_000;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect(name))
}

/// Plays one event on one NIC.
fn strike(bed: &mut Bed) {
    let (process, rail) = (
        bed.dice.below(2) as usize,
        bed.dice.below(RAILS as u64) as usize,
    );
    let kind = bed.dice.below(13);
    let nic = &mut bed.processes[process].rails[rail].nic;
    match kind {
        0 => nic.end(Phase::Failed),
        1 => nic.end(Phase::CutOff),
        2 | 3 => nic.mend(),
        4 => nic.is_silent = true,
        5 => nic.is_silent = false,
        6 => nic.set_port(false),
        7 => nic.set_port(true),
        8 => bed.break_tcp(),
        9 => remove_all(bed, process),
        10 => nic.set_address(false),
        11 => nic.set_address(true),
        _ => take_addresses(bed, process),
    }
}

/// Removes both functions of a NIC together.
fn remove_all(bed: &mut Bed, process: usize) {
    for rail in &mut bed.processes[process].rails {
        rail.nic.end(Phase::CutOff);
    }
}

/// Takes the addresses of both functions together.
fn take_addresses(bed: &mut Bed, process: usize) {
    for rail in &mut bed.processes[process].rails {
        rail.nic.set_address(false);
    }
}

/// Lets everything work, and time pass until everything has returned.
fn calm_down(bed: &mut Bed) {
    for _ in 0..4 {
        for process in &mut bed.processes {
            process.rails.iter_mut().for_each(|rail| rail.nic.mend());
        }
        bed.pass(1000);
    }
    bed.pass(CALM_MS);
}

#[track_caller]
fn check(bed: &Bed, seed: u64) {
    let faults = bed.faults();
    assert!(
        faults.is_empty(),
        "SPARK_STORM_SEED={seed} SPARK_STORM_RUNS=1 repeats this storm:\n{}",
        faults.join("\n")
    );
}

#[test]
fn every_rail_returns_after_a_storm() {
    let first = number("SPARK_STORM_SEED", 0);
    for seed in first..first + number("SPARK_STORM_RUNS", 200) {
        println!("SPARK_STORM_SEED={seed}");
        let silence_ms = if seed % 4 == 3 { 4000 } else { 500 };
        let mut bed = Bed::new(seed, 1 + (seed % 3) as usize, silence_ms);
        for _ in 0..2 {
            for _ in 0..10 + bed.dice.below(30) {
                strike(&mut bed);
                let ms = bed.dice.below(1500);
                bed.pass(ms);
            }
            calm_down(&mut bed);
            check(&bed, seed);
        }
    }
}

#[test]
fn whole_nics_may_leave_and_return_twice() {
    for seed in 0..20 {
        let mut bed = Bed::new(seed, 3, 500);
        for _ in 0..2 {
            for process in [0, 1] {
                remove_all(&mut bed, process);
                let ms = 100 + bed.dice.below(3000);
                bed.pass(ms);
            }
            calm_down(&mut bed);
            check(&bed, seed);
        }
    }
}
