//! Which rail carries which part of a message.
//!
//! A small message goes whole to one rail. A large one is cut into one share for each rail that helps, so that all
//! shares finish at the same moment given what each rail still has to carry: the fluid limit of handing out pieces
//! one by one to the rail that will finish them first, with one work request for each rail instead of many.

use crate::wire::MAX_RAILS;

/// Shares begin at multiples of this in the message: LL128 data must land in whole 128-byte units.
pub const SHARE_ALIGNMENT: u64 = 128;

/// How much sooner (in microseconds) another rail must be done with a small message before the message leaves the
/// rail that carried the one before: a rail in use is cheaper to stay on (its queue pair, its completion queue and
/// the receiver's are warm) than the last fraction of a packet time is worth.
const STAY_MARGIN_US: f64 = 5.0;

/// What the planner knows of one rail.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lane {
    /// What it carries, in Mb/s (bits per microsecond); above zero.
    pub rate_mbps: f64,
    /// Bytes given to it that it has not confirmed, of all connections of this process.
    pub backlog_bytes: u64,
}

impl Lane {
    fn bytes_per_us(&self) -> f64 {
        self.rate_mbps / 8.0
    }

    fn free_at_us(&self) -> f64 {
        self.backlog_bytes as f64 / self.bytes_per_us()
    }

    fn done_at_us(&self, bytes: u64) -> f64 {
        (self.backlog_bytes + bytes) as f64 / self.bytes_per_us()
    }
}

/// A contiguous part of a message on one rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Share {
    /// The rail's number in the connection.
    pub lane: u8,
    /// Where the part begins in the message.
    pub offset: u64,
    /// Its size; 0 only for the single share of an empty message.
    pub bytes: u64,
}

/// The shares of one message: at least one, together the whole message in order.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    shares: [Share; MAX_RAILS],
    count: usize,
}

impl Shares {
    /// The shares, by offset.
    #[inline]
    pub fn as_slice(&self) -> &[Share] {
        &self.shares[..self.count.min(MAX_RAILS)]
    }

    /// The whole message on one lane.
    pub fn whole(lane: usize, bytes: u64) -> Self {
        let mut shares = [Share::default(); MAX_RAILS];
        shares[0] = Share { lane: lane as u8, offset: 0, bytes };
        Self { shares, count: 1 }
    }
}

/// Plans one message over `lanes` (1 to [`MAX_RAILS`] of them). No share is smaller than `min_share_bytes` unless the
/// message is; `favourite` is the lane that carried the last small message.
#[inline]
pub fn plan(bytes: u64, lanes: &[Lane], min_share_bytes: u64, favourite: usize) -> Shares {
    let most = (bytes / min_share_bytes.max(SHARE_ALIGNMENT)).min(lanes.len().min(MAX_RAILS) as u64) as usize;
    if most < 2 {
        return Shares::whole(pick(bytes, lanes, favourite), bytes);
    }
    divide(bytes, lanes, min_share_bytes, most)
}

/// Whether a message is small and its favourite lane idle enough that no other needs to be looked at.
#[inline]
pub fn stays(bytes: u64, favourite: &Lane, min_share_bytes: u64) -> bool {
    bytes / 2 < min_share_bytes.max(SHARE_ALIGNMENT) && favourite.free_at_us() <= STAY_MARGIN_US
}

/// The lane for a small message: the one done first, or the favourite if it is about as good.
#[inline]
pub fn pick(bytes: u64, lanes: &[Lane], favourite: usize) -> usize {
    let mut best = (0, f64::INFINITY);
    for (index, lane) in lanes.iter().enumerate() {
        let done = lane.done_at_us(bytes);
        if done < best.1 {
            best = (index, done);
        }
    }
    match lanes.get(favourite) {
        Some(lane) if lane.done_at_us(bytes) <= best.1 + STAY_MARGIN_US => favourite,
        _ => best.0,
    }
}

/// Water-filling: the lanes that are free first join until the common finishing time is before the next one is free.
/// Lanes whose share would be too small to be worth a work request leave, the smallest share first.
fn divide(bytes: u64, lanes: &[Lane], min_share_bytes: u64, most: usize) -> Shares {
    let (mut order, mut count) = by_free_time(lanes);
    loop {
        let (members, level) = fill(bytes, lanes, &order[..count], most);
        let mut weakest = (0, min_share_bytes as f64);
        for (place, &index) in order[..members].iter().enumerate() {
            let share = share_at(&lanes[index], level);
            if share < weakest.1 {
                weakest = (place, share);
            }
        }
        if members < 2 || weakest.1 >= min_share_bytes as f64 {
            return cut(bytes, lanes, &order[..members], level);
        }
        order.copy_within(weakest.0 + 1..count, weakest.0);
        count -= 1;
    }
}

/// How many of the lanes in `order` take part, and when (in microseconds) they are all done.
fn fill(bytes: u64, lanes: &[Lane], order: &[usize], most: usize) -> (usize, f64) {
    let (mut rate, mut work, mut level, mut members) = (0.0, bytes as f64, 0.0, 0);
    for &index in order {
        let lane = &lanes[index];
        if members > 0 && (members == most || lane.free_at_us() >= level) {
            break;
        }
        rate += lane.bytes_per_us();
        work += lane.backlog_bytes as f64;
        level = work / rate;
        members += 1;
    }
    (members, level)
}

fn share_at(lane: &Lane, level: f64) -> f64 {
    (level - lane.free_at_us()) * lane.bytes_per_us()
}

