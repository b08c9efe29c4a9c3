//! The litmus test's part of the output.

use super::{Found, Outcome, Path, Read};
use crate::output::table::{Table, left, right};
use std::io::{self, Write};

/// Writes the test's result. `is_soft` is true over the software fabric.
pub fn write(
    out: &mut impl Write,
    outcome: &Outcome,
    planted: bool,
    is_soft: bool,
) -> io::Result<()> {
    let mut table = Table::new(
        out,
        "  ",
        [left(24), right(14), right(10), right(12), right(8)],
    );
    table.remark("")?;
    if planted {
        table.remark("LL128: the writer tears lines on purpose (--litmus-plant)")?;
    }
    match outcome {
        Outcome::Failed { reason } => reason
            .lines()
            .try_for_each(|text| table.remark(&format!("LL128: ended early: {text}"))),
        Outcome::Ran(found) => rows(&mut table, found, is_soft),
    }
}

fn rows(table: &mut Table<impl Write>, found: &Found, is_soft: bool) -> io::Result<()> {
    let Found {
        written_by,
        read_by,
        messages,
        seconds,
        ..
    } = found;
    let smallest = found.sizes_bytes.iter().min();
    let largest = found.sizes_bytes.iter().max();
    let smallest = smallest.copied().unwrap_or_default();
    let largest = largest.copied().unwrap_or_default();
    table.remark(&format!(
        "LL128: {messages} messages of {smallest} to {largest} bytes, written by {written_by}, read by {read_by}"
    ))?;
    if is_soft {
        table.remark("LL128: the software fabric stores 8-byte words in order: its rows test the tool, not a NIC")?;
    }
    table.row(&["# LL128", "lines", "torn", "lines/s", "s"])?;
    for read in &found.reads {
        let lines = read.lines.to_string();
        let torn = read.torn.to_string();
        table.row(&[
            name(read.path).to_owned(),
            lines,
            torn,
            format!("{:.0}", read.lines_per_s),
            format!("{seconds:.1}"),
        ])?;
    }
    for read in found.reads.iter().filter(|read| read.torn > 0) {
        let note = if read.path.is_relied_on() {
            ""
        } else {
            "; NCCL does not use this load"
        };
        table.remark(&format!("{}: {}{note}", name(read.path), torn(read)))?;
    }
    if found.missing > 0 {
        let missing = found.missing;
        table.remark(&format!(
            "LL128: lines that did not arrive at {read_by}: {missing}; the test ended early"
        ))?;
    }
    Ok(())
}

fn name(path: Path) -> &'static str {
    match path {
        Path::WriterToCpu => "GPU to CPU",
        Path::NicToReader => "NIC to GPU",
        Path::NicToReaderSecondLoad => "NIC to GPU, second load",
    }
}

fn torn(read: &Read) -> String {
    let pieces = read
        .old_pieces
        .iter()
        .map(u8::to_string)
        .collect::<Vec<_>>()
        .join(" ");
    format!(
        "{} of {} lines TORN: new flag, old data in 16-byte pieces {pieces} of 0 to 7",
        read.torn, read.lines
    )
}

#[cfg(test)]
mod tests {
    use super::super::Found;
    use super::*;
    use crate::gpu::lines::Tally;

    fn found(reader: Tally) -> Found {
        let processor = Tally {
            lines: 3000,
            ..Tally::default()
        };
        Found {
            written_by: "GPU 0".into(),
            read_by: "GPU 1".into(),
            seconds: 1.5,
            messages: 40,
            sizes_bytes: vec![128, 614_400],
            missing: reader.missing,
            reads: Found::reads(&processor, &reader, 1.5),
        }
    }

    fn text(outcome: &Outcome, planted: bool, is_soft: bool) -> String {
        let mut out = Vec::new();
        write(&mut out, outcome, planted, is_soft).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn rows_count_lines_and_torn_lines_by_reader() {
        let reader = Tally {
            lines: 2999,
            torn: 2,
            missing: 1,
            pieces: 0x0f,
            ..Tally::default()
        };
        let text = text(&Outcome::Ran(found(reader)), false, false);
        let expected = [
            "#",
            "# LL128: 40 messages of 128 to 614400 bytes, written by GPU 0, read by GPU 1",
            "# LL128                            lines        torn       lines/s         s",
            "GPU to CPU                          3000           0          2000       1.5",
            "NIC to GPU                          2999           2          1999       1.5",
            "NIC to GPU, second load             2999           0          1999       1.5",
            "# NIC to GPU: 2 of 2999 lines TORN: new flag, old data in 16-byte pieces 0 1 2 3 of 0 to 7; NCCL does not use this load",
            "# LL128: lines that did not arrive at GPU 1: 1; the test ended early",
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_result_states_the_limits_of_the_test() {
        let found = found(Tally {
            lines: 3000,
            ..Tally::default()
        });
        let real = text(&Outcome::Ran(found.clone()), false, false);
        assert!(
            !real.contains("test the tool") && !real.contains("purpose"),
            "{real}"
        );
        let shown = text(&Outcome::Ran(found), true, true);
        assert!(
            shown.contains("test the tool, not a NIC") && shown.contains("on purpose"),
            "{shown}"
        );
        let early = text(
            &Outcome::Failed {
                reason: "a\nb".into(),
            },
            false,
            false,
        );
        assert!(
            early.ends_with("ended early: a\n# LL128: ended early: b\n"),
            "{early}"
        );
    }
}
