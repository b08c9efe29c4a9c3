//! The file that the processes of a fabric share.
//!
//! Everything in it is an atomic, so any process may read and write any of it at any time, and
//! zeros are a valid initial state. The file is sparse: only touched pages take memory. It stays
//! mapped until the process ends.

use crate::counters::Counter;
use crate::os::process::{sleep_while, wake};
use crate::pacing::Resource;
use crate::path::{PathFault, PathFaults};
use crate::profile::{MAX_NODES, MAX_RAILS, MAX_SHARED};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

pub(crate) const MAX_PROCESSES: usize = 64;
/// Maximum number of queue pairs in a fabric.
pub const MAX_QPS: usize = 2048;
/// Maximum number of work requests in one send queue.
pub const SEND_SLOTS: usize = 1024;
/// Maximum number of bytes that a work request carries inline.
pub const INLINE_BYTES: usize = 256;
/// Maximum number of scatter/gather entries of one work request.
pub const MAX_SGES: usize = 4;
/// One bit for each queue pair.
pub(crate) const DOORBELL_WORDS: usize = MAX_QPS / 64;
/// One bit for each rail of each machine.
const NEIGHBOUR_WORDS: usize = (MAX_NODES * MAX_RAILS).div_ceil(64);

/// Version of the layout below. Raise it when the layout changes.
pub(crate) const LAYOUT: u64 = 0x5356_000d;

/// Layout of the complete file.
#[repr(C)]
pub struct FabricMemory {
    /// [`LAYOUT`] once the file is set up.
    pub(crate) layout: AtomicU64,
    /// 0: the fabric uses the machine's clock; else one more than the virtual time in nanoseconds.
    pub virtual_clock: AtomicU64,
    /// Counter for the numbers of queue pairs.
    pub generations: AtomicU32,
    /// `os::process::pid_namespace` of the processes; 0: no process has joined yet.
    pub(crate) pid_namespace: AtomicU32,
    /// Number of nodes that the fabric was made for; 0: unknown.
    pub(crate) nodes: AtomicU32,
    _unused: AtomicU32,
    /// Each machine's rails.
    pub rails: [[RailMemory; MAX_RAILS]; MAX_NODES],
    /// Each machine's links, then its cables.
    pub(crate) shared: [[TwoWay; MAX_SHARED]; MAX_NODES],
    pub(crate) processes: [ProcessMemory; MAX_PROCESSES],
    /// The queue pairs.
    pub qps: [QpMemory; MAX_QPS],
}

#[repr(C)]
pub(crate) struct TwoWay {
    /// Out of the machine.
    pub(crate) tx: Resource,
    /// Into the machine.
    pub(crate) rx: Resource,
}

/// State of a rail, with the faults that are injected into it.
#[repr(C)]
pub struct RailMemory {
    /// 1: down. (Zeros must be a working rail.)
    pub down: AtomicU32,
    /// Number of next incoming requests to refuse as invalid.
    pub refusals: AtomicU32,
    /// Number of next posts that fail with `ENOMEM`, sends and receives alike.
    pub failing_posts: AtomicU32,
    /// Number of next registrations that fail with `ENOMEM`.
    pub failing_registrations: AtomicU32,
    /// 1: registrations without local write access fail with `EFAULT`. Under Linux this depends on
    /// the driver of the memory, which may let its pages be pinned only for writing
    /// (`ib_umem_get`).
    pub needs_local_write: AtomicU32,
    /// Number of next connecting queue pairs that fail with `ETIMEDOUT`, as if the peer's address
    /// did not answer: after a second, as under Linux, or without delay in virtual time.
    pub unanswered: AtomicU32,
    /// A [`PathFaults`].
    path: AtomicU64,
    /// Number of next completions for which their queue counts as full.
    pub overruns: AtomicU32,
    /// 1: commands to the firmware do not return. Under Linux a command waits for the firmware, for
    /// example while the kernel recovers from a PCIe error; posting and polling do not.
    hung: AtomicU32,
    /// A `hotplug::Presence`.
    pub(crate) presence: AtomicU32,
    up_since_ns: AtomicU64,
    /// Neighbour table: a bit for each address resolved since the link came up (link-local, IPv4).
    neighbours: [[AtomicU64; NEIGHBOUR_WORDS]; 2],
    pub(crate) line: TwoWay,
    pub(crate) sent_bytes: AtomicU64,
    /// By [`Counter`].
    pub(crate) counters: [AtomicU64; Counter::ALL.len()],
    /// Packets at the last call of [`Self::has_new_packets`].
    shown_packets: AtomicU64,
}

impl RailMemory {
    /// The rail's path faults.
    pub fn path(&self) -> PathFaults {
        PathFaults::from_word(self.path.load(Ordering::Acquire))
    }

    /// Replaces the rail's path faults.
    pub fn set_path(&self, faults: PathFaults) {
        self.path.store(faults.word(), Ordering::Release);
    }

