//! The file that the processes of a fabric share.
//!
//! Everything in it is an atomic, so any process may read and write any of it at any time, and
//! zeros are a valid initial state. The file is sparse: only touched pages take memory. It stays
//! mapped until the process ends.

use crate::counters::Counter;
use crate::gid_table::GidTable;
use crate::os::process::{sleep_while, thread_id, wake};
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
/// Number of 64-bit words with one bit for each queue pair.
pub(crate) const DOORBELL_WORDS: usize = MAX_QPS / 64;
/// Number of 64-bit words with one bit for each rail of each machine.
const NEIGHBOUR_WORDS: usize = (MAX_NODES * MAX_RAILS).div_ceil(64);

/// Version of the layout below. Raise it when the layout changes.
pub(crate) const LAYOUT: u64 = 0x5356_0010;

/// Layout of the complete file.
#[repr(C)]
pub struct FabricMemory {
    /// [`LAYOUT`] once the file is set up.
    pub(crate) layout: AtomicU64,
    /// 0: the fabric uses the machine's clock. Any other value is the virtual time in nanoseconds,
    /// plus one.
    pub virtual_clock: AtomicU64,
    /// Counter from which new queue pairs get their numbers.
    pub generations: AtomicU32,
    /// `os::process::pid_namespace` of the processes; 0: no process has joined yet.
    pub(crate) pid_namespace: AtomicU32,
    /// Number of nodes (machines) that the fabric was made for; 0: unknown.
    pub(crate) nodes: AtomicU32,
    _unused: AtomicU32,
    /// Each machine's rails.
    pub rails: [[RailMemory; MAX_RAILS]; MAX_NODES],
    /// For each machine: its PCIe links, followed by its cables.
    pub(crate) shared: [[TwoWay; MAX_SHARED]; MAX_NODES],
    pub(crate) processes: [ProcessMemory; MAX_PROCESSES],
    /// The queue pairs.
    pub qps: [QpMemory; MAX_QPS],
}

/// A PCIe link, a cable or a rail's port, with one resource for each direction.
#[repr(C)]
pub(crate) struct TwoWay {
    /// The direction out of the machine.
    pub(crate) tx: Resource,
    /// The direction into the machine.
    pub(crate) rx: Resource,
}

/// Number of commands to a rail's firmware whose callers are known.
const CALLERS: usize = 256;

/// State of a rail, with the faults that are injected into it.
#[repr(C)]
pub struct RailMemory {
    /// 1: the port is down. (0 means up, because a memory of zeros must be a working rail.)
    pub down: AtomicU32,
    /// Number of incoming requests that the rail will still refuse as invalid.
    pub refusals: AtomicU32,
    /// Number of posts, of sends or of receives, that will still fail with `ENOMEM`.
    pub failing_posts: AtomicU32,
    /// Number of registrations that will still fail with `ENOMEM`.
    pub failing_registrations: AtomicU32,
    /// 1: registrations without local write access fail with `EFAULT`. Under Linux this depends on
    /// the driver of the memory, which may let its pages be pinned only for writing
    /// (`ib_umem_get`).
    pub needs_local_write: AtomicU32,
    /// Number of queue pairs whose connecting will still fail with `ETIMEDOUT`, as if the peer's
    /// address did not answer. It fails after a second, as under Linux. In virtual time it fails
    /// without delay.
    pub unanswered: AtomicU32,
    /// A [`PathFaults`].
    path: AtomicU64,
    /// A [`GidTable`].
    gid_table: AtomicU32,
    /// Time after which a queue pair reports a silent peer; 0: its time-out and retry count decide.
    pub silence_ns: AtomicU64,
    /// Number of completions for which the completion queue will still count as full.
    pub overruns: AtomicU32,
    /// Number of receives whose completions will still be lost. The bytes of such a receive are
    /// stored and acknowledged. No NIC may do this; a fault of a NIC or of its driver could.
    pub lost_arrivals: AtomicU32,
    /// 1: commands to the firmware do not return. Under Linux a command waits for the firmware, for
    /// example while the kernel recovers from a PCIe error. Posting and polling do not wait for it.
    hung: AtomicU32,
    /// Number of commands to the firmware.
    commands: AtomicU32,
    /// Threads that gave the last commands to the firmware; 0: none.
    callers: [AtomicU32; CALLERS],
    /// A `hotplug::Presence`.
    pub(crate) presence: AtomicU32,
    up_since_ns: AtomicU64,
    /// Neighbour table: a bit for each address that was resolved since the link came up. The first
    /// array is for link-local addresses, the second for IPv4 addresses.
    neighbours: [[AtomicU64; NEIGHBOUR_WORDS]; 2],
    pub(crate) line: TwoWay,
    pub(crate) sent_bytes: AtomicU64,
    /// Values of the port's counters, indexed by [`Counter`].
    pub(crate) counters: [AtomicU64; Counter::ALL.len()],
    /// Number of packets sent and received until the last call of [`Self::has_new_packets`].
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

