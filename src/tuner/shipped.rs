//! The rows that come with the plugin.
//!
//! A row is here if, on the twin of a Spark, it takes at most 1/1.2 of the time of NCCL's own choice at all three scales (unpaced, 0.25, 0.1),
//! nothing that owners have published speaks against it, and groups of collectives are not known to lose more by it than single ones gain. So no row has
//! Simple with fewer than four channels, none has LL128 (until `nccl-spark memory --litmus` has passed on a Spark), and there are rows for two ranks alone.
//! docs/evidence/tuner.md has each row's figures.

use super::table::{Algorithm, Choice, Collective, Protocol, Row};

/// Ranks for which they were measured.
const RANKS: usize = 2;

/// The collective, the size that was measured in KiB (NCCL's count: of the whole buffer), the choice.
const MEASURED: &[(Collective, u64, Protocol, u32)] = &[
    (Collective::AllGather, 64, Protocol::Ll, 2),
    (Collective::AllGather, 128, Protocol::Ll, 2),
    (Collective::AllGather, 512, Protocol::Simple, 4),
    (Collective::AllGather, 1024, Protocol::Simple, 4),
    (Collective::AllGather, 2048, Protocol::Simple, 4),
    (Collective::ReduceScatter, 32, Protocol::Ll, 1),
    (Collective::ReduceScatter, 64, Protocol::Ll, 2),
    (Collective::ReduceScatter, 128, Protocol::Ll, 2),
    (Collective::ReduceScatter, 512, Protocol::Simple, 4),
    (Collective::ReduceScatter, 1024, Protocol::Simple, 4),
    (Collective::ReduceScatter, 2048, Protocol::Simple, 4),
    (Collective::AllReduce, 32, Protocol::Ll, 2),
    (Collective::AllReduce, 64, Protocol::Ll, 2),
    (Collective::AllReduce, 128, Protocol::Ll, 2),
];

/// All of them, by collective and size. A measured size stands for those nearer to it, as a ratio, than to half or twice of it.
pub fn rows() -> Vec<Row> {
    let row = |&(collective, kib, protocol, channels): &(Collective, u64, Protocol, u32)| Row {
        collective,
        ranks: RANKS,
        from_bytes: middle_above(kib * 512) + 1,
        to_bytes: middle_above(kib * 1024),
        choice: Choice { algorithm: Algorithm::Ring, protocol, channels },
    };
    MEASURED.iter().map(row).collect()
}

/// The geometric middle of `bytes` and twice that.
fn middle_above(bytes: u64) -> u64 {
    bytes * 14_142 / 10_000
}

#[cfg(test)]
mod tests {
    use super::super::table::Table;
    use super::*;

    #[test]
    fn the_rows_are_a_table_that_keeps_what_is_promised() {
        let table = Table::new(None, rows()).unwrap();
        assert_eq!(table.rows(), rows(), "they are sorted");
        for (row, (_, kib, ..)) in table.rows().iter().zip(MEASURED) {
            assert!((row.from_bytes..=row.to_bytes).contains(&(kib * 1024)), "{row}");
            match row.choice.protocol {
                Protocol::Simple => assert!(row.choice.channels >= 4, "{row}"),
                Protocol::Ll => {}
                Protocol::Ll128 => panic!("{row}: LL128 was not shown to be safe on a Spark"),
            }
        }
    }
}
