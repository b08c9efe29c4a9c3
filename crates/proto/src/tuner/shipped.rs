//! The table that ships with the plugin. All rows are for two ranks.
//!
//! A row is here if its choice, compared with NCCL's own, meets the bounds below at every measured
//! size. Each bound was tested at several scales. A scale such as 0.25 is the speed of the software
//! twin of a Spark, as a fraction of a Spark's speed; "unpaced" means without a limit.
//!
//! - Up to 2 MiB: at least 1.2 times as fast unpaced, at 0.25 and at 0.1.
//! - From 2 to 8 MiB: at least 1.03 times as fast at 0.25, 0.1 and 0.05. All_gather of 8 MiB is an
//!   exception: 1.01 at 0.25.
//! - Above 8 MiB: at least 1.03 times as fast at 0.25, and at most 2 % slower at 0.1 and 0.05,
//!   where the wire allows no gain.
//!
//! Where a sweep on a pair of Sparks differs from the twin by more than its 5 %, the pair counts
//! ([`Evidence::Pair`]). It ran NCCL 2.30.7 over its own transport, over one function with MTU 1024
//! (sfxnz/DeepSeek-V4.1-Flash-EXL3-vLLM-2x-DGX-Spark at 37e537e4, `profile/nccl-sweep.json`):
//!
//! - All_reduce with LL: at 30 to 60 KiB no number of channels was better than NCCL's choice, so
//!   the rows begin at 64 KiB: at 60 KiB two channels were as fast as NCCL's choice, and four were
//!   slower. At 80 KiB, four channels took 21 % less time in eager calls and 10 % less after
//!   pauses; two channels took 18 % less and 2 % more. On the twin, two channels are up to 10 %
//!   faster than four at 64 to 96 KiB, and 11 to 14 % at 128 KiB, which the sweep lacks.
//! - All_gather with Simple, 758 KiB to 2 MiB: 13 to 39 % less time, with up to eight channels. On
//!   the twin, four are 15 to 27 % faster than eight.
//!
//! No row is known to slow down a group of collectives by more than it speeds up single ones;
//! therefore no row has Simple with fewer than four channels. No row has LL128, until `nccl-spark
//! memory --litmus` has passed on a Spark; in the sweep it was never the best.
//! docs/evidence/tuner.md has the figures.

use super::table::{Algorithm, Choice, Collective, Protocol, Row};

const RANKS: usize = 2;

/// Evidence for a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// A pair of Sparks, at some of the row's sizes.
    Pair,
    /// The software twin of a Spark alone.
    Twin,
}

/// Collective, sizes in KiB, protocol and channels, and the evidence. Sizes are those of the whole
/// buffer, as NCCL counts them. A row is for sizes above the first figure, up to the second. Each
/// figure is the geometric mean of two neighbouring measured sizes, except the 63 KiB of
/// all_reduce. The measured sizes are powers of two, of all_reduce also 60 and 80 KiB, and above 2
/// MiB also 24 KiB times powers of two.
const MEASURED: &[(Collective, [u64; 2], Protocol, u32, Evidence)] = {
    use Collective::{AllGather, AllReduce, ReduceScatter};
    use Evidence::{Pair, Twin};
    use Protocol::{Ll, Simple};
    &[
        (AllGather, [45, 181], Ll, 2, Twin),
        (AllGather, [362, 5016], Simple, 4, Pair),
        (AllGather, [5016, 28378], Simple, 8, Twin),
        (ReduceScatter, [22, 45], Ll, 1, Twin),
        (ReduceScatter, [45, 181], Ll, 2, Twin),
        (ReduceScatter, [362, 5016], Simple, 4, Twin),
        (ReduceScatter, [5016, 28378], Simple, 8, Twin),
        (AllReduce, [63, 69], Ll, 2, Pair),
        (AllReduce, [69, 101], Ll, 4, Pair),
        (AllReduce, [101, 181], Ll, 2, Twin),
        (AllReduce, [5016, 28378], Simple, 8, Twin),
    ]
};

/// Returns all rows, sorted by collective and size.
pub fn rows() -> Vec<Row> {
    rows_with_evidence().map(|(row, _)| row).collect()
}

/// Returns all rows with their evidence, in the same order.
pub fn rows_with_evidence() -> impl Iterator<Item = (Row, Evidence)> {
    let row = |&(collective, [above_kib, to_kib], protocol, channels, evidence): &(
        Collective,
        [u64; 2],
        Protocol,
        u32,
        Evidence,
    )| {
        let row = Row {
            collective,
            ranks: RANKS,
            from_bytes: above_kib * 1024 + 1,
            to_bytes: to_kib * 1024,
            choice: Choice {
                algorithm: Algorithm::Ring,
                protocol,
                channels,
            },
        };
        (row, evidence)
    };
    MEASURED.iter().map(row)
}

#[cfg(test)]
mod tests {
    use super::super::table::Table;
    use super::*;

    #[test]
    fn the_shipped_rows_form_a_table_that_keeps_its_promises() {
        let table = Table::new(None, rows()).unwrap();
        assert_eq!(table.rows(), rows(), "they are sorted");
        let measured: &[(Collective, &[u64], Protocol, u32)] = &[
            (Collective::AllGather, &[64, 128], Protocol::Ll, 2),
            (
                Collective::AllGather,
                &[512, 1024, 2048, 3072, 4096],
                Protocol::Simple,
                4,
            ),
            (
                Collective::AllGather,
                &[6144, 8192, 12288, 16384, 24576],
                Protocol::Simple,
                8,
            ),
            (Collective::ReduceScatter, &[32], Protocol::Ll, 1),
            (Collective::ReduceScatter, &[64, 128], Protocol::Ll, 2),
            (
                Collective::ReduceScatter,
                &[512, 1024, 2048, 3072, 4096],
                Protocol::Simple,
                4,
            ),
            (
                Collective::ReduceScatter,
                &[6144, 8192, 12288, 16384, 24576],
                Protocol::Simple,
                8,
            ),
            (Collective::AllReduce, &[64], Protocol::Ll, 2),
            (Collective::AllReduce, &[80, 96], Protocol::Ll, 4),
            (Collective::AllReduce, &[128], Protocol::Ll, 2),
            (
                Collective::AllReduce,
                &[6144, 8192, 12288, 16384, 24576],
                Protocol::Simple,
                8,
            ),
        ];
        for (row, (collective, sizes, protocol, channels)) in table.rows().iter().zip(measured) {
            assert_eq!(
                (row.collective, row.choice.protocol, row.choice.channels),
                (*collective, *protocol, *channels)
            );
            assert!(
                sizes
                    .iter()
                    .all(|kib| (row.from_bytes..=row.to_bytes).contains(&(kib * 1024))),
                "{row}"
            );
        }
        let contradicted =
            |row: &&Row| row.collective == Collective::AllReduce && row.from_bytes < 63 << 10;
        assert_eq!(
            table.rows().iter().find(contradicted),
            None,
            "NCCL's choice is faster on a pair of Sparks"
        );
        for row in table.rows() {
            match row.choice.protocol {
                Protocol::Simple => assert!(row.choice.channels >= 4, "{row}"),
                Protocol::Ll => {}
                Protocol::Ll128 => panic!("{row}: LL128 was not shown to be safe on a Spark"),
            }
        }
    }
}
