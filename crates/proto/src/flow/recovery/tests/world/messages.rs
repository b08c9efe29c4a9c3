//! The model's grants and messages: the plugin's [`Sends`] and [`Receives`], their writes, and
//! checks.

use super::{BYTES, MESSAGES, RAILS, World, lanes};
use crate::flow::next::{Head, Peek};
use crate::flow::plan::Share;
use crate::flow::receives::{Arrival, Grant, Receives, Repeat};
use crate::flow::sends::{LocalRoute, Sends};
use crate::flow::{sequence_after, shadow};
use crate::wire::control::Received;
use crate::wire::cts::{ENTRY_WORDS, Entry, Epoch, PackedKeys, Terms, entry_word};
use crate::wire::ids::{LaneId, Slot};
use crate::wire::immediate::Immediate;
use crate::wire::{MAX_RAILS, PARTS};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

/// Chunk size: larger than a message, so that a share is one write.
const CHUNK: u64 = 4096;

/// State of the two data paths and their NICs.
#[derive(Debug, Clone)]
pub struct Messages<const N: usize> {
    sends: Sends<N, MESSAGES>,
    receives: Receives<N>,
    ring: Ring,
    shadow: Ring,
    /// Number of messages that have a grant.
    granted: usize,
    /// Number of messages that have a send.
    pub(super) begun: usize,
    running: [Option<u16>; MESSAGES],
    pub(super) confirmed: [bool; MESSAGES],
    /// For each message, a bit set of its bytes that have landed in the receiver's buffer.
    landed: [u8; MESSAGES],
    pub(super) delivered: [bool; MESSAGES],
    /// Shares in transit, or with a completion that the sender has not polled. Sorted by `insert`.
    pub(super) shares: Vec<ShareWrite>,
    /// Shares that have landed on queue pairs that the receiver does not poll, because they are not
    /// in use yet or are lost.
    unseen: Vec<ShareWrite>,
    /// Grants in transit, in the order of their posts.
    pub(super) grants: Vec<GrantWrite>,
    /// For each device of the receiver, the number of times that it was opened again.
    openings: [u8; RAILS],
    /// The value of `openings` when the receiver last answered a JOIN for the device's rail.
    answered: [u8; RAILS],
    /// Number of answers with new keys.
    epoch: u8,
}

