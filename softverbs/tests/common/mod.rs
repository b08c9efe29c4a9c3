//! Two machines of a fabric in one process, in virtual time.

#![allow(dead_code, unsafe_code)]

use softverbs::completion_queue::{Completion, CompletionQueue};
use softverbs::fabric::Node;
use softverbs::queue_pair::{Caps, Change, PathToPeer, QueuePair};
use softverbs::settings::Settings;
use softverbs::work_request::{Operation, SendRequest, Sge};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub const PROFILE: &str = "link A pci=0000:01:00 gts=32 width=4 payload=8000
    cable c payload=0
    rail x0 netdev=e0 port=p0 link=A cable=c function=0 line=8000 qp=0 latency=1000
    rail x1 netdev=e1 port=p1 link=A cable=c function=1 line=8000 qp=4000 latency=0";

pub fn dir() -> PathBuf {
    std::env::temp_dir().join("softverbs-tests")
}

pub struct Bed {
    pub settings: Settings,
    pub nodes: [Arc<Node>; 2],
}

impl Bed {
    /// Two machines with the rails of [`PROFILE`], which have 8000 Mb/s: a byte takes a nanosecond.
    pub fn new() -> Self {
        Self::wired("")
    }

    pub fn wired(lines: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!(
            "test-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let dir = dir();
        std::fs::create_dir_all(&dir).unwrap();
        let profile = dir.join(format!("{name}.profile"));
        std::fs::write(&profile, format!("{PROFILE}\n{lines}")).unwrap();
        let profile = profile.display().to_string();
        let settings = Settings {
            dir,
            fabric: name,
            node: None,
            profile,
            scale: 1.0,
            threads: Some(1),
            adversary: None,
        };
        let first = Node::enter(&settings).unwrap();
        first.memory.virtual_clock.store(1, Ordering::Release);
        let second = Node::enter(&settings).unwrap();
        Self {
            settings,
            nodes: [first, second],
        }
    }

    pub fn at(&self, ns: u64) {
        self.nodes[0]
            .memory
            .virtual_clock
            .store(ns + 1, Ordering::Release);
    }

    pub fn now_ns(&self) -> u64 {
        self.nodes[0].memory.virtual_clock.load(Ordering::Acquire) - 1
    }

    pub fn pair(&self, device: usize, rnr_retry: u8) -> Pair {
        let end = |n: usize| End::new(&self.nodes[n], device);
        self.connect(
            Pair {
                a: end(0),
                b: end(1),
            },
            [1, 0],
            device,
            rnr_retry,
        )
    }

    /// Both ends on one machine, with one completion queue.
    pub fn pair_on_one_queue(&self, device: usize) -> Pair {
        let a = End::new(&self.nodes[0], device);
        let b = End::with_queue(&self.nodes[0], device, &a.cq);
        self.connect(Pair { a, b }, [0, 0], device, 7)
    }

    pub fn connect(&self, pair: Pair, peers: [usize; 2], device: usize, rnr_retry: u8) -> Pair {
        self.connect_with(pair, peers, device, (1, rnr_retry))
    }

    /// Connects both ends with `retry_count` tries after the first one, and `rnr_retry` tries while
    /// the peer has no receive. `peers` has the machine of each end's peer.
    pub fn connect_with(
        &self,
        pair: Pair,
        peers: [usize; 2],
        device: usize,
        (retry_count, rnr_retry): (u8, u8),
    ) -> Pair {
        for (this, that, node) in [(&pair.a, &pair.b, peers[0]), (&pair.b, &pair.a, peers[1])] {
            this.qp.change(Change::Init { access: 7, port: 1 }).unwrap();
            let remote_gid = self.nodes[node].devices()[device].gids[1];
            this.qp
                .change(Change::ReadyToReceive(PathToPeer {
                    mtu_bytes: 4096,
                    remote_qp: that.qp.number(),
                    receive_psn: 5,
                    remote_gid,
                    own_gid_index: 1,
                    min_rnr_timer: 1,
                }))
                .unwrap();
            this.qp
                .change(Change::ReadyToSend {
                    timeout: 8,
                    retry_count,
                    rnr_retry,
                    send_psn: 5,
                })
                .unwrap();
        }
        pair
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.settings.dir.join(&self.settings.fabric));
        let _ = std::fs::remove_file(&self.settings.profile);
    }
}

