//! Assignment of lanes to records of the memory file. A record has the counters of one lane.

use super::layout::{
    Direction, HeaderWord, PEER_BYTES, RAIL_BYTES, RECORDS, State, Word, text_words,
};
use super::memory::{MemoryFile, Place};
use super::summary::{Carried, Summary};
use proto::time::Instant;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Number of records freed last that are not reused while the file still has records that were
/// never used. So late readers still find the counters of the connections that have closed last.
const KEPT: usize = 64;

/// The counters of all connections of a process.
pub struct Counting {
    book: Mutex<Book>,
    summary: Mutex<Summary>,
}

struct Book {
    file: File,
    /// [`Word::Sequence`] of each record that has been used. Kept here because other processes can
    /// overwrite the word in the file.
    sequences: Vec<u64>,
    /// Indices of the records that were used and are free, in the order in which they became free.
    free: VecDeque<usize>,
    /// Number of lanes that got no record because none was free.
    not_counted: u64,
    /// Number of connections so far.
    connections: u64,
}

enum File {
    /// The first connection will create the file.
    NotYet,
    Made(Arc<MemoryFile>),
    /// The file is not wanted, or could not be created.
    None,
}

/// Description of a lane, for readers.
pub struct CountedLane {
    /// The rail on this host.
    pub rail: String,
    /// The peer's rail.
    pub peer_rail: String,
    /// The rail's payload rate in bits per second.
    pub bits_per_s: u64,
    /// Path MTU of the lane's queue pairs; 0 if the lane has none yet.
    pub path_mtu_bytes: u32,
    /// State at the start. Readers do not see a lane in [`State::Free`] until it works.
    pub state: State,
}

/// The counters of one lane. Each counter has one writer. The owner of [`Outages`] writes losses,
/// recoveries and the time lost. The user of the data path writes the other counters.
#[derive(Clone)]
pub struct Record {
    place: Place<Reservation>,
}

/// Reservation of a record. Dropping it frees the record.
struct Reservation {
    counting: Arc<Counting>,
    /// Index in the file; `None` for a record in private memory.
    index: Option<usize>,
    /// True after the connection has ended. The state then stays [`State::Closed`].
    is_closed: AtomicBool,
}

/// Counters of one lane's losses and recoveries. The owner of this value is their only writer.
pub struct Outages {
    record: Record,
    away: Away,
}

/// Reason why a lane does not work.
enum Away {
    /// It works.
    No,
    /// It has not worked yet.
    Late,
    /// It is lost since this time.
    Since(Instant),
}

/// The records of a connection's lanes, until the connection ends.
pub struct CountedConnection {
    counting: Arc<Counting>,
    direction: Direction,
    /// The name of each lane's rail, and the lane's record.
    lanes: Vec<(String, Record)>,
    has_ended: AtomicBool,
}

impl Counting {
    /// Creates the counters of a process. If `wants_file` is true, the first connection creates the
    /// memory file.
    pub fn new(wants_file: bool) -> Arc<Self> {
        let file = if wants_file { File::NotYet } else { File::None };
        let (sequences, free, not_counted, connections) = Default::default();
        let book = Mutex::new(Book {
            file,
            sequences,
            free,
            not_counted,
            connections,
        });
        Arc::new(Self {
            book,
            summary: Mutex::default(),
        })
    }

    /// Adds a connection to a peer's host, with a record for each lane.
    pub fn connection(
        self: &Arc<Self>,
        direction: Direction,
        peer: &str,
        lanes: &[CountedLane],
    ) -> CountedConnection {
        let mut book = lock(&self.book);
        book.connections += 1;
        let of = |lane: &CountedLane| {
            (
                lane.rail.clone(),
                Record {
                    place: book.take(self, direction, peer, lane),
                },
            )
        };
        let lanes = lanes.iter().map(of).collect();
        CountedConnection {
            counting: Arc::clone(self),
            direction,
            lanes,
            has_ended: AtomicBool::new(false),
        }
    }

