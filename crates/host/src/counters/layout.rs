//! Layout of a process's counters, and a parser for readers.
//!
//! A process with connections keeps one memory file: a memfd named [`FILE_NAME`], sealed against
//! changes of its size. Readers find the file among the links of `/proc/PID/fd`, and open and read
//! it there. The file has a header and a fixed number of records, all in 8-byte words of the
//! machine's byte order. A record has the counters of one lane. A lane belongs to one connection,
//! which carries data in one direction.
//!
//! Each word but [`Word::State`] has one writer at a time. The user of the data path writes the
//! lane's counters. The service thread writes losses and recoveries, the state and the path MTU
//! that change with them, and [`Word::Stall`]. The thread that makes or closes the connection
//! writes the rest, and may write the state at the same time as the service thread. There are no
//! locks, so a reader may see a new number of bytes next to an old number of writes. The
//! description of a record's lane changes only while its [`Word::Sequence`] is odd. A reader
//! accepts a record if the sequence was even, and was the same before and after reading the record.
//!
//! The owner of the process can write anything into the file. So [`Counters::parse`] returns no
//! more records than the bytes read contain, and makes every text printable.

/// Name of the memory file; its link in `/proc/PID/fd` is `/memfd:NAME (deleted)`.
pub const FILE_NAME: &str = "nccl-net-spark-counters";
/// The first word: "NNSCOUNT".
pub const MAGIC: u64 = u64::from_le_bytes(*b"NNSCOUNT");
/// Version of this layout. A reader of another version shows no counters, and reports why. A new
/// word in the unused part of a record keeps the version, because older readers ignore it.
pub const VERSION: u64 = 1;
/// Size of the header in words.
pub const HEADER_WORDS: usize = 16;
/// Size of a record in words: six cache lines, so that two connections never share a line.
pub const RECORD_WORDS: usize = 48;
/// Number of records in a file. For example, 72 connections in each direction, with four rails
/// each, need 576 records. All records take memory from the start, [`FILE_BYTES`] in total.
pub const RECORDS: usize = 4096;
/// Size of the file in bytes.
pub const FILE_BYTES: usize = (HEADER_WORDS + RECORDS * RECORD_WORDS) * 8;
/// Size of a rail's name in bytes, padded with zeros; longer names are cut.
pub const RAIL_BYTES: usize = 32;
/// Size of a peer's name in bytes, padded with zeros; longer names are cut.
pub const PEER_BYTES: usize = 64;

/// The words of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum HeaderWord {
    /// [`MAGIC`], written last: until then the header is incomplete.
    Magic = 0,
    /// [`VERSION`].
    Version = 1,
    /// Size of the header in words, [`HEADER_WORDS`].
    HeaderWords = 2,
    /// Size of a record in words, [`RECORD_WORDS`].
    RecordWords = 3,
    /// Number of records that the file has room for, [`RECORDS`].
    Records = 4,
    /// Number of records that have ever been in use. All words of the other records are zero.
    Used = 5,
    /// Number of lanes not counted because all records were in use.
    NotCounted = 6,
    /// Process id, as the process itself sees it. If the process runs in a container, it has
    /// another id outside.
    ProcessId = 7,
}