pub struct Pair {
    pub a: End,
    pub b: End,
}

pub struct End {
    pub node: Arc<Node>,
    pub device: usize,
    pub cq: Arc<CompletionQueue>,
    pub qp: Arc<QueuePair>,
    pub bytes: Box<[u8]>,
    pub key: u32,
}

impl End {
    pub fn new(node: &Arc<Node>, device: usize) -> Self {
        Self::with_queue(
            node,
            device,
            &CompletionQueue::new(node, device, 64).unwrap(),
        )
    }

    pub fn with_queue(node: &Arc<Node>, device: usize, cq: &Arc<CompletionQueue>) -> Self {
        let cq = Arc::clone(cq);
        let caps = Caps {
            send_requests: 16,
            receive_requests: 16,
            sges: 2,
            inline_bytes: 64,
            signal_all: false,
        };
        let qp = QueuePair::new(node, device, 0, &cq, &cq, caps).unwrap();
        let bytes: Box<[u8]> = (0..1 << 20)
            .map(|n: u32| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        // SAFETY: the bytes live as long as this end, and are read only between the tests' steps.
        let key =
            unsafe { node.register((device, 0), bytes.as_ptr() as usize, bytes.len(), 7) }.unwrap();
        Self {
            node: Arc::clone(node),
            device,
            cq,
            qp,
            bytes,
            key,
        }
    }

    pub fn sge(&self, at: usize, bytes: u32) -> Sge {
        Sge {
            addr: self.bytes.as_ptr() as u64 + at as u64,
            bytes,
            lkey: self.key,
        }
    }

    pub fn post_inline(&self, bytes: usize, to: &End) -> Result<(), i32> {
        let sges = [self.sge(0, bytes as u32)];
        self.qp.post_send(&SendRequest {
            wr_id: 77,
            operation: Operation::Write,
            signaled: true,
            inline: Some(&self.bytes[..bytes]),
            solicited: false,
            imm: None,
            sges: &sges,
            remote_addr: to.bytes.as_ptr() as u64,
            rkey: to.key,
        })
    }

    pub fn post(
        &self,
        operation: Operation,
        sges: &[Sge],
        imm: Option<u32>,
        remote: (u64, u32),
    ) -> Result<(), i32> {
        self.post_with(true, operation, sges, imm, remote)
    }

    pub fn post_with(
        &self,
        signaled: bool,
        operation: Operation,
        sges: &[Sge],
        imm: Option<u32>,
        remote: (u64, u32),
    ) -> Result<(), i32> {
        let request = SendRequest {
            wr_id: 77,
            operation,
            signaled,
            inline: None,
            solicited: false,
            imm,
            sges,
            remote_addr: remote.0,
            rkey: remote.1,
        };
        self.qp.post_send(&request)
    }

    pub fn write(&self, bytes: u32, imm: Option<u32>, to: &End) {
        self.post(
            Operation::Write,
            &[self.sge(0, bytes)],
            imm,
            (to.bytes.as_ptr() as u64 + 9, to.key),
        )
        .unwrap();
    }

    pub fn poll(&self) -> Vec<Completion> {
        let mut out = [Completion::default(); 32];
        let count = self.cq.poll(&mut out).unwrap();
        out[..count].to_vec()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.qp.destroy();
        let _ = &self.node;
    }
}

impl Pair {
    /// Polls `b` and then `a`. Polling `b`, the receiver, runs its engine, so that `a` can get the
    /// completions of its sends.
    pub fn poll(&self) -> (Vec<Completion>, Vec<Completion>) {
        let b = self.b.poll();
        let a = self.a.poll();
        (a, b)
    }
}