    /// Takes the port up or down. A port that comes up forgets its neighbours.
    pub fn set_port(&self, is_up: bool, now_ns: u64) {
        if is_up && self.down.load(Ordering::Acquire) != 0 {
            self.link_up(now_ns);
        }
        self.down.store(u32::from(!is_up), Ordering::Release);
    }

    /// Blocks commands to its firmware, or lets them return.
    pub fn hang(&self, is_hung: bool) {
        self.hung.store(u32::from(is_hung), Ordering::Release);
        wake(&self.hung);
    }

    pub(crate) fn await_firmware(&self) {
        while self.hung.load(Ordering::Acquire) != 0 {
            sleep_while(&self.hung, 1, Duration::from_secs(1));
        }
    }

    /// Marks the link as up, and clears the neighbour table. The kernel clears that table when the
    /// carrier is lost (`arp_netdev_event` in net/ipv4/arp.c and `ndisc_netdev_event` in
    /// net/ipv6/ndisc.c call `neigh_carrier_down`).
    pub(crate) fn link_up(&self, now_ns: u64) {
        self.neighbours.iter().flatten().for_each(|word| word.store(0, Ordering::Relaxed));
        self.up_since_ns.store(now_ns, Ordering::Release);
    }

    /// True while the switch port drops all frames because the link came up a moment ago.
    pub(crate) fn is_blocked(&self, now_ns: u64) -> bool {
        // A link that came up in the future: a test has set the clock back.
        let up_ns = now_ns.checked_sub(self.up_since_ns.load(Ordering::Acquire));
        up_ns.is_some_and(|up_ns| up_ns < self.path().blocking_ns())
    }

    pub(crate) fn carries(&self, now_ns: u64) -> bool {
        let is_up = self.down.load(Ordering::Acquire) == 0;
        is_up && !self.path().has(PathFault::Silent) && !self.is_blocked(now_ns)
    }

    /// True for an address in the neighbour table. The kernel sends no request for a valid entry,
    /// however old (`dst_fetch_ha` in drivers/infiniband/core/addr.c).
    pub(crate) fn is_neighbour(&self, node: usize, device: usize, is_ipv4: bool) -> bool {
        let bit = node * MAX_RAILS + device;
        self.neighbours[usize::from(is_ipv4)][bit / 64].load(Ordering::Relaxed) & 1 << (bit % 64) != 0
    }

    pub(crate) fn add_neighbour(&self, node: usize, device: usize, is_ipv4: bool) {
        let bit = node * MAX_RAILS + device;
        self.neighbours[usize::from(is_ipv4)][bit / 64].fetch_or(1 << (bit % 64), Ordering::Relaxed);
    }

    pub(crate) fn count(&self, counter: Counter, by: u64) {
        self.counters[counter as usize].fetch_add(by, Ordering::Relaxed);
    }

    /// Returns the value of a counter.
    pub fn counted(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Ordering::Relaxed)
    }

    /// Counts packets as sent, up to and including the first lost one: one packet in `loss` is lost
    /// (0: none). Returns the number of packets sent, and true if the last one is lost.
    pub(crate) fn send(&self, packets: u64, loss: u64) -> (u64, bool) {
        let until_lost = |sent: u64| sent.checked_rem(loss).map_or(u64::MAX, |since| loss - since);
        let sent = &self.counters[Counter::Sent as usize];
        let more = |sent: u64| sent.wrapping_add(packets.min(until_lost(sent)));
        let before = sent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |sent| Some(more(sent)));
        let until_lost = until_lost(before.unwrap_or_else(|unchanged| unchanged));
        (packets.min(until_lost), packets >= until_lost)
    }

    /// True if any process has counted packets since the last call.
    pub(crate) fn has_new_packets(&self) -> bool {
        let packets = self.counted(Counter::Sent).wrapping_add(self.counted(Counter::Received));
        self.shown_packets.swap(packets, Ordering::Relaxed) != packets
    }

    /// Decrements a count of injected faults. Returns false if the count was zero.
    pub(crate) fn is_due(faults: &AtomicU32) -> bool {
        faults.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

/// State of a process, as the other processes see it.
#[repr(C)]
pub struct ProcessMemory {
    /// 0: this entry is free.
    pub(crate) pid: AtomicU32,
    pub(crate) node: AtomicU32,
    /// `os::process::started` of the process.
    pub(crate) started: AtomicU64,
    /// State of its engines (`engine::AWAKE`, `NAPPING`, `ASLEEP`): a futex.
    pub sleeping: AtomicU32,
    pub(crate) registrations: AtomicU32,
    pub(crate) polled_ns: AtomicU64,
    /// By rail: a bit for each non-zero word of `doorbells`.
    pub(crate) rung: [AtomicU64; MAX_RAILS],
    /// By rail: a bit for each of its queue pairs that has new requests.
    pub(crate) doorbells: [[AtomicU64; DOORBELL_WORDS]; MAX_RAILS],
}

/// A queue pair, as its peer sees it.
#[repr(C)]
pub struct QpMemory {
    /// Queue pair number; 0: this entry is free.
    pub number: AtomicU32,
    /// Index of its process's entry.
    pub(crate) process: AtomicU32,
    pub(crate) node: AtomicU32,
    pub(crate) device: AtomicU32,
    /// A `queue_pair::State`.
    pub(crate) state: AtomicU32,
    pub(crate) remote: AtomicU32,
    pub(crate) send_psn: AtomicU32,
    /// Index plus one of the process that takes requests out of the send queue, or flushes it.
    pub(crate) holder: AtomicU32,
    /// Tries while the receiver is not ready; 7: no limit.
    pub(crate) rnr_retry: AtomicU32,
    pub(crate) generation: AtomicU32,
    pub(crate) mtu_bytes: AtomicU32,
    /// Traffic class, and above it the service level. They have no effect here.
    pub(crate) priority: AtomicU32,
    /// 1: its packets go to another function than its peer's ([`PathFault::CrossedArp`]).
    pub(crate) misrouted: AtomicU32,
    /// Time after which it sends an unacknowledged packet again; 0: never.
    pub(crate) ack_timeout_ns: AtomicU64,
    /// Number of work requests posted since creation or the last reset.
    pub(crate) posted: AtomicU64,
    /// Number of these work requests that are done.
    pub(crate) done: AtomicU64,
    pub(crate) served_ns: AtomicU64,
    pub(crate) pace: Resource,
    /// By number modulo [`SEND_SLOTS`].
    pub(crate) slots: [Slot; SEND_SLOTS],
}

#[repr(C)]
pub(crate) struct Slot {
    /// A packed `work_request::Head`.
    pub(crate) head: AtomicU64,
    /// Immediate data, then the remote key.
    pub(crate) imm_rkey: AtomicU64,
    pub(crate) remote_addr: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) posted_ns: AtomicU64,
    /// An `ibv_wc_status`, once the request is done; before that, the error it was posted with.
    pub(crate) status: AtomicU64,
    pub(crate) sges: [[AtomicU64; 2]; MAX_SGES],
    pub(crate) inline: [AtomicU64; INLINE_BYTES / 8],
}

