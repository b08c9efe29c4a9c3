//! Reads the table that a program of nccl-tests prints. Lines of NCCL's log may interrupt its rows.
//!
//! Rank 0 prints a row in pieces: the columns from size to root before it measures, each half (out
//! of place, in place) when it is measured, then the newline (src/util.cu and src/common.cu of
//! nccl-tests 2.19.6). The stream is flushed only at newlines, and NCCL's log goes to the same
//! stream. So after a piece, a log line can follow on the same line. A WARN begins with a newline
//! (debug.cc), so it follows on the next line. The row continues after the newline of the log line.
//!
//! Lines of standard error, and of other ranks with their own streams, can come between the lines
//! of rank 0. Across hosts, mpirun copies the output of each rank in blocks of at most 4096 bytes.
//! A block can end inside a line, and a block of another rank can follow. So a row can begin after
//! half a log line.

use super::log_text::LogText;
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Row {
    pub bytes: u64,
    /// Measured with separate buffers for input and output.
    pub out_of_place: Half,
    /// Measured with one buffer for input and output.
    pub in_place: Half,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Half {
    /// Time of one operation.
    pub time_us: f64,
    /// Size over time, in 10^9 bytes per second.
    pub algbw_gb_s: f64,
    /// Bandwidth on each rank's wire, as nccl-tests computes it.
    pub busbw_gb_s: f64,
    /// Number of wrong elements; `None` if the program did not check (`N/A`).
    pub wrong: Option<f64>,
}

#[derive(Debug, PartialEq)]
pub enum Read {
    /// The line completed a row. This is the row's whole text, without log lines.
    Row(String),
    /// The line began or continued a row.
    Part,
    Other,
}

#[derive(Debug, Default)]
pub struct PrintedTable {
    heading: Option<Heading>,
    log: LogText,
    /// The text of the incomplete row so far, without log lines.
    begun: Option<String>,
    pub rows: Vec<Row>,
}

#[derive(Debug)]
struct Heading {
    /// Columns from the size to the root.
    parameters: Vec<String>,
    /// Columns from the first `time` on.
    values: Vec<String>,
}

enum Fit<'a> {
    /// Not a row.
    No,
    /// Begins as a row, but continues differently.
    Wrong,
    /// Beginning of a row. `has_parameters` is true if the beginning has all columns before the
    /// time.
    Begun { has_parameters: bool },
    /// A row with as many columns as the heading. These are its words from the first `time` on.
    Whole(Vec<&'a str>),
}

impl PrintedTable {
    /// Reads a line of the program's output, which may contain NCCL's log. Fails when a row does
    /// not fit the heading, or a row begins before the previous one is complete.
    pub fn read(&mut self, line: &str) -> Result<Read> {
        let (own, log) = self.log.split(line);
        let Some(heading) = &self.heading else {
            self.heading = Heading::read(own);
            return Ok(Read::Other);
        };
        if starts_row(own) {
            self.finish()?;
        }
        let begun = self.begun.as_deref();
        let read = heading.extend(begun, own, false)?;
        // A row may also begin or continue after half a log line.
        let behind_log = |text| heading.extend(begun, text, true).ok().flatten();
        let read = read.or_else(|| gaps(log?).find_map(behind_log));
        match read {
            None => Ok(Read::Other),
            Some((text, None)) => {
                self.begun = Some(text);
                Ok(Read::Part)
            }
            Some((text, Some(row))) => {
                self.begun = None;
                self.rows.push(row);
                Ok(Read::Row(text))
            }
        }
    }

    /// Checks that no row is incomplete: at the end of the output, or before another row begins.
    pub fn finish(&self) -> Result<()> {
        let Some(begun) = &self.begun else {
            return Ok(());
        };
        let size = begun.split_whitespace().next().unwrap_or_default();
        bail!(
            "the table's row of {size} bytes was never completed; the program printed only {begun:?}"
        )
    }
}

impl Heading {
    fn read(line: &str) -> Option<Self> {
        let names: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let first = names.iter().position(|name| name == "time")?;
        if names[0] != "#" || !names.iter().any(|name| name == "busbw") {
            return None;
        }
        let mut values = names[first..].to_vec();
        // The column `timestamp` (option -S 1) has two words: a date and a time of day.
        if values.last().is_some_and(|name| name == "timestamp") {
            values.push("clock".to_owned());
        }
        Some(Self {
            parameters: names[1..first].to_vec(),
            values,
        })
    }

    /// Reads a text that may be a row, begin a row, or continue the row in `begun`. Returns the row
    /// so far, and its values if it is complete. Text from a log line (`is_log`) counts only if it
    /// begins a row with all columns before the time, or completes a row.
    fn extend(
        &self,
        begun: Option<&str>,
        text: &str,
        is_log: bool,
    ) -> Result<Option<(String, Option<Row>)>> {
        let joined = format!("{}{text}", begun.unwrap_or_default());
        // Rows are indented. Text without an indent may be a row that was cut within its indent.
        let is_indented = text.starts_with(' ');
        let is_blank = text.trim().is_empty();
        let is_first = begun.is_none() && !is_log;
        match self.fit(&joined) {
            Fit::Wrong if is_first && is_indented => {
                bail!("a row of the table does not fit its heading: {text:?}")
            }
            Fit::Begun { has_parameters } => {
                let is_part = match (begun, is_log) {
                    (None, false) => has_parameters || (is_indented && !is_blank),
                    (None, true) => has_parameters,
                    (Some(_), false) => !is_blank,
                    (Some(_), true) => false,
                };
                Ok(is_part.then_some((joined, None)))
            }
            Fit::Whole(values) => match self.row(&joined, &values) {
                Err(error) if is_first => Err(error),
                // The right number of words is not enough: the values of a row must be numbers.
                row => Ok(row.ok().map(|row| (joined.clone(), Some(row)))),
            },
            Fit::No | Fit::Wrong => Ok(None),
        }
    }

    fn fit<'a>(&self, text: &'a str) -> Fit<'a> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let mut at = 0;
        for name in &self.parameters {
            let Some(word) = words.get(at) else {
                return Fit::Begun {
                    has_parameters: false,
                };
            };
            // The last word may be cut: `-` is the beginning of `-1`.
            let is_integer = word.parse::<i64>().is_ok() || (*word == "-" && at + 1 == words.len());
            match name.as_str() {
                "type" if is_integer => return Fit::No,
                // Older programs leave this column empty if there is no operation.
                "redop" if is_integer => continue,
                "type" | "redop" => {}
                "root" if !is_integer => return Fit::Wrong,
                _ if !is_integer => return Fit::No,
                _ => {}
            }
            at += 1;
        }
        let values = &words[at..];
        match values.len() {
            count if count == self.values.len() => Fit::Whole(values.to_vec()),
            count if count < self.values.len() && values.iter().all(|word| is_value(word)) => {
                Fit::Begun {
                    has_parameters: true,
                }
            }
            _ => Fit::Wrong,
        }
    }

    fn row(&self, text: &str, values: &[&str]) -> Result<Row> {
        let bytes = text
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok());
        let half = |number: usize| {
            half(&self.values, values, number).with_context(|| format!("the row {text:?}"))
        };
        Ok(Row {
            bytes: bytes.with_context(|| format!("no size in the row {text:?}"))?,
            out_of_place: half(0)?,
            in_place: half(1)?,
        })
    }
}