fn by_free_time(lanes: &[Lane]) -> ([usize; MAX_RAILS], usize) {
    let mut order = [0; MAX_RAILS];
    let mut count = 0;
    for (index, lane) in lanes.iter().enumerate().take(MAX_RAILS) {
        let mut at = count;
        while at > 0 && lanes[order[at - 1]].free_at_us() > lane.free_at_us() {
            order[at] = order[at - 1];
            at -= 1;
        }
        order[at] = index;
        count += 1;
    }
    (order, count)
}

fn cut(bytes: u64, lanes: &[Lane], members: &[usize], level: f64) -> Shares {
    let mut shares = [Share::default(); MAX_RAILS];
    let (mut offset, mut count) = (0, 0);
    for (place, &index) in members.iter().enumerate() {
        let lane = &lanes[index];
        let left = bytes - offset;
        let exact = share_at(lane, level);
        let take =
            if place + 1 == members.len() { left } else { (exact as u64).next_multiple_of(SHARE_ALIGNMENT).min(left) };
        if take == 0 {
            continue;
        }
        shares[count] = Share { lane: index as u8, offset, bytes: take };
        offset += take;
        count += 1;
    }
    Shares { shares, count }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIN: u64 = 16 * 1024;

    fn lanes(spec: &[(f64, u64)]) -> Vec<Lane> {
        spec.iter().map(|&(rate_mbps, backlog_bytes)| Lane { rate_mbps, backlog_bytes }).collect()
    }

    fn shares(bytes: u64, spec: &[(f64, u64)]) -> Vec<(u8, u64)> {
        plan(bytes, &lanes(spec), MIN, 0).as_slice().iter().map(|s| (s.lane, s.bytes)).collect()
    }

    #[test]
    fn equal_idle_rails_share_equally() {
        assert_eq!(shares(1 << 20, &[(1e5, 0); 4]), [(0, 1 << 18), (1, 1 << 18), (2, 1 << 18), (3, 1 << 18)]);
    }

    #[test]
    fn unequal_rails_finish_together() {
        let got = shares(1_300_000, &[(80.0, 0), (80.0, 0), (80.0, 0), (20.0, 0)]);
        assert_eq!(got.len(), 4);
        assert!(
            got[..3].iter().all(|(_, b)| b.abs_diff(400_000) <= 128) && got[3].1.abs_diff(100_000) <= 512,
            "{got:?}"
        );
    }

    #[test]
    fn a_busy_rail_gets_less_or_nothing() {
        assert_eq!(shares(1 << 18, &[(1e5, 1 << 30), (1e5, 0)]), [(1, 1 << 18)]);
        let got = shares(1 << 20, &[(1e5, 1 << 18), (1e5, 0)]);
        assert_eq!(got, [(1, (1 << 19) + (1 << 17)), (0, (1 << 19) - (1 << 17))]);
    }

    #[test]
    fn a_small_message_stays_whole_and_prefers_the_rail_in_use() {
        assert_eq!(shares(0, &[(1e5, 0); 4]), [(0, 0)]);
        assert_eq!(shares(2 * MIN - 1, &[(1e5, 0); 4]), [(0, 2 * MIN - 1)]);
        assert_eq!(plan(8, &lanes(&[(1e5, 0); 4]), MIN, 2).as_slice()[0].lane, 2);
        assert_eq!(plan(8, &lanes(&[(1e5, 0), (1e5, 1 << 20)]), MIN, 1).as_slice()[0].lane, 0);
        assert_eq!(plan(8, &lanes(&[(1e5, 0)]), MIN, 7).as_slice()[0].lane, 0);
    }

    #[test]
    fn no_share_is_below_the_minimum() {
        assert_eq!(shares(2 * MIN, &[(1e5, 0); 4]).len(), 2);
        assert_eq!(shares(1 << 20, &[(1e5, 0), (100.0, 0)]), [(0, 1 << 20)]);
        assert_eq!(shares(1 << 20, &[(100.0, 0), (1e5, 0)]), [(1, 1 << 20)]);
    }

    proptest! {
        #[test]
        fn shares_cover_the_message_once(
            bytes in prop_oneof![0..4096u64, 0..1u64 << 22, 0..1u64 << 40],
            spec in prop::collection::vec((1.0..400_000.0f64, prop_oneof![Just(0u64), 0..1u64 << 24]), 1..=MAX_RAILS),
            min in prop_oneof![Just(128u64), 128..1u64 << 20],
            favourite in 0..MAX_RAILS,
        ) {
            let got = plan(bytes, &lanes(&spec), min, favourite);
            let got = got.as_slice();
            prop_assert!(!got.is_empty() && got.len() <= spec.len());
            let mut at = 0;
            let mut seen = 0u32;
            for share in got {
                prop_assert_eq!(share.offset, at);
                prop_assert!(share.offset % SHARE_ALIGNMENT == 0 && usize::from(share.lane) < spec.len());
                prop_assert!(share.bytes > 0 || bytes == 0);
                prop_assert_eq!(seen & 1 << share.lane, 0);
                seen |= 1 << share.lane;
                at += share.bytes;
            }
            prop_assert_eq!(at, bytes);
            // The last share pays for the rounding of the others.
            let rounding = SHARE_ALIGNMENT * got.len() as u64;
            prop_assert!(got.len() == 1 || got.iter().all(|s| s.bytes + rounding >= min), "{:?}", got);
        }
    }
}