    /// Logs the totals of connections that have ended since the last call. `by_tcp` is the number
    /// of bytes and the number of messages sent by connections over TCP. Returns true if there was
    /// something to log.
    pub fn log_summary(&self, by_tcp: (u64, u64)) -> bool {
        let lines = std::mem::take(&mut *lock(&self.summary)).lines(by_tcp);
        for line in &lines {
            tracing::info!("{line}");
        }
        !lines.is_empty()
    }

    /// Returns the path of the memory file for readers, if the file exists.
    pub fn path(&self) -> Option<String> {
        match &lock(&self.book).file {
            File::Made(file) => Some(file.path()),
            File::NotYet | File::None => None,
        }
    }

    fn give_back(&self, index: usize) {
        lock(&self.book).free.push_back(index);
    }
}

impl Book {
    fn take(
        &mut self,
        counting: &Arc<Counting>,
        direction: Direction,
        peer: &str,
        lane: &CountedLane,
    ) -> Place<Reservation> {
        let reservation = |index| Reservation {
            counting: Arc::clone(counting),
            index,
            is_closed: AtomicBool::new(false),
        };
        self.make_file();
        let File::Made(file) = &self.file else {
            return Place::private(reservation(None));
        };
        let used = self.sequences.len();
        let index = match self.free.len() {
            1.. if used == RECORDS => self.free.pop_front(),
            0..=KEPT if used < RECORDS => Some(used),
            _ => self.free.pop_front(),
        };
        let Some(index) = index else {
            self.not_counted += 1;
            file.set(HeaderWord::NotCounted, self.not_counted);
            return Place::private(reservation(None));
        };
        let place = Place::in_file(file, index, reservation(Some(index)));
        if index == used {
            self.sequences.push(0);
        }
        let sequence = self.sequences[index].wrapping_add(2);
        self.sequences[index] = sequence;
        describe(&place, sequence, self.connections, direction, peer, lane);
        file.set(HeaderWord::Used, self.sequences.len() as u64);
        place
    }

    fn make_file(&mut self) {
        if let File::NotYet = self.file {
            self.file = match MemoryFile::new() {
                Ok(file) => {
                    tracing::debug!("counters in {}", file.path());
                    File::Made(file)
                }
                Err(error) => {
                    tracing::info!(
                        "cannot create the counters' memory file ({error}); nccl-spark top does not show this process"
                    );
                    File::None
                }
            };
        }
    }
}

/// Writes the description of a record's lane and sets its counters to 0.
fn describe(
    place: &Place<Reservation>,
    sequence: u64,
    connection: u64,
    direction: Direction,
    peer: &str,
    lane: &CountedLane,
) {
    let set = |word: Word, value: u64| place[word as usize].store(value, Ordering::Relaxed);
    let set_text = |word: Word, text: &[u64]| {
        place[word as usize..]
            .iter()
            .zip(text)
            .for_each(|(word, value)| word.store(*value, Ordering::Relaxed));
    };
    set(Word::Sequence, sequence.wrapping_sub(1));
    // If a reader sees a word that is stored below, it also sees the odd sequence.
    fence(Ordering::Release);
    place[Word::State as usize..]
        .iter()
        .for_each(|word| word.store(0, Ordering::Relaxed));
    set(Word::State, lane.state as u64);
    set(Word::Direction, direction as u64);
    set(Word::Connection, connection);
    set(Word::BitsPerS, lane.bits_per_s);
    set(Word::PathMtu, u64::from(lane.path_mtu_bytes));
    set_text(Word::Rail, &text_words::<{ RAIL_BYTES / 8 }>(&lane.rail));
    set_text(
        Word::PeerRail,
        &text_words::<{ RAIL_BYTES / 8 }>(&lane.peer_rail),
    );
    set_text(Word::Peer, &text_words::<{ PEER_BYTES / 8 }>(peer));
    place[Word::Sequence as usize].store(sequence, Ordering::Release);
}

impl Record {
    /// Returns a record that no reader sees, for lanes that are not in use yet.
    pub fn detached() -> Self {
        Self {
            place: Place::detached(),
        }
    }