/// Returns true if a line is indented and begins with a size, a count and a type.
fn starts_row(line: &str) -> bool {
    let mut words = line
        .split_whitespace()
        .map(|word| word.parse::<u64>().is_ok());
    line.starts_with(' ')
        && [words.next(), words.next(), words.next()] == [Some(true), Some(true), Some(false)]
}

/// For each gap of two or more spaces, returns the gap and all text after it. Every piece of a row
/// begins with such a gap.
fn gaps(text: &str) -> impl Iterator<Item = &str> {
    let starts = text
        .match_indices("  ")
        .map(|(at, _)| at)
        .filter(|at| !text[..*at].ends_with(' '));
    starts.map(|at| &text[at..])
}

/// Returns true for a number, `N/A`, a part of a timestamp, or the beginning of one of these.
fn is_value(word: &str) -> bool {
    let number = word.trim_end_matches(['e', '+', '-', '.']);
    "N/A".starts_with(word)
        || number.parse::<f64>().is_ok()
        || word.bytes().all(|byte| b"0123456789-:".contains(&byte))
}

fn half(columns: &[String], values: &[&str], number: usize) -> Result<Half> {
    let value = |name: &str| {
        let mut places = columns
            .iter()
            .zip(values)
            .filter(|(column, _)| *column == name);
        places
            .nth(number)
            .map(|(_, value)| *value)
            .with_context(|| format!("there is no column {name}"))
    };
    let numeric = |name: &str| {
        let value = value(name)?;
        value
            .parse::<f64>()
            .ok()
            .with_context(|| format!("{name} is {value:?}, no number"))
    };
    let wrong = match value("#wrong")? {
        "N/A" => None,
        _ => Some(numeric("#wrong")?),
    };
    let time_us = numeric("time")?;
    ensure!(time_us >= 0.0 || time_us.is_nan(), "time is {time_us}");
    Ok(Half {
        time_us,
        algbw_gb_s: numeric("algbw")?,
        busbw_gb_s: numeric("busbw")?,
        wrong,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADING: &str = "\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ";

    const PARAMETERS: &str = "     8388608       2097152     float     sum      -1";
    const OUT: &str = "  1.2e+06    6.80    6.80     N/A";
    const IN: &str = "  1230.25    6.82    6.82       0";
    const WARN: &str = "[2026-11-21 03:45:10] vm:12:34 [0] net.cc:120 NCCL WARN NET/Spark : rail rocep1s0f0:1 lost";
    const INFO: &str = "vm:12:34 [0] NCCL INFO NET/Spark: connected with spark-2:4711";
    const OTHER_RANK: &str =
        "vm:13:35 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Spark/0";

    fn read_all(text: &str) -> Result<(Vec<Row>, Vec<Read>)> {
        let mut table = PrintedTable::default();
        for line in HEADING.lines().chain([INFO, OTHER_RANK]) {
            assert_eq!(table.read(line)?, Read::Other);
        }
        let reads = text
            .lines()
            .map(|line| table.read(line))
            .collect::<Result<Vec<_>>>()?;
        table.finish()?;
        Ok((table.rows, reads))
    }

    /// Checks that `text` is read as one row despite other lines inside it.
    fn assert_one_row(text: &str) {
        let (rows, reads) = read_all(text).unwrap_or_else(|error| panic!("{error:#} in\n{text}"));
        let half = |time_us, gb_s, wrong| Half {
            time_us,
            algbw_gb_s: gb_s,
            busbw_gb_s: gb_s,
            wrong,
        };
        let row = Row {
            bytes: 8_388_608,
            out_of_place: half(1.2e6, 6.80, None),
            in_place: half(1230.25, 6.82, Some(0.0)),
        };
        assert_eq!(rows, [row], "{text}");
        let whole = format!("{PARAMETERS}{OUT}{IN}");
        let shown = |read| match read {
            Read::Row(shown) => Some(shown.trim_start().to_owned()),
            Read::Part | Read::Other => None,
        };
        assert_eq!(
            reads.into_iter().filter_map(shown).collect::<Vec<_>>(),
            [whole.trim_start()],
            "{text}"
        );
    }

    #[test]
    fn rows_are_read_and_other_lines_are_skipped() {
        let text = "\
host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Spark/0
           8             2     float     sum      -1    13.25    0.00    0.00       0    12.90    0.00    0.00     N/A
     1048576        262144     float              -1    240.1    4.37    2.18   1e+03    239.0    4.39    2.19       0
  12 of something
# Out of bounds values : 0 OK
";
        let (rows, _) = read_all(text).unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!(
            (
                rows[0].bytes,
                rows[0].out_of_place.time_us,
                rows[0].in_place.wrong
            ),
            (8, 13.25, None)
        );
        assert_eq!(
            (rows[1].out_of_place.busbw_gb_s, rows[1].out_of_place.wrong),
            (2.18, Some(1000.0))
        );
        assert_eq!(
            (rows[1].in_place.algbw_gb_s, rows[1].in_place.wrong),
            (4.39, Some(0.0))
        );
        let mut table = PrintedTable::default();
        assert_eq!(
            table.read(" 12 of something before the heading").unwrap(),
            Read::Other
        );
    }

    #[test]
    fn a_warning_in_the_middle_of_a_row_is_left_out() {
        assert_one_row(&format!("{PARAMETERS}\n{WARN}\n{OUT}{IN}"));
        assert_one_row(&format!("{PARAMETERS}{OUT}\n{WARN}\n{IN}"));
    }

    #[test]
    fn a_line_of_the_log_behind_a_piece_of_a_row_is_left_out() {
        assert_one_row(&format!("{PARAMETERS}{INFO}\n{OUT}{IN}"));
        assert_one_row(&format!("{PARAMETERS}{WARN}\n{OUT}{IN}"));
        assert_one_row(&format!("{PARAMETERS}{OUT}{INFO}\n{IN}"));
    }

    #[test]
    fn several_lines_between_the_pieces_are_left_out() {
        let lines = format!(
            "{WARN}\n\n{WARN}\n{OTHER_RANK}\nlibibverbs: a line of standard error with 8 words"
        );
        assert_one_row(&format!(
            "{PARAMETERS}\n{lines}\n{OUT}{INFO}\n{lines}\n{IN}"
        ));
        assert_one_row(&format!(
            "{PARAMETERS}{INFO}\n{INFO}\n{OUT}\n{lines}\n{IN}\n\n"
        ));
    }

    #[test]
    fn a_line_of_the_log_at_the_end_of_a_row_is_left_out() {
        assert_one_row(&format!("{PARAMETERS}{OUT}{IN}{INFO}\n\n"));
        assert_one_row(&format!("{PARAMETERS}{OUT}{IN}\n{WARN}\n\n"));
        let (rows, _) = read_all(&format!(
            "{PARAMETERS}{IN}{OUT}{INFO}\n\n{PARAMETERS}{IN}{IN}"
        ))
        .unwrap();
        assert_eq!(
            (rows.len(), rows[0].in_place.wrong, rows[1].in_place.wrong),
            (2, None, Some(0.0))
        );
    }

    #[test]
    fn a_row_after_half_a_line_of_another_rank_is_read() {
        let half = "vm:13:35 [0] NCCL INFO Chan";
        assert_one_row(&format!(
            "{half}{PARAMETERS}\n{WARN}\nnel 00/0 : 0[0] -> 1[0]\n{OUT}{IN}"
        ));
        assert_one_row(&format!(
            "{half}{PARAMETERS}{OUT}{IN}\nnel 00/0 : 0[0] -> 1[0]"
        ));
        assert_one_row(&format!("{PARAMETERS}\n{WARN}\n{half}{OUT}{IN}"));
    }

    #[test]
    fn a_row_cut_anywhere_is_joined_again() {
        let row = format!("{PARAMETERS}{OUT}{IN}");
        for cut in 1..row.len() {
            assert_one_row(&format!("{}{OTHER_RANK}\n{}", &row[..cut], &row[cut..]));
        }
    }

    #[test]
    fn a_row_that_is_never_completed_is_named() {
        let error = |text: &str| format!("{:#}", read_all(text).unwrap_err());
        let next = "    16777216       4194304     float     sum      -1";
        for text in [
            PARAMETERS.to_owned(),
            format!("{PARAMETERS}{OUT}\n{WARN}"),
            format!("{PARAMETERS}\n{WARN}\n{next}{OUT}{IN}"),
            format!("{PARAMETERS}{INFO}\n# Out of bounds values : 0 OK\n"),
        ] {
            assert!(
                error(&text).contains("row of 8388608 bytes was never completed"),
                "{}",
                error(&text)
            );
        }
        // The next row reveals the incomplete row before the program has ended.
        let mut table = PrintedTable::default();
        for line in HEADING.lines().chain([PARAMETERS, WARN]) {
            table.read(line).unwrap();
        }
        assert!(table.read(next).is_err());
    }

    #[test]
    fn a_row_that_does_not_fit_its_heading_is_named() {
        let error = |row: &str| format!("{:#}", read_all(row).unwrap_err());
        assert!(error("  8  2  float").contains("never completed"));
        let text = error("  8  2  float  sum  -1  x  0.00  0.00  0  12.9  0.00  0.00  0");
        assert!(text.contains("time is \"x\""), "{text}");
        for row in [
            "  8  2  float  sum  first",
            "  8  2  float  sum  -1  x",
            &format!("{PARAMETERS}{OUT}{IN}  1"),
        ] {
            assert!(error(row).contains("does not fit its heading"), "{row}");
        }
        assert!(
            error(&format!("  8  2  float  sum  -1  -3.0  0  0  0{OUT}")).contains("time is -3")
        );
    }

    #[test]
    fn a_timestamp_is_two_words() {
        let mut table = PrintedTable::default();
        let heading = format!("{}  timestamp", HEADING.lines().nth(1).unwrap().trim_end());
        table.read(&heading).unwrap();
        table
            .read(&format!("{PARAMETERS}{OUT}{IN}  2026-11-21 03:45:10"))
            .unwrap();
        assert_eq!(
            (
                table.rows[0].out_of_place.time_us,
                table.rows[0].in_place.wrong
            ),
            (1.2e6, Some(0.0))
        );
    }

    #[test]
    fn without_a_heading_there_is_no_table() {
        let mut table = PrintedTable::default();
        let row = format!("{PARAMETERS}{OUT}{IN}");
        assert!(table.read(&row).unwrap() == Read::Other && table.rows.is_empty());
    }
}
