//! Cuts a large message into shares that finish together, one for each lane that helps. A lane is a
//! rail within one connection. A share is a contiguous part of a message, sent on one lane.
//!
//! The result is the same as if infinitely small pieces were given, one by one, to the lane that
//! finishes each piece first. But each lane needs only one work request.

use crate::wire::MAX_RAILS;
use crate::wire::ids::LaneId;

/// Shares begin at multiples of this size, because data of NCCL's LL128 protocol must arrive in
/// whole 128-byte units.
pub const SHARE_ALIGNMENT: u64 = 128;

/// Speed and backlog of one lane.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LaneLoad {
    /// Rate in bytes per microsecond; 0 if the lane must not be used.
    pub bytes_per_us: f64,
    /// Bytes posted on the lane and not confirmed.
    pub backlog_bytes: u64,
}

/// A contiguous part of a message on one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Share {
    /// The lane that carries the share.
    pub lane: LaneId,
    /// Offset in the message.
    pub offset: u64,
    /// Size of the share; 0 only for the single share of an empty message.
    pub bytes: u64,
}

/// The shares of one message, at least one, in the order of their offsets. Together they are the
/// whole message.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    shares: [Share; MAX_RAILS],
    count: usize,
}

impl Shares {
    /// Returns the shares, in the order of their offsets.
    #[inline]
    pub fn as_slice(&self) -> &[Share] {
        &self.shares[..self.count.min(MAX_RAILS)]
    }

    /// Returns a single share: the whole message on one lane.
    pub fn whole(lane: LaneId, bytes: u64) -> Self {
        let mut shares = [Share::default(); MAX_RAILS];
        shares[0] = Share {
            lane,
            offset: 0,
            bytes,
        };
        Self { shares, count: 1 }
    }

    /// Moves the last `bytes` of the message, and up to 127 more for the alignment, to a new share
    /// on `lane`, which must not have a share yet. Does nothing if the last share has less than
    /// twice `bytes` (rounded up to the alignment), or if there are [`MAX_RAILS`] shares.
    pub fn give(&mut self, lane: LaneId, bytes: u64) {
        let Some(last) = self.shares[..self.count.min(MAX_RAILS)].last_mut() else {
            return;
        };
        if self.count >= MAX_RAILS || last.bytes < 2 * bytes.next_multiple_of(SHARE_ALIGNMENT) {
            return;
        }
        let end = last.offset + last.bytes;
        let offset = (end - bytes) / SHARE_ALIGNMENT * SHARE_ALIGNMENT;
        last.bytes = offset - last.offset;
        self.shares[self.count] = Share {
            lane,
            offset,
            bytes: end - offset,
        };
        self.count += 1;
    }
}

/// Returns the lane that would finish the whole message first, and the time in microseconds until
/// then. The time is infinite if no lane may be used.
#[inline]
pub fn soonest(bytes: u64, lanes: &[LaneLoad]) -> (LaneId, f64) {
    let done_us = |lane: &LaneLoad| (lane.backlog_bytes + bytes) as f64 / lane.bytes_per_us;
    let each = LaneId::all(lanes.len()).zip(lanes.iter().map(done_us));
    each.fold((LaneId::default(), f64::INFINITY), |best, lane| {
        if lane.1 < best.1 { lane } else { best }
    })
}

/// Lanes that may get a share, sorted by the time at which they are free. Of lanes that are free at
/// the same time, the fastest comes first.
struct LanesByTime {
    lane: [LaneId; MAX_RAILS],
    free_at_us: [f64; MAX_RAILS],
    count: usize,
}

/// Cuts a message over `lanes` (1 to [`MAX_RAILS`]) by water-filling.
///
/// Lanes are added in the order in which they become free. No more lanes are added
/// - if the next lane becomes free only after the added lanes would have finished together, or
/// - if one more lane would make the average share smaller than `min_share_bytes`.
///
/// Then lanes whose share is smaller than half of `min_share_bytes` are removed, the smallest share
/// first. Fewer lanes get a share if the message then ends at most `accepted_delay_us` microseconds
/// later.
#[inline]
pub fn divide(
    bytes: u64,
    lanes: &[LaneLoad],
    min_share_bytes: u64,
    accepted_delay_us: f64,
) -> Shares {
    let most = (bytes / min_share_bytes.max(1)).clamp(1, MAX_RAILS as u64) as usize;
    let least = (min_share_bytes / 2) as f64;
    if let Some(shares) = divide_among_all(bytes, lanes, most, least, accepted_delay_us) {
        return shares;
    }
    let mut order = LanesByTime::new(lanes);
    if accepted_delay_us > 0.0 {
        let (lane, whole_us) = soonest(bytes, lanes);
        let (_, level) = order.fill(bytes, lanes, most, 0.0);
        if whole_us - level <= accepted_delay_us {
            return Shares::whole(lane, bytes);
        }
    }
    loop {
        let (members, level) = order.fill(bytes, lanes, most, accepted_delay_us);
        let mut weakest = (0, least);
        for place in 0..members {
            let share = order.share_at(place, lanes, level);
            if share < weakest.1 {
                weakest = (place, share);
            }
        }
        if members < 2 || weakest.1 >= least {
            return order.cut(bytes, lanes, members, level);
        }
        order.leave(weakest.0);
    }
}

