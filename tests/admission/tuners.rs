//! Two hosts with different tuners: their collectives would hang, so the handshake refuses them.

use crate::attack::{Listener, host_with};
use crate::common::turn;

const TABLE: &str = "for=*;all_reduce@2:1000-1999=ring/ll/2";
const OTHER: &str = "for=*;all_reduce@2:1000-1999=ring/ll/4";

#[test]
fn hosts_whose_tuners_decide_differently_refuse_each_other_and_say_why() {
    let _turn = turn();
    let settings = [
        vec![("NCCL_SPARK_TUNER", "off")],
        vec![
            ("NCCL_SPARK_TUNER", "on"),
            ("NCCL_SPARK_TUNER_TABLE", TABLE),
        ],
        vec![
            ("NCCL_SPARK_TUNER", "on"),
            ("NCCL_SPARK_TUNER_TABLE", OTHER),
        ],
        vec![
            ("NCCL_SPARK_TUNER", "on"),
            ("NCCL_SPARK_TUNER_TABLE", TABLE),
            ("NCCL_SPARK_LL128", "0"),
        ],
    ];
    for (first, one) in settings.iter().enumerate() {
        for (second, other) in settings.iter().enumerate() {
            let hosts = [host_with(0, one), host_with(1, other)];
            let listener = Listener::open(&hosts[1]);
            match listener.try_by(&hosts[0], listener.handle) {
                Ok(met) => {
                    assert_eq!(
                        first, second,
                        "two hosts with different tuners were connected"
                    );
                    met.check(first as u64);
                }
                Err(error) => {
                    let text = error.to_string();
                    assert_ne!(first, second, "{text}");
                    for words in [
                        "so collectives would hang",
                        "NCCL_SPARK_TUNER_TABLE",
                        "NCCL_SPARK_TUNER=off on every node",
                    ] {
                        assert!(text.contains(words), "{text}");
                    }
                    assert!(!text.contains("  "), "{text}");
                    let off = [first, second].contains(&0);
                    assert_eq!(text.contains("(off, GPU "), off, "{text}");
                    assert_eq!(text.matches(", GPU ").count(), 2, "{text}");
                }
            }
        }
    }
}
