//! A sending end that is not the plugin. It has its own queue pair, and can send everything that
//! verbs allow, including what the plugin never sends.

use proto::wire::fields::QpEnd;
use proto::wire::mailbox::MAILBOX_BYTES;
use softverbs::completion_queue::{Completion, CompletionQueue};
use softverbs::fabric::Node;
use softverbs::queue_pair::{Caps, Change, PathToPeer, QueuePair};
use softverbs::status;
use softverbs::work_request::{Operation, SendRequest, Sge};
use std::sync::Arc;
use verbs::Region;

/// Initial packet sequence number of the liar's sends.
const PSN: u32 = 7;

pub struct Liar {
    node: Arc<Node>,
    cq: Arc<CompletionQueue>,
    qp: Arc<QueuePair>,
    /// The receiver writes its grants to this memory. The liar's sends take their bytes from it.
    mailbox: Arc<Region>,
    /// The key of the mailbox's registration, for both ends.
    key: u32,
}

impl Liar {
    pub fn new(node: &Arc<Node>, mailbox: Arc<Region>) -> Self {
        let cq = CompletionQueue::new(node, 0, 64).unwrap();
        let caps = Caps {
            send_requests: 16,
            receive_requests: 16,
            sges: 1,
            inline_bytes: 0,
            signal_all: true,
        };
        let qp = QueuePair::new(node, 0, 0, &cq, &cq, caps).unwrap();
        // SAFETY: this end keeps the region for as long as its queue pair. The region's words are
        // only read as atomics.
        let key = unsafe {
            node.register(
                (0, 0),
                mailbox.addr() as usize,
                MAILBOX_BYTES,
                status::LOCAL_WRITE | status::REMOTE_WRITE,
            )
        };
        Self {
            node: Arc::clone(node),
            cq,
            qp,
            mailbox,
            key: key.unwrap(),
        }
    }

    pub fn end(&self) -> QpEnd {
        QpEnd {
            number: self.qp.number(),
            psn: PSN,
        }
    }

    pub fn key(&self) -> u32 {
        self.key
    }

    pub fn connect(&mut self, to: QpEnd, gid: [u8; 16]) {
        let remote_qp = to.number;
        let receive_psn = to.psn;
        let to_receive = Change::ReadyToReceive(PathToPeer {
            mtu_bytes: 1024,
            remote_qp,
            receive_psn,
            remote_gid: gid,
            own_gid_index: 0,
            min_rnr_timer: 1,
        });
        let to_send = Change::ReadyToSend {
            timeout: 0,
            retry_count: 7,
            rnr_retry: 7,
            send_psn: PSN,
        };
        for change in [
            Change::Init {
                access: status::REMOTE_WRITE,
                port: 1,
            },
            to_receive,
            to_send,
        ] {
            self.qp.change(change).unwrap();
        }
    }

    /// Posts a work request with the first `bytes` bytes of the mailbox. `to` is an address and a
    /// key of the receiver.
    pub fn post(&self, operation: Operation, bytes: u32, imm: Option<u32>, to: (u64, u32)) {
        let sge = [Sge {
            addr: self.mailbox.addr(),
            bytes,
            lkey: self.key,
        }];
        let sges = if bytes == 0 { &sge[..0] } else { &sge };
        let (remote_addr, rkey) = to;
        let imm = imm.map(u32::to_be);
        let wr_id = 1;
        let signaled = true;
        let inline = None;
        let solicited = false;
        let request = SendRequest {
            wr_id,
            operation,
            signaled,
            inline,
            solicited,
            imm,
            sges,
            remote_addr,
            rkey,
        };
        self.qp.post_send(&request).unwrap();
    }

    /// Polls the completion queue, which also lets the software NIC work. Returns the completions
    /// of this end's requests.
    pub fn poll(&self) -> Vec<Completion> {
        let mut out = [Completion::default(); 32];
        let count = self.cq.poll(&mut out).unwrap();
        out[..count].to_vec()
    }
}

impl Drop for Liar {
    fn drop(&mut self) {
        self.qp.destroy();
        self.node.deregister(0, self.key).unwrap();
    }
}
