//! Refused host names, and a script in place of ssh: its output, exit status and time limit.

use crate::commands::doctor::hosts::ssh::{Ssh, check_host};
use std::time::{Duration, Instant};

#[test]
fn host_names_with_a_meaning_to_ssh_or_a_shell_are_refused() {
    for host in [
        "spark-2",
        "user@spark-2.local",
        "192.168.1.2",
        "fe80::1%eth0",
    ] {
        assert_eq!(check_host(host), Ok(()), "{host}");
    }
    for host in [
        "",
        "-v",
        "-oProxyCommand=sh",
        "a b",
        "$(id)",
        "a;b",
        "a`b`",
        "a\nb",
        "../x",
    ] {
        assert!(check_host(host).is_err(), "{host}");
    }
    assert!(Ssh::new(" ", "nccl-spark").is_err() && Ssh::new("ssh", "nccl-spark; id").is_err());
    let ssh = Ssh::new("ssh", "/opt/nccl-spark/bin/nccl-spark").unwrap();
    assert!(
        ssh.start("spark-2", &["$(id)"])
            .map(drop)
            .unwrap_err()
            .to_string()
            .contains("cannot be passed")
    );
}

#[test]
fn sshs_output_and_exit_status_are_reported() {
    // The script gets the options, the host and the program as arguments.
    let run = |script: &str| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ssh");
        std::fs::write(&file, format!("{script}\n")).unwrap();
        let mut remote = Ssh::new(&format!("sh {}", file.display()), "nccl-spark")
            .unwrap()
            .start("spark-2", &["doctor"])
            .unwrap();
        (
            remote
                .line(Instant::now() + Duration::from_secs(60))
                .unwrap(),
            remote.exit_error().to_string(),
        )
    };
    assert_eq!(
        run("echo $5 $6 $7"),
        (
            Some("spark-2 nccl-spark doctor".to_owned()),
            "ssh spark-2: exited with status 0".to_owned()
        )
    );
    let refused = run("echo '# remark' >&2; echo 'Permission denied (publickey).' >&2; exit 255");
    assert_eq!(
        refused,
        (
            None,
            "ssh spark-2: exited with status 255: Permission denied (publickey).".to_owned()
        )
    );
    assert_eq!(run("printf 'a\\033[2Jb\\n'").0.as_deref(), Some("a?[2Jb"));
}

#[test]
fn a_silent_host_is_waited_for_until_the_limit() {
    let mut remote = Ssh::new("sh -c cat", "nccl-spark")
        .unwrap()
        .start("spark-2", &[])
        .unwrap();
    let error = remote
        .line(Instant::now() + Duration::from_millis(100))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("spark-2 did not answer by ssh in time"),
        "{error}"
    );
}