/// The words of a record; the value of a variant is the index of the word in the record. The words
/// from [`Word::Bytes`] on are counters. While the record describes the same lane, counters only
/// grow, until they wrap around.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Word {
    /// Odd while the description of the lane changes, 0 before the first use. Each change adds two.
    Sequence = 0,
    /// A [`State`].
    State = 1,
    /// 1: this process sends; 2: it receives.
    Direction = 2,
    /// The connection's number in this process, from 1. All lanes of the connection have the same
    /// number.
    Connection = 3,
    /// The rail's payload rate in bits per second; 0 if unknown.
    BitsPerS = 4,
    /// Name of the rail on this host, [`RAIL_BYTES`].
    Rail = 5,
    /// Name of the peer's rail, [`RAIL_BYTES`].
    PeerRail = 9,
    /// Name of the peer's host, without a port, [`PEER_BYTES`].
    Peer = 13,
    /// Path MTU of the lane's newest queue pairs, in bytes; 0 while the lane has had none. Like
    /// [`Word::State`], it changes without [`Word::Sequence`].
    PathMtu = 21,
    /// The connection's present stall ([`stall_word`]), 0 if it has none. Only in the record of the
    /// first lane. Like [`Word::State`], it changes without [`Word::Sequence`].
    Stall = 22,
    /// Number of payload bytes. A sender counts bytes that were acknowledged, a receiver counts
    /// bytes that have arrived.
    Bytes = 24,
    /// Number of shares that carried [`Word::Bytes`]. A share is the part of a message that one
    /// lane carries. It is one RDMA write, or several above the device's size limit, and counts
    /// once in either case.
    Writes = 25,
    /// Number of shares in [`Word::Writes`] that were timed. A sender with one rail times none.
    /// With more rails, it times each share of 4 KiB or more, with two exceptions. Of the messages
    /// of 4 to 16 KiB that it sends whole on one lane, it times only samples, but times all of them
    /// while it tries another lane in order to measure that lane (`flow::striping`). After the loss
    /// of a rail, it does not time shares that are sent again, nor sends whose grant has old keys.
    TimedWrites = 26,
    /// Total duration of the timed writes, in ns. Each duration starts when the send is assigned to
    /// lanes, and ends when the share is confirmed.
    TimedNs = 27,
    /// The longest duration of a timed write, in ns.
    LongestNs = 28,
    /// Number of losses. A lane that does not work at the start counts as lost.
    Losses = 29,
    /// Number of recoveries.
    Recoveries = 30,
    /// Total time for which the lane was lost, in ns. A loss adds its time when the lane recovers.
    LostNs = 31,
    /// Number of times that a request of the connection made no progress for a second or longer.
    /// Only in the record of the first lane.
    Stalls = 32,
    /// Total duration of the stalls, in ns, up to the last reading of the clock in each stall. Only
    /// in the record of the first lane.
    StalledNs = 33,
}

/// State of a record's lane. A change of the state leaves [`Word::Sequence`] as it is, because the
/// record still describes the same lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum State {
    /// The record describes no lane.
    Free = 0,
    /// The lane works.
    Carries = 1,
    /// The lane's rail is lost, or has not worked yet.
    Lost = 2,
    /// The connection was closed. The counters stay until the record is reused.
    Closed = 3,
}

/// Direction of a lane, from the view of the counting process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u64)]
pub enum Direction {
    /// The process sends.
    Send = 1,
    /// The process receives.
    Receive = 2,
}

/// A record as read from a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Index of the record in the file.
    pub index: usize,
    /// [`Word::Sequence`]. Together with the index it identifies one use of the record.
    pub sequence: u64,
    /// State of the lane.
    pub state: State,
    /// Direction of the lane.
    pub direction: Direction,
    /// The connection's number in its process.
    pub connection: u64,
    /// The rail's payload rate in bits per second; 0 if unknown.
    pub bits_per_s: u64,
    /// Name of the rail on its host, in printable ASCII.
    pub rail: String,
    /// Name of the peer's rail, in printable ASCII.
    pub peer_rail: String,
    /// Name of the peer's host, in printable ASCII.
    pub peer: String,
    /// [`Word::PathMtu`]; 0 if unknown.
    pub path_mtu_bytes: u64,
    /// Cause number of the connection's present stall, and its length in seconds so far.
    pub stall: Option<(u8, u64)>,
    /// The counters.
    pub counts: Counts,
}

/// The counters of a record; see [`Word`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// [`Word::Bytes`].
    pub bytes: u64,
    /// [`Word::Writes`].
    pub writes: u64,
    /// [`Word::TimedWrites`].
    pub timed_writes: u64,
    /// [`Word::TimedNs`].
    pub timed_ns: u64,
    /// [`Word::LongestNs`].
    pub longest_ns: u64,
    /// [`Word::Losses`].
    pub losses: u64,
    /// [`Word::Recoveries`].
    pub recoveries: u64,
    /// [`Word::LostNs`].
    pub lost_ns: u64,
    /// [`Word::Stalls`].
    pub stalls: u64,
    /// [`Word::StalledNs`].
    pub stalled_ns: u64,
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counters {
    /// The process id in the process's own namespace.
    pub process_id: u64,
    /// Number of lanes not counted because all records were in use.
    pub not_counted: u64,
    /// Records that describe a lane.
    pub records: Vec<Record>,
    /// Number of records that are not in `records` because they were invalid, or changed while they
    /// were read.
    pub passed_over: usize,
}