/// Handles the usual case of [`divide`], in which all lanes get a share and need no sorting.
/// Returns `None` in other cases.
#[inline]
fn divide_among_all(
    bytes: u64,
    lanes: &[LaneLoad],
    most: usize,
    least: f64,
    accepted_delay_us: f64,
) -> Option<Shares> {
    if lanes.len() > most {
        return None;
    }
    let mut rate = 0.0;
    let mut work = bytes as f64;
    let mut last_rate = 0.0;
    let mut last_backlog = 0.0;
    for lane in lanes {
        let backlog = lane.backlog_bytes as f64;
        rate += lane.bytes_per_us;
        work += backlog;
        if backlog * last_rate >= last_backlog * lane.bytes_per_us {
            (last_rate, last_backlog) = (lane.bytes_per_us, backlog);
        }
    }
    let level = work / rate;
    if accepted_delay_us > 0.0
        && (work - last_backlog) / (rate - last_rate) - level <= accepted_delay_us
    {
        return None;
    }
    let mut shares = Shares {
        shares: [Share::default(); MAX_RAILS],
        count: lanes.len(),
    };
    let mut offset = 0;
    let each = shares
        .shares
        .iter_mut()
        .zip(lanes)
        .zip(LaneId::all(lanes.len()))
        .enumerate();
    for (index, ((share, known), lane)) in each {
        let exact = level * known.bytes_per_us - known.backlog_bytes as f64;
        // NaN if all lanes have rate 0.
        if exact.is_nan() || exact < least || bytes <= offset {
            return None;
        }
        let left = bytes - offset;
        let whole = (exact as i64 as u64).next_multiple_of(SHARE_ALIGNMENT);
        let take = if index + 1 == lanes.len() {
            left
        } else {
            whole.min(left)
        };
        *share = Share {
            lane,
            offset,
            bytes: take,
        };
        offset += take;
    }
    Some(shares)
}

impl LanesByTime {
    #[inline]
    fn new(lanes: &[LaneLoad]) -> Self {
        let mut order = Self {
            lane: [LaneId::default(); MAX_RAILS],
            free_at_us: [0.0; MAX_RAILS],
            count: 0,
        };
        for (lane, known) in LaneId::all(lanes.len()).zip(lanes) {
            if known.bytes_per_us <= 0.0 {
                continue;
            }
            let free = known.backlog_bytes as f64 / known.bytes_per_us;
            let mut at = order.count;
            let is_after = |other: usize, order: &Self| {
                let other_free = order.free_at_us[other];
                let other = &lanes[order.lane[other].index()];
                other_free > free || other_free == free && other.bytes_per_us < known.bytes_per_us
            };
            while at > 0 && is_after(at - 1, &order) {
                (order.lane[at], order.free_at_us[at]) =
                    (order.lane[at - 1], order.free_at_us[at - 1]);
                at -= 1;
            }
            (order.lane[at], order.free_at_us[at]) = (lane, free);
            order.count += 1;
        }
        // If all lanes have rate 0, the first lane is used.
        order.count = order.count.max(1);
        order
    }

    /// Returns the number of lanes that get a share, and the time (in microseconds) at which they
    /// finish together. This time is at most `accepted_delay_us` later than the time at which all
    /// lanes that help would finish.
    #[inline]
    fn fill(
        &self,
        bytes: u64,
        lanes: &[LaneLoad],
        most: usize,
        accepted_delay_us: f64,
    ) -> (usize, f64) {
        let mut rate = 0.0;
        let mut work = bytes as f64;
        let mut level = 0.0;
        let mut members = 0;
        let mut levels = [0.0; MAX_RAILS];
        for (lane, &free) in self
            .lane
            .iter()
            .zip(&self.free_at_us)
            .take(self.count.min(most))
        {
            if members > 0 && free >= level {
                break;
            }
            let lane = &lanes[lane.index()];
            rate += lane.bytes_per_us;
            work += lane.backlog_bytes as f64;
            level = work / rate;
            levels[members] = level;
            members += 1;
        }
        let enough = levels[..members]
            .iter()
            .position(|fewer| fewer - level <= accepted_delay_us);
        enough.map_or((members, level), |at| (at + 1, levels[at]))
    }

