//! A job's counters over the software fabric, read from another process of the same user.
//!
//! The job is a second process of this test program with both ends of a connection, whose messages
//! are compared byte for byte. Each job has its own fabric, so the tests do not disturb each other.

#![allow(unsafe_code)]

#[path = "failover/bed.rs"]
mod bed;
mod common;
#[path = "counters/job.rs"]
mod job;

use bed::{Bed, RAILS, Stream};
use common::comms::{Receiving, Sending};
use common::{LIMIT, until};
use host::counters::layout::{Counters, Direction, FILE_BYTES, FILE_NAME, Record, State};
use job::{Job, sums};
use nccl_net_spark::comm::RecvPart;
use proto::flow::stall::Cause;
use softverbs::control::Action;
use std::io::{BufRead, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn limit_files(bytes: u64) {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: bytes,
    };
    // SAFETY: the call only reads the structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
}

/// Job that the tests start as a process. It sends messages until it reads a command from its
/// standard input. It ends with the command `close`, or when its standard input ends.
#[test]
#[ignore = "a process of the tests below"]
fn the_job() {
    common::captured_log::show();
    let (words, word) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = words.send(line);
        }
    });
    let counters = std::env::var("JOB_COUNTERS").ok();
    let settings: Vec<_> = counters
        .iter()
        .map(|value| ("NCCL_SPARK_COUNTERS", value.as_str()))
        .collect();
    let hosts = [bed::host(0, &settings), bed::host(1, &settings)];
    if let Ok(bytes) = std::env::var("JOB_FILE_BYTES") {
        limit_files(bytes.parse().unwrap());
    }
    let bed = Bed::over(hosts);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 20);
    println!("\nup");
    loop {
        match word.try_recv().as_deref() {
            Ok("pause") => {
                until(|| stream.finish_step(&bed).unwrap().then_some(()));
                println!("\npaused {}", stream.done);
                if word.recv_timeout(LIMIT).as_deref() != Ok("go") {
                    break;
                }
            }
            Ok("close") => break,
            Ok(other) => panic!("unknown command {other:?}"),
            Err(std::sync::mpsc::TryRecvError::Empty) => stream.step(&bed).unwrap(),
            Err(std::sync::mpsc::TryRecvError::Disconnected) => return,
        }
    }
    until(|| stream.finish_step(&bed).unwrap().then_some(()));
    bed.send.close();
    bed.recv.close();
    println!("\nclosed");
}

#[test]
fn a_jobs_counters_match_the_fabrics() {
    let mut job = Job::start(&[]);
    // Waits for so many bytes that the handshake's test writes are below the allowed difference.
    until(|| {
        job.sent_by_fabric()
            .iter()
            .all(|bytes| *bytes > 1_500_000)
            .then_some(())
    });
    job.write_line("pause");
    job.wait_for_line("paused ");
    let records = job.records();
    assert_eq!(
        records.len(),
        4,
        "two rails, sent and received: {records:#?}"
    );
    compare_with_fabric(&records, job.sent_by_fabric());
    records.iter().for_each(check_record);
    job.write_line("go");
    let files = job.files();
    job.write_line("close");
    job.wait_for_line("closed");
    let log = job.end();
    assert_eq!(
        files.len(),
        2,
        "one for each host of the process: {files:?}"
    );
    let closes = lines_from(&log, "connections closed: ");
    assert_eq!(closes, 2, "one for each host: {log:#?}");
    for rail in RAILS {
        assert_eq!(lines_from(&log, &format!("rail {rail}:1: ")), 2, "{log:#?}");
    }
}

/// Compares the records with the number of bytes that the fabric has carried on each rail.
fn compare_with_fabric(records: &[Record], carried: [u64; 2]) {
    for (rail, carried) in RAILS.iter().zip(carried) {
        for direction in [Direction::Send, Direction::Receive] {
            let (bytes, writes) = sums(records, rail, direction);
            let off = (carried as f64 - bytes as f64).abs() / carried as f64;
            assert!(
                carried > 1_000_000 && off < 0.01 && writes > 0,
                "{rail} {direction:?}: {bytes} bytes in {writes} writes counted, {carried} by the fabric"
            );
        }
    }
    let total = |direction| -> u64 {
        RAILS
            .iter()
            .map(|rail| sums(records, rail, direction).0)
            .sum()
    };
    assert_eq!(
        total(Direction::Send),
        total(Direction::Receive),
        "every sent byte has arrived"
    );
}

