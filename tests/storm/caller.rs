//! A caller that uses connections as NCCL's proxy thread does (`sendProxyProgress` and
//! `recvProxyProgress` in NCCL's src/transport/net.cc).
//!
//! One thread posts and tests for all channels of a rank. A channel has a connection in each
//! direction. Each connection has [`STEPS`] places in memory that is registered once. A place is
//! used again as soon as `test` reports its request as done. A receive is posted as early as its
//! place is free; `isend` is repeated until a receive is granted; requests are tested in order.
//! Receives of the protocol LL are optional: the receiver polls the data itself.
//!
//! The part of the GPU's kernel is played too: it fills places, and checks and empties them. In a
//! ring, a rank sends a step only after it has received an earlier one ([`Terms::lead`]).

use crate::common::comms::{Receiving, Sending};
use crate::common::mix;
use host::error::Error;
use nccl_net_spark::comm::{HostMemory, RecvPart, Registration};
use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of steps in flight on a connection (`NCCL_STEPS`).
pub const STEPS: u64 = 8;
/// Value of each word of a place between its use for one receive and the next.
const HANDED_BACK: u64 = 0xc5c5_c5c5_c5c5_c5c5;

/// The way in which a channel is used. Both ranks have the same terms.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Number of the channel, which its data depends on.
    pub number: u64,
    /// Size of a place in 8-byte words. A message has at most this size.
    pub place_words: usize,
    /// Number of parts of a receive: above 1 for grouped receives.
    pub parts: usize,
    /// Number of steps that a rank may send before it has received the first one. `None`: the
    /// directions are independent, as in an all-to-all.
    pub lead: Option<u64>,
    /// True for the protocol LL: optional receives, whose data the receiver polls.
    pub low_latency: bool,
    /// Number of steps of an operation. Between operations a rank posts and tests nothing: NCCL's
    /// thread sleeps.
    pub operation_steps: u64,
}

impl Terms {
    /// Size in words of the message of a part of a step that `rank` sends.
    fn words(&self, rank: u64, step: u64, part: usize) -> usize {
        let dice = mix(self.number << 40 ^ rank << 39 ^ step << 3 ^ part as u64);
        match dice % 4 {
            // Most messages of a ring fill their place.
            0 => (dice >> 8) as usize % self.place_words,
            _ => self.place_words,
        }
    }

    fn word(&self, rank: u64, step: u64, part: usize, at: usize) -> u64 {
        mix(self.number << 48 ^ rank << 47 ^ step << 20 ^ (part as u64) << 17 ^ at as u64)
    }

    fn place(&self, step: u64, part: usize) -> usize {
        (step % STEPS) as usize * self.parts * self.place_words + part * self.place_words
    }
}

/// One rank's end of a channel.
pub struct Channel<S, R> {
    terms: Terms,
    rank: u64,
    /// Number of steps of the operations that have begun.
    open: u64,
    /// True once no operation follows.
    is_last: bool,
    send: SendSide<S>,
    recv: RecvSide<R>,
}

struct SendSide<S> {
    comm: S,
    memory: Arc<Memory>,
    registration: Arc<Registration>,
    requests: Vec<Option<u16>>,
    produced: u64,
    transmitted: u64,
    done: u64,
}

struct RecvSide<R> {
    comm: R,
    memory: Arc<Memory>,
    registration: Arc<Registration>,
    requests: Vec<Option<u16>>,
    posted: u64,
    received: u64,
    consumed: u64,
}

impl<S: Sending, R: Receiving> Channel<S, R> {
    pub fn new(terms: Terms, rank: u64, send: S, recv: R) -> Result<Self, Error> {
        let words = STEPS as usize * terms.parts * terms.place_words;
        let from = Memory::new(words);
        let to = Memory::new(words);
        let send_registration = send.register(from.host_memory())?;
        let recv_registration = recv.register(to.host_memory())?;
        let requests = vec![None; STEPS as usize * terms.parts];
        Ok(Self {
            terms,
            rank,
            open: 0,
            is_last: false,
            send: SendSide {
                comm: send,
                memory: from,
                registration: send_registration,
                requests: requests.clone(),
                produced: 0,
                transmitted: 0,
                done: 0,
            },
            recv: RecvSide {
                comm: recv,
                memory: to,
                registration: recv_registration,
                requests,
                posted: 0,
                received: 0,
                consumed: 0,
            },
        })
    }

