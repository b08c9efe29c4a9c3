//! The litmus test of LL128: whether lines of 128 bytes become visible as a whole, which NCCL's
//! LL128 protocol relies on.
//!
//! A kernel stores lines into pinned host memory as NCCL's does. The processor polls their flags as
//! NCCL's proxy does, and looks at each line when its flag has come. Once all flags are there the
//! plugin sends the lines. A kernel on the other side waits for their flags as NCCL's does and
//! looks at each line. A line with a new flag and an old word is torn.
//!
//! This file has the messages between the command and the process that runs the test. `rounds` is
//! the process, `show` prints the result.

pub mod rounds;
pub mod show;

use crate::gpu::lines::Tally;
use serde::{Deserialize, Serialize};

/// The order to run the test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Length of the test in seconds.
    pub seconds: u64,
    /// True if the writer tears every line, so that the test must find it.
    pub planted: bool,
}

/// The counts of a test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// The GPU that stored the lines.
    pub written_by: String,
    /// The GPU that waited for them behind the network.
    pub read_by: String,
    /// Length of the test in seconds.
    pub seconds: f64,
    /// Number of messages.
    pub messages: u64,
    /// The sizes of the messages, in bytes.
    pub sizes_bytes: Vec<usize>,
    /// Lines that the reader waited for and that did not arrive.
    pub missing: u64,
    /// The counts of each kind of read.
    pub reads: Vec<Read>,
}

/// A kind of read: the reader, and the writer of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// The processor reads what the writer stored.
    WriterToCpu,
    /// The reader reads what the NIC stored, by the load that showed the flag.
    NicToReader,
    /// The reader reads it by the load after that one, from which NCCL takes the data since 2.17.1.
    NicToReaderSecondLoad,
}

/// The counts of one kind of read.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Read {
    /// The kind.
    pub path: Path,
    /// Lines that were read.
    pub lines: u64,
    /// Lines with a new flag and an old word.
    pub torn: u64,
    /// The 16-byte pieces that were old in any torn line.
    pub old_pieces: Vec<u8>,
    /// Lines per second over the whole test.
    pub lines_per_s: f64,
}

/// The result of the test.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The test ran to its end.
    Ran(Found),
    /// An error ended the test early.
    Failed {
        /// The error.
        reason: String,
    },
}

/// The result in the report.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// Torn lines were planted.
    pub planted: bool,
    /// The result of the test.
    pub outcome: Outcome,
    /// The fault of the run, if it has one.
    pub fault: Option<String>,
}

impl Found {
    /// Returns both tallies as reads.
    fn reads(processor: &Tally, reader: &Tally, seconds: f64) -> Vec<Read> {
        let read = |path, lines, torn, pieces: u64| {
            let old_pieces = (0..8).filter(|piece| pieces >> piece & 1 == 1).collect();
            Read { path, lines, torn, old_pieces, lines_per_s: lines as f64 / seconds }
        };
        vec![
            read(Path::WriterToCpu, processor.lines, processor.torn, processor.pieces),
            read(Path::NicToReader, reader.lines, reader.torn, reader.pieces),
            read(Path::NicToReaderSecondLoad, reader.lines, reader.torn_again, reader.pieces_again),
        ]
    }

    /// Counts the torn lines in the reads that NCCL relies on.
    fn torn(&self) -> u64 {
        self.reads.iter().filter(|read| read.path.is_relied_on()).map(|read| read.torn).sum()
    }
}

impl Path {
    /// True if NCCL takes data from this read. A GPU's load that shows the flag need not have the
    /// rest of the line: over PCIe the two halves of a line are two reads. So NCCL loads the line a
    /// second time, and takes its data from that load (`recvReduceSendCopy` in
    /// src/device/prims_ll128.h, 2.17.1 to 2.30.7).
    fn is_relied_on(self) -> bool {
        self != Self::NicToReader
    }
}

impl Outcome {
    /// Returns the fault of the run and its cure, if it has one.
    pub fn fault(&self) -> Option<String> {
        let found = match self {
            Self::Failed { reason } => return Some(format!("the test ended early: {reason}")),
            Self::Ran(found) => found,
        };
        if found.torn() > 0 {
            return Some(format!(
                "TORN lines: {}; LL128 is not safe on this machine: set NCCL_PROTO=^LL128 on every rank (or \
                 NCCL_SPARK_LL128=0 where this plugin's tuner chooses the protocol)",
                found.torn()
            ));
        }
        if found.missing > 0 {
            return Some(format!("lines that did not arrive: {}", found.missing));
        }
        // A test that checked nothing proves nothing.
        found.reads.iter().any(|read| read.lines == 0).then(|| "no line was checked".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(processor: Tally, reader: Tally) -> Outcome {
        let reads = Found::reads(&processor, &reader, 2.0);
        let (written_by, read_by) = ("GPU 0".to_owned(), "GPU 1".to_owned());
        let missing = reader.missing;
        Outcome::Ran(Found { written_by, read_by, seconds: 2.0, messages: 1, sizes_bytes: vec![128], missing, reads })
    }

    #[test]
    fn a_torn_line_that_nccl_would_use_is_a_fault_with_its_cure() {
        let whole = Tally { lines: 10, ..Tally::default() };
        assert_eq!(outcome(whole, whole).fault(), None);
        assert_eq!(outcome(whole, Tally { torn: 1, pieces: 0x0f, ..whole }).fault(), None, "NCCL loads it again");
        for (processor, reader) in [
            (Tally { torn: 1, pieces: 1, ..whole }, whole),
            (whole, Tally { torn_again: 1, pieces_again: 0x80, ..whole }),
        ] {
            let fault = outcome(processor, reader).fault().unwrap();
            assert!(fault.starts_with("TORN lines: 1; ") && fault.contains("NCCL_PROTO=^LL128"), "{fault}");
        }
    }

    #[test]
    fn missing_lines_and_a_test_without_lines_are_faults() {
        let whole = Tally { lines: 10, ..Tally::default() };
        let fault = outcome(whole, Tally { lines: 9, missing: 1, ..whole }).fault().unwrap();
        assert_eq!(fault, "lines that did not arrive: 1");
        assert!(outcome(whole, Tally::default()).fault().unwrap().contains("no line"));
        assert!(outcome(Tally::default(), whole).fault().unwrap().contains("no line"));
        assert!(Outcome::Failed { reason: "x".into() }.fault().unwrap().contains("early: x"));
    }

    #[test]
    fn pieces_have_numbers_and_each_read_its_own() {
        let processor = Tally { lines: 10, torn: 2, pieces: 0x03, ..Tally::default() };
        let reader = Tally { lines: 8, torn: 1, torn_again: 3, pieces: 0x80, pieces_again: 0x10, ..Tally::default() };
        let reads = Found::reads(&processor, &reader, 2.0);
        assert_eq!(reads[0].old_pieces, [0, 1]);
        assert_eq!((reads[1].torn, reads[1].old_pieces.as_slice()), (1, &[7_u8][..]));
        assert_eq!((reads[2].torn, reads[2].old_pieces.as_slice()), (3, &[4_u8][..]));
        assert!((reads[0].lines_per_s - 5.0).abs() < 1e-9 && reads[2].lines == 8);
    }
}