/// Reason why a file cannot be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotShown {
    /// The file is shorter than a header.
    #[error("{0} bytes, fewer than a header's")]
    Short(usize),
    /// The first word is not [`MAGIC`].
    #[error("the file has no valid header")]
    NotCounters,
    /// The file has another layout.
    #[error("layout {0}; this program reads layout {VERSION}")]
    OtherVersion(u64),
    /// The header's sizes differ from those of its version.
    #[error("its header contradicts its layout")]
    Inconsistent,
}

impl Counters {
    /// Returns the number of bytes to read of a file with this header: up to the last record that
    /// has been in use, at most [`FILE_BYTES`].
    ///
    /// # Errors
    /// The reason why the file cannot be shown.
    pub fn bytes_in_use(header: &[u8]) -> Result<usize, NotShown> {
        let word = |word: HeaderWord| word_at(header, word as usize);
        let short = NotShown::Short(header.len());
        if word(HeaderWord::Magic).ok_or(short)? != MAGIC {
            return Err(NotShown::NotCounters);
        }
        match word(HeaderWord::Version).ok_or(short)? {
            VERSION => {}
            other => return Err(NotShown::OtherVersion(other)),
        }
        let sizes = [
            HeaderWord::HeaderWords,
            HeaderWord::RecordWords,
            HeaderWord::Records,
        ]
        .map(word);
        let used = word(HeaderWord::Used)
            .and_then(|used| usize::try_from(used).ok())
            .filter(|used| *used <= RECORDS);
        match (
            sizes == [HEADER_WORDS, RECORD_WORDS, RECORDS].map(|size| Some(size as u64)),
            used,
        ) {
            (true, Some(used)) => Ok((HEADER_WORDS + used * RECORD_WORDS) * 8),
            _ => Err(NotShown::Inconsistent),
        }
    }

    /// Parses two successive reads of a file. A record is taken from the first read if both reads
    /// have the same even sequence. The reads may contain fewer records than their header counts:
    /// the reader chooses the length of the reads first, and more records may come into use before
    /// it reads. The records that the reads do not contain are left out.
    ///
    /// # Errors
    /// The reason why the file cannot be shown.
    pub fn parse(first: &[u8], second: &[u8]) -> Result<Self, NotShown> {
        let used = (Self::bytes_in_use(second)?.min(second.len()) / 8).saturating_sub(HEADER_WORDS)
            / RECORD_WORDS;
        let header = |word: HeaderWord| word_at(second, word as usize).unwrap_or(0);
        let mut counters = Self {
            process_id: header(HeaderWord::ProcessId),
            not_counted: header(HeaderWord::NotCounted),
            ..Self::default()
        };
        for index in 0..used {
            let at = HEADER_WORDS + index * RECORD_WORDS;
            let sequence = word_at(first, at + Word::Sequence as usize).unwrap_or(0);
            let state = word_at(first, at + Word::State as usize).unwrap_or(0);
            if sequence == 0 || (sequence.is_multiple_of(2) && state == State::Free as u64) {
                continue;
            }
            let is_settled = sequence.is_multiple_of(2)
                && word_at(second, at + Word::Sequence as usize) == Some(sequence);
            match record(first, index, sequence).filter(|_| is_settled) {
                Some(record) => counters.records.push(record),
                None => counters.passed_over += 1,
            }
        }
        Ok(counters)
    }
}

/// Returns `text` as words, cut to fit and padded with zeros.
pub fn text_words<const WORDS: usize>(text: &str) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(text.as_bytes().chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(padded);
    }
    words
}

