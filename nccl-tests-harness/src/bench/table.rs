//! The tables of a measurement, line by line as it goes.

use super::figures::{Metric, Place, Point, significant, size};
use std::io::{self, Write};

/// Writes the table of one scenario.
pub struct Table<'a, W> {
    out: &'a mut W,
    metrics: &'a [Metric],
    names: &'a [&'static str],
}

const PLACE: usize = 24;
const VALUE: usize = 9;
const SPREAD: usize = 18;
const RATIO: usize = 7;

impl<'a, W: Write> Table<'a, W> {
    /// Starts it with its head: `title` says what it is, `place` what is in the first column.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn start(
        out: &'a mut W,
        title: &str,
        place: &str,
        metrics: &'a [Metric],
        names: &'a [&'static str],
    ) -> io::Result<Self> {
        let (mut upper, mut lower) = (" ".repeat(PLACE), format!("{place:>PLACE$}"));
        for (at, metric) in metrics.iter().enumerate() {
            let mut under = String::new();
            for name in names {
                under += &format!(" {name:>VALUE$}");
                if at == 0 {
                    under += &format!(" {:>SPREAD$}", "least..most");
                }
            }
            if names.len() == 2 {
                under += &format!(" {:>RATIO$}", "ratio");
            }
            upper += &format!(" |{:^width$}", metric.head(), width = under.len());
            lower += &format!(" |{under}");
        }
        let end = format!(" {:>VALUE$} {:>RATIO$}", "limit", "of it");
        writeln!(out, "#\n# {title}")?;
        writeln!(out, "#{upper} |{:^width$}", "physical", width = end.len())?;
        writeln!(out, "#{lower} |{end}")?;
        out.flush()?;
        Ok(Self { out, metrics, names })
    }

    /// Writes one line.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn row(&mut self, point: &Point) -> io::Result<()> {
        let place = match point.place {
            Place::Size(bytes) => size(bytes),
            Place::Connections(count) => count.to_string(),
            Place::Phase(name) => name.to_owned(),
        };
        let mut line = format!(" {place:>PLACE$}");
        for at in 0..self.metrics.len() {
            line += "  ";
            for side in 0..self.names.len() {
                let series = point.sides.get(side).and_then(|side| side.get(at));
                let median = series.map_or_else(|| "-".to_owned(), |series| significant(series.median()));
                line += &format!(" {median:>VALUE$}");
                if let (0, Some(series)) = (at, series) {
                    let (least, most) = series.spread();
                    line += &format!(" {:>SPREAD$}", format!("{}..{}", significant(least), significant(most)));
                }
            }
            if self.names.len() == 2 {
                let ratio = point.ratio(at).map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
                line += &format!(" {ratio:>RATIO$}");
            }
        }
        let first = point.sides.first().and_then(|ours| ours.first());
        let part = point.limit.zip(first).map(|(limit, series)| percent(series.metric, series.median(), limit));
        let limit = point.limit.map_or_else(|| "-".to_owned(), significant);
        line += &format!("   {limit:>VALUE$} {:>RATIO$}", part.unwrap_or_else(|| "-".to_owned()));
        writeln!(self.out, "{line}")?;
        for (name, wrong) in self.names.iter().zip(point.wrong.iter().flatten()).filter(|(_, wrong)| **wrong > 0) {
            writeln!(self.out, "# {wrong} wrong bytes from {name}: what is above is worth nothing")?;
        }
        self.out.flush()
    }

    /// Writes a remark.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn remark(&mut self, text: &str) -> io::Result<()> {
        writeln!(self.out, "# {text}")?;
        self.out.flush()
    }
}

/// How near ours comes to the limit: a rate as a part of the greatest one, a time as a multiple of the shortest one.
fn percent(metric: Metric, value: f64, limit: f64) -> String {
    match metric {
        Metric::Bandwidth | Metric::Rate => format!("{:.1} %", value / limit * 100.0),
        _ => format!("x {}", significant(value / limit)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Series;
    use super::*;

    #[test]
    fn columns_stand_under_their_heads() {
        let series = |rounds: &[f64]| Series { metric: Metric::Bandwidth, rounds: rounds.to_vec() };
        let mut out = Vec::new();
        let names = ["ours", "theirs"];
        let mut table = Table::start(&mut out, "bandwidth", "bytes", &[Metric::Bandwidth], &names).unwrap();
        let sides = vec![vec![series(&[1.0, 2.0, 3.0])], vec![series(&[4.0, 4.0, 5.0])]];
        let point = Point { place: Place::Size(65536), limit: Some(2.5), sides, wrong: Some(vec![0, 3]) };
        table.row(&point).unwrap();
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[1], "# bandwidth");
        for (word, value) in
            [("bytes", "64K"), ("ours", "2.00"), ("ratio", "0.500"), ("limit", "2.50"), ("of it", "80.0 %")]
        {
            let ends = |line: &str, word: &str| line.find(word).map(|at| at + word.len());
            assert_eq!(ends(lines[3], word), ends(lines[4], value), "{word}:\n{text}");
        }
        assert!(lines[4].contains("1.00..3.00") && lines[5].contains("3 wrong bytes from theirs"), "{text}");
    }
}
