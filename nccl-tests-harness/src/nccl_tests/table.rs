//! The table that a program of nccl-tests prints.

use anyhow::{Context, Result, ensure};
use serde::Serialize;

/// A line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Row {
    /// The size that the program names.
    pub bytes: u64,
    /// With buffers of their own for what goes in and what comes out.
    pub out_of_place: Half,
    /// With one buffer for both.
    pub in_place: Half,
}

/// One of the two halves of a line.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Half {
    /// Of one operation, in microseconds.
    pub time_us: f64,
    /// Size over time, in GB/s (10^9 bytes).
    pub algbw_gb_s: f64,
    /// What each rank's wire carries, as nccl-tests reckons it, in GB/s.
    pub busbw_gb_s: f64,
    /// Wrong elements; none where the program did not check (`N/A`).
    pub wrong: Option<f64>,
}

/// Reads a table line by line.
#[derive(Debug, Default)]
pub struct Table {
    /// The names of the columns from the first `time` on; none before the heading.
    columns: Option<Vec<String>>,
    /// What was read.
    pub rows: Vec<Row>,
}

impl Table {
    /// Takes in a line of the program's output; whether it was one of the table.
    ///
    /// # Errors
    /// When a line of the table is not as its heading says.
    pub fn read(&mut self, line: &str) -> Result<bool> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(columns) = &self.columns else {
            let first = words.iter().position(|word| *word == "time");
            if let (Some(&"#"), Some(first), true) = (words.first(), first, words.contains(&"busbw")) {
                self.columns = Some(words[first..].iter().map(|word| (*word).to_owned()).collect());
            }
            return Ok(false);
        };
        // Logs of NCCL begin with the host's name, which may be a number but not alone.
        let Some(bytes) = words.first().and_then(|word| word.parse().ok()).filter(|_| line.starts_with(' ')) else {
            return Ok(false);
        };
        // The columns before (redop, root) can be empty, so the line is read from its end.
        ensure!(words.len() > columns.len(), "a line with fewer columns than the table's heading: {line:?}");
        let values = &words[words.len() - columns.len()..];
        let half = |number: usize| half(columns, values, number).with_context(|| format!("the line {line:?}"));
        self.rows.push(Row { bytes, out_of_place: half(0)?, in_place: half(1)? });
        Ok(true)
    }
}

fn half(columns: &[String], values: &[&str], number: usize) -> Result<Half> {
    let value = |name: &str| {
        let mut places = columns.iter().zip(values).filter(|(column, _)| *column == name);
        places.nth(number).map(|(_, value)| *value).with_context(|| format!("there is no column {name}"))
    };
    let numeric = |name: &str| {
        let value = value(name)?;
        value.parse::<f64>().ok().with_context(|| format!("{name} is {value:?}, no number"))
    };
    let wrong = match value("#wrong")? {
        "N/A" => None,
        _ => Some(numeric("#wrong")?),
    };
    Ok(Half { time_us: numeric("time")?, algbw_gb_s: numeric("algbw")?, busbw_gb_s: numeric("busbw")?, wrong })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADING: &str = "\
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         ";

    fn read(text: &str) -> Result<Vec<Row>> {
        let mut table = Table::default();
        for line in text.lines() {
            table.read(line)?;
        }
        Ok(table.rows)
    }

    #[test]
    fn rows_are_read_and_the_rest_is_passed_over() {
        let text = format!(
            "# nThread 1 nGpus 1 minBytes 8\n 12 of something before the heading\n{HEADING}\n\
             host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Spark/0\n\
             \u{20}          8             2     float     sum      -1    13.25    0.00    0.00       0    12.90    0.00    0.00     N/A\n\
             \u{20}   1048576        262144     float                    240.1    4.37    2.18   1e+03    239.0    4.39    2.19       0\n\
             # Out of bounds values : 0 OK\n"
        );
        let rows = read(&text).unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].bytes, rows[0].out_of_place.time_us, rows[0].in_place.wrong), (8, 13.25, None));
        assert_eq!((rows[1].out_of_place.busbw_gb_s, rows[1].out_of_place.wrong), (2.18, Some(1000.0)));
        assert_eq!((rows[1].in_place.algbw_gb_s, rows[1].in_place.wrong), (4.39, Some(0.0)));
    }

    #[test]
    fn a_line_that_does_not_fit_its_heading_is_named() {
        let error = |row: &str| format!("{:#}", read(&format!("{HEADING}\n{row}")).unwrap_err());
        assert!(error("  8  2  float").contains("fewer columns"));
        let text = error("  8  2  float  sum  -1  x  0.00  0.00  0  12.9  0.00  0.00  0");
        assert!(text.contains("time is \"x\""), "{text}");
    }

    #[test]
    fn without_a_heading_there_is_no_table() {
        assert!(read("  8  2  float  sum  -1  13.2  0.00  0.00  0  12.9  0.00  0.00  0").unwrap().is_empty());
    }
}
