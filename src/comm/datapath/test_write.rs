//! Test of new queue pairs before their lane is used.
//!
//! Each queue pair writes two packets into the peer's mailbox. The first packet has [`SMALL_BYTES`]
//! bytes, which every RoCE path carries. The second packet is as large as the path MTU. If the path
//! MTU is not above [`SMALL_BYTES`], only the second packet is written.
//!
//! - If all writes are acknowledged, the path carries data.
//! - A switch or port with a smaller MTU passes the first packet and drops the second on every
//!   retry. [`Backoff`] then keeps [`SMALL_BYTES`] as the path's largest path MTU.
//! - If both packets are lost, the path is silent.
//!
//! A path that begins to carry data during the test is not mistaken for a path with a small MTU:
//! the NIC resends both packets until its retries are used up, so the large one arrives too.
//!
//! The test posts and polls on this lane only. No call blocks: the owner polls the test until the
//! test has a result, at the latest at the time limit.

use super::lane::Lane;
use super::mailbox::Mailboxes;
use super::wr_id::WrId;
use crate::comm::rail::backoff::{Backoff, Trial};
use host::error::Result;
use proto::backoff::PathId;
use proto::time::Instant;
use std::time::Duration;
use verbs::CompletionBuffer;

/// Path MTU that fits into Ethernet's usual 1500 bytes. The next larger path MTU that InfiniBand
/// defines is 2048 (IBTA specification, volume 1, section 7.7.8).
pub const SMALL_BYTES: u32 = 1024;

/// A lane whose queue pairs are connected and under test.
pub struct LaneTest {
    /// Lane under test.
    pub lane: Lane,
    /// Path under test.
    pub path: PathId,
    mtu_bytes: u32,
    /// Number of acknowledged writes of each queue pair.
    acknowledged: Vec<u32>,
    /// Time to write the packets again; `None` once they were written again. A packet that arrives
    /// after a lost packet makes the NIC resend the lost packet immediately. Without such a packet,
    /// the NIC waits for the queue pair's timeout (4 s and more at NCCL's default), and the test
    /// may end before that.
    rewrite_at: Option<Instant>,
    /// Time after which writes without acknowledgement count as lost.
    deadline: Instant,
    /// True if only small packets were acknowledged when the packets were written again. If false,
    /// the result at the time limit is [`TestResult::Silent`], never [`TestResult::SmallMtu`].
    was_small_only: bool,
    /// Right to test the path on behalf of all connections. If the path was dead or untested
    /// before, the test keeps this right until the test ends.
    _trial: Option<Trial>,
}

/// Result of polling a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TestResult {
    /// Some writes are not acknowledged yet.
    UnderWay,
    /// All writes are acknowledged.
    Passed,
    /// A write was not acknowledged. Contains the reason, for messages.
    Silent(String),
    /// Small packets arrive and large ones do not. Contains the reason, for messages.
    SmallMtu(String),
    /// A write failed for a reason that says nothing about the path.
    Failed(String),
}

impl LaneTest {
    /// Writes the test packets on each queue pair of a connected lane. The test ends after `limit`.
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
        let rewrite_at = Some(now + limit / 3);
        let deadline = now + limit;
        let was_small_only = false;
        let mut test = Self {
            lane,
            path,
            mtu_bytes,
            acknowledged,
            rewrite_at,
            deadline,
            was_small_only,
            _trial: trial,
        };
        test.write(mailboxes)?;
        Ok(test)
    }

    /// Processes acknowledgements. If the test now has a result about the path, records the result
    /// in `backoff`.
    pub fn step(
        &mut self,
        mailboxes: &Mailboxes,
        backoff: &Backoff,
        buffer: &mut CompletionBuffer,
        now: Instant,
    ) -> TestResult {
        let tested = match self.poll(buffer) {
            TestResult::UnderWay if now >= self.deadline => {
                let why =
                    "test write not acknowledged within NCCL_SPARK_PROBE_TIMEOUT_MS".to_owned();
                if self.was_small_only {
                    self.unacknowledged(why)
                } else {
                    TestResult::Silent(why)
                }
            }
            TestResult::UnderWay if self.rewrite_at.is_some_and(|rewrite_at| now >= rewrite_at) => {
                (self.rewrite_at, self.was_small_only) = (None, self.has_only_small_acknowledged());
                self.write(mailboxes).map_or_else(
                    |error| TestResult::Failed(error.to_string()),
                    |()| TestResult::UnderWay,
                )
            }
            tested => tested,
        };
        match &tested {
            TestResult::Passed => backoff.carried(self.path, now),
            TestResult::Silent(why) => backoff.silent(self.path, why, now),
            TestResult::SmallMtu(_) => backoff.set_largest_mtu(self.path, SMALL_BYTES, now),
            TestResult::UnderWay | TestResult::Failed(_) => {}
        }
        tested
    }

    fn write(&mut self, mailboxes: &Mailboxes) -> Result<()> {
        let keys = self.lane.mailbox_keys();
        if self.mtu_bytes > SMALL_BYTES {
            self.lane
                .write_on_each(&mailboxes.probe_write(keys, SMALL_BYTES))?;
        }
        self.lane
            .write_on_each(&mailboxes.probe_write(keys, self.mtu_bytes))
    }

    fn poll(&mut self, buffer: &mut CompletionBuffer) -> TestResult {
        let completions = match self.lane.poll(buffer) {
            Ok(completions) => completions,
            Err(error) => return TestResult::Failed(error.to_string()),
        };
        for completion in completions {
            if completion.status() != 0 {
                let why = format!("test write failed: {}", completion.status_text());
                return if completion.is_unacknowledged() {
                    self.unacknowledged(why)
                } else {
                    TestResult::Failed(why)
                };
            }
            let id = WrId::of(completion.wr_id());
            if let Some(count) = self.acknowledged.get_mut(usize::from(id.queue())) {
                *count += 1;
            }
            self.lane.retire(id);
        }
        if self.lane.has_pending() {
            TestResult::UnderWay
        } else {
            TestResult::Passed
        }
    }

    /// Returns true if at least one queue pair has one acknowledgement, and no queue pair has more.
    /// The first acknowledgement of a queue pair is for its small packet, because acknowledgements
    /// come in order. Always false if no small packet is written.
    fn has_only_small_acknowledged(&self) -> bool {
        self.mtu_bytes > SMALL_BYTES && self.acknowledged.iter().copied().max() == Some(1)
    }

    /// Returns the result of a test with unacknowledged writes, once the NIC has used up its
    /// retries or the time limit has passed.
    fn unacknowledged(&self, why: String) -> TestResult {
        if self.has_only_small_acknowledged() {
            TestResult::SmallMtu(format!(
                "packets of {} bytes are lost, packets of {SMALL_BYTES} bytes arrive",
                self.mtu_bytes
            ))
        } else {
            TestResult::Silent(why)
        }
    }
}