/// Returns the word for a stall. The lowest byte is the number of the cause (`flow::stall::Cause`).
/// The bytes above are the length of the stall so far, in seconds.
pub fn stall_word(cause: u8, seconds: u64) -> u64 {
    u64::from(cause) | seconds << 8
}

fn record(bytes: &[u8], index: usize, sequence: u64) -> Option<Record> {
    let at = HEADER_WORDS + index * RECORD_WORDS;
    let word = |word: Word| word_at(bytes, at + word as usize);
    let text = |word: Word, length| {
        Some(printable(
            bytes.get((at + word as usize) * 8..)?.get(..length)?,
        ))
    };
    Some(Record {
        index,
        sequence,
        state: match word(Word::State)? {
            1 => State::Carries,
            2 => State::Lost,
            3 => State::Closed,
            _ => return None,
        },
        direction: match word(Word::Direction)? {
            1 => Direction::Send,
            2 => Direction::Receive,
            _ => return None,
        },
        connection: word(Word::Connection)?,
        bits_per_s: word(Word::BitsPerS)?,
        rail: text(Word::Rail, RAIL_BYTES)?,
        peer_rail: text(Word::PeerRail, RAIL_BYTES)?,
        peer: text(Word::Peer, PEER_BYTES)?,
        path_mtu_bytes: word(Word::PathMtu)?,
        stall: Some(word(Word::Stall)?)
            .filter(|stall| *stall != 0)
            .map(|stall| (stall as u8, stall >> 8)),
        counts: Counts {
            bytes: word(Word::Bytes)?,
            writes: word(Word::Writes)?,
            timed_writes: word(Word::TimedWrites)?,
            timed_ns: word(Word::TimedNs)?,
            longest_ns: word(Word::LongestNs)?,
            losses: word(Word::Losses)?,
            recoveries: word(Word::Recoveries)?,
            lost_ns: word(Word::LostNs)?,
            stalls: word(Word::Stalls)?,
            stalled_ns: word(Word::StalledNs)?,
        },
    })
}

fn word_at(bytes: &[u8], word: usize) -> Option<u64> {
    bytes
        .get(word * 8..)?
        .first_chunk()
        .map(|bytes| u64::from_ne_bytes(*bytes))
}