/// Checks the record of a lane that was never lost.
fn check_record(record: &Record) {
    let counts = record.counts;
    assert!(
        record.state == State::Carries && record.bits_per_s > 0 && record.connection == 1,
        "{record:?}"
    );
    assert_eq!(record.path_mtu_bytes, 4096, "{record:?}");
    assert_eq!(
        (counts.losses, counts.recoveries, counts.lost_ns),
        (0, 0, 0),
        "{record:?}"
    );
    match record.direction {
        Direction::Send => {
            assert!(
                counts.timed_writes > 0 && counts.longest_ns > 0,
                "{record:?}"
            );
            assert!(
                counts.timed_ns >= counts.longest_ns && counts.timed_writes <= counts.writes,
                "{record:?}"
            );
        }
        Direction::Receive => assert_eq!(counts.timed_writes, 0, "{record:?}"),
    }
}

/// Returns the number of lines in a job's log that begin with `start`.
fn lines_from(log: &[String], start: &str) -> usize {
    log.iter().filter(|line| line.starts_with(start)).count()
}

#[test]
fn records_of_closed_connections_are_marked_closed() {
    let bed = Bed::new(&[]);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 20);
    until(|| stream.finish_step(&bed).unwrap().then_some(()));
    let path = bed.hosts[0]
        .process()
        .counting
        .path()
        .expect("a memory file");
    bed.send.close();
    bed.recv.close();
    let records = job::read(Path::new(&path)).expect("counters").records;
    assert!(
        records.len() == 2 && records.iter().all(|record| record.state == State::Closed),
        "{records:#?}"
    );
    assert!(
        records.iter().all(|record| record.counts.bytes > 0),
        "they keep what they counted: {records:#?}"
    );
    // The next connection is dropped without a close. The service thread keeps its lanes and rails,
    // but its records must be marked closed too.
    let again = Bed::over(bed.hosts.clone());
    let states = |path: &str| {
        let records = job::read(Path::new(path)).expect("counters").records;
        records
            .into_iter()
            .filter(|record| record.connection == 2)
            .map(|record| record.state)
            .collect::<Vec<_>>()
    };
    assert_eq!(states(&path), [State::Carries; 2]);
    again.send.skip_close();
    again.recv.skip_close();
    drop(again);
    assert_eq!(states(&path), [State::Closed; 2]);
}

#[test]
fn a_rail_that_leaves_and_returns_is_one_loss_and_one_recovery() {
    let mut job = Job::start(&[]);
    let lost = |records: &[Record], rail: &str| -> Vec<(State, u64, u64)> {
        let of_rail = records
            .iter()
            .filter(|record| record.rail == format!("{rail}:1"));
        of_rail
            .map(|record| (record.state, record.counts.losses, record.counts.recoveries))
            .collect()
    };
    job.control(RAILS[0], Action::Down);
    job.wait_for("both ends lose the rail", |records| {
        lost(records, RAILS[0]) == [(State::Lost, 1, 0); 2]
    });
    std::thread::sleep(Duration::from_millis(300));
    job.control(RAILS[0], Action::Up);
    job.wait_for("both ends have it back", |records| {
        lost(records, RAILS[0]) == [(State::Carries, 1, 1); 2]
    });
    let before = job.records();
    job.wait_for("the rail carries again", |records| {
        let bytes = |records: &[Record]| sums(records, RAILS[0], Direction::Send).0;
        bytes(records) > bytes(&before)
    });
    let records = job.records();
    assert_eq!(
        lost(&records, RAILS[1]),
        [(State::Carries, 0, 0); 2],
        "{records:#?}"
    );
    for record in records.iter().filter(|record| record.counts.losses > 0) {
        let lost_for = Duration::from_nanos(record.counts.lost_ns);
        assert!(
            lost_for >= Duration::from_millis(300) && lost_for < LIMIT,
            "{record:?}"
        );
    }
    job.write_line("close");
    job.wait_for_line("closed");
    let log = job.end();
    let losses = log
        .iter()
        .filter(|line| line.contains("; lost 1 time, recovered 1 time, unusable for "))
        .count();
    assert_eq!(losses, 2, "{log:#?}");
}