    /// Number of steps of the operations that this rank has begun.
    pub fn begun(&self) -> u64 {
        self.open
    }

    /// Number of steps that this rank has received and checked.
    pub fn consumed(&self) -> u64 {
        self.recv.consumed
    }

    /// Begins the last operation: the one that ends with step number `steps`.
    pub fn end_after(&mut self, steps: u64) {
        self.open = steps;
        self.is_last = true;
    }

    /// True if all operations that have begun are done.
    pub fn is_idle(&self) -> bool {
        self.send.done == self.open
            && self.recv.consumed == self.open
            && self.recv.received == self.open
    }

    pub fn begin_operation(&mut self) {
        self.open += self.terms.operation_steps;
    }

    pub fn is_done(&self) -> bool {
        self.is_last && self.is_idle()
    }

    /// State of the channel, for messages.
    pub fn state(&self) -> String {
        let Self {
            send, recv, terms, ..
        } = self;
        format!(
            "channel {} of rank {}: sends {} produced, {} transmitted, {} done; receives {} posted, {} received, {} consumed",
            terms.number,
            self.rank,
            send.produced,
            send.transmitted,
            send.done,
            recv.posted,
            recv.received,
            recv.consumed
        )
    }

    /// Makes each call once that is due. Returns true if anything has moved.
    pub fn progress(&mut self) -> Result<bool, Error> {
        let moved = self.compute();
        Ok(moved | self.progress_sends()? | self.progress_receives()?)
    }

    pub fn close(&self) {
        self.send.comm.close();
        self.recv.comm.close();
    }

    /// Plays the kernel's part.
    fn compute(&mut self) -> bool {
        let mut moved = false;
        let limit = self.open;
        let Self {
            terms,
            rank,
            send,
            recv,
            ..
        } = self;
        let peer = 1 - *rank;
        let arrived = if terms.low_latency {
            recv.posted
        } else {
            recv.received
        };
        while recv.consumed < arrived {
            let step = recv.consumed;
            if terms.low_latency
                && !(0..terms.parts).all(|part| recv.memory.holds(terms, peer, step, part))
            {
                break;
            }
            for part in 0..terms.parts {
                recv.memory.check(terms, peer, step, part);
            }
            recv.consumed += 1;
            moved = true;
        }
        let may = terms
            .lead
            .map_or(u64::MAX, |lead| recv.consumed + lead)
            .min(send.done + STEPS)
            .min(limit);
        while send.produced < may {
            for part in 0..terms.parts {
                send.memory.fill(terms, *rank, send.produced, part);
            }
            send.produced += 1;
            moved = true;
        }
        moved
    }

    fn progress_sends(&mut self) -> Result<bool, Error> {
        let Self {
            terms, rank, send, ..
        } = self;
        let mut moved = false;
        if send.transmitted < send.produced {
            let step = send.transmitted;
            // The parts of a group are sent in an order of their own.
            for turn in 0..terms.parts {
                let part = (turn + step as usize) % terms.parts;
                let request = &mut send.requests[(step % STEPS) as usize * terms.parts + part];
                if request.is_none() {
                    let bytes = terms.words(*rank, step, part) * 8;
                    let addr = send.memory.addr(terms.place(step, part));
                    *request = send
                        .comm
                        .isend(addr, bytes, part as i32, &send.registration)
                        .map_err(|error| *error)?;
                    moved |= request.is_some();
                }
            }
            let requests = &send.requests[(step % STEPS) as usize * terms.parts..][..terms.parts];
            send.transmitted += u64::from(requests.iter().all(Option::is_some));
        }
        if send.done < send.transmitted {
            let step = send.done;
            let requests =
                &mut send.requests[(step % STEPS) as usize * terms.parts..][..terms.parts];
            for (part, request) in requests.iter_mut().enumerate() {
                let Some(running) = *request else { continue };
                if let Some(bytes) = send.comm.test(running).map_err(|error| *error)? {
                    assert_eq!(
                        bytes,
                        terms.words(*rank, step, part) as u64 * 8,
                        "size of a send"
                    );
                    *request = None;
                    moved = true;
                }
            }
            send.done += u64::from(requests.iter().all(Option::is_none));
        }
        Ok(moved)
    }

