//! Hosts that refuse to connect by TCP, with their errors, and hosts that connect by TCP over Wi-Fi
//! or while other clients crowd the port.

use crate::bed::{Ends, FAR, NEAR, RING_TCP, connect, host, is_by_tcp};
use crate::common::captured_log::CapturedLog;
use crate::common::{self, turn, until};
use softverbs::control::{Action, control};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn without_the_setting_the_error_names_it_and_the_rails_of_both_sides() {
    let error = connect(&host(NEAR, &[]), &host(FAR, &[]))
        .err()
        .unwrap()
        .to_string();
    for words in [
        "no rail in common",
        NEAR,
        FAR,
        "NCCL_SPARK_RING_TCP=1 on every node",
        "in one subnet",
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn the_setting_on_one_side_alone_is_refused_whatever_the_rails() {
    for (devices, settings) in [
        ([NEAR, FAR], [&[RING_TCP][..], &[]]),
        ([NEAR, FAR], [&[], &[RING_TCP]]),
        ([NEAR, NEAR], [&[RING_TCP], &[]]),
    ] {
        let hosts = [host(devices[0], settings[0]), host(devices[1], settings[1])];
        let error = connect(&hosts[0], &hosts[1]).err().unwrap().to_string();
        assert!(error.contains("NCCL_SPARK_RING_TCP=1 is set on"), "{error}");
        assert!(error.contains("set it on every node or on none"), "{error}");
    }
}

#[test]
fn rails_in_common_are_used_and_rails_that_do_not_carry_fail() {
    let _turn = turn();
    let a = host(NEAR, &[RING_TCP]);
    let b = host(&format!("{NEAR},{FAR}"), &[RING_TCP]);
    let ends = connect(&a, &b).unwrap();
    assert!(!is_by_tcp(&ends));
    ends.check(1);
    // The rails pair, but their port is down, so they carry nothing.
    let dir = std::env::var("SOFTVERBS_DIR").unwrap();
    let fabric = std::env::var("SOFTVERBS_FABRIC").unwrap();
    let set = |action| control(Path::new(&dir), &fabric, None, NEAR, action).unwrap();
    let quick = [
        RING_TCP,
        ("NCCL_SPARK_PROBE_TIMEOUT_MS", "200"),
        ("NCCL_SPARK_CONNECT_TIMEOUT_S", "2"),
    ];
    let c = host(NEAR, &quick);
    let d = host(NEAR, &quick);
    set(Action::Down);
    until(|| (!common::is_up(&c.process().rails[0])).then_some(()));
    let error = connect(&c, &d).err().map(|error| error.to_string());
    set(Action::Up);
    let error = error.unwrap();
    assert!(
        error.contains("no usable rail") || error.contains("before any rail worked"),
        "{error}"
    );
}

#[test]
fn wifi_is_a_warning() {
    let sysfs = common::test_rails()
        .1
        .into_iter()
        .find(|(name, _)| name == "NCCL_SPARK_SYSFS")
        .unwrap()
        .1;
    let own = tempfile::tempdir().unwrap();
    let radio = "class/net/lo/phy80211";
    for entry in std::fs::read_dir(&sysfs)
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name() != "class")
    {
        std::os::unix::fs::symlink(entry.path(), own.path().join(entry.file_name())).unwrap();
    }
    for class in std::fs::read_dir(Path::new(&sysfs).join("class"))
        .unwrap()
        .flatten()
    {
        let to = own.path().join("class").join(class.file_name());
        std::fs::create_dir_all(&to).unwrap();
        for entry in std::fs::read_dir(class.path()).unwrap().flatten() {
            std::os::unix::fs::symlink(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    std::fs::create_dir_all(own.path().join(radio)).unwrap();
    let settings = [RING_TCP, ("NCCL_SPARK_SYSFS", own.path().to_str().unwrap())];
    let a = host(NEAR, &settings);
    let b = host(FAR, &settings);
    let log = CapturedLog::default();
    log.capture(|| (connect(&a, &b).unwrap(), connect(&a, &b).unwrap()));
    let lines = log.take();
    let warnings: Vec<_> = lines
        .iter()
        .filter(|(_, line)| line.contains("over lo, which is Wi-Fi"))
        .collect();
    // Both ends are in this process, and each logs the warning once.
    assert!(
        warnings.len() == 2
            && warnings
                .iter()
                .all(|(level, _)| *level == tracing::Level::WARN),
        "{lines:?}"
    );
}

#[test]
fn streams_connect_under_load_and_only_for_their_peer() {
    let a = host(NEAR, &[RING_TCP]);
    let b = host(FAR, &[RING_TCP]);
    for _ in 0..3 {
        let (listener, mut handle) = b.listen().unwrap();
        let address = proto::wire::handle::Handle::decode(&handle)
            .unwrap()
            .address;
        let is_over = AtomicBool::new(false);
        let ends = std::thread::scope(|scope| {
            scope.spawn(|| {
                // Silent clients crowd the port, and push out clients that have not been read yet.
                let mut crowd = std::collections::VecDeque::new();
                while !is_over.load(Ordering::Relaxed) {
                    crowd.extend(TcpStream::connect(address));
                    if crowd.len() > 300 {
                        crowd.pop_front();
                    }
                }
            });
            let mut send = None;
            let mut recv = None;
            until(|| {
                send = send
                    .take()
                    .or_else(|| a.connect(&mut handle, None).unwrap());
                recv = recv.take().or_else(|| listener.accept().unwrap());
                (send.is_some() && recv.is_some()).then_some(())
            });
            is_over.store(true, Ordering::Relaxed);
            Ends {
                send: send.unwrap(),
                recv: recv.unwrap(),
            }
        });
        ends.check(3);
    }
}