#[test]
fn foreign_writes_to_the_counters_change_nothing() {
    let job = Job::start(&[]);
    let mut noise = vec![0_u8; FILE_BYTES];
    let files: Vec<_> = job
        .files()
        .iter()
        .map(|path| {
            std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(path)
                .unwrap()
        })
        .collect();
    assert_eq!(files.len(), 2);
    for file in &files {
        for length in [0, FILE_BYTES as u64 / 2, FILE_BYTES as u64 * 2] {
            let refused = file
                .set_len(length)
                .expect_err("it is sealed")
                .raw_os_error();
            assert_eq!(refused, Some(libc::EPERM), "to {length} bytes");
        }
    }
    let begun = Instant::now();
    for round in 0.. {
        // Words of all ones overflow in every addition.
        match round % 3 {
            0 => noise.fill(0xff),
            1 => noise.fill(0),
            _ => common::fill(&mut noise, round),
        }
        files
            .iter()
            .for_each(|file| assert_eq!(file.write_at(&noise, 0).unwrap(), FILE_BYTES));
        match round {
            20 => job.control(RAILS[0], Action::Down),
            60 => job.control(RAILS[0], Action::Up),
            _ => {}
        }
        std::thread::sleep(Duration::from_millis(5));
        if round > 100 && begun.elapsed() > Duration::from_secs(2) {
            break;
        }
    }
    noise.fill(0xff);
    files
        .iter()
        .for_each(|file| assert_eq!(file.write_at(&noise, 0).unwrap(), FILE_BYTES));
    job.finish(20);
}

#[test]
#[ignore = "a process of the tests below"]
fn the_reader() {
    let path = PathBuf::from(std::env::var("READER_PATH").unwrap());
    println!("\nreading");
    while let Some(counters) = job::read(&path) {
        assert!(counters.passed_over <= 2, "{counters:?}");
    }
}

#[test]
fn readers_that_come_leave_or_are_killed_do_not_affect_the_job() {
    let job = Job::start(&[]);
    let path = job.files().remove(0);
    for _ in 0..10 {
        let mut reader = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_reader", "--ignored", "--nocapture"])
            .env("READER_PATH", &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = job::lines(reader.stdout.take().unwrap());
        job::wait_for_line(&lines, "reading");
        std::thread::sleep(Duration::from_millis(20));
        reader.kill().unwrap();
        assert!(
            !reader.wait().unwrap().success(),
            "the reader was killed while reading"
        );
    }
    for number in 0..1000 {
        let read = Command::new("cat")
            .arg(&path)
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(
            read.status.success() && read.stdout.len() == FILE_BYTES,
            "reader {number}: {}",
            read.stdout.len()
        );
        let counters = Counters::parse(&read.stdout, &read.stdout).unwrap();
        assert_eq!(
            (counters.process_id, counters.records.len()),
            (u64::from(job.id()), 2),
            "reader {number}"
        );
    }
    job.finish(20);
}

#[test]
fn a_job_that_is_killed_leaves_nothing_behind() {
    let mut job = Job::start(&[]);
    let process = Path::new("/proc").join(job.id().to_string());
    let maps = std::fs::read_to_string(process.join("maps")).unwrap();
    let name_in_maps = format!("/memfd:{FILE_NAME} (deleted)");
    let mapped: Vec<_> = maps
        .lines()
        .filter(|line| line.contains(FILE_NAME))
        .collect();
    assert!(
        mapped.len() == 2 && mapped.iter().all(|line| line.ends_with(&name_in_maps)),
        "{mapped:#?}"
    );
    let files = job.files();
    job.kill();
    until(|| files.iter().all(|file| !file.exists()).then_some(()));
    for folder in ["/dev/shm", "/tmp", "/run"]
        .map(Path::new)
        .iter()
        .chain([&std::env::temp_dir().as_path()])
    {
        let left = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name());
        let left: Vec<_> = left
            .filter(|name| name.to_string_lossy().contains(FILE_NAME))
            .collect();
        assert!(left.is_empty(), "{}: {left:?}", folder.display());
    }
}