/// Extends the file to the layout's size, and maps it. The error names the failed step.
pub fn map(file: &File) -> Result<&'static FabricMemory, String> {
    let bytes = size_of::<FabricMemory>();
    file.set_len(bytes as u64).map_err(|e| format!("no room for the fabric's file of {bytes} bytes (sparse): {e}"))?;
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE);
    // SAFETY: a new mapping of a file that is this large, at an address of the kernel's choice.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, file.as_raw_fd(), 0) };
    if place == libc::MAP_FAILED {
        return Err(format!("mapping the fabric's file: {}", std::io::Error::last_os_error()));
    }
    // SAFETY: the mapping is page-aligned, as large as the type, and lasts as long as the process.
    // The type is all atomics: every content is valid, and every concurrent change allowed. The
    // file is never truncated (it only ever gets this one length).
    Ok(unsafe { &*place.cast::<FabricMemory>() })
}

impl QpMemory {
    /// Claims this queue's requests for the process with this index. Replaces a dead holder.
    pub(crate) fn hold(&self, memory: &FabricMemory, process_index: usize) -> bool {
        let mine = process_index as u32 + 1;
        match self.holder.compare_exchange(0, mine, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => true,
            Err(other) if other != mine && !memory.is_alive(other as usize - 1) => {
                self.holder.compare_exchange(other, mine, Ordering::Acquire, Ordering::Relaxed).is_ok()
            }
            Err(_) => false,
        }
    }

    /// Ends a [`Self::hold`]. Does nothing if another process holds the queue.
    pub(crate) fn release(&self, process_index: usize) {
        let _ = self.holder.compare_exchange(process_index as u32 + 1, 0, Ordering::Release, Ordering::Relaxed);
    }

    /// Returns the bytes of unfinished requests to these addresses of the peer. Exact only while no
    /// process posts or serves.
    pub fn waiting_bytes(&self, to: &Range<u64>) -> u64 {
        let (posted, done) = (self.posted.load(Ordering::Acquire), self.done.load(Ordering::Acquire));
        let waiting = (done..posted).take(SEND_SLOTS).map(|number| self.slot(number));
        let waiting = waiting.filter(|slot| to.contains(&slot.remote_addr.load(Ordering::Relaxed)));
        waiting.map(|slot| slot.bytes.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn slot(&self, number: u64) -> &Slot {
        &self.slots[number as usize % SEND_SLOTS]
    }
}

impl FabricMemory {
    pub(crate) fn is_alive(&self, process_index: usize) -> bool {
        let Some(process) = self.processes.get(process_index) else { return false };
        let pid = process.pid.load(Ordering::Acquire);
        pid != 0 && super::process::started(pid) == Some(process.started.load(Ordering::Acquire))
    }

    /// True if a test drives the clock; nothing may sleep then.
    pub(crate) fn is_virtual(&self) -> bool {
        self.virtual_clock.load(Ordering::Acquire) != 0
    }

    #[inline]
    pub(crate) fn now_ns(&self) -> u64 {
        match self.virtual_clock.load(Ordering::Acquire) {
            0 => super::process::now_ns(),
            later => later - 1,
        }
    }
}
