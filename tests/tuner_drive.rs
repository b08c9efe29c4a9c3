//! `tests/c/tuner.c` calls the built tuner through each version of its interface, as NCCL does.

mod common;

const VERSIONS: [u8; 4] = [4, 5, 6, 7];
const TABLE: &str = "for=*;all_reduce@2:1000-1999=ring/ll/2";

#[test]
fn without_the_network_every_call_succeeds_and_touches_nothing() {
    for version in VERSIONS {
        let settings = [(
            "NCCL_IBVERBS_LIB".to_owned(),
            "libibverbs-not-there.so.1".to_owned(),
        )];
        let log = drive(version, "without-network", &settings);
        // `[3]` is NCCL's log level INFO. In this scene only the tuner has installed the logger.
        let line = "NET/Spark: tuner: not used for a communicator of 2 ranks on 2 nodes: this network is not initialised";
        assert_eq!(count(&log, line), 2 + 1, "v{version}: {log}");
        assert!(
            log.lines()
                .any(|one| one.starts_with("[3] ") && one.ends_with(line)),
            "v{version}: {log}"
        );
    }
}

#[test]
fn a_row_of_the_table_decides_for_communicators_over_this_network() {
    let (_, settings) = common::test_rails();
    let tuner = [
        ("NCCL_SPARK_TUNER", "on"),
        ("NCCL_SPARK_TUNER_TABLE", TABLE),
        ("NCCL_SOCKET_IFNAME", "lo"),
    ];
    let tuner = tuner.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let settings: Vec<_> = settings.into_iter().chain(tuner).collect();
    for version in VERSIONS {
        let log = drive(version, "with-network", &settings);
        assert_eq!(
            count(&log, "tuner: in use for a communicator of 2 ranks"),
            4,
            "v{version}: {log}"
        );
        for (line, times) in [
            ("of 2 ranks on 1 node: the communicator is on one node", 1),
            (
                "of 4 ranks on 2 nodes: the communicator has more than one rank on a node",
                1,
            ),
            ("of 1 rank on 1 node: the communicator is on one node", 1),
            ("of 3 ranks on 3 nodes: the table has no row for 3 ranks", 1),
            (
                "of 2 ranks on 2 nodes: the communicator uses another network",
                if version == 4 { 0 } else { 3 },
            ),
        ] {
            assert_eq!(count(&log, line), times, "v{version}: {line}: {log}");
        }
        for misuse in [
            "has 6 algorithms and 3 protocols",
            "collCostTable is NULL",
            "context is an unknown object",
        ] {
            assert!(log.contains(misuse), "v{version}: {misuse}: {log}");
        }
        // The forked child writes its only line directly, not through NCCL's logger.
        assert!(
            log.lines()
                .any(|one| one.starts_with("NET/Spark: WARN tuner init: this process was forked")),
            "{log}"
        );
    }
}

fn count(log: &str, line: &str) -> usize {
    log.lines().filter(|one| one.contains(line)).count()
}

fn drive(version: u8, scene: &str, settings: &[(String, String)]) -> String {
    let program = common::c_program("tuner", &["tuner.c", "log.c"]);
    let run = common::run_c_program(
        &program,
        &[version.to_string().as_str(), scene],
        settings.iter().cloned(),
    );
    assert!(run.success, "v{version} {scene}: {}", run.text);
    run.text
}