    /// The port's GID table.
    pub fn gid_table(&self) -> GidTable {
        GidTable::from_word(self.gid_table.load(Ordering::Acquire))
    }

    /// Takes the port's addresses away, or adds them again at other indices.
    pub fn set_addresses(&self, is_there: bool) {
        let table = self.gid_table().with_addresses(is_there);
        self.gid_table.store(table.word(), Ordering::Release);
    }

    /// Takes the port up or down. A port that comes up forgets its neighbours.
    pub fn set_port(&self, is_up: bool, now_ns: u64) {
        if is_up && self.down.load(Ordering::Acquire) != 0 {
            self.link_up(now_ns);
        }
        self.down.store(u32::from(!is_up), Ordering::Release);
    }

    /// Blocks commands to the rail's firmware (true), or lets them return (false).
    pub fn hang(&self, is_hung: bool) {
        self.hung.store(u32::from(is_hung), Ordering::Release);
        wake(&self.hung);
    }

    /// The kernel's numbers of the threads that gave the last commands to the firmware.
    pub(crate) fn callers(&self) -> Vec<u32> {
        self.callers
            .iter()
            .map(|caller| caller.load(Ordering::Acquire))
            .filter(|caller| *caller != 0)
            .collect()
    }

    pub(crate) fn await_firmware(&self) {
        let number = self.commands.fetch_add(1, Ordering::Relaxed);
        self.callers[number as usize % CALLERS].store(thread_id(), Ordering::Release);
        while self.hung.load(Ordering::Acquire) != 0 {
            sleep_while(&self.hung, 1, Duration::from_secs(1));
        }
    }

    /// Marks the link as up, and clears the neighbour table. The kernel clears that table when the
    /// carrier is lost (`arp_netdev_event` in net/ipv4/arp.c and `ndisc_netdev_event` in
    /// net/ipv6/ndisc.c call `neigh_carrier_down`).
    pub fn link_up(&self, now_ns: u64) {
        self.neighbours
            .iter()
            .flatten()
            .for_each(|word| word.store(0, Ordering::Relaxed));
        self.up_since_ns.store(now_ns, Ordering::Release);
    }

    /// True while the switch port drops all frames because the link came up a moment ago.
    pub(crate) fn is_blocked(&self, now_ns: u64) -> bool {
        // `None` if the link came up in the future, because a test has set the clock back.
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
        self.neighbours[usize::from(is_ipv4)][bit / 64].load(Ordering::Relaxed) & 1 << (bit % 64)
            != 0
    }

    pub(crate) fn add_neighbour(&self, node: usize, device: usize, is_ipv4: bool) {
        let bit = node * MAX_RAILS + device;
        self.neighbours[usize::from(is_ipv4)][bit / 64]
            .fetch_or(1 << (bit % 64), Ordering::Relaxed);
    }