    /// Adds `more` to a counter. A load and a store suffice, because the counter has one writer in
    /// this process. Other processes can change the old value, but nothing depends on it.
    #[inline(always)]
    pub fn add(&self, word: Word, more: u64) {
        let word = &self.place[word as usize];
        word.store(
            word.load(Ordering::Relaxed).wrapping_add(more),
            Ordering::Relaxed,
        );
    }

    /// Adds 1 to [`Word::Writes`] and `bytes` to [`Word::Bytes`]. Two calls of [`Record::add`]
    /// would load the record's address twice.
    #[inline(always)]
    pub fn add_write(&self, bytes: u64) {
        let words = &*self.place;
        let [all, writes] = [Word::Bytes, Word::Writes].map(|word| &words[word as usize]);
        all.store(
            all.load(Ordering::Relaxed).wrapping_add(bytes),
            Ordering::Relaxed,
        );
        writes.store(
            writes.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
    }

    /// Raises a counter to `value` if it is lower.
    #[inline(always)]
    pub fn raise(&self, word: Word, value: u64) {
        let word = &self.place[word as usize];
        if word.load(Ordering::Relaxed) < value {
            word.store(value, Ordering::Relaxed);
        }
    }

    fn set(&self, word: Word, value: u64) {
        self.place[word as usize].store(value, Ordering::Relaxed);
    }

    /// Returns a counter's value.
    pub fn read(&self, word: Word) -> u64 {
        self.place[word as usize].load(Ordering::Relaxed)
    }

    /// Sets the lane's state, unless its connection has ended.
    fn set_state(&self, state: State) {
        let Some(reservation) = self
            .place
            .attached()
            .filter(|reservation| !reservation.is_closed.load(Ordering::Relaxed))
        else {
            return;
        };
        self.store_state(state);
        // Pairs with the fence in `close`. If `close` runs on another thread at the same time,
        // either this thread sees `is_closed` below, or `close` stores `Closed` after the store
        // above. Either way the state ends as `Closed`.
        fence(Ordering::SeqCst);
        if reservation.is_closed.load(Ordering::Relaxed) {
            self.store_state(State::Closed);
        }
    }

    fn close(&self) {
        if let Some(reservation) = self.place.attached() {
            reservation.is_closed.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            // No reader has seen a lane that never worked, and none needs to.
            if self.read(Word::State) != State::Free as u64 {
                self.store_state(State::Closed);
            }
        }
    }

    fn store_state(&self, state: State) {
        self.set(Word::State, state as u64);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            self.counting.give_back(index);
        }
    }
}

impl Outages {
    /// Creates the writer of a lane's losses and recoveries. The lane counts as working until
    /// [`Outages::lost`] is called.
    pub fn of(record: &Record) -> Self {
        Self {
            record: record.clone(),
            away: Away::No,
        }
    }

    /// Records that the lane has not worked yet, which is no loss.
    pub fn begins_late(&mut self) {
        self.away = Away::Late;
    }

    /// Returns [`Word::Writes`] of the lane.
    pub fn writes(&self) -> u64 {
        self.record.read(Word::Writes)
    }

    /// Records that the lane is lost, or that it does not work from the start. If the lane already
    /// counts as lost, nothing changes.
    pub fn lost(&mut self, now: Instant) {
        if let Away::No = self.away {
            self.away = Away::Since(now);
            self.record.add(Word::Losses, 1);
            self.record.set_state(State::Lost);
        }
    }

    /// Shows the lane as lost because its connection has failed. Counts no loss of the rail.
    pub fn failed(&self) {
        self.record.set_state(State::Lost);
    }

    /// Shows the present stall of the connection. `word` is the value for [`Word::Stall`]: 0 if the
    /// connection has no stall.
    pub fn stalled(&self, word: u64) {
        self.record.set(Word::Stall, word);
    }