    fn progress_receives(&mut self) -> Result<bool, Error> {
        let limit = self.open;
        let Self {
            terms, rank, recv, ..
        } = self;
        let peer = 1 - *rank;
        let mut moved = false;
        if recv.posted < limit && recv.posted < recv.consumed.min(recv.received) + STEPS {
            let step = recv.posted;
            if !terms.low_latency && step >= STEPS {
                (0..terms.parts).for_each(|part| recv.memory.check_handed_back(terms, step, part));
            }
            let parts: Vec<RecvPart<'_>> = (0..terms.parts)
                .map(|part| RecvPart {
                    addr: recv.memory.addr(terms.place(step, part)),
                    bytes: terms.place_words * 8,
                    tag: part as i32,
                    memory: &recv.registration,
                })
                .collect();
            let request = recv
                .comm
                .irecv(&parts, terms.low_latency)
                .map_err(|error| *error)?;
            if request.is_some() {
                recv.requests[(step % STEPS) as usize] = request;
                recv.posted += 1;
                moved = true;
            }
        }
        if recv.received < recv.posted {
            let step = recv.received;
            let request =
                recv.requests[(step % STEPS) as usize].expect("a posted receive has a request");
            let tell = |part: usize, bytes: u64| {
                let sent = terms.words(peer, step, part) as u64 * 8;
                let room = terms.place_words as u64 * 8;
                assert!(
                    bytes == sent || terms.low_latency && bytes == room,
                    "size of a receive: {bytes} of {sent}"
                );
            };
            if recv.comm.test(request, tell).map_err(|error| *error)? {
                recv.received += 1;
                moved = true;
            }
        }
        Ok(moved)
    }
}

/// Memory of a connection, in 8-byte words. The network reads and writes it while this process
/// does, so this process uses atomics.
struct Memory(Box<[UnsafeCell<u64>]>);

// SAFETY: every access of this process is atomic.
unsafe impl Sync for Memory {}
// SAFETY: as above; the memory belongs to no thread.
unsafe impl Send for Memory {}

impl Memory {
    fn new(words: usize) -> Arc<Self> {
        Arc::new(Self(
            (0..words).map(|_| UnsafeCell::new(HANDED_BACK)).collect(),
        ))
    }

    fn host_memory(&self) -> HostMemory {
        // SAFETY: channels live until their connections have ended; tests that end earlier fail,
        // and leave their process.
        unsafe { HostMemory::from_caller(self.0.as_ptr() as usize, self.0.len() * 8) }
    }

    fn addr(&self, word: usize) -> u64 {
        self.0[word].get() as u64
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the cell is valid and aligned, and lives as long as `self`. All accesses of this
        // process are atomic.
        unsafe { AtomicU64::from_ptr(self.0[at].get()) }
    }

    fn fill(&self, terms: &Terms, rank: u64, step: u64, part: usize) {
        for at in 0..terms.words(rank, step, part) {
            // Relaxed: the post of the send orders these stores before the NIC's reads.
            self.word(terms.place(step, part) + at)
                .store(terms.word(rank, step, part, at), Ordering::Relaxed);
        }
    }

    /// True if the whole message has arrived.
    fn holds(&self, terms: &Terms, rank: u64, step: u64, part: usize) -> bool {
        let word = |at: usize| {
            self.word(terms.place(step, part) + at)
                .load(Ordering::Acquire)
        };
        (0..terms.words(rank, step, part)).all(|at| word(at) == terms.word(rank, step, part, at))
    }

    /// Checks a message, and empties its place.
    fn check(&self, terms: &Terms, rank: u64, step: u64, part: usize) {
        let place = terms.place(step, part);
        for at in 0..terms.words(rank, step, part) {
            let word = self.word(place + at).load(Ordering::Acquire);
            let right = terms.word(rank, step, part, at);
            assert!(
                word == right,
                "channel {}, step {step}, part {part}, word {at}: {word:#x}, not {right:#x}",
                terms.number
            );
        }
        if !terms.low_latency {
            (0..terms.place_words)
                .for_each(|at| self.word(place + at).store(HANDED_BACK, Ordering::Release));
        }
    }

    /// Checks that nothing was written into a place after it was handed back.
    fn check_handed_back(&self, terms: &Terms, step: u64, part: usize) {
        let place = terms.place(step, part);
        let is_clean = (0..terms.place_words)
            .all(|at| self.word(place + at).load(Ordering::Acquire) == HANDED_BACK);
        assert!(
            is_clean,
            "channel {}: a place was written after its receive was done, before step {step}",
            terms.number
        );
    }
}
