//! A run of a collective as JSON, for programs.

use super::messages::RunParameters;
use super::table::{self, Row};
use crate::ranks::device::Network;
use serde::Serialize;

/// JSON of a run. Sizes are in bytes, times in microseconds, bandwidths in GB/s (10^9 bytes a
/// second).
#[derive(Debug, Serialize)]
pub struct Report {
    version: &'static str,
    #[serde(flatten)]
    terms: RunParameters,
    element: &'static str,
    operation: &'static str,
    /// Root of a broadcast; -1 for other collectives.
    root: i32,
    in_place: bool,
    /// `soft` or `verbs`.
    pub fabric: &'static str,
    pub fabric_text: String,
    pub networks: Vec<Network>,
    /// The plugin's log lines about its connections, by rank.
    pub connections: Vec<Vec<String>>,
    pub rows: Vec<Measured>,
    average_busbw_gb_s: Option<f64>,
}

#[derive(Debug, Serialize)]
pub struct Measured {
    #[serde(flatten)]
    pub row: Row,
    /// Description of the first wrong byte of each rank that has one.
    pub first_wrong: Vec<String>,
}

impl Report {
    pub fn new(terms: RunParameters) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            terms,
            element: table::ELEMENT,
            operation: terms.collective.operation(),
            root: terms.collective.root(),
            in_place: terms.collective.in_place(),
            fabric: "",
            fabric_text: String::new(),
            networks: Vec::new(),
            connections: Vec::new(),
            rows: Vec::new(),
            average_busbw_gb_s: None,
        }
    }

    pub fn add(&mut self, row: Row, first_wrong: Vec<String>) {
        self.rows.push(Measured { row, first_wrong });
        let sum: f64 = self.rows.iter().map(|size| size.row.bandwidth.busbw).sum();
        self.average_busbw_gb_s = Some(sum / self.rows.len() as f64);
    }
}
