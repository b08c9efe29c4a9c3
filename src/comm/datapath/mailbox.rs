//! Both mailboxes of a connection ([`crate::wire::mailbox`]): reads control frames from this side's, writes them to the peer's.

use super::lane::{LaneWrite, MailboxKeys};
use super::wr_id::Work;
use crate::verbs::{Region, Remote};
use crate::wire::control::{ControlFrame, FRAME_WORDS};
use crate::wire::mailbox::{INBOX_AT, OUTBOX_AT, PROBE_AT, PROBE_BYTES};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Both mailboxes of a connection.
pub struct Mailboxes {
    /// This side's. The lanes have the keys of both.
    pub region: Arc<Region>,
    /// Where the peer's is.
    pub peer_addr: u64,
}

impl Mailboxes {
    /// The control frame that came in, once; `None` while there is no new one whole.
    pub fn take_frame(&self) -> Option<ControlFrame> {
        let inbox = self.region.words().get(INBOX_AT / 8..INBOX_AT / 8 + FRAME_WORDS)?;
        // Acquire: whatever is done because of the control frame comes after it. The digest tells a whole control frame from a torn one,
        // so the order of the NIC's stores does not matter, nor that of the other loads.
        let (number, heard) = (inbox[0].load(Ordering::Acquire), inbox[1].load(Ordering::Relaxed));
        if number == 0 && heard == 0 {
            return None;
        }
        let words = std::array::from_fn(|at| inbox[at].load(Ordering::Relaxed));
        let frame = ControlFrame::from_words(&words)?;
        // Taken: the same one, should it come again, shows as new. One that comes at this very moment may be torn by this; it
        // is sent again until it is heard.
        inbox[0].store(0, Ordering::Relaxed);
        inbox[1].store(0, Ordering::Relaxed);
        Some(frame)
    }

    /// Puts a control frame down to be read by NICs; its size in bytes. One that is still being read is torn by this, which its reader
    /// sees.
    pub fn put_frame(&self, frame: &ControlFrame) -> u32 {
        let words = frame.to_words();
        for (cell, word) in self.region.words().iter().skip(OUTBOX_AT / 8).zip(&words) {
            // Relaxed: the provider orders these before the doorbell that makes the NIC read them.
            cell.store(*word, Ordering::Relaxed);
        }
        (words.len() * 8) as u32
    }

    /// The write that brings it to the peer by a lane.
    pub fn frame_write(&self, keys: MailboxKeys, bytes: u32) -> LaneWrite {
        LaneWrite { bytes, work: Work::Control, ..self.write(keys, OUTBOX_AT, INBOX_AT) }
    }

    /// A write that tests a lane with one packet of `bytes`.
    pub fn probe_write(&self, keys: MailboxKeys, bytes: u32) -> LaneWrite {
        LaneWrite { bytes: bytes.min(PROBE_BYTES as u32), ..self.write(keys, PROBE_AT, PROBE_AT) }
    }

    fn write(&self, keys: MailboxKeys, from: usize, to: usize) -> LaneWrite {
        LaneWrite {
            local_addr: self.region.addr() + from as u64,
            lkey: keys.own_lkey,
            remote: Remote { addr: self.peer_addr + to as u64, rkey: keys.peer_rkey },
            signaled: true,
            ..LaneWrite::default()
        }
    }
}
