//! A search through every order of events, for two ends with two rails and two messages. Some
//! events are mishaps: rails are lost, frames are lost or overtake each other, ports go down and
//! come up, deadlines pass early. [`Budget`] limits the number of each mishap.
//!
//! Grants and messages use the plugin's own `Sends` and `Receives`, with one slot or two in place
//! of 32. The model adds each side's queue pairs, their writes in transit, and the frames.
//!
//! - A write can land as long as the other side has the queue pairs that it was posted to.
//! - A loss stays in the data path's status until the service thread reports it to recovery.
//! - Lost queue pairs keep working, and stop in a later event. If their device is removed, a
//!   receiver's device has new keys from that event on.
//! - The thread of an attempt may hang.
//! - A connection may begin without some of its rails, its TCP may break, its limits may pass, and
//!   either side may close it at any time.
//!
//! The search checks these promises:
//! - both sides have fenced a rail before anything that was posted on it is resent; this is checked
//!   when a rail's resend begins, and again for each share that is resent;
//! - every message is delivered once, with its own bytes, and its buffer is not written afterwards;
//! - grants are written with keys of the newest epoch, and shares never with older keys;
//! - no grant is written while an older grant for its slot can land after it;
//! - the accepting side uses new queue pairs only after the connecting side does;
//! - recovery counts every rail in use as up; if it counts another rail as up, that rail's loss has
//!   not been reported to it yet;
//! - an end gives up when one of its limits passes or the peer has failed, but not earlier, and
//!   gives the true cause;
//! - a side that no longer recovers rails keeps no queue pairs under test;
//! - a side whose peer has closed no longer recovers rails, even if TCP breaks or is replaced;
//! - BYE has the number of delivered messages;
//! - from every state, a final state can be reached. In a final state, all messages are delivered
//!   and both rails are up; or, if a side has closed or failed, both sides have destroyed what
//!   remained of the connection.

use super::world::{Budget, Event, World};
use std::collections::HashMap;

/// Visits every state, and returns the number of states. The error has the events that lead to a
/// broken promise, to more than `most` states, or to a state without a way to a final state.
fn search<const N: usize>(budget: Budget, most: usize) -> Result<usize, String> {
    let first = World::<N>::new(budget);
    let mut known: HashMap<u128, u32> = HashMap::from([(first.key(), 0)]);
    let mut came = vec![(0, None)];
    let mut done = Vec::new();
    let mut edges = Vec::new();
    let mut open = vec![(0, first)];
    while let Some((at, world)) = open.pop() {
        if world.is_done() {
            done.push(at);
        }
        for event in world.events() {
            let mut next = world.clone();
            let told = |why: String, came: &[(u32, Option<Event>)]| {
                format!("{why}, after {:?}, {event:?}", way_to(came, at))
            };
            next.happen(event).map_err(|why| told(why, &came))?;
            let id = came.len() as u32;
            let known = *known.entry(next.key()).or_insert_with(|| {
                came.push((at, Some(event)));
                open.push((id, next));
                id
            });
            edges.push((known, at));
            if came.len() > most {
                return Err(format!(
                    "more than {most} states, after {:?}",
                    way_to(&came, at)
                ));
            }
        }
    }
    let stuck = first_stuck(came.len(), &done, edges);
    stuck.map_or(Ok(came.len()), |at| {
        let events = way_to(&came, at);
        let mut world = World::<N>::new(budget);
        for event in &events {
            world.happen(*event)?;
        }
        Err(format!("no way on, after {events:?}: {world:#?}"))
    })
}

fn way_to(came: &[(u32, Option<Event>)], mut at: u32) -> Vec<Event> {
    let mut events = Vec::new();
    while let (before, Some(event)) = came[at as usize] {
        events.push(event);
        at = before;
    }
    events.reverse();
    events
}

/// Returns a state from which no state in `done` can be reached, if any. Each edge has the state
/// that it leads to, then the state that it comes from.
fn first_stuck(states: usize, done: &[u32], mut edges: Vec<(u32, u32)>) -> Option<u32> {
    edges.sort_unstable();
    let mut is_good = vec![false; states];
    let mut open = done.to_vec();
    while let Some(at) = open.pop() {
        if std::mem::replace(&mut is_good[at as usize], true) {
            continue;
        }
        let begin = edges.partition_point(|(to, _)| *to < at);
        open.extend(
            edges[begin..]
                .iter()
                .take_while(|(to, _)| *to == at)
                .map(|(_, from)| *from),
        );
    }
    is_good.iter().position(|good| !good).map(|at| at as u32)
}

