//! The litmus test of LL128. This protocol of NCCL relies on 128-byte lines: all words of a line
//! must become visible together. The last word of a line is its flag.
//!
//! A GPU kernel stores lines into pinned host memory, as NCCL's kernel does. The CPU polls the flag
//! of each line, as NCCL's proxy does, and checks the line when it sees the new flag. After the
//! last flag, the plugin sends the lines. A kernel at the other end waits for the flags, as NCCL's
//! kernel does, and checks each line. A line with a new flag and an old word is torn.
//!
//! This file has the messages between the command and the process that runs the test. `rounds` runs
//! in that process, and `show` prints the result.

pub mod rounds;
pub mod show;

use crate::gpu::lines::Tally;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub seconds: u64,
    /// True if the writer tears every line on purpose, to check that the test finds torn lines.
    pub planted: bool,
}

/// Result of a test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Found {
    /// The GPU that stored the lines.
    pub written_by: String,
    /// The GPU that loaded the received lines.
    pub read_by: String,
    pub seconds: f64,
    pub messages: u64,
    pub sizes_bytes: Vec<usize>,
    /// Lines that the reader waited for, but that did not arrive.
    pub missing: u64,
    pub reads: Vec<Read>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// The CPU's read of a line that the writing GPU stored.
    WriterToCpu,
    /// The receiving GPU's read of a line that the NIC stored: the first load that shows the new
    /// flag.
    NicToReader,
    /// The receiving GPU's next load of the same line. Since 2.17.1, NCCL takes its data from this
    /// load.
    NicToReaderSecondLoad,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Read {
    pub path: Path,
    pub lines: u64,
    /// Lines with a new flag and an old word.
    pub torn: u64,
    /// Indices (0 to 7) of the 16-byte pieces that were old in at least one torn line.
    pub old_pieces: Vec<u8>,
    /// Average over the whole test.
    pub lines_per_s: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Ran(Found),
    Failed { reason: String },
}

#[derive(Debug, Serialize)]
pub struct Verdict {
    pub planted: bool,
    pub outcome: Outcome,
    pub fault: Option<String>,
}

impl Found {
    fn reads(processor: &Tally, reader: &Tally, seconds: f64) -> Vec<Read> {
        let read = |path, lines, torn, pieces: u64| {
            let old_pieces = (0..8).filter(|piece| pieces >> piece & 1 == 1).collect();
            Read {
                path,
                lines,
                torn,
                old_pieces,
                lines_per_s: lines as f64 / seconds,
            }
        };
        vec![
            read(
                Path::WriterToCpu,
                processor.lines,
                processor.torn,
                processor.pieces,
            ),
            read(Path::NicToReader, reader.lines, reader.torn, reader.pieces),
            read(
                Path::NicToReaderSecondLoad,
                reader.lines,
                reader.torn_again,
                reader.pieces_again,
            ),
        ]
    }

    fn torn(&self) -> u64 {
        self.reads
            .iter()
            .filter(|read| read.path.is_relied_on())
            .map(|read| read.torn)
            .sum()
    }
}

impl Path {
    /// Returns true if NCCL takes data from this read. The GPU's load that shows a new flag may
    /// show old data in the rest of the line, because over PCIe each half of a line is a read of
    /// its own. NCCL therefore loads the line a second time, and takes its data from that load
    /// (`recvReduceSendCopy` in src/device/prims_ll128.h, 2.17.1 to 2.30.7).
    fn is_relied_on(self) -> bool {
        self != Self::NicToReader
    }
}

impl Outcome {
    /// Returns the reason and the cure if the run counts as failed.
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
        // A test that checked no line proves nothing.
        found
            .reads
            .iter()
            .any(|read| read.lines == 0)
            .then(|| "no line was checked".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(processor: Tally, reader: Tally) -> Outcome {
        let reads = Found::reads(&processor, &reader, 2.0);
        let written_by = "GPU 0".to_owned();
        let read_by = "GPU 1".to_owned();
        let missing = reader.missing;
        Outcome::Ran(Found {
            written_by,
            read_by,
            seconds: 2.0,
            messages: 1,
            sizes_bytes: vec![128],
            missing,
            reads,
        })
    }

    #[test]
    fn a_torn_line_that_nccl_would_use_is_a_fault_with_its_cure() {
        let whole = Tally {
            lines: 10,
            ..Tally::default()
        };
        assert_eq!(outcome(whole, whole).fault(), None);
        assert_eq!(
            outcome(
                whole,
                Tally {
                    torn: 1,
                    pieces: 0x0f,
                    ..whole
                }
            )
            .fault(),
            None,
            "NCCL loads it again"
        );
        for (processor, reader) in [
            (
                Tally {
                    torn: 1,
                    pieces: 1,
                    ..whole
                },
                whole,
            ),
            (
                whole,
                Tally {
                    torn_again: 1,
                    pieces_again: 0x80,
                    ..whole
                },
            ),
        ] {
            let fault = outcome(processor, reader).fault().unwrap();
            assert!(
                fault.starts_with("TORN lines: 1; ") && fault.contains("NCCL_PROTO=^LL128"),
                "{fault}"
            );
        }
    }

    #[test]
    fn missing_lines_and_a_test_without_lines_are_faults() {
        let whole = Tally {
            lines: 10,
            ..Tally::default()
        };
        let fault = outcome(
            whole,
            Tally {
                lines: 9,
                missing: 1,
                ..whole
            },
        )
        .fault()
        .unwrap();
        assert_eq!(fault, "lines that did not arrive: 1");
        assert!(
            outcome(whole, Tally::default())
                .fault()
                .unwrap()
                .contains("no line")
        );
        assert!(
            outcome(Tally::default(), whole)
                .fault()
                .unwrap()
                .contains("no line")
        );
        assert!(
            Outcome::Failed { reason: "x".into() }
                .fault()
                .unwrap()
                .contains("early: x")
        );
    }

    #[test]
    fn pieces_have_numbers_and_each_read_its_own() {
        let processor = Tally {
            lines: 10,
            torn: 2,
            pieces: 0x03,
            ..Tally::default()
        };
        let reader = Tally {
            lines: 8,
            torn: 1,
            torn_again: 3,
            pieces: 0x80,
            pieces_again: 0x10,
            ..Tally::default()
        };
        let reads = Found::reads(&processor, &reader, 2.0);
        assert_eq!(reads[0].old_pieces, [0, 1]);
        assert_eq!(
            (reads[1].torn, reads[1].old_pieces.as_slice()),
            (1, &[7_u8][..])
        );
        assert_eq!(
            (reads[2].torn, reads[2].old_pieces.as_slice()),
            (3, &[4_u8][..])
        );
        assert!((reads[0].lines_per_s - 5.0).abs() < 1e-9 && reads[2].lines == 8);
    }
}
