//! The test of new queue pairs, before their lane is used.
//!
//! Each queue pair writes two packets into the peer's mailbox: one of at most [`SMALL_BYTES`], which
//! every RoCE path carries, and one as large as the path MTU. A lane carries when all writes are
//! acknowledged. A switch or port with a smaller MTU on the way passes the first packet and drops
//! the second, again and again; [`Backoff`] then keeps [`SMALL_BYTES`] as the largest path MTU there.
//! A path that loses both is silent. A path that begins to carry in the middle of the test
//! is not mistaken for one with a small MTU: the NIC sends both packets again until the retries are
//! used up.
//!
//! The test posts and polls on the lane alone, and records its result with [`Backoff`]. It waits for
//! nothing: its owner looks at it again until it has a result, which comes within the limit.

use super::lane::Lane;
use super::mailbox::Mailboxes;
use super::wr_id::WrId;
use crate::comm::rail::backoff::{Backoff, PathId, Trial};
use crate::error::Result;
use crate::verbs::CompletionBuffer;
use std::time::{Duration, Instant};

/// Path MTU that needs no more than Ethernet's usual 1500 bytes: InfiniBand's next larger one is
/// 2048 (IBTA specification, volume 1, section 7.7.8).
pub const SMALL_BYTES: u32 = 1024;

/// A lane whose queue pairs are connected and under test.
pub struct LaneTest {
    /// The lane.
    pub lane: Lane,
    /// The path that is tested.
    pub path: PathId,
    mtu_bytes: u32,
    /// Acknowledged writes of each queue pair.
    acknowledged: Vec<u32>,
    /// Time of the second write. A later packet makes the NIC repeat a lost one immediately, while the
    /// queue pair's own time-out (4 s and more at NCCL's default) can be longer than the test.
    again: Option<Instant>,
    /// Writes that are not acknowledged by then count as lost.
    until: Instant,
    /// True if small packets alone had been acknowledged by the time of the second write.
    was_narrow: bool,
    /// The right to test the path for all connections, where it was dead or unknown before.
    _trial: Option<Trial>,
}

/// Result of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tested {
    /// Some writes are not acknowledged yet.
    UnderWay,
    /// All writes are acknowledged.
    Carries,
    /// A write was not acknowledged. The reason, for a message.
    Silent(String),
    /// Small packets arrive and large ones do not. The reason, for a message.
    Narrow(String),
    /// A write has failed otherwise, which says nothing about the path.
    Failed(String),
}

impl LaneTest {
    /// Writes the test packets on each queue pair of a connected lane. `limit` is how long the test
    /// may take.
    ///
    /// # Errors
    /// As [`Lane::write_on_each`].
    pub fn start(
        lane: Lane,
        path: PathId,
        mailboxes: &Mailboxes,
        mtu_bytes: u32,
        limit: Duration,
        trial: Option<Trial>,
        now: Instant,
    ) -> Result<Self> {
        let acknowledged = vec![0; lane.queue_count()];
        let (again, until) = (Some(now + limit / 3), now + limit);
        let was_narrow = false;
        let mut test = Self { lane, path, mtu_bytes, acknowledged, again, until, was_narrow, _trial: trial };
        test.write(mailboxes)?;
        Ok(test)
    }

    /// Takes in what was acknowledged, and records a result with `backoff`.
    pub fn look(
        &mut self,
        mailboxes: &Mailboxes,
        backoff: &Backoff,
        buffer: &mut CompletionBuffer,
        now: Instant,
    ) -> Tested {
        let tested = match self.poll(buffer) {
            Tested::UnderWay if now >= self.until => {
                let why = "test write not acknowledged within NCCL_SPARK_PROBE_TIMEOUT_MS".to_owned();
                if self.was_narrow { self.unacknowledged(why) } else { Tested::Silent(why) }
            }
            Tested::UnderWay if self.again.is_some_and(|again| now >= again) => {
                (self.again, self.was_narrow) = (None, self.has_small_alone());
                self.write(mailboxes).map_or_else(|error| Tested::Failed(error.to_string()), |()| Tested::UnderWay)
            }
            tested => tested,
        };
        match &tested {
            Tested::Carries => backoff.carried(self.path, now),
            Tested::Silent(why) => backoff.silent(self.path, why, now),
            Tested::Narrow(_) => backoff.set_largest_mtu(self.path, SMALL_BYTES, now),
            Tested::UnderWay | Tested::Failed(_) => {}
        }
        tested
    }

    fn write(&mut self, mailboxes: &Mailboxes) -> Result<()> {
        let keys = self.lane.mailbox_keys();
        if self.mtu_bytes > SMALL_BYTES {
            self.lane.write_on_each(&mailboxes.probe_write(keys, SMALL_BYTES))?;
        }
        self.lane.write_on_each(&mailboxes.probe_write(keys, self.mtu_bytes))
    }

    fn poll(&mut self, buffer: &mut CompletionBuffer) -> Tested {
        let completions = match self.lane.poll(buffer) {
            Ok(completions) => completions,
            Err(error) => return Tested::Failed(error.to_string()),
        };
        for completion in completions {
            if completion.status() != 0 {
                let why = format!("test write failed: {}", completion.status_text());
                return if completion.is_unacknowledged() { self.unacknowledged(why) } else { Tested::Failed(why) };
            }
            let id = WrId::of(completion.wr_id());
            if let Some(count) = self.acknowledged.get_mut(usize::from(id.queue())) {
                *count += 1;
            }
            self.lane.retire(id);
        }
        if self.lane.has_pending() { Tested::UnderWay } else { Tested::Carries }
    }

    /// A queue pair's writes are acknowledged in order, so its second one is the first large one.
    fn has_small_alone(&self) -> bool {
        self.mtu_bytes > SMALL_BYTES && self.acknowledged.iter().copied().max() == Some(1)
    }

    /// Result after the NIC has used up its retries of a lost packet, or the limit has passed.
    fn unacknowledged(&self, why: String) -> Tested {
        if self.has_small_alone() {
            Tested::Narrow(format!("packets of {} bytes get lost, those of {SMALL_BYTES} bytes arrive", self.mtu_bytes))
        } else {
            Tested::Silent(why)
        }
    }
}
