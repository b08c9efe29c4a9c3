//! Long runs under load over the software fabric, between two processes in real time, while rails
//! fail and return. Every byte is compared. Memory, descriptors, threads and registrations are
//! sampled. Once everything is closed, they must be back at their initial values, within the limits
//! of `QUANTITIES`, and no queue pair may be left.
//!
//! The tests run one at a time: there are few processors, and the samples are of whole processes.
//!
//! `tests/long/load.sh` runs these tests for a chosen time; `cargo test` does not.

#![allow(unsafe_code)]

mod common;
mod strain;

use common::turn;
use std::time::{Duration, Instant};
use strain::bed::{Bed, Carried};
use strain::end;
use strain::flaps::{Flapped, Flaps};
use strain::gauge::{History, QUANTITIES, Sample};
use strain::heap::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Connections before the first sample. What a process allocates once and then keeps (threads, free
/// lists, fabric pages) is thus part of the first sample.
const WARM_UP: u64 = 24;
/// Maximum number of samples that the test `connections` takes while it opens and closes one
/// connection after the other.
const SAMPLES: u64 = 100;

fn wanted(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text}: a number"))
    })
}

#[test]
#[ignore = "a load: tests/long/load.sh"]
fn flapping() {
    let _turn = turn();
    stream("flapping", 2, wanted("SPARK_LOAD_SECONDS", 4));
}

#[test]
#[ignore = "a load: tests/long/load.sh"]
fn many() {
    let _turn = turn();
    stream(
        "many",
        wanted("SPARK_LOAD_AT_ONCE", 16),
        wanted("SPARK_LOAD_SECONDS", 4),
    );
}

/// Sends messages without pause over `count` parallel connections, half of them in each direction,
/// for `seconds` seconds, while rails flap.
fn stream(name: &str, count: u64, seconds: u64) {
    let bed = Bed::new();
    let seed = wanted("SPARK_LOAD_SEED", 1);
    println!(
        "{name}: {count} parallel connections for {seconds} s, a rail flaps every second (seed {seed})"
    );
    let order = |first: u64| format!("open {first} {count} {}", count.div_ceil(2));
    // Warms up: all rails are lost and return, and messages of all sizes are sent.
    bed.tell(&order(0), "opened");
    let flaps = Flaps::start(bed.switches.clone(), seed + 1);
    std::thread::sleep(Duration::from_secs((seconds / 10).clamp(3, 30)));
    flaps.stop();
    bed.tell("stop", "closed");
    expect_nothing(name, bed.settle());
    let ((before, carried_before), made_before) = (bed.sample(), bed.made());
    let opened = bed.tell(&order(0), "opened");
    let flaps = Flaps::start(bed.switches.clone(), seed);
    let begun = Instant::now();
    let mut during = [Vec::new(), Vec::new()];
    let mut least_of_a_second = u64::MAX;
    let mut last = carried_before;
    while begun.elapsed() < Duration::from_secs(seconds) {
        std::thread::sleep(Duration::from_secs(1));
        let (samples, carried) = bed.sample();
        least_of_a_second = least_of_a_second.min(carried.bytes - last.bytes);
        last = carried;
        keep(&mut during, samples);
    }
    let took = begun.elapsed();
    let flapped = flaps.stop();
    bed.tell("stop", "closed");
    let mut off = bed.settle();
    let (after, carried) = bed.sample();
    let Flapped {
        flaps,
        in_pairs,
        refusals,
    } = flapped;
    println!(
        "  {flaps} flaps, {in_pairs} of them of both rails together; {refusals} requests refused as invalid; {} queue pairs made",
        bed.made() - made_before
    );
    print_carried(carried_before, carried, took);
    print_open(&before[0], &during[0], count, opened[0][0]);
    println!(
        "  least in a second {:.1} MB; queue pairs left: {}",
        least_of_a_second as f64 / 1e6,
        bed.queue_pairs()
    );
    off.extend(bed.print(&histories(before, during, after)));
    expect_nothing(name, off);
}