    #[inline]
    fn share_at(&self, place: usize, lanes: &[LaneLoad], level: f64) -> f64 {
        (level - self.free_at_us[place]) * lanes[self.lane[place].index()].bytes_per_us
    }

    fn leave(&mut self, place: usize) {
        self.lane.copy_within(place + 1..self.count, place);
        self.free_at_us.copy_within(place + 1..self.count, place);
        self.count -= 1;
    }

    #[inline]
    fn cut(&self, bytes: u64, lanes: &[LaneLoad], members: usize, level: f64) -> Shares {
        let mut shares = Shares {
            shares: [Share::default(); MAX_RAILS],
            count: 0,
        };
        let mut offset = 0;
        for place in 0..members.min(MAX_RAILS) {
            let left = bytes - offset;
            let exact = if place + 1 == members {
                left
            } else {
                self.share_at(place, lanes, level) as u64
            };
            let take = exact
                .div_ceil(SHARE_ALIGNMENT)
                .saturating_mul(SHARE_ALIGNMENT)
                .min(left);
            if take > 0 {
                shares.shares[shares.count] = Share {
                    lane: self.lane[place],
                    offset,
                    bytes: take,
                };
                shares.count += 1;
                offset += take;
            }
        }
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIN: u64 = 16 * 1024;

    fn lanes(spec: &[(f64, u64)]) -> Vec<LaneLoad> {
        spec.iter()
            .map(|&(bytes_per_us, backlog_bytes)| LaneLoad {
                bytes_per_us,
                backlog_bytes,
            })
            .collect()
    }

    fn shares(bytes: u64, spec: &[(f64, u64)]) -> Vec<(usize, u64)> {
        divide(bytes, &lanes(spec), MIN, 0.0)
            .as_slice()
            .iter()
            .map(|s| (s.lane.index(), s.bytes))
            .collect()
    }

    #[test]
    fn equal_idle_lanes_share_equally() {
        assert_eq!(
            shares(1 << 20, &[(1e4, 0); 4]),
            [(0, 1 << 18), (1, 1 << 18), (2, 1 << 18), (3, 1 << 18)]
        );
    }

    #[test]
    fn unequal_lanes_finish_together() {
        let got = shares(1_300_000, &[(10.0, 0), (10.0, 0), (10.0, 0), (2.5, 0)]);
        assert_eq!(got.len(), 4);
        assert!(
            got[..3].iter().all(|(_, b)| b.abs_diff(400_000) <= 128)
                && got[3].1.abs_diff(100_000) <= 512,
            "{got:?}"
        );
    }

    #[test]
    fn a_busy_lane_gets_less_or_nothing() {
        assert_eq!(shares(1 << 18, &[(1e4, 1 << 30), (1e4, 0)]), [(1, 1 << 18)]);
        let got = shares(1 << 20, &[(1e4, 1 << 18), (1e4, 0)]);
        assert_eq!(
            got,
            [(0, (1 << 19) - (1 << 17)), (1, (1 << 19) + (1 << 17))]
        );
    }

    #[test]
    fn no_share_is_below_the_minimum() {
        assert_eq!(shares(2 * MIN, &[(1e4, 0); 4]).len(), 2);
        assert_eq!(shares(1 << 20, &[(1e4, 0), (10.0, 0)]), [(0, 1 << 20)]);
        assert_eq!(shares(1 << 20, &[(10.0, 0), (1e4, 0)]), [(1, 1 << 20)]);
    }

    #[test]
    fn an_excluded_lane_is_not_used() {
        assert_eq!(
            shares(1 << 20, &[(1e4, 0), (0.0, 0), (1e4, 0)]),
            [(0, 1 << 19), (2, 1 << 19)]
        );
        assert_eq!(shares(1 << 20, &[(0.0, 0), (0.0, 0)]), [(0, 1 << 20)]);
    }

    /// Returns the time (in microseconds) at which a message ends if it is cut over `lanes` (1 to
    /// [`MAX_RAILS`]) and shares cost nothing. The time is infinite if all lanes have rate 0.
    fn level_us(bytes: u64, lanes: &[LaneLoad]) -> f64 {
        let mut level = f64::INFINITY;
        // `level` falls with each round. Another lane may then be free too late for a share.
        for _ in 0..lanes.len() {
            let mut rate = 0.0;
            let mut work = bytes as f64;
            for lane in lanes
                .iter()
                .filter(|lane| lane.backlog_bytes as f64 <= level * lane.bytes_per_us)
            {
                rate += lane.bytes_per_us;
                work += lane.backlog_bytes as f64;
            }
            let next = work / rate;
            if next >= level {
                break;
            }
            level = next;
        }
        level
    }

    proptest! {
        /// `level_us` returns the same time as `LanesByTime::fill`, and no single lane finishes
        /// the message earlier.
        #[test]
        fn the_level_is_the_end_time_of_a_freely_divided_message(
            bytes in 1..1u64 << 30,
            spec in prop::collection::vec((1.0..50_000.0f64, prop_oneof![Just(0u64), 0..1u64 << 24]), 1..=MAX_RAILS),
        ) {
            let lanes = lanes(&spec);
            let level = level_us(bytes, &lanes);
            let (_, by_order) = LanesByTime::new(&lanes).fill(bytes, &lanes, MAX_RAILS, 0.0);
            prop_assert!((level / by_order - 1.0).abs() < 1e-9, "{level} {by_order}");
            let (lane, whole) = soonest(bytes, &lanes);
            prop_assert!(whole >= level * (1.0 - 1e-9));
            prop_assert_eq!(whole, (lanes[lane.index()].backlog_bytes + bytes) as f64 / lanes[lane.index()].bytes_per_us);
        }

        #[test]
        fn messages_over_all_lanes_are_divided_by_pace(
            bytes in 1..1u64 << 26,
            spec in prop::collection::vec((1.0..50_000.0f64, prop_oneof![Just(0u64), 0..1u64 << 22]), 1..=MAX_RAILS),
        ) {
            let lanes = lanes(&spec);
            let most = (bytes / MIN).clamp(1, MAX_RAILS as u64) as usize;
            let Some(shares) = divide_among_all(bytes, &lanes, most, MIN as f64 / 2.0, 0.0) else { return Ok(()) };
            let order = LanesByTime::new(&lanes);
            let (members, level) = order.fill(bytes, &lanes, most, 0.0);
            prop_assert_eq!(members, lanes.len());
            let by_order = order.cut(bytes, &lanes, members, level);
            for share in shares.as_slice() {
                let other = by_order.as_slice().iter().find(|other| other.lane == share.lane).unwrap();
                prop_assert!(share.bytes.abs_diff(other.bytes) <= SHARE_ALIGNMENT * MAX_RAILS as u64);
            }
        }

        #[test]
        fn shares_cover_the_message_once(
            bytes in prop_oneof![1..4096u64, 1..1u64 << 22, 1..1u64 << 40],
            spec in prop::collection::vec((prop_oneof![Just(0.0), 0.1..50_000.0f64], prop_oneof![Just(0u64), 0..1u64 << 24]), 1..=MAX_RAILS),
            min in prop_oneof![Just(128u64), 128..1u64 << 20],
            given in prop::option::of((0..MAX_RAILS).prop_map(|lane| LaneId::new(lane).unwrap())),
        ) {
            let mut shares = divide(bytes, &lanes(&spec), min, 0.0);
            let spare = given.filter(|lane| lane.index() < spec.len() && !shares.as_slice().iter().any(|s| s.lane == *lane));
            if let Some(lane) = spare {
                shares.give(lane, min);
            }
            let got = shares.as_slice();
            prop_assert!(!got.is_empty() && got.len() <= spec.len());
            let mut at = 0;
            let mut seen = 0;
            for share in got {
                prop_assert_eq!(share.offset, at);
                prop_assert!(share.offset % SHARE_ALIGNMENT == 0 && share.lane.index() < spec.len());
                prop_assert!(share.bytes > 0);
                prop_assert_eq!(seen & share.lane.bit(), 0);
                seen |= share.lane.bit();
                at += share.bytes;
            }
            prop_assert_eq!(at, bytes);
            // The other shares are rounded up, which makes the last share smaller.
            let rounding = SHARE_ALIGNMENT * got.len() as u64;
            prop_assert!(got.len() == 1 || got.iter().all(|s| s.bytes + rounding >= min / 2), "{:?}", got);
        }
    }
}
