//! Both mailboxes of a connection. A mailbox is the memory of one end into which the other end
//! writes ([`proto::wire::mailbox`]). The peer's control frames arrive in this end's mailbox. This
//! end's control frames are written into the peer's mailbox.

use super::lane::{LaneWrite, MailboxKeys};
use super::wr_id::Work;
use proto::wire::control::{ControlFrame, FRAME_WORDS};
use proto::wire::mailbox::{INBOX_AT, OUTBOX_AT, PROBE_AT, PROBE_BYTES};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use verbs::{Region, Remote};

/// Both mailboxes of a connection.
#[derive(Clone)]
pub struct Mailboxes {
    /// This end's mailbox. The keys of both mailboxes are in the lanes.
    pub region: Arc<Region>,
    /// Address of the peer's mailbox.
    pub peer_addr: u64,
}

impl Mailboxes {
    /// Takes the control frame that has arrived: a later call does not return it again. Returns
    /// `None` if no frame is complete.
    pub fn take_frame(&self) -> Option<ControlFrame> {
        let inbox = self
            .region
            .words()
            .get(INBOX_AT / 8..INBOX_AT / 8 + FRAME_WORDS)?;
        // Acquire: everything done because of the frame comes after this load. The digest detects a
        // torn frame, so the order of the NIC's stores and of the other loads does not matter.
        let number = inbox[0].load(Ordering::Acquire);
        let received = inbox[1].load(Ordering::Relaxed);
        if number == 0 && received == 0 {
            return None;
        }
        let words = std::array::from_fn(|at| inbox[at].load(Ordering::Relaxed));
        let frame = ControlFrame::from_words(&words)?;
        // Clear the first words, so that the same frame is seen as new if it arrives again. The
        // stores can tear a frame that arrives now. That does no harm, because the sender repeats a
        // frame until the frame is acknowledged.
        inbox[0].store(0, Ordering::Relaxed);
        inbox[1].store(0, Ordering::Relaxed);
        Some(frame)
    }

    /// Stores a control frame where the NICs read it, and returns its size in bytes. A NIC that
    /// still reads the previous frame may send a torn frame. The peer detects a torn frame by the
    /// digest.
    pub fn put_frame(&self, frame: &ControlFrame) -> u32 {
        let words = frame.to_words();
        for (cell, word) in self.region.words().iter().skip(OUTBOX_AT / 8).zip(&words) {
            // Relaxed: the provider orders these stores before the doorbell that starts the read.
            cell.store(*word, Ordering::Relaxed);
        }
        (words.len() * 8) as u32
    }

    /// Returns the write that carries the stored control frame to the peer over a lane.
    pub fn frame_write(&self, keys: MailboxKeys, bytes: u32) -> LaneWrite {
        LaneWrite {
            bytes,
            work: Work::Control,
            ..self.write(keys, OUTBOX_AT, INBOX_AT)
        }
    }

    /// Returns the write that tests a lane with one packet of `bytes`, or of [`PROBE_BYTES`] if
    /// that is less.
    pub fn probe_write(&self, keys: MailboxKeys, bytes: u32) -> LaneWrite {
        LaneWrite {
            bytes: bytes.min(PROBE_BYTES as u32),
            ..self.write(keys, PROBE_AT, PROBE_AT)
        }
    }

    fn write(&self, keys: MailboxKeys, from: usize, to: usize) -> LaneWrite {
        LaneWrite {
            local_addr: self.region.addr() + from as u64,
            lkey: keys.own_lkey,
            remote: Remote {
                addr: self.peer_addr + to as u64,
                rkey: keys.peer_rkey,
            },
            signaled: true,
            ..LaneWrite::default()
        }
    }
}