/// Returns the text up to its first zero byte. Each byte that is not a visible ASCII character
/// becomes `?`, a space too.
fn printable(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    text.iter()
        .map(|byte| {
            if byte.is_ascii_graphic() {
                char::from(*byte)
            } else {
                '?'
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(edit: impl FnOnce(&mut [u64])) -> Vec<u8> {
        let mut words = vec![0; HEADER_WORDS + 2 * RECORD_WORDS];
        words[..6].copy_from_slice(&[
            MAGIC,
            VERSION,
            HEADER_WORDS as u64,
            RECORD_WORDS as u64,
            RECORDS as u64,
            2,
        ]);
        words[HeaderWord::ProcessId as usize] = 77;
        let record = &mut words[HEADER_WORDS..][..RECORD_WORDS];
        record[..5].copy_from_slice(&[2, State::Carries as u64, Direction::Send as u64, 1, 100]);
        record[Word::Rail as usize..][..4].copy_from_slice(&text_words::<4>("rocep1s0f0:1"));
        record[Word::PeerRail as usize..][..4].copy_from_slice(&text_words::<4>("rocep1s0f1:1"));
        record[Word::Peer as usize..][..8].copy_from_slice(&text_words::<8>("spark-b"));
        record[Word::PathMtu as usize] = 4096;
        for (index, word) in (Word::Bytes as usize..=Word::StalledNs as usize).enumerate() {
            record[word] = index as u64 + 10;
        }
        edit(&mut words);
        words.into_iter().flat_map(u64::to_ne_bytes).collect()
    }

    fn parse_both(bytes: &[u8]) -> Counters {
        Counters::parse(bytes, bytes).unwrap()
    }

    #[test]
    fn a_record_survives_writing_and_reading() {
        let counters = parse_both(&file(|_| ()));
        assert_eq!(
            (
                counters.process_id,
                counters.passed_over,
                counters.records.len()
            ),
            (77, 0, 1)
        );
        let record = &counters.records[0];
        assert_eq!(
            (record.rail.as_str(), record.peer_rail.as_str()),
            ("rocep1s0f0:1", "rocep1s0f1:1")
        );
        assert_eq!(
            (record.peer.as_str(), record.bits_per_s, record.connection),
            ("spark-b", 100, 1)
        );
        assert_eq!(record.path_mtu_bytes, 4096);
        let Counts {
            bytes,
            writes,
            timed_writes,
            timed_ns,
            longest_ns,
            ..
        } = record.counts;
        assert_eq!(
            [bytes, writes, timed_writes, timed_ns, longest_ns],
            [10, 11, 12, 13, 14]
        );
        let Counts {
            losses,
            recoveries,
            lost_ns,
            stalls,
            stalled_ns,
            ..
        } = record.counts;
        assert_eq!(
            [losses, recoveries, lost_ns, stalls, stalled_ns],
            [15, 16, 17, 18, 19]
        );
    }

    #[test]
    fn a_record_that_changes_while_it_is_read_is_skipped() {
        let before = file(|_| ());
        let after = file(|words| words[HEADER_WORDS] = 4);
        assert_eq!(
            Counters::parse(&before, &after).unwrap().passed_over,
            1,
            "the sequence moved on"
        );
        // The record may pass to another lane during the second read, after its sequence was read
        // and before its counts are read. So the counts must come from the first read, where
        // `Word::Bytes` is 10.
        let next = file(|words| words[HEADER_WORDS + Word::Bytes as usize] = 9);
        assert_eq!(
            Counters::parse(&before, &next).unwrap().records[0]
                .counts
                .bytes,
            10
        );
        let changing = file(|words| words[HEADER_WORDS] = 3);
        assert_eq!(parse_both(&changing).passed_over, 1, "an odd sequence");
        let free = file(|words| words[HEADER_WORDS + 1] = 0);
        assert_eq!(
            (
                parse_both(&free).passed_over,
                parse_both(&free).records.len()
            ),
            (0, 0)
        );
    }

    #[test]
    fn a_file_that_is_not_counters_is_recognised() {
        assert_eq!(Counters::parse(&[], &[]), Err(NotShown::Short(0)));
        let refusal = |edit: fn(&mut [u64])| Counters::parse(&file(edit), &file(edit)).unwrap_err();
        assert_eq!(refusal(|words| words[0] = 1), NotShown::NotCounters);
        assert_eq!(refusal(|words| words[1] = 9), NotShown::OtherVersion(9));
        assert_eq!(refusal(|words| words[3] = 0), NotShown::Inconsistent);
        assert_eq!(
            refusal(|words| words[5] = RECORDS as u64 + 1),
            NotShown::Inconsistent
        );
        assert_eq!(refusal(|words| words[5] = u64::MAX), NotShown::Inconsistent);
    }

    #[test]
    fn hostile_contents_stay_within_bounds_and_out_of_the_terminal() {
        let text = file(|words| {
            words[HEADER_WORDS + Word::Peer as usize] = u64::from_ne_bytes(*b"\x1b[2J\n\xff\x80 ")
        });
        assert!(
            parse_both(&text).records[0]
                .peer
                .bytes()
                .all(|byte| byte.is_ascii_graphic())
        );
        // The header counts more records than the bytes contain.
        let cut = file(|words| words[5] = 4000);
        assert_eq!(parse_both(&cut).records.len(), 1);
        let odd_states = file(|words| words[HEADER_WORDS + 1] = u64::MAX);
        assert_eq!(
            (
                parse_both(&odd_states).records.len(),
                parse_both(&odd_states).passed_over
            ),
            (0, 1)
        );
        // With random words: no panic, and no more records than there are bytes for.
        for seed in 1..2000_u64 {
            let noise = file(|words| {
                let mut random = seed;
                for word in &mut words[5..] {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    *word = if random >> 62 == 0 {
                        random >> 32
                    } else {
                        *word
                    };
                }
            });
            if let Ok(counters) =
                Counters::parse(&noise, &noise[..noise.len() - (seed % 700) as usize])
            {
                assert!(counters.records.len() + counters.passed_over <= 2);
            }
        }
    }
}