    pub(crate) fn count(&self, counter: Counter, by: u64) {
        self.counters[counter as usize].fetch_add(by, Ordering::Relaxed);
    }

    /// Returns the value of a counter.
    pub fn counted(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Ordering::Relaxed)
    }

    /// Sends up to `packets` packets: counts them, and stops after the first one that is lost. One
    /// packet in `loss` is lost; if `loss` is 0, none is. Returns the number of packets sent, and
    /// true if the last one of them is lost.
    pub(crate) fn send(&self, packets: u64, loss: u64) -> (u64, bool) {
        let until_lost = |sent: u64| {
            sent.checked_rem(loss)
                .map_or(u64::MAX, |since| loss - since)
        };
        let sent = &self.counters[Counter::Sent as usize];
        let more = |sent: u64| sent.wrapping_add(packets.min(until_lost(sent)));
        let before = sent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |sent| {
            Some(more(sent))
        });
        let until_lost = until_lost(before.unwrap_or_else(|unchanged| unchanged));
        (packets.min(until_lost), packets >= until_lost)
    }

    /// True if any process has counted packets since the last call.
    pub(crate) fn has_new_packets(&self) -> bool {
        let packets = self
            .counted(Counter::Sent)
            .wrapping_add(self.counted(Counter::Received));
        self.shown_packets.swap(packets, Ordering::Relaxed) != packets
    }

    /// Takes one from a number of faults that are still to be injected. Returns true if a fault is
    /// due, and false if the number was zero.
    pub(crate) fn is_due(faults: &AtomicU32) -> bool {
        faults
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_ok()
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
    /// State of its engines: `engine::AWAKE`, `NAPPING` or `ASLEEP`. The engines' threads sleep on
    /// this word as a futex.
    pub sleeping: AtomicU32,
    pub(crate) registrations: AtomicU32,
    pub(crate) polled_ns: AtomicU64,
    /// For each rail: a bit for each non-zero word of `doorbells`.
    pub(crate) rung: [AtomicU64; MAX_RAILS],
    /// For each rail: a bit for each of the process's queue pairs that its engine must serve,
    /// because the peer has posted requests.
    pub(crate) doorbells: [[AtomicU64; DOORBELL_WORDS]; MAX_RAILS],
}

/// A queue pair, as its peer sees it.
#[repr(C)]
pub struct QpMemory {
    /// Queue pair number; 0: this entry is free.
    pub number: AtomicU32,
    /// Index of its process in [`FabricMemory::processes`].
    pub(crate) process: AtomicU32,
    pub(crate) node: AtomicU32,
    pub(crate) device: AtomicU32,
    /// A `queue_pair::State`.
    pub(crate) state: AtomicU32,
    pub(crate) remote: AtomicU32,
    pub(crate) send_psn: AtomicU32,
    /// Index, plus one, of the process that holds the send queue: that takes requests out of it,
    /// flushes it or resets it. 0: none.
    pub(crate) holder: AtomicU32,
    /// Maximum number of retries while the receiver is not ready; 7: no maximum.
    pub(crate) rnr_retry: AtomicU32,
    pub(crate) generation: AtomicU32,
    pub(crate) mtu_bytes: AtomicU32,
    /// Traffic class in the low bits, and the service level above it. They have no effect here.
    pub(crate) priority: AtomicU32,
    /// Index of its own address in the GID table.
    pub(crate) own_gid_index: AtomicU32,
    /// 1: its packets go to another function than its peer's ([`PathFault::CrossedArp`]).
    pub(crate) misrouted: AtomicU32,
    /// Time after which it sends an unacknowledged packet again; 0: the program set no time-out.
    /// `LATER_NS` of `serve.rs` is the minimum, and applies without a time-out, too. A lost packet
    /// that a later packet follows is sent again after twice the latency, because the peer reports
    /// the loss.
    pub(crate) ack_timeout_ns: AtomicU64,
    /// Number of work requests posted since creation or the last reset.
    pub(crate) posted: AtomicU64,
    /// Number of these work requests that are done.
    pub(crate) done: AtomicU64,
    pub(crate) served_ns: AtomicU64,
    pub(crate) pace: Resource,
    /// The send queue. Its index is the number of a work request modulo [`SEND_SLOTS`].
    pub(crate) slots: [Slot; SEND_SLOTS],
}