    /// Records that the lane works again, with queue pairs of this path MTU. If the lane does not
    /// count as lost or late, nothing changes.
    pub fn recovered(&mut self, path_mtu_bytes: u32, now: Instant) {
        match std::mem::replace(&mut self.away, Away::No) {
            Away::No => return,
            Away::Late => {}
            Away::Since(since) => {
                self.record.add(Word::Recoveries, 1);
                self.record
                    .add(Word::LostNs, nanos(now.saturating_duration_since(since)));
            }
        }
        self.record.set(Word::PathMtu, u64::from(path_mtu_bytes));
        self.record.set_state(State::Carries);
    }
}

impl CountedConnection {
    /// Returns the record of a lane, by its number in the connection.
    pub fn record(&self, lane: usize) -> Record {
        self.lanes
            .get(lane)
            .map_or_else(Record::detached, |(_, record)| record.clone())
    }

    /// Ends the connection and adds its totals to the summary. If the connection counts more while
    /// the peer closes, the summary leaves these counts out.
    pub fn end(&self) {
        if self.has_ended.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut summary = lock(&self.counting.summary);
        for (rail, record) in &self.lanes {
            record.close();
            let read = |word| record.read(word);
            summary.add(
                rail,
                Carried {
                    direction: self.direction,
                    bytes: read(Word::Bytes),
                    losses: read(Word::Losses),
                    recoveries: read(Word::Recoveries),
                    lost: Duration::from_nanos(read(Word::LostNs)),
                    stalls: read(Word::Stalls),
                    stalled: Duration::from_nanos(read(Word::StalledNs)),
                },
            );
        }
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.end();
    }
}

