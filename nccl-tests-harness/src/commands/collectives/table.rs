//! The table of a collective, for users and scripts that know nccl-tests: the same columns in the
//! same order. nccl-tests has the columns from `time` to `#wrong` twice, for out of place and in
//! place. Here they are there once, for the way in which the collective works. Some columns are
//! narrower, so that a row fits 80 characters. The optional columns come last.

use super::{Bandwidth, Collective};
use crate::output::table::{Table, right};
use serde::Serialize;
use std::io::{self, Write};

/// nccl-tests' name for a byte. Sums wrap around, so the sign does not matter.
pub const ELEMENT: &str = "int8";
const TIME: usize = 7;
const FLOAT: usize = 6;
const OF_NCCL_TESTS: usize = 9;
const COLUMNS: usize = 11;

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Row {
    pub size_bytes: usize,
    /// Number of elements (of one byte), as nccl-tests counts them.
    pub count: usize,
    /// Mean time of an iteration over the ranks.
    pub time_us: f64,
    /// Median time of an iteration, on the rank where this median is longest.
    pub time_p50_us: f64,
    /// Time that 99 % of the iterations do not exceed, on the rank where this time is longest.
    pub time_p99_us: f64,
    #[serde(flatten)]
    pub bandwidth: Bandwidth,
    /// Longest time within the timed iterations in which a rank neither posted nor completed a
    /// message. This time shows the delay that a lost rail or a slow peer causes.
    pub longest_pause_us: f64,
    /// Wrong bytes over all ranks; `None` if the data was not checked.
    pub wrong: Option<u64>,
}

pub struct CollectiveTable<W> {
    table: Table<W>,
    collective: Collective,
    columns: usize,
    busbw_sum: f64,
    rows: u32,
    wrong_rows: u32,
}

impl<W: Write> CollectiveTable<W> {
    pub fn start(out: W, collective: Collective, shows_percentiles: bool) -> io::Result<Self> {
        let place = if collective.in_place() {
            "in-place"
        } else {
            "out-of-place"
        };
        let mut table = Table::new(
            out,
            "  ",
            [10, 11, 6, 6, 6, TIME, FLOAT, FLOAT, 6, TIME, TIME].map(right),
        );
        let columns = if shows_percentiles {
            COLUMNS
        } else {
            OF_NCCL_TESTS
        };
        table.remark("")?;
        table.head(&["", "", "", "", "", &format!("{place:^28}")])?;
        table.head(
            &[
                "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong",
                "median", "99 %",
            ][..columns],
        )?;
        table.head(
            &[
                "(B)",
                "(elements)",
                "",
                "",
                "",
                "(us)",
                "(GB/s)",
                "(GB/s)",
                "",
                "(us)",
                "(us)",
            ][..columns],
        )?;
        Ok(Self {
            table,
            collective,
            columns,
            busbw_sum: 0.0,
            rows: 0,
            wrong_rows: 0,
        })
    }

    pub fn row(&mut self, row: &Row) -> io::Result<()> {
        self.busbw_sum += row.bandwidth.busbw;
        self.rows += 1;
        self.wrong_rows += u32::from(row.wrong.is_some_and(|wrong| wrong > 0));
        let cells = [
            row.size_bytes.to_string(),
            row.count.to_string(),
            ELEMENT.to_owned(),
            self.collective.operation().to_owned(),
            self.collective.root().to_string(),
            float(row.time_us, TIME),
            float(row.bandwidth.algbw, FLOAT),
            float(row.bandwidth.busbw, FLOAT),
            row.wrong
                .map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string()),
            float(row.time_p50_us, TIME),
            float(row.time_p99_us, TIME),
        ];
        self.table.row(&cells[..self.columns])
    }

    pub fn remark(&mut self, text: &str) -> io::Result<()> {
        self.table.remark(text)
    }

    /// Writes the last lines. Returns true if all data was right.
    pub fn finish(&mut self) -> io::Result<bool> {
        let right = self.wrong_rows == 0;
        let average = self.busbw_sum / f64::from(self.rows.max(1));
        let verdict = if right { "OK" } else { "FAILED" };
        self.remark(&format!(
            "{:<20} : {} {verdict}",
            "Out of bounds values", self.wrong_rows
        ))?;
        self.remark(&format!(
            "{:<20} : {}",
            "Avg bus bandwidth",
            six_digits(average)
        ))?;
        Ok(right)
    }
}