#[derive(Debug)]
struct Ring(Vec<AtomicU64>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareWrite {
    message: usize,
    request: u16,
    pub(super) lane: LaneId,
    pub(super) generation: u32,
    local_addr: u64,
    remote_addr: u64,
    bytes: u64,
    rkey: u32,
    immediate: Immediate,
    pub(super) has_landed: bool,
}

#[derive(Debug, Clone, Hash)]
pub struct GrantWrite {
    sequence: u64,
    is_repeated: bool,
    pub(super) lane: LaneId,
    pub(super) generation: u32,
    words: [u64; ENTRY_WORDS],
}

impl<const N: usize> Messages<N> {
    pub(super) fn new() -> Self {
        Self {
            sends: Sends::default(),
            receives: Receives::new(CHUNK),
            ring: Ring::new::<N>(),
            shadow: Ring::new::<N>(),
            granted: 0,
            begun: 0,
            running: [None; MESSAGES],
            confirmed: [false; MESSAGES],
            landed: [0; MESSAGES],
            delivered: [false; MESSAGES],
            shares: Vec::new(),
            unseen: Vec::new(),
            grants: Vec::new(),
            openings: [0; RAILS],
            answered: [0; RAILS],
            epoch: 0,
        }
    }

    pub(super) fn may_grant(&self) -> bool {
        self.granted < MESSAGES && self.receives.has_room()
    }

    /// Finds the grant for the next send, and the open lanes that can carry the send, as
    /// `comm::datapath::send` does.
    fn next_send(sends: &mut Sends<N, MESSAGES>, ring: &Ring, open: u8) -> Option<(Head, u8)> {
        match sends.peek(&ring.0, 0) {
            Peek::Nothing => None,
            Peek::Found(head) => Some((head, open)),
            Peek::Search => {
                let head = sends
                    .search(&ring.0, 0)
                    .expect("the receiver does not lie")?;
                Some((head, sends.lanes_with_keys(open, &head)))
            }
        }
    }

    pub(super) fn lanes_to_send(&self, open: u8) -> u8 {
        if self.begun == MESSAGES || self.sends.peek(&self.ring.0, 0) == Peek::Nothing {
            return 0;
        }
        Self::next_send(&mut self.sends.clone(), &self.ring, open).map_or(0, |(_, lanes)| lanes)
    }

    pub(super) fn has_lost_shares(&self) -> bool {
        self.sends.has_lost_shares()
    }

    /// Returns the receive number of the next send to start; 0 on the receiver's side.
    pub(super) fn begun_sends(&self, side: usize) -> u64 {
        if side == 0 {
            self.sends.message_range().1
        } else {
            0
        }
    }

    /// Returns the number of the first receive that lacks bytes; 0 on the sender's side.
    pub(super) fn delivered(&self, side: usize) -> u64 {
        if side == 1 {
            self.receives.delivered()
        } else {
            0
        }
    }

    /// Returns the number of the first undelivered receive, by the model's own count.
    pub(super) fn first_undelivered(&self) -> u64 {
        sequence_of::<N>(
            self.delivered
                .iter()
                .take_while(|is_delivered| **is_delivered)
                .count(),
        )
    }

    pub(super) fn received(&self, side: usize) -> Received {
        if side == 1 {
            self.receives.received()
        } else {
            Received::default()
        }
    }

    pub(super) fn is_running(&self, side: usize) -> bool {
        if side == 0 {
            self.sends.is_running()
        } else {
            self.receives.is_awaited()
        }
    }

    pub(super) fn hash_state(&self, hasher: &mut impl Hasher) {
        self.sends.hash_state(hasher);
        self.receives.hash_state(hasher);
        for message in 0..MESSAGES {
            let has_entry = [
                (&self.ring, !self.confirmed[message]),
                (&self.shadow, !self.delivered[message]),
            ];
            for (ring, _) in has_entry.into_iter().filter(|(_, is_needed)| *is_needed) {
                ring.entry(sequence_of::<N>(message))
                    .map(|entry| *entry.words())
                    .hash(hasher);
            }
        }
        (self.running, self.confirmed, self.landed, self.delivered).hash(hasher);
        for writes in [&self.shares, &self.unseen] {
            writes.len().hash(hasher);
            for it in writes {
                (
                    it.message,
                    it.immediate.encode(),
                    it.lane,
                    it.generation,
                    it.rkey,
                    it.has_landed,
                )
                    .hash(hasher);
            }
        }
        (&self.grants, self.openings, self.answered).hash(hasher);
    }

    fn keys(&self, message: usize) -> PackedKeys {
        keys(&self.openings, message)
    }

    /// Drops the shares in `unseen` that have landed on `lane`, or all of them if `lane` is `None`.
    pub(super) fn drop_unseen(&mut self, lane: Option<LaneId>) {
        self.unseen
            .retain(|write| lane.is_some_and(|lane| write.lane != lane));
    }

    /// Gives the receiver's device on a lane new keys, because the device has returned.
    pub(super) fn reopen(&mut self, lane: LaneId) {
        self.openings[lane.index()] += 1;
    }

    pub(super) fn learn_epoch(&mut self, lane: LaneId, epoch: Epoch) {
        self.sends.learn_epoch(lane, epoch);
    }

    /// Handles the peer's BYE, which confirms the receives below number `delivered`.
    pub(super) fn bye(&mut self, delivered: u64) -> Result<(), String> {
        self.sends.delivered(delivered);
        self.test_sends()
    }

    fn test_sends(&mut self) -> Result<(), String> {
        for message in 0..MESSAGES {
            let Some(request) = self.running[message] else {
                continue;
            };
            match self.sends.test(request) {
                Ok(None) => {}
                Ok(Some(BYTES)) if self.landed[message] == ALL => {
                    self.running[message] = None;
                    self.confirmed[message] = true;
                }
                other => {
                    return Err(format!(
                        "the send of message {message} ends with {other:?} before it has landed"
                    ));
                }
            }
        }
        Ok(())
    }

    fn arrive(&mut self, write: &ShareWrite) -> Result<(), String> {
        let message = write.message;
        match self.receives.arrived(&write.immediate, write.bytes as u32) {
            Ok(Arrival::Part) => return Ok(()),
            Ok(Arrival::Complete) => {}
            other => return Err(format!("a share of message {message} arrives as {other:?}")),
        }
        let mut size = 0;
        let done = self
            .receives
            .test(write.immediate.slot, |_, bytes| size = bytes);
        if done != Ok(true) || size != BYTES || self.landed[message] != ALL {
            return Err(format!(
                "message {message} is delivered without all of its bytes"
            ));
        }
        match std::mem::replace(&mut self.delivered[message], true) {
            false => Ok(()),
            true => Err(format!("message {message} is delivered twice")),
        }
    }
}

impl<const N: usize> World<N> {
    pub(super) fn open_lanes(&self, side: usize) -> u8 {
        lanes()
            .filter(|lane| self.used[side][lane.index()].is_some())
            .fold(0, |set, lane| set | lane.bit())
    }

    /// Grants the first receives, before anything is lost.
    pub(super) fn grant_at_first(&mut self) {
        while self.messages.may_grant() && self.open_lanes(1) != 0 {
            let used: Vec<_> = lanes()
                .filter(|lane| self.used[1][lane.index()].is_some())
                .collect();
            self.grant(used[self.messages.granted % used.len()])
                .expect("the first grant has the first keys");
            self.land_grant(0);
        }
    }

    pub(super) fn grant(&mut self, lane: LaneId) -> Result<(), String> {
        let it = &mut self.messages;
        let message = it.granted;
        let grant = it
            .receives
            .grant([BYTES].into_iter(), false, lane)
            .ok_or("there is no room for a receive")?;
        it.granted += 1;
        let addr = remote(message);
        let epoch = it.receives.epoch();
        let terms = Terms {
            addr,
            bytes: BYTES,
            tag: 0,
            parts: 1,
            part: 0,
            epoch,
        };
        let place =
            shadow::place(&it.shadow.0, grant.sequence, 0).ok_or("the slot has no entry")?;
        shadow::store(
            place,
            &Entry::new(&terms, &it.keys(message), grant.sequence),
        );
        self.write_grant(grant, lane, false)
    }

    /// Repeats grants, as `comm::datapath::recv::failover` does.
    pub(super) fn repeat_grants(&mut self) -> Result<(), String> {
        if self.closing[1].path_ended {
            return Ok(());
        }
        let preferred = LaneId::first_in(self.open_lanes(1)).unwrap_or_default();
        let used = self.used[1];
        while let Some(Repeat { grant, lane, .. }) = self
            .messages
            .receives
            .next_repeat(preferred, |lane| used[lane.index()].is_some())
        {
            self.write_grant(grant, lane, true)?;
        }
        Ok(())
    }

    fn write_grant(
        &mut self,
        Grant { sequence, .. }: Grant,
        lane: LaneId,
        is_repeated: bool,
    ) -> Result<(), String> {
        let it = &self.messages;
        let message = message_of::<N>(sequence);
        let entry = it
            .shadow
            .entry(sequence)
            .ok_or_else(|| format!("the grant of message {message} is not whole"))?;
        let keys = |lane: LaneId| (entry.rkey(lane), key(&it.openings, message, lane));
        // The new keys of a returned device are in use from the next answer to a JOIN on.
        let has_answered = |lane: &LaneId| it.openings[lane.index()] == it.answered[lane.index()];
        let has_old_key = |lane| keys(lane).0 != keys(lane).1;
        if entry.epoch().number() != it.epoch || lanes().filter(has_answered).any(has_old_key) {
            return Err(format!(
                "the grant of message {message} is written with keys of an old epoch"
            ));
        }
        let Some(generation) = self.used[1][lane.index()] else {
            return Err(format!(
                "the grant of message {message} is written on rail {lane}, which is not in use"
            ));
        };
        let is_same_place =
            |other: &&GrantWrite| entry_word(other.sequence, 0) == entry_word(sequence, 0);
        let can_land = |other: &GrantWrite| self.has_qps(0, other.lane, other.generation);
        if let Some(other) = it
            .grants
            .iter()
            .filter(is_same_place)
            .find(|other| can_land(other))
            && (other.lane, other.generation) != (lane, generation)
        {
            return Err(format!(
                "the grant of message {message} is written while an older one can land after it"
            ));
        }
        let words = *entry.words();
        self.messages.grants.push(GrantWrite {
            sequence,
            is_repeated,
            lane,
            generation,
            words,
        });
        Ok(())
    }

    pub(super) fn land_grant(&mut self, at: usize) {
        let GrantWrite {
            sequence,
            is_repeated,
            lane,
            generation,
            words,
        } = self.messages.grants.remove(at);
        self.messages.ring.write(sequence, &words);
        if is_repeated && self.used[1][lane.index()] == Some(generation) {
            self.messages.receives.repeated(Slot::of(sequence));
        }
    }

    pub(super) fn forget_grants(&mut self) {
        let grants = std::mem::take(&mut self.messages.grants);
        let can_land = |grant: &GrantWrite| self.has_qps(0, grant.lane, grant.generation);
        self.messages.grants = grants.into_iter().filter(can_land).collect();
    }

    /// Posts a send, as one write on `lane`, or as a share on each lane if `lane` is `None`. But if
    /// some open lanes cannot carry the send, posts it as one share on the first lane that can.
    pub(super) fn post(&mut self, lane: Option<LaneId>) -> Result<(), String> {
        let open = self.open_lanes(0);
        let it = &mut self.messages;
        let message = it.begun;
        let Some((head, usable)) = Messages::next_send(&mut it.sends, &it.ring, open) else {
            return Ok(());
        };
        let Some(first) = LaneId::first_in(usable) else {
            return Ok(());
        };
        it.begun += 1;
        let source = (local(message), message as u32);
        let mut writes = Vec::new();
        let request = match lane.filter(|_| usable == open) {
            Some(lane) => {
                let (request, immediate) = it
                    .sends
                    .start_single_write(head, source, BYTES, lane)
                    .ok_or("no request")?;
                writes.push((whole(lane), immediate));
                request
            }
            None => {
                let shares = if usable == open {
                    halves()
                } else {
                    vec![whole(first)]
                };
                let request = it.sends.start(&head, source, &shares).ok_or("no request")?;
                for (number, share) in shares.into_iter().enumerate() {
                    let immediate = it
                        .sends
                        .post_share(request, number as u8, &share)
                        .ok_or("no share")?;
                    writes.push((share, immediate));
                }
                request
            }
        };
        it.running[message] = Some(request);
        for (share, immediate) in writes {
            let rkey = head.rkey(&self.messages.ring.0, share.lane);
            let local_addr = local(message) + share.offset;
            let remote_addr = head.addr + share.offset;
            let addrs = (local_addr, remote_addr, share.bytes);
            self.write_share((message, request), share.lane, addrs, rkey, immediate)?;
        }
        Ok(())
    }

    /// Sends lost shares again, as `comm::datapath::send::failover` does.
    pub(super) fn resend_shares(&mut self) -> Result<(), String> {
        if self.closing[0].path_ended {
            return Ok(());
        }
        let open = self.open_lanes(0);
        let preferred = LaneId::first_in(open).unwrap_or_default();
        let it = &mut self.messages;
        it.sends.resend(&it.ring.0, open, |share| {
            Some(LocalRoute {
                lane: share.lane(preferred),
                queue: 0,
                lkey: 0,
            })
        });
        for request in it.sends.waiting().collect::<Vec<_>>() {
            let of_request = |running: &Option<u16>| *running == Some(request);
            let message = self
                .messages
                .running
                .iter()
                .position(of_request)
                .ok_or("a send that is done is resent")?;
            for share in 0..self.messages.sends.shares_to_post(request) {
                while let Some(next) = self.messages.sends.next_write(request, share, CHUNK) {
                    self.messages.sends.posted(request, share, &next);
                    let immediate = next.immediate.ok_or("a share is more than one write")?;
                    let addrs = (next.local_addr, next.remote_addr, u64::from(next.bytes));
                    self.write_share(
                        (message, request),
                        next.lane,
                        addrs,
                        next.route.rkey,
                        immediate,
                    )?;
                }
            }
        }
        Ok(())
    }

    fn write_share(
        &mut self,
        (message, request): (usize, u16),
        lane: LaneId,
        (local_addr, remote_addr, bytes): (u64, u64, u64),
        rkey: u32,
        immediate: Immediate,
    ) -> Result<(), String> {
        let is_same = |write: &&ShareWrite| {
            write.message == message && write.immediate.share == immediate.share
        };
        let can_land = |write: &ShareWrite| self.has_qps(1, write.lane, write.generation);
        if let Some(before) = self
            .messages
            .shares
            .iter()
            .filter(is_same)
            .find(|before| can_land(before))
        {
            let share = immediate.share;
            let lane = before.lane;
            return Err(format!(
                "share {share} of message {message} is resent before the peer has fenced rail {lane}"
            ));
        }
        let Some(generation) = self.used[0][lane.index()] else {
            return Err(format!(
                "message {message} is posted on rail {lane}, which is not in use"
            ));
        };
        let write = ShareWrite {
            message,
            request,
            lane,
            generation,
            local_addr,
            remote_addr,
            bytes,
            rkey,
            immediate,
            has_landed: false,
        };
        insert(&mut self.messages.shares, write);
        Ok(())
    }

    pub(super) fn land(&mut self, at: usize) -> Result<(), String> {
        let write = self.messages.shares[at].clone();
        let it = &mut self.messages;
        let ShareWrite {
            message,
            lane,
            local_addr,
            remote_addr,
            bytes,
            ..
        } = write;
        it.shares[at].has_landed = true;
        let offset = remote_addr.wrapping_sub(remote(message));
        if offset.saturating_add(bytes) > BYTES || local_addr != local(message) + offset {
            return Err(format!("message {message} lands wrong bytes: {write:?}"));
        }
        if write.rkey != key(&it.openings, message, lane) {
            return Err(format!(
                "message {message} is written on rail {lane} with a key of an old epoch"
            ));
        }
        if it.delivered[message] {
            return Err(format!(
                "message {message} lands in a buffer that was given back"
            ));
        }
        it.landed[message] |= (offset..offset + bytes).fold(0, |set, byte| set | 1 << byte);
        if self.used[1][lane.index()] == Some(write.generation) {
            return self.messages.arrive(&write);
        }
        insert(&mut self.messages.unseen, write);
        Ok(())
    }

    /// Polls the completion of a share. The peer's BYE may have confirmed the share before.
    pub(super) fn confirm(&mut self, at: usize) -> Result<(), String> {
        let ShareWrite {
            request, immediate, ..
        } = self.messages.shares.remove(at);
        match self.messages.sends.confirmed(request, immediate.share) {
            Err(error) if !self.closing[0].peer_is_away => Err(error.to_string()),
            _ => self.messages.test_sends(),
        }
    }

    /// Resends after both sides have stopped a rail. `received` lists the shares that the peer has.
    pub(super) fn resend(
        &mut self,
        side: usize,
        lane: LaneId,
        received: &Received,
    ) -> Result<(), String> {
        if self.may_write(side, lane) {
            return Err(format!(
                "side {side} resends what it posted on rail {lane} before it has fenced the rail"
            ));
        }
        if side == 1 {
            if self.may_write(0, lane) {
                return Err(format!(
                    "the receiver repeats its grants before the sender has fenced rail {lane}"
                ));
            }
            self.messages.receives.lost(lane);
            return self.repeat_grants();
        }
        let may_land =
            |write: &&ShareWrite| write.lane == lane && self.has_qps(1, lane, write.generation);
        if let Some(write) = self.messages.shares.iter().find(may_land) {
            return Err(format!(
                "message {} is resent before the peer has fenced rail {lane}",
                write.message
            ));
        }
        self.messages.shares.retain(|write| write.lane != lane);
        self.messages.sends.lost(lane, received);
        self.messages.test_sends()?;
        self.resend_shares()
    }

    /// Polls the shares that landed on a lane while the receiver did not poll the lane.
    pub(super) fn take_in(&mut self, side: usize, lane: LaneId) -> Result<(), String> {
        if side == 0 {
            return Ok(());
        }
        let (here, elsewhere): (Vec<_>, Vec<_>) = std::mem::take(&mut self.messages.unseen)
            .into_iter()
            .partition(|write| write.lane == lane);
        self.messages.unseen = elsewhere;
        if self.closing[1].path_ended {
            return Ok(());
        }
        here.iter()
            .try_for_each(|write| self.messages.arrive(write))
    }

    /// Answers a JOIN with the first epoch whose grants have valid keys for the lane. If the keys
    /// are new since the last answer, begins an epoch and repeats all grants.
    pub(super) fn answer_with_keys(&mut self, lane: LaneId) -> Result<Epoch, String> {
        let it = &mut self.messages;
        let opening = it.openings[lane.index()];
        if std::mem::replace(&mut it.answered[lane.index()], opening) != opening {
            it.epoch += 1;
            let openings = it.openings;
            let keys_of =
                |grant: Grant, _| Ok::<_, String>(keys(&openings, message_of::<N>(grant.sequence)));
            it.receives.take_new_keys(lane, &it.shadow.0, keys_of)?;
            self.repeat_grants()?;
        }
        Ok(self.messages.receives.epoch_of(lane))
    }
}

const ALL: u8 = (1 << BYTES) - 1;

impl Ring {
    fn new<const N: usize>() -> Self {
        Self(
            (0..N * PARTS * ENTRY_WORDS)
                .map(|_| AtomicU64::new(0))
                .collect(),
        )
    }

    fn entry(&self, sequence: u64) -> Option<Entry> {
        let place = &self.0[entry_word(sequence, 0)..];
        Entry::whole(
            std::array::from_fn(|word| place[word].load(Ordering::Relaxed)),
            sequence,
        )
    }

    fn write(&self, sequence: u64, words: &[u64; ENTRY_WORDS]) {
        for (cell, word) in self.0[entry_word(sequence, 0)..].iter().zip(words) {
            cell.store(*word, Ordering::Relaxed);
        }
    }
}

impl Clone for Ring {
    fn clone(&self) -> Self {
        Self(
            self.0
                .iter()
                .map(|word| AtomicU64::new(word.load(Ordering::Relaxed)))
                .collect(),
        )
    }
}

/// Inserts a write in sorted order. The order of posts then makes no difference between two states.
fn insert(writes: &mut Vec<ShareWrite>, write: ShareWrite) {
    let key = |write: &ShareWrite| (write.message, write.immediate.share, write.generation);
    let at = writes.partition_point(|before| key(before) < key(&write));
    writes.insert(at, write);
}

fn sequence_of<const N: usize>(message: usize) -> u64 {
    (0..message).fold(0, |sequence, _| sequence_after::<N>(sequence))
}

fn message_of<const N: usize>(sequence: u64) -> usize {
    (0..MESSAGES)
        .find(|message| sequence_of::<N>(*message) == sequence)
        .expect("a message has this number")
}

fn whole(lane: LaneId) -> Share {
    Share {
        lane,
        offset: 0,
        bytes: BYTES,
    }
}

/// Returns a share of a message for each rail.
fn halves() -> Vec<Share> {
    let half = |(offset, lane)| Share {
        lane,
        offset,
        bytes: BYTES / 2,
    };
    (0..).zip(lanes()).map(half).collect()
}

fn local(message: usize) -> u64 {
    0x1000 * (message as u64 + 1)
}

fn remote(message: usize) -> u64 {
    0x10_0000 * (message as u64 + 1)
}

/// Returns the key of a message's buffer on a rail. The key depends on the number of times that the
/// rail's device was opened again.
fn key(openings: &[u8; RAILS], message: usize, lane: LaneId) -> u32 {
    (message as u32 + 1) << 16 | (lane.index() as u32) << 8 | u32::from(openings[lane.index()])
}

fn keys(openings: &[u8; RAILS], message: usize) -> PackedKeys {
    let key = |at| {
        LaneId::new(at)
            .filter(|lane| lane.index() < RAILS)
            .map_or(0, |lane| key(openings, message, lane))
    };
    const { assert!(MAX_RAILS == 8) };
    std::array::from_fn(|pair| u64::from(key(2 * pair)) | u64::from(key(2 * pair + 1)) << 32)
}
