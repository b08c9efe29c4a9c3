//! Makes rows of the tuner's table from the choices at measured sizes. Pure arithmetic on sizes.

use proto::tuner::table::{Choice, Collective, Fingerprint, Row, Table};

/// Returns the rows for `sizes`: sizes in bytes with their choices. The sizes must be above 0 and
/// ascending. A size without a choice gets no row.
///
/// A size's row begins just above the geometric mean of this size and the next smaller size. The
/// row ends at the geometric mean of this size and the next larger size. For the first size, half
/// of it stands in for the next smaller size. For the last size, twice that size stands in for the
/// next larger size. Adjacent rows with the same choice become one.
pub fn rows(collective: Collective, ranks: usize, sizes: &[(u64, Option<Choice>)]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (at, &(bytes, choice)) in sizes.iter().enumerate() {
        let Some(choice) = choice else { continue };
        let below = at.checked_sub(1).map(|below| sizes[below].0);
        let from_bytes =
            below.map_or_else(|| lower_middle(bytes), |below| middle(below, bytes)) + 1;
        let above = sizes
            .get(at + 1)
            .map_or(bytes.saturating_mul(2), |above| above.0);
        let to_bytes = middle(bytes, above);
        match rows.last_mut() {
            Some(last) if last.choice == choice && last.to_bytes + 1 == from_bytes => {
                last.to_bytes = to_bytes
            }
            _ => rows.push(Row {
                collective,
                ranks,
                from_bytes,
                to_bytes,
                choice,
            }),
        }
    }
    rows
}

/// Returns the rows of the older table `before` that this run does not replace: those for another
/// number of ranks, or for a collective that is not in `measured`. Returns none if the table was
/// not learned on hosts like `host`.
pub fn kept(
    before: Option<&Table>,
    host: &Fingerprint,
    measured: &[Collective],
    ranks: usize,
) -> Vec<Row> {
    let is_here = |fingerprint: &Fingerprint| fingerprint.to_string() == host.to_string();
    let Some(table) = before.filter(|table| table.fingerprint().is_some_and(is_here)) else {
        return Vec::new();
    };
    let is_other = |row: &&Row| row.ranks != ranks || !measured.contains(&row.collective);
    table.rows().iter().filter(is_other).copied().collect()
}

/// Returns the geometric mean, rounded down. If `below` is less than `above`, so is the mean.
fn middle(below: u64, above: u64) -> u64 {
    (u128::from(below) * u128::from(above)).isqrt() as u64
}

/// Returns the geometric mean of a size and its half, rounded down. The mean is less than the size.
fn lower_middle(bytes: u64) -> u64 {
    (u128::from(bytes) * u128::from(bytes) / 2).isqrt() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proto::tuner::table::Table;

    fn choices() -> Vec<Choice> {
        ["ring/ll/1", "ring/ll128/2", "ring/simple/8"]
            .map(|text| text.parse().unwrap())
            .to_vec()
    }

    #[test]
    fn neighbours_that_agree_share_a_row() {
        let [a, b, _] = choices()[..] else {
            panic!("three")
        };
        let sizes = [
            (8192, Some(a)),
            (16384, Some(a)),
            (32768, None),
            (65536, Some(b)),
            (131_072, Some(a)),
        ];
        let rows = rows(Collective::AllReduce, 2, &sizes);
        let text: Vec<String> = rows.iter().map(ToString::to_string).collect();
        assert_eq!(
            text,
            [
                "all_reduce@2:5793-23170=ring/ll/1",
                "all_reduce@2:46341-92681=ring/ll128/2",
                "all_reduce@2:92682-185363=ring/ll/1",
            ]
        );
    }

    #[test]
    fn rows_not_measured_again_are_kept_on_the_same_hosts() {
        let text = "for=A/1x2/3;all_reduce@2:1-9=ring/ll/1;all_reduce@3:1-9=ring/ll/1;broadcast@2:1-9=ring/ll/1";
        let table: Table = text.parse().unwrap();
        let kept = |host: &str| {
            kept(
                Some(&table),
                &host.parse().unwrap(),
                &[Collective::AllReduce],
                2,
            )
        };
        assert_eq!(kept("A/1x2/3"), [table.rows()[0], table.rows()[2]]);
        assert!(
            kept("A/1x2/4").is_empty()
                && super::kept(None, table.fingerprint().unwrap(), &[], 2).is_empty()
        );
        let anywhere: Table = text.replace("A/1x2/3", "*").parse().unwrap();
        assert!(super::kept(Some(&anywhere), table.fingerprint().unwrap(), &[], 2).is_empty());
    }

    #[test]
    fn the_smallest_and_the_largest_sizes_have_rows_too() {
        for bytes in [1, 2, 3, u64::MAX] {
            let rows = rows(Collective::Reduce, 3, &[(bytes, Some(choices()[0]))]);
            assert!(
                rows[0].from_bytes <= bytes && bytes <= rows[0].to_bytes,
                "{bytes}: {rows:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn rows_hold_for_their_sizes_and_for_no_other_measured_one(
            steps in prop::collection::vec((1_u64..100_000, 0_usize..4), 1..40),
        ) {
            let mut bytes = 0;
            let sizes: Vec<(u64, Option<Choice>)> = steps.iter().map(|(step, choice)| {
                bytes += step;
                (bytes, choices().get(*choice).copied())
            }).collect();
            let rows = rows(Collective::AllGather, 2, &sizes);
            // A table refuses overlapping rows.
            let table = Table::new(None, rows.clone());
            prop_assert!(table.is_ok(), "{:?}", table);
            for (bytes, choice) in sizes {
                let holding: Vec<&Row> = rows.iter().filter(|row| (row.from_bytes..=row.to_bytes).contains(&bytes)).collect();
                prop_assert_eq!(holding.iter().map(|row| row.choice).collect::<Vec<_>>(), choice.into_iter().collect::<Vec<_>>());
            }
            for pair in rows.windows(2) {
                prop_assert!(pair[0].choice != pair[1].choice || pair[0].to_bytes + 1 < pair[1].from_bytes, "not merged");
            }
        }
    }
}