/// Formats a number with as many decimals (two at most) as fit the column.
fn float(value: f64, width: usize) -> String {
    (0..=2)
        .rev()
        .map(|decimals| format!("{value:>width$.decimals$}"))
        .find(|text| text.len() <= width)
        .unwrap_or_else(|| format!("{value:>width$.0e}"))
}

/// Formats six significant digits, as nccl-tests prints the average.
fn six_digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let decimals = (5 - value.abs().log10().floor() as i32).clamp(0, 12) as usize;
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(wrong: Option<u64>, busbw: f64) -> Row {
        Row {
            size_bytes: 33_554_432,
            count: 16_777_216,
            time_us: 1645.25,
            time_p50_us: 1640.125,
            time_p99_us: 2000.5,
            bandwidth: Bandwidth {
                algbw: 20.395,
                busbw,
            },
            longest_pause_us: 0.0,
            wrong,
        }
    }

    #[test]
    fn columns_match_nccl_tests_and_fit_80_characters() {
        let mut out = Vec::new();
        let mut table = CollectiveTable::start(&mut out, Collective::AllGather, false).unwrap();
        table.row(&row(Some(0), 10.25)).unwrap();
        table.row(&row(None, 10.5)).unwrap();
        assert!(table.finish().unwrap());
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<_> = text.lines().map(str::trim_end).collect();
        let expected = [
            "#",
            "#                                                          in-place",
            "#     size        count    type   redop    root     time   algbw   busbw  #wrong",
            "#      (B)   (elements)                             (us)  (GB/s)  (GB/s)",
            "  33554432     16777216    int8    none      -1  1645.25   20.39   10.25       0",
            "  33554432     16777216    int8    none      -1  1645.25   20.39   10.50     N/A",
            "# Out of bounds values : 0 OK",
            "# Avg bus bandwidth    : 10.375",
        ];
        assert_eq!(lines, expected);
        assert!(lines.iter().all(|line| line.len() <= 80), "{text}");
    }

    #[test]
    fn percentiles_are_behind_the_columns_of_nccl_tests() {
        let mut out = Vec::new();
        let mut table = CollectiveTable::start(&mut out, Collective::AllGather, true).unwrap();
        table.row(&row(Some(0), 10.25)).unwrap();
        let text = String::from_utf8(out).unwrap();
        let expected = [
            "#     size        count    type   redop    root     time   algbw   busbw  #wrong   median     99 %",
            "#      (B)   (elements)                             (us)  (GB/s)  (GB/s)             (us)     (us)",
            "  33554432     16777216    int8    none      -1  1645.25   20.39   10.25       0  1640.12  2000.50",
        ];
        assert_eq!(text.lines().skip(2).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn wrong_data_is_counted_and_fails() {
        let mut out = Vec::new();
        let mut table = CollectiveTable::start(&mut out, Collective::SendRecv, false).unwrap();
        table.row(&row(Some(12), 1.0)).unwrap();
        table.row(&row(Some(0), 1.0)).unwrap();
        assert!(!table.finish().unwrap());
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.contains("      12\n") && text.contains("# Out of bounds values : 1 FAILED"),
            "{text}"
        );
    }

    #[test]
    fn numbers_lose_decimals_before_they_leave_their_column() {
        assert_eq!(float(2.71999, 6), "  2.72");
        assert_eq!(float(12345.678, 7), "12345.7");
        assert_eq!(float(1_234_567.8, 7), "1234568");
        assert_eq!(float(123_456_789.0, 7), "    1e8");
        assert_eq!(six_digits(25.67), "25.67");
        assert_eq!(six_digits(0.000123456789), "0.000123457");
        assert_eq!(six_digits(1234567.0), "1234567");
    }
}
