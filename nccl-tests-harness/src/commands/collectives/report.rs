//! A run of a collective as JSON, for programs.

use super::table::Row;
use crate::ranks::device::Network;
use serde::Serialize;

/// A run of a collective. Sizes are in bytes, times in microseconds, bandwidths in GB/s (10^9 bytes a second).
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// This program's version.
    pub version: &'static str,
    /// The collective's name.
    pub collective: &'static str,
    /// How many ranks there are.
    pub ranks: usize,
    /// Connections from each rank to each that it sends to.
    pub channels: usize,
    /// The type of an element.
    pub element: &'static str,
    /// The operation on elements.
    pub operation: &'static str,
    /// The root of a broadcast; -1 elsewhere.
    pub root: i32,
    /// Whether the send buffer is the receive buffer.
    pub in_place: bool,
    /// Iterations before the timed ones.
    pub warmup_iters: u32,
    /// Timed iterations.
    pub iters: u32,
    /// Checked iterations after the timed ones.
    pub check_iters: u32,
    /// The fabric: `soft` or `verbs`.
    pub fabric: &'static str,
    /// The same in words.
    pub fabric_text: String,
    /// The network as NCCL would see it, by rank.
    pub networks: Vec<Network>,
    /// What the plugin logged about its connections, by rank.
    pub connections: Vec<Vec<String>>,
    /// One for each size.
    pub rows: Vec<Measured>,
    /// The mean of all sizes.
    pub average_busbw_gb_s: Option<f64>,
}

/// One size.
#[derive(Debug, Serialize)]
pub struct Measured {
    /// Its row of the table.
    #[serde(flatten)]
    pub row: Row,
    /// A description of the first wrong byte of each rank that has one.
    pub first_wrong: Vec<String>,
}

impl Report {
    /// Adds a size.
    pub fn add(&mut self, row: Row, first_wrong: Vec<String>) {
        self.rows.push(Measured { row, first_wrong });
        let sum: f64 = self.rows.iter().map(|size| size.row.bandwidth.busbw).sum();
        self.average_busbw_gb_s = Some(sum / self.rows.len() as f64);
    }
}
