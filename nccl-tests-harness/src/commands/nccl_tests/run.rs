//! Runs a program of nccl-tests once: reads its table, and finds the network in NCCL's log.

use super::mpirun;
use super::options::Call;
use super::printed_table::{PrintedTable, Read, Row};
use crate::scene::Scene;
use crate::scene::network::Used;
use anyhow::{Result, ensure};
use std::path::Path;

/// Runs `call`, and returns the rows of its table (1 or more). `own` is this program's file. `who`
/// names the run in the user's log. `on_line` gets each line that the ranks print, and the text to
/// show for it, if any: a complete row of the table, or a line of the program outside the table.
/// Fails when the program does not start, fails, or prints no complete table.
pub fn run(
    call: &Call<'_>,
    scene: &Scene,
    environment: &[(String, String)],
    (own, who): (&Path, &str),
    used: &mut Used,
    mut on_line: impl FnMut(&str, Option<&str>) -> Result<()>,
) -> Result<Vec<Row>> {
    let mut table = PrintedTable::default();
    let mut last = String::new();
    let end = mpirun::run(call, &scene.fabric, environment, own, |line| {
        scene.log(who, line.trim_end())?;
        let is_log = used.note(line);
        let row = match table.read(line)? {
            Read::Row(row) => Some(row),
            Read::Part => None,
            Read::Other if is_log => None,
            Read::Other => {
                if !line.trim().is_empty() {
                    line.trim_end().clone_into(&mut last);
                }
                return on_line(line, Some(line));
            }
        };
        on_line(line, row.as_deref())
    })?;
    mpirun::check(end, call, used.complaints(), &last)?;
    table.finish()?;
    ensure!(
        !table.rows.is_empty(),
        "the program printed no table; its last line: {last}"
    );
    Ok(table.rows)
}