/// Converts a time to nanoseconds. Times above 584 years, the most that 64 bits can hold, become
/// [`u64::MAX`].
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock is held leaves the value intact.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::super::layout::Counters;
    use super::*;

    fn lane(rail: &str) -> CountedLane {
        let peer_rail = "far:1".to_owned();
        CountedLane {
            rail: rail.to_owned(),
            peer_rail,
            bits_per_s: 7,
            path_mtu_bytes: 4096,
            state: State::Carries,
        }
    }

    fn read(counting: &Counting) -> Counters {
        let bytes = std::fs::read(counting.path().expect("a memory file")).unwrap();
        Counters::parse(&bytes, &bytes).unwrap()
    }

    #[test]
    fn a_record_describes_its_lane_and_is_reused_once_free() {
        let counting = Counting::new(true);
        assert_eq!(counting.path(), None, "before the first connection");
        let lanes: Vec<_> = (0..=KEPT).map(|_| lane("a:1")).collect();
        let first = counting.connection(Direction::Send, "spark-b", &lanes);
        let held = first.record(1);
        first.record(1).add(Word::Bytes, 5);
        drop(first);
        let records = read(&counting).records;
        assert!(
            records.iter().all(|record| record.state == State::Closed),
            "{records:?}"
        );
        // Late counts are added, but the state stays `Closed`.
        held.add(Word::Bytes, 1);
        Outages::of(&held).lost(Instant::from_nanos(1));
        let records = read(&counting).records;
        assert_eq!(
            (
                records[1].state,
                records[1].counts.bytes,
                records[1].counts.losses
            ),
            (State::Closed, 6, 1)
        );
        let second = counting.connection(
            Direction::Receive,
            "spark-c",
            &[
                lane("b:1"),
                CountedLane {
                    state: State::Lost,
                    ..lane("c:1")
                },
            ],
        );
        let fresh = read(&counting);
        let mut of_second = Vec::new();
        of_second.extend(fresh.records.iter().filter(|record| record.connection == 2));
        // KEPT records stay unchanged; the next connection gets new ones.
        assert_eq!(
            of_second
                .iter()
                .map(|record| record.index)
                .collect::<Vec<_>>(),
            [KEPT + 1, KEPT + 2]
        );
        assert_eq!(
            (of_second[0].state, of_second[1].state),
            (State::Carries, State::Lost)
        );
        assert_eq!(
            (of_second[1].rail.as_str(), of_second[1].peer.as_str()),
            ("c:1", "spark-c")
        );
        assert_eq!(of_second[0].path_mtu_bytes, 4096);
        drop(held);
        let _third = counting.connection(Direction::Send, "spark-b", &[lane("d:1")]);
        let records = read(&counting).records;
        assert_eq!(
            (
                records[0].connection,
                records[0].sequence,
                records[0].counts.bytes
            ),
            (3, 4, 0),
            "{:?}",
            records[0]
        );
        drop(second);
    }

    #[test]
    fn lanes_without_a_free_record_keep_their_own_counters() {
        let counting = Counting::new(true);
        let lanes: Vec<_> = (0..RECORDS + 3).map(|_| lane("a:1")).collect();
        let all = counting.connection(Direction::Send, "b", &lanes);
        for lane in [0, RECORDS - 1, RECORDS, RECORDS + 2] {
            all.record(lane).add(Word::Bytes, 1 + lane as u64);
        }
        let counters = read(&counting);
        assert_eq!((counters.records.len(), counters.not_counted), (RECORDS, 3));
        assert_eq!(
            (
                counters.records[0].counts.bytes,
                counters.records[RECORDS - 1].counts.bytes
            ),
            (1, RECORDS as u64)
        );
        assert_eq!(
            all.record(RECORDS + 2).read(Word::Bytes),
            RECORDS as u64 + 3
        );
        drop(all);
        let _next = counting.connection(Direction::Send, "b", &[lane("a:1")]);
        assert_eq!(
            read(&counting).not_counted,
            3,
            "one of those that are free again"
        );
    }

    #[test]
    fn a_lane_that_is_late_is_not_shown_and_not_lost_until_it_has_worked() {
        let counting = Counting::new(true);
        let late = || CountedLane {
            state: State::Free,
            path_mtu_bytes: 0,
            ..lane("a:1")
        };
        let connection = counting.connection(Direction::Send, "b", &[lane("b:1"), late(), late()]);
        let [_, comes, never] = [0, 1, 2].map(|lane| connection.record(lane));
        let mut outages = Outages::of(&comes);
        outages.begins_late();
        outages.lost(Instant::from_nanos(1));
        assert_eq!(read(&counting).records.len(), 1);
        outages.recovered(4096, Instant::from_nanos(3));
        let shown = &read(&counting).records[1];
        assert_eq!(
            (shown.state, shown.path_mtu_bytes, shown.counts.losses),
            (State::Carries, 4096, 0)
        );
        outages.lost(Instant::from_nanos(4));
        assert_eq!(read(&counting).records[1].counts.losses, 1);
        connection.end();
        assert_eq!(
            read(&counting).records.len(),
            2,
            "the third has never worked"
        );
        assert_eq!(never.read(Word::Losses), 0);
    }

    #[test]
    fn a_lane_missing_from_the_start_is_lost_once_and_recovers_once() {
        let counting = Counting::new(false);
        let without = CountedLane {
            state: State::Lost,
            path_mtu_bytes: 0,
            ..lane("a:1")
        };
        let connection = counting.connection(Direction::Send, "b", &[without]);
        let record = connection.record(0);
        let now = Instant::from_nanos(1);
        let mut outages = Outages::of(&record);
        outages.lost(now);
        outages.lost(now + Duration::from_secs(1));
        assert_eq!(record.read(Word::PathMtu), 0);
        outages.recovered(1024, now + Duration::from_secs(3));
        outages.recovered(4096, now + Duration::from_secs(4));
        let counts = [Word::Losses, Word::Recoveries, Word::LostNs].map(|word| record.read(word));
        assert_eq!(
            (counts, record.read(Word::PathMtu)),
            ([1, 1, 3_000_000_000], 1024)
        );
        record.add(Word::Bytes, u64::MAX);
        record.add(Word::Bytes, 3);
        assert_eq!(
            (
                record.read(Word::Bytes),
                Record::detached().read(Word::Losses)
            ),
            (2, 0)
        );
    }
}
