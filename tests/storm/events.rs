//! A storm: a sequence of events that depends only on a seed. Each event takes ports down, takes
//! functions off the bus, or takes addresses away, on one node or on both, and brings them back.

use crate::sim::Dice;
use std::fmt;

/// Rails of a node, as in the profile `spark-2cable`.
pub const RAILS: [&str; 4] = ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"];
/// Set of all rails of a node.
pub const ALL_RAILS: u8 = (1 << RAILS.len()) - 1;
/// Longest time in milliseconds from an event to the next, and longest time that a rail is away.
const LONGEST_MS: u64 = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The port goes down and comes up.
    Port,
    /// The function leaves the bus, and returns as a new device.
    Function,
    /// The port's addresses leave the GID table, and return at other indices.
    Address,
}

#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// Start, in milliseconds since the start of the event before.
    pub after_ms: u64,
    pub what: What,
    /// Set of the nodes.
    pub nodes: u8,
    /// Set of the rails.
    pub rails: u8,
    pub away_ms: u64,
    /// Time from one rail of the event to the next.
    pub stagger_ms: u64,
    /// Order of the changes: rail by rail on both nodes, or one node after the other.
    pub by_rail: bool,
}

/// A change of one rail of one node.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    pub at_ms: u64,
    pub node: usize,
    pub rail: usize,
    pub what: What,
    pub is_return: bool,
}

pub struct Storm(pub Vec<Event>);

impl Storm {
    pub fn draw(dice: &mut Dice, events: u64) -> Self {
        Self((0..events).map(|_| Event::draw(dice)).collect())
    }

    /// Changes of all events, in the order of their times.
    pub fn changes(&self) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut start_ms = 0;
        for event in &self.0 {
            start_ms += event.after_ms;
            changes.extend(event.changes(start_ms));
        }
        changes.sort_by_key(|change| change.at_ms);
        changes
    }
}

impl Event {
    fn draw(dice: &mut Dice) -> Self {
        let rails = match dice.below(4) {
            0 => 1 << dice.below(RAILS.len() as u64),
            1 => 1 + dice.below(ALL_RAILS.into()) as u8,
            _ => ALL_RAILS,
        };
        Self {
            after_ms: some_ms(dice),
            what: match dice.below(6) {
                0 | 1 => What::Port,
                2 => What::Address,
                _ => What::Function,
            },
            nodes: [1, 2, 3, 3][dice.below(4) as usize],
            rails,
            away_ms: some_ms(dice),
            stagger_ms: [0, 0, 5, 25][dice.below(4) as usize],
            by_rail: dice.one_in(2),
        }
    }

    fn changes(&self, start_ms: u64) -> impl Iterator<Item = Change> + use<> {
        let Self {
            what,
            nodes,
            rails,
            away_ms,
            stagger_ms,
            by_rail,
            ..
        } = *self;
        let is_in = |set: u8, number: &usize| set >> number & 1 == 1;
        let mut places: Vec<_> = places().collect();
        places.retain(|(node, rail)| is_in(nodes, node) && is_in(rails, rail));
        if by_rail {
            places.sort_by_key(|(node, rail)| (*rail, *node));
        }
        places
            .into_iter()
            .enumerate()
            .flat_map(move |(turn, (node, rail))| {
                let leaves_ms = start_ms + turn as u64 * stagger_ms;
                [(leaves_ms, false), (leaves_ms + away_ms, true)].map(|(at_ms, is_return)| Change {
                    at_ms,
                    node,
                    rail,
                    what,
                    is_return,
                })
            })
    }
}

/// Each rail of each node, as the numbers of the node and of the rail.
pub fn places() -> impl Iterator<Item = (usize, usize)> {
    (0..2).flat_map(|node| (0..RAILS.len()).map(move |rail| (node, rail)))
}

/// A random time: each power of two is equally probable.
fn some_ms(dice: &mut Dice) -> u64 {
    let longest_ms = LONGEST_MS >> dice.below(10);
    dice.below(longest_ms + 1)
}

impl fmt::Display for Storm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Event {
            after_ms,
            what,
            nodes,
            rails,
            away_ms,
            stagger_ms,
            by_rail,
        } in &self.0
        {
            writeln!(
                f,
                "  after {after_ms} ms: {what:?} of nodes {nodes:02b}, rails {rails:04b}, away {away_ms} ms, {stagger_ms} ms apart{}",
                if *by_rail { ", rail by rail" } else { "" }
            )?;
        }
        Ok(())
    }
}