/// Lists budgets, one in each row. Mishaps that a row does not name do not happen.
macro_rules! budgets {
    ($({ $($mishap:ident: $number:literal),+ }),+ $(,)?) => {
        [$(Budget { $($mishap: $number,)+ ..Budget::default() }),+]
    };
}

/// Runs small budgets, which take seconds in a debug build.
#[test]
fn every_order_of_events_keeps_the_promises() {
    for budget in budgets![
        { losses: 1, frames: 1, overtakes: 1 },
        { losses: 1, early: 1 },
        { losses: 1, failures: 2 },
        { losses: 1, hangs: 1, early: 1 },
        { removals: 1, early: 1 },
        { missing: 1, losses: 1, failures: 1 },
        { missing: 2, frames: 1, early: 1 },
        { closes: 1, missing: 1, early: 1 },
        { limits: 1, removals: 1 },
        { limits: 1, missing: 2, frames: 1 },
        { tcp: 1 },
        { losses: 1, cuts: 1 },
        { removals: 1, cuts: 1 },
    ] {
        search_and_say::<2>(budget, 200_000);
    }
    for budget in budgets![
        { losses: 1, frames: 1 },
        { losses: 1, restarts: 1 },
        { removals: 1 },
        { closes: 1, losses: 1 },
        { losses: 1, cuts: 1 },
    ] {
        search_and_say::<1>(budget, 200_000);
    }
}

#[test]
#[ignore = "minutes in --release, and half a gigabyte"]
fn every_order_of_many_events_keeps_the_promises() {
    for budget in budgets![
        { losses: 2, frames: 1, overtakes: 1, cuts: 1 },
        { losses: 1, frames: 1, overtakes: 1, early: 1, failures: 1 },
        { losses: 1, restarts: 1, failures: 1 },
        { losses: 1, hangs: 2, early: 1, closes: 1 },
        { removals: 1, losses: 1, frames: 1 },
        { removals: 1, restarts: 1, failures: 1 },
        { missing: 1, losses: 1, frames: 1, failures: 1 },
        { missing: 2, losses: 1, frames: 1, early: 1 },
        { closes: 2, losses: 1, frames: 1, early: 1 },
        { closes: 1, missing: 2, frames: 1, early: 1 },
        { limits: 1, removals: 1, early: 1 },
        { limits: 1, missing: 2, losses: 1 },
        { tcp: 1, losses: 1 },
        { tcp: 1, closes: 1 },
        { tcp: 1, limits: 1 },
        { tcp: 1, missing: 2 },
    ] {
        search_and_say::<2>(budget, 10_000_000);
    }
    for budget in budgets![
        { losses: 2, frames: 1, overtakes: 1 },
        { removals: 2 },
        { removals: 1, losses: 1, cuts: 1 },
        { closes: 2, losses: 1, frames: 1 },
        { tcp: 1, losses: 1 },
        { losses: 1, restarts: 1, cuts: 1 },
    ] {
        search_and_say::<1>(budget, 10_000_000);
    }
}

#[test]
#[ignore = "more minutes in --release, and a gigabyte"]
fn the_long_run_keeps_the_promises() {
    for budget in budgets![
        { tcp: 2 },
        { tcp: 1, limits: 1, missing: 2 },
        { tcp: 1, closes: 1, missing: 1 },
        { limits: 1, closes: 1, losses: 1, removals: 1 },
        { tcp: 1, removals: 1, early: 1 },
        { removals: 2, frames: 1, early: 1, failures: 1 },
        { removals: 2, losses: 1, restarts: 1 },
    ] {
        search_and_say::<2>(budget, 20_000_000);
    }
    let [budget] = budgets![{ losses: 2, restarts: 1, cuts: 1 }];
    search_and_say::<1>(budget, 20_000_000);
}

fn search_and_say<const N: usize>(budget: Budget, most: usize) {
    let states = search::<N>(budget, most).unwrap_or_else(|why| panic!("{budget:?}: {why}"));
    println!("{N} slots, {budget:?}: {states} states");
}
