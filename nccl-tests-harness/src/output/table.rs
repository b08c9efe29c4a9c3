//! Tables that are written line by line: cells in columns of fixed width, and remarks, which are
//! lines that begin with `#`.

use std::io::{self, Write};

/// A column of a table. A cell that is wider than the column moves the rest of its line to the
/// right.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    width: usize,
    is_left: bool,
}

/// Returns a left-aligned column, for text.
pub const fn left(width: usize) -> Column {
    Column {
        width,
        is_left: true,
    }
}

/// Returns a right-aligned column, for numbers.
pub const fn right(width: usize) -> Column {
    Column {
        width,
        is_left: false,
    }
}

/// Writes a table.
pub struct Table<W> {
    out: W,
    gap: &'static str,
    columns: Vec<Column>,
}

impl<W: Write> Table<W> {
    /// Makes a table with `gap` between columns. [`Table::head`] replaces the first character of
    /// its line by `#`, so the name of the first column must not begin there.
    pub fn new(out: W, gap: &'static str, columns: impl Into<Vec<Column>>) -> Self {
        Self {
            out,
            gap,
            columns: columns.into(),
        }
    }

    /// Writes a line of column names.
    pub fn head(&mut self, names: &[impl AsRef<str>]) -> io::Result<()> {
        let line = self.line(names);
        writeln!(self.out, "#{}", line.get(1..).unwrap_or_default())?;
        self.out.flush()
    }

    /// Writes a line, which may have fewer cells than there are columns.
    pub fn row(&mut self, cells: &[impl AsRef<str>]) -> io::Result<()> {
        let line = self.line(cells);
        writeln!(self.out, "{line}")?;
        self.out.flush()
    }

    /// Writes a remark; an empty one separates other lines.
    pub fn remark(&mut self, text: &str) -> io::Result<()> {
        match text {
            "" => writeln!(self.out, "#")?,
            _ => writeln!(self.out, "# {text}")?,
        }
        self.out.flush()
    }

    fn line(&self, cells: &[impl AsRef<str>]) -> String {
        let cells =
            cells.iter().map(AsRef::as_ref).zip(&self.columns).map(
                |(cell, column)| match *column {
                    Column {
                        width,
                        is_left: true,
                    } => format!("{cell:<width$}"),
                    Column {
                        width,
                        is_left: false,
                    } => format!("{cell:>width$}"),
                },
            );
        cells.collect::<Vec<_>>().join(self.gap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_in_columns_and_names_above_them() {
        let mut out = Vec::new();
        let mut table = Table::new(&mut out, "  ", [right(6), left(3), right(4)]);
        table.remark("").unwrap();
        table.head(&["size", "who", "us"]).unwrap();
        table.row(&["8", "a", "1.5"]).unwrap();
        table.row(&["16", "b"]).unwrap();
        table.remark("done").unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "#\n# size  who    us\n     8  a     1.5\n    16  b  \n# done\n"
        );
    }
}