#[test]
fn a_job_without_counters_passes() {
    let bytes = (FILE_BYTES - 1).to_string();
    let why = "cannot create the counters' memory file (";
    for (variable, value, lines) in [
        ("JOB_FILE_BYTES", bytes.as_str(), 2),
        ("JOB_COUNTERS", "0", 0),
    ] {
        let job = Job::start(&[(variable, value)]);
        assert_eq!(job.files(), Vec::<PathBuf>::new(), "{variable}");
        let log = job.finish(19);
        assert_eq!(lines_from(&log, why), lines, "{variable}: {log:#?}");
        assert_eq!(lines_from(&log, "connections closed: "), 2, "{log:#?}");
    }
}

#[test]
fn without_a_free_descriptor_a_connection_keeps_its_own_counters() {
    let log = common::captured_log::CapturedLog::default();
    let counting = host::counters::Counting::new(true);
    let lane = || host::counters::CountedLane {
        rail: "a:1".to_owned(),
        peer_rail: "b:1".to_owned(),
        bits_per_s: 1,
        path_mtu_bytes: 4096,
        state: State::Carries,
    };
    let connection = log.capture(|| {
        common::without_files(|| counting.connection(Direction::Send, "b", &[lane(), lane()]))
    });
    let lines = log.take();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(
        lines[0]
            .1
            .starts_with("cannot create the counters' memory file ("),
        "{lines:?}"
    );
    use host::counters::layout::Word;
    connection.record(1).add(Word::Bytes, 7);
    assert_eq!(
        (
            connection.record(1).read(Word::Bytes),
            connection.record(0).read(Word::Bytes)
        ),
        (7, 0)
    );
    assert_eq!(counting.path(), None);
}

#[test]
fn a_waiting_request_is_a_stall_of_its_connection() {
    let bed = Bed::new(&[("NCCL_SPARK_STALL_WARN_S", "1")]);
    let mut stream = Stream::new(&bed);
    stream.run(&bed, 20);
    until(|| stream.finish_step(&bed).unwrap().then_some(()));
    let path = bed.hosts[1]
        .process()
        .counting
        .path()
        .expect("a memory file");
    let causes = || -> Vec<Option<Cause>> {
        let records = job::read(Path::new(&path)).expect("counters").records;
        let cause = |(number, _): (u8, u64)| Cause::of_number(number.into()).expect("a cause");
        records
            .iter()
            .map(|record| record.stall.map(cause))
            .collect()
    };
    let stalls = || -> Vec<(u64, u64)> {
        let records = job::read(Path::new(&path)).expect("counters").records;
        records
            .iter()
            .map(|record| (record.counts.stalls, record.counts.stalled_ns))
            .collect()
    };
    assert_eq!(stalls(), [(0, 0); 2]);
    let part = RecvPart {
        addr: stream.to.as_ptr() as u64,
        bytes: 8,
        tag: 9,
        memory: &stream.into,
    };
    let receive = until(|| bed.recv.irecv(&[part], false).unwrap());
    let wait = |wanted: u64| {
        until(|| {
            assert!(!bed.recv.test(receive, |_, _| {}).unwrap());
            Some(stalls()).filter(|stalls| stalls[0].1 >= wanted)
        })
    };
    assert_eq!(
        wait(1_000_000_000)[0].0,
        1,
        "once it has lasted for a second"
    );
    let [(count, first), (of_second, _)] = wait(1_300_000_000)[..] else {
        panic!("two lanes")
    };
    assert_eq!(
        (count, of_second),
        (1, 0),
        "one stall, counted with the first lane"
    );
    assert!(first < LIMIT.as_nanos() as u64);
    // While the stall lasts, the first lane's record has the cause that follows from the peer's
    // answer.
    until(|| {
        assert!(!bed.recv.test(receive, |_, _| {}).unwrap());
        (causes() == [Some(Cause::NotPosted), None]).then_some(())
    });
    let send = until(|| {
        bed.send
            .isend(stream.from.as_ptr() as u64, 8, 9, &stream.out)
            .unwrap()
    });
    until(|| bed.send.test(send).unwrap());
    until(|| bed.recv.test(receive, |_, _| {}).unwrap().then_some(()));
    until(|| (causes() == [None, None]).then_some(()));
    let after = stalls();
    stream.run(&bed, 20);
    assert_eq!(stalls(), after, "moving requests are not stalls");
    std::io::stdout().flush().unwrap();
}
