//! Tests of `spark-lab communicators`: all scenarios on a machine with a GPU, the errors on others.

mod common;

use common::{Fakes, Said, say, spark_lab};
use std::path::Path;

#[test]
fn without_a_gpu_one_error_says_so_before_anything_starts() {
    if Path::new("/dev/nvidia0").exists() {
        let said = say(&["communicators", "--fabric", "soft", "--profile", "unpaced", "--count", "20"]);
        assert_eq!(said.status, Some(0), "{said:?}");
        return;
    }
    let said = say(&["communicators", "several", "lost", "--fabric", "soft"]);
    assert_eq!((said.status, said.out.as_str(), said.err.lines().count()), (Some(1), "", 1), "{said:?}");
    assert!(said.err.starts_with("spark-lab: communicators needs an NVIDIA GPU"), "{said:?}");
}

#[test]
fn a_driver_without_a_gpu_is_distinguished_from_no_driver() {
    let fake = Fakes::new();
    let mut command = spark_lab();
    command.args(["communicators", "--fabric", "verbs", "--plugin"]).arg(fake.plugin.library());
    let said: Said = command.env("LD_LIBRARY_PATH", fake.folder()).env("FAKE_GPUS", "0").output().unwrap().into();
    assert_eq!((said.status, said.out.as_str(), said.err.lines().count()), (Some(1), "", 1), "{said:?}");
    assert!(said.err.contains("needs an NVIDIA GPU and its driver: cuInit returned"), "{said:?}");
}

#[test]
fn a_wrong_command_line_is_reported() {
    let said = say(&["communicators", "sever"]);
    assert!(said.status == Some(2) && said.err.contains("several"), "{said:?}");
    let said = say(&["communicators", "-r", "1"]);
    assert!(said.status == Some(2) && said.err.contains("must be 2 to 16"), "{said:?}");
}