#[test]
#[ignore = "a load: tests/long/load.sh"]
fn connections() {
    let _turn = turn();
    let bed = Bed::new();
    let count = wanted("SPARK_LOAD_CONNECTIONS", 60);
    println!(
        "connections: {count}, one after the other, each opened, used for one message and closed"
    );
    bed.tell(&format!("churn 0 {WARM_UP}"), "churned");
    expect_nothing("connections", bed.settle());
    let ((before, carried_before), begun) = (bed.sample(), Instant::now());
    let mut during = [Vec::new(), Vec::new()];
    let mut took = [Duration::ZERO; 3];
    let at_a_time = count.div_ceil(SAMPLES).max(1);
    let mut first = 0;
    while first < count {
        let next = at_a_time.min(count - first);
        let churned_us = bed.tell(&format!("churn {first} {next}"), "churned");
        for (sum, us) in took.iter_mut().zip(&churned_us[0]) {
            *sum += Duration::from_micros(*us);
        }
        first += next;
        keep(&mut during, bed.sample().0);
    }
    let whole = begun.elapsed();
    let mut off = bed.settle();
    let (after, carried) = bed.sample();
    let each = took.map(|sum| sum.as_secs_f64() * 1e3 / count as f64);
    println!(
        "  each: {:.2} ms to open, {:.2} ms for its message, {:.2} ms to close",
        each[0], each[1], each[2]
    );
    print_carried(carried_before, carried, whole);
    println!("  queue pairs left: {}", bed.queue_pairs());
    off.extend(bed.print(&histories(before, during, after)));
    assert_eq!(
        carried.messages - carried_before.messages,
        count,
        "a message for each"
    );
    expect_nothing("connections", off);
}

fn expect_nothing(name: &str, off: Vec<String>) {
    assert!(off.is_empty(), "{name}:\n{}", off.join("\n"));
}

fn keep(during: &mut [Vec<Sample>; 2], samples: [Sample; 2]) {
    during
        .iter_mut()
        .zip(samples)
        .for_each(|(all, sample)| all.push(sample));
}

fn histories(before: [Sample; 2], during: [Vec<Sample>; 2], after: [Sample; 2]) -> [History; 2] {
    let mut all = before.into_iter().zip(during).zip(after);
    std::array::from_fn(|_| {
        let ((before, during), after) = all.next().expect("two processes");
        History {
            before,
            during,
            after,
        }
    })
}

/// Prints the average resources of an open connection: for each quantity, the largest sample minus
/// `before`, divided by `count`.
fn print_open(before: &Sample, during: &[Sample], count: u64, opened_us: u64) {
    let each = |quantity: usize| {
        let largest = during
            .iter()
            .map(|sample| sample.values[quantity])
            .max()
            .unwrap_or(0);
        largest.saturating_sub(before.values[quantity]) as f64 / count as f64
    };
    let at = |name: &str| {
        QUANTITIES
            .iter()
            .position(|quantity| quantity.name == name)
            .expect("a quantity")
    };
    let plugin = each(at("plugin bytes")) / 1024.0;
    let heap = each(at("heap KiB"));
    println!(
        "  opened in {:.1} ms; each open one takes up to {heap:.0} KiB of heap in a process, {plugin:.0} KiB of them the plugin's, and {:.1} descriptors",
        opened_us as f64 / 1e3,
        each(at("descriptors"))
    );
}

fn print_carried(before: Carried, after: Carried, took: Duration) {
    let messages = after.messages - before.messages;
    let bytes = (after.bytes - before.bytes) as f64 / 1e9;
    let seconds = took.as_secs_f64();
    println!(
        "  {messages} messages, {bytes:.3} GB, 0 wrong, in {seconds:.1} s ({:.3} GB/s)",
        bytes / seconds
    );
}

#[test]
#[ignore = "the other tests' process"]
fn one_of_two_processes() {
    let given = |name: &str| {
        std::env::var(name)
            .unwrap_or_else(|_| panic!("{name} is not set: another test runs this one"))
    };
    let mut settings: Vec<(String, String)> = ["NCCL_IBVERBS_LIB", "NCCL_SPARK_SYSFS"]
        .map(|name| (name.to_owned(), given(name)))
        .to_vec();
    settings.push(("NCCL_IB_HCA".to_owned(), strain::flaps::RAILS.join(",")));
    settings.push(("NCCL_SOCKET_IFNAME".to_owned(), "lo".to_owned()));
    let side = given("SOFTVERBS_NODE").parse().expect("0 or 1");
    end::Process::new(side, &settings).run();
}