/// A work request in a send queue.
#[repr(C)]
pub(crate) struct Slot {
    /// A packed `work_request::Head`.
    pub(crate) head: AtomicU64,
    /// Immediate data in the lower 32 bits, and the remote key in the upper 32 bits.
    pub(crate) imm_rkey: AtomicU64,
    pub(crate) remote_addr: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) posted_ns: AtomicU64,
    /// An `ibv_wc_status`. Before the request is done, this is the error that posting found (0:
    /// none). After that, this is the status of the request's completion.
    pub(crate) status: AtomicU64,
    pub(crate) sges: [[AtomicU64; 2]; MAX_SGES],
    pub(crate) inline: [AtomicU64; INLINE_BYTES / 8],
}

/// Extends the file to the layout's size, and maps it. The error names the failed step.
pub fn map(file: &File) -> Result<&'static FabricMemory, String> {
    let bytes = size_of::<FabricMemory>();
    file.set_len(bytes as u64)
        .map_err(|e| format!("no room for the fabric's file of {bytes} bytes (sparse): {e}"))?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    // SAFETY: a new mapping of a file that is this large, at an address of the kernel's choice.
    let place = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            access,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    if place == libc::MAP_FAILED {
        return Err(format!(
            "mapping the fabric's file: {}",
            std::io::Error::last_os_error()
        ));
    }
    // SAFETY: the mapping is page-aligned, as large as the type, and lasts as long as the process.
    // The type consists of atomics only: so every content is valid, and every concurrent change is
    // allowed. The file is never truncated, because it only ever gets this one length.
    Ok(unsafe { &*place.cast::<FabricMemory>() })
}

impl QpMemory {
    /// Makes the process with this index the holder of the send queue. Replaces a holder that is
    /// dead. Returns false if the queue has a live holder, even if that is the process itself.
    pub(crate) fn hold(&self, memory: &FabricMemory, process_index: usize) -> bool {
        let mine = process_index as u32 + 1;
        match self
            .holder
            .compare_exchange(0, mine, Ordering::Acquire, Ordering::Relaxed)
        {
            Ok(_) => true,
            Err(other) if other != mine && !memory.is_alive(other as usize - 1) => self
                .holder
                .compare_exchange(other, mine, Ordering::Acquire, Ordering::Relaxed)
                .is_ok(),
            Err(_) => false,
        }
    }

    /// Ends a [`Self::hold`]. Does nothing if another process holds the queue.
    pub(crate) fn release(&self, process_index: usize) {
        let _ = self.holder.compare_exchange(
            process_index as u32 + 1,
            0,
            Ordering::Release,
            Ordering::Relaxed,
        );
    }

    /// Returns the number of bytes in unfinished requests whose remote address is in the range
    /// `to`. The number is exact only while no process posts or serves.
    pub fn waiting_bytes(&self, to: &Range<u64>) -> u64 {
        let posted = self.posted.load(Ordering::Acquire);
        let done = self.done.load(Ordering::Acquire);
        let waiting = (done..posted)
            .take(SEND_SLOTS)
            .map(|number| self.slot(number));
        let waiting = waiting.filter(|slot| to.contains(&slot.remote_addr.load(Ordering::Relaxed)));
        waiting.map(|slot| slot.bytes.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn slot(&self, number: u64) -> &Slot {
        &self.slots[number as usize % SEND_SLOTS]
    }
}

impl FabricMemory {
    pub(crate) fn is_alive(&self, process_index: usize) -> bool {
        let Some(process) = self.processes.get(process_index) else {
            return false;
        };
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
